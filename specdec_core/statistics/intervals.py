"""Intervals for pooled ratios, medians and proportions, and the levels that hold for several at once.

A speed is Σtokens/Σtime, never a mean of rates, and two speeds are compared prompt by prompt: the unit that is
resampled is the prompt, with everything measured on it. Intervals of ratios are made on the log scale, so that the
interval of a/b is the reciprocal of the interval of b/a.
"""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import ArrayLike

RESAMPLES = 9_999
_CELLS_AT_ONCE = 4_000_000  # resamples × observations held in memory at a time: 32 MB of float64
_PRODUCTS_ON_ONE_THREAD = 250_000  # OpenBLAS starts threads above 2^18 multiplications


@dataclass(frozen=True)
class Interval:
    """An estimate with its confidence interval; `n` counts the independent units (prompts, pairs, trials).

    An end may be infinite where the data leave it open: one prompt bounds no ratio.
    """

    estimate: float
    low: float
    high: float
    level: float
    n: int
    method: str

    def excludes(self, value: float) -> bool:
        """Whether the interval lies wholly on one side of `value`."""
        return self.low > value or self.high < value

    def inside(self, low: float, high: float) -> bool:
        """Whether the whole interval lies in [low, high]."""
        return low <= self.low and self.high <= high

    def outside(self, low: float, high: float) -> bool:
        """Whether the whole interval misses [low, high]."""
        return self.high < low or self.low > high

    def ends(self) -> list[float | None]:
        """[low, high] for JSON, which has no infinity: an open end is None."""
        return [end if math.isfinite(end) else None for end in (self.low, self.high)]

    def __str__(self) -> str:
        return f"{self.estimate:.3g} [{self.low:.3g}, {self.high:.3g}]"


def ratio_interval(
    numerator: ArrayLike, denominator: ArrayLike, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0
) -> Interval:
    """Interval of a ratio of pooled sums, Σnumerator/Σdenominator, by bootstrap over the n prompts.

    numerator, denominator  `[n]` or `[n, m]`, not negative, the same shape: row i belongs to prompt i. With m columns
        the ratio is the product over columns, Π_j ΣN_j / Π_j ΣD_j. A speedup is the case m = 2,
        `ratio_interval(columns(tokens_sd, seconds_ar), columns(seconds_sd, tokens_ar))`.

    The resampled log ratios give percentiles; their distances from the estimate are stretched by
    √(n/(n−1))·t_{n−1}/z, since percentiles alone are too narrow for few prompts (Hesterberg, What Teachers Should
    Know About the Bootstrap, 2015, section 4.1: "expanded percentile"). Simulated coverage at 8 prompts: 0.94, where
    plain percentiles give 0.88. One prompt gives (0, ∞). Seeded: the same data give the same interval.

    Raises ValueError for empty, negative, NaN or infinite data, and where a whole column sums to zero.
    """
    above, below = _table("numerator", numerator), _table("denominator", denominator)
    if above.shape != below.shape:
        raise ValueError(f"numerator has shape {above.shape} and denominator {below.shape}: they are paired by prompt")
    for name, table in (("numerator", above), ("denominator", below)):
        if (table.sum(axis=0) == 0).any():
            raise ValueError(f"a {name} sums to zero over all {len(table)} prompts, so the ratio has no logarithm")
    _check(level, resamples)
    n = len(above)
    columns = np.concatenate([above, below], axis=1)
    signs = np.concatenate([np.ones(above.shape[1]), -np.ones(below.shape[1])])
    centre = float(np.log(columns.sum(axis=0)) @ signs)
    if n == 1:
        return Interval(math.exp(centre), 0.0, math.inf, level, 1, "unbounded: one prompt")
    low, high = _log_quantiles(columns, signs, level, resamples, seed)
    stretch = _small_sample_stretch(level, n)
    return Interval(
        estimate=math.exp(centre),
        low=_exp(centre + stretch * min(low - centre, 0.0)),
        high=_exp(centre + stretch * max(high - centre, 0.0)),
        level=level,
        n=n,
        method=f"bootstrap of the log ratio over {n} prompts, {resamples} resamples, expanded percentile",
    )


def median_interval(values: ArrayLike, *, level: float = 0.95, resamples: int = RESAMPLES, seed: int = 0) -> Interval:
    """Percentile bootstrap interval of a median; values `[n]`, any unit. One value gives (−∞, ∞).

    Raises ValueError for empty, NaN or infinite data.
    """
    data = _finite("values", values)
    if data.ndim != 1:
        raise ValueError(f"values has shape {data.shape}: expected one dimension")
    _check(level, resamples)
    n = len(data)
    centre = float(np.median(data))
    if n == 1:
        return Interval(centre, -math.inf, math.inf, level, 1, "unbounded: one value")
    generator = np.random.default_rng(seed)
    medians = np.concatenate(
        [np.median(data[generator.integers(0, n, (count, n))], axis=1) for count in _batches(resamples, n)]
    )
    low, high = np.quantile(medians, _tails(level))
    return Interval(
        centre, float(low), float(high), level, n, f"bootstrap of the median, {resamples} resamples, percentile"
    )


def binomial_interval(
    successes: int, trials: int, *, level: float = 0.95, method: Literal["exact", "wilson"] = "exact"
) -> Interval:
    """Interval of a proportion: Clopper–Pearson ('exact', never below its level) or Wilson ('wilson', shorter).

    Raises ValueError unless 0 ≤ successes ≤ trials and trials ≥ 1.
    """
    if trials < 1 or not 0 <= successes <= trials:
        raise ValueError(f"{successes} successes in {trials} trials: expected 0 ≤ successes ≤ trials, trials ≥ 1")
    if method not in ("exact", "wilson"):
        raise ValueError(f"unknown method {method!r}: expected 'exact' (Clopper–Pearson) or 'wilson'")
    _check(level, 1)
    from scipy.stats import binomtest  # here and not above: it takes longer to import than the command `claims` may

    found = binomtest(successes, trials).proportion_ci(level, method=method)
    name = {"exact": "Clopper–Pearson", "wilson": "Wilson"}[method]
    return Interval(successes / trials, float(found.low), float(found.high), level, trials, name)


