"""The closed form against the sequential reference; rounds against a fresh sequential run of what was committed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.gated_delta import DeltaInputs, GatedDelta, reference
from specdec_core.kernels.gated_delta import torch as closed
from specdec_core.topology import chain, forest, tree
from tests.kernels.gated_delta.windows import (
    GATES,
    MILD,
    error,
    mapped,
    parts,
    paths_to,
    random_forest,
    random_inputs,
    random_state,
    tensors,
)
from tests.strategies import topologies

pytestmark = pytest.mark.usefixtures("one_thread")

TREES = 300
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def windows_of(rng, shapes, member="delta", gates=GATES):
    """Inputs and state of random sizes for these rows."""
    heads, keys, values = int(rng.integers(1, 4)), int(rng.integers(1, 9)), int(rng.integers(1, 9))
    inputs = random_inputs(rng, len(shapes.rows), heads, keys, values, member, gates)
    return inputs, random_state(rng, len(shapes.trees), heads, keys, values)


def deviation(shapes, inputs, state, dtype):
    """Largest error of all outputs and of the state after every node, and whether none leaves the state's bits."""
    expected, snapshots = reference.verify(state, inputs, shapes)
    start = torch.from_numpy(state).to(dtype)
    found, factors = closed.verify(start, tensors(inputs, dtype), shapes)
    worst = error(found, expected)
    for node in range(int(shapes.counts.max())):
        paths = paths_to(shapes, [min(node, len(each) - 1) for each in shapes.trees])
        kept = closed.commit(start, factors, paths)
        worst = max(worst, error(kept, reference.commit(state, snapshots, paths)))
    none = closed.commit(start, factors, paths_to(shapes, [-1] * len(shapes.trees)))
    assert torch.equal(none, start) and none.data_ptr() != start.data_ptr()
    np.testing.assert_array_equal(start.numpy(), state)
    return worst


def sweep(trees):
    """Largest errors over so many random trees, every node of each committed."""
    seen, seed, worst = 0, 0, dict.fromkeys(TOLERANCE, 0.0)
    while seen < trees:
        rng = np.random.default_rng(seed)
        shapes = random_forest(rng)
        inputs, state = windows_of(rng, shapes)
        for dtype in worst:
            worst[dtype] = max(worst[dtype], deviation(shapes, inputs, state, dtype))
        seen, seed = seen + len(shapes.trees), seed + 1
    return worst


def test_every_node_of_many_trees_equals_the_reference():
    for dtype, worst in sweep(TREES).items():
        assert worst <= TOLERANCE[dtype], dtype


@settings(max_examples=30)
@given(st.lists(topologies(16), min_size=1, max_size=3), st.integers(0, 10**6), st.sampled_from(list(TOLERANCE)))
def test_any_tree_equals_the_reference(trees, seed, dtype):
    shapes = forest(trees)
    inputs, state = windows_of(np.random.default_rng(seed), shapes)
    assert deviation(shapes, inputs, state, dtype) <= TOLERANCE[dtype]


@pytest.mark.parametrize("gate", [*GATES, -np.finfo(np.float32).max])
@pytest.mark.parametrize("dtype", TOLERANCE)
def test_one_gate_for_all_from_none_to_a_full_reset(gate, dtype):
    rng = np.random.default_rng(3)
    shapes = forest([tree((-1, 0, 1, 0, 2, 2, 3)), chain(9)])
    inputs, state = windows_of(rng, shapes, gates=[gate])
    inputs.log_decay[:] = np.float32(gate)
    assert deviation(shapes, inputs, state, dtype) <= TOLERANCE[dtype]


def test_a_reset_forgets_whatever_was_before():
    rng = np.random.default_rng(4)
    shapes = forest([chain(3)])
    inputs, state = windows_of(rng, shapes)
    inputs.log_decay[0] = -np.inf
    found, factors = closed.verify(torch.from_numpy(state), tensors(inputs), shapes)
    anew, _ = closed.verify(torch.zeros_like(torch.from_numpy(state)), tensors(inputs), shapes)
    assert torch.equal(found, anew)
    kept = closed.commit(torch.from_numpy(state), factors, [np.arange(3)])
    assert torch.equal(kept, closed.commit(torch.zeros_like(kept), factors, [np.arange(3)]))


@pytest.mark.parametrize("huge", [-1e4, -1e30])
def test_one_huge_gate_costs_those_after_it_no_precision(huge):
    """A difference of sums would: float32 has 1e-3 left beside 1e4, and nothing beside 1e30."""
    rng = np.random.default_rng(5)
    shapes = forest([chain(16)])
    inputs, state = random_inputs(rng, 16, 2, 8, 6, gates=MILD), random_state(rng, 1, 2, 8, 6)
    inputs.log_decay[0] = huge
    inputs.log_decay[1:] = -0.3
    assert deviation(shapes, mapped(inputs, np.float32), state.astype(np.float32), torch.float32) <= 1e-6


