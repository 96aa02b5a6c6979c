"""The fault matrix is planned whole, recorded as it is measured, and stamped with the code that it depends on."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from specdec_core.bench import fault_records
from specdec_core.bench.fault_records import CODE, NAME, PLANS, FaultPlan, measure_faults
from specdec_core.evidence.layout import PROFILES, Layout
from specdec_core.evidence.ragged_records import FAULT_CELL
from specdec_core.evidence.records import RecordFile, read_records
from specdec_core.forensics.fault_matrix import CLEAN
from specdec_core.forensics.faults import FAULTS
from specdec_core.forensics.suspects import SUBJECTS

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_profile_has_a_plan():
    assert set(PLANS) == set(PROFILES) and PLANS["full"].thorough and not PLANS["quick"].thorough


def test_the_full_plan_is_every_fault_on_every_subject_and_correct_code_from_several_seeds():
    cells = list(PLANS["full"].cells())
    assert len(cells) == len(set(cells))
    faults = {(fault.name, subject.name) for fault, subject, _ in cells if fault}
    assert faults == {(fault.name, s.name) for fault in FAULTS for s in SUBJECTS if fault.applies(s)}
    clean = {(subject.name, seed) for fault, subject, seed in cells if fault is None}
    assert clean == {(subject.name, seed) for subject in SUBJECTS for seed in PLANS["full"].seeds}
    assert len(PLANS["full"].seeds) >= 3


def test_the_quick_plan_has_every_fault_where_it_is_wrong_every_control_and_every_kind_of_subject():
    cells = list(PLANS["quick"].cells())
    assert len(cells) == len(set(cells)) < 50
    for fault in FAULTS:
        subjects = [subject for each, subject, _ in cells if each is fault]
        assert any(not fault.control(subject) for subject in subjects)
        assert {s for s in subjects if fault.control(s)} == {
            s for s in SUBJECTS if fault.applies(s) and fault.control(s)
        }
    kinds = {(s.state, s.trees, s.window) for fault, s, _ in cells if fault is None}
    assert kinds == {(s.state, s.trees, s.window) for s in SUBJECTS}


def test_cells_are_recorded(layout, monkeypatch):
    chosen = [fault for fault in FAULTS if fault.name in ("last token of another row", "residual of another row")]
    monkeypatch.setattr(fault_records, "FAULTS", tuple(chosen))
    monkeypatch.setattr(fault_records, "SUBJECTS", (SUBJECTS[0], SUBJECTS[-1]))
    rows = measure_faults(FaultPlan(6, (0, 1), thorough=True), "quick", layout)
    path = layout.records("quick") / f"{NAME}.jsonl"
    header, written = read_records(path, FAULT_CELL)
    assert written == rows and {row["fault"] for row in rows} == {CLEAN, *(fault.name for fault in chosen)}
    assert {row["subject"] for row in rows} == {SUBJECTS[0].name, SUBJECTS[-1].name}
    assert [row["fired"] for row in rows if row["fault"] == CLEAN] == [False] * 2 * (28 + 2)
    assert {row["fault"] for row in rows if row["fired"]} == {fault.name for fault in chosen}
    assert not RecordFile(path, header, kept=False).is_stale(layout)


def imported(path: Path) -> set[str]:
    """Files of the package that a file imports."""
    root, found = Layout().root, set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specdec_core"):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            files = [Path(*name.split(".")).with_suffix(".py") for name in names]
            found |= {file.as_posix() for file in files if (root / file).is_file()}
    return found


def test_the_code_that_records_depend_on_is_named():
    """All that the matrix imports, but what only loads models, keeps records or draws; what is reached by it is named
    by folders or files."""
    root = Layout().root
    assert all((root / path).exists() for path in CODE)
    apart = ("specdec_core/evidence/", "specdec_core/models/", "specdec_core/bench/sources.py")
    apart += ("specdec_core/arrays.py", "specdec_core/placement.py", "specdec_core/state/ragged_kv.py")
    reached, open_files = set(), {"specdec_core/bench/fault_records.py"}
    while open_files:
        file = open_files.pop()
        reached.add(file)
        open_files |= {each for each in imported(root / file) if not each.startswith(apart)} - reached
    missing = {file for file in reached if not any(file == path or file.startswith(f"{path}/") for path in CODE)}
    assert not missing - set(apart)