def simultaneous(level: float, comparisons: int, method: Literal["sidak", "bonferroni"] = "sidak") -> float:
    """Level that each of several intervals needs so that all of them hold at once with probability `level`.

    Bonferroni (1 − (1−level)/m) holds under any dependence; Šidák (level^{1/m}) is slightly shorter and holds for
    independent or positively dependent intervals.
    """
    _check(level, 1)
    if comparisons < 1:
        raise ValueError(f"{comparisons} comparisons: expected at least 1")
    if method == "sidak":
        return level ** (1 / comparisons)
    if method == "bonferroni":
        return 1 - (1 - level) / comparisons
    raise ValueError(f"unknown method {method!r}: expected 'sidak' or 'bonferroni'")


def columns(*series: ArrayLike) -> np.ndarray:
    """Series `[n]` side by side, `[n, m]`: the factors of a ratio with several."""
    return np.stack([np.asarray(one, dtype=float) for one in series], axis=1)


def _log_quantiles(
    table: np.ndarray, signs: np.ndarray, level: float, resamples: int, seed: int
) -> tuple[float, float]:
    """Lower and upper quantile of Σ_c signs[c]·log Σ_i table[i, c] over resamples of the rows."""
    sums = _resampled_sums(table, resamples, seed)
    with np.errstate(divide="ignore", invalid="ignore"):
        logs = np.log(sums) @ signs
    lower, upper = _tails(level)
    # A resample with zeros above and below says nothing about the ratio: it counts against both ends.
    unknown = np.isnan(logs)
    at_low = np.where(unknown, -np.inf, logs)
    at_high = np.where(unknown, np.inf, logs)
    return (
        float(np.quantile(at_low, lower, method="inverted_cdf")),
        float(np.quantile(at_high, upper, method="inverted_cdf")),
    )


def _resampled_sums(table: np.ndarray, resamples: int, seed: int) -> np.ndarray:
    """Column sums of `resamples` draws of n rows with replacement, `[resamples, c]`."""
    n = len(table)
    if resamples * n <= _CELLS_AT_ONCE:
        return _thin_product(_weights(n, resamples, seed), table)
    generator = np.random.default_rng(seed)
    return np.concatenate(
        [_thin_product(_draw_weights(generator, count, n), table) for count in _batches(resamples, n)]
    )


def _thin_product(weights: np.ndarray, table: np.ndarray) -> np.ndarray:
    """weights @ table in pieces small enough that BLAS keeps each on one thread: 20 times faster on a busy machine."""
    pieces = math.ceil(weights.size * table.shape[1] / _PRODUCTS_ON_ONE_THREAD)
    return np.concatenate([piece @ table for piece in np.array_split(weights, pieces)])


@lru_cache(maxsize=2)
def _weights(n: int, resamples: int, seed: int) -> np.ndarray:
    # A sweep asks for dozens of intervals over the same prompts: they share one set of resamples.
    return _draw_weights(np.random.default_rng(seed), resamples, n)


def _draw_weights(generator: np.random.Generator, count: int, n: int) -> np.ndarray:
    """How often each of n rows is drawn in each of `count` resamples, `[count, n]`."""
    drawn = generator.integers(0, n, (count, n)) + np.arange(count)[:, None] * n
    return np.bincount(drawn.ravel(), minlength=count * n).reshape(count, n).astype(float)


def _batches(total: int, width: int) -> list[int]:
    size = max(1, _CELLS_AT_ONCE // width)
    return [min(size, total - done) for done in range(0, total, size)]


def _small_sample_stretch(level: float, n: int) -> float:
    upper = _tails(level)[1]
    normal = statistics.NormalDist().inv_cdf(upper)
    return math.sqrt(n / (n - 1)) * _student_quantile(upper, n - 1) / normal


@lru_cache(maxsize=64)
def _student_quantile(probability: float, freedom: int) -> float:
    from scipy.special import stdtrit

    return float(stdtrit(freedom, probability))


def _tails(level: float) -> tuple[float, float]:
    return (1 - level) / 2, (1 + level) / 2


def _exp(value: float) -> float:
    return math.exp(value) if value < 700 else math.inf


def _table(name: str, values: ArrayLike) -> np.ndarray:
    data = _finite(name, values)
    if data.ndim not in (1, 2):
        raise ValueError(f"{name} has shape {data.shape}: expected [n] or [n, m]")
    if (data < 0).any():
        raise ValueError(f"{name} has negative values (first at row {int(np.argwhere(data < 0)[0][0])})")
    return data.reshape(len(data), -1)


def _finite(name: str, values: ArrayLike) -> np.ndarray:
    data = np.asarray(values, dtype=float)
    if data.size == 0:
        raise ValueError(f"{name} is empty: expected at least one observation")
    finite = np.isfinite(data)
    if not finite.all():
        where = int(np.argwhere(~finite)[0][0])
        raise ValueError(f"{name} is not finite at row {where}: {data[where]}. Drop or repair it before pooling")
    return data


def _check(level: float, resamples: int) -> None:
    if not 0 < level < 1:
        raise ValueError(f"level {level}: expected a number between 0 and 1, such as 0.95")
    if resamples < 1:
        raise ValueError(f"{resamples} resamples: expected at least 1")
