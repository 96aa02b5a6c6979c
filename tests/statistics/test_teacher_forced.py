"""Tests against a known law: by hand, against scipy, their size on streams of ever-changing laws, and their power."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass

import numpy as np
import pytest
from scipy import stats

from specdec_core.statistics.intervals import binomial_interval
from specdec_core.statistics.teacher_forced import (
    cramer_von_mises,
    directed,
    e_process,
    equivalence,
    kolmogorov_smirnov,
    randomised_pit,
    uniformity_by_group,
)

VOCABULARY = 6
REPLICATES = 400


@dataclass(frozen=True)
class Stream:
    """n tokens sampled from (1 − share)·p_t + share·q_t, where the target claims p_t and the drafter q_t."""

    p: np.ndarray  # [n, V]
    q: np.ndarray  # [n, V]
    tokens: np.ndarray  # [n]

    def of(self, law: np.ndarray) -> np.ndarray:
        return law[np.arange(len(self.tokens)), self.tokens]

    @property
    def in_set(self) -> np.ndarray:
        return self.of(self.q > self.p)

    @property
    def mass(self) -> np.ndarray:
        return (self.p * (self.q > self.p)).sum(axis=1)

    @property
    def tv(self) -> float:
        """Mean TV between p and q: that of the sampled law is `share` times this."""
        return float(np.abs(self.p - self.q).sum(axis=1).mean() / 2)

    def pits(self, generator: np.random.Generator) -> np.ndarray:
        """In the vocabulary's order by q − p."""
        edge = self.q - self.p
        before = edge < self.of(edge)[:, None]
        return randomised_pit((self.p * before).sum(axis=1), self.of(self.p), generator.random(len(self.tokens)))


def stream(generator: np.random.Generator, n: int, share: float = 0.0) -> Stream:
    p = generator.dirichlet(np.full(VOCABULARY, 0.4), n)  # from nearly certain to nearly even
    q = 0.5 * p + 0.5 * generator.dirichlet(np.full(VOCABULARY, 0.4), n)
    law = (1 - share) * p + share * q
    tokens = (generator.random(n)[:, None] > np.cumsum(law, axis=1)).sum(axis=1).clip(max=VOCABULARY - 1)
    return Stream(p, q, tokens)


@pytest.fixture(scope="module")
def null() -> list[Stream]:
    generator = np.random.default_rng(1)
    return [stream(generator, 500) for _ in range(REPLICATES)]


def contains(rejections: int, trials: int, size: float = 0.05) -> bool:
    interval = binomial_interval(rejections, trials, level=0.99)
    return interval.low <= size <= interval.high


def test_a_pit_by_hand():
    # The law (.2, .5, .3): token 1 lies between .2 and .7, token 0 between 0 and .2, token 2 ends at 1.
    pits = randomised_pit([0.2, 0.0, 0.7], [0.5, 0.2, 0.3], [0.4, 0.5, 1.0])
    assert pits == pytest.approx([0.4, 0.1, 1.0])
    assert randomised_pit([1.0 + 5e-10], [0.0], [1.0]).max() == 1.0


@pytest.mark.parametrize(
    ("below", "at", "uniforms", "message"),
    [
        ([], [], [], r"below has shape \(0,\): expected \[n\]"),
        ([[0.1]], [[0.1]], [[0.1]], r"below has shape \(1, 1\)"),
        ([0.1, math.nan], [0.1, 0.1], [0.5, 0.5], "below is nan at token 1"),
        ([0.1], [1.1], [0.5], r"at is 1.1 at token 0: expected a number in \[0, 1\]"),
        ([0.1], [0.2], [-0.5], "uniforms is -0.5"),
        ([0.1], [0.2], [0.5, 0.5], r"shapes differ: below \(1,\), at \(1,\), uniforms \(2,\)"),
        ([0.0, 0.7], [0.2, 0.5], [0.5, 0.5], r"below \+ at is 1.2 at token 1: expected at most 1"),
    ],
)
def test_bad_pits_are_named(below, at, uniforms, message):
    with pytest.raises(ValueError, match=message):
        randomised_pit(below, at, uniforms)


