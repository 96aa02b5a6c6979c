"""Claims and verdicts: what is asserted, what would falsify it, and the rules that turn an interval into a verdict."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from specdec_core.statistics.intervals import Interval


class Outcome(StrEnum):
    """INCONCLUSIVE: the interval straddles the threshold, or there are fewer data than registered. NOT TESTABLE: the
    device is missing. NOT YET MEASURED: there are no records. STALE: the code that made the records has changed."""

    SUPPORTED = "SUPPORTED"
    REFUTED = "REFUTED"
    INCONCLUSIVE = "INCONCLUSIVE"
    NOT_TESTABLE = "NOT TESTABLE"
    NOT_YET_MEASURED = "NOT YET MEASURED"
    STALE = "STALE"


MEASURED = frozenset({Outcome.SUPPORTED, Outcome.REFUTED, Outcome.INCONCLUSIVE})

EVIDENCE_KINDS = {
    "exact": "an invariant that holds to a stated tolerance, or token by token",
    "counted": "counts of one seeded run: the same seed gives the same number",
    "replay": "committed records of a named device, analysed again",
    "direction": "the interval of a ratio measured in one run, wholly on one side",
    "model": "prediction against measurement, the parameters measured in the same run",
    "attribution": "counterfactuals on measured phases",
    "timed": "a measured speed of one device",
}
"""Kinds of evidence, from the most to the least portable."""

_REPEATABLE = frozenset({"exact", "counted", "replay"})


@dataclass(frozen=True)
class Claim:
    """One registered claim. Thresholds and minimum n are set before the full run and are what its verdict uses.

    evidence      kinds, keys of EVIDENCE_KINDS
    paper, ours   the figure in the abstract, and what must be reached here
    thresholds    name → number
    minimum_n     fewest independent units (prompts, tokens, replicates, cases) below which it is INCONCLUSIVE
    needs         device kind without which it is not testable ('mps', 'cuda'), or None
    minutes       of its notebook with the quick profile on 2 cores
    admitted      verdicts that a checked cell accepts, by device kind, where they are narrower than "any measured"
    """

    id: str
    notebook: str
    statement: str
    evidence: tuple[str, ...]
    paper: str
    ours: str
    thresholds: Mapping[str, float]
    minimum_n: int
    estimator: str
    falsified_by: str
    minutes: float
    needs: str | None = None
    admitted: Mapping[str, frozenset[Outcome]] = field(default_factory=dict)

    @property
    def repeatable(self) -> bool:
        """Whether every run gives the same verdict, so that a checked notebook cell may print it."""
        return self.needs is None and set(self.evidence) <= _REPEATABLE

    def registered(self, kinds: frozenset[str]) -> frozenset[Outcome]:
        """Verdicts registered for a machine with these device kinds: any measured one, unless it lacks the device."""
        for kind in kinds & set(self.admitted):
            return self.admitted[kind]
        if self.needs is not None and self.needs not in kinds:
            return MEASURED | {Outcome.NOT_TESTABLE}  # kept records of the device may stand in for it
        return MEASURED


@dataclass(frozen=True)
class Finding:
    """What an evaluator read from records: the outcome, the deciding number and its interval, and a line of detail."""

    outcome: Outcome
    value: float | None = None
    interval: Interval | None = None
    note: str = ""


@dataclass(frozen=True)
class Verdict:
    """A finding on a claim.

    replayed  from committed records of `device`, not from this machine's last run.
    profile   of the run that made the records, 'quick' if any of them is; None where there are none on disk.
    """

    id: str
    verdict: Outcome
    value: float | None
    interval: Interval | None
    threshold: Mapping[str, float]
    evidence: tuple[str, ...]
    device: str | None
    replayed: bool
    note: str
    profile: str | None = None

    @classmethod
    def of(
        cls, claim: Claim, finding: Finding, device: str | None, replayed: bool = False, profile: str | None = None
    ) -> Verdict:
        return cls(
            id=claim.id,
            verdict=finding.outcome,
            value=finding.value,
            interval=finding.interval,
            threshold=claim.thresholds,
            evidence=claim.evidence,
            device=device,
            replayed=replayed,
            note=finding.note,
            profile=profile,
        )

    def as_json(self, claim: Claim) -> dict[str, Any]:
        """The row of `claims --json`; the interval as [low, high], an open end as null."""
        return {
            "id": self.id,
            "statement": claim.statement,
            "verdict": str(self.verdict),
            "value": self.value,
            "interval": self.interval.ends() if self.interval else None,
            "threshold": dict(self.threshold),
            "evidence": list(self.evidence),
            "device": self.device,
            "replayed": self.replayed,
            "profile": self.profile,
            "note": self.note,
        }


def interval_above(interval: Interval, threshold: float, minimum_n: int = 2) -> Outcome:
    """SUPPORTED if the whole interval exceeds the threshold, REFUTED if none of it does."""
    return _decide(interval.low > threshold, interval.high <= threshold, interval.n, minimum_n)


def interval_below(interval: Interval, threshold: float, minimum_n: int = 2) -> Outcome:
    """SUPPORTED if the whole interval lies under the threshold, REFUTED if none of it does."""
    return _decide(interval.high < threshold, interval.low >= threshold, interval.n, minimum_n)


def within_ratio(interval: Interval, low: float, high: float, minimum_n: int = 2) -> Outcome:
    """SUPPORTED if the whole interval lies in [low, high], REFUTED if it misses it wholly."""
    return _decide(interval.inside(low, high), interval.outside(low, high), interval.n, minimum_n)


def exact_zero_mismatch(mismatches: int, compared: int, minimum_n: int = 1) -> Outcome:
    """REFUTED by a single mismatch however few were compared; SUPPORTED by none among at least minimum_n."""
    if mismatches:
        return Outcome.REFUTED
    return Outcome.SUPPORTED if compared >= minimum_n else Outcome.INCONCLUSIVE


def exact_at_most(value: float, tolerance: float, compared: int, minimum_n: int = 1) -> Outcome:
    """As exact_zero_mismatch, for a largest error against a tolerance (NaN is a failure)."""
    return exact_zero_mismatch(0 if value <= tolerance else 1, compared, minimum_n)


def _decide(supported: bool, refuted: bool, n: int, minimum_n: int) -> Outcome:
    if n < minimum_n:
        return Outcome.INCONCLUSIVE
    if supported:
        return Outcome.SUPPORTED
    return Outcome.REFUTED if refuted else Outcome.INCONCLUSIVE
