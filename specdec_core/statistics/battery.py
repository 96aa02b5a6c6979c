"""The confirmatory family: every sampled test of losslessness on one sample of scored sequences, held together by Holm.

One-sample tests ask whether the tokens follow the target's own law, which is known at every token; two-sample tests
whether the sequences differ from autoregressive ones. The nominal χ² is made too, as papers report it, but is not part
of the family: it has no valid reference (two_sample.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specdec_core.statistics.multiplicity import holm
from specdec_core.statistics.results import ChiSquare, TestResult
from specdec_core.statistics.teacher_forced import (
    Directed,
    cramer_von_mises,
    directed,
    e_process,
    equivalence,
    kolmogorov_smirnov,
    uniformity_by_group,
)
from specdec_core.statistics.two_sample import (
    RESAMPLES,
    Bins,
    chi_square,
    counts,
    mmd,
    pad,
    permutation_chi_square,
)

KS, CVM, BY_OFFSET = "PIT, Kolmogorov–Smirnov", "PIT, Cramér–von Mises", "PIT by offset, χ²"
DIRECTED, BETTING = "directed martingale", "e-process"
PERMUTED, DISCREPANCY = "χ², labels permuted", "MMD, labels permuted"
NOMINAL, EQUIVALENCE = "χ², nominal", "equivalence (TOST)"
ONE_SAMPLE = (KS, CVM, BY_OFFSET, DIRECTED, BETTING)
TWO_SAMPLE = (PERMUTED, DISCREPANCY)
DELTA = 0.02
"""Pre-registered: a mean bias below this (probability a token, in the drafter's direction) counts as equivalence."""


@dataclass(frozen=True, eq=False)
class Sample:
    """Sequences of one method. `sequences`: token ids, one list each; `strata` `[S]`: the prompt of each.

    The rest are scores of all tokens `[n]`, sequence after sequence, or empty where they were not scored: `pit`,
    `in_set`, `mass`, `ratio` (forensics/scoring.py), and `offsets`, each token's place in its round.
    """

    sequences: Sequence[Sequence[int]]
    strata: Sequence[Any]
    offsets: np.ndarray
    pit: np.ndarray
    in_set: np.ndarray
    mass: np.ndarray
    ratio: np.ndarray

    @classmethod
    def of(cls, rows: Sequence[Mapping[str, Any]]) -> Sample:
        """From token records (evidence/token_records.py)."""
        scored = [row for row in rows if row["pit"] is not None]
        return cls(
            sequences=[row["tokens"] for row in rows],
            strata=[row["prompt_id"] for row in rows],
            offsets=np.array([int(digit) for row in scored for digit in row["offsets"]], int),
            pit=_joined(row["pit"] for row in scored),
            in_set=np.array([digit == "1" for row in scored for digit in row["in_set"]], bool),
            mass=_joined(row["mass"] for row in scored),
            ratio=_joined(row["ratio"] for row in scored),
        )

    @property
    def tokens(self) -> int:
        return sum(map(len, self.sequences))

    def first(self, n: int) -> Sample:
        """The scores of the first n tokens; the sequences are left out."""
        scores = {name: getattr(self, name)[:n] for name in ("offsets", "pit", "in_set", "mass", "ratio")}
        return replace(self, sequences=(), strata=(), **scores)


def one_sample(sample: Sample) -> dict[str, TestResult]:
    """The tests of ONE_SAMPLE on a scored sample."""
    bias = directed(sample.in_set, sample.mass)
    wealth = e_process(sample.ratio)
    found = {
        KS: kolmogorov_smirnov(sample.pit),
        CVM: cramer_von_mises(sample.pit),
        BY_OFFSET: uniformity_by_group(sample.pit, sample.offsets),
        DIRECTED: TestResult(DIRECTED, bias.z, bias.p, bias.n, _describe(bias)),
        BETTING: TestResult(BETTING, wealth.largest, wealth.p, wealth.n, "statistic: log of the largest wealth"),
    }
    return {name: replace(result, name=name) for name, result in found.items()}


def two_sample(
    sample: Sample, reference: Sample, bins: Bins, resamples: int = RESAMPLES, seed: int = 0
) -> dict[str, TestResult]:
    """NOMINAL and the tests of TWO_SAMPLE; MMD only where some prompt has two sequences of a method or more."""
    sequences, labels, strata = _together(sample, reference)
    table = counts(sequences, bins)
    found: dict[str, TestResult] = {
        NOMINAL: chi_square(table[labels].sum(axis=0), table[~labels].sum(axis=0)),
        PERMUTED: permutation_chi_square(table, labels, strata, resamples, seed),
    }
    if np.unique(strata, return_counts=True)[1].max() > 2:
        found[DISCREPANCY] = discrepancy(sample, reference, resamples, seed)
    return {name: replace(result, name=name) for name, result in found.items()}


def discrepancy(sample: Sample, reference: Sample, resamples: int = RESAMPLES, seed: int = 0) -> TestResult:
    """MMD alone; errors as `mmd`."""
    return replace(mmd(*_together(sample, reference), resamples, seed), name=DISCREPANCY)


def adjusted(results: Mapping[str, TestResult]) -> dict[str, float]:
    """Holm-adjusted p-values of the family's tests among the results."""
    return holm({name: result.p for name, result in results.items() if name in (*ONE_SAMPLE, *TWO_SAMPLE)})


def equivalent(sample: Sample, delta: float = DELTA) -> TestResult:
    """Whether the bias along the drafter's direction is shown to be less than delta."""
    return replace(equivalence(sample.in_set, sample.mass, delta), name=EQUIVALENCE)


def merged_bins(bins: Bins, pilot: Sample, tokens: int) -> Bins:
    """Bins of which each expects 5 or more in `tokens` tokens, judged by the pilot sample."""
    table = counts(pad(list(pilot.sequences)), bins).sum(axis=0)
    return bins.merged(table * (tokens / table.sum()))


def dof(result: TestResult) -> int | None:
    return result.dof if isinstance(result, ChiSquare) else None


def _together(sample: Sample, reference: Sample) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Sequences `[S, L]` of both, which are the sample's `[S]`, and their strata `[S]`."""
    sequences = pad([*sample.sequences, *reference.sequences])
    labels = np.arange(len(sequences)) < len(sample.sequences)
    return sequences, labels, np.array([*sample.strata, *reference.strata])


def _describe(bias: Directed) -> str:
    return f"bias {bias.bias:+.4f} [{bias.low:+.4f}, {bias.high:+.4f}], TV ≥ {bias.tv_lower:.4f}"


def _joined(parts: Any) -> np.ndarray:
    return np.array([value for part in parts for value in part], float)
