"""Notebook 04's plans: how much of each part a profile measures. The parts have files of their own."""

from __future__ import annotations

from dataclasses import dataclass, replace

from specdec_core.bench import batch_speed, fault_records, ragged_outputs, realign_cost, seeded_rows
from specdec_core.bench.batch_speed import BatchPlan
from specdec_core.bench.fault_records import FaultPlan
from specdec_core.bench.ragged_outputs import OutputPlan
from specdec_core.bench.realign_cost import RealignPlan
from specdec_core.bench.seeded_rows import SeededPlan


@dataclass(frozen=True)
class RaggedPlan:
    """What a run of notebook 04 measures; thorough: every fault that masked scatter can have is diagnosed."""

    outputs: OutputPlan
    faults: FaultPlan
    seeded: SeededPlan
    realigning: RealignPlan
    speed: BatchPlan
    thorough: bool


PLANS = {
    # In two minutes: every kind of thing once.
    "quick": RaggedPlan(
        OutputPlan(published=(4, 10), ours=(8, 12), our_slots=(8,)),
        fault_records.PLANS["quick"],
        SeededPlan(3, 6, thorough=False),
        replace(realign_cost.PLANS["quick"], repeats=2),
        replace(batch_speed.PLANS["quick"], repeats=2, max_new_tokens=8),
        thorough=False,
    ),
    "full": RaggedPlan(
        ragged_outputs.PLANS["full"],
        fault_records.PLANS["full"],
        seeded_rows.PLANS["full"],
        realign_cost.PLANS["full"],
        batch_speed.PLANS["full"],
        thorough=True,
    ),
}
