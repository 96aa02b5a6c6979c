"""The reference is what plain passes say, and oracles see the first token or ending that is not."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec_core.decode import decode
from specdec_core.forensics.detectors import Suspect
from specdec_core.forensics.faults import FAULTS
from specdec_core.forensics.metamorphic import table_batch
from specdec_core.forensics.oracles import LAWS, ORACLES, draft_reference, exact_law, first_wrong, reference
from specdec_core.forensics.suspects import (
    LEARNED,
    ROTARY,
    SCATTER,
    SLOTS,
    SUBJECTS,
    TABLE,
    Subject,
    make_draft_model,
    make_model,
    new_batch,
    new_drafter,
    new_target,
)

pytestmark = pytest.mark.usefixtures("one_thread")

LEARNED_SCATTER, ROTARY_SCATTER = Subject(SCATTER, LEARNED), Subject(SCATTER, ROTARY)
FAULT = {fault.name: fault for fault in FAULTS}
TEXT = (5, 17, 3, 40, 2, 9, 33, 8, 21, 14, 60, 1)


def plain(model, text):
    with torch.no_grad():
        return model(input_ids=torch.tensor([text])).logits[0].numpy()


@pytest.mark.parametrize("subject", [LEARNED_SCATTER, ROTARY_SCATTER], ids=lambda subject: subject.name)
def test_the_next_token_is_the_argmax_of_a_plain_pass(subject):
    for find, model in ((reference, make_model), (draft_reference, make_draft_model)):
        logits = plain(model(subject.positions), TEXT)
        for end in (1, 5, len(TEXT)):
            assert find(subject).next_token(TEXT[:end]) == logits[end - 1].argmax()


def test_a_window_is_a_plain_pass_over_what_it_leaves_only_in_the_first_layer():
    """Two layers of a window of 8 reach 15 back: a token further back changes nothing, a nearer one something."""
    windowed = reference(Subject(SCATTER, ROTARY, window=8))
    text = tuple((7 * place) % 61 for place in range(24))
    with torch.no_grad():
        logits = [
            windowed._model(input_ids=torch.tensor([each])).logits[0, -1]
            for each in (text, (1, *text[1:]), (*text[:18], 1, *text[19:]))
        ]
    assert torch.allclose(logits[0], logits[1], atol=1e-12) and not torch.allclose(logits[0], logits[2], atol=1e-3)
    with torch.no_grad():
        full = make_model(ROTARY)(input_ids=torch.tensor([text])).logits[0, -1]
    assert not torch.allclose(full, logits[0], atol=1e-3)


def test_entries_are_of_a_prefix_whatever_follows():
    found, longer = (reference(ROTARY_SCATTER).entries(text, 0) for text in (TEXT[:4], TEXT))
    for (keys, values), (more_keys, more_values) in zip(found, longer, strict=True):
        assert keys.shape == (2, 4, 8)
        np.testing.assert_allclose(keys, more_keys[:, :4], atol=1e-12)
        np.testing.assert_allclose(values, more_values[:, :4], atol=1e-12)


def test_an_origin_turns_rotary_keys_and_no_values():
    there, here = (reference(ROTARY_SCATTER).entries(TEXT, origin) for origin in (3, 0))
    assert not np.allclose(there[0][0], here[0][0], atol=1e-3)
    np.testing.assert_allclose(there[0][1], here[0][1], atol=1e-12)


def test_a_continuation_ends_at_the_end_token_or_the_cap():
    request = replace(new_batch(LEARNED_SCATTER, 8)[0])
    tokens, ending = reference(LEARNED_SCATTER).continuation(
        replace(request, options=replace(request.options, max_new_tokens=6, eos=()))
    )
    assert len(tokens) == 6 and ending == "length"
    text = request.prompt
    for token in tokens:
        assert plain(make_model(LEARNED), text)[-1].argmax() == token
        text = (*text, token)
    until = replace(request, options=replace(request.options, max_new_tokens=6, eos=tokens[3:4]))
    first = tokens.index(tokens[3])
    assert reference(LEARNED_SCATTER).continuation(until) == (tokens[: first + 1], "eos")


# --- What oracles see ---------------------------------------------------------------------------------------------

REQUESTS = new_batch(LEARNED_SCATTER, 8)


@pytest.fixture(scope="module")
def rounds():
    return tuple(decode(new_target(LEARNED_SCATTER), REQUESTS, new_drafter(LEARNED_SCATTER), slots=SLOTS))


def changed(rounds, index, key, **fields):
    rows = tuple(replace(row, **fields) if row.key == key else row for row in rounds[index].rows)
    return (*rounds[:index], replace(rounds[index], rows=rows), *rounds[index + 1 :])


def look(rounds):
    return first_wrong(rounds, REQUESTS, reference(LEARNED_SCATTER))


def test_right_rounds_are_silent(rounds):
    assert look(rounds) is None


def test_a_wrong_token_is_named_with_what_came_before_it(rounds):
    row = rounds[1].rows[1]
    before = len(rounds[0].rows[1].emitted)
    wrong = (*row.emitted[:-1], (row.emitted[-1] + 1) % 61)
    found = look(changed(rounds, 1, row.key, emitted=wrong))
    assert (found.round, found.row, found.tokens) == (1, row.key, before + len(row.emitted) - 1)
    assert f"expected {row.emitted[-1]}" in found.where


def test_an_early_end_is_seen(rounds):
    row = rounds[0].rows[0]
    found = look(changed(rounds, 0, row.key, finished="eos"))
    assert (found.round, found.row, found.tokens) == (
        0,
        row.key,
        len(row.emitted),
    ) and "expected to go on" in found.where


def test_going_on_after_the_end_is_seen(rounds):
    last, row = next((each.index, row) for each in rounds for row in each.rows if row.finished)
    found = look(changed(rounds, last, row.key, finished=None))
    assert (found.round, found.row) == (last, row.key) and "goes on" in found.where
    longer = look(changed(rounds, last, row.key, emitted=(*row.emitted, 4)))
    assert "token 4 after the end" in longer.where


def test_a_row_that_is_never_decoded_to_its_end_is_seen(rounds):
    found = look(rounds[:-1])
    assert found.round == len(rounds) - 1 and "not decoded to its end" in found.where


def fired(fault, subject=LEARNED_SCATTER):
    inject = FAULT[fault].inject if fault else nullcontext
    requests = table_batch() if subject.state == TABLE else REQUESTS
    suspect = Suspect(subject, requests, inject)
    return {each.name for each in (*ORACLES, *LAWS) if each.sees(subject) and each.look(suspect) is not None}


@pytest.mark.parametrize(
    ("fault", "modes"),
    [
        (None, set()),
        ("constant position shift", {"AR, alone", "AR, batch", "SD, alone", "SD, batch"}),
        ("cache one short", {"SD, alone", "SD, batch"}),
        ("last token of another row", {"AR, batch", "SD, batch"}),
        ("logits read by the widest row", {"SD, batch"}),
    ],
)
def test_the_modes_that_differ_say_where_to_look(fault, modes):
    assert fired(fault) == modes


def test_the_law_of_a_batch_is_enumerated():
    table = SUBJECTS[-1]
    assert exact_law(Suspect(table, table_batch(), nullcontext)) is None
    assert fired("residual of another row", table) == {"exact joint law"}
