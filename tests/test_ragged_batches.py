"""Batches at their edges, on the compiled engine, where a row of a batch has the very bits of the row alone."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specdec_core.decode import RequestError, decode, generate, outputs
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.models.rounding import rounded
from specdec_core.placement import Placement
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer

CHECKPOINT = tiny_llama(1, context=48)
TARGET = Transformer(CHECKPOINT, Placement("numba", threads=1))
NEAR = Transformer(rounded(CHECKPOINT, 5, group=8), TARGET.placement)
DRAFTERS = {
    "model": lambda: ModelDrafter(NEAR, TARGET.vocabulary),
    "itself": lambda: ModelDrafter(TARGET, TARGET.vocabulary),
    "look-up tree": lambda: NGramDrafter(candidates=2),
}


def requests(lengths, tokens=12, seed=0, **options):
    """Random prompts of these lengths, each with a speculation length of its own."""
    random = np.random.default_rng(seed)
    return [
        Request(
            tuple(random.integers(0, TARGET.vocabulary, length).tolist()),
            Options(max_new_tokens=tokens, **options),
            FixedLength(1 + index % 4),
            index,
        )
        for index, length in enumerate(lengths)
    ]


def alone(request):
    return generate(TARGET, [replace(request, policy=None)])[0]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("slots", [2, 7])
def test_prompts_of_one_token_and_of_all_but_the_context_share_a_batch(name, slots):
    # A row that may draft up to K has to have room for it: the longest prompt leaves one token, and does not draft.
    batch = requests([1, 40, 1, 9, 2, 30], tokens=6)
    batch.append(replace(requests([47], seed=5)[0], policy=None))
    found = generate(TARGET, batch, DRAFTERS[name](), slots=slots)
    assert found == [alone(request) for request in batch]
    assert [each.finished for each in found] == ["length"] * 6 + ["context"]
    assert len(found[-1].tokens) == 1


def test_all_rows_may_end_at_once_and_the_queue_goes_on():
    batch = requests([3, 5, 2, 8, 1], eos=tuple(range(TARGET.vocabulary)))
    rounds = list(decode(TARGET, batch, DRAFTERS["itself"](), slots=2))
    assert [sorted(row.key for row in each.rows) for each in rounds] == [[0, 1], [2, 3], [4]]
    assert all(row.finished == "eos" and len(row.emitted) == 1 for each in rounds for row in each.rows)


def test_no_new_tokens_are_refused_and_one_is_never_drafted():
    with pytest.raises(ValueError, match=r"max_new_tokens.*0.*≥ 1"):
        Options(max_new_tokens=0)
    rounds = list(decode(TARGET, requests([4, 2], tokens=1), DRAFTERS["itself"]()))
    assert [[(row.drafted, len(row.emitted)) for row in each.rows] for each in rounds] == [[((), 1), ((), 1)]]


def test_a_row_whose_context_fills_up_inside_a_block_ends_there_alone():
    batch = requests([40, 6], tokens=30)
    batch = [replace(each, policy=FixedLength(4)) for each in batch]
    rounds = list(decode(TARGET, batch, DRAFTERS["itself"]()))
    found = outputs(rounds, 2)
    assert [each.finished for each in found] == ["context", "length"]
    assert [len(each.tokens) for each in found] == [TARGET.context - 40, 30]
    assert found == [alone(request) for request in batch]
    own = [row for each in rounds for row in each.rows if row.key == 0]
    # Four and one of the eight tokens that fit, then a draft that is cut to the two behind which there is room.
    assert [(len(row.drafted), len(row.emitted)) for row in own] == [(4, 5), (2, 3)]


@pytest.mark.parametrize("slots", [1, 2, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_a_queue_is_served_in_order_and_no_row_waits_once_it_is_in(name, slots):
    batch = requests([3, 9, 1, 5, 7, 2, 4])
    batch = [
        replace(each, options=replace(each.options, max_new_tokens=3 + 4 * (i % 3))) for i, each in enumerate(batch)
    ]
    rounds = list(decode(TARGET, batch, DRAFTERS[name](), slots=slots))
    assert outputs(rounds, len(batch)) == [alone(request) for request in batch]
    present = [[each.index for each in rounds if any(row.key == key for row in each.rows)] for key in range(len(batch))]
    assert [first for first, *_ in present] == sorted(first for first, *_ in present)
    assert all(own == list(range(own[0], own[-1] + 1)) for own in present)
    waiting = {each.index: sum(own[0] > each.index for own in present) for each in rounds}
    assert all(len(each.rows) == slots for each in rounds if waiting[each.index])


@pytest.mark.parametrize("name", DRAFTERS)
def test_a_key_that_two_rows_share_makes_them_draw_alike_and_ties_them_in_nothing_else(name):
    first, second = requests([5, 8], temperature=1.0)
    twin = [replace(first, key=3), replace(second, key=3), replace(first, key=3), replace(first, key=4)]
    found = [each.tokens for each in generate(TARGET, twin, DRAFTERS[name]())]
    assert found[0] == found[2] != found[3]
    for request, tokens in zip(twin, found, strict=True):
        assert generate(TARGET, [request], DRAFTERS[name]())[0].tokens == tokens


def test_more_slots_than_rows_are_not_made():
    batch = requests([3, 4])
    assert {row.slot for each in decode(TARGET, batch, slots=9, drafter=NGramDrafter()) for row in each.rows} == {0, 1}


def test_a_prompt_as_long_as_the_context_is_refused_before_its_neighbours_are_decoded():
    with pytest.raises(RequestError, match=r"request 1 has a prompt of 48 tokens.*holds 48"):
        decode(TARGET, [requests([3])[0], replace(requests([48])[0], policy=None)], NGramDrafter())
