"""Every fault is seen by a detector, correct code and controls by none, and a crash is no sight."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import pytest

from specdec_core.evidence.ragged_records import FAULT_CELL
from specdec_core.forensics.fault_matrix import CLEAN, DETECTORS, examine
from specdec_core.forensics.faults import FAULTS
from specdec_core.forensics.suspects import LEARNED, ROTARY, SCATTER, SUBJECTS, TABLE, Subject

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENS = 6
FAULT = {fault.name: fault for fault in FAULTS}


def test_names_are_distinct_and_every_subject_is_looked_at():
    assert len({each.name for each in DETECTORS}) == len(DETECTORS)
    assert {each.family for each in DETECTORS} == {"invariant", "oracle", "metamorphic", "canary", "law"}
    assert all(any(each.sees(subject) for each in DETECTORS) for subject in SUBJECTS)


@pytest.mark.parametrize(("subject", "seed"), [(SUBJECTS[0], 1), (SUBJECTS[-1], 0)], ids=["a model", "a table"])
def test_correct_code_raises_no_alarm(subject, seed):
    rows = list(examine(None, subject, TOKENS, seed))
    assert [row["detector"] for row in rows] == [each.name for each in DETECTORS if each.sees(subject)]
    assert not any(row["fired"] or row["crashed"] for row in rows)
    assert all(FAULT_CELL.validated(row) == row for row in rows) and {row["fault"] for row in rows} == {CLEAN}
    assert all(row["sound"] for row in rows)


def first_sight(fault, subject):
    return next((row for row in examine(fault, subject, TOKENS) if row["fired"]), None)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_every_fault_is_seen(fault):
    """On one subject that it applies to, and on the table: the whole matrix is notebook 04's."""
    broken = [subject for subject in SUBJECTS if fault.applies(subject) and not fault.control(subject)]
    for subject in {broken[0], *(each for each in broken if each.state == TABLE)}:
        row = first_sight(fault, subject)
        assert row is not None, subject.name
        assert FAULT_CELL.validated(row) == row and row["expected"] == fault.expected and row["seam"] == fault.seam
        assert row["family"] == "law" or row["round"] >= 0 <= row["tokens"]


def test_a_control_is_silent_everywhere():
    rows = list(examine(FAULT["constant position shift"], Subject(SCATTER, ROTARY), TOKENS))
    assert not any(row["fired"] or row["crashed"] for row in rows)
    assert all(row["sound"] for row in rows)
    assert not any(row["sound"] for row in examine(FAULT["constant position shift"], Subject(SCATTER, LEARNED), TOKENS))


def test_a_crash_is_counted_apart_and_is_no_sight():
    @contextmanager
    def broken():
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("specdec_core.decode._nodes", None)
            yield

    rows = list(examine(replace(FAULTS[0], inject=broken), Subject(SCATTER, LEARNED), TOKENS))
    assert all(row["crashed"] and not row["fired"] and row["where"] == "" and row["round"] == -1 for row in rows)