def test_distances_from_the_uniform_law_by_hand_and_against_scipy():
    values = [0.1, 0.4, 0.7]
    assert kolmogorov_smirnov(values).statistic == pytest.approx(0.3)  # at .7 the sample has reached 1
    by_hand = 1 / 36 + sum(((2 * i - 1) / 6 - x) ** 2 for i, x in enumerate(values, 1))
    assert cramer_von_mises(values).statistic == pytest.approx(by_hand)
    many = np.random.default_rng(0).random(300) ** 1.2
    assert kolmogorov_smirnov(many).p == stats.kstest(many, "uniform").pvalue
    assert cramer_von_mises(many).p == stats.cramervonmises(many, "uniform").pvalue
    assert kolmogorov_smirnov(many).n == cramer_von_mises(many).n == 300
    for test in (kolmogorov_smirnov, cramer_von_mises):
        with pytest.raises(ValueError, match=r"pits is .* at token 1"):
            test([0.5, 1.5])
    with pytest.raises(ValueError, match="1 PIT value"):
        cramer_von_mises([0.5])


def test_groups_add_up_and_small_ones_are_pooled():
    generator = np.random.default_rng(0)
    pits = generator.random(131)
    groups = np.repeat(["a", "b", "c", "d"], [100, 15, 8, 8])
    result = uniformity_by_group(pits, groups, bins=10)
    sizes = {part.name: (part.n, part.dof) for part in result.parts}
    assert sizes == {"a": (100, 9), "b": (15, 2), "small groups": (16, 2)}
    observed = np.histogram(pits[:100], 10, (0, 1))[0]
    assert result.parts[0].statistic == pytest.approx(stats.chisquare(observed).statistic)
    assert result.parts[0].p == pytest.approx(stats.chisquare(observed).pvalue)
    assert result.statistic == pytest.approx(sum(part.statistic for part in result.parts))
    assert result.p == pytest.approx(stats.chi2.sf(result.statistic, 13))
    assert (result.dof, result.n, result.note) == (13, 131, "pooled as small: c, d")


def test_groups_too_small_even_together_are_left_out():
    pits = np.random.default_rng(0).random(29)
    result = uniformity_by_group(pits, [0] * 20 + [1] * 5 + [2] * 4, bins=4)
    assert (result.n, result.dof) == (20, 3)
    assert result.note == "left out as too small: 1, 2 (9 values)"
    with pytest.raises(ValueError, match="9 PIT values: expected at least 10"):
        uniformity_by_group(pits[:9], [0] * 9)
    with pytest.raises(ValueError, match="1 bins: expected at least 2"):
        uniformity_by_group(pits, [0] * 29, bins=1)
    with pytest.raises(ValueError, match="shapes differ"):
        uniformity_by_group(pits, [0] * 28)


def test_the_end_of_the_unit_interval_has_a_bin():
    result = uniformity_by_group([0.0] * 5 + [1.0] * 5, [0] * 10, bins=2)
    assert result.statistic == 0


def test_one_bad_offset_shows_in_its_group():
    generator = np.random.default_rng(3)
    pits, offsets = generator.random(4200), np.arange(4200) % 7
    pits[offsets == 6] **= 1.7
    result = uniformity_by_group(pits, offsets)
    assert min(result.parts, key=lambda part: part.p).name == "6"
    assert result.p < 1e-4


def test_size_on_laws_that_change_with_every_token(null):
    generator = np.random.default_rng(2)
    p_values: dict[str, list[float]] = {"ks": [], "cvm": [], "groups": [], "directed": []}
    for one in null:
        pits = one.pits(generator)
        p_values["ks"].append(kolmogorov_smirnov(pits).p)
        p_values["cvm"].append(cramer_von_mises(pits).p)
        p_values["groups"].append(uniformity_by_group(pits, np.arange(len(pits)) % 5, bins=10).p)
        p_values["directed"].append(directed(one.in_set, one.mass).p)
    for name, values in p_values.items():
        assert contains(int((np.array(values) <= 0.05).sum()), REPLICATES), name


def test_a_pit_without_its_uniform_is_not_uniform(null):
    # The check above can fail: with V fixed at 1 the same correct streams are rejected.
    one = null[0]
    ordered = (one.p * (one.q - one.p < one.of(one.q - one.p)[:, None])).sum(axis=1)
    assert kolmogorov_smirnov(randomised_pit(ordered, one.of(one.p), np.ones(500))).p < 1e-6


def test_a_direction_by_hand():
    # Three hits of four where 0.5, 0.5, 0.2 and 0.8 were due.
    result = directed([True, True, False, True], [0.5, 0.5, 0.2, 0.8])
    assert result.n == 4 and result.bias == pytest.approx(0.25)
    assert result.z == pytest.approx(1 / math.sqrt(0.25 + 0.25 + 0.16 + 0.16))
    assert result.p == pytest.approx(2 * stats.norm.sf(result.z))
    spread = np.array([0.5, 0.5, -0.2, 0.2]).var() * 4
    error = math.sqrt(max(0.82, spread)) / 4
    assert (result.low, result.high) == pytest.approx((0.25 - 1.959964 * error, 0.25 + 1.959964 * error))
    reach = math.sqrt(math.log(40) / 8)
    assert (result.azuma_low, result.azuma_high) == pytest.approx((0.25 - reach, 0.25 + reach))