def test_equal_keys_at_the_largest_rate_stay_accurate_over_a_long_window():
    """The system whose powers grow without bound: I + L with L = 2 everywhere below the diagonal."""
    rng = np.random.default_rng(6)
    shapes = forest([chain(64)])
    inputs, state = random_inputs(rng, 64, 1, 8, 8), random_state(rng, 1, 1, 8, 8)
    inputs.k[:] = inputs.k[0]
    inputs.beta[:], inputs.log_decay[:] = 2, 0
    assert deviation(shapes, inputs, state, torch.float32) <= 1e-5
    assert deviation(shapes, inputs, state, torch.float64) <= 1e-13


def test_a_window_too_long_to_be_remembered_is_computed_all_the_same():
    rng = np.random.default_rng(7)
    shapes = forest([chain(70), chain(2)])
    inputs, state = windows_of(rng, shapes, gates=MILD)
    expected, snapshots = reference.verify(state, inputs, shapes)
    found, factors = closed.verify(torch.from_numpy(state), tensors(inputs), shapes)
    assert error(found, expected) <= 1e-12
    paths = paths_to(shapes, [69, 0])
    kept = closed.commit(torch.from_numpy(state), factors, paths)
    assert error(kept, reference.commit(state, snapshots, paths)) <= 1e-12


@settings(max_examples=30)
@given(topologies(16), st.integers(0, 10**6), st.data())
def test_a_forward_in_two_parts_is_the_whole_forward(shape, seed, data):
    """Cut below any node: commit to it, then verify the branches that grow from it as trees of their own."""
    rng = np.random.default_rng(seed)
    inputs, state = windows_of(rng, forest([shape]))
    start = torch.from_numpy(state)
    whole, factors = closed.verify(start, tensors(inputs), forest([shape]))
    node = data.draw(st.integers(0, len(shape) - 1))
    kept = closed.commit(start, factors, [shape.path(node)])
    for child in shape.children[node]:
        below = np.flatnonzero(shape.ancestors[:, child])
        place = {int(old): new for new, old in enumerate(below)}
        branch = tree((-1, *(place[shape.parents[old]] for old in below[1:])))
        again, more = closed.verify(kept, tensors(parts(inputs, below)), forest([branch]))
        assert error(again, whole[below].numpy()) <= 1e-12
        last = int(below[-1])
        at_once = closed.commit(start, factors, [shape.path(last)])
        assert error(closed.commit(kept, more, [branch.path(place[last])]), at_once.numpy()) <= 1e-12


@settings(max_examples=30)
@given(st.lists(topologies(), min_size=2, max_size=5), st.integers(0, 10**6), st.data())
def test_a_forest_is_its_rows_alone(trees, seed, data):
    shapes = forest(trees)
    inputs, state = windows_of(np.random.default_rng(seed), shapes)
    start, given_inputs = torch.from_numpy(state), tensors(inputs)
    found, factors = closed.verify(start, given_inputs, shapes)
    ends = [data.draw(st.integers(-1, len(each) - 1)) for each in trees]
    kept = closed.commit(start, factors, paths_to(shapes, ends))
    for row, (shape, end) in enumerate(zip(trees, ends, strict=True)):
        own, one = np.flatnonzero(shapes.rows == row), forest([shape])
        alone, mine = closed.verify(start[row : row + 1], parts(given_inputs, own), one)
        assert error(found[own], alone.numpy()) <= 1e-12
        state_alone = closed.commit(start[row : row + 1], mine, paths_to(one, [end]))
        assert error(kept[row : row + 1], state_alone.numpy()) <= 1e-12
        if end < 0:
            assert torch.equal(kept[row], start[row])


def test_a_broken_row_breaks_no_other():
    """Not a number in one row stays there, though both rows are computed together and one path is shorter."""
    shapes = forest([chain(3), tree((-1, 0, 0))])
    inputs, state = windows_of(np.random.default_rng(8), shapes)
    start = torch.from_numpy(state)
    sound, factors = closed.verify(start, tensors(inputs), shapes)
    kept = closed.commit(start, factors, paths_to(shapes, [2, 0]))
    for name in ("q", "k", "v", "beta"):
        broken = mapped(inputs, np.copy)
        getattr(broken, name)[3:] = np.nan
        found, bad = closed.verify(start, tensors(broken), shapes)
        assert torch.equal(found[:3], sound[:3]) and found[3:].isnan().all()
        assert torch.equal(closed.commit(start, bad, paths_to(shapes, [2, 0]))[0], kept[0])


