"""Intervals against closed forms, against their promised coverage, and on data that allow no interval."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.statistics import intervals
from specdec_core.statistics.intervals import (
    Interval,
    binomial_interval,
    columns,
    median_interval,
    ratio_interval,
    simultaneous,
)

positive = st.floats(1e-3, 1e3)
pairs = st.lists(st.tuples(positive, positive), min_size=2, max_size=12)


def prompts(n: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Tokens and seconds of n prompts whose true pooled rate is 2."""
    generator = np.random.default_rng(seed)
    seconds = generator.lognormal(0, 0.6, n)
    return 2 * seconds * generator.lognormal(-0.08, 0.4, n), seconds


def test_the_estimate_pools_and_is_no_mean_of_rates():
    tokens, seconds = [100, 100], [1, 4]
    assert ratio_interval(tokens, seconds).estimate == pytest.approx(200 / 5)
    assert np.mean(np.divide(tokens, seconds)) == pytest.approx(62.5)


@given(pairs)
@settings(max_examples=40, deadline=None)
def test_the_interval_holds_the_estimate_and_inverts_with_the_ratio(data):
    above, below = map(np.array, zip(*data, strict=True))
    there = ratio_interval(above, below, resamples=200)
    back = ratio_interval(below, above, resamples=200)
    assert there.low <= there.estimate * (1 + 1e-12) and there.estimate <= there.high * (1 + 1e-12)
    assert there.estimate * back.estimate == pytest.approx(1)
    # The quantile rule takes an order statistic, one place apart from its mirror image.
    assert math.log(there.low * back.high) == pytest.approx(0, abs=math.log(there.high / there.low) * 0.2 + 1e-9)


@given(pairs, st.floats(0.01, 100))
@settings(max_examples=25, deadline=None)
def test_units_scale_through(data, unit):
    above, below = map(np.array, zip(*data, strict=True))
    plain, scaled = (ratio_interval(above * u, below, resamples=100) for u in (1.0, unit))
    assert (scaled.low, scaled.high) == pytest.approx((plain.low * unit, plain.high * unit))


@pytest.mark.parametrize("n", [6, 8, 20])
def test_coverage_is_near_the_level_for_few_prompts(n):
    draws = [ratio_interval(*prompts(n, seed), resamples=400) for seed in range(400)]
    covered = np.mean([one.low <= 2 <= one.high for one in draws])
    assert covered >= 0.90  # plain percentiles reach 0.82 at n = 6


def test_the_same_seed_gives_the_same_interval_and_another_seed_another():
    data = prompts(10, 0)
    assert ratio_interval(*data, seed=1) == ratio_interval(*data, seed=1)
    assert ratio_interval(*data, seed=1) != ratio_interval(*data, seed=2)


def test_large_samples_in_batches_agree_with_those_at_once(monkeypatch):
    data = prompts(50, 3)
    whole = ratio_interval(*data, resamples=600)
    monkeypatch.setattr(intervals, "_CELLS_AT_ONCE", 50 * 100)
    batched = ratio_interval(*data, resamples=600)
    assert (batched.low, batched.high) == pytest.approx((whole.low, whole.high), rel=0.03)
    assert batched.estimate == whole.estimate


def test_a_speedup_is_a_ratio_of_two_pooled_rates():
    tokens, seconds = prompts(12, 1)
    base_tokens, base_seconds = np.full(12, 100.0), np.full(12, 100.0)
    speedup = ratio_interval(columns(tokens, base_seconds), columns(seconds, base_tokens))
    assert speedup.estimate == pytest.approx(tokens.sum() / seconds.sum())
    assert speedup.low < speedup.estimate < speedup.high


def test_equal_prompts_give_a_point():
    interval = ratio_interval([3.0] * 5, [2.0] * 5)
    assert (interval.low, interval.high) == pytest.approx((1.5, 1.5))


def test_one_prompt_bounds_nothing():
    interval = ratio_interval([3.0], [2.0])
    assert interval.estimate == pytest.approx(1.5)
    assert (interval.low, interval.high) == (0.0, math.inf)
    assert interval.ends() == [0.0, None]
    assert not interval.excludes(100)
    assert median_interval([1.0]).ends() == [None, None]


