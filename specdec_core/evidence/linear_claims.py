"""Verdicts on linear-attention verification, G1–G3: pure functions from records of notebook 06 to findings.

Schemes of one cell were interleaved in one run and pair by repeat; the median of the paired ratios is resampled, so
that drift of the machine between repeats cancels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specdec_core.evidence.verdicts import Claim, Finding, Outcome, exact_at_most
from specdec_core.statistics.intervals import Interval, median_interval, simultaneous

Row = Mapping[str, Any]
Rows = Sequence[Row]

FACTORS, DELAYED = "compact factors", "compact factors, delayed commit"
"""Ours: verify and commit one after the other, which is what verdicts judge; and the commit within the next verify."""
EAGER, FUSED, RESIDENT = "eager sequential", "fused tokens", "tile resident"
SNAPSHOTS, RELOAD = "snapshots", "parent reload"
SCHEMES = (EAGER, FUSED, RESIDENT, SNAPSHOTS, RELOAD, FACTORS, DELAYED)

FORMS = ("torch float64", "torch float32", "numba float32")
KINDS = ("chains", "trees", "forests", "rounds")
"""What G1 asks for: every form on every kind of window."""

HEADLINE_N = 16
CACHES = 2
"""The headline cells hold more than so many last-level caches of states."""
FLOOR = 1.7
"""Aimed at: so many times what memory and arithmetic of the machine allow. Told, no part of the verdict."""


@dataclass(frozen=True, order=True)
class Cell:
    """What schemes are compared on."""

    state_bytes: int
    size: str
    batch: int
    n: int
    shape: str

    def __str__(self) -> str:
        return f"{self.size}, batch {self.batch}, n={self.n}, {self.shape}"


def cell_of(row: Row) -> Cell:
    return Cell(row["state_bytes"], row["size"], row["batch"], row["n"], row["shape"])


def by_cell(rows: Rows) -> dict[Cell, dict[str, Row]]:
    """Cell → scheme → its row, the largest state last."""
    found: dict[Cell, dict[str, Row]] = {}
    for row in rows:
        found.setdefault(cell_of(row), {})[row["scheme"]] = row
    return dict(sorted(found.items()))


def verification_is_exact(claim: Claim, rows: Rows) -> Finding:
    """G1: outputs of every node and the state after every commit are the reference's, to the tolerance of the dtype.

    Value: the largest error over its tolerance, so that one number decides for both.
    """
    tolerances = {"float64": claim.thresholds["float64"], "float32": claim.thresholds["float32"]}
    forms = list(dict.fromkeys(row["form"] for row in rows))
    notes, over = [], 0.0
    for form in forms:
        own = [row for row in rows if row["form"] == form]
        errors = [row[name] for row in own for name in ("worst_output", "worst_state")]
        over = max(over, max(errors) / tolerances[form.split()[-1]])
        trees, commits = (sum(row[name] for row in own) for name in ("trees", "commits"))
        notes.append(f"{form} {max(errors):.1e} over {trees} trees and {commits} commits")
    changed = sum(row["changed"] for row in rows)
    if changed:
        notes.append(f"{changed} states changed by committing nothing")
    measured = {(row["form"], row["kind"]) for row in rows}
    lacking = [f"{form} on {kind}" for form in FORMS for kind in KINDS if (form, kind) not in measured]
    if lacking:
        notes.append(f"not measured: {', '.join(lacking)}")
    outcome = exact_at_most(over if not changed else float("inf"), 1.0, 0 if lacking else len(rows))
    return Finding(outcome, over, None, "; ".join(notes))


def passes(row: Row) -> tuple[float, float]:
    """What a round reads and writes, in units of the state: states, and factors, which are written and read once."""
    factors = row["kept_bytes"] if row["scheme"] in (FACTORS, DELAYED) else 0
    return (row["read_bytes"] + factors) / row["state_bytes"], (row["written_bytes"] + factors) / row["state_bytes"]


def held_bytes(row: Row) -> int:
    """Bytes that a round needs beside the committed state."""
    return int(row["kept_bytes"] + row["working_bytes"])


def traffic_is_less(claim: Claim, rows: Rows) -> Finding:
    """G2: compact factors move and keep no more bytes than snapshots, for every n, on chains and trees.

    Factors count as moved, snapshots' inputs do not. Value: the largest ratio of bytes moved.
    """
    cells = {cell: own for cell, own in by_cell(rows).items() if {FACTORS, SNAPSHOTS} <= own.keys()}
    if not cells:
        return Finding(Outcome.INCONCLUSIVE, note="compact factors and snapshots were not counted on one cell")
    moved = {cell: sum(passes(own[FACTORS])) / sum(passes(own[SNAPSHOTS])) for cell, own in cells.items()}
    kept = {cell: own[FACTORS]["kept_bytes"] / own[SNAPSHOTS]["kept_bytes"] for cell, own in cells.items()}
    worst, limit = max(moved, key=lambda cell: moved[cell]), claim.thresholds["ratio"]
    notes = [f"moved {min(moved.values()):.3g} to {moved[worst]:.3g} of snapshots, worst at n={worst.n}"]
    notes.append(f"kept {min(kept.values()):.2g} to {max(kept.values()):.2g}")
    shown = [cell for cell in cells if cell.n == HEADLINE_N]
    notes += [f"n={cell.n} {cell.shape}: {passes_text(cells[cell])}" for cell in shown]
    outcome = exact_at_most(max(moved[worst], max(kept.values())), limit, len(cells))
    return Finding(outcome, moved[worst], None, "; ".join(notes))


def passes_text(own: Mapping[str, Row]) -> str:
    """State passes a round of each scheme, read and written."""
    parts = []
    for scheme in (name for name in SCHEMES if name in own):
        read, written = passes(own[scheme])
        parts.append(f"{scheme} {read:.3g} + {written:.3g}")
    return ", ".join(parts) + " passes read + written"


def floor_seconds(row: Row) -> float:
    """The least time of a round: its states read once and written once, or its arithmetic, whichever takes longer."""
    return max(memory_seconds(row), arithmetic_seconds(row))


def memory_seconds(row: Row) -> float:
    return float(2 * row["state_bytes"] / row["bytes_per_second"])


def arithmetic_seconds(row: Row) -> float:
    return float(row["operations"] / row["flops_per_second"])


def speedup(other: Row, ours: Row, level: float = 0.95) -> Interval:
    """Time of `other` over that of `ours`, paired by repeat."""
    return _interval(np.array(other["seconds"]) / np.array(ours["seconds"]), level)


def floors(row: Row, level: float = 0.95) -> Interval:
    """Time of a round in units of the floor."""
    return _interval(np.array(row["seconds"]) / floor_seconds(row), level)


def _interval(values: np.ndarray, level: float) -> Interval:
    found = median_interval(values, level=level)
    return replace(found, method=f"{found.method}, paired by repeat")


def headline(rows: Rows) -> dict[Cell, dict[str, Row]]:
    """Cells at n = 16 whose states exceed two last-level caches, with what was timed on each."""
    found = {}
    for cell, own in by_cell(rows).items():
        cache = next(iter(own.values()))["cache_bytes"]
        if cell.n == HEADLINE_N and cache is not None and cell.state_bytes > CACHES * cache:
            found[cell] = {scheme: row for scheme, row in own.items() if row["seconds"]}
    return {cell: own for cell, own in found.items() if FACTORS in own}


def factors_are_faster(claim: Claim, rows: Rows) -> Finding:
    """G3: verify + commit by compact factors against eager sequential and fused tokens in every headline cell.

    Intervals are simultaneous over both and all cells; a rival that was left out of a cell is not judged there, and
    has to be timed in one. Value: the ratio that is least in units of its threshold.
    """
    cells = headline(rows)
    pairs = [
        (cell, rival, claim.thresholds[name])
        for cell, own in cells.items()
        for name, rival in (("eager", EAGER), ("fused", FUSED))
        if rival in own
    ]
    if not {EAGER, FUSED} <= {rival for _, rival, _ in pairs}:
        return Finding(Outcome.INCONCLUSIVE, note=_no_headline(rows))
    level = simultaneous(0.95, len(pairs))
    found = {
        (cell, rival): (speedup(cells[cell][rival], cells[cell][FACTORS], level), threshold)
        for cell, rival, threshold in pairs
    }
    worst, _ = min(found.values(), key=lambda pair: pair[0].estimate / pair[1])
    note = "; ".join(_told(cell, own) for cell, own in cells.items())
    if worst.n < claim.minimum_n:
        return Finding(Outcome.INCONCLUSIVE, worst.estimate, worst, f"{note}; {worst.n} repeats of {claim.minimum_n}")
    if any(ratio.high < least for ratio, least in found.values()):
        return Finding(Outcome.REFUTED, worst.estimate, worst, note)
    above = all(ratio.low >= least for ratio, least in found.values())
    return Finding(Outcome.SUPPORTED if above else Outcome.INCONCLUSIVE, worst.estimate, worst, note)


def _told(cell: Cell, own: Mapping[str, Row]) -> str:
    """What all schemes take in a cell, against compact factors and against the floor."""
    ratios = [f"{rival} {speedup(own[rival], own[FACTORS])}" for rival in SCHEMES if rival in own and rival != FACTORS]
    bounds = {name: floors(own[name]) for name in (FACTORS, DELAYED) if name in own}
    best = min(bounds.values(), key=lambda one: one.estimate)
    reached = "reached" if best.high <= FLOOR else "missed" if best.low > FLOOR else "open"
    told = ", ".join(f"{name} {bound}" for name, bound in bounds.items())
    return f"{cell}: {', '.join(ratios)} times compact factors; in units of the floor {told} ({FLOOR} {reached})"


def _no_headline(rows: Rows) -> str:
    caches = {row["cache_bytes"] for row in rows}
    if None in caches:
        return "the system does not tell the size of the last-level cache"
    largest = max((row["state_bytes"] for row in rows if row["n"] == HEADLINE_N and row["seconds"]), default=0)
    return (
        f"no cell at n={HEADLINE_N} with both rivals holds {CACHES} × {max(caches, default=0)} bytes of states: the "
        f"largest timed holds {largest}"
    )
