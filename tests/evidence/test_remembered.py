"""Remembered verdicts are the same verdicts, and are forgotten with whatever they depend on."""

from __future__ import annotations

import math
import os

import pytest

from specdec_core.evidence import remembered
from specdec_core.evidence.claims import claim
from specdec_core.evidence.remembered import recall_verdicts, remember_verdicts
from specdec_core.evidence.verdicts import Finding, Outcome, Verdict
from specdec_core.statistics.intervals import Interval


@pytest.fixture
def verdicts(layout):
    (layout.notebooks / "02_x.ipynb").write_text("{}")
    layout.records("quick").mkdir(parents=True)
    (layout.records("quick") / "02_x.jsonl").write_text("{}\n")
    open_ended = Finding(Outcome.INCONCLUSIVE, 1.5, Interval(1.5, 0.0, math.inf, 0.95, 1, "one"), "note")
    made = [Verdict.of(claim("B1"), open_ended, "here-2c", True), Verdict.of(claim("L1"), Finding(Outcome.STALE), None)]
    remember_verdicts(made, layout)
    return made


def test_what_is_recalled_is_what_was_found(layout, verdicts):
    assert recall_verdicts(layout) == verdicts


@pytest.mark.parametrize("what", ["package", "record", "new record", "notebook", "device", "damage", "absence"])
def test_any_change_forgets(layout, verdicts, monkeypatch, what):
    match what:
        case "package":
            (layout.package / "measured.py").write_text("ANSWER = 2\n")
        case "record":
            os.utime(layout.records("quick") / "02_x.jsonl", ns=(0, 0))
        case "new record":
            (layout.records("full")).mkdir()
            (layout.records("full") / "02_x.jsonl").write_text("{}\n")
        case "notebook":
            (layout.notebooks / "02_x.ipynb").unlink()
        case "device":
            monkeypatch.setattr(remembered, "device_kinds", lambda: frozenset({"cpu", "mps"}))
        case "damage":
            (layout.build / "verdicts.json").write_text("{")
        case "absence":
            (layout.build / "verdicts.json").unlink()
    assert recall_verdicts(layout) is None


def test_a_folder_that_cannot_be_written_is_no_error(layout, verdicts):
    (layout.build / "verdicts.json").unlink()
    (layout.build / "verdicts.json").mkdir()
    remember_verdicts(verdicts, layout)
    assert recall_verdicts(layout) is None
