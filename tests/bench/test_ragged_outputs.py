"""Notebook 04's comparison of outputs on a tiny model."""

from __future__ import annotations

import pytest

from specdec_core import decode
from specdec_core.bench import ragged_outputs, seeded_rows
from specdec_core.bench.ragged_outputs import PLANS, OutputPlan, compare_outputs, first_rejection
from specdec_core.bench.seeded_rows import SAMPLING, SeededPlan, isolate_rows, sample_batches
from specdec_core.evidence.evaluate import judge
from specdec_core.evidence.layout import PROFILES
from specdec_core.evidence.lossless_records import EXACT_LAW
from specdec_core.evidence.ragged_exactness import COMPILED
from specdec_core.evidence.ragged_records import RAGGED_OUTPUT, RAGGED_ROUND, SEEDED_ROW
from specdec_core.evidence.records import read_records
from specdec_core.evidence.verdicts import Outcome
from specdec_core.models.rounding import rounded
from specdec_core.protocol import RowRound
from specdec_core.published.ways import WAYS
from tests.bench.conftest import copy_checkout

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = OutputPlan(published=(5, 10), ours=(6, 10), our_slots=(2, 4), slots=3, k=3)


def small(patch, prompts):
    patch.setattr(ragged_outputs, "load_prompts", lambda: prompts)
    patch.setattr(seeded_rows, "load_prompts", lambda: prompts)
    for module in (ragged_outputs, seeded_rows):
        patch.setattr(module, "rounded", lambda checkpoint, bits: rounded(checkpoint, bits, 16))
    patch.setattr(ragged_outputs, "FIRST_LAYERS", 2)


@pytest.fixture(scope="module")
def compared(tmp_path_factory, tiny_opened, short_prompts):
    layout = copy_checkout(tmp_path_factory.mktemp("compared"))
    with pytest.MonkeyPatch.context() as patch:
        small(patch, short_prompts)
        return layout, compare_outputs(PLAN, tiny_opened, "quick", layout)


def test_every_profile_has_plans():
    assert set(PLANS) == set(seeded_rows.PLANS) == set(PROFILES)
    assert PLANS["full"].our_slots[-1] == 32 and seeded_rows.PLANS["full"].thorough


def test_all_ways_and_our_batches_are_recorded(compared):
    layout, rows = compared
    assert read_records(layout.records("quick") / "04_outputs.jsonl", RAGGED_OUTPUT)[1] == rows.outputs
    assert read_records(layout.records("quick") / "04_round.jsonl", RAGGED_ROUND)[1] == rows.round
    published = [row for row in rows.outputs if row["engine"] != COMPILED]
    assert list(dict.fromkeys(row["way"] for row in published)) == [way.name for way in WAYS]
    assert len(published) == 5 * len(WAYS)
    ours = [row for row in rows.outputs if row["engine"] == COMPILED]
    assert {(row["slots"], row["drafter"]) for row in ours} == {
        (slots, drafter) for slots in (2, 4) for drafter in ("look-up", "look-up tree", "4-bit copy", "first layers")
    }


def test_sound_ways_are_exact_and_ours_is_to_the_bit(compared):
    _, rows = compared
    assert all(row["certified"] for row in rows.outputs if not row["broken"])
    assert judge("R3", rows.outputs).verdict is Outcome.SUPPORTED
    assert all(row["matching"] == row["tokens"] == row["expected"] for row in rows.outputs if row["exact"])


def test_broken_ways_are_marked_token_by_token(compared):
    _, rows = compared
    corrupted = [row for row in rows.outputs if not row["certified"]]
    assert corrupted and {row["broken"] for row in corrupted} == {True}
    for row in corrupted:
        assert row["differs_at"].index("x") == row["first_divergence"]
        assert row["differs_at"].count("=") == row["matching"]


def test_the_round_that_is_drawn_accepts_unequally(compared):
    _, rows = compared
    assert len(rows.round) == 4
    assert all(1 <= row["kept"] <= len(row["pieces"]) and row["emitted"] for row in rows.round)
    assert all(len(row["emitted"]) == row["kept"] for row in rows.round)
    for row in rows.round:
        assert row["emitted"][:-1] == row["pieces"][1 : row["kept"]]


def test_a_row_that_differs_on_our_engine_is_recorded_as_it_is(tiny_opened, short_prompts, monkeypatch):
    small(monkeypatch, short_prompts)
    right = decode.follow

    def wrong(draft, greedy_at):
        found = right(draft, greedy_at)
        return type(found)(found.path, (found.token + 1) % 200, found.ending) if len(draft.tokens) == 7 else found

    monkeypatch.setattr(decode, "follow", wrong)
    plan = OutputPlan(published=(1, 2), ours=(6, 10), our_slots=(4,))
    rows = list(ragged_outputs._ours(plan, tiny_opened, progress=False))
    assert judge("R3", rows).verdict is Outcome.REFUTED
    drafters_of_seven = {row["prompt_id"] for row in rows if not row["exact"]}
    assert len(drafters_of_seven) == 1  # only the third row of six drafts so far


def test_the_first_rejection_is_counted_in_emitted_tokens():
    def round_of(emitted, ending):
        return RowRound(0, 0, 5, (1,) * 3, emitted - 1, ending, tuple(range(emitted)))

    rows = [round_of(4, "bonus"), round_of(2, "recovered"), round_of(1, "recovered")]
    assert first_rejection(rows) == 6
    assert first_rejection(rows[:1]) == -1


@pytest.fixture(scope="module")
def sampled(tmp_path_factory, tiny_opened, short_prompts):
    layout = copy_checkout(tmp_path_factory.mktemp("sampled"))
    with pytest.MonkeyPatch.context() as patch:
        small(patch, short_prompts)
        return layout, sample_batches(SeededPlan(4, 8, thorough=False), tiny_opened, "quick", layout)


def test_seeded_rows_keep_to_themselves(sampled):
    layout, rows = sampled
    assert read_records(layout.records("quick") / "04_batch_law.jsonl", EXACT_LAW)[1] == rows.laws
    assert read_records(layout.records("quick") / "04_seeded_rows.jsonl", SEEDED_ROW)[1] == rows.seeded
    assert judge("R6", rows.laws, rows.seeded).verdict is Outcome.SUPPORTED
    assert len({row["change"] for row in rows.seeded}) == 7
    assert len(rows.seeded) == 2 * 7 * 4
    assert len(SAMPLING) == 4


def test_a_row_that_hears_its_neighbours_is_seen(tiny_opened, short_prompts, monkeypatch):
    small(monkeypatch, short_prompts)
    right = decode._accept

    def with_the_first_rows_die(rows, drafts, verification):
        for row in rows[1:]:
            row.decisions = rows[0].decisions
        return right(rows, drafts, verification)

    monkeypatch.setattr(decode, "_accept", with_the_first_rows_die)
    rows = list(isolate_rows(SeededPlan(4, 8, thorough=False), tiny_opened))
    changed = {row["change"] for row in rows if not row["same"]}
    assert {"alone", "in reverse order", "neighbours with other prompts"} <= changed
