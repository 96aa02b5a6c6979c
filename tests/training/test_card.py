"""The card of a drafter: figures of the run, and of the weights that were kept."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from specdec_core.models.checkpoints import tiny_llama
from specdec_core.models.eagle_checkpoint import eagle_fingerprint, tiny_eagle
from specdec_core.training.card import write_card
from specdec_core.training.corpus import Corpus
from specdec_core.training.distill import Trained
from tests.training.test_eagle_batches import random_corpus

TARGET = tiny_llama(1, vocabulary=23)
DRAFTER = replace(
    tiny_eagle(1, TARGET, (0, 2), vocabulary=11),
    card={"plan": {"rows": 6, "unroll": 4, "first_alone": 0.25, "steps": 4000, "seed": 77}},
)


def check(step: int, tau: float, alpha: list[float]) -> dict[str, Any]:
    return {"step": step, "epoch": step / 500, "seconds": 3.6 * step, "greedy_tau": tau, "greedy_alpha": alpha}


CURVE = [
    check(0, 1.5, [0.1, 0.2]),
    check(1000, 2.25, [0.61, 0.52]),
    check(2000, 2.25, [0.6, 0.5]),
    check(3000, 2.0, [0, 0]),
]
SERVED = [
    {"arm": arm, "K": 4, "temperature": t, "split": split, "repetitive": loops, "tokens": tokens, "target_passes": 100}
    for arm, t, split, loops, tokens in [
        ("chain", 0.0, "report", False, 231), ("chain", 0.0, "report", True, 431), ("chain", 0.0, "tuning", False, 999),
        ("tree", 1.0, "report", False, 187),
    ]
]  # fmt: skip


@pytest.fixture
def corpus() -> Corpus:
    counts = {"all": {"rows": 3210, "new_tokens": 456789}, "greedy": {"rows": 1501}, "held_out": {"rows": 402}}
    return replace(random_corpus([(2, 3)]), origin={"counts": counts})


@pytest.fixture
def text(tmp_path, corpus) -> str:
    path = write_card(tmp_path / "eagle-x.md", Trained(DRAFTER, CURVE), SERVED, corpus, "python -m it")
    assert path == tmp_path / "eagle-x.md"
    return path.read_text(encoding="utf-8")


def test_it_says_what_the_drafter_is(text):
    parameters = sum(values.numel() for values in DRAFTER.weights.values())
    assert text.startswith("# EAGLE-style drafter for tiny-1\n")
    assert f"{parameters:,} trained parameters" in text and "Features of the target's layers 0, 2." in text
    assert f"11 draft tokens ({11 * 48} more)" in text
    assert f"eagle-x.safetensors, float16, weights {eagle_fingerprint(DRAFTER)[:12]}" in text
    assert f"tiny-1, weights {TARGET.fingerprint[:12]}" in text


def test_it_says_what_it_learned_from_and_how(text):
    assert "3,210 answers with 456,789 new tokens, 1,501 greedy" in text and "402 answers held out" in text
    assert (
        "3,000 batches of 6 answers, 1,000 of them of the first step alone, the others of up to 4; 6.0 epochs" in text
    )
    assert "3.00 hours, seed 77" in text
    assert "`python -m it`" in text


def test_figures_of_held_out_text_are_of_the_weights_that_were_kept(text):
    # The later one of equally good checks, as training keeps it.
    assert "those of batch 2,000" in text and "τ 2.25 greedy, α by position 0.60, 0.50." in text


def test_how_it_serves_is_told_of_report_prompts_alone(text):
    assert "| chain, K = 4 | 0 | 2.31 | 3.31 |" in text and "| tree, K = 4 | 1 | 1.87 | 1.87 |" in text
    assert text.count("| chain") == 1