def test_prompts_without_any_count_leave_the_end_open():
    interval = ratio_interval([0, 0, 5.0], [1.0, 1.0, 1.0])
    assert interval.low == 0.0 and math.isfinite(interval.high)
    both = ratio_interval([0, 0, 5.0], [0, 0, 1.0])
    assert (both.low, both.high) == (0.0, math.inf)


@pytest.mark.parametrize(
    ("above", "below", "message"),
    [
        ([], [], "empty"),
        ([1, math.nan], [1, 1], "numerator is not finite at row 1"),
        ([1, 1], [1, math.inf], "denominator is not finite at row 1"),
        ([1, -1], [1, 1], "negative"),
        ([0, 0], [1, 1], "a numerator sums to zero over all 2 prompts"),
        ([1, 1], [1, 1, 1], "paired by prompt"),
        ([[[1]]], [[[1]]], r"expected \[n\] or \[n, m\]"),
    ],
)
def test_bad_data_are_named(above, below, message):
    with pytest.raises(ValueError, match=message):
        ratio_interval(above, below)


@pytest.mark.parametrize("level", [0, 1, 1.5, -0.1])
def test_bad_levels_are_refused(level):
    for call in (
        lambda: ratio_interval([1, 2], [1, 2], level=level),
        lambda: median_interval([1, 2], level=level),
        lambda: binomial_interval(1, 2, level=level),
        lambda: simultaneous(level, 2),
    ):
        with pytest.raises(ValueError, match="between 0 and 1"):
            call()
    with pytest.raises(ValueError, match="resamples"):
        ratio_interval([1, 2], [1, 2], resamples=0)


def test_median_interval():
    data = np.random.default_rng(0).exponential(size=200)
    interval = median_interval(data)
    assert interval.estimate == np.median(data)
    assert interval.low < math.log(2) < interval.high
    assert interval.high - interval.low < 0.5
    with pytest.raises(ValueError, match="one dimension"):
        median_interval([[1.0]])
    with pytest.raises(ValueError, match="not finite"):
        median_interval([1.0, math.nan])


def test_binomial_intervals_at_their_edges():
    none = binomial_interval(0, 100)
    assert none.low == 0 and none.high == pytest.approx(1 - 0.025 ** (1 / 100))  # closed form of Clopper–Pearson
    exact, wilson = binomial_interval(5, 50), binomial_interval(5, 50, method="wilson")
    assert wilson.high - wilson.low < exact.high - exact.low
    assert exact.estimate == wilson.estimate == 0.1
    for successes, trials in ((1, 0), (-1, 5), (6, 5)):
        with pytest.raises(ValueError, match="successes"):
            binomial_interval(successes, trials)
    with pytest.raises(ValueError, match="wilson"):
        binomial_interval(1, 2, method="wald")


@given(st.floats(0.5, 0.999), st.integers(1, 50))
def test_simultaneous_levels_multiply_or_add_up(level, comparisons):
    assert simultaneous(level, comparisons) ** comparisons == pytest.approx(level)
    assert (1 - simultaneous(level, comparisons, "bonferroni")) * comparisons == pytest.approx(1 - level)
    assert simultaneous(level, comparisons) <= simultaneous(level, comparisons, "bonferroni") + 1e-12
    with pytest.raises(ValueError, match="at least 1"):
        simultaneous(level, 0)
    with pytest.raises(ValueError, match="holm"):
        simultaneous(level, 2, "holm")


def test_where_an_interval_lies():
    interval = Interval(1.5, 1.2, 1.9, 0.95, 10, "made up")
    assert interval.excludes(1.0) and interval.excludes(2.0) and not interval.excludes(1.5)
    assert interval.inside(1.0, 2.0) and not interval.inside(1.3, 2.0)
    assert interval.outside(2.0, 3.0) and not interval.outside(1.8, 3.0)
    assert str(interval) == "1.5 [1.2, 1.9]"
