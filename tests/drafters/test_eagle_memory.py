"""What a trained drafter remembers of its rows is what it would work out afresh from their committed text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from specdec_core.arrays import host
from specdec_core.decode import decode, outputs
from specdec_core.drafters import eagle_memory
from specdec_core.drafters.eagle_memory import EagleMemory, Places
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.models.eagle_checkpoint import EagleCheckpoint, tiny_eagle
from specdec_core.models.errors import ModelError
from specdec_core.protocol import Drafter
from specdec_core.rows import Request
from specdec_core.state.slots import CacheError
from tests.drafters.test_eagle import (
    CHECKPOINT,
    ENGINES,
    EXACT,
    GREEDY,
    RANDOM,
    SAMPLED,
    Naive,
    assert_alike,
    drafter,
    every_engine,
    every_kind,
    prompt,
    record,
    target,
    trained,
)

pytestmark = pytest.mark.usefixtures("one_thread")


@dataclass(frozen=True)
class Now(FixedLength):
    """Drafts only where the room left is a multiple of `every`."""

    every: int = 3

    def begin(self, limit: int) -> int:
        return 0 if limit % self.every else min(self.k, limit)


MIXED = [*GREEDY[:5], SAMPLED[0], SAMPLED[4], SAMPLED[5], SAMPLED[3]]
SOMETIMES = [replace(each, policy=each.policy and Now(each.policy.k, 3 + n % 4)) for n, each in enumerate(MIXED)]


def assert_entries(memory: EagleMemory, slot: int, text: Sequence[int], naive: Naive, engine: str) -> None:
    """Committed keys and values of the slot are those of the first pairs of `text`."""
    held = int(memory.cache.lengths[slot])
    if held:
        _, _, keys, values = naive.read(tuple(text[: held + 1]))
        for found, expected in ((memory.cache.keys, keys), (memory.cache.values, values)):
            np.testing.assert_allclose(host(found[0, slot, :, :held]), host(expected), **EXACT[engine])


@every_engine
@every_kind
@pytest.mark.parametrize("requests", [MIXED, SOMETIMES], ids=["always", "sometimes"])
@pytest.mark.parametrize("slots", [2, 9])
def test_the_entries_of_committed_tokens_are_those_of_the_whole_text_read_afresh(kind, engine, requests, slots):
    used, naive = drafter(kind, engine), Naive(trained(), engine)
    texts = {key: request.prompt for key, request in enumerate(requests)}
    expected: dict[int, int] = {}
    waited, caught_up = dict.fromkeys(texts, 0), 0
    for each in decode(target(engine), requests, used, slots=slots):
        for row in each.rows:
            # A prompt is read but for its last pair; every draft reads all pairs of its text.
            before = expected.get(row.key, max(0, len(texts[row.key]) - 2))
            expected[row.key] = row.context - 1 if row.drafted else before
            caught_up += bool(row.drafted) and waited[row.key] > 1
            waited[row.key] = 0 if row.drafted else waited[row.key] + 1
            texts[row.key] += row.emitted
            assert used.memory.cache.lengths[row.slot] == (0 if row.finished else expected[row.key])
            assert_entries(used.memory, row.slot, texts[row.key], naive, engine)
    assert caught_up > 5 or requests is MIXED, "no row went without drafts for some rounds"


@every_engine
@every_kind
@pytest.mark.parametrize("requests", [MIXED, SOMETIMES], ids=["always", "sometimes"])
def test_nothing_behind_the_committed_entries_is_ever_looked_at(kind, engine, requests):
    """Drafted tokens of rounds before, and whatever rows before left in a slot."""
    expected = record(target(engine), requests, drafter(kind, engine), slots=3)
    used = drafter(kind, engine)
    found = record(target(engine), requests, Poisoned(used, engine), slots=3)
    assert outputs(found.rounds, len(requests)) == outputs(expected.rounds, len(requests))
    for key, drafts in expected.drafts.items():
        for (text, draft), (again, other) in zip(drafts, found.drafts[key], strict=True):
            assert text == again
            assert_alike(draft, other, engine)


class Poisoned:
    """Before anything is read, all that is not committed becomes what would show. Torch multiplies what is hidden by
    zero, so there it has to be a number."""

    def __init__(self, drafter: Drafter, engine: str):
        self._drafter, self._value = drafter, np.nan if engine == "numba" else 1e20
        self.most_nodes, self.start, self.observe = drafter.most_nodes, drafter.start, drafter.observe
        self.release = drafter.release

    def admit(self, *given):
        self._poison()
        self._drafter.admit(*given)

    def propose(self, *given):
        self._poison()
        return self._drafter.propose(*given)

    def _poison(self):
        cache = self._drafter.memory.cache
        for slot, length in enumerate(cache.lengths):
            cache.keys[:, slot, :, length:] = self._value
            cache.values[:, slot, :, length:] = self._value


@every_kind
def test_a_drafter_may_be_used_again_and_forgets_the_run_before(kind):
    used = drafter(kind, "numba")
    first = record(target("numba"), MIXED, used, slots=3)
    left = record(target("numba"), MIXED[:2], used)
    again = record(target("numba"), MIXED, used, slots=3)
    assert left.accepted > 0
    assert [(each.rows, each.nodes) for each in first.rounds] == [(each.rows, each.nodes) for each in again.rounds]


def test_a_run_that_was_left_in_the_middle_is_forgotten():
    used = drafter("chain", "numba")
    expected = record(target("numba"), MIXED, drafter("chain", "numba"), slots=2)
    rounds = decode(target("numba"), MIXED[::-1], used, slots=2)
    for _ in range(4):
        next(rounds)
    found = record(target("numba"), MIXED, used, slots=2)
    assert [each.rows for each in found.rounds] == [each.rows for each in expected.rounds]


# --- By hand ------------------------------------------------------------------------------------------------------


def features_of(text: Sequence[int], engine: str = "numba"):
    """The target's features of all tokens but the last."""
    state = target(engine).new_state(1, len(text))
    return target(engine).prefill(state, np.array([0]), [np.array(text)])[0]


