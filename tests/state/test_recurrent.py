"""The recurrent state by itself: random windows against a sequential run, and all that it refuses."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.gated_delta import reference
from specdec_core.kernels.gated_delta import torch as closed_form
from specdec_core.models.gdn_checkpoint import TINY
from specdec_core.state.recurrent import RecurrentState
from specdec_core.state.slots import CacheError
from specdec_core.topology import chain, forest, tree
from tests.kernels.gated_delta.windows import joined, parts, paths_to, random_inputs, random_tree, tensors

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = dataclasses.replace(
    TINY, layers=3, attention_layers=(1,), linear_heads=1, linear_value_heads=2, linear_key_dim=4, linear_value_dim=5
)
LAYERS, HEADS, KEYS, VALUES, CHANNELS, WIDTH = 2, 2, 4, 5, 18, 4
SLOTS = 3
TAPS = [np.random.default_rng(layer).standard_normal((CHANNELS, WIDTH)) for layer in range(LAYERS)]
NONE = np.empty(0, np.int64)


class Kernel:
    """The closed form; counts calls, and fails on demand."""

    def __init__(self):
        self.calls: list[str] = []
        self.failing = 0  # the so-manieth call from now fails

    def _do(self, name, *given):
        self.calls.append(name)
        self.failing -= 1
        if self.failing == 0:
            raise MemoryError("no room for this layer")
        return getattr(closed_form, name)(*given)

    def verify(self, *given):
        return self._do("verify", *given)

    def commit(self, *given):
        return self._do("commit", *given)

    def commit_then_verify(self, *given):
        return self._do("commit_then_verify", *given)


class Driven:
    """A state, fed with random numbers where a step would feed it, and what every slot has committed."""

    def __init__(self, seed: int = 0, *, delayed: bool = True, capacity: int = 200):
        self.rng = np.random.default_rng(seed)
        self.kernel = Kernel()
        self.state = RecurrentState(SHAPE, SLOTS, capacity, self.kernel, torch.float64, delayed=delayed)
        self.committed: list[list[list]] = [[] for _ in range(SLOTS)]

    def run(self, slots, trees, layers=LAYERS):
        """A pass; outputs of every layer are checked against a sequential run over committed nodes and path."""
        slots, shapes = np.array(slots), forest(trees)
        window = self.state.open(slots, shapes)
        nodes = len(shapes.rows)
        given = []
        for layer in range(layers):
            x = self.rng.standard_normal((nodes, CHANNELS))
            inputs = random_inputs(self.rng, nodes, HEADS, KEYS, VALUES)
            convolved = window.convolve(layer, torch.from_numpy(x), torch.from_numpy(TAPS[layer]))
            outputs = window.recur(layer, tensors(inputs))
            given.append((x, inputs))
            self.check(layer, slots, shapes, x, inputs, convolved.numpy(), outputs.numpy())
        places = torch.from_numpy(np.array(slots)[shapes.rows])
        entries = torch.from_numpy(self.state.lengths[slots][shapes.rows] + shapes.nodes)
        stamps = torch.from_numpy(self.rng.standard_normal(nodes))
        window.keys[0][places, :, entries] = stamps[:, None, None].expand(-1, SHAPE.kv_heads, SHAPE.head_dim)
        return window, [*given, stamps.numpy()]

    def check(self, layer, slots, shapes, x, inputs, convolved, outputs):
        flat = int(self.rng.integers(len(shapes.rows)))
        row = shapes.rows[flat]
        path = shapes.offsets[row] + shapes.trees[row].path(int(shapes.nodes[flat]))
        before = [each[layer] for each in self.committed[slots[row]]]
        seen = np.concatenate([*(each[0] for each in before), x[path]])
        fed = joined([*(each[1] for each in before), parts(inputs, path)])
        expected = self.sequential(layer, seen, fed)
        np.testing.assert_allclose(convolved[flat], expected[0][-1], rtol=0, atol=1e-11)
        np.testing.assert_allclose(outputs[flat], expected[1][-1], rtol=0, atol=1e-11)

    def sequential(self, layer, x, inputs):
        """Outputs, then the state and inputs that are left, after one chain from an empty slot."""
        shape = forest([chain(len(x))])
        convolved, windows = reference.convolve(np.zeros((1, CHANNELS, WIDTH - 1)), x, TAPS[layer], shape)
        outputs, states = reference.verify(np.zeros((1, HEADS, KEYS, VALUES)), inputs, shape)
        return convolved, outputs, windows.states[-1], states.states[-1]

    def commit(self, slots, trees, ends, given, window):
        shapes, paths = forest(trees), paths_to(forest(trees), ends)
        self.state.commit(np.array(slots), paths, window.epoch)
        for slot, path, first in zip(slots, paths, shapes.offsets, strict=False):
            if len(path):
                layers = [(x[first + path], parts(inputs, first + path)) for x, inputs in given[:-1]]
                self.committed[slot].append([*layers, given[-1][first + path]])

    def round(self, slots, trees, ends):
        window, given = self.run(slots, trees)
        self.commit(slots, trees, ends, given, window)

    def length(self, slot):
        return sum(len(each[-1]) for each in self.committed[slot])

    def agrees(self):
        """Once nothing waits, every slot holds what a sequential run leaves."""
        self.state.flush()
        assert self.state.lengths.tolist() == [self.length(slot) for slot in range(SLOTS)]
        for slot, windows in enumerate(self.committed):
            for layer in range(LAYERS):
                memory, kept = self.state.memory[layer][slot].numpy(), self.state.convolution[layer][slot].numpy()
                if not windows:
                    assert not memory.any() and not kept.any()
                    continue
                x = np.concatenate([each[layer][0] for each in windows])
                expected = self.sequential(layer, x, joined([each[layer][1] for each in windows]))
                np.testing.assert_allclose(kept, expected[2], rtol=0, atol=0)
                np.testing.assert_allclose(memory, expected[3], rtol=0, atol=1e-11)
            stamps = np.concatenate([each[-1] for each in windows]) if windows else np.empty(0)
            found = self.state.keys[0, slot, :, : len(stamps)].numpy()
            assert (found == stamps[None, :, None]).all()


@pytest.mark.parametrize("delayed", [True, False])
@settings(max_examples=30)
@given(seed=st.integers(0, 10**9), rounds=st.integers(1, 6))
def test_any_rounds_over_any_slots_leave_what_a_sequential_run_leaves(delayed, seed, rounds):
    driven = Driven(seed, delayed=delayed)
    rng = driven.rng
    for _ in range(rounds):
        slots = rng.permutation(SLOTS)[: rng.integers(1, SLOTS + 1)].tolist() if rng.random() < 0.6 else [0, 1, 2]
        trees = [random_tree(rng, 6) for _ in slots]
        driven.round(slots, trees, [int(rng.integers(-1, len(each))) for each in trees])
        if rng.random() < 0.25:
            slot = int(rng.integers(SLOTS))
            driven.state.release(np.array([slot]))
            driven.committed[slot] = []
    driven.agrees()


# --- When a commit is applied -------------------------------------------------------------------------------------


def holding(*, delayed: bool = True) -> Driven:
    """Slots 0 and 1 hold 3 and 2 tokens; nothing waits."""
    driven = Driven(delayed=delayed)
    driven.round([0, 1], [chain(3), chain(2)], [2, 1])
    driven.state.flush()
    driven.kernel.calls.clear()
    return driven


def copies(state: RecurrentState) -> list[torch.Tensor]:
    return [each.clone() for each in state.memory + state.convolution]


def same(state: RecurrentState, before: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, state.memory + state.convolution, before))


def test_a_delayed_commit_takes_note_and_the_next_pass_over_the_slots_applies_it_in_one():
    driven = holding()
    driven.round([0, 1], [tree((-1, 0, 0)), chain(1)], [2, 0])
    before = copies(driven.state)
    assert driven.state.lengths.tolist() == [5, 3, 0] and driven.kernel.calls == ["verify"] * LAYERS
    driven.run([0, 1], [chain(1), chain(1)])
    assert driven.kernel.calls == ["verify"] * LAYERS + ["commit_then_verify"] * LAYERS
    assert not same(driven.state, before)
    driven.kernel.calls.clear()
    driven.run([0, 1], [chain(1), chain(1)])
    assert driven.kernel.calls == ["verify"] * LAYERS
    driven.agrees()


@pytest.mark.parametrize("slots", [[0], [1, 0], [0, 1, 2], [2]])
def test_a_pass_over_other_slots_applies_it_first(slots):
    driven = holding()
    driven.round([0, 1], [tree((-1, 0, 0)), chain(1)], [2, 0])
    driven.kernel.calls.clear()
    driven.run(slots, [chain(1)] * len(slots))
    assert driven.kernel.calls == ["commit"] * LAYERS + ["verify"] * LAYERS
    driven.agrees()


def test_an_eager_commit_is_applied_at_once():
    driven = holding(delayed=False)
    before = copies(driven.state)
    driven.round([0, 1], [tree((-1, 0, 0)), chain(1)], [2, 0])
    assert driven.kernel.calls == ["verify"] * LAYERS + ["commit"] * LAYERS and not same(driven.state, before)
    driven.agrees()


@pytest.mark.parametrize("delayed", [True, False])
def test_a_commit_of_nothing_leaves_the_bits(delayed):
    driven = holding(delayed=delayed)
    before = copies(driven.state)
    driven.round([1, 0], [chain(3), tree((-1, 0, 0))], [-1, -1])
    driven.run([1, 0], [chain(1), chain(1)])
    assert same(driven.state, before) and "commit" not in "".join(driven.kernel.calls)


def test_a_pass_changes_nothing_that_is_committed():
    driven = holding()
    before = copies(driven.state)
    for _ in range(2):
        driven.run([0, 1, 2], [chain(2), tree((-1, 0, 0)), chain(1)])
    assert same(driven.state, before) and driven.state.lengths.tolist() == [3, 2, 0]


@pytest.mark.parametrize("call", [1, 2])
@pytest.mark.parametrize("slots", [[0, 1], [1]])
def test_a_pass_that_fails_midway_applies_no_commit_twice(call, slots):
    driven = holding()
    driven.round([0, 1], [tree((-1, 0, 0)), chain(2)], [2, 1])
    driven.kernel.failing = call
    with pytest.raises(MemoryError):
        driven.run(slots, [chain(2)] * len(slots))
    # No layer may have taken the commit in that another has not: it can no longer be taken back.
    with pytest.raises(CacheError, match="cannot be rewound"):
        driven.state.rewind(np.array([0]), np.array([4]))
    driven.run([0, 1], [chain(1), chain(2)])
    driven.agrees()


def test_index_tables_that_a_pass_made_serve_training():
    driven, shapes = Driven(), [tree((-1, 0, 1, 0, 3)), chain(6), tree((-1, 0, 0, 2))]
    with torch.inference_mode():
        driven.round([0, 1, 2], shapes, [4, 5, 3])
        driven.run([0, 1, 2], shapes)
    given = tensors(random_inputs(driven.rng, 15, HEADS, KEYS, VALUES, gates=(-0.3,)))
    given.v.requires_grad_()
    outputs, pending = closed_form.verify(
        torch.zeros(3, HEADS, KEYS, VALUES, dtype=torch.float64), given, forest(shapes)
    )
    kept = closed_form.commit(
        torch.zeros(3, HEADS, KEYS, VALUES, dtype=torch.float64), pending, paths_to(forest(shapes), [4, 5, 3])
    )
    (outputs.sum() + kept.sum()).backward()
    assert given.v.grad.abs().sum() > 0
    assert not driven.state.memory[0].is_inference()


# --- Going back ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("delayed", [True, False])
@pytest.mark.parametrize("length", [1, 2])
def test_a_rollback_that_cannot_be_done_is_refused_and_changes_nothing(delayed, length):
    driven = holding(delayed=delayed)
    window, given = driven.run([0, 1], [chain(2), chain(1)])
    with pytest.raises(CacheError, match=rf"slot 0 of length 3 cannot be rewound to {length}.*expected 0 or 3…3"):
        driven.state.rewind(np.array([1, 0]), np.array([0, length]))
    driven.commit([0, 1], [chain(2), chain(1)], [1, 0], given, window)  # not even the pass is lost
    driven.agrees()


@pytest.mark.parametrize("length", [4, -1])
def test_a_rollback_forward_or_below_nothing_is_refused_and_changes_nothing(length):
    driven = holding()
    driven.round([0, 1], [chain(1), chain(1)], [-1, 0])
    with pytest.raises(CacheError, match="expected 0…current"):
        driven.state.rewind(np.array([1, 0]), np.array([0, length]))
    driven.agrees()


@pytest.mark.parametrize("back", range(4))
def test_what_waits_can_be_left_out(back):
    driven = holding()
    driven.round([1, 0], [chain(2), tree((-1, 0, 0, 2))], [1, 3])
    driven.state.rewind(np.array([0]), np.array([6 - back]))
    window = driven.committed[0].pop()
    if back < 3:
        driven.committed[0].append(
            [*((x[: 3 - back], parts(i, np.arange(3 - back))) for x, i in window[:-1]), window[-1][: 3 - back]]
        )
    driven.run([1, 0], [chain(1), chain(2)])
    driven.agrees()


def test_what_waits_reaches_no_further_back():
    driven = holding()
    driven.round([1, 0], [chain(2), chain(3)], [1, 2])
    with pytest.raises(CacheError, match=r"slot 0 of length 6 cannot be rewound to 2.*expected 0 or 3…6"):
        driven.state.rewind(np.array([0]), np.array([2]))
    driven.agrees()


def test_once_applied_it_cannot_be_left_out():
    driven = holding()
    driven.round([0, 1], [chain(3), chain(2)], [2, 1])
    driven.run([0, 1], [chain(1), chain(1)])
    with pytest.raises(CacheError, match="expected 0 or 6…6"):
        driven.state.rewind(np.array([0]), np.array([5]))
    driven.agrees()


def test_any_state_can_be_emptied_and_kept_as_it_is():
    driven = holding()
    driven.round([0, 1], [chain(3), chain(2)], [2, 1])
    driven.state.rewind(np.array([1, 0]), np.array([4, 0]))
    driven.committed[0] = []
    driven.round([2, 0], [chain(2), chain(1)], [1, 0])
    driven.agrees()


def test_a_released_slot_is_empty_and_its_neighbours_keep_what_waits():
    driven = holding()
    driven.round([0, 1], [chain(3), tree((-1, 0, 0))], [2, 2])
    driven.state.release(np.array([0]))
    driven.committed[0] = []
    driven.round([0, 1], [chain(2), chain(1)], [1, 0])
    driven.agrees()


# --- Refusals -----------------------------------------------------------------------------------------------------


def test_a_stale_pass_is_not_committed():
    driven = holding()
    before = copies(driven.state)
    window, _ = driven.run([0, 1], [chain(2), chain(1)])
    driven.run([0, 1], [chain(2), chain(1)])
    with pytest.raises(CacheError, match=f"verification {window.epoch} is stale"):
        driven.state.commit(np.array([0, 1]), [np.arange(2), np.arange(1)], window.epoch)
    driven.state.flush()
    assert same(driven.state, before) and driven.state.lengths.tolist() == [3, 2, 0]


def test_a_pass_is_committed_once():
    driven = holding()
    window, given = driven.run([0], [chain(2)])
    driven.commit([0], [chain(2)], [1], given, window)
    with pytest.raises(CacheError, match="stale"):
        driven.state.commit(np.array([0]), [np.arange(2)], window.epoch)
    driven.agrees()


@pytest.mark.parametrize(("slots", "paths"), [([1, 0], [[0], [0]]), ([0], [[0]]), ([0, 2], [[0], [0]])])
def test_a_commit_of_other_slots_than_the_pass_is_refused(slots, paths):
    driven = holding()
    window, given = driven.run([0, 1], [chain(2), chain(1)])
    with pytest.raises(CacheError, match=r"after a pass over \[0, 1\]: expected those of the pass"):
        driven.state.commit(np.array(slots), list(map(np.array, paths)), window.epoch)
    driven.commit([0, 1], [chain(2), chain(1)], [1, 0], given, window)
    driven.agrees()


def test_a_commit_without_a_pass_is_refused():
    state = Driven().state
    with pytest.raises(CacheError, match=r"after a pass over None: expected those of the pass"):
        state.commit(np.array([0]), [np.arange(1)], state.begin())


@pytest.mark.parametrize("path", [[1], [0, 2, 3], [3], [0, 1, 2]])
def test_a_path_that_is_none_is_refused_and_changes_nothing(path):
    driven, trees = holding(), [chain(1), tree((-1, 0, 0))]
    window, given = driven.run([1, 0], trees)
    with pytest.raises(CacheError, match=r"row 1: path .* expected the indices of all nodes from the root"):
        driven.state.commit(np.array([1, 0]), [np.arange(1), np.array(path)], window.epoch)
    driven.commit([1, 0], trees, [0, 2], given, window)
    driven.agrees()


def test_a_pass_that_skipped_layers_is_not_committed():
    driven = holding()
    window, _ = driven.run([0], [chain(2)], layers=1)
    with pytest.raises(CacheError, match="did not run every recurrent layer"):
        driven.state.commit(np.array([0]), [np.arange(2)], window.epoch)
    driven.agrees()


def test_a_slot_is_named_once():
    with pytest.raises(CacheError, match=r"slots \[1, 1\] name one twice"):
        Driven().state.open(np.array([1, 1]), forest([chain(1), chain(1)]))


def test_no_room_names_the_slot_and_leaves_what_waits():
    driven = Driven(capacity=4)
    driven.round([0, 1], [chain(3), chain(1)], [2, 0])
    before = copies(driven.state)
    with pytest.raises(CacheError, match="slot 0 holds 3 entries and is asked to take 2 more, over its capacity of 4"):
        driven.state.open(np.array([0]), forest([chain(2)]))
    assert same(driven.state, before)
    driven.run([0], [chain(1)])
    driven.agrees()


def test_its_layers_are_not_borrowed():
    with pytest.raises(CacheError, match="no scratch entries"):
        Driven().state.scratch_view()


@pytest.mark.parametrize(("slots", "capacity"), [(0, 4), (2, 0)])
def test_an_empty_state_is_refused(slots, capacity):
    with pytest.raises(CacheError, match=f"{slots} slots and {capacity} entries"):
        RecurrentState(SHAPE, slots, capacity, Kernel())


@pytest.mark.parametrize(
    ("dtype", "wide"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.bfloat16, torch.float32)],
)
def test_sizes_and_dtypes(dtype, wide):
    state = RecurrentState(SHAPE, SLOTS, 7, Kernel(), dtype)
    assert [tuple(each.shape) for each in state.memory] == [(SLOTS, HEADS, KEYS, VALUES)] * LAYERS
    assert [tuple(each.shape) for each in state.convolution] == [(SLOTS, CHANNELS, WIDTH - 1)] * LAYERS
    assert state.keys.shape == (1, SLOTS, SHAPE.kv_heads, 7, SHAPE.head_dim) and state.capacity == 7
    assert {each.dtype for each in state.memory} == {wide} and {each.dtype for each in state.convolution} == {dtype}
    assert state.keys.dtype == dtype and not any(each.any() for each in state.memory + state.convolution)
