"""The production loop's exact output law over the whole grid, and that a wrong rule is seen there."""

from __future__ import annotations

import math

import numpy as np
import pytest

from specdec_core import rejection
from specdec_core.evidence.lossless_records import EXACT_LAW
from specdec_core.forensics.enumeration import distance
from specdec_core.forensics.exact_grid import DRAFTERS, Case, defined_law, enumerate_case, grid, measure, request
from specdec_core.sampling import History
from specdec_core.targets.table import TableTarget

CASES = {case.name: case for case in grid()}


def error(case: Case) -> float:
    return distance(enumerate_case(case)[0], defined_law(case))


@pytest.mark.parametrize("name", CASES)
def test_the_law_is_the_targets(name):
    found = measure(CASES[name])
    assert found["error"] < 1e-12 and found["total_variation"] < 1e-12
    assert EXACT_LAW.validated(found)


@pytest.mark.parametrize("name", CASES)
def test_the_definition_is_a_law(name):
    assert math.isclose(sum(defined_law(CASES[name]).values()), 1, abs_tol=1e-12)


def test_names_are_distinct_and_every_axis_is_there():
    assert len(CASES) == len(list(grid())) > 100
    assert {case.axis for case in CASES.values()} == {
        "K", "K × drafter", "support", "options", "endings", "prompt", "batch",
    }  # fmt: skip


@pytest.mark.parametrize("name", ["K=3, soft q", "K=3, sampled tree", "K=2, q with zeros"])
def test_cases_go_through_more_branches_than_outputs(name):
    found = measure(CASES[name])
    assert found["branches"] > found["outcomes"] > 1


# --- The check is seen to fail ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"),
    [("residual", lambda p, q: p), ("residual", lambda p, q: q), ("_padded", lambda q, size: np.roll(q, 1))],
)
def test_a_wrong_rule_is_seen(monkeypatch, name, wrong):
    monkeypatch.setattr(rejection, name, wrong)
    assert error(CASES["K=2, soft q"]) > 1e-3


def test_a_candidate_that_is_not_removed_is_seen(monkeypatch):
    monkeypatch.setattr(rejection, "_without", lambda p, token: p)
    assert error(CASES["K=2, fixed tree"]) > 1e-3


def test_a_history_without_the_drafted_tokens_is_seen(monkeypatch):
    case = CASES["presence penalty, soft q"]
    expected = defined_law(case)
    monkeypatch.setattr(History, "extended", lambda self, tokens: self)
    assert distance(enumerate_case(case)[0], expected) > 1e-3


def test_entries_kept_of_the_wrong_branch_are_seen(monkeypatch):
    commit = TableTarget.commit
    monkeypatch.setattr(
        TableTarget,
        "commit",
        lambda self, state, found, paths: commit(self, state, found, [np.arange(len(p)) for p in paths]),
    )
    assert error(CASES["K=2, fixed tree"]) > 1e-3


def test_a_row_that_looks_at_its_neighbour_is_seen(monkeypatch):
    rows = (request(1, max_new_tokens=2), request(1, prompt=(1,), max_new_tokens=2))
    case = Case("batch", "two", rows, DRAFTERS["soft q"])
    verify = TableTarget.verify

    def mixed(self, state, slots, tokens, forest):
        found = verify(self, state, slots, tokens, forest)
        if len(slots) > 1:
            found.logits[0] = found.logits[-1]
        return found

    monkeypatch.setattr(TableTarget, "verify", mixed)
    assert error(case) > 1e-3
