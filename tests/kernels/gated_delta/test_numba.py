"""The compiled form against the sequential reference; its bits against themselves in every other arrangement."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.gated_delta import DeltaInputs, GatedDelta, numba, reference
from specdec_core.kernels.gated_delta.checks import check_paths
from specdec_core.kernels.gated_delta.numba_step import STEPS, TILE_BYTES
from specdec_core.kernels.gated_delta.paths import path_nodes, upwards
from specdec_core.kernels.gated_delta.traffic import Traffic
from specdec_core.topology import chain, forest, tree
from tests.kernels.gated_delta.windows import (
    GATES,
    MILD,
    error,
    joined,
    mapped,
    parts,
    paths_to,
    random_forest,
    random_inputs,
    random_state,
    random_tree,
    tensors,
)
from tests.strategies import topologies

pytestmark = pytest.mark.usefixtures("one_thread")

TREES = 120
TOLERANCE = 1e-5
KEYS = (1, 3, 16, 17, 33, 64)
VALUES = (1, 5, 16, 32, 48, 64, 80, 144)


def made(rng, shapes, keys=None, values=None, gates=GATES):
    """Inputs and state, float32 numbers in float64, of random sizes for these rows."""
    heads, keys, values = int(rng.integers(1, 4)), keys or int(rng.choice(KEYS)), values or int(rng.choice(VALUES))
    inputs = random_inputs(rng, len(shapes.rows), heads, keys, values, gates=gates)
    return inputs, random_state(rng, len(shapes.trees), heads, keys, values)


def single(inputs, state):
    return tensors(inputs, torch.float32), torch.from_numpy(state).float()


def deviation(shapes, inputs, state):
    """Largest error of all outputs and of the state after every node, in new memory and in place."""
    expected, snapshots = reference.verify(state, inputs, shapes)
    given_inputs, start = single(inputs, state)
    found, factors = numba.verify(start, given_inputs, shapes, threads=1)
    worst = error(found, expected)
    for node in range(-1, int(shapes.counts.max())):
        paths = paths_to(shapes, [min(node, len(each) - 1) for each in shapes.trees])
        kept = numba.commit(start, factors, paths, threads=1)
        worst = max(worst, error(kept, reference.commit(state, snapshots, paths)))
        assert kept.data_ptr() != start.data_ptr() and kept.is_contiguous()
        if node < 0:
            assert torch.equal(kept, start)
        place = start.clone()
        assert numba.commit(place, factors, paths, into=place, threads=1) is place and torch.equal(place, kept)
    np.testing.assert_array_equal(start.numpy(), state)
    return worst


def test_every_node_of_many_trees_equals_the_reference():
    seen, seed = 0, 0
    while seen < TREES:
        rng = np.random.default_rng(seed)
        shapes = random_forest(rng)
        assert deviation(shapes, *made(rng, shapes)) <= TOLERANCE, seed
        seen, seed = seen + len(shapes.trees), seed + 1


@settings(max_examples=25)
@given(
    st.lists(topologies(20), min_size=1, max_size=3), st.integers(0, 10**6), st.sampled_from(KEYS),
    st.sampled_from(VALUES),
)  # fmt: skip
def test_any_tree_equals_the_reference(trees, seed, keys, values):
    shapes = forest(trees)
    assert deviation(shapes, *made(np.random.default_rng(seed), shapes, keys, values)) <= TOLERANCE


@pytest.mark.parametrize("nodes", [8, 9, 16, 17, 33])
def test_a_head_of_a_model_equals_the_reference(nodes):
    rng = np.random.default_rng(nodes)
    shapes = forest([chain(nodes), random_tree(rng, nodes)])
    assert deviation(shapes, *made(rng, shapes, 128, 128)) <= TOLERANCE


@pytest.mark.parametrize("values", [1, 5, 17, 40])
def test_value_channels_that_fill_no_vector(values):
    rng = np.random.default_rng(values)
    shapes = forest([tree((-1, 0, 0, 1)), chain(3), chain(1)])
    inputs, state = made(rng, shapes, 5, values)
    assert deviation(shapes, inputs, state) <= TOLERANCE
    given_inputs, start = single(inputs, state)
    found, factors = numba.verify(start, given_inputs, shapes)
    assert found.shape == (8, start.shape[1], values) and found.is_contiguous()
    assert factors.values.shape == (8, start.shape[1], 1, values)
    kept, again, _ = numba.commit_then_verify(
        start, factors, paths_to(shapes, [3, -1, 0]), given_inputs, shapes, into=start
    )
    assert kept is start and torch.equal(again, numba.verify(start, given_inputs, shapes)[0])


@pytest.mark.parametrize("gate", [*GATES, -np.finfo(np.float32).max])
def test_one_gate_for_all_from_none_to_a_full_reset(gate):
    rng = np.random.default_rng(3)
    shapes = forest([tree((-1, 0, 1, 0, 2, 2, 3)), chain(9)])
    inputs, state = made(rng, shapes)
    inputs.log_decay[:] = np.float32(gate)
    assert deviation(shapes, inputs, state) <= TOLERANCE


def test_a_reset_forgets_whatever_was_before():
    rng = np.random.default_rng(4)
    shapes = forest([chain(3)])
    inputs, state = made(rng, shapes, 16, 32)
    inputs.log_decay[0] = -np.inf
    given_inputs, start = single(inputs, state)
    found, factors = numba.verify(start, given_inputs, shapes)
    anew, _ = numba.verify(torch.zeros_like(start), given_inputs, shapes)
    assert torch.equal(found, anew)
    kept = numba.commit(start, factors, [np.arange(3)])
    assert torch.equal(kept, numba.commit(torch.zeros_like(start), factors, [np.arange(3)]))


@pytest.mark.parametrize("huge", [-1e4, -1e30])
def test_one_huge_gate_costs_those_after_it_no_precision(huge):
    rng = np.random.default_rng(5)
    shapes = forest([chain(16)])
    inputs, state = made(rng, shapes, 16, 16, MILD)
    inputs.log_decay[0], inputs.log_decay[1:] = huge, -0.3
    assert deviation(shapes, mapped(inputs, np.float32), state.astype(np.float32)) <= 1e-6


def test_equal_keys_at_the_largest_rate_stay_accurate_over_a_long_window():
    """The system whose powers grow without bound: I + L with L = 2 everywhere below the diagonal."""
    shapes = forest([chain(64)])
    inputs, state = made(np.random.default_rng(6), shapes, 8, 16)
    inputs.k[:] = inputs.k[0]
    inputs.beta[:], inputs.log_decay[:] = 2, 0
    assert deviation(shapes, inputs, state) <= TOLERANCE


def test_a_window_too_long_to_be_remembered_is_computed_all_the_same():
    shapes = forest([chain(70), chain(2)])
    assert deviation(shapes, *made(np.random.default_rng(7), shapes, gates=MILD)) <= TOLERANCE


def test_what_is_left_in_scratch_by_another_window_changes_nothing():
    rng = np.random.default_rng(8)
    small = forest([tree((-1, 0, 0))])
    given_inputs, start = single(*made(rng, small, 17, 16))
    first, factors = numba.verify(start, given_inputs, small, threads=1)
    kept = numba.commit(start, factors, [np.array([0, 2])], threads=1)
    large = forest([chain(40)])
    broken, other = single(*made(rng, large, 33, 64))
    broken.v[:], broken.k[:], broken.q[:] = torch.nan, torch.nan, torch.nan
    _, lost = numba.verify(other, broken, large, threads=1)
    numba.commit(other, lost, [np.arange(40)], threads=1)
    assert torch.equal(numba.verify(start, given_inputs, small, threads=1)[0], first)
    assert torch.equal(numba.commit(start, factors, [np.array([0, 2])], threads=1), kept)


@settings(max_examples=25)
@given(topologies(24), st.integers(0, 10**6), st.sampled_from(KEYS), st.sampled_from(VALUES))
def test_a_node_has_the_bits_of_its_own_path_as_a_chain(shape, seed, keys, values):
    """Not one bit depends on siblings, on what comes after or on the width."""
    shapes = forest([shape])
    given_inputs, start = single(*made(np.random.default_rng(seed), shapes, keys, values))
    found, factors = numba.verify(start, given_inputs, shapes, threads=1)
    for node in {0, len(shape) // 2, len(shape) - 1}:
        path = shape.path(node)
        alone, mine = numba.verify(start, parts(given_inputs, path), forest([chain(len(path))]), threads=1)
        assert torch.equal(found[path], alone) and torch.equal(factors.values[path], mine.values)
        kept = numba.commit(start, factors, [path], threads=1)
        assert torch.equal(kept, numba.commit(start, mine, [np.arange(len(path))], threads=1))


@pytest.mark.parametrize(("keys", "values"), [(33, 16), (33, 64), (33, 144), (2 * STEPS + 9, 48)])
def test_no_width_changes_a_bit(keys, values):
    shapes = forest([chain(36)])
    given_inputs, start = single(*made(np.random.default_rng(9), shapes, keys, values))
    whole, factors = numba.verify(start, given_inputs, shapes, threads=1)
    for n in range(1, 36):
        found, mine = numba.verify(start, parts(given_inputs, np.arange(n)), forest([chain(n)]), threads=1)
        assert torch.equal(found, whole[:n]) and torch.equal(mine.values, factors.values[:n])


@settings(max_examples=15)
@given(st.lists(topologies(), min_size=2, max_size=5), st.integers(0, 10**6), st.data())
def test_a_forest_is_its_rows_alone_bit_for_bit(trees, seed, data):
    shapes = forest(trees)
    given_inputs, start = single(*made(np.random.default_rng(seed), shapes))
    found, factors = numba.verify(start, given_inputs, shapes, threads=1)
    ends = [data.draw(st.integers(-1, len(each) - 1)) for each in trees]
    kept = numba.commit(start, factors, paths_to(shapes, ends), threads=1)
    for row, (shape, end) in enumerate(zip(trees, ends, strict=True)):
        own, one = np.flatnonzero(shapes.rows == row), forest([shape])
        alone, mine = numba.verify(start[row : row + 1], parts(given_inputs, own), one, threads=1)
        assert torch.equal(found[own], alone)
        assert torch.equal(
            kept[row : row + 1], numba.commit(start[row : row + 1], mine, paths_to(one, [end]), threads=1)
        )


@pytest.mark.parametrize("size", [(1, 1, 256, 272), (1, 1, 16, 80), (3, 2, 17, 48), (9, 3, 16, 16)])
def test_no_number_of_threads_changes_a_bit(size):
    """Among these sizes: more tiles than one a head by size, and by the number of workers."""
    rng = np.random.default_rng(10)
    rows, heads, keys, values = size
    shapes = forest([random_tree(rng, 12) for _ in range(rows)])
    inputs, state = random_inputs(rng, len(shapes.rows), heads, keys, values), random_state(rng, *size)
    given_inputs, start = single(inputs, state)
    paths = paths_to(shapes, [len(each) - 1 for each in shapes.trees])
    one = rounds_of(start, given_inputs, shapes, paths, 1)
    for threads in (2, 3, 5):
        for a, b in zip(one, rounds_of(start, given_inputs, shapes, paths, threads), strict=True):
            assert torch.equal(a, b)
    assert error(one[0], reference.verify(state, inputs, shapes)[0]) <= TOLERANCE
    assert 4 * 16 * 80 < TILE_BYTES < 4 * 256 * 272


def rounds_of(start, inputs, shapes, paths, threads):
    found, factors = numba.verify(start, inputs, shapes, threads=threads)
    kept, again, more = numba.commit_then_verify(start, factors, paths, inputs, shapes, threads=threads)
    return found, factors.values, kept, again, more.values, numba.commit(start, factors, paths, threads=threads)


@settings(max_examples=25)
@given(st.lists(topologies(), min_size=1, max_size=3), st.integers(0, 10**6), st.data())
def test_the_delayed_commit_is_commit_then_verify_bit_for_bit(trees, seed, data):
    form: GatedDelta = numba
    rng = np.random.default_rng(seed)
    shapes = forest(trees)
    inputs, state = made(rng, shapes)
    given_inputs, start = single(inputs, state)
    _, factors = form.verify(start, given_inputs, shapes)
    paths = paths_to(shapes, [data.draw(st.integers(-1, len(each) - 1)) for each in trees])
    then = forest([data.draw(topologies()) for _ in trees])
    more = tensors(random_inputs(rng, len(then.rows), *state.shape[1:]), torch.float32)
    expected = form.commit(start, factors, paths)
    again, last = form.verify(expected, more, then)
    before = start.clone()
    kept, outputs, pending = form.commit_then_verify(start, factors, paths, more, then)
    assert torch.equal(kept, expected) and torch.equal(outputs, again) and torch.equal(start, before)
    assert torch.equal(pending.values, last.values) and pending.forest is then
    kept, outputs, pending = numba.commit_then_verify(start, factors, paths, more, then, into=start)
    assert kept is start and torch.equal(kept, expected) and torch.equal(outputs, again)
    assert torch.equal(pending.values, last.values)
    assert torch.equal(numba.commit(before, factors, paths, into=torch.empty_like(before)), expected)


@pytest.mark.parametrize("seed", range(6))
def test_rounds_in_place_leave_what_one_run_over_the_committed_nodes_leaves(seed):
    """Chains, trees and no drafts by turns, each commit delayed into the next verify; a row may accept nothing."""
    rng = np.random.default_rng(seed)
    rows, size = 3, (2, 17, 32)
    state = random_state(rng, rows, *size)
    start = torch.from_numpy(state).float()
    waiting, committed = None, [[] for _ in range(rows)]
    for _ in range(5):
        shapes = forest([random_tree(rng, 9) for _ in range(rows)])
        inputs = random_inputs(rng, len(shapes.rows), *size)
        given_inputs = tensors(inputs, torch.float32)
        if waiting is None:
            outputs, pending = numba.verify(start, given_inputs, shapes)
        else:
            _, outputs, pending = numba.commit_then_verify(start, *waiting, given_inputs, shapes, into=start)
        paths = paths_to(shapes, [int(rng.integers(-1, len(each))) for each in shapes.trees])
        waiting = (pending, paths)
        for row, path in enumerate(paths):
            own = shapes.offsets[row] + path
            committed[row].append((parts(inputs, own), outputs[own]))
    numba.commit(start, *waiting, into=start)
    for row in range(rows):
        windows = [each for each, _ in committed[row] if len(each.beta)]
        if not windows:
            assert torch.equal(start[row], torch.from_numpy(state[row]).float())
            continue
        everything = joined(windows)
        shapes = forest([chain(len(everything.beta))])
        expected, snapshots = reference.verify(state[row : row + 1], everything, shapes)
        assert error(torch.cat([found for _, found in committed[row]]), expected) <= TOLERANCE
        kept = reference.commit(state[row : row + 1], snapshots, [np.arange(len(expected))])
        assert error(start[row : row + 1], kept) <= TOLERANCE


def test_a_broken_row_breaks_no_other_and_a_broken_node_only_what_follows_it():
    shapes = forest([tree((-1, 0, 0, 1, 2)), chain(2)])
    inputs, state = made(np.random.default_rng(11), shapes, 16, 16, MILD)
    given_inputs, start = single(inputs, state)
    sound, factors = numba.verify(start, given_inputs, shapes)
    paths = paths_to(shapes, [4, 1])
    kept = numba.commit(start, factors, paths)
    for name in ("q", "k", "v", "beta"):
        broken = mapped(given_inputs, torch.clone)
        getattr(broken, name)[1] = torch.nan
        found, bad = numba.verify(start, broken, shapes)
        assert torch.equal(found[[0, 2, 4, 5, 6]], sound[[0, 2, 4, 5, 6]])
        assert found[1].isnan().all() and (name == "q" or found[3].isnan().all())
        assert torch.equal(numba.commit(start, bad, paths), kept)


def test_a_refused_node_is_not_read():
    shapes = forest([chain(3), chain(3)])
    given_inputs, start = single(*made(np.random.default_rng(12), shapes, 16, 16))
    _, factors = numba.verify(start, given_inputs, shapes)
    paths = paths_to(shapes, [2, 0])
    kept = numba.commit(start, factors, paths)
    factors.keys[4:], factors.values[4:], factors.log_decay[4:] = torch.nan, torch.inf, torch.nan
    assert torch.equal(numba.commit(start, factors, paths), kept)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_summed_in_float32(dtype):
    shapes = forest([tree((-1, 0, 0, 1)), chain(6)])
    full, start = single(*made(np.random.default_rng(13), shapes))
    short = DeltaInputs(full.q.to(dtype), full.k.to(dtype), full.v.to(dtype), full.log_decay, full.beta)
    found, factors = numba.verify(start, short, shapes)
    rounded = DeltaInputs(short.q.float(), short.k.float(), short.v.float(), full.log_decay, full.beta)
    expected, pending = numba.verify(start, rounded, shapes)
    assert found.dtype == dtype and torch.equal(found, expected.to(dtype))
    assert factors.keys.dtype == dtype and factors.values.dtype == torch.float32
    paths = paths_to(shapes, [3, 5])
    assert torch.equal(numba.commit(start, factors, paths), numba.commit(start, pending, paths))


def test_inputs_may_be_parts_of_one_projection():
    shapes = forest([chain(3)])
    full, start = single(*made(np.random.default_rng(14), shapes, 16, 16))
    together = torch.cat([full.q, full.k, full.v], dim=2)
    sliced = DeltaInputs(together[..., :16], together[..., 16:32], together[..., 32:], full.log_decay, full.beta)
    assert torch.equal(numba.verify(start, sliced, shapes)[0], numba.verify(start, full, shapes)[0])


def test_traffic_is_one_read_and_one_write_a_round():
    shapes = forest([chain(4), tree((-1, 0, 0)), chain(1)])
    given_inputs, start = single(*made(np.random.default_rng(15), shapes, 32, 48))
    heads, whole = start.shape[1], 4 * start.numel()
    for threads in (1, 3):
        traffic = Traffic()
        _, factors = numba.verify(start, given_inputs, shapes, threads=threads, traffic=traffic)
        assert traffic == Traffic(read=whole, written=0, kept=4 * 8 * heads * (32 + 48 + 1))
        paths = paths_to(shapes, [2, -1, 0])
        traffic = Traffic()
        numba.commit(start, factors, paths, threads=threads, traffic=traffic)
        assert traffic == Traffic(read=whole, written=whole)
        traffic, place = Traffic(), start.clone()
        numba.commit(place, factors, paths, into=place, threads=threads, traffic=traffic)
        assert traffic == Traffic(read=whole // 3 * 2, written=whole // 3 * 2)
        traffic, place = Traffic(), start.clone()
        numba.commit_then_verify(
            place, factors, paths, given_inputs, shapes, into=place, threads=threads, traffic=traffic
        )
        assert traffic == Traffic(read=whole, written=whole // 3 * 2, kept=4 * 8 * heads * (32 + 48 + 1))


SHAPES = forest([chain(1), tree((-1, 0, 0))])


def ready():
    return single(*made(np.random.default_rng(16), SHAPES, 16, 16))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda s: s.double(), "state is torch.float64 on cpu: the compiled forms expect float32 on the CPU"),
        (lambda s: s.to("meta"), "state is torch.float32 on meta"),
        (lambda s: s.numpy(), "state is a ndarray: expected a torch tensor"),
        (lambda s: s.mT, "not contiguous"),
        (lambda s: torch.cat([s, s]), "state of 4 rows for a forest of 2 trees"),
    ],
)
def test_a_state_that_compiled_code_does_not_take(change, message):
    inputs, start = ready()
    _, factors = numba.verify(start, inputs, SHAPES)
    other, paths = change(start.transpose(2, 3).contiguous()), paths_to(SHAPES, [0, 0])
    with pytest.raises(ValueError, match=message):
        numba.verify(other, inputs, SHAPES)
    with pytest.raises(ValueError, match=message):
        numba.commit(other, factors, paths)
    with pytest.raises(ValueError, match=message):
        numba.commit_then_verify(other, factors, paths, inputs, SHAPES)


def test_inputs_that_compiled_code_does_not_take():
    inputs, start = ready()
    wide = type(inputs)(**vars(inputs) | {"log_decay": inputs.log_decay[..., None].expand(-1, -1, inputs.k.shape[2])})
    with pytest.raises(ValueError, match=r"a gate a key channel: the compiled forms expect one a head, \[N, H\]"):
        numba.verify(start, wide, SHAPES)
    with pytest.raises(ValueError, match="require gradients, which compiled forms do not give: use the torch form"):
        numba.verify(start, mapped(inputs, lambda each: each.clone().requires_grad_()), SHAPES)
    with torch.no_grad():
        learned = mapped(inputs, lambda each: each.clone().requires_grad_())
        assert torch.equal(numba.verify(start, learned, SHAPES)[0], numba.verify(start, inputs, SHAPES)[0])
    inputs.log_decay[2, 0] = 1.0
    with pytest.raises(ValueError, match=r"log_decay at \(2, 0\) is 1.0"):
        numba.verify(start, inputs, SHAPES)


@pytest.mark.parametrize(
    ("into", "message"),
    [
        (lambda s: torch.empty(1, *s.shape[1:]), "into is torch.float32 of shape"),
        (lambda s: torch.empty_like(s).double(), "into is torch.float64 of shape"),
        (lambda s: torch.empty_like(s).mT, "contiguous"),
        (lambda s: torch.empty_like(s, device="meta"), "on meta: expected memory like the state's"),
    ],
)
def test_memory_that_a_state_cannot_be_committed_to(into, message):
    inputs, start = ready()
    _, factors = numba.verify(start, inputs, SHAPES)
    with pytest.raises(ValueError, match=message):
        numba.commit(start, factors, paths_to(SHAPES, [0, 0]), into=into(start))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"keys": torch.zeros(4, 2, 1, 3)}, r"pending keys has shape \(4, 2, 1, 3\)"),
        ({"keys": torch.zeros(3, 2, 1, 16)}, r"pending keys has shape \(3, 2, 1, 16\)"),
        ({"values": torch.zeros(4, 2, 1, 3)}, r"pending values has shape \(4, 2, 1, 3\)"),
        ({"keys": torch.zeros(4, 2, 2, 16)}, r"pending keys has shape \(4, 2, 2, 16\)"),
        ({"log_decay": torch.zeros(4, 2, 16)}, r"pending log_decay has shape \(4, 2, 16\)"),
        ({"values": torch.zeros(4, 2, 1, 16).double()}, "pending values are torch.float64, the state torch.float32"),
    ],
)
def test_factors_of_another_kind(change, message):
    rng = np.random.default_rng(17)
    given_inputs = tensors(random_inputs(rng, 4, 2, 16, 16), torch.float32)
    start = torch.from_numpy(random_state(rng, 2, 2, 16, 16)).float()
    _, factors = numba.verify(start, given_inputs, SHAPES)
    with pytest.raises(ValueError, match=message):
        numba.commit(start, type(factors)(**vars(factors) | change), paths_to(SHAPES, [0, 0]))


@pytest.mark.parametrize(
    "paths",
    [
        [[0], [1]], [[0]], [[0], [0], [0]], [[0], [0, 3]], [[0], [0, 1, 2]], [[0, 1], [0]], [[-1], [0]],
        [[0], [0, 0, 1]], [[0], [0, 1.0]], [[0], [[0, 1]]], [[0], [2, 0]], [[0], [1, 2]],
    ],
)  # fmt: skip
def test_a_path_that_does_not_lead_from_the_root_to_a_node(paths):
    inputs, start = ready()
    _, factors = numba.verify(start, inputs, SHAPES)
    given_paths = [np.array(path) for path in paths]
    with pytest.raises(ValueError) as expected:
        check_paths(SHAPES, given_paths)
    with pytest.raises(ValueError) as found:
        numba.commit(start, factors, given_paths)
    assert str(found.value) == str(expected.value)


def test_memory_that_overlaps_the_state_is_refused():
    inputs, start = ready()
    _, factors = numba.verify(start, inputs, SHAPES)
    paths, size = paths_to(SHAPES, [0, 0]), start.numel()
    room = torch.zeros(2 * size + 16)
    state = room[:size].view_as(start).copy_(start)
    expected = numba.commit(start, factors, paths)
    with pytest.raises(ValueError, match="into begins 64 bytes from the state and overlaps it: expected the state its"):
        numba.commit(state, factors, paths, into=room[16 : size + 16].view_as(start))
    # Memory beside it in the same allocation is fine.
    assert torch.equal(numba.commit(state, factors, paths, into=room[size : 2 * size].view_as(start)), expected)


def test_a_state_that_requires_gradients_is_not_committed():
    inputs, start = ready()
    _, factors = numba.verify(start, inputs, SHAPES)
    with pytest.raises(ValueError, match="require gradients"):
        numba.commit(start.clone().requires_grad_(), factors, paths_to(SHAPES, [0, 0]))


@pytest.mark.parametrize("dtype", [np.int64, np.int32, np.uint8])
@pytest.mark.parametrize("seed", range(10))
def test_paths_as_flat_nodes(seed, dtype):
    rng = np.random.default_rng(seed)
    shapes = random_forest(rng)
    paths = paths_to(shapes, [int(rng.integers(-1, len(each))) for each in shapes.trees])
    nodes, starts = path_nodes(shapes, [path.astype(dtype) if len(path) else np.array([]) for path in paths])
    again, more = path_nodes(shapes, paths)
    assert nodes.dtype == np.int64 and nodes.tolist() == again.tolist() and starts.tolist() == more.tolist()
    for row, path in enumerate(paths):
        own = slice(starts[row], starts[row + 1])
        assert nodes[own].tolist() == (shapes.offsets[row] + path).tolist()
        assert nodes[upwards(starts)][own].tolist() == nodes[own].tolist()[::-1]
