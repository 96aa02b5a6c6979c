"""The card beside a trained drafter: what it is, what it learned from, and how good it is on text that it never saw."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path

from specdec_core.cache import atomic_write
from specdec_core.evidence.training_records import Row, best_check, by_arm, without_repetition
from specdec_core.models.eagle_checkpoint import eagle_fingerprint
from specdec_core.training.acceptance import tau
from specdec_core.training.corpus import Corpus
from specdec_core.training.distill import Trained


def write_card(path: Path, trained: Trained, served: Sequence[Row], corpus: Corpus, command: str) -> Path:
    """Write the card (Markdown). Every figure in it comes from the run."""
    drafter, curve = trained.drafter, trained.curve
    config, plan = drafter.config, drafter.card["plan"]
    best = best_check(curve)
    alone = min(math.ceil(plan["first_alone"] * plan["steps"]), curve[-1]["step"])
    counts = corpus.origin["counts"]
    parameters = sum(tensor.numel() for tensor in drafter.weights.values())
    head = config.vocabulary * config.hidden_size
    alpha = ", ".join(f"{value:.2f}" for value in best["greedy_alpha"])
    lines = [
        f"# EAGLE-style drafter for {drafter.target}",
        "",
        "Two decoder layers, of which a step runs one: the first reads what the target committed, the other what was "
        f"drafted since (hidden size {config.hidden_size}, {config.heads} heads, {config.kv_heads} of keys and values, "
        f"MLP {config.intermediate_size}). Features of the target's layers "
        f"{', '.join(map(str, drafter.feature_layers))}. {parameters:,} trained parameters; the target's embedding and "
        f"its head for {config.vocabulary:,} draft tokens ({head:,} more), are used as they are.",
        "",
        f"- **File**: {path.with_suffix('.safetensors').name}, float16, weights {eagle_fingerprint(drafter)[:12]}",
        f"- **Target**: {drafter.target}, weights {drafter.target_fingerprint[:12]}; no other is accepted",
        f"- **Data**: the target's own text, {counts['all']['rows']:,} answers with "
        f"{counts['all']['new_tokens']:,} new tokens, {counts['greedy']['rows']:,} greedy, the others at T = 1; "
        f"{counts['held_out']['rows']:,} answers held out, whole templates among them; none of data/prompts",
        f"- **Training**: {curve[-1]['step']:,} batches of {plan['rows']} answers, {alone:,} of them of the "
        f"first step alone, the others of up to {plan['unroll']}; {curve[-1]['epoch']:.1f} epochs, "
        f"{curve[-1]['seconds'] / 3600:.2f} hours, seed {plan['seed']}; the weights are those of batch "
        f"{best['step']:,}, the best on held-out answers",
        f"- **Command**: `{command}`",
        "",
        f"Held-out answers of the corpus, chains of {plan['unroll']}, worked out in training's own pass: τ "
        f"{best['greedy_tau']:.2f} greedy, α by position {alpha}.",
        "",
        "Served on data/prompts (report prompts; tokens a target pass):",
        "",
        "| draft | T | τ without repetitive answers | τ of all |",
        "|---|---|---|---|",
        *map(_line, by_arm(served).values()),
        "",
    ]
    with atomic_write(path) as temporary:
        temporary.write_text("\n".join(lines), encoding="utf-8")
    return path


def _line(rows: Sequence[Row]) -> str:
    """The table's line of one arm and temperature; NaN where every answer repeats itself."""
    first, clean = rows[0], without_repetition(rows)
    clean_tau = tau(clean) if clean else math.nan
    return f"| {first['arm']}, K = {first['K']} | {first['temperature']:g} | {clean_tau:.2f} | {tau(rows):.2f} |"
