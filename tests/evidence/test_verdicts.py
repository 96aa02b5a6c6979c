"""The rules from intervals to verdicts."""

from __future__ import annotations

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.evidence.claims import claim
from specdec_core.evidence.verdicts import (
    MEASURED,
    Finding,
    Outcome,
    Verdict,
    exact_at_most,
    exact_zero_mismatch,
    interval_above,
    interval_below,
    within_ratio,
)
from specdec_core.statistics.intervals import Interval

ends = st.floats(0.1, 10)


def between(low: float, high: float, n: int = 20) -> Interval:
    return Interval((low + high) / 2, low, high, 0.95, n, "made up")


@pytest.mark.parametrize(
    ("low", "high", "outcome"),
    [
        (1.7, 1.9, Outcome.SUPPORTED),
        (1.61, 1.9, Outcome.INCONCLUSIVE),
        (1.5, 1.7, Outcome.INCONCLUSIVE),
        (1.5, 1.61, Outcome.REFUTED),
        (1.2, 1.5, Outcome.REFUTED),
        (0.0, math.inf, Outcome.INCONCLUSIVE),
    ],
)
def test_above_a_threshold(low, high, outcome):
    assert interval_above(between(low, high), 1.61) is outcome


@given(ends, ends, ends)
def test_below_is_above_upside_down(a, b, threshold):
    low, high = sorted((a, b))
    mirrored = {Outcome.SUPPORTED: Outcome.SUPPORTED, Outcome.REFUTED: Outcome.REFUTED}
    below = interval_below(between(low, high), threshold)
    above = interval_above(between(-high, -low), -threshold)
    assert below is mirrored.get(above, Outcome.INCONCLUSIVE)


def test_within_a_band():
    assert within_ratio(between(0.9, 1.2), 0.8, 1.25) is Outcome.SUPPORTED
    assert within_ratio(between(0.8, 1.25), 0.8, 1.25) is Outcome.SUPPORTED
    assert within_ratio(between(0.7, 1.2), 0.8, 1.25) is Outcome.INCONCLUSIVE
    assert within_ratio(between(1.3, 1.4), 0.8, 1.25) is Outcome.REFUTED
    assert within_ratio(between(0.5, 0.7), 0.8, 1.25) is Outcome.REFUTED


@given(ends, ends, st.integers(0, 11))
def test_too_few_data_decide_nothing(a, b, n):
    interval = between(*sorted((a, b)), n=n)
    assert interval_above(interval, 1.0, 12) is Outcome.INCONCLUSIVE
    assert interval_below(interval, 1.0, 12) is Outcome.INCONCLUSIVE
    assert within_ratio(interval, 0.5, 2.0, 12) is Outcome.INCONCLUSIVE


def test_one_mismatch_refutes_and_none_supports():
    assert exact_zero_mismatch(0, 100, 100) is Outcome.SUPPORTED
    assert exact_zero_mismatch(0, 99, 100) is Outcome.INCONCLUSIVE
    assert exact_zero_mismatch(1, 2, 100) is Outcome.REFUTED
    assert exact_at_most(1e-13, 1e-12, 5) is Outcome.SUPPORTED
    assert exact_at_most(2e-12, 1e-12, 5) is Outcome.REFUTED
    assert exact_at_most(math.nan, 1e-12, 5) is Outcome.REFUTED


def test_a_verdict_is_plain_json_also_with_an_open_interval():
    b1 = claim("B1")
    finding = Finding(Outcome.INCONCLUSIVE, 1.7, between(0.0, math.inf, 1), "one prompt")
    row = Verdict.of(b1, finding, "amd-epyc-2c").as_json(b1)
    assert json.loads(json.dumps(row, allow_nan=False)) == row
    assert row["interval"] == [0.0, None] and row["threshold"] == {"speedup": 1.61}
    assert {"id", "statement", "verdict", "value", "interval", "threshold", "evidence", "device"} <= set(row)


def test_what_is_registered_for_a_device():
    metal = claim("S5")
    assert metal.registered(frozenset({"cpu"})) == MEASURED | {Outcome.NOT_TESTABLE}
    assert metal.registered(frozenset({"cpu", "mps"})) == MEASURED
    assert claim("B1").registered(frozenset({"cpu"})) == MEASURED
    assert claim("L4").repeatable and claim("B2").repeatable
    assert not any(claim(id).repeatable for id in ("B1", "B3", "B4", "S2", "S5", "D3"))
