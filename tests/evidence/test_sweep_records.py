"""Sweep records contradict themselves loudly, and pool as they should."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specdec_core.evidence.schemas import RecordError
from specdec_core.evidence.sweep_records import CEILING, COST_CURVE, SWEEP, Cell, conditional_acceptance
from specdec_core.evidence.sweep_records import pair_up as pairs_of


@pytest.fixture
def rows(make_pair, make_sweep):
    return make_sweep([make_pair("a"), make_pair("b", backend="other")], lengths=(1, 3), prompts=8)


def test_invented_rows_are_valid(rows):
    for row in rows:
        assert SWEEP.validated(row) == row


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arm": "SD"}, "expected 'sd' or 'ar'"),
        ({"split": "test"}, "'tuning' or 'report'"),
        ({"drafted": 1}, "are not the sums"),
        ({"accepted": 999}, "are not the sums"),
        ({"tested_by_position": [0, 0, 0]}, "fails at some position"),
        ({"tested_by_position": [1]}, "expected ≤ K each"),
        ({"arm": "ar"}, "'ar' row with K 3"),
        ({"tokens": 0}, "expected ≥ 1"),
        ({"seconds": 0.0}, "> 0"),
    ],
)
def test_contradictions_are_refused(rows, change, message):
    row = next(row for row in rows if row["K"] == 3)
    with pytest.raises(RecordError, match=message):
        SWEEP.validated(row | change)


def test_cost_records_are_plain():
    COST_CURVE.validated(
        {"configuration": "a", "backend": "b", "n": 1, "context": 128, "seconds_median": 0.1, "seconds_low": 0.1,
         "seconds_high": 0.1, "samples": 5}
    )  # fmt: skip
    CEILING.validated(
        {"configuration": "a", "weight_bytes": 1e8, "flops_per_token": 1e8, "bytes_per_second": 1e10,
         "flops_per_second": 1e11}
    )  # fmt: skip


def test_pairs_are_pooled_by_prompt_also_over_repeats(rows):
    once = pairs_of(rows)[Cell("a", 0.0, 3)]
    twice = pairs_of([*rows, *rows])[Cell("a", 0.0, 3)]
    assert len(once) == len(twice) == 8 and once.backend == "skinny f32"
    np.testing.assert_array_equal(twice.sd["tokens"], 2 * once.sd["tokens"])
    assert twice.speedup().estimate == pytest.approx(once.speedup().estimate)
    sd, ar = ([row for row in rows if row["configuration"] == "a" and row["K"] == K] for K in (3, 0))
    rate = [sum(row["tokens"] for row in arm) / sum(row["seconds"] for row in arm) for arm in (sd, ar)]
    assert once.speedup().estimate == pytest.approx(rate[0] / rate[1])
    assert once.acceptance() == sum(row["accepted"] for row in sd) / sum(row["drafted"] for row in sd)


def test_predictions_divide_out(rows):
    cell = pairs_of(rows)[Cell("a", 0.0, 3)]
    assert cell.measured_over_predicted().estimate == pytest.approx(cell.speedup().estimate / cell.predicted_speedup())


def test_splits_and_repetition_are_filtered_by_the_autoregressive_row(rows):
    assert sorted(pairs_of(rows, split="report")[Cell("a", 0.0, 1)].prompts) == ["p001", "p003", "p005", "p007"]
    filtered = pairs_of(rows, repetitive=False)[Cell("a", 0.0, 1)]
    assert set(filtered.prompts) == {f"p{n:03d}" for n in range(2, 8)}
    flipped = [row | {"repetitive": True} if row["arm"] == "sd" else row for row in rows]
    assert pairs_of(flipped, repetitive=False)[Cell("a", 0.0, 1)].prompts == filtered.prompts


def test_a_missing_partner_is_named(rows):
    alone = [row for row in rows if row["arm"] == "sd" or row["prompt_id"] != "p003"]
    with pytest.raises(RecordError, match="no 'ar' row for prompt 'p003' of 'a'"):
        pairs_of(alone)


def test_conditional_acceptance_recovers_the_truth(make_pair, make_sweep):
    rows = make_sweep([make_pair("a", alpha=(0.9, 0.5, 0.7))], lengths=(3,), prompts=64)
    quiet = [row for row in rows if not row["repetitive"]]
    alpha = conditional_acceptance(quiet)[Cell("a", 0.0, 3)]
    assert alpha == pytest.approx([0.9, 0.5, 0.7], abs=0.05)
    assert all(math.isnan(value) for value in conditional_acceptance(quiet, minimum=10**9)[Cell("a", 0.0, 3)])


def test_an_undrafted_cell_has_no_acceptance(rows):
    idle = [
        row | {"drafted": 0, "accepted": 0, "drafted_by_position": [], "tested_by_position": [],
               "accepted_by_position": []}
        for row in rows
    ]  # fmt: skip
    assert math.isnan(pairs_of(idle)[Cell("a", 0.0, 3)].acceptance())
    assert all(math.isnan(value) for value in conditional_acceptance(idle)[Cell("a", 0.0, 3)])
