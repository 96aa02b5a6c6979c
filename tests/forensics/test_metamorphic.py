"""Runs that should be alike are, on correct decoders; each way in which they can differ is seen, and by its canary."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import pytest

from specdec_core.decode import decode
from specdec_core.forensics.detectors import Evidence, How, Suspect, earliest, recording
from specdec_core.forensics.faults import FAULTS
from specdec_core.forensics.metamorphic import (
    CANARIES,
    CHANGED,
    METAMORPHIC,
    SEEDED,
    AlwaysWrong,
    by_row,
    first_difference,
    itself,
    table_batch,
)
from specdec_core.forensics.suspects import (
    LEARNED,
    RECTANGLE,
    SCATTER,
    SLOTS,
    SUBJECTS,
    TABLE,
    Subject,
    new_batch,
    new_target,
)

pytestmark = pytest.mark.usefixtures("one_thread")

DETECTORS = (*METAMORPHIC, *CANARIES, *SEEDED)
LOOKS = {each.name: each.look for each in DETECTORS}
FAULT = {fault.name: fault for fault in FAULTS}
SUBJECT = Subject(SCATTER, LEARNED)
TOKENS = 8
REQUESTS = new_batch(SUBJECT, TOKENS)


def fired(fault, subject=SUBJECT):
    requests = table_batch() if subject.state == TABLE else new_batch(subject, TOKENS)
    suspect = Suspect(subject, requests, FAULT[fault].inject if fault else nullcontext)
    return {each.name for each in DETECTORS if each.sees(subject) and each.look(suspect) is not None}


@pytest.mark.parametrize("subject", [SUBJECT, Subject(RECTANGLE, LEARNED), SUBJECTS[-1]], ids=lambda each: each.name)
def test_correct_decoders_are_silent(subject):
    assert fired(None, subject) == set()


def test_a_table_is_seen_by_seeded_rows_only():
    assert [each.name for each in DETECTORS if each.sees(SUBJECTS[-1])] == ["seeded rows"]


# --- Comparing ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rows():
    return by_row(recording(Suspect(SUBJECT, REQUESTS, nullcontext)).rounds, REQUESTS)


def other(rows, key, number, **fields):
    changed = list(rows[key])
    changed[number] = replace(changed[number], report=replace(changed[number].report, **fields))
    return {**rows, key: changed}


def test_rows_that_did_the_same_are_alike_wherever_and_whenever(rows):
    moved = {key: [replace(row, round=row.round + 5) for row in each] for key, each in rows.items()}
    assert first_difference(rows, moved, range(6), "later") is None


@pytest.mark.parametrize("fields", [{"emitted": (1,)}, {"accepted": 9}, {"drafted": ()}, {"finished": "stop"}])
def test_the_first_round_that_differs_is_named(rows, fields):
    found = first_difference(rows, other(rows, 2, 1, **fields), range(6), "here")
    here = rows[2][1]
    assert (found.round, found.row, found.tokens) == (here.round, 2, here.emitted) and found.where.endswith("here")
    assert first_difference(rows, other(rows, 2, 1, **fields), [0, 1, 3], "here") is None


def test_a_row_that_stops_short_or_goes_on_is_seen(rows):
    shorter = {**rows, 4: rows[4][:-1]}
    assert first_difference(rows, shorter, range(6), "").round == rows[4][-1].round
    assert first_difference(shorter, rows, range(6), "").where.startswith("row 4: goes on")
    assert first_difference({**rows, 4: []}, {}, [4], "") is None


def test_the_earliest_is_by_round_then_row():
    late, early, other = Evidence(3, 0, 9, ""), Evidence(1, 2, 9, ""), Evidence(1, 1, 9, "")
    assert earliest([late, early, other]) is other and earliest([]) is None


# --- Drafters of canaries -----------------------------------------------------------------------------------------


def test_a_drafter_that_is_always_wrong_has_nothing_accepted():
    rounds = list(decode(new_target(SUBJECT), REQUESTS, AlwaysWrong(SUBJECT), slots=SLOTS))
    reports = [row for each in rounds for row in each.rows]
    assert {row.accepted for row in reports} == {0} and max(len(row.drafted) for row in reports) == 4


def test_a_target_that_drafts_for_itself_has_everything_accepted():
    reports = [
        row for each in Suspect(SUBJECT, REQUESTS, nullcontext).rounds(How(REQUESTS, itself)) for row in each.rows
    ]
    whole = [row for row in reports if row.finished is None]
    assert whole and all(row.accepted == len(row.drafted) for row in whole)


def test_isolation_changes_one_row_and_no_other():
    suspect = Suspect(SUBJECT, REQUESTS, nullcontext)
    assert LOOKS["row isolation"](suspect) is None and LOOKS["more padding"](suspect) is None
    runs = [how.requests for how in suspect._done if isinstance(how, How) and how.requests != REQUESTS]
    assert len(runs) == 2 and {len(run[CHANGED].prompt) for run in runs} == {20, 60}
    for run in runs:
        assert [one for key, one in enumerate(run) if key != CHANGED] == [*REQUESTS[:1], *REQUESTS[2:]]
        assert run[CHANGED].prompt != REQUESTS[CHANGED].prompt


# --- Faults -------------------------------------------------------------------------------------------------------

NEIGHBOURS = {"order of rows", "number of slots", "rounds alone"}


@pytest.mark.parametrize(
    ("fault", "seen", "silent"),
    [
        ("neighbour's entry overwritten", NEIGHBOURS, {"self-draft, alone", "prefill chunks"}),
        ("all rows cut to the batch's minimum", NEIGHBOURS | {"longest match"}, {"adversarial draft"}),
        ("drafts as long as the least budget", NEIGHBOURS, {"longest match", "self-draft, batch"}),
        ("last logit dropped", {"self-draft, alone", "self-draft, batch", "longest match"}, NEIGHBOURS),
        ("draft kept on a mismatch", {"adversarial draft"}, NEIGHBOURS | {"longest match"}),
        ("cache one short", {"self-draft, alone", "longest match"}, NEIGHBOURS | {"adversarial draft"}),
        ("one generator for all rows", {"seeded rows"}, NEIGHBOURS | {"longest match"}),
        ("residual of another row", {"seeded rows"}, NEIGHBOURS | {"longest match"}),
    ],
)
def test_canaries_and_relations_see_what_they_are_for(fault, seen, silent):
    found = fired(fault)
    assert seen <= found and not silent & found


def test_chunks_are_seen_where_a_prompt_is_read_in_parts():
    """No fault of the zoo is one of chunks alone: a prefill that forgets where it is does show."""
    suspect = Suspect(SUBJECT, REQUESTS, nullcontext)
    assert LOOKS["prefill chunks"](suspect) is None
    target = type(new_target(SUBJECT))
    right = target._prefill_row

    def forgetful(self, state, slots, prompt):
        if self._chunk < 5:
            prompt = prompt[::-1]
        right(self, state, slots, prompt)

    with pytest.MonkeyPatch.context() as patch:
        new_target(SUBJECT, 3)  # made before it is broken
        patch.setattr(target, "_prefill_row", forgetful)
        assert LOOKS["prefill chunks"](Suspect(SUBJECT, REQUESTS, nullcontext)) is not None
        assert LOOKS["row isolation"](Suspect(SUBJECT, REQUESTS, nullcontext)) is None
