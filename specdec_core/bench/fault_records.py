"""Notebook 04: every fault of a batched decoder against every detector, recorded under 04_fault_matrix."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tqdm import tqdm

from specdec_core.bench.sources import LOOP
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.ragged_records import FAULT_CELL
from specdec_core.evidence.records import RecordWriter
from specdec_core.forensics.fault_matrix import examine
from specdec_core.forensics.faults import FAULTS, Fault
from specdec_core.forensics.suspects import SUBJECTS, TABLE, Subject

NAME = "04_fault_matrix"
CODE = (
    *LOOP,
    "specdec_core/state/ragged_kv.py",
    "specdec_core/state/slots.py",
    "specdec_core/targets/padded.py",
    "specdec_core/targets/huggingface.py",
    "specdec_core/targets/huggingface_cache.py",
    "specdec_core/targets/table.py",
    "specdec_core/published/rectangle.py",
    "specdec_core/published/kept_positions.py",
    "specdec_core/published/acceptance.py",
    "specdec_core/forensics/enumeration.py",
    "specdec_core/forensics/exact_drafters.py",
    "specdec_core/forensics/exact_grid.py",
    "specdec_core/forensics/mutations_parts.py",
    "specdec_core/forensics/mutations_rule.py",
    "specdec_core/forensics/suspects.py",
    "specdec_core/forensics/state_faults.py",
    "specdec_core/forensics/loop_faults.py",
    "specdec_core/forensics/faults.py",
    "specdec_core/forensics/detectors.py",
    "specdec_core/forensics/oracles.py",
    "specdec_core/forensics/invariants.py",
    "specdec_core/forensics/metamorphic.py",
    "specdec_core/forensics/fault_matrix.py",
    "specdec_core/bench/fault_records.py",
)
"""What the records depend on."""

Row = dict[str, Any]
Cell = tuple[Fault | None, Subject, int]


@dataclass(frozen=True)
class FaultPlan:
    """How much to do.

    tokens    new tokens of the longest rows.
    seeds     first seeds of the batches that correct code is run on; faults are run on the first.
    thorough  every fault on every subject that it applies to; else on one of them, on sampled rows of the table, and
              where it is a control.
    """

    tokens: int
    seeds: tuple[int, ...]
    thorough: bool

    def cells(self) -> Iterator[Cell]:
        """Correct code first: a false alarm there would make the rest worthless."""
        for fault in (None, *FAULTS):
            for subject in self._subjects(fault):
                for seed in self.seeds if fault is None else self.seeds[:1]:
                    yield fault, subject, seed

    def _subjects(self, fault: Fault | None) -> tuple[Subject, ...]:
        if fault is None:
            return tuple(each for each in SUBJECTS if self.thorough or each in _MAIN)
        found = tuple(subject for subject in SUBJECTS if fault.applies(subject))
        if self.thorough:
            return found
        controls = tuple(subject for subject in found if fault.control(subject))
        broken = tuple(subject for subject in found if not fault.control(subject))
        return (*controls, *(each for each in broken if each == broken[0] or each.state == TABLE))


_MAIN = tuple({(each.state, each.trees, each.window): each for each in reversed(SUBJECTS)}.values())[::-1]
"""One subject of each kind, whatever its positions."""

PLANS = {
    "quick": FaultPlan(tokens=6, seeds=(0,), thorough=False),
    "full": FaultPlan(tokens=24, seeds=(0, 1, 2), thorough=True),
}


def measure_faults(plan: FaultPlan, profile: str, layout: Layout | None = None, progress: bool = False) -> list[Row]:
    """FAULT_CELL rows of correct code and of every fault."""
    layout = layout or Layout()
    kept = []
    with RecordWriter(
        layout.records(profile), NAME, FAULT_CELL, fingerprint(profile), code=CODE, layout=layout
    ) as file:
        for fault, subject, seed in tqdm(list(plan.cells()), "faults", disable=not progress):
            for row in examine(fault, subject, plan.tokens, seed):
                kept.append(FAULT_CELL.validated(row))
                file.append(row)
    return kept
