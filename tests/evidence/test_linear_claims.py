"""Verdicts on linear-attention verification, from rows made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_core.evidence.evaluate import judge
from specdec_core.evidence.linear_claims import (
    CACHES,
    DELAYED,
    EAGER,
    FACTORS,
    FLOOR,
    FUSED,
    RELOAD,
    RESIDENT,
    SNAPSHOTS,
    by_cell,
    floor_seconds,
    floors,
    headline,
    held_bytes,
    passes,
    speedup,
)
from specdec_core.evidence.verdicts import Outcome
from tests.evidence.linear_rows import (
    ARITHMETIC,
    BANDWIDTH,
    ERRORS,
    cell,
    error_row,
    not_timed,
    speed_row,
    speeds,
    traffic,
    traffic_row,
)

# --- G1 -----------------------------------------------------------------------------------------------------------


def test_exact_verification_is_supported_and_told_a_form():
    found = judge("G1", ERRORS)
    assert found.verdict is Outcome.SUPPORTED and found.value == pytest.approx(6e-7 / 1e-5)
    assert "torch float64 3.0e-16 over 160 trees and 1360 commits" in found.note
    assert "numba float32 6.0e-07 over 160 trees and 1360 commits" in found.note


@pytest.mark.parametrize(
    "changes",
    [
        {"form": "torch float64", "worst_output": 2e-12},
        {"form": "torch float64", "worst_state": 2e-12},
        {"form": "torch float32", "worst_output": 2e-5},
        {"form": "numba float32", "worst_state": 2e-5},
        {"form": "numba float32", "changed": 1},
    ],
)
def test_one_error_refutes(changes):
    assert judge("G1", [*ERRORS, error_row(kind="forests", **changes)]).verdict is Outcome.REFUTED


@pytest.mark.parametrize("kept", ["float64", "float32"])
def test_both_precisions_have_to_be_there(kept):
    found = judge("G1", [row for row in ERRORS if row["form"].endswith(kept)])
    lacking = "torch float32 on chains" if kept == "float64" else "torch float64 on chains"
    assert found.verdict is Outcome.INCONCLUSIVE and f"not measured: {lacking}" in found.note
    assert judge("G1", []).verdict is Outcome.INCONCLUSIVE


@pytest.mark.parametrize(("form", "kind"), [("numba float32", "trees"), ("torch float64", "rounds")])
def test_every_form_has_to_be_there_on_every_kind(form, kind):
    found = judge("G1", [row for row in ERRORS if (row["form"], row["kind"]) != (form, kind)])
    assert found.verdict is Outcome.INCONCLUSIVE and f"not measured: {form} on {kind}" in found.note


def test_a_form_is_held_to_the_registered_tolerance_and_not_to_its_own():
    assert judge("G1", [*ERRORS, error_row(worst_state=1e-9, tolerance=1e-3)]).verdict is Outcome.REFUTED


# --- G2 -----------------------------------------------------------------------------------------------------------


def test_factors_are_moved_too():
    row = traffic_row(FACTORS)
    factors = row["kept_bytes"] / row["state_bytes"]
    assert passes(row) == (2 + factors, 1 + factors) and factors > 0
    assert passes(traffic_row(DELAYED)) == (1 + factors, 1 + factors)
    assert passes(traffic_row(SNAPSHOTS)) == (2, 17)
    assert held_bytes(traffic_row(FUSED)) == row["state_bytes"] + row["kept_bytes"]


def test_less_traffic_is_supported_with_passes_told():
    found = judge("G2", traffic())
    assert found.verdict is Outcome.SUPPORTED
    worst = traffic_row(FACTORS, 1)
    assert found.value == pytest.approx(sum(passes(worst)) / sum(passes(traffic_row(SNAPSHOTS, 1))))
    assert "worst at n=1" in found.note and "kept 0.0078 to 0.0078" in found.note
    assert "n=16 chain: eager sequential 75 + 50, fused tokens 25 + 25, tile resident 2 + 1" in found.note
    assert "compact factors, delayed commit 1.13 + 1.13 passes" in found.note and "n=16 tree" in found.note


@pytest.mark.parametrize("change", [{"read_bytes": 10**12}, {"written_bytes": 10**12}, {"kept_bytes": 10**12}])
def test_one_cell_with_more_refutes(change):
    rows = [row | change if (row["scheme"], row["n"]) == (FACTORS, 64) else row for row in traffic()]
    assert judge("G2", rows).verdict is Outcome.REFUTED


def test_memory_alone_refutes():
    rows = [traffic_row(FACTORS, 64), traffic_row(SNAPSHOTS, 64, kept_bytes=100)]
    assert judge("G2", rows).verdict is Outcome.REFUTED and judge("G2", rows).value < 1


def test_traffic_needs_both_schemes_on_one_cell():
    rows = [traffic_row(FACTORS, 16), traffic_row(SNAPSHOTS, 4)]
    assert judge("G2", rows).verdict is Outcome.INCONCLUSIVE


# --- G3 -----------------------------------------------------------------------------------------------------------


def test_the_floor_is_the_slower_of_memory_and_arithmetic():
    row = speed_row(FACTORS)
    memory = 2 * row["state_bytes"] / BANDWIDTH
    assert floor_seconds(row | {"operations": 1.0}) == pytest.approx(memory)
    assert floor_seconds(row | {"operations": 1e12}) == pytest.approx(1e12 / ARITHMETIC)
    assert floors(row | {"operations": 1.0, "seconds": [3 * memory, 4 * memory, 9 * memory]}).estimate == 4.0


def test_ratios_pair_by_repeat():
    found = speedup(speed_row(EAGER, noise=0), speed_row(FACTORS, noise=0))
    assert found.low == pytest.approx(12) and found.high == pytest.approx(12) and found.n == 12
    assert "paired by repeat" in found.method
    slow, fast = {"seconds": [10.0, 1.0, 1.0]}, {"seconds": [1.0, 1.0, 0.5]}
    assert speedup(slow, fast).estimate == 2.0  # the median of 10, 1, 2


def test_headline_cells_are_at_n_16_and_exceed_two_caches():
    cells = headline(speeds())
    assert [(one.n, one.shape, one.state_bytes) for one in cells] == [(16, "chain", 64 << 20), (16, "tree", 64 << 20)]
    assert len(headline([row | {"cache_bytes": (64 << 20) // CACHES - 1} for row in speeds()])) == 2
    assert not headline([row | {"cache_bytes": (64 << 20) // CACHES} for row in speeds()])
    assert not headline([row for row in speeds() if row["scheme"] != FACTORS])
    assert not headline([not_timed(row) if row["scheme"] == FACTORS else row for row in speeds()])


def test_cells_are_sorted_by_their_states():
    sizes = [one.state_bytes for one in by_cell(reversed(speeds()))]
    assert sizes == sorted(sizes) and len(sizes) == 8


def test_faster_than_both_rivals_is_supported():
    found = judge("G3", speeds())
    assert found.verdict is Outcome.SUPPORTED
    assert "GDN-1.3B, batch 32, n=16, tree: eager sequential 12" in found.note
    for rival in (RESIDENT, SNAPSHOTS, RELOAD, DELAYED):
        assert rival in found.note
    assert "in units of the floor compact factors " in found.note and f"({FLOOR} reached)" in found.note


@pytest.mark.parametrize(
    ("times", "outcome", "value"),
    [
        ({EAGER: 9.0}, Outcome.REFUTED, 9.0),
        ({FUSED: 2.4}, Outcome.REFUTED, 2.4),
        ({EAGER: 10.001}, Outcome.INCONCLUSIVE, 10.0),
        ({FUSED: 2.5005}, Outcome.INCONCLUSIVE, 2.5),
        ({EAGER: 11.0, RESIDENT: 0.8, SNAPSHOTS: 0.5}, Outcome.SUPPORTED, 11.0),
        ({FACTORS: 3.0, FUSED: 2.7, DELAYED: 0.1}, Outcome.REFUTED, 0.9),
    ],
)
def test_either_rival_decides_and_nobody_else(times, outcome, value):
    found = judge("G3", cell(times=times, noise=0.03 if outcome is Outcome.INCONCLUSIVE else 0.002))
    assert found.verdict is outcome and found.value == pytest.approx(value, rel=0.03)
    assert found.interval.estimate == found.value


def test_the_worst_headline_cell_decides():
    rows = [*cell(), *cell("tree", times={FUSED: 2.0})]
    assert judge("G3", rows).verdict is Outcome.REFUTED and judge("G3", rows).value == pytest.approx(2.0, rel=0.02)
    small = [row for row in speeds() if row["size"] != "GDN-1.3B"]
    assert judge("G3", [*cell(), *small]).verdict is Outcome.SUPPORTED


def test_intervals_hold_together():
    """Two cells and two rivals: four intervals, each wider than one alone."""
    found = judge("G3", [*cell(noise=0.1), *cell("tree", noise=0.1)])
    assert found.interval.level == pytest.approx(0.95**0.25)


def test_the_floor_is_told_and_decides_nothing():
    slow = [row | {"bytes_per_second": 4 * BANDWIDTH, "flops_per_second": 4 * ARITHMETIC} for row in cell()]
    found = judge("G3", slow)
    assert found.verdict is Outcome.SUPPORTED and f"({FLOOR} missed)" in found.note


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (cell(repeats=9), "9 repeats of 10"),
        ([row | {"cache_bytes": None} for row in cell()], "does not tell the size"),
        (cell(n=8), "the largest timed holds 0"),
        (cell(batch=16), "no cell at n=16 with both rivals holds 2 × 31457280 bytes of states"),
        ([not_timed(row) if row["scheme"] == EAGER else row for row in cell()], "with both rivals"),
        ([not_timed(row) if row["scheme"] == FUSED else row for row in cell()], "with both rivals"),
        ([], "no cell"),
    ],
)
def test_what_is_missing_decides_nothing(rows, message):
    found = judge("G3", rows)
    assert found.verdict is Outcome.INCONCLUSIVE and message in found.note


def test_a_rival_left_out_of_one_headline_cell_is_judged_in_the_other():
    rows = [*cell(), *(not_timed(row) if row["scheme"] == EAGER else row for row in cell("tree", batch=64))]
    found = judge("G3", rows)
    assert found.verdict is Outcome.SUPPORTED and found.note.count("eager sequential") == 1
    assert np.isfinite(found.value)
