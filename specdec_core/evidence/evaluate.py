"""From records on disk to verdicts: which records a claim reads, whether they still hold, and what they say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from specdec_core.evidence.claims import CLAIMS, claim
from specdec_core.evidence.cure_claims import verifies_in_parallel
from specdec_core.evidence.layout import QUICK, Layout
from specdec_core.evidence.linear_claims import factors_are_faster, traffic_is_less, verification_is_exact
from specdec_core.evidence.linear_records import LINEAR_ERROR, LINEAR_SPEED, LINEAR_TRAFFIC
from specdec_core.evidence.lossless_claims import (
    exact_law_holds,
    greedy_agrees,
    mutants_die,
    sequence_law_holds,
    sizes_hold,
    tokens_agree,
)
from specdec_core.evidence.lossless_records import EXACT_LAW, GREEDY, KILL, LAW_TEST, SIZE
from specdec_core.evidence.peer_records import PEER, PEER_TUNING
from specdec_core.evidence.provenance import device_kinds, device_slug
from specdec_core.evidence.ragged_claims import batch_pays, realign_share
from specdec_core.evidence.ragged_exactness import (
    batches_equal_rows,
    broken_ways_corrupt,
    faults_are_caught,
    sampled_rows_are_isolated,
)
from specdec_core.evidence.ragged_records import BATCH_RUN, FAULT_CELL, RAGGED_OUTPUT, REALIGN, SEEDED_ROW
from specdec_core.evidence.records import RecordFile, find_records, read_records
from specdec_core.evidence.remembered import recall_verdicts, remember_verdicts
from specdec_core.evidence.schemas import RecordError, Schema
from specdec_core.evidence.serial_claims import (
    parts_add_up,
    serial_on_metal,
    serial_or_batched,
    swaps_move,
    twins_agree,
)
from specdec_core.evidence.serial_records import OP_CURVE, SERIAL_CURVE, SWAP, TWIN
from specdec_core.evidence.sweep_claims import (
    acceptance_falls,
    best_speedup,
    deceleration_explained,
    prediction_holds,
)
from specdec_core.evidence.sweep_records import SWEEP
from specdec_core.evidence.verdicts import Claim, Finding, Outcome, Verdict

Rows = Sequence[dict[str, Any]]


@dataclass(frozen=True)
class Evaluator:
    """How a claim is decided: `finding(claim, rows of the first schema, rows of the second, …)`.

    numbers  of the notebooks that wrote each schema's records; empty: the claim's own wrote all of them.
    """

    schemas: tuple[Schema, ...]
    finding: Callable[..., Finding]
    numbers: tuple[str, ...] = ()


EVALUATORS: dict[str, Evaluator] = {
    "L1": Evaluator((EXACT_LAW,), exact_law_holds),
    "L2": Evaluator((EXACT_LAW,), sequence_law_holds),
    "L3": Evaluator((LAW_TEST,), tokens_agree),
    "L4": Evaluator((GREEDY,), greedy_agrees),
    "L5": Evaluator((KILL,), mutants_die),
    "L6": Evaluator((SIZE,), sizes_hold),
    "B1": Evaluator((SWEEP,), best_speedup),
    "B2": Evaluator((SWEEP,), acceptance_falls),
    "B3": Evaluator((SWEEP,), prediction_holds),
    "B4": Evaluator((SWEEP,), deceleration_explained),
    "S1": Evaluator((SERIAL_CURVE,), serial_or_batched),
    "S2": Evaluator((TWIN,), twins_agree),
    "S3": Evaluator((SERIAL_CURVE, SWAP), swaps_move),
    "S4": Evaluator((OP_CURVE,), parts_add_up),
    "S5": Evaluator((SERIAL_CURVE,), serial_on_metal),
    "S6": Evaluator((SERIAL_CURVE, PEER_TUNING, PEER), verifies_in_parallel, ("03", "02", "02")),
    "R1": Evaluator((RAGGED_OUTPUT,), broken_ways_corrupt),
    "R2": Evaluator((FAULT_CELL,), faults_are_caught),
    "R3": Evaluator((RAGGED_OUTPUT,), batches_equal_rows),
    "R4": Evaluator((REALIGN,), realign_share),
    "R5": Evaluator((BATCH_RUN,), batch_pays),
    "R6": Evaluator((EXACT_LAW, SEEDED_ROW), sampled_rows_are_isolated),
    "G1": Evaluator((LINEAR_ERROR,), verification_is_exact),
    "G2": Evaluator((LINEAR_TRAFFIC,), traffic_is_less),
    "G3": Evaluator((LINEAR_SPEED,), factors_are_faster),
}
"""Claims without an entry are NOT YET MEASURED."""


def judge(id: str, *rows: Rows, device: str | None = None) -> Verdict:
    """Verdict of a claim on rows that this process has just measured, one list for each of its evaluator's schemas.

    ValueError for an unknown claim, one without an evaluator, or another number of lists than it needs.
    """
    registered = claim(id)
    evaluator = EVALUATORS.get(id)
    if evaluator is None:
        raise ValueError(f"claim {id} has no evaluator yet: expected one of {', '.join(EVALUATORS)}")
    if len(rows) != len(evaluator.schemas):
        names = ", ".join(schema.name for schema in evaluator.schemas)
        raise ValueError(f"claim {id} reads records of {names}, got {len(rows)} lists of rows")
    return Verdict.of(registered, _find(registered, evaluator, rows), device or device_slug())


def evaluate_all(layout: Layout | None = None) -> list[Verdict]:
    """Verdicts of all registered claims, from the newest records: this machine's (build/) before committed ones."""
    layout = layout or Layout()
    verdicts = recall_verdicts(layout)
    if verdicts is None:
        verdicts = [evaluate(registered, layout) for registered in CLAIMS]
        remember_verdicts(verdicts, layout)
    return verdicts


