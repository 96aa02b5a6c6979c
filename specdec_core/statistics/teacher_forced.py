"""One-sample tests of a decoder whose target is at hand: the law p_t that token t must have is known.

Every token x_t is scored under p_t given its own prefix (the target is forced along the text, as a teacher does), so
that the tests are exact within a sequence as between sequences, however much a text repeats itself. What is chosen
for token t (the order of the vocabulary, the set A_t, the rival law q_t, the group) may depend on everything before
x_t and never on x_t itself. A token's offset in its round is such a thing; whether it was accepted is not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike

from specdec_core.statistics.results import ChiSquare, TestResult, chi_square_tail

EPSILONS = (0.02, 0.05, 0.1, 0.2, 0.5, 0.9)
_ROUNDING = 1e-9  # how far sums of probabilities may leave [0, 1]
_LEAST_EXPECTED = 5  # a bin that expects fewer has no χ² law


@dataclass(frozen=True)
class Directed:
    """Excess of the emitted tokens in predictable sets A_t over the mass p_t(A_t) that the target gives them.

    bias        (1/n) Σ [1{x_t ∈ A_t} − p_t(A_t)], in probability, −1 … 1. Its expectation is the mean over t of
                r_t(A_t) − p_t(A_t), r_t being the law that was really sampled, and so, in absolute value, a *lower
                bound* of the mean total variation (TV) between r_t and p_t. It reaches TV for A_t = {r_t > p_t}.
    z, p        the bias in null standard deviations √Σ p_t(A_t)(1 − p_t(A_t)), and its two-sided normal p-value
    low, high   normal interval of the expected bias at `level`
    azuma_low, azuma_high   the same without a normal limit: Hoeffding–Azuma, valid at every n, and wider
    tv_lower    lower confidence bound of the mean TV at `level`, one-sided; 0 where the data show none
    """

    n: int
    bias: float
    z: float
    p: float
    low: float
    high: float
    azuma_low: float
    azuma_high: float
    tv_lower: float
    level: float


@dataclass(frozen=True, eq=False)
class EProcess:
    """Evidence against the target's law, valid at any time: under it P(E_t ≥ 1/α for any t) ≤ α (Ville).

    log_e    `[n]`, natural logarithm of E after each token
    largest  natural logarithm of the largest E, the start E_0 = 1 included (so ≥ 0)
    p        min(1, 1/max E): a p-value that may be looked at after every token
    first    how many tokens it took E to reach 1/α, counted from 1; None if it never did
    """

    n: int
    log_e: np.ndarray
    largest: float
    p: float
    first: int | None


def randomised_pit(below: ArrayLike, at: ArrayLike, uniforms: ArrayLike) -> np.ndarray:
    """Randomised probability integral transform U_t = F_t(x_t−) + V_t·p_t(x_t), `[n]` in [0, 1].

    below     `[n]`, the mass p_t of the tokens that come before x_t in an order of the vocabulary. Any order fixed
              before x_t is drawn will do; ascending q − p gives the most power against the rival law q.
    at        `[n]`, the mass p_t(x_t) of the emitted token
    uniforms  `[n]`, V_t uniform on [0, 1] from a stream of their own, not one the decoder has used

    If x_t ~ p_t given its prefix, the U_t are independent and uniform (Rosenblatt, Remarks on a Multivariate
    Transformation, 1952), within a sequence too. A token of no mass leaves U_t = F_t(x_t−): what cannot happen is
    seen by `directed` with A_t = {p_t = 0}, not here.

    Raises ValueError for empty data, unequal lengths, NaN, and masses that leave [0, 1] by more than 1e-9.
    """
    lower, mass, draws = _masses("below", below), _masses("at", at), _masses("uniforms", uniforms)
    _same_length(below=lower, at=mass, uniforms=draws)
    over = lower + mass > 1 + _ROUNDING
    if over.any():
        where = int(np.argmax(over))
        raise ValueError(
            f"below + at is {lower[where] + mass[where]:.10g} at token {where}: expected at most 1. "
            "`below` is the mass before the token, without its own"
        )
    return np.clip(lower + draws * mass, 0.0, 1.0)


def kolmogorov_smirnov(pits: ArrayLike) -> TestResult:
    """Kolmogorov–Smirnov distance of PIT values `[n]` from the uniform law, two-sided."""
    values = _masses("pits", pits)
    from scipy.stats import kstest

    found = kstest(values, "uniform")
    return TestResult("Kolmogorov–Smirnov", float(found.statistic), float(found.pvalue), len(values))


def cramer_von_mises(pits: ArrayLike) -> TestResult:
    """Cramér–von Mises distance of PIT values `[n]` from the uniform law; n ≥ 2."""
    values = _masses("pits", pits)
    if len(values) < 2:
        raise ValueError(f"{len(values)} PIT value: Cramér–von Mises needs at least 2")
    from scipy.stats import cramervonmises

    found = cramervonmises(values, "uniform")
    return TestResult("Cramér–von Mises", float(found.statistic), float(found.pvalue), len(values))


def uniformity_by_group(pits: ArrayLike, groups: ArrayLike, bins: int = 20) -> ChiSquare:
    """χ² of PIT values `[n]` in equal bins within each group, summed over the groups; `groups` `[n]` of labels.

    A fault that strikes at one offset of a round stands out in its group and drowns in the whole. `parts` holds one
    result a group. A group of m values gets min(bins, m//5) bins, so that each expects 5 at least; groups too small
    for two bins are put together as one, and left out if that is still too small: `note` says so, and `n` counts
    the values used.

    Raises ValueError if `bins` < 2, or if no group can be tested.
    """
    values = _masses("pits", pits)
    labels = np.asarray(groups)
    _same_length(pits=values, groups=labels)
    if bins < 2:
        raise ValueError(f"{bins} bins: expected at least 2")
    names, members = np.unique(labels, return_inverse=True)
    samples = {str(name): values[members == index] for index, name in enumerate(names)}
    small = [name for name, sample in samples.items() if len(sample) < 2 * _LEAST_EXPECTED]
    note = ""
    if small:
        pooled = np.concatenate([samples.pop(name) for name in small])
        if len(pooled) >= 2 * _LEAST_EXPECTED:
            samples["small groups"] = pooled
            note = f"pooled as small: {', '.join(small)}"
        else:
            note = f"left out as too small: {', '.join(small)} ({len(pooled)} values)"
    if not samples:
        raise ValueError(f"{len(values)} PIT values: expected at least {2 * _LEAST_EXPECTED}, two bins of 5")
    parts = tuple(_uniform_bins(name, sample, bins) for name, sample in samples.items())
    statistic, dof = sum(part.statistic for part in parts), sum(part.dof for part in parts)
    n = sum(part.n for part in parts)
    return ChiSquare("uniformity by group", statistic, chi_square_tail(statistic, dof), n, note, dof, parts)


def directed(in_set: ArrayLike, mass: ArrayLike, *, level: float = 0.95) -> Directed:
    """Test of the martingale Σ 1{x_t ∈ A_t} − p_t(A_t) over predictable sets A_t, {q_t > p_t} for a rival law q.

    in_set  `[n]` of booleans, x_t ∈ A_t
    mass    `[n]`, p_t(A_t)

    The normal p-value wants Σ p(1 − p) of 10 or more. The interval takes the larger of the null variance and the
    sample's own, for away from the null the former can be far too small (a set of tiny mass that the decoder often
    hits). Where every mass is 0 or 1 a single token on the wrong side gives p = 0, and without any variance, in the
    sample either, the interval and tv_lower are Azuma's.

    Raises ValueError for empty data, unequal lengths, values other than 0 and 1 in `in_set`, masses outside [0, 1].
    """
    hits, masses = _sets(in_set, mass)
    if not 0 < level < 1:
        raise ValueError(f"level {level}: expected a number between 0 and 1, such as 0.95")
    n = len(hits)
    excess = hits - masses
    bias = float(excess.mean())
    z = _standardised(bias, math.sqrt(_variance(masses)) / n)
    error = _standard_error(excess, masses)
    azuma = math.sqrt(math.log(2 / (1 - level)) / (2 * n))  # each term has range 1, whatever its set
    # Ten hits out of ten in sets of mass 0 do not prove a rate of 1: without a variance only Azuma's ends hold.
    reach = NormalDist().inv_cdf((1 + level) / 2) * error if error > 0 else azuma
    tv_lower = _least_shift(abs(bias), error, 1 - level) if error > 0 else max(0.0, abs(bias) - azuma)
    return Directed(
        n=n,
        bias=bias,
        z=z,
        p=math.erfc(abs(z) / math.sqrt(2)),
        low=bias - reach,
        high=bias + reach,
        azuma_low=bias - azuma,
        azuma_high=bias + azuma,
        tv_lower=tv_lower,
        level=level,
    )


def equivalence(in_set: ArrayLike, mass: ArrayLike, delta: float, alpha: float = 0.05) -> TestResult:
    """Two one-sided tests (Schuirmann, 1987) that the expected bias of `directed` lies within (−delta, delta).

    A small p *shows* equivalence up to the pre-registered `delta` (in probability) along this one direction; a large
    p of a test of equality shows nothing. The p-value is the larger of the two one-sided ones, each with the
    variance that a bias of ±delta, evenly spread, would have (or the sample's own if larger): a set that is never
    hit has no variance of its own. `statistic` is the z of the weaker side, positive inside (−delta, delta).

    Raises ValueError unless 0 < delta ≤ 1 and 0 < alpha < 1, and as `directed` does.
    """
    hits, masses = _sets(in_set, mass)
    if not 0 < delta <= 1:
        raise ValueError(f"delta {delta}: expected a bias in probability above 0, at most 1, such as 0.03")
    _check_alpha(alpha)
    excess = hits - masses
    bias = float(excess.mean())
    above = _standardised(bias + delta, _standard_error(excess, masses - delta))
    under = _standardised(delta - bias, _standard_error(excess, masses + delta))
    weaker = min(above, under)
    p = 0.5 * math.erfc(weaker / math.sqrt(2))
    verdict = "shown" if p <= alpha else "not shown"
    note = f"|bias| < {delta:g} {verdict} at alpha {alpha:g}; bias {bias:.4f}"
    return TestResult("equivalence (TOST)", weaker, p, len(hits), note)


def e_process(ratios: ArrayLike, epsilons: Sequence[float] = EPSILONS, *, alpha: float = 0.05) -> EProcess:
    """Product of (1 − ε) + ε·r_t, averaged over ε: a bet against the target that has mean ≤ 1 if the target is right.

    ratios    `[n]`, r_t = q_t(x_t)/p_t(x_t) ≥ 0 for any rival law q_t fixed before x_t; infinite where p_t(x_t) = 0,
              which settles the matter
    epsilons  the shares of q in the mixtures (1 − ε)p + εq that are betted on, each in (0, 1). 1 is not allowed: a
              single ratio of 0 would lose the whole stake.

    Computed in logarithms. Source: Ramdas et al., Game-Theoretic Statistics and Safe Anytime-Valid Inference, 2023.
    Raises ValueError for empty data, NaN or negative ratios, and shares outside (0, 1).
    """
    growth = np.asarray(ratios, dtype=float)
    _one_dimension("ratios", growth)
    wrong = ~(growth >= 0)  # NaN too
    if wrong.any():
        where = int(np.argmax(wrong))
        raise ValueError(f"ratio {growth[where]} at token {where}: expected q(x)/p(x) ≥ 0")
    shares = np.asarray(epsilons, dtype=float)
    if shares.size == 0 or not ((shares > 0) & (shares < 1)).all():
        raise ValueError(f"epsilons {tuple(epsilons)}: expected one or more numbers between 0 and 1, both excluded")
    _check_alpha(alpha)
    log_products = np.cumsum(np.log1p(shares[:, None] * (growth - 1)), axis=1)
    log_e = np.logaddexp.reduce(log_products, axis=0) - math.log(len(shares))
    largest = max(0.0, float(log_e.max()))
    reached = log_e >= math.log(1 / alpha)
    first = int(np.argmax(reached)) + 1 if reached.any() else None
    return EProcess(n=len(growth), log_e=log_e, largest=largest, p=math.exp(-largest), first=first)


def _uniform_bins(name: str, values: np.ndarray, bins: int) -> ChiSquare:
    count = min(bins, len(values) // _LEAST_EXPECTED)
    places = np.minimum((values * count).astype(int), count - 1)  # U = 1 belongs to the last bin
    observed = np.bincount(places, minlength=count)
    expected = len(values) / count
    statistic = float(((observed - expected) ** 2).sum() / expected)
    return ChiSquare(name, statistic, chi_square_tail(statistic, count - 1), len(values), f"{count} bins", count - 1)


def _variance(masses: np.ndarray) -> float:
    """Variance of the number of hits, Σ p(1 − p), for independent hits of these probabilities."""
    return float((masses * (1 - masses)).sum())


def _standard_error(excess: np.ndarray, masses: np.ndarray) -> float:
    """Of the mean excess: from hits of probability `masses`, or from the sample if that is larger."""
    supposed = _variance(np.clip(masses, 0.0, 1.0))
    return math.sqrt(max(supposed, float(excess.var()) * len(excess))) / len(excess)


def _standardised(value: float, error: float) -> float:
    if error > 0:
        return value / error
    return math.copysign(math.inf, value) if abs(value) > _ROUNDING else 0.0


def _least_shift(distance: float, error: float, alpha: float) -> float:
    """The smallest |shift| of a normal variable whose distance from 0 exceeds `distance` with probability > alpha.

    Inverting the test of |shift| ≤ c counts both signs, so the bound holds at shift 0 too, where the larger of two
    one-sided bounds would be wrong twice as often as it says.
    """
    z = distance / error

    def tail(shift: float) -> float:
        return 0.5 * (math.erfc((z - shift) / math.sqrt(2)) + math.erfc((z + shift) / math.sqrt(2)))

    if tail(0.0) >= alpha:
        return 0.0
    low, high = 0.0, z
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if tail(middle) < alpha else (low, middle)
    return low * error


def _sets(in_set: ArrayLike, mass: ArrayLike) -> tuple[np.ndarray, np.ndarray]:
    hits, masses = np.asarray(in_set), _masses("mass", mass)
    _same_length(in_set=hits, mass=masses)
    if not np.isin(hits, (0, 1)).all():
        raise ValueError("in_set has values other than 0 and 1: expected whether each token lies in its set")
    return hits.astype(float), masses


def _masses(name: str, values: ArrayLike) -> np.ndarray:
    """`values` as `[n]` floats in [0, 1], rounding errors taken off."""
    data = np.asarray(values, dtype=float)
    _one_dimension(name, data)
    wrong = ~((data >= -_ROUNDING) & (data <= 1 + _ROUNDING))  # NaN too
    if wrong.any():
        where = int(np.argmax(wrong))
        raise ValueError(f"{name} is {data[where]} at token {where}: expected a number in [0, 1]")
    return np.clip(data, 0.0, 1.0)


def _one_dimension(name: str, data: np.ndarray) -> None:
    if data.ndim != 1 or data.size == 0:
        raise ValueError(f"{name} has shape {data.shape}: expected [n], one value a token, at least one")


def _same_length(**series: np.ndarray) -> None:
    if len({one.shape for one in series.values()}) > 1:
        given = ", ".join(f"{name} {one.shape}" for name, one in series.items())
        raise ValueError(f"shapes differ: {given}. Expected one value a token in each")


def _check_alpha(alpha: float) -> None:
    if not 0 < alpha < 1:
        raise ValueError(f"alpha {alpha}: expected a number between 0 and 1, such as 0.05")
