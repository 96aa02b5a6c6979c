"""Verdicts on batched speed, R4 and R5: pure functions from records of notebook 04 to findings.

Shares and speedups are ratios of sums over repeats. All arms of a repeat did the same work in one interleaved run, so
the repeat is the unit that is resampled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from specdec_core.evidence.schemas import RecordError
from specdec_core.evidence.verdicts import Claim, Finding, Outcome
from specdec_core.statistics.intervals import Interval, columns, ratio_interval, simultaneous

Row = Mapping[str, Any]
Rows = Sequence[Row]
Speculation = tuple[str, int]
"""Drafter and K."""

SCATTER, REALIGN, GROUPED = "scatter", "realign", "grouped by length"
FIRST, LAST = 1, 32
"""Batches that throughput has to be shown between."""


@dataclass(frozen=True, order=True)
class Keeping:
    """One way of keeping what was accepted, at one batch."""

    engine: str
    way: str
    batch: int


def shares(rows: Rows, level: float = 0.95) -> dict[Keeping, Interval]:
    """Share of the round that the commit takes, Σcommit/Σround, by way and batch.

    rows  REALIGN records.
    """
    seconds = {(_keeping(row), row["phase"]): row["seconds"] for row in rows}
    return {cell: pooled_ratio(seconds[cell, "commit"], seconds[cell, "round"], level=level) for cell in keepings(rows)}


def pooled_ratio(numerator: ArrayLike, denominator: ArrayLike, *, level: float = 0.95) -> Interval:
    """Interval of Σnumerator/Σdenominator, `[n]` or `[n, m]`, whose n units are repeats."""
    found = ratio_interval(numerator, denominator, level=level)
    return replace(found, method=found.method.replace("prompt", "repeat"))


def keepings(rows: Rows) -> list[Keeping]:
    return sorted(set(map(_keeping, rows)))


def _keeping(row: Row) -> Keeping:
    return Keeping(row["engine"], row["way"], row["batch"])


def realign_share(claim: Claim, rows: Rows) -> Finding:
    """R4: masked scatter takes at most so much of a round at every batch of every engine, realigning beside it.

    Intervals are simultaneous over all ways and batches. Value: scatter's share at its worst batch.
    """
    cells = shares(rows, simultaneous(0.95, max(len(keepings(rows)), 1)))
    scattered = {cell: share for cell, share in cells.items() if cell.way == SCATTER}
    realigned = {cell: share for cell, share in cells.items() if cell.way == REALIGN}
    if not scattered:
        return Finding(Outcome.INCONCLUSIVE, note="masked scatter was not measured")
    worst = max(scattered, key=lambda cell: scattered[cell].estimate)
    share, threshold = scattered[worst], claim.thresholds["share"]
    note = f"scatter at most {percent(share)} ({worst.engine}, batch {worst.batch})"
    for way in sorted({cell.way for cell in cells} - {SCATTER}):
        note += f"; {way} {_range({cell: one for cell, one in cells.items() if cell.way == way})}"
    fewest = min(one.n for one in cells.values())
    if fewest < claim.minimum_n or not realigned:
        missing = f"{fewest} repeats of {claim.minimum_n}" if realigned else "realigning was not measured"
        return Finding(Outcome.INCONCLUSIVE, share.estimate, share, f"{note}; {missing}")
    if any(one.low > threshold for one in scattered.values()):
        return Finding(Outcome.REFUTED, share.estimate, share, note)
    within = all(one.high <= threshold for one in scattered.values())
    return Finding(Outcome.SUPPORTED if within else Outcome.INCONCLUSIVE, share.estimate, share, note)


def _range(found: Mapping[Keeping, Interval]) -> str:
    least, most = (pick(found, key=lambda cell: found[cell].estimate) for pick in (min, max))
    ends = dict.fromkeys((least, most))  # once, where there is one batch
    return " to ".join(f"{percent(found[cell])} at batch {cell.batch}" for cell in ends)


def percent(share: Interval) -> str:
    return f"{share.estimate:.2%} [{share.low:.2%}, {share.high:.2%}]"


@dataclass(frozen=True)
class Pairs:
    """Speculative runs at one batch beside the autoregressive ones of the same repeats, in the order of the repeats."""

    batch: int
    sd: tuple[Row, ...]
    ar: tuple[Row, ...]

    @property
    def speculations(self) -> list[Speculation]:
        """How it speculated, each once."""
        return list(dict.fromkeys((row["drafter"], row["K"]) for row in self.sd))

    def speedup(self, level: float = 0.95) -> Interval:
        """Σtokens/Σseconds with speculation over that without."""
        return pooled_ratio(
            columns(total(self.sd, "tokens"), total(self.ar, "seconds")),
            columns(total(self.sd, "seconds"), total(self.ar, "tokens")),
            level=level,
        )

    def predicted(self) -> float:
        """The speedup that standalone curves predict for the same rounds."""
        rates = (total(own, "tokens").sum() / total(own, "predicted_seconds").sum() for own in (self.sd, self.ar))
        with_speculation, without = rates
        return float(with_speculation / without)


def total(rows: Iterable[Row], field: str) -> np.ndarray:
    """A field of each run, `[repeats]`; seconds are a list of one."""
    return np.array([np.sum(row[field]) for row in rows], float)


def name_of(speculation: Speculation) -> str:
    drafter, k = speculation
    return f"{drafter} K={k}"


def scattered_runs(rows: Rows) -> Rows:
    """Runs over masked scatter, which R5 is about."""
    return [row for row in rows if row["way"] == SCATTER]


def batches_of(rows: Rows) -> list[int]:
    return sorted({row["batch"] for row in rows})


def pair_up(rows: Rows, batch: int) -> dict[Speculation, Pairs]:
    """Runs at one batch by how they speculated. RecordError for a run without its autoregressive partner."""
    at = [row for row in rows if row["batch"] == batch]
    ar = {row["repeat"]: row for row in at if not row["K"]}
    runs: dict[Speculation, dict[int, Row]] = {}
    for row in at:
        if row["K"]:
            runs.setdefault((row["drafter"], row["K"]), {})[row["repeat"]] = row
    pairs = {}
    for speculation, by_repeat in sorted(runs.items()):
        alone = by_repeat.keys() - ar.keys()
        if alone:
            raise RecordError(
                f"no autoregressive run of repeats {sorted(alone)} at batch {batch}: every speculative run needs the "
                "one of the same repeat and batch"
            )
        repeats = sorted(by_repeat)
        pairs[speculation] = Pairs(batch, tuple(by_repeat[r] for r in repeats), tuple(ar[r] for r in repeats))
    return pairs


def best_pairs(rows: Rows, batch: int) -> Pairs | None:
    """The best speculation at a batch, each half of the repeats under the one that was best on the other half.

    Choosing then costs no honesty, and all repeats count. None if nothing speculated.
    """
    found = pair_up(rows, batch)
    if not found:
        return None
    repeats = sorted({row["repeat"] for pairs in found.values() for row in pairs.sd})
    halves = repeats[: len(repeats) // 2], repeats[len(repeats) // 2 :]
    chosen: dict[int, tuple[Row, Row]] = {}
    for half, other in (halves, halves[::-1]):
        best = max(found, key=lambda one: _rate_gain(found[one], other or half))
        own = zip(found[best].sd, found[best].ar, strict=True)
        chosen |= {sd["repeat"]: (sd, ar) for sd, ar in own if sd["repeat"] in half}
    runs = [chosen[repeat] for repeat in sorted(chosen)]
    return Pairs(batch, tuple(sd for sd, _ in runs), tuple(ar for _, ar in runs))


def _rate_gain(pairs: Pairs, repeats: Sequence[int]) -> float:
    """Speedup over these repeats alone; −1 if none of them was run."""
    sd, ar = ([row for row in own if row["repeat"] in repeats] for own in (pairs.sd, pairs.ar))
    if not sd:
        return -1.0
    rate, without = (total(own, "tokens").sum() / total(own, "seconds").sum() for own in (sd, ar))
    return float(rate / without)


def growth(few: Rows, many: Rows, level: float = 0.95) -> Interval | None:
    """Throughput of the runs `many` over that of `few`, paired by repeat; None if they have no repeat in common."""
    low, high = ({row["repeat"]: row for row in own} for own in (few, many))
    common = sorted(low.keys() & high.keys())
    if not common:
        return None
    below, above = [low[repeat] for repeat in common], [high[repeat] for repeat in common]
    return pooled_ratio(
        columns(total(above, "tokens"), total(below, "seconds")),
        columns(total(above, "seconds"), total(below, "tokens")),
        level=level,
    )


def predicted_crossover(rows: Rows, even: float = 1.0) -> int | None:
    """Smallest batch at which standalone curves predict that no speculation that was run pays; None if there is none.

    The acceptance is that of the runs: what is predicted is time.
    """
    for batch in batches_of(rows):
        predicted = [pairs.predicted() for pairs in pair_up(rows, batch).values()]
        if predicted and max(predicted) < even:
            return batch
    return None


def batch_pays(claim: Claim, rows: Rows) -> Finding:
    """R5: throughput from one row to 32, and the smallest batch at which even the best speculation is slower.

    SUPPORTED if that batch is found, or if throughput with speculation is seen to flatten from 16 to 32 (it grows by
    less than the 2 of doubled rows); intervals of the speedups are simultaneous over the batches. Value: the best
    speedup at that batch, else at the largest.
    """
    runs = scattered_runs(rows)
    pairs = {batch: best for batch in batches_of(runs) if (best := best_pairs(runs, batch)) is not None}
    if not pairs:
        return Finding(Outcome.INCONCLUSIVE, note="nothing was decoded with speculation")
    level, even = simultaneous(0.95, len(pairs)), claim.thresholds["speedup"]
    speedups = {batch: best.speedup(level) for batch, best in pairs.items()}
    crossover = next((batch for batch in pairs if speedups[batch].high < even), None)
    sd, ar = {batch: best.sd for batch, best in pairs.items()}, {batch: best.ar for batch, best in pairs.items()}
    grown = {
        f"{name} at {many} over {few}": growth(own.get(few, ()), own.get(many, ()))
        for name, own, few, many in (("AR", ar, FIRST, 8), ("AR", ar, 16, LAST), ("SD", sd, 16, LAST))
    }
    predicted = predicted_crossover(runs, even)
    note = [f"SD stops paying at {crossover}" if crossover else f"not reached within {max(pairs)}"]
    note.append(f"predicted at {predicted}" if predicted else "predicted nowhere")
    shown = sorted({FIRST, 8, LAST, crossover or FIRST} & pairs.keys())
    note += [f"batch {batch} {_names(pairs[batch])} {speedups[batch]}" for batch in shown]
    note += [f"{name} {interval}" for name, interval in grown.items() if interval is not None]
    lacking, doubled = _lacking(claim, runs, speedups), grown[f"SD at {LAST} over 16"]
    determined = crossover is not None or (doubled is not None and doubled.high < 2)
    outcome = Outcome.SUPPORTED if determined else Outcome.REFUTED
    value = speedups[crossover or max(pairs)]
    return Finding(Outcome.INCONCLUSIVE if lacking else outcome, value.estimate, value, "; ".join([*note, *lacking]))


def _lacking(claim: Claim, runs: Rows, speedups: Mapping[int, Interval]) -> list[str]:
    """Why nothing can be decided."""
    found = []
    fewest = min(one.n for one in speedups.values())
    if fewest < claim.minimum_n:
        found.append(f"{fewest} repeats of {claim.minimum_n}")
    if not {FIRST, LAST} <= speedups.keys():
        found.append(f"batches {', '.join(map(str, speedups))}: {FIRST} and {LAST} must be among them")
    wrong = sum(not row["identical"] for row in runs)
    if wrong:
        found.append(f"{wrong} runs emitted other tokens than their rows alone: the speed of a wrong decoder is none")
    return found


def _names(pairs: Pairs) -> str:
    return " or ".join(map(name_of, pairs.speculations))
