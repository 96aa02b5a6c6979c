"""Each invariant holds on correct decoders, and names the first place where a tampered recording breaks it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest

from specdec_core.forensics import invariants
from specdec_core.forensics.detectors import How, Recording, Suspect, recording
from specdec_core.forensics.faults import FAULTS
from specdec_core.forensics.invariants import DRAFTER, INVARIANTS, TARGET, due
from specdec_core.forensics.suspects import LEARNED, RECTANGLE, ROTARY, SCATTER, SUBJECTS, TABLE, Subject, new_batch

pytestmark = pytest.mark.usefixtures("one_thread")

LOOKS = {each.name: each.look for each in INVARIANTS}
FAULT = {fault.name: fault for fault in FAULTS}
SUBJECT = Subject(RECTANGLE, LEARNED)
TOKENS = 10


def fresh(subject=SUBJECT, inject=nullcontext):
    return Suspect(subject, new_batch(subject, TOKENS), inject)


@pytest.fixture
def suspect():
    """A correct decoder whose recording may be tampered with."""
    found = fresh()
    recording(found)
    return found


def tamper(suspect, change):
    """`change(recording)` edits its events in place, or gives other rounds."""
    found: Recording = suspect._done["recording"]
    rounds = change(found)
    if rounds is not None:
        suspect._done["recording"] = replace(found, rounds=rounds)


def other_row(rounds, index, place, **fields):
    rows = list(rounds[index].rows)
    rows[place] = replace(rows[place], **fields)
    return (*rounds[:index], replace(rounds[index], rows=tuple(rows)), *rounds[index + 1 :])


@pytest.mark.parametrize("subject", [each for each in SUBJECTS if each.state != TABLE], ids=lambda each: each.name)
def test_correct_decoders_keep_all_of_them(subject):
    suspect = fresh(subject)
    assert {name: look(suspect) for name, look in LOOKS.items()} == dict.fromkeys(LOOKS)


def test_every_pass_and_every_round_was_watched(suspect):
    found = recording(suspect)
    assert len(found.target.kept) == len(found.drafter.kept) == len(found.rounds) == len(found.drafts) - 1
    for each in found.rounds:
        fed = [one for one in found.target.fed if one.round == each.index and one.offset < 0]
        assert sorted(one.slot for one in fed) == sorted(row.slot for row in each.rows)
        assert sum(len(one.tokens) for one in fed) == each.nodes
    prompts = [one for one in found.target.fed if one.offset >= 0]
    assert sum(len(one.tokens) for one in prompts) == sum(len(request.prompt) - 1 for request in suspect.requests)
    assert suspect.rounds(How(suspect.requests)) is found.rounds


def test_what_is_due_follows_from_what_was_emitted(suspect):
    found = recording(suspect)
    target, drafter = due(found, suspect, TARGET), due(found, suspect, DRAFTER)
    lacking = set()
    for where, each in target.items():
        text, report = each.row.text, each.row.report
        assert (each.before, each.after) == (len(text) - 1, len(text) + len(report.emitted) - 1)
        if report.finished is None:
            whole = report.accepted == len(report.drafted)
            assert drafter[where].after == each.after - whole
            lacking.add(whole)
    assert lacking == {True, False}


# --- Caches and passes --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("whose", [TARGET, DRAFTER])
def test_a_length_that_is_off_by_one(suspect, whose):
    row = next(row for row in recording(suspect).rounds[1].rows if not row.finished)

    def change(found):
        getattr(found, whose).kept[1].lengths[row.slot] += 1

    tamper(suspect, change)
    found = LOOKS[f"{whose}'s cache length"](suspect)
    assert (found.round, found.row) == (1, row.key) and f"slot {row.slot} holds" in found.where
    other = DRAFTER if whose == TARGET else TARGET
    assert LOOKS[f"{other}'s cache length"](suspect) is None


@pytest.mark.parametrize("whose", [TARGET, DRAFTER])
def test_a_position_that_is_off_by_one(suspect, whose):
    fed = next(each for each in getattr(recording(suspect), whose).fed if each.round == 2 and each.offset < 0)
    tamper(suspect, lambda found: fed.positions.__setitem__(-1, fed.positions[-1] + 1))
    found = LOOKS[f"{whose}'s positions"](suspect)
    assert found.round == 2 and f"node {len(fed.tokens) - 1} is at position" in found.where


def test_under_rotary_positions_a_constant_is_none_of_anybodys_business_and_a_jump_is():
    for subject, silent in ((Subject(SCATTER, ROTARY), True), (Subject(SCATTER, LEARNED), False)):
        shifted = fresh(subject, FAULT["constant position shift"].inject)
        assert (LOOKS["target's positions"](shifted) is None) == silent
        assert (LOOKS["target's keys and values"](shifted) is None) == silent
    suspect = fresh(Subject(SCATTER, ROTARY))
    fed = [each for each in recording(suspect).target.fed if each.slot == 1 and each.round >= 1]
    for each in fed:
        each.positions[:] += 3
    found = LOOKS["target's positions"](suspect)
    assert (found.round, found.row) == (1, 1)


@pytest.mark.parametrize("whose", [TARGET, DRAFTER])
@pytest.mark.parametrize("column", [0, -1])
def test_a_mask_with_one_wrong_bit(suspect, whose, column):
    """The first entry that the slot has, and the node's own."""
    fed = next(each for each in getattr(recording(suspect), whose).fed if each.round == 1 and each.offset < 0)
    place = np.flatnonzero(fed.visible[0])[column]
    fed.visible[0, place] = False
    found = LOOKS[f"{whose}'s mask"](suspect)
    assert found.round == 1 and f"node 0 does not see entry {place - fed.start}" in found.where
    fed.visible[0, place] = True
    assert fresh_look(suspect, f"{whose}'s mask") is None
    hidden = np.flatnonzero(~fed.visible[0])
    if len(hidden):
        fed.visible[0, hidden[0]] = True
        assert f"node 0 sees entry {hidden[0] - fed.start}" in fresh_look(suspect, f"{whose}'s mask").where


