"""Two samples of sequences: by hand, by enumeration, and with the clustering that a nominal χ² falls for."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats

from specdec_core.statistics import two_sample
from specdec_core.statistics.intervals import binomial_interval
from specdec_core.statistics.two_sample import (
    Bins,
    chi_square,
    choose_bins,
    counts,
    mmd,
    null_statistics,
    pad,
    permutation_chi_square,
)

VOCABULARY = 8


def prompts(count: int, each: int) -> tuple[np.ndarray, np.ndarray]:
    """Labels and strata `[count·2·each]`: `each` sequences of either label for each prompt."""
    return np.tile(np.repeat([False, True], each), count), np.repeat(np.arange(count), 2 * each)


def sample(
    generator: np.random.Generator,
    labels: np.ndarray,
    strata: np.ndarray,
    length: int,
    repeat: int = 1,
    tilt: float = 0,
) -> np.ndarray:
    """Sequences `[S, length·repeat]`: each prompt has its own law, every token comes `repeat` times.

    Label 1 puts `tilt` of its mass on token 0.
    """
    laws = generator.dirichlet(np.full(VOCABULARY, 2.0), strata.max() + 1)[strata]
    laws = laws * (1 - tilt * labels[:, None]) + tilt * labels[:, None] * np.eye(VOCABULARY)[0]
    draws = generator.random((len(labels), length))
    tokens = (draws[:, :, None] > np.cumsum(laws, axis=1)[:, None]).sum(axis=2).clip(max=VOCABULARY - 1)
    return np.repeat(tokens, repeat, axis=1)


def test_bins_are_the_most_frequent_pilot_tokens():
    bins = choose_bins([[7, 7, 7, 3], [3, 9, 4, -1]], 3)
    assert bins.tokens.tolist() == [7, 3, 4]  # 4 and 9 are equals, the smaller id goes first
    assert bins.count == 4
    assert bins.index([[4, 9, 7], [3, 0, -1]]).tolist() == [[2, 3, 0], [1, 3, -1]]
    assert choose_bins([5, 5], 10).tokens.tolist() == [5]


def test_counts_leave_out_the_padding():
    bins = Bins(np.array([7, 3]))
    table = counts(pad([[7, 3, 7], [8], []]), bins)
    assert table.tolist() == [[2, 1, 0], [0, 0, 1], [0, 0, 0]]
    assert counts([[5, 6]], Bins(np.array([], dtype=int))).tolist() == [[2]]


def test_rare_bins_are_merged_into_the_last():
    bins = Bins(np.array([7, 3, 9, 1]))
    assert bins.merged([20, 8, 4, 6, 2]).tokens.tolist() == [7, 3, 1]  # 4 + 2 are enough for the last
    assert bins.merged([20, 8, 1, 6, 2]).tokens.tolist() == [7, 3]  # 3 are not: the rarest of the rest joins
    assert bins.merged([20, 8, 9, 6, 0]).tokens.tolist() == [7, 3, 9, 1]
    with pytest.raises(ValueError, match=r"shape \(2,\): these are 5 bins"):
        bins.merged([1, 2])


def test_merged_bins_expect_five_each():
    generator = np.random.default_rng(0)
    pilot = generator.zipf(1.5, 4000) % 1000
    bins = choose_bins(pilot, 200)
    shares = np.bincount(bins.index(pilot), minlength=bins.count) / len(pilot)
    merged = bins.merged(shares * 500)
    assert merged.count < bins.count
    halves = [np.bincount(merged.index(half), minlength=merged.count) for half in (pilot[:500], pilot[500:1000])]
    assert sum(halves).min() / 2 > 2  # of another sample than that which they were chosen on


def test_nominal_chi_square_is_scipys():
    a, b = [10, 20, 30, 0], [15, 15, 40, 0]
    result = chi_square(a, b)
    found = stats.chi2_contingency([a[:3], b[:3]], correction=False)
    assert (result.statistic, result.p) == pytest.approx((found.statistic, found.pvalue))
    assert (result.dof, result.n) == (2, 130)
    assert result.note == f"2 dof, smallest expected count {60 * 25 / 130:.3g}"
    # Two bins by hand: Σ(o − e)²/e with every expectation 10 and every deviation 2, no correction.
    assert chi_square([12, 8], [8, 12]).statistic == pytest.approx(4 * 4 / 10)
    one = chi_square([3, 0], [4, 0])
    assert (one.dof, one.p) == (0, 1)


def test_relabelling_is_that_of_every_swap():
    """Three prompts with one sequence of either label have 2³ relabellings, here all written out."""
    generator = np.random.default_rng(5)
    labels, strata = prompts(3, 1)
    table = generator.integers(0, 9, (6, 4))
    every = []
    for swaps in itertools.product([False, True], repeat=3):
        relabelled = labels ^ np.repeat(swaps, 2)
        every.append(chi_square(table[relabelled].sum(axis=0), table[~relabelled].sum(axis=0)).statistic)
    drawn = null_statistics(table, labels, strata, 4000, seed=2)
    for value in set(np.round(every, 9)):
        share = np.mean(np.isclose(every, value))
        assert np.mean(np.isclose(drawn, value)) == pytest.approx(share, abs=0.035)
    observed = permutation_chi_square(table, labels, strata, 4000, seed=2)
    assert observed.statistic == pytest.approx(every[0])
    exact = np.mean(np.array(every) >= every[0] - 1e-9)
    assert observed.p == pytest.approx(exact, abs=0.035)
    assert observed.p == pytest.approx((1 + (drawn >= every[0] - 1e-9).sum()) / 4001)
    assert observed.n == 6


def test_labels_stay_within_their_prompt():
    # Each prompt repeats a token of its own: within prompts nothing differs, across prompts everything would.
    labels = np.array([True, False, True, False, True, True, False])
    strata = np.array(["a", "b", "a", "b", "b", "a", "a"])
    table = np.where((strata == "a")[:, None], [10, 0], [0, 10])
    observed = permutation_chi_square(table, labels, strata, 99)
    assert np.allclose(null_statistics(table, labels, strata, 99), observed.statistic)
    assert observed.p == 1
    assert np.ptp(null_statistics(table, labels, np.zeros(7), 99)) > 1


def test_batches_and_order_change_nothing(monkeypatch):
    generator = np.random.default_rng(3)
    labels, strata = prompts(5, 2)
    table = generator.integers(0, 9, (20, 4))
    whole = null_statistics(table, labels, strata, 50)
    monkeypatch.setattr(two_sample, "_CELLS_AT_ONCE", 20 * 7)
    assert null_statistics(table, labels, strata, 50) == pytest.approx(whole)
    assert not np.allclose(null_statistics(table, labels, strata, 50, seed=1), whole)


def test_clustering_inflates_the_nominal_test_and_not_the_permutation():
    generator = np.random.default_rng(4)
    labels, strata = prompts(8, 2)
    bins = choose_bins(np.arange(VOCABULARY), VOCABULARY - 1)
    trials = 300
    nominal = permuted = 0
    for seed in range(trials):
        table = counts(sample(generator, labels, strata, 12, repeat=4), bins)
        nominal += chi_square(table[labels].sum(axis=0), table[~labels].sum(axis=0)).p <= 0.05
        permuted += permutation_chi_square(table, labels, strata, 199, seed).p <= 0.05
    assert nominal / trials > 0.3
    interval = binomial_interval(permuted, trials, level=0.99)
    assert interval.low <= 0.05 <= interval.high


def test_matching_deflates_the_nominal_test_and_its_own_null_shows_it():
    generator = np.random.default_rng(5)
    labels, strata = prompts(46, 1)
    bins = Bins(np.arange(VOCABULARY - 1))
    laws = 10 * np.eye(VOCABULARY)[strata % VOCABULARY] + 1  # prompts far apart
    table = np.stack([generator.multinomial(100, law / law.sum()) for law in laws])
    null = null_statistics(table, labels, strata, 1999)
    assert null.mean() < 0.8 * (bins.count - 1)  # the nominal law has mean 7


def test_the_permutation_sees_a_tilt():
    generator = np.random.default_rng(6)
    labels, strata = prompts(30, 1)
    bins = Bins(np.arange(VOCABULARY - 1))
    found = [
        permutation_chi_square(counts(sample(generator, labels, strata, 100, tilt=0.1), bins), labels, strata, 199).p
        for _ in range(10)
    ]
    assert min(found) >= 1 / 200 and max(found) <= 0.01  # the sample itself is one of the relabellings


def test_mmd_by_hand():
    # One prompt, two sequences of either label; the distances between A = 00, 01 and B = 11, 11 are 1, 1, ½, ½.
    sequences = [[0, 0], [0, 1], [1, 1], [1, 1]]
    half, full = np.exp(-2 * 0.5), np.exp(-2 * 1.0)
    squared = (2 + 2 * half) / 4 + (4 * 1) / 4 - 2 * (2 * full + 2 * half) / 4
    result = mmd(sequences, [1, 1, 0, 0], [0, 0, 0, 0], 99, rate=2.0)
    assert result.statistic == pytest.approx(2 * 2 / 4 * squared)
    assert result.n == 4
    assert mmd(sequences[:3], [1, 1, 0], [0, 0, 0], 99).n == 3  # two of one label are enough
    # Another prompt whose two sequences make a swap adds nothing, whatever they are.
    more = mmd([*sequences, [5, 5], [6, 6]], [1, 1, 0, 0, 1, 0], [0, 0, 0, 0, 1, 1], 99, rate=2.0)
    assert more.statistic == pytest.approx(result.statistic)


def test_mmd_relabels_as_an_enumeration_does():
    generator = np.random.default_rng(7)
    sequences = generator.integers(0, 3, (6, 5))
    sequences[:3, :2] = 0
    labels = np.array([True] * 3 + [False] * 3)
    kernel = np.exp(-np.array([[np.mean(x != y) for y in sequences] for x in sequences]))
    every = []
    for chosen in itertools.combinations(range(6), 3):
        weights = np.where(np.isin(np.arange(6), chosen), 1 / 3, -1 / 3)
        every.append(9 / 6 * weights @ kernel @ weights)
    result = mmd(sequences, labels, np.zeros(6), 4000, rate=1.0)
    assert result.statistic == pytest.approx(every[0])
    assert result.p == pytest.approx(np.mean(np.array(every) >= every[0] - 1e-9), abs=0.035)


def test_mmd_pads():
    labels, strata = [1, 1, 0, 0], [0] * 4
    equal_pads = mmd([[1, -1], [1, -1], [1, -1], [1, -1]], labels, strata, 9)
    assert equal_pads.statistic == pytest.approx(0) and equal_pads.p == 1
    against_tokens = mmd([[1, -1], [1, -1], [1, 0], [1, 0]], labels, strata, 9)
    assert against_tokens.statistic == pytest.approx(2 - 2 * np.exp(-1.0))  # a pad differs from token 0


def test_mmd_sees_the_order_that_counts_do_not():
    # Label 1 repeats its first token, label 0 draws afresh: one law of counts over all, two joint laws.
    generator = np.random.default_rng(8)
    labels, strata = prompts(4, 100)
    first = generator.integers(0, 2, len(labels))
    second = np.where(labels, first, generator.integers(0, 2, len(labels)))
    assert mmd(np.stack([first, second], axis=1), labels, strata, 199).p <= 0.01


def test_mmd_has_its_size_and_compares_within_prompts():
    generator = np.random.default_rng(9)
    labels, strata = prompts(6, 3)
    trials = 300
    rejected = sum(
        mmd(sample(generator, labels, strata, 10, repeat=3), labels, strata, 99, seed).p <= 0.05
        for seed in range(trials)
    )
    interval = binomial_interval(rejected, trials, level=0.99)
    assert interval.low <= 0.05 <= interval.high
    tilted = [mmd(sample(generator, labels, strata, 40, tilt=0.5), labels, strata, 99).p for _ in range(10)]
    assert max(tilted) <= 0.02
    # Prompts of one label only are far apart and say nothing.
    alone = np.full((2, 10), 99)
    sequences = np.concatenate([sample(generator, labels, strata, 10), alone])
    there = mmd(sequences, [*labels, True, True], [*strata, 98, 99], 99)
    assert there.statistic == pytest.approx(mmd(sequences[:-2], labels, strata, 99).statistic)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: choose_bins([1], 0), "0 bins: expected at least 1"),
        (lambda: choose_bins([-1], 3), "holds no tokens"),
        (lambda: choose_bins([1.5], 3), "dtype float64: expected integer token ids"),
        (lambda: choose_bins([1, -2], 3), "holds token -2"),
        (lambda: Bins(np.array([3, 3])), r"\[3, 3\]: expected \[k\] distinct"),
        (lambda: counts([1, 2], Bins(np.array([1]))), r"shape \(2,\): expected \[S, L\]"),
        (lambda: chi_square([1, 2], [1, 2, 3]), r"shapes \(2,\) and \(3,\): expected \[B\]"),
        (lambda: chi_square([1, 2], [0, 0]), "samples of 3 and 0 tokens"),
        (lambda: chi_square([1, -2], [1, 1]), "count -2.0 in row 0, bin 1"),
        (lambda: chi_square([1, np.nan], [1, 1]), "count nan in row 0, bin 1"),
        (lambda: permutation_chi_square([1, 2], [0, 1], [0, 0]), r"counts have shape \(2,\): expected \[S, B\]"),
        (lambda: permutation_chi_square([[1], [2]], [0, 1, 1], [0, 0, 0]), "2 sequences and 3 labels"),
        (lambda: permutation_chi_square([[1], [2]], [0, 1], [0, 0, 0]), r"strata have shape \(3,\) and labels \(2,\)"),
        (lambda: permutation_chi_square([[1], [2]], [0, 2], [0, 0]), "expected \\[S\\] of booleans"),
        (lambda: permutation_chi_square([[1], [2]], [0, 1], [0, 1]), "no stratum holds sequences of both labels"),
        (lambda: permutation_chi_square([[1], [2]], [0, 1], [0, 0], 0), "0 resamples: expected at least 1"),
        (lambda: null_statistics([[0], [0]], [0, 1], [0, 0]), "all zero"),
        (lambda: mmd([[1], [2]], [0, 1], [0, 0]), "needs two sequences of a label in some stratum"),
        (lambda: mmd([[1], [2], [3]], [0, 1, 1], [0, 0, 0], rate=0), "rate 0: expected a positive number"),
        (lambda: mmd([[1], [2], [3]], [0, 1], [0, 0]), "3 sequences and 2 labels"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
