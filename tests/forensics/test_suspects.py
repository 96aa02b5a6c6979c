"""The subjects are right, their batches awkward, and what is broken in a target leaves the drafter alone."""

from __future__ import annotations

from unittest.mock import patch

import numpy as np
import pytest
import torch

from specdec_core.decode import decode
from specdec_core.forensics import suspects
from specdec_core.forensics.suspects import (
    CLASSES,
    END,
    ROWS,
    SLOTS,
    SUBJECTS,
    TABLE,
    WINDOW,
    Subject,
    drafted_chain,
    drafting_target,
    make_draft_model,
    make_model,
    new_batch,
    new_drafter,
    new_target,
)
from specdec_core.topology import chain, forest

pytestmark = pytest.mark.usefixtures("one_thread")

DECODERS = [subject for subject in SUBJECTS if subject.state != TABLE]
TOKENS = 12


def rounds_of(subject):
    requests = new_batch(subject, TOKENS)
    return requests, list(decode(new_target(subject), requests, new_drafter(subject), slots=SLOTS))


def test_names_are_distinct():
    assert len({subject.name for subject in SUBJECTS}) == len(SUBJECTS)
    assert Subject("scatter", "rotary", trees=True, window=3).name == "scatter, rotary, trees, window 3"


@pytest.mark.parametrize("positions", ["rotary", "learned"])
def test_models_are_in_float64_and_know_no_tokens_of_their_own(positions):
    model = make_model(positions)
    assert model.dtype == torch.float64 and model.config.max_position_embeddings == 256
    assert model.config.eos_token_id is None and model.config.bos_token_id is None


def test_making_models_leaves_randomness_alone():
    make_model.cache_clear()
    torch.manual_seed(3)
    before = torch.get_rng_state()
    make_model("rotary")
    assert torch.equal(torch.get_rng_state(), before)


def test_noise_is_in_the_drafter_only_and_none_of_it_if_it_drafts_for_itself():
    def differs(model):
        pairs = zip(make_model("rotary").parameters(), model.parameters(), strict=True)
        return [not torch.equal(one, other) for one, other in pairs if one.ndim > 1]

    assert all(differs(make_draft_model("rotary"))) and not any(differs(make_draft_model("rotary", 0.0)))


@pytest.mark.parametrize("subject", DECODERS, ids=lambda subject: subject.name)
def test_a_batch_is_awkward(subject):
    requests, rounds = rounds_of(subject)
    assert [len(request.prompt) for request in requests] == [length for length, *_ in ROWS]
    assert len(requests) > SLOTS and END in requests[1].prompt[:-1] and END in requests[3].prompt[:-1]
    reports = [row for each in rounds for row in each.rows]
    assert any(row.finished == "eos" and row.ending == "cut" for row in reports)
    assert sum(row.finished == "eos" for row in reports) <= len(requests) // 2
    assert {row.ending for row in reports} == {"bonus", "recovered", "cut"}
    share = sum(row.accepted for row in reports) / sum(len(row.drafted) for row in reports)
    assert 0.5 < share < 0.95


def test_another_first_seed_is_another_batch():
    subject = DECODERS[0]
    assert new_batch(subject, TOKENS, 1) != new_batch(subject, TOKENS) == new_batch(subject, TOKENS)


def test_rows_too_short_to_be_awkward_are_refused(monkeypatch):
    monkeypatch.setattr(suspects, "SEEDS", 3)
    with pytest.raises(ValueError, match="expected about 6 tokens"):
        new_batch(DECODERS[0], 2)


@pytest.mark.parametrize("subject", DECODERS, ids=lambda subject: subject.name)
def test_the_drafter_is_of_no_class_of_a_target(subject):
    assert type(drafting_target(subject)) not in CLASSES.values()
    if not subject.window:  # no fault replaces a method of its state
        states = [each.new_state(1, 8) for each in (drafting_target(subject), new_target(subject))]
        assert type(states[0]) is not type(states[1])


def test_a_fault_may_name_another_class():
    with patch.dict(CLASSES, {"scatter": CLASSES["rectangle"]}):
        assert type(new_target(DECODERS[0])) is suspects.Realigned
    assert type(new_target(DECODERS[0])) is suspects.Scatter


def test_decoys_come_first_and_are_skipped_by_the_chain():
    subject = Subject("scatter", "learned", trees=True)
    _, rounds = rounds_of(subject)
    assert {row.drafted[0] for each in rounds for row in each.rows if row.drafted} == {2}
    drafter = new_drafter(subject)
    assert drafter.most_nodes(3) == 6
    draft = suspects._with_decoys(suspects.Draft(np.array([5, 60]), chain(3)))
    assert draft.tokens.tolist() == [6, 5, 0, 60] and draft.topology.parents == (-1, 0, 0, 2, 2)
    assert drafted_chain(draft).tolist() == [5, 60]


def test_a_window_hides_what_is_older():
    target = new_target(Subject("scatter", "rotary", window=WINDOW))
    state = target.new_state(1, 40)
    target.prefill(state, np.array([0]), [np.arange(1, 14)])
    batch = target._padded(state, np.array([0]), np.array([1, 2]), forest([chain(2)]))
    seen = [np.flatnonzero(row).tolist() for row in batch.visible[0]]
    assert seen == [list(range(13 - WINDOW, 13)), list(range(14 - WINDOW, 14))]
