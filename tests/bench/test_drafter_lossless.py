"""A trained drafter held against its target by a tiny pair: the same rows as with the real one, only sooner."""

from __future__ import annotations

from dataclasses import replace

import pytest

from specdec_core.bench import drafter_lossless
from specdec_core.bench.drafter_lossless import (
    PLANS,
    AuditPlan,
    GreedyPlan,
    agree_with_drafter,
    audit_drafter,
    rows_beside_others,
    shipped_drafters,
)
from specdec_core.drafters.eagle import EagleDrafter
from specdec_core.evidence.audit_records import AUDIT
from specdec_core.evidence.layout import PROFILES
from specdec_core.evidence.lossless_records import GREEDY
from specdec_core.evidence.records import read_records
from specdec_core.models.eagle_checkpoint import tiny_eagle
from specdec_core.pairs import open_target
from specdec_core.placement import Placement

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = (0, 1, 2)
PLAN, AUDIT_PLAN = GreedyPlan(4, 8, (1, 3)), AuditPlan(6, 30, repeats=1)


@pytest.fixture(scope="module")
def opened(tiny_folder):
    return open_target(str(tiny_folder), Placement("numba", threads=1), LAYERS)


@pytest.fixture(scope="module")
def checkpoint(opened):
    return tiny_eagle(1, opened.checkpoint, LAYERS, vocabulary=250)


@pytest.fixture(autouse=True)
def prompts(short_prompts, monkeypatch):
    chosen = tuple(replace(prompt, split="report") for prompt in short_prompts)
    monkeypatch.setattr(drafter_lossless, "load_prompts", lambda: chosen)


def test_every_profile_has_a_plan():
    assert set(PLANS) == set(PROFILES)
    assert all(1 in plan.slots and max(plan.slots) >= 8 for plan in PLANS.values())


def test_greedy_rows_of_both_forms_at_every_number_of_rows_together(opened, checkpoint, layout):
    rows = agree_with_drafter(PLAN, opened, checkpoint, "quick", layout)
    assert {(row["drafter"], row["slots"]) for row in rows} == {
        (name, slots) for name in ("EAGLE chain", "EAGLE tree") for slots in (1, 3)
    }
    assert len(rows) == 4 * 4 and all(row["identical"] for row in rows)
    assert read_records(layout.records("quick") / "02_drafter_greedy.jsonl", GREEDY)[1] == rows


def test_an_audit_of_each_form(opened, checkpoint, layout):
    rows = audit_drafter(AUDIT_PLAN, opened, checkpoint, "quick", layout)
    assert {row["decoder"] for row in rows} == {"EAGLE chain", "EAGLE tree"}
    assert {row["tokens"] for row in rows} == {6 * 30}
    assert read_records(layout.records("quick") / "02_drafter_audit.jsonl", AUDIT)[1] == rows


def test_a_sampled_row_is_the_same_beside_others(opened, checkpoint):
    found = list(rows_beside_others(opened, checkpoint, prompts=4, tokens=6, slots=3))
    assert len(found) == 8 and all(same for _, same in found)


def test_a_row_that_does_depend_on_its_neighbours_is_seen(opened, checkpoint, monkeypatch):
    class Leaky(EagleDrafter):
        """Drafts less where rows are together."""

        def propose(self, views, state):
            return super().propose([replace(view, limit=min(view.limit, 6 - 2 * len(views))) for view in views], state)

    broken = Leaky(checkpoint, opened.checkpoint, opened.target.placement)
    monkeypatch.setattr(drafter_lossless, "shipped_drafters", lambda *_: {"leaky": broken})
    assert not all(same for _, same in rows_beside_others(opened, checkpoint, prompts=4, tokens=12, slots=3))


def test_the_shipped_forms(opened, checkpoint):
    assert list(shipped_drafters(checkpoint, opened)) == ["EAGLE chain", "EAGLE tree"]