def memory(engine: str = "numba", slots: int = 3, capacity: int = 40, checkpoint: EagleCheckpoint = RANDOM):
    found = EagleMemory(checkpoint, CHECKPOINT, ENGINES[engine])
    found.start(slots, capacity)
    return found


def admit(found: EagleMemory, slot: int, text: Sequence[int], engine: str = "numba") -> None:
    found.admit(np.array([slot]), [np.array(text)], [features_of(text, engine)])


@every_engine
@pytest.mark.parametrize("chunk", [1, 3, 4, 512])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5, 6, 9, 14])
def test_a_prompt_is_read_in_chunks_of_any_size(engine, chunk, length, monkeypatch):
    monkeypatch.setattr(eagle_memory, "CHUNK", chunk)
    sizes, found, naive, text = [], memory(engine), Naive(RANDOM, engine), prompt(length)
    spy = Spy(found.steps.committed, lambda plan: sizes.append(len(plan.tokens)))
    monkeypatch.setattr(found, "steps", replace(found.steps, committed=spy))
    admit(found, 1, text, engine)
    assert found.cache.lengths.tolist() == [0, max(0, length - 2), 0]
    assert sum(sizes) == max(0, length - 2) and max(sizes, default=0) <= chunk
    assert len(sizes) == -(-max(0, length - 2) // chunk)
    assert_entries(found, 1, text, naive, engine)
    assert found.can_draft(1) == (length > 1)
    if length > 1:
        np.testing.assert_allclose(host(found.read([1]).logits)[0], naive.logits(text), **EXACT[engine])
        assert found.cache.lengths[1] == length - 1 and not found.can_draft(1)


class Spy:
    """A step whose plans are looked at."""

    def __init__(self, step, look):
        self._step, self._look = step, look

    def __getattr__(self, name):
        return getattr(self._step, name)

    def __call__(self, plan, *rest):
        self._look(plan)
        return self._step(plan, *rest)


@every_engine
@pytest.mark.parametrize("parts", [[5], [1, 4], [2, 1, 2], [1, 1, 1, 1, 1]])
def test_tokens_observed_in_any_parts_are_read_together(engine, parts):
    text = prompt(11)
    found, features, at = memory(engine), features_of(text, engine), 6
    admit(found, 2, text[:6], engine)
    for part in parts:
        found.observe(np.array([2]), [np.array(text[at : at + part])], [features[at - 1 : at - 1 + part]])
        at += part
    assert found.cache.lengths[2] == 4  # observing reads nothing
    continued, naive = found.read([2]), Naive(RANDOM, engine)
    np.testing.assert_allclose(host(continued.logits)[0], naive.logits(text), **EXACT[engine])
    np.testing.assert_allclose(host(continued.hidden)[0], host(naive.read(text)[1])[-1], **EXACT[engine])
    assert_entries(found, 2, text, naive, engine)
    assert found.cache.lengths[2] == 10


def test_features_behind_the_last_token_are_not_read():
    """A target may return more positions than tokens were emitted."""
    text, found = prompt(8), memory()
    admit(found, 0, text[:5])
    found.observe(np.array([0]), [np.array(text[5:7])], [features_of(text)[4:]])
    np.testing.assert_array_equal(found.read([0]).logits[0], Naive(RANDOM, "numba").logits(text[:7]))


def test_rows_are_read_in_the_order_asked_for():
    found, naive = memory(), Naive(RANDOM, "numba")
    texts = {0: prompt(4), 1: prompt(9), 2: prompt(6)}
    for slot, text in texts.items():
        admit(found, slot, text)
    continued = found.read([2, 0])
    np.testing.assert_array_equal(continued.logits, [naive.logits(texts[slot]) for slot in (2, 0)])
    np.testing.assert_array_equal(continued.hidden, [naive.read(texts[slot])[1][-1] for slot in (2, 0)])
    assert found.cache.lengths.tolist() == [3, 7, 5] and found.can_draft(1)


def test_drafted_tokens_are_read_behind_the_committed_ones_and_commit_nothing():
    found, naive = memory(), Naive(RANDOM, "numba")
    texts = [prompt(5), prompt(8)]
    for slot, text in enumerate(texts):
        admit(found, slot, text)
    first = found.read([0, 1])
    # Row 0 reads two siblings, row 1 one node; then row 0 the child of its second one, deeper than row 1 ever was.
    siblings = Places(np.array([0, 1]), np.zeros(2, int), np.array([[0], [1]], np.int32))
    only = Places(np.array([0]), np.zeros(1, int), np.array([[0]], np.int32))
    second = found.extend([0, 1], [np.array([3, 6]), np.array([2])], first.hidden[[0, 0, 1]], [siblings, only])
    expected = [naive.logits(texts[0], (3,)), naive.logits(texts[0], (6,)), naive.logits(texts[1], (2,))]
    np.testing.assert_array_equal(second.logits, expected)
    child = Places(np.array([2]), np.ones(1, int), np.array([[1, 2]], np.int32))
    again = Places(np.array([1]), np.ones(1, int), np.array([[0, 1]], np.int32))
    third = found.extend([1, 0], [np.array([5]), np.array([4])], second.hidden[[2, 1]], [again, child])
    np.testing.assert_array_equal(third.logits, [naive.logits(texts[1], (2, 5)), naive.logits(texts[0], (6, 4))])
    assert found.cache.lengths.tolist() == [4, 7, 0]
    for slot, text in enumerate(texts):
        assert_entries(found, slot, text, naive, "numba")


@every_engine
def test_paths_of_unlike_depth_share_a_pass(engine):
    found, naive = memory(engine), Naive(RANDOM, engine)
    texts = [prompt(5), prompt(8)]
    for slot, text in enumerate(texts):
        admit(found, slot, text, engine)
    first = found.read([0, 1])
    one = Places(np.array([0]), np.zeros(1, int), np.array([[0]], np.int32))
    second = found.extend([0], [np.array([3])], first.hidden[:1], [one])
    siblings = Places(np.array([0, 1]), np.zeros(2, int), np.array([[0], [1]], np.int32))
    two = Places(np.array([1]), np.ones(1, int), np.array([[0, 1]], np.int32))
    hidden = np.stack([host(each) for each in (first.hidden[1], first.hidden[1], second.hidden[0])])
    third = found.extend([1, 0], [np.array([6, 2]), np.array([0])], hidden, [siblings, two])
    expected = [naive.logits(texts[1], (6,)), naive.logits(texts[1], (2,)), naive.logits(texts[0], (3, 0))]
    np.testing.assert_allclose(host(third.logits), expected, **EXACT[engine])


def test_a_released_row_has_nothing_to_continue():
    found = memory()
    admit(found, 0, prompt(6))
    admit(found, 1, prompt(7))
    found.release(np.array([0]))
    assert not found.can_draft(0) and found.can_draft(1)
    assert found.cache.lengths.tolist() == [0, 5, 0]
    found.start(3, 40)
    assert not found.can_draft(1) and not found.cache.lengths.any()


def test_a_row_takes_the_place_of_another_without_a_release():
    found, naive = memory(), Naive(RANDOM, "numba")
    admit(found, 0, prompt(9))
    found.read([0])
    admit(found, 0, prompt(6))
    np.testing.assert_array_equal(found.read([0]).logits[0], naive.logits(prompt(6)))
    admit(found, 0, prompt(1))
    assert not found.can_draft(0) and found.cache.lengths[0] == 0


def test_a_row_without_room_is_an_error_and_stays_to_be_read():
    found = memory(capacity=5)
    admit(found, 0, prompt(6))
    found.observe(np.array([0]), [np.array([1])], [features_of((*prompt(6), 1))[5:]])
    with pytest.raises(CacheError, match="over its capacity of 5"):
        found.read([0])
    assert found.cache.lengths[0] == 4 and found.can_draft(0)


def test_a_memory_belongs_to_the_drafters_target():
    with pytest.raises(ModelError, match="give its own target"):
        EagleMemory(tiny_eagle(1, CHECKPOINT, (0,)), tiny_llama(5, vocabulary=7), ENGINES["torch"])


def test_embeddings_of_a_checkpoint_in_bfloat16_are_read_too():
    rounded = tiny_llama(1, vocabulary=7, context=48, dtype=torch.bfloat16)
    wide = replace(rounded, weights={name: values.float() for name, values in rounded.weights.items()})
    found = []
    for checkpoint in (rounded, wide):
        eagle = replace(RANDOM, target_fingerprint=checkpoint.fingerprint)
        memory = EagleMemory(eagle, checkpoint, ENGINES["numba"])
        memory.start(1, 20)
        admit(memory, 0, prompt(7))
        found.append(memory.read([0]).logits)
    np.testing.assert_array_equal(*found)


@every_engine
@every_kind
def test_a_request_that_fills_the_cache_to_its_last_entry_has_room(kind, engine):
    """The memory is as large as `most_nodes` says, and a long row drafts as deep as it may until its end."""
    requests = [Request(prompt(12), replace(GREEDY[0].options, max_new_tokens=36), FixedLength(7))]
    for checkpoint in (trained(), RANDOM):
        found = record(target(engine), requests, drafter(kind, engine, checkpoint))
        assert outputs(found.rounds, 1)[0].finished == "length"