def test_tv_of_three_hundredths_is_seen_at_the_design_size():
    generator = np.random.default_rng(5)
    found = []
    for _ in range(20):
        share = 0.03 / stream(generator, 9_200).tv
        one = stream(generator, 9_200, share)
        found.append(directed(one.in_set, one.mass))
    assert all(result.p < 0.01 and result.bias > 0 for result in found)
    assert np.mean([result.bias for result in found]) == pytest.approx(0.03, abs=0.003)
    assert np.median([result.tv_lower for result in found]) > 0.02
    # The same streams seen from the other side have the same bias with the other sign, and the same TV.
    other = directed(1 - one.in_set, 1 - one.mass)
    assert other.bias == pytest.approx(-found[-1].bias) and other.tv_lower == pytest.approx(found[-1].tv_lower)


@pytest.mark.parametrize("share", [0.0, 0.02, 0.2])
def test_bounds_hold_as_often_as_they_say(share):
    generator = np.random.default_rng(6)
    trials, above, missed, azuma_missed = 600, 0, 0, 0
    for _ in range(trials):
        one = stream(generator, 400, share)
        result, truth = directed(one.in_set, one.mass), share * one.tv
        above += result.tv_lower > truth
        missed += not result.low <= truth <= result.high
        azuma_missed += not result.azuma_low <= truth <= result.azuma_high
    assert binomial_interval(above, trials, level=0.99).low <= 0.05
    assert binomial_interval(missed, trials, level=0.99).low <= 0.05
    assert azuma_missed <= missed and azuma_missed / trials < 0.02
    assert above > 0.01 * trials  # a bound that never errs would say nothing


def test_sets_of_tiny_mass_that_are_often_hit_do_not_fool_the_interval():
    # The null variance is 50 times too small here; with it alone the bound exceeds the truth in about 40 % of cases.
    generator = np.random.default_rng(7)
    results = [directed(generator.random(1000) < 0.05, np.full(1000, 0.001)) for _ in range(300)]
    assert np.mean([result.tv_lower > 0.049 for result in results]) < 0.08
    assert np.mean([result.low <= 0.049 <= result.high for result in results]) > 0.9
    assert all(result.p < 1e-6 for result in results)


def test_what_cannot_happen_settles_it():
    result = directed([0] * 9 + [1], np.zeros(10))
    assert result.z == math.inf and result.p == 0
    silent = directed(np.zeros(10), np.zeros(10))
    assert (silent.z, silent.p, silent.bias, silent.tv_lower) == (0, 1, 0, 0)
    assert (silent.low, silent.high) == (silent.azuma_low, silent.azuma_high)
    always = directed(np.ones(10), np.zeros(10))
    assert always.tv_lower == pytest.approx(1 - math.sqrt(math.log(40) / 20))


def test_the_lower_bound_starts_where_the_two_sided_test_rejects():
    mass = np.full(400, 0.5)
    for hits in range(180, 221):
        result = directed(np.arange(400) < hits, mass)
        assert (result.tv_lower > 0) == (abs(result.z) > 1.9600), hits
    far = directed(np.arange(400) < 240, mass)
    assert far.tv_lower == pytest.approx(far.bias - 1.644854 * 0.025, abs=1e-4)


def test_equivalence_is_shown_only_with_enough_data():
    generator = np.random.default_rng(8)
    small, large = stream(generator, 200), stream(generator, 20_000)
    assert equivalence(small.in_set, small.mass, 0.03).p > 0.05
    shown = equivalence(large.in_set, large.mass, 0.03)
    assert shown.p < 0.001 and "shown at alpha 0.05" in shown.note and "not shown" not in shown.note
    assert "not shown" in equivalence(small.in_set, small.mass, 0.03).note


def test_equivalence_by_hand():
    # 110 hits of 200 evens, δ = .1: the near side is .05 away with the variance of hits at .6.
    result = equivalence(np.arange(200) < 110, np.full(200, 0.5), 0.1)
    error = math.sqrt(max(0.6 * 0.4, 0.55 * 0.45) / 200)
    assert result.statistic == pytest.approx(0.05 / error)
    assert result.p == pytest.approx(stats.norm.sf(result.statistic))
    assert result.n == 200
    # Its mirror image, and a side whose own variance is smaller than that at the margin.
    assert equivalence(np.arange(200) < 90, np.full(200, 0.5), 0.1).p == pytest.approx(result.p)
    low = equivalence(np.arange(200) < 170, np.full(200, 0.9), 0.1)
    assert low.statistic == pytest.approx(0.05 / math.sqrt(0.8 * 0.2 / 200))


