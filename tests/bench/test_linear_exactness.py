"""Exactness is measured as it is: errors that are put in are found, in every form, kind and part."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec_core.bench import linear_exactness
from specdec_core.bench.linear_exactness import (
    CODE,
    DRAWN,
    FORMS,
    KINDS,
    PLANS,
    ROUNDS,
    ExactnessPlan,
    drawn_window,
    error,
    measure_exactness,
    windows_of,
)
from specdec_core.evidence.claims import claim
from specdec_core.evidence.evaluate import judge
from specdec_core.evidence.layout import PROFILES
from specdec_core.evidence.linear_records import LINEAR_ERROR, LINEAR_WINDOW
from specdec_core.evidence.records import find_records, read_records
from specdec_core.evidence.verdicts import Outcome
from tests.bench.test_linear_speed import reached_without

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = ExactnessPlan(trees=30, sequences=4)
NAMES = ("torch float64", "torch float32", "numba float32")


@pytest.fixture(scope="module")
def measured(layout_of_module):
    return measure_exactness(PLAN, "quick", layout_of_module)


def test_every_form_and_kind_is_recorded(measured, layout_of_module):
    for name, schema, rows in (
        ("06_exactness", LINEAR_ERROR, measured.errors),
        ("06_window", LINEAR_WINDOW, measured.window),
    ):
        assert read_records(layout_of_module.records("quick") / f"{name}.jsonl", schema)[1] == rows
        (file,) = find_records(schema, folder=layout_of_module.build)
        assert file.header["code"]["paths"] == sorted(CODE) and not file.is_stale(layout_of_module)
    assert [(row["kind"], row["form"]) for row in measured.errors] == [
        (kind, form) for kind in (*KINDS, ROUNDS) for form in NAMES
    ]
    assert judge("G1", measured.errors).verdict is Outcome.SUPPORTED


def test_all_forms_see_the_same_windows_with_resets_and_negative_eigenvalues(measured):
    for kind in (*KINDS, ROUNDS):
        own = [row for row in measured.errors if row["kind"] == kind]
        for field in ("trees", "nodes", "commits", "resets", "negative"):
            assert len({row[field] for row in own}) == 1
        assert own[0]["resets"] > 0 and own[0]["negative"] > 0
        if kind != ROUNDS:
            assert own[0]["trees"] == 10 and own[0]["commits"] == own[0]["nodes"] + 10  # every node, and none


def test_float64_is_better_than_float32_and_nothing_is_zero(measured):
    for row in measured.errors:
        double = row["form"] == "torch float64"
        for field in ("worst_output", "worst_state"):
            assert 0 < row[field] <= (1e-12 if double else 1e-5) and (row[field] > 1e-9) != double
        assert row["tolerance"] == claim("G1").thresholds[row["form"].split()[-1]] and row["changed"] == 0


def altered(monkeypatch, **changes):
    """The compiled form with some functions changed: (real, *arguments) → what it returns."""
    (*others, form) = FORMS
    functions = {
        name: (lambda *given, change=change, real=getattr(form, name): change(real, *given))
        for name, change in changes.items()
    }
    monkeypatch.setattr(linear_exactness, "FORMS", (*others, replace(form, **functions)))


def rows_of(plan=PLAN):
    return {(row["kind"], row["form"]): row for row in linear_exactness._error_rows(plan, False)}


def worse_outputs(real, *given):
    outputs, pending = real(*given)
    return outputs * 1.01, pending


def test_wrong_outputs_are_found_and_are_no_fault_of_states(monkeypatch):
    altered(monkeypatch, verify=worse_outputs)
    found = rows_of()
    for kind in KINDS:
        row = found[kind, "numba float32"]
        assert row["worst_output"] == pytest.approx(0.01, rel=0.01) and row["worst_state"] <= 1e-5
        assert found[kind, "torch float32"]["worst_output"] <= 1e-5
    assert found[ROUNDS, "numba float32"]["worst_output"] > 1e-3


def test_a_commit_that_is_wrong_at_one_depth_only_is_found(monkeypatch):
    """Every node is committed, so paths of 9 nodes are among them."""

    def deep(real, state, pending, paths):
        kept = real(state, pending, paths)
        return kept * (1 + 0.5 * any(len(path) == 9 for path in paths))

    altered(monkeypatch, commit=deep)
    row = rows_of(ExactnessPlan(30, 1))["chains", "numba float32"]
    assert row["worst_state"] > 0.1 and row["worst_output"] <= 1e-5


def test_committing_nothing_has_to_leave_every_bit(monkeypatch):
    def touched(real, state, pending, paths):
        kept = real(state, pending, paths)
        return kept * (1 + 1e-6) if not any(map(len, paths)) else kept

    altered(monkeypatch, commit=touched)
    rows = list(rows_of(ExactnessPlan(12, 1)).values())
    assert all((row["changed"] > 0) == (row["form"] == "numba float32" and row["kind"] in KINDS) for row in rows)
    assert judge("G1", rows).verdict is Outcome.REFUTED


def test_the_waiting_commit_is_played(monkeypatch):
    def forgets(real, state, pending, paths, inputs, shapes):
        _, outputs, factors = real(state, pending, paths, inputs, shapes)
        return state, outputs, factors

    altered(monkeypatch, commit_then_verify=forgets)
    found = rows_of(ExactnessPlan(3, 2))
    assert (
        found[ROUNDS, "numba float32"]["worst_state"] > 1e-2 and found["forests", "numba float32"]["worst_state"] < 1e-5
    )
    assert found[ROUNDS, "numba float32"]["worst_seed"] == 1


def test_states_of_rounds_are_compared(monkeypatch):
    altered(monkeypatch, commit=lambda real, *given: real(*given) * 1.001)
    found = rows_of(ExactnessPlan(3, 2))[ROUNDS, "numba float32"]
    assert found["worst_state"] > 5e-4 and found["commits"] >= 2


def test_the_worst_window_is_named_by_its_seed(monkeypatch):
    seen = []

    def once_wrong(real, *given):
        outputs, pending = real(*given)
        seen.append(1)
        return outputs * (1 + (len(seen) == 2)), pending

    altered(monkeypatch, verify=once_wrong)
    row = rows_of(ExactnessPlan(24, 1))["chains", "numba float32"]
    assert row["worst_seed"] == 3 and row["worst_output"] == pytest.approx(1.0, rel=0.01)


def test_windows_of_two_kinds_share_no_seed():
    firsts = [{next(seeds) for seeds in [windows_of(kind)] for _ in range(50)} for kind in range(len(KINDS))]
    assert sum(map(len, firsts)) == len(set.union(*firsts))


def test_an_error_is_relative_to_the_largest_number():
    assert error(torch.tensor([1.0, -4.0]), np.array([1.0, -2.0])) == 1.0
    assert error(torch.tensor([1e-5]), np.array([0.0])) == pytest.approx(1e-2)  # to 0.001 where all are smaller
    with pytest.raises(RuntimeError, match="the form is broken"):
        error(torch.tensor([float("nan")]), np.array([1.0]))
    with pytest.raises(RuntimeError, match=r"found shape \(2,\)"):
        error(torch.zeros(2), np.zeros(3))


def test_the_drawn_window_is_what_is_committed(measured):
    (window,) = measured.window
    shape, end = DRAWN
    assert window["parents"] == list(shape.parents) and window["path"] == shape.path(end).tolist()
    assert window["weights"][-1] == 1.0 and 0 < window["error"] <= 1e-5
    gates = np.array(window["log_decay"])[window["path"]]
    np.testing.assert_allclose(window["weights"], [np.exp(gates[place + 1 :].sum()) for place in range(len(gates))])
    assert window["left"] == pytest.approx(np.exp(gates.sum()))
    assert drawn_window()["error"] == window["error"]


def test_plans():
    assert set(PLANS) == set(PROFILES)
    assert PLANS["full"].trees == 10_000 and 200 <= PLANS["quick"].trees < 1_000


def test_the_code_that_records_depend_on_is_named():
    assert not reached_without("specdec_core/bench/linear_exactness.py", CODE)
