"""The registry is complete, and every entry says what a reader needs."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from specdec_core.evidence.claims import CLAIMS, NOTEBOOK_MINUTES, claim
from specdec_core.evidence.verdicts import EVIDENCE_KINDS

REGISTERED = {"L": 6, "B": 4, "S": 6, "R": 6, "D": 6, "G": 7}
NOTEBOOK_OF = {"L": "01", "B": "02", "S": "03", "R": "04", "D": "05", "G": "06"}


def test_every_claim_is_registered_once():
    assert Counter(one.id[0] for one in CLAIMS) == REGISTERED
    assert len({one.id for one in CLAIMS}) == len(CLAIMS)
    assert all(claim(one.id) is one for one in CLAIMS)


@pytest.mark.parametrize("one", CLAIMS, ids=lambda one: one.id)
def test_an_entry_is_complete(one):
    for text in (one.statement, one.paper, one.ours, one.estimator, one.falsified_by):
        assert text and text == text.strip() and "  " not in text
    assert one.evidence and set(one.evidence) <= set(EVIDENCE_KINDS)
    assert one.notebook in NOTEBOOK_MINUTES and one.notebook.startswith(NOTEBOOK_OF[one.id[0]])
    # More than the two minutes of a quick one: 01 draws 18,400 tokens of a real model, 04 puts in 33 faults and decodes
    # a real model in ten ways.
    longer = ("01_lossless", "04_ragged_batches")
    assert one.minutes == NOTEBOOK_MINUTES[one.notebook] <= (2.5 if one.notebook in longer else 2)
    assert one.minimum_n >= 1
    assert one.thresholds and all(isinstance(value, int | float) for value in one.thresholds.values())
    assert one.needs in (None, "mps", "cuda")


@pytest.mark.parametrize(
    ("id", "thresholds"),
    [
        ("L1", {"total_variation": 1e-12}),
        ("L2", {"total_variation": 1e-10}),
        ("B1", {"speedup": 1.61}),
        ("B3", {"low": 0.8, "high": 1.25}),
        ("B4", {"configurations": 8, "backends": 3}),
        ("S1", {"serial": 0.5, "batched": 0.1}),
        ("R4", {"share": 0.01}),
        ("G3", {"eager": 10.0, "fused": 2.5}),
        ("G4", {"speedup": 1.70, "low": 1.42}),
    ],
)
def test_thresholds_are_those_committed_before_the_runs(id, thresholds):
    assert claim(id).thresholds == thresholds


def test_an_unknown_claim_lists_the_known():
    with pytest.raises(ValueError, match=re.escape("unknown claim 'B9': expected one of L1, L2")):
        claim("B9")