def evaluate(registered: Claim, layout: Layout) -> Verdict:
    """Verdict of one claim from records on disk. Never raises for bad records: the note says what is wrong."""
    evaluator = EVALUATORS.get(registered.id)
    if evaluator is None:
        return Verdict.of(registered, _without_records(registered, layout), None)
    numbers = evaluator.numbers or (registered.notebook[:2],) * len(evaluator.schemas)
    files = []
    for schema, number in zip(evaluator.schemas, numbers, strict=True):
        if (file := _choose_file(schema, number, registered, layout)) is None:
            return Verdict.of(registered, _without_records(registered, layout, number), None)
        files.append(file)
    device, replayed = files[0].device, any(file.kept for file in files)
    profile = QUICK if QUICK in (profiles := [file.profile for file in files]) else profiles[0]
    for file, schema, number in zip(files, evaluator.schemas, numbers, strict=True):
        if _is_stale(file, schema, layout):
            maker = registered.notebook if registered.notebook.startswith(number) else number
            note = f"{file.path.name} was made by other code than this: run notebook {maker} again"
            return Verdict.of(registered, Finding(Outcome.STALE, note=note), device, replayed, profile)
    try:
        rows = [load_rows(file.path) for file in files]
    except (RecordError, OSError) as error:
        return Verdict.of(registered, _unusable(error), device, replayed, profile)
    return Verdict.of(registered, _find(registered, evaluator, rows), device, replayed, profile)


def choose_records(schema: Schema, number: str, layout: Layout) -> list[RecordFile]:
    """Records of notebook `number` in the order of use: newest of build/, then committed ones, this device's first."""
    here = device_slug()
    files = find_records(schema, number=number, layout=layout)
    return sorted(files, key=lambda file: file.kept and file.device != here)  # stable: newest first within each


def failures(verdicts: Sequence[Verdict]) -> list[Verdict]:
    """Verdicts that no command may pass over: records whose code has changed."""
    return [verdict for verdict in verdicts if verdict.verdict is Outcome.STALE]


def load_rows(path: Path) -> list[dict[str, Any]]:
    """Records of a file, read once however many claims and figures ask. RecordError as in `read_records`."""
    state = path.stat()
    return _rows(path, state.st_mtime_ns, state.st_size)


def _choose_file(schema: Schema, number: str, registered: Claim, layout: Layout) -> RecordFile | None:
    """The newest file of notebook `number`, on the device kind that the claim needs."""
    files = choose_records(schema, number, layout)
    return next((file for file in files if registered.needs in (None, file.accelerator)), None)


def _is_stale(file: RecordFile, schema: Schema, layout: Layout) -> bool:
    return file.header["version"] != schema.version or file.is_stale(layout)


def _without_records(registered: Claim, layout: Layout, number: str = "") -> Finding:
    kinds = device_kinds()
    if registered.needs is not None and registered.needs not in kinds:
        note = f"needs a device of kind {registered.needs!r}, this machine has {', '.join(sorted(kinds))}"
        return Finding(Outcome.NOT_TESTABLE, note=note)
    if registered.id not in EVALUATORS and (layout.notebooks / f"{registered.notebook}.ipynb").is_file():
        note = "nothing measures it yet"
    elif (layout.notebooks / f"{registered.notebook}.ipynb").is_file():
        note = f"no records: run python -m specdec_core reproduce --only {number}"
    else:
        note = f"notebook {registered.notebook} does not exist yet"
    return Finding(Outcome.NOT_YET_MEASURED, note=note)


def _find(registered: Claim, evaluator: Evaluator, rows: Sequence[Rows]) -> Finding:
    try:
        return evaluator.finding(registered, *rows)
    except RecordError as error:
        return _unusable(error)


def _unusable(error: Exception) -> Finding:
    return Finding(Outcome.INCONCLUSIVE, note=f"records cannot be used: {error}")


@lru_cache(maxsize=8)
def _rows(path: Path, changed: int, size: int) -> list[dict[str, Any]]:
    return read_records(path)[1]
