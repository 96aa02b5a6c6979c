from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec_core.arrays import host
from specdec_core.forensics.suspects import LEARNED, ROTARY, make_model
from specdec_core.published.rectangle import RealigningTarget
from specdec_core.state.slots import CacheError
from specdec_core.targets.huggingface import HuggingFaceTarget
from specdec_core.topology import chain, forest, tree
from tests.conformance import Subject, TargetConformance
from tests.targets.test_huggingface import plain

pytestmark = pytest.mark.usefixtures("one_thread")


class TestRotary(TargetConformance):
    """transformers computes rotary tables in float32 whatever the dtype."""

    subject = Subject(RealigningTarget(make_model(ROTARY), chunk=3), plain(make_model(ROTARY)), tolerance=2e-3)


class TestLearned(TargetConformance):
    subject = Subject(RealigningTarget(make_model(LEARNED)), plain(make_model(LEARNED)), tolerance=1e-9)


def opened(prompts, capacity=24):
    target = RealigningTarget(make_model(LEARNED))
    state = target.new_state(len(prompts), capacity)
    target.prefill(state, np.arange(len(prompts)), [np.array(prompt) for prompt in prompts])
    return target, state


def ends(state):
    return (state.starts + state.lengths)[state.lengths > 0]


def test_all_rows_end_at_the_same_column_after_prefill_commit_and_rewind():
    target, state = opened([[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]])
    assert (ends(state) == state.width).all() and state.width == 4
    assert state.starts.tolist() == [0, 3, 2]
    shape = forest([chain(4), chain(3), tree((-1, 0, 0, 2))])
    found = target.verify(state, np.arange(3), np.arange(11, 22), shape)
    target.commit(state, found, [np.array([0]), np.array([0, 1, 2]), np.array([0, 2, 3])])
    assert state.lengths.tolist() == [5, 4, 5]
    assert (ends(state) == state.width).all() and state.width == 5
    state.rewind(np.array([0, 2]), np.array([2, 5]))
    assert state.lengths.tolist() == [2, 4, 5]
    assert (ends(state) == state.width).all()
    assert state.starts[1] == 1
    state.release(np.array([1]))
    assert state.starts[1] == state.lengths[1] == 0


def test_what_a_row_holds_moves_with_it():
    prompts = [[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]]
    target, state = opened(prompts)
    sound = HuggingFaceTarget(make_model(LEARNED))
    other = sound.new_state(3, 24)
    sound.prefill(other, np.arange(3), [np.array(prompt) for prompt in prompts])
    shape, nodes = forest([chain(4), chain(3), tree((-1, 0, 0, 2))]), np.arange(11, 22)
    paths = [np.array([0]), np.array([0, 1, 2]), np.array([0, 2, 3])]
    for one, held in ((target, state), (sound, other)):
        one.commit(held, one.verify(held, np.arange(3), nodes, shape), paths)
    for layer in range(2):
        for mine, theirs in zip(state.layers[layer], other.layers[layer], strict=True):
            for slot in range(3):
                start, count = int(state.starts[slot]), int(state.lengths[slot])
                torch.testing.assert_close(mine[slot, :, start : start + count], theirs[slot, :, :count])


def test_only_rows_whose_place_changes_are_moved(monkeypatch):
    target, state = opened([[1, 2, 3, 4, 5], [6, 7], [8, 9, 10]])
    moved = []
    right = state._move

    def spy(slot, start, goal, count):
        if start != goal:
            moved.append((slot, start, goal, count))
        right(slot, start, goal, count)

    monkeypatch.setattr(state, "_move", spy)
    found = target.verify(state, np.arange(3), np.arange(9), forest([chain(3)] * 3))
    target.commit(state, found, [np.array([0, 1]), np.array([0, 1]), np.array([0])])
    # The longest grew by two, and so did the second: only the third falls behind, by a column.
    assert moved == [(2, 2, 3, 3)]


def test_a_new_longest_row_moves_all_others():
    target, state = opened([[1, 2, 3], [4, 5]])
    before = target.verify(state, np.array([0]), np.array([3]), forest([chain(1)])).logits
    state.release(np.array([1]))
    target.prefill(state, np.array([1]), [np.arange(12)])
    assert state.width == 11 and state.starts.tolist() == [9, 0]
    after = target.verify(state, np.array([0]), np.array([3]), forest([chain(1)])).logits
    np.testing.assert_allclose(host(after), host(before), atol=1e-12)


def test_a_stale_verification_and_a_wrong_path_are_refused():
    target, state = opened([[1, 2, 3], [4, 5]])
    first = target.verify(state, np.arange(2), np.arange(4), forest([chain(2)] * 2))
    target.verify(state, np.arange(2), np.arange(4), forest([chain(2)] * 2))
    with pytest.raises(CacheError, match="stale"):
        target.commit(state, first, [np.array([0])] * 2)
    last = target.verify(state, np.arange(2), np.arange(4), forest([chain(2)] * 2))
    with pytest.raises(CacheError, match="no path"):
        target.commit(state, last, [np.array([1]), np.array([0])])
