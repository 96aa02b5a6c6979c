"""Two samples of sequences compared, such as speculative and autoregressive text from the same prompts.

The unit is the *sequence*: tokens of one sequence depend on each other, and those of one prompt have a law of their
own. Repetition within sequences inflates a χ² of pooled token counts, matching by prompt deflates it, and the two can
cancel; so the nominal χ² law is no reference. Labels of whole sequences, permuted within their prompt (the stratum),
are one: if both methods sample the same law, every such relabelling is as likely as the one observed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike

from specdec_core.statistics.results import ChiSquare, TestResult

RESAMPLES = 1_999
PAD = -1
_CELLS_AT_ONCE = 250_000  # relabellings × bins held at a time: what fits a core's own cache
_TIES = 1e-9  # relative rounding within which two statistics are equal


@dataclass(frozen=True, eq=False)
class Bins:
    """Tokens `[k]` that have a bin of their own, in that order; all others share bin k, the last."""

    tokens: np.ndarray

    def __post_init__(self) -> None:
        if self.tokens.ndim != 1 or len(np.unique(self.tokens)) < len(self.tokens):
            raise ValueError(f"bins of tokens {self.tokens.tolist()}: expected [k] distinct token ids")

    @property
    def count(self) -> int:
        """How many bins there are, k + 1."""
        return len(self.tokens) + 1

    def index(self, tokens: ArrayLike) -> np.ndarray:
        """Bin of every token, in the shape of `tokens`; the pad −1 stays −1."""
        given = _tokens("tokens", tokens)
        order = np.argsort(self.tokens)
        places = np.searchsorted(self.tokens[order], given)
        if len(order) == 0:
            return np.where(given == PAD, PAD, 0)
        nearest = order[np.minimum(places, len(order) - 1)]
        return np.where(given == PAD, PAD, np.where(self.tokens[nearest] == given, nearest, len(order)))

    def merged(self, expected: ArrayLike, least: float = 5.0) -> Bins:
        """Bins of which each expects `least` or more: rarer ones fall into the last.

        expected  `[k + 1]` counts that the smaller of the two samples would have, from pilot data, never from the
                  samples under test
        """
        wanted = np.asarray(expected, dtype=float)
        if wanted.shape != (self.count,):
            raise ValueError(f"expected counts have shape {wanted.shape}: these are {self.count} bins")
        kept = [place for place in np.argsort(-wanted[:-1], kind="stable") if wanted[place] >= least]
        last = wanted.sum() - wanted[kept].sum()
        while kept and 0 < last < least:  # an empty last bin does no harm
            last += wanted[kept.pop()]
        return Bins(self.tokens[np.sort(np.array(kept, dtype=int))])


def pad(sequences: Sequence[ArrayLike]) -> np.ndarray:
    """Sequences of tokens of any length as one array `[S, L]`, short ones filled up with −1."""
    rows = [_tokens("a sequence", row) for row in sequences]
    table = np.full((len(rows), max((len(row) for row in rows), default=0)), PAD, dtype=np.int64)
    for place, row in enumerate(rows):
        table[place, : len(row)] = row
    return table


def choose_bins(pilot_tokens: ArrayLike, bins: int) -> Bins:
    """The `bins` most frequent tokens of pilot data (any shape, −1 ignored) get a bin each; of equals, smaller ids.

    From pilot data, since bins chosen on the samples under test are a choice after the fact. Fewer distinct tokens
    than `bins` make fewer bins. Raises ValueError for `bins` < 1 or no tokens.
    """
    if bins < 1:
        raise ValueError(f"{bins} bins: expected at least 1")
    pilot = _tokens("pilot_tokens", pilot_tokens)
    tokens, frequencies = np.unique(pilot[pilot != PAD], return_counts=True)
    if len(tokens) == 0:
        raise ValueError("pilot_tokens holds no tokens: expected pilot data to choose bins from")
    return Bins(tokens[np.argsort(-frequencies, kind="stable")[:bins]])


def counts(sequences: ArrayLike, bins: Bins) -> np.ndarray:
    """Tokens of each sequence in each bin, `[S, B]`, from sequences `[S, L]` padded with −1."""
    table = _sequences(sequences)
    places = bins.index(table)
    rows = np.broadcast_to(np.arange(len(table))[:, None], table.shape)
    real = places != PAD
    cells = rows[real] * bins.count + places[real]
    return np.bincount(cells, minlength=len(table) * bins.count).reshape(len(table), bins.count)


def chi_square(a: ArrayLike, b: ArrayLike) -> ChiSquare:
    """Nominal χ² of homogeneity of two vectors of counts `[B]`, empty bins dropped, not corrected for continuity.

    It supposes independent tokens of one law. Tokens of language models are not: see `permutation_chi_square`. `n`
    counts tokens. One bin that holds everything leaves nothing to test: dof 0, p 1.

    Raises ValueError for counts that are negative or not finite, unequal lengths, and an empty sample.
    """
    table = _pair(a, b)
    table = table[:, table.sum(axis=0) > 0]
    from scipy.stats import chi2_contingency  # here and not above: it takes longer to import than `claims` may

    found = chi2_contingency(table, correction=False)
    dof, smallest = int(found.dof), float(found.expected_freq.min())
    note = f"{dof} dof, smallest expected count {smallest:.3g}"
    return ChiSquare("χ² of pooled tokens", float(found.statistic), float(found.pvalue), int(table.sum()), note, dof)


def permutation_chi_square(
    counts: ArrayLike, labels: ArrayLike, strata: ArrayLike, resamples: int = RESAMPLES, seed: int = 0
) -> TestResult:
    """χ² of the pooled counts of two methods against its law under relabelling; `n` counts sequences.

    counts  `[S, B]`, one row a sequence        labels  `[S]` of booleans, which of the two methods made it
    strata  `[S]`, the prompt; labels move within a stratum only. One sequence of either label makes it a swap.

    p = (1 + #{permuted ≥ observed})/(1 + resamples), valid at every S and whatever the tokens' dependence. Raises
    ValueError for unequal lengths, labels other than 0 and 1, and if no stratum holds both labels.
    """
    table, design = _counts(counts), _Design(labels, strata)
    design.check(len(table))
    observed = float(_pooled_chi_squares(table, design.labels[None])[0])
    permuted = null_statistics(table, labels, strata, resamples, seed)
    return _permutation_result("χ² of pooled tokens, labels permuted", observed, permuted, len(table))


def null_statistics(
    counts: ArrayLike, labels: ArrayLike, strata: ArrayLike, resamples: int = RESAMPLES, seed: int = 0
) -> np.ndarray:
    """The χ² statistics `[resamples]` of `permutation_chi_square` under its relabellings: what its null looks like."""
    table, design = _counts(counts), _Design(labels, strata)
    design.check(len(table))
    width = max(table.shape)
    return np.concatenate([_pooled_chi_squares(table, batch) for batch in design.relabelled(resamples, seed, width)])


def mmd(
    sequences: ArrayLike,
    labels: ArrayLike,
    strata: ArrayLike,
    resamples: int = RESAMPLES,
    seed: int = 0,
    *,
    rate: float = 2.0,
) -> TestResult:
    """Maximum mean discrepancy of whole sequences, compared within strata; p by relabelling as above.

    The kernel of two sequences `[L]` is exp(−rate·d), d their mean Hamming distance: positive definite, so that with
    enough sequences any difference of their joint law shows, in the order of tokens too, which counts do not see. Few
    sequences show little: a tilt that the counts of a prompt betray at once takes far more sequences here.
    Two pads −1 at one place are equal, a pad and a token differ. The statistic is Σ_s w_s·MMD²_s over strata (biased,
    Gretton et al., A Kernel Two-Sample Test, 2012, equation 5), w_s = a·b/(a + b) for a and b sequences of the labels.

    A stratum with one sequence of either label says nothing, since a swap leaves its MMD as it is. Raises ValueError
    if all are so, and as `permutation_chi_square` does.
    """
    table, design = _sequences(sequences), _Design(labels, strata)
    design.check(len(table))
    if not rate > 0:
        raise ValueError(f"rate {rate}: expected a positive number")
    groups = [group for group in design.mixed() if len(group) > 2]
    if not groups:
        raise ValueError(
            "every stratum with both labels has one sequence of either, which a swap leaves as far apart as before: "
            "MMD needs two sequences of a label in some stratum"
        )
    kernels = [_hamming_kernel(table[group], rate) for group in groups]

    def statistic(batch: np.ndarray) -> np.ndarray:
        return sum(
            (_discrepancies(kernel, batch[:, group]) for group, kernel in zip(groups, kernels, strict=True)),
            start=np.zeros(len(batch)),
        )

    observed = float(statistic(design.labels[None])[0])
    batches = design.relabelled(resamples, seed, len(table))
    return _permutation_result("MMD (Hamming)", observed, np.concatenate([*map(statistic, batches)]), len(table))


class _Design:
    """Which sequence has which label in which stratum, and the relabellings that keep to the strata."""

    def __init__(self, labels: ArrayLike, strata: ArrayLike) -> None:
        given = np.asarray(labels)
        if given.ndim != 1 or not np.isin(given, (0, 1)).all():
            raise ValueError(f"labels of shape {given.shape}: expected [S] of booleans, one a sequence")
        self.labels = given.astype(bool)
        names = np.asarray(strata)
        if names.shape != given.shape:
            raise ValueError(
                f"strata have shape {names.shape} and labels {given.shape}: expected one a sequence in each"
            )
        self.strata = np.unique(names, return_inverse=True)[1]

    def check(self, sequences: int) -> None:
        if sequences != len(self.labels):
            raise ValueError(f"{sequences} sequences and {len(self.labels)} labels: expected one label a sequence")
        if not self.mixed():
            raise ValueError("no stratum holds sequences of both labels: there is nothing to permute")

    def mixed(self) -> list[np.ndarray]:
        """Rows of each stratum that holds both labels."""
        groups = (np.flatnonzero(self.strata == stratum) for stratum in np.unique(self.strata))
        return [group for group in groups if 0 < self.labels[group].sum() < len(group)]

    def relabelled(self, resamples: int, seed: int, width: int) -> Iterator[np.ndarray]:
        """Relabellings `[r, S]` in batches of at most _CELLS_AT_ONCE/width; the batches do not change the draws."""
        if resamples < 1:
            raise ValueError(f"{resamples} resamples: expected at least 1")
        generator = np.random.default_rng(seed)
        by_stratum = self.labels[np.argsort(self.strata, kind="stable")]
        size = max(1, _CELLS_AT_ONCE // width)
        for done in range(0, resamples, size):
            keys = self.strata + generator.random((min(size, resamples - done), len(self.labels)))
            # Sorting keeps strata apart and shuffles within them, so the r-th place of a stratum is a random member.
            batch = np.empty(keys.shape, dtype=bool)
            np.put_along_axis(batch, np.argsort(keys, axis=1), np.broadcast_to(by_stratum, keys.shape), axis=1)
            yield batch


def _pooled_chi_squares(table: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """χ² of homogeneity `[r]` between the pooled counts of either label, for labels `[r, S]` and counts `[S, B]`."""
    table = table[:, table.sum(axis=0) > 0]
    columns = table.sum(axis=0)
    total = columns.sum()
    ones = labels.astype(float) @ table
    size = ones.sum(axis=1)
    # Both rows of a bin are off by the same amount, so their terms add up to one with this factor.
    spread = ((ones - np.outer(size / total, columns)) ** 2 / columns).sum(axis=1)
    sizes = size * (total - size)
    return np.divide(total**2 * spread, sizes, out=np.zeros_like(sizes), where=sizes > 0)


def _hamming_kernel(rows: np.ndarray, rate: float) -> np.ndarray:
    """exp(−rate·mean Hamming distance) between rows `[m, L]`, `[m, m]`."""
    return np.exp(-rate * np.stack([(rows != row).mean(axis=1) for row in rows]))


def _discrepancies(kernel: np.ndarray, labels: np.ndarray) -> np.ndarray:
    """a·b/(a + b)·MMD² `[r]` of one stratum under labels `[r, m]`, of which every row has a ones and b zeros."""
    a = int(labels[0].sum())
    b = labels.shape[1] - a
    weights = np.where(labels, 1 / a, -1 / b)
    return a * b / (a + b) * np.einsum("ri,ri->r", weights @ kernel, weights)


def _permutation_result(name: str, observed: float, permuted: np.ndarray, n: int) -> TestResult:
    reached = int((permuted >= observed - _TIES * max(1.0, abs(observed))).sum())
    note = f"{len(permuted)} relabellings within strata, mean {permuted.mean():.4g}"
    return TestResult(name, observed, (1 + reached) / (1 + len(permuted)), n, note)


def _pair(a: ArrayLike, b: ArrayLike) -> np.ndarray:
    first, second = np.asarray(a, dtype=float), np.asarray(b, dtype=float)
    if first.ndim != 1 or first.shape != second.shape:
        raise ValueError(f"counts of shapes {first.shape} and {second.shape}: expected [B] and [B], the same bins")
    table = _counts(np.stack([first, second]))
    if (table.sum(axis=1) == 0).any():
        raise ValueError(f"samples of {first.sum():g} and {second.sum():g} tokens: expected some in each")
    return table


def _counts(values: ArrayLike) -> np.ndarray:
    table = np.asarray(values, dtype=float)
    if table.ndim != 2:
        raise ValueError(f"counts have shape {table.shape}: expected [S, B], one row a sequence")
    wrong = ~(np.isfinite(table) & (table >= 0))
    if wrong.any():
        row, column = np.argwhere(wrong)[0]
        raise ValueError(f"count {table[row, column]} in row {row}, bin {column}: expected a finite number ≥ 0")
    if table.sum() == 0:
        raise ValueError(f"counts of shape {table.shape} are all zero: expected some tokens")
    return table


def _sequences(values: ArrayLike) -> np.ndarray:
    table = _tokens("sequences", values)
    if table.ndim != 2 or table.size == 0:
        raise ValueError(
            f"sequences have shape {table.shape}: expected [S, L], −1 at the end of short ones (see `pad`)"
        )
    return table


def _tokens(name: str, values: ArrayLike) -> np.ndarray:
    data = np.asarray(values)
    if data.size and data.dtype.kind not in "iu":
        raise ValueError(f"{name} has dtype {data.dtype}: expected integer token ids")
    data = data.astype(np.int64)
    if (data < PAD).any():
        raise ValueError(f"{name} holds token {data.min()}: expected ids ≥ 0, or −1 for padding")
    return data
