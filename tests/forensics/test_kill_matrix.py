"""Every mutant dies by the test that it should die by, and nothing else does."""

from __future__ import annotations

from contextlib import nullcontext

import pytest

from specdec_core.evidence.claims import claim
from specdec_core.evidence.lossless_claims import mutants_die
from specdec_core.evidence.lossless_records import KILL
from specdec_core.evidence.verdicts import Outcome
from specdec_core.forensics import kill_sampled
from specdec_core.forensics.kill_matrix import CANARY, CLEAN, ROWS, TESTS, examine
from specdec_core.forensics.kill_sampled import SAMPLED
from specdec_core.forensics.mutants import ACCEPTANCE, ISOLATION, LAW, MUTANTS, NOTHING, Mutant
from specdec_core.sampling import History
from specdec_core.statistics.battery import DISCREPANCY
from specdec_core.targets.table import TableTarget

BUDGET = 2_000
NAMES = {mutant.name: mutant for mutant in MUTANTS}


def seen(rows):
    return {row["test"] for row in rows if row["seen"]}


@pytest.mark.parametrize("name", [CLEAN, *NAMES])
def test_it_dies_by_the_right_test_or_not_at_all(name):
    mutant = NAMES.get(name)
    rows = list(examine(mutant, BUDGET))
    assert all(KILL.validated(row) for row in rows)
    by_law = seen(rows) - {ROWS, CANARY}
    effect = mutant.effect if mutant else NOTHING
    if effect == LAW:
        assert by_law
    else:
        assert not by_law and not any(row["crashed"] for row in rows)
        assert {row["test"] for row in rows} == set(TESTS)
    if effect == ACCEPTANCE:
        assert seen(rows) == {CANARY}
    if effect == ISOLATION:
        assert seen(rows) == {ROWS}
    if mutant is None:
        assert not seen(rows)


def test_there_are_enough_and_names_are_distinct():
    assert len(NAMES) == len(MUTANTS)
    assert sum(mutant.effect != NOTHING for mutant in MUTANTS) >= 30
    assert {mutant.effect for mutant in MUTANTS} == {LAW, ACCEPTANCE, ISOLATION, NOTHING}


@pytest.mark.parametrize("name", NAMES)
def test_injection_ends_with_its_context(name):
    from specdec_core import decode, randomness, rejection, rows
    from specdec_core.drafters import model

    def state():
        owners = (decode, randomness, rejection, rows, rows.Row, model, model.ModelDrafter, TableTarget)
        return [dict(vars(owner)) for owner in owners]

    before = state()
    with NAMES[name].inject():
        assert name == "history without the draft" or state() != before
    assert state() == before


def test_a_crash_is_counted_and_is_no_kill():
    class Broken:
        def __enter__(self):
            raise RuntimeError("broken")

        def __exit__(self, *what):
            return False

    rows = list(examine(Mutant("crashes", LAW, Broken), BUDGET))
    assert all(row["crashed"] and not row["seen"] for row in rows)
    found = mutants_die(claim("L5"), [*rows, *examine(None, BUDGET)])
    assert found.outcome is Outcome.REFUTED and "survived: crashes" in found.note


def test_a_mutant_that_changes_nothing_survives():
    rows = list(examine(Mutant("idle", LAW, nullcontext), BUDGET))
    assert not seen(rows)
    assert mutants_die(claim("L5"), rows).outcome is Outcome.REFUTED


def test_sampled_tests_see_large_faults_by_themselves_and_count_tokens():
    rows = {row["test"]: row for row in examine(NAMES["accepts everything"], BUDGET, thorough=True)}
    assert set(rows) == set(TESTS)
    powerful = set(SAMPLED) - {DISCREPANCY}  # MMD wants more sequences
    assert all(rows[name]["seen"] for name in powerful)
    assert all(0 < rows[name]["tokens"] <= BUDGET + 400 and rows[name]["budget"] == BUDGET for name in powerful)
    assert rows["e-process"]["tokens"] < 125  # looked at after every token


def test_what_exact_tests_have_seen_is_not_sampled_unless_asked_for():
    assert not set(SAMPLED) & {row["test"] for row in examine(NAMES["residual p"], BUDGET)}


def test_scores_are_made_without_the_mutant(monkeypatch):
    """A history that forgets the draft must not be judged by laws that forget it too."""
    right, score, calls = History.extended, kill_sampled.Scorer.score, []

    def watched(self, *what, **how):
        calls.append(History.extended is right)
        return score(self, *what, **how)

    monkeypatch.setattr(kill_sampled.Scorer, "score", watched)
    sample = kill_sampled.draw(400, True, NAMES["history without the draft"].inject)
    assert calls and all(calls) and len(sample.pit) == sample.tokens >= 400
