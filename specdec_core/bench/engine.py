"""What must be reached by the compiled engine: ratios in one interleaved run, with the thresholds set beforehand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from specdec_core.decode import decode
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.evidence.schemas import Schema
from specdec_core.evidence.sweep_records import pair_up
from specdec_core.measure.clock import Arm, interleaved
from specdec_core.measure.cost_model import DraftCost
from specdec_core.measure.curves import TimeCurve, verification_arm
from specdec_core.measure.sweep import Case, Configuration, Costs, sweep
from specdec_core.models.checkpoints import Checkpoint
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.statistics.intervals import Interval, ratio_interval
from specdec_core.targets.transformer import Transformer

ENGINE = Schema(
    "engine",
    1,
    {
        "what": str,
        "ratio": float,
        "low": float,  # ends of its interval
        "high": float,
        "bound": str,  # 'at most' or 'at least'
        "threshold": float,
        "reached": bool,
        "samples": int,
    },
)
"""One line per demand on the engine."""

PREFILL, TOKENS, BATCH = 512, 24, 8
LOOKUP_K = 7
"""A pass over eight nodes costs the compiled engine little more than one over four, and a look-up costs nothing."""


def transformers_arm(checkpoint: Checkpoint, prompt: np.ndarray, tokens: int) -> Arm:
    """Greedy `generate` of transformers: same weights, dtype and threads, exactly `tokens` new tokens."""
    from transformers import AutoModelForCausalLM
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # it would be printed into notebooks

    if checkpoint.folder is None:
        raise ValueError(f"{checkpoint.name} was made in memory: transformers needs a folder")
    model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype=torch.float32).eval()
    ids = torch.as_tensor(prompt)[None]
    how = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False}

    def arm() -> None:
        with torch.inference_mode():
            model.generate(ids, attention_mask=torch.ones_like(ids), **how)

    return arm


def decode_arm(target: Transformer, prompts: np.ndarray, tokens: int) -> Arm:
    """Our loop without a drafter: exactly `tokens` new tokens for every row of prompts `[B, P]`."""
    requests = [Request(tuple(row.tolist()), Options(max_new_tokens=tokens)) for row in prompts]
    return lambda: list(decode(target, requests))


def prefill_arm(target: Transformer, tokens: np.ndarray) -> Arm:
    """Prefill of a prompt `[P + 1]`: P cached entries, no logits."""

    def arm() -> None:
        state = target.new_state(1, len(tokens))
        target.prefill(state, np.array([0]), [tokens])
        target.synchronise()

    return arm


def measure_engine(
    checkpoint: Checkpoint, target: Transformer, torch_target: Transformer, repeats: int = 7, seed: int = 0
) -> list[dict[str, Any]]:
    """Rows of ENGINE: decoding against transformers, prefill against torch, batch 8 against batch 1."""
    random = np.random.default_rng(seed)
    prompt = random.integers(0, target.vocabulary, PREFILL + 1)
    batch = random.integers(0, target.vocabulary, (BATCH, 65))
    one, many = (verification_arm_at(target, batch[:rows], 64) for rows in (1, BATCH))
    arms: dict[str, Arm] = {
        "ours": decode_arm(target, batch[:1], TOKENS),
        "transformers": transformers_arm(checkpoint, batch[0], TOKENS),
        "prefill": prefill_arm(target, prompt),
        "torch prefill": prefill_arm(torch_target, prompt),
        "batch 1": one,
        "batch 8": many,
    }
    seconds = interleaved(arms, repeats, seed=seed)
    return [
        _row("AR throughput over transformers generate", seconds["transformers"], seconds["ours"], "at least", 2.8),
        _row(f"prefill of {PREFILL} over torch's, time", seconds["prefill"], seconds["torch prefill"], "at most", 1.0),
        _row("AR throughput, batch 8 over batch 1", BATCH * seconds["batch 1"], seconds["batch 8"], "at least", 4.0),
    ]


def verification_arm_at(target: Transformer, tokens: np.ndarray, context: int) -> Arm:
    """One autoregressive step of every row of tokens `[B, context + 1]` on a warm cache."""
    state = target.new_state(len(tokens), context + 1)
    target.prefill(state, np.arange(len(tokens)), list(tokens[:, : context + 1]))
    return verification_arm(target, state, tokens[:, context : context + 1])


FLOORS = {1: 1.25, 6: 1.7, 8: 2.0, 16: 2.8}
"""Demands on t(n), in units of weight bytes ÷ read bandwidth."""


def floor_rows(
    seconds: Mapping[tuple[int, int], np.ndarray], read_seconds: np.ndarray, ceiling: Mapping[str, Any]
) -> list[dict[str, Any]]:
    """Rows of ENGINE: t(n) against the memory floor, `read_seconds` from the same repeats of the same run."""
    from specdec_core.measure.ceilings import READ_BYTES

    floor = read_seconds * ceiling["weight_bytes"] / READ_BYTES
    return [
        _row(f"t({width}) over the memory floor, context {context}", times, floor, "at most", FLOORS[width])
        for (context, width), times in sorted(seconds.items())
        if width in FLOORS
    ]


def lookup_rows(
    target: Transformer, curve: TimeCurve, cases: Sequence[Case], options: Options, k: int = LOOKUP_K
) -> list[dict[str, Any]]:
    """Rows of ENGINE: n-gram look-up over AR on these prompts, and what a round costs outside of its target pass."""
    configuration = Configuration("look-up", "numba", target.name, "n-gram", target, NGramDrafter())
    costs = Costs(curve, DraftCost(), 0.0)
    rows = list(sweep([configuration], {configuration.name: costs}, cases, [k], options))
    (pairs,) = pair_up(rows).values()
    speedup = pairs.speedup()
    outside = [row["draft_seconds"] + row["overhead_seconds"] for row in rows if row["arm"] == "sd"]
    passes = [row["target_passes"] * curve.at(1, curve.contexts[0]) for row in rows if row["arm"] == "sd"]
    return [
        _demand(f"n-gram SD at K = {k} over AR, code prompts", speedup, "at least", 1.0, speedup.low > 1),
        _row("draft and overhead of a round over t(1)", np.array(outside), np.array(passes), "at most", 0.05),
    ]


def _row(what: str, numerator: np.ndarray, denominator: np.ndarray, bound: str, threshold: float) -> dict[str, Any]:
    ratio = ratio_interval(numerator, denominator)
    reached = ratio.estimate <= threshold if bound == "at most" else ratio.estimate >= threshold
    return _demand(what, ratio, bound, threshold, reached)


def _demand(what: str, ratio: Interval, bound: str, threshold: float, reached: bool) -> dict[str, Any]:
    return {
        "what": what,
        "ratio": ratio.estimate,
        "low": ratio.low,
        "high": ratio.high,
        "bound": bound,
        "threshold": threshold,
        "reached": bool(reached),
        "samples": ratio.n,
    }