def fresh_look(suspect, name):
    invariants._look.cache_clear()
    return LOOKS[name](suspect)


@pytest.mark.parametrize("whose", [TARGET, DRAFTER])
def test_an_entry_that_is_not_a_recompute_is_named_by_layer_and_slot(suspect, whose):
    row = next(row for row in recording(suspect).rounds[2].rows if not row.finished)
    kept = getattr(recording(suspect), whose).kept[2]
    start = int(kept.starts[row.slot])
    _, values = kept.layers[1]
    values[row.slot, 0, start + 1, 0] += 1e-6
    found = LOOKS[f"{whose}'s keys and values"](suspect)
    assert (found.round, found.row) == (2, row.key)
    assert found.where.startswith(f"row {row.key}: {whose}'s layer 1, slot {row.slot}, entry 1 of")
    values[row.slot, 0, start + 1, 0] = np.nan
    assert fresh_look(suspect, f"{whose}'s keys and values").where == found.where


def test_what_lies_past_the_committed_entries_is_nobodys_business(suspect):
    found = recording(suspect)
    for index, kept in enumerate(found.target.kept):
        for row in found.rounds[index].rows:
            end = int(kept.starts[row.slot] + kept.lengths[row.slot])
            for stores in kept.layers:
                for store in stores:
                    store[row.slot, :, end:] = 7.0
    assert LOOKS["target's keys and values"](suspect) is None


# --- The loop -----------------------------------------------------------------------------------------------------


def test_emitted_counts(suspect):
    rounds = recording(suspect).rounds
    place, row = next((p, r) for p, r in enumerate(rounds[0].rows) if r.ending == "recovered" and r.accepted)
    for fields in (
        {"accepted": row.accepted - 1},
        {"emitted": row.emitted + row.emitted + row.emitted + row.emitted, "accepted": 4 * len(row.emitted) - 1},
        {"drafted": (1,) * 9},
        {"ending": "bonus"},
        {"ending": "cut"},
    ):
        tampered = fresh()
        recording(tampered)
        tamper(tampered, lambda found, fields=fields: other_row(found.rounds, 0, place, **fields))
        assert LOOKS["emitted counts"](tampered).row == row.key


def test_append_only(suspect):
    fed = next(each for each in recording(suspect).target.fed if each.round == 1 and each.offset < 0)
    fed.tokens[0] = (fed.tokens[0] + 1) % 61
    assert LOOKS["append only"](suspect).round == 1
    fed.tokens[0] = (fed.tokens[0] - 1) % 61
    assert LOOKS["append only"](suspect) is None
    row = recording(suspect).rounds[2].rows[0]
    tamper(suspect, lambda found: other_row(found.rounds, 2, 0, context=row.context + 1))
    assert LOOKS["append only"](suspect).round == 2


def test_stop_and_cap(suspect):
    rounds = recording(suspect).rounds
    place, row = next((p, r) for p, r in enumerate(rounds[0].rows) if not r.finished)
    last = next((each.index, p, r) for each in rounds for p, r in enumerate(each.rows) if r.finished == "length")
    for index, where, fields, words in (
        (0, place, {"finished": "eos"}, "eos at token"),
        (0, place, {"emitted": (51, *row.emitted)}, "expected eos"),
        (last[0], last[1], {"finished": None}, "goes on"),
        (last[0], last[1], {"emitted": (*last[2].emitted, 4)}, "expected length"),
    ):
        tampered = fresh()
        recording(tampered)
        tamper(tampered, lambda found, i=index, w=where, f=fields: other_row(found.rounds, i, w, **f))
        found = LOOKS["stop and cap"](tampered)
        assert found.round == index and words in found.where


def test_nobody_starves(suspect):
    rounds = recording(suspect).rounds
    missing = replace(rounds[1], rows=rounds[1].rows[1:])
    tamper(suspect, lambda found: (rounds[0], missing, *rounds[2:]))
    assert LOOKS["no row starved"](suspect).where == f"row {rounds[1].rows[0].key} should be in this round"
    tamper(suspect, lambda found: rounds[:-1])
    assert LOOKS["no row starved"](suspect).where.endswith("was left behind")
    early = replace(rounds[0].rows[0], key=len(suspect.requests) - 1)
    tamper(suspect, lambda found: (replace(rounds[0], rows=(early, *rounds[0].rows[1:])), *rounds[1:]))
    assert LOOKS["no row starved"](suspect).round == 0


# --- Faults -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "subject", "seen"),
    [
        ("padding not masked", SUBJECT, {"target's mask", "target's keys and values"}),
        ("keys and values not moved", SUBJECT, {"target's keys and values"}),
        ("cache one short", Subject(SCATTER, LEARNED), {f"target's {what}" for what in invariants._CACHES}),
        ("draft cache: rows swapped", Subject(SCATTER, LEARNED), {"drafter's keys and values"}),
        ("last logit dropped", SUBJECT, {"emitted counts"}),
        ("draft kept on a mismatch", SUBJECT, set()),
        ("end token inside a block ignored", SUBJECT, {"stop and cap"}),
    ],
)
def test_faults_break_the_invariants_of_their_seam_and_no_others(fault, subject, seen):
    suspect = fresh(subject, FAULT[fault].inject)
    assert {name for name, look in LOOKS.items() if look(suspect) is not None} == seen
