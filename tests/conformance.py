"""What every target must do, whatever it runs on: a test class inherits `TargetConformance` and makes a subject.

class TestTransformer(TargetConformance):
    subject = Subject(Transformer(checkpoint), Reference(checkpoint).last, tolerance=1e-10)
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_core.arrays import host
from specdec_core.protocol import State, Target, Verification
from specdec_core.state.slots import CacheError
from specdec_core.topology import Topology, chain, forest, tree
from tests.strategies import topologies

inherited = settings(max_examples=15, suppress_health_check=[HealthCheck.differing_executors, HealthCheck.too_slow])
seeds = st.integers(0, 2**32 - 1)


@dataclass(frozen=True)
class Subject:
    """A target and the truth about it.

    expected   logits `[V]` after a whole prefix, computed some other way (without a cache).
    tolerance  largest absolute difference of a logit.
    longest    longest prompt that the checks use.
    """

    target: Target
    expected: Callable[[Sequence[int]], np.ndarray]
    tolerance: float
    longest: int = 12

    def tokens(self, seed: int, count: int) -> np.ndarray:
        return np.random.default_rng(seed).integers(0, self.target.vocabulary, count)

    def prompt(self, seed: int) -> np.ndarray:
        return self.tokens(seed, int(np.random.default_rng(seed).integers(1, self.longest + 1)))

    def holding(self, *prompts: np.ndarray, spare: int = 16) -> State:
        """A state whose slots 0, 1, … hold these prompts."""
        state = self.target.new_state(len(prompts), max(map(len, prompts)) + spare)
        self.target.prefill(state, np.arange(len(prompts)), list(prompts))
        return state

    def verify(
        self, state: State, rows: Sequence[tuple[int, Sequence[int], Topology]]
    ) -> tuple[np.ndarray, Verification]:
        """Score (slot, tokens of all nodes, shape) of each row: logits on the host, and the verification."""
        slots, tokens, trees = zip(*rows, strict=True)
        flat = np.concatenate([np.asarray(each, np.int64) for each in tokens])
        found = self.target.verify(state, np.array(slots), flat, forest(trees))
        return host(found.logits), found

    def close(self, found: np.ndarray, prefix: Sequence[int]) -> None:
        np.testing.assert_allclose(found, self.expected(prefix), rtol=0, atol=self.tolerance)

    def next_is_right(self, state: State, slot: int, committed: Sequence[int]) -> None:
        """The state holds all of `committed` but the newest token: the next logits show it."""
        assert state.lengths[slot] == len(committed) - 1
        logits, _ = self.verify(state, [(slot, committed[-1:], chain(1))])
        self.close(logits[0], committed)


class TargetConformance:
    """Checks of the contract in protocol.Target against `subject`."""

    subject: Subject

    @inherited
    @given(seeds)
    def test_prefill_caches_the_prompt_but_its_newest_token(self, seed):
        prompt = self.subject.prompt(seed)
        self.subject.next_is_right(self.subject.holding(prompt), 0, prompt)

    def test_a_prompt_of_one_token_caches_nothing(self):
        prompt = self.subject.tokens(0, 1)
        state = self.subject.holding(prompt)
        assert state.lengths[0] == 0
        self.subject.next_is_right(state, 0, prompt)

    @inherited
    @given(seeds, st.lists(topologies(7), min_size=1, max_size=4))
    def test_every_node_of_every_row_is_scored_after_its_own_path(self, seed, trees):
        subject = self.subject
        prompts = [subject.prompt(seed + row) for row in range(len(trees))]
        drafts = [subject.tokens(seed + 100 + row, len(shape) - 1) for row, shape in enumerate(trees)]
        nodes = [np.concatenate([prompt[-1:], draft]) for prompt, draft in zip(prompts, drafts, strict=True)]
        order = np.random.default_rng(seed).permutation(len(trees))  # rows in any order of slots
        state = subject.holding(*prompts)
        logits, found = subject.verify(state, [(row, nodes[row], trees[row]) for row in order])
        assert logits.shape == (found.forest.offsets[-1], subject.target.vocabulary)
        for place, row in enumerate(order):
            for node in range(len(trees[row])):
                path = nodes[row][trees[row].path(node)]
                subject.close(logits[found.forest.offsets[place] + node], [*prompts[row][:-1], *path])
        assert state.lengths.tolist() == [len(prompt) - 1 for prompt in prompts]

    @pytest.mark.parametrize("kept", range(6))
    def test_keeping_n_of_a_chain_is_recomputing(self, kept):
        subject, prompt = self.subject, self.subject.tokens(1, 5)
        state, draft = subject.holding(prompt), subject.tokens(2, 4)
        _, found = subject.verify(state, [(0, [prompt[-1], *draft], chain(5))])
        subject.target.commit(state, found, [np.arange(kept)])
        # The newest token is whatever comes next, so that the cache is one behind what is committed.
        subject.next_is_right(state, 0, [*[*prompt, *draft][: 4 + kept], 3])

    @inherited
    @given(seeds, st.lists(topologies(7), min_size=1, max_size=3), st.data())
    def test_keeping_any_path_of_any_tree_is_recomputing(self, seed, trees, data):
        subject = self.subject
        committed = [subject.prompt(seed + row).tolist() for row in range(len(trees))]
        state = subject.holding(*map(np.array, committed))
        for step in range(2):
            rows, paths = [], []
            for row, shape in enumerate(trees):
                tokens = [committed[row][-1], *subject.tokens(seed + 10 * step + row, len(shape) - 1).tolist()]
                rows.append((row, tokens, shape))
                paths.append(shape.path(data.draw(st.integers(0, len(shape) - 1))))
                committed[row] += [*(tokens[node] for node in paths[-1][1:]), step]
            subject.target.commit(state, subject.verify(state, rows)[1], paths)
        for row, tokens in enumerate(committed):
            subject.next_is_right(state, row, tokens)

    @pytest.mark.parametrize("length", range(6))
    def test_rewinding_to_n_is_recomputing(self, length):
        subject, prompt = self.subject, self.subject.tokens(3, 6)
        state = subject.holding(prompt, subject.tokens(4, 6))
        state.rewind(np.array([0]), np.array([length]))
        subject.next_is_right(state, 0, [*prompt[:length], 1])
        subject.next_is_right(state, 1, subject.tokens(4, 6))

    def test_verifying_commits_nothing(self):
        subject, prompt = self.subject, self.subject.tokens(5, 6)
        state = subject.holding(prompt)
        for seed in range(3):
            subject.verify(state, [(0, [prompt[-1], *subject.tokens(seed, 3)], tree((-1, 0, 0, 1)))])
        subject.next_is_right(state, 0, prompt)

    def test_keeping_nothing_of_a_row_leaves_it_as_it_was(self):
        subject, prompts = self.subject, [self.subject.tokens(seed, 5) for seed in (6, 7)]
        state = subject.holding(*prompts)
        _, found = subject.verify(state, [(row, prompts[row][-1:], chain(1)) for row in (0, 1)])
        subject.target.commit(state, found, [np.empty(0, np.int64), np.arange(1)])
        subject.next_is_right(state, 0, prompts[0])
        subject.next_is_right(state, 1, [*prompts[1], 2])

    def test_a_second_verification_invalidates_the_first(self):
        subject, prompt = self.subject, self.subject.tokens(8, 4)
        state = subject.holding(prompt)
        _, stale = subject.verify(state, [(0, [prompt[-1], 1], chain(2))])
        subject.verify(state, [(0, [prompt[-1], 2], chain(2))])
        with pytest.raises(CacheError, match="stale"):
            subject.target.commit(state, stale, [np.arange(2)])
        subject.next_is_right(state, 0, prompt)

    @pytest.mark.parametrize("change", ["commit", "rewind", "release"])
    def test_a_verification_does_not_outlive_a_change_of_the_state(self, change):
        subject, prompt = self.subject, self.subject.tokens(9, 4)
        state = subject.holding(prompt)
        _, found = subject.verify(state, [(0, prompt[-1:], chain(1))])
        if change == "commit":
            subject.target.commit(state, found, [np.arange(1)])
        elif change == "rewind":
            state.rewind(np.array([0]), np.array([1]))
        else:
            state.release(np.array([0]))
        with pytest.raises(CacheError, match="stale"):
            subject.target.commit(state, found, [np.arange(1)])

    def test_a_released_slot_serves_another_row(self):
        subject, first, second = self.subject, self.subject.tokens(10, 9), self.subject.tokens(11, 3)
        state = subject.holding(first, first)
        state.release(np.array([0]))
        assert state.lengths.tolist() == [0, len(first) - 1]
        subject.target.prefill(state, np.array([0]), [second])
        subject.next_is_right(state, 0, second)
        subject.next_is_right(state, 1, first)

    def test_prefill_replaces_what_a_slot_held(self):
        subject, first, second = self.subject, self.subject.tokens(12, 7), self.subject.tokens(13, 4)
        state = subject.holding(first)
        subject.target.prefill(state, np.array([0]), [second])
        subject.next_is_right(state, 0, second)

    def test_no_room_is_an_error_that_changes_nothing(self):
        subject, prompt = self.subject, self.subject.tokens(14, 5)
        state = subject.holding(prompt, spare=0)
        subject.verify(state, [(0, prompt[-1:], chain(1))])  # the last entry can be used
        with pytest.raises(CacheError, match="capacity"):
            subject.verify(state, [(0, [prompt[-1], 1], chain(2))])
        subject.next_is_right(state, 0, prompt)
