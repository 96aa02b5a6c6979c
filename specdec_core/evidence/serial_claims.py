"""Verdicts on serialized verification, S1–S5: pure functions from records of notebook 03 to findings.

Every index is made of samples that were interleaved in one session and pair by repeat; the median of the paired ratios
is resampled, so that drift of the machine between repeats cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specdec_core.evidence.verdicts import Claim, Finding, Outcome, exact_zero_mismatch
from specdec_core.statistics.intervals import Interval, median_interval, simultaneous

Rows = Sequence[Mapping[str, Any]]

OURS, SHIPPED = "numba float32", "llama.cpp Q4_1"
N = 7
"""The paper's K = 6: seven tokens a pass."""
MODEL = "model"


def samples(rows: Rows, backend: str, n: int, context: int | None = None, arm: str = "verify") -> np.ndarray:
    """Seconds `[repeats]` of one arm; context None: the shortest one measured. Empty if it was not measured."""
    own = [row for row in rows if (row["backend"], row["arm"], row["n"]) == (backend, arm, n)]
    if context is not None:
        own = [row for row in own if row["context"] == context]
    return np.array(min(own, key=lambda row: row["context"])["seconds"]) if own else np.empty(0)


def serialization(
    rows: Rows, backend: str, n: int = N, context: int | None = None, level: float = 0.95
) -> Interval | None:
    """Interval of s_n = (t(n)/t(1) − 1)/(n − 1), or None if it was not measured."""
    many, one = samples(rows, backend, n, context), samples(rows, backend, 1, context)
    return _interval((many / one - 1) / (n - 1), level) if many.size and one.size else None


def calibrated(rows: Rows, backend: str, n: int = N, level: float = 0.95) -> Interval | None:
    """Interval of (t(n) − t(1))/(t_loop(n) − t(1)) against the serial twin, or None."""
    many, one = samples(rows, backend, n), samples(rows, backend, 1)
    loop = samples(rows, backend, n, arm="loop")
    return _interval((many - one) / (loop - one), level) if many.size and one.size and loop.size else None


def serial_or_batched(claim: Claim, rows: Rows) -> Finding:
    """S1: s_7 of the shipped quantized backend and of ours, at the shortest context, each against its threshold.

    Value: the shipped one's.
    """
    shipped, ours = serialization(rows, SHIPPED), serialization(rows, OURS)
    if shipped is None or ours is None:
        return Finding(Outcome.NOT_TESTABLE, note=f"{SHIPPED if shipped is None else OURS} was not measured here")
    serial, batched = claim.thresholds["serial"], claim.thresholds["batched"]
    note = f"{SHIPPED} s_{N} = {shipped}, {OURS} s_{N} = {ours}, {shipped.n} repeats"
    if shipped.n < claim.minimum_n:
        return Finding(Outcome.INCONCLUSIVE, shipped.estimate, shipped, note)
    if shipped.low >= serial and ours.high <= batched:
        return Finding(Outcome.SUPPORTED, shipped.estimate, shipped, note)
    wrong = shipped.high < serial or ours.low > batched
    return Finding(Outcome.REFUTED if wrong else Outcome.INCONCLUSIVE, shipped.estimate, shipped, note)


def twins_agree(claim: Claim, rows: Rows) -> Finding:
    """S2: the serial twin's tokens are the target's: identical on our engine, certified near-ties elsewhere.

    Value: sequences that differ otherwise.
    """
    exact = [row for row in rows if row["exact"]]
    wrong = [row for row in rows if not (row["identical"] and row["same_rounds"] if row["exact"] else row["certified"])]
    ties = sum(row["divergences"] for row in rows if row["certified"])
    note = f"{len(exact)} sequences of our engine, {len(rows) - len(exact)} elsewhere with {ties} certified near-ties"
    if wrong:
        note += "; " + ", ".join(f"{row['backend']} on {row['prompt_id']} at {row['index']}" for row in wrong[:4])
    return Finding(exact_zero_mismatch(len(wrong), len(exact)), float(len(wrong)), None, note)