def test_a_refused_node_is_not_read():
    """Factors of what was drafted after the accepted node may hold anything, in a row with the shortest path too."""
    shapes = forest([chain(3), chain(3)])
    inputs, state = windows_of(np.random.default_rng(9), shapes)
    start = torch.from_numpy(state)
    _, factors = closed.verify(start, tensors(inputs), shapes)
    paths = paths_to(shapes, [2, 0])
    kept = closed.commit(start, factors, paths)
    factors.keys[4:], factors.values[4:], factors.log_decay[4:] = torch.nan, torch.inf, torch.nan
    assert torch.equal(closed.commit(start, factors, paths), kept)


def test_a_commit_goes_to_a_node_not_by_a_count():
    """Two siblings are as deep, and leave different states."""
    shapes = forest([tree((-1, 0, 0))])
    inputs, state = random_inputs(np.random.default_rng(10), 3, 1, 4, 4), np.zeros((1, 1, 4, 4))
    inputs.beta[:], inputs.log_decay[:] = 1, 0
    _, factors = closed.verify(torch.from_numpy(state), tensors(inputs), shapes)
    one, other = (closed.commit(torch.from_numpy(state), factors, [shapes.trees[0].path(node)]) for node in (1, 2))
    assert (one - other).abs().max() > 0.1


@settings(max_examples=20)
@given(
    st.lists(topologies(), min_size=1, max_size=3), st.integers(0, 10**6), st.sampled_from(list(TOLERANCE)), st.data()
)
def test_the_delayed_commit_is_commit_then_verify_bit_for_bit(trees, seed, dtype, data):
    form: GatedDelta = closed
    rng = np.random.default_rng(seed)
    shapes = forest(trees)
    inputs, state = windows_of(rng, shapes)
    heads, keys, values = state.shape[1:]
    start = torch.from_numpy(state).to(dtype)
    _, factors = form.verify(start, tensors(inputs, dtype), shapes)
    paths = paths_to(shapes, [data.draw(st.integers(-1, len(each) - 1)) for each in trees])
    then = forest([data.draw(topologies()) for _ in trees])
    more = tensors(random_inputs(rng, len(then.rows), heads, keys, values), dtype)
    kept, outputs, pending = form.commit_then_verify(start, factors, paths, more, then)
    expected = form.commit(start, factors, paths)
    again, factors = form.verify(expected, more, then)
    assert torch.equal(kept, expected) and torch.equal(outputs, again)
    assert torch.equal(pending.values, factors.values) and pending.forest is then


def test_what_is_kept_of_a_window_is_compact():
    shapes = forest([chain(5), chain(3)])
    inputs, state = random_inputs(np.random.default_rng(11), 8, 2, 16, 32), np.zeros((2, 2, 16, 32))
    _, factors = closed.verify(torch.from_numpy(state), tensors(inputs), shapes)
    kept = sum(each.numel() for each in (factors.keys, factors.values, factors.log_decay))
    assert kept == 8 * 2 * (16 + 32 + 1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_summed_in_float32(dtype):
    rng = np.random.default_rng(12)
    shapes = forest([tree((-1, 0, 0, 1)), chain(6)])
    inputs, state = windows_of(rng, shapes)
    full = tensors(inputs, torch.float32)
    short = DeltaInputs(full.q.to(dtype), full.k.to(dtype), full.v.to(dtype), full.log_decay, full.beta)
    start = torch.from_numpy(state).float()
    found, factors = closed.verify(start, short, shapes)
    rounded = DeltaInputs(short.q.float(), short.k.float(), short.v.float(), full.log_decay, full.beta)
    expected, pending = closed.verify(start, rounded, shapes)
    assert found.dtype == dtype and torch.equal(found, expected.to(dtype))
    assert factors.keys.dtype == dtype and factors.values.dtype == torch.float32
    paths = paths_to(shapes, [3, 5])
    assert torch.equal(closed.commit(start, factors, paths), closed.commit(start, pending, paths))


def test_gradients_flow_through_verify_and_commit():
    """A model that is trained through this form needs them."""
    shapes = forest([tree((-1, 0, 0, 1)), chain(2), chain(1)])
    inputs = random_inputs(np.random.default_rng(13), 7, 1, 3, 2, gates=[-0.3, -1.0])
    state = random_state(np.random.default_rng(13), 3, 1, 3, 2)

    def both(state, *arrays):
        outputs, factors = closed.verify(state, DeltaInputs(*arrays), shapes)
        return outputs, closed.commit(state, factors, paths_to(shapes, [3, -1, 0]))

    given_arrays = tensors(inputs)
    arrays = [given_arrays.q, given_arrays.k, given_arrays.v, given_arrays.log_decay, given_arrays.beta]
    leaves = [each.requires_grad_() for each in (torch.from_numpy(state), *arrays)]
    assert torch.autograd.gradcheck(both, leaves)