def test_a_bias_at_the_margin_passes_for_equivalent_at_the_level_at_most():
    generator = np.random.default_rng(9)
    trials, delta = 600, 0.1
    for sign in (-1, 1):
        passed = sum(
            equivalence(generator.random(300) < 0.4 + sign * delta, np.full(300, 0.4), delta).p <= 0.05
            for _ in range(trials)
        )
        assert contains(passed, trials), sign


def test_a_set_that_is_never_hit_shows_little():
    # Bias +δ and no hit at all has probability .99^100 = .37: no such sample may show |bias| < δ.
    assert equivalence(np.zeros(100), np.full(100, 1e-6), 0.01).p > 0.1
    assert equivalence(np.zeros(2000), np.full(2000, 1e-6), 0.01).p < 0.001


def test_bets_by_hand():
    result = e_process([2.0, 0.0, 4.0], [0.5])
    assert np.exp(result.log_e) == pytest.approx([1.5, 0.75, 1.875])
    assert (result.n, result.first) == (3, None)
    assert result.largest == pytest.approx(math.log(1.875)) and result.p == pytest.approx(1 / 1.875)
    both = e_process([2.0, 0.0], [0.5, 0.25])
    assert np.exp(both.log_e) == pytest.approx([(1.5 + 1.25) / 2, (1.5 * 0.5 + 1.25 * 0.75) / 2])
    gone = e_process([2.0, 0.0], [0.5])
    assert gone.largest == pytest.approx(math.log(1.5)) and gone.log_e[-1] < 0
    losing = e_process([0.0, 0.0])
    assert losing.p == 1 and losing.largest == 0
    assert e_process([2.0, 2.0, 2.0], [0.5], alpha=1 / 1.5**2 + 1e-9).first == 2
    impossible = e_process([1.0, math.inf, 0.0])
    assert impossible.p == 0 and impossible.first == 2 and impossible.log_e[-1] == math.inf


def test_no_stop_crosses_too_often_under_the_null_and_all_cross_under_the_rival(null):
    crossed = sum(e_process(one.of(one.q) / one.of(one.p)).first is not None for one in null)
    assert crossed <= 0.05 * len(null)
    generator = np.random.default_rng(10)
    rivals = [stream(generator, 500, 1.0) for _ in range(20)]
    found = [e_process(one.of(one.q) / one.of(one.p)) for one in rivals]
    assert all(result.first is not None and result.first < 300 and result.p < 1e-3 for result in found)
    for result in found:
        reached = np.flatnonzero(result.log_e >= math.log(20))
        assert result.first == reached[0] + 1


def test_a_fair_bet_has_mean_one_over_every_text():
    generator = np.random.default_rng(11)
    p, q = generator.dirichlet(np.ones(3), (2, 4))  # [4, V] each: four tokens, three to choose from
    mean = 0.0
    for text in itertools.product(range(3), repeat=4):
        steps = np.arange(4), np.array(text)
        mean += p[steps].prod() * math.exp(e_process(q[steps] / p[steps]).log_e[-1])
    assert mean == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: directed([0, 2], [0.1, 0.1]), "in_set has values other than 0 and 1"),
        (lambda: directed([0, 1], [0.1]), r"shapes differ: in_set \(2,\), mass \(1,\)"),
        (lambda: directed([1], [1.2]), "mass is 1.2 at token 0"),
        (lambda: directed([], []), r"mass has shape \(0,\)"),
        (lambda: directed([1], [0.2], level=1.0), "level 1.0: expected a number between 0 and 1"),
        (lambda: equivalence([1], [0.2], 0.0), "delta 0.0: expected a bias in probability above 0"),
        (lambda: equivalence([1], [0.2], 0.1, alpha=2), "alpha 2: expected"),
        (lambda: e_process([]), r"ratios has shape \(0,\)"),
        (lambda: e_process([1.0, -1.0]), "ratio -1.0 at token 1"),
        (lambda: e_process([math.nan]), "ratio nan at token 0"),
        (lambda: e_process([1.0], [0.5, 1.0]), r"epsilons \(0.5, 1.0\): expected"),
        (lambda: e_process([1.0], []), r"epsilons \(\)"),
        (lambda: e_process([1.0], alpha=0), "alpha 0: expected"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()