def swaps_move(claim: Claim, curves: Rows, swaps: Rows) -> Finding:
    """S3: differences of s_7 between two kernels on the very same values, simultaneous over the swaps.

    SUPPORTED if one of them moves s, REFUTED if none does. Value: the one that is furthest from 0 by its nearer end.
    """
    pairs = [row for row in swaps if row["same_values"] and row["n_before"] == row["n_after"] == N]
    shortest = min((row["context"] for row in pairs), default=0)
    pairs = [row for row in pairs if row["context"] == shortest]
    if not pairs:
        return Finding(Outcome.NOT_TESTABLE, note="no two kernels on the same values were measured here")
    level = simultaneous(0.95, len(pairs))
    found = {row["swap"]: swap_difference(curves, row, level) for row in pairs}
    name, furthest = max(found.items(), key=lambda item: max(item[1].low, -item[1].high))
    note = "; ".join(f"{swap} {interval}" for swap, interval in found.items())
    if furthest.n < claim.minimum_n:
        return Finding(Outcome.INCONCLUSIVE, furthest.estimate, furthest, f"{note}; {furthest.n} repeats")
    moved = furthest.excludes(claim.thresholds["difference"])
    return Finding(Outcome.SUPPORTED if moved else Outcome.REFUTED, furthest.estimate, furthest, f"{name}; {note}")


def swap_difference(curves: Rows, swap: Mapping[str, Any], level: float = 0.95) -> Interval:
    """Interval of s after the swap minus s before it, paired by repeat; each s relative to its own t(1)."""

    def index(backend: str, n: int) -> np.ndarray:
        # Padding changes the pass, not what it is good for: both count as the tokens before it.
        many = samples(curves, backend, n, swap["context"])
        return (many / samples(curves, backend, 1, swap["context"]) - 1) / (swap["n_before"] - 1)

    before, after = index(swap["before"], swap["n_before"]), index(swap["after"], swap["n_after"])
    return _interval(after - before, level)


def parts_add_up(claim: Claim, rows: Rows) -> Finding:
    """S4: the operations' own times, added up, over the model's, for every backend and n; simultaneous intervals.

    Value: the ratio that is furthest from 1.
    """
    cells = sorted({(row["backend"], row["n"]) for row in rows if row["operation"] == MODEL})
    if not cells:
        return Finding(Outcome.NOT_TESTABLE, note="no operations were measured here")
    level = simultaneous(0.95, len(cells))
    ratios = {cell: parts_over_model(rows, *cell, level) for cell in cells}
    low, high = claim.thresholds["low"], claim.thresholds["high"]
    furthest = max(ratios, key=lambda cell: abs(np.log(ratios[cell].estimate)))
    worst = ratios[furthest]
    outside = [f"{backend} n={n} {ratio}" for (backend, n), ratio in ratios.items() if ratio.outside(low, high)]
    backends = {backend for backend, _ in cells}
    note = f"{len(cells)} cells of {len(backends)} backends; furthest {furthest[0]}, n={furthest[1]}"
    if worst.n < claim.minimum_n:
        return Finding(Outcome.INCONCLUSIVE, worst.estimate, worst, f"{note}; {worst.n} repeats")
    if outside:
        return Finding(Outcome.REFUTED, worst.estimate, worst, f"{note}; outside: {', '.join(outside)}")
    inside = all(ratio.inside(low, high) for ratio in ratios.values())
    return Finding(Outcome.SUPPORTED if inside else Outcome.INCONCLUSIVE, worst.estimate, worst, note)


def parts_over_model(rows: Rows, backend: str, n: int, level: float = 0.95) -> Interval:
    """Interval of Σ parts / model, paired by repeat."""
    own = [row for row in rows if (row["backend"], row["n"]) == (backend, n)]
    whole = np.sum([row["seconds"] for row in own if row["part"]], axis=0)
    model = next(row["seconds"] for row in own if row["operation"] == MODEL)
    return _interval(whole / np.array(model), level)


def serial_on_metal(claim: Claim, rows: Rows) -> Finding:
    """S5: s_7 of the shipped format on Metal."""
    names = list(dict.fromkeys(row["backend"] for row in rows if row["device"] == "metal" and row["format"] == "Q4_1"))
    if not names:
        return Finding(Outcome.NOT_TESTABLE, note="no Metal device: the dispatch table is a prediction, no measurement")
    index = serialization(rows, names[0])
    if index is None:
        return Finding(Outcome.INCONCLUSIVE, note=f"{names[0]} was not measured at n = {N}")
    serial = claim.thresholds["serial"]
    enough = index.n >= claim.minimum_n
    outcome = Outcome.SUPPORTED if index.low >= serial else Outcome.REFUTED if index.high < serial else None
    return Finding(outcome if enough and outcome else Outcome.INCONCLUSIVE, index.estimate, index, names[0])


def _interval(values: np.ndarray, level: float) -> Interval:
    found = median_interval(values, level=level)
    return replace(found, method=f"{found.method}, paired by repeat")
