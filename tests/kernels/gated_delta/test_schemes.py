"""Every competing scheme against the reference, and what it says it moves against what its idea must."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.gated_delta import DeltaInputs, reference
from specdec_core.kernels.gated_delta.schemes import SCHEMES
from specdec_core.kernels.gated_delta.schemes_plan import alike, schedule
from specdec_core.kernels.gated_delta.schemes_step import COLUMNS
from specdec_core.kernels.gated_delta.traffic import Traffic
from specdec_core.topology import chain, forest, tree
from tests.kernels.gated_delta.windows import (
    GATES,
    error,
    mapped,
    paths_to,
    random_forest,
    random_inputs,
    random_state,
    tensors,
)
from tests.strategies import topologies

pytestmark = pytest.mark.usefixtures("one_thread")

TREES = 25
TOLERANCE = 1e-5
COMPILED = [name for name in SCHEMES if name != "eager sequential"]
KEYS = (1, 2, 17, 32)
VALUES = (5, 16, 32, 48, 80)


@pytest.fixture(params=SCHEMES)
def scheme(request):
    return SCHEMES[request.param]()


def made(rng, shapes, keys=None, values=None, gates=GATES):
    heads, keys, values = int(rng.integers(1, 4)), keys or int(rng.choice(KEYS)), values or int(rng.choice(VALUES))
    inputs = random_inputs(rng, len(shapes.rows), heads, keys, values, gates=gates)
    return inputs, random_state(rng, len(shapes.trees), heads, keys, values)


def deviation(scheme, shapes, inputs, state, nodes):
    """Largest error of all outputs and of the state after these nodes (at most the row's last), also in place."""
    expected, snapshots = reference.verify(state, inputs, shapes)
    start = torch.from_numpy(state).float()
    found, pending = scheme.verify(start, tensors(inputs, torch.float32), shapes, threads=1)
    worst = error(found, expected)
    for node in nodes:
        paths = paths_to(shapes, [min(node, len(each) - 1) for each in shapes.trees])
        kept = scheme.commit(start, pending, paths, threads=1)
        worst = max(worst, error(kept, reference.commit(state, snapshots, paths)))
        assert kept.data_ptr() != start.data_ptr()
        place = start.clone()
        assert scheme.commit(place, pending, paths, into=place, threads=1) is place and torch.equal(place, kept)
    np.testing.assert_array_equal(start.numpy(), state)
    return worst


def test_every_node_of_many_trees_equals_the_reference(scheme):
    seen, seed = 0, 0
    while seen < TREES:
        rng = np.random.default_rng(seed)
        shapes = random_forest(rng, most=10)
        nodes = range(-1, int(shapes.counts.max()))
        assert deviation(scheme, shapes, *made(rng, shapes), nodes) <= TOLERANCE, seed
        seen, seed = seen + len(shapes.trees), seed + 1


@settings(max_examples=15)
@given(st.sampled_from(list(SCHEMES)), topologies(16), st.integers(0, 10**6), st.data())
def test_any_tree_equals_the_reference(name, shape, seed, data):
    shapes, node = forest([shape]), data.draw(st.integers(-1, len(shape) - 1))
    assert deviation(SCHEMES[name](), shapes, *made(np.random.default_rng(seed), shapes), [node]) <= TOLERANCE


@pytest.mark.parametrize("gate", [0.0, -90.0, -np.finfo(np.float32).max, -np.inf])
def test_one_gate_for_all_from_none_to_a_full_reset(scheme, gate):
    shapes = forest([tree((-1, 0, 1, 0, 2, 2, 3)), chain(9)])
    inputs, state = made(np.random.default_rng(3), shapes)
    inputs.log_decay[:] = np.float32(gate)
    assert deviation(scheme, shapes, inputs, state, [0, 6]) <= TOLERANCE


@pytest.mark.parametrize("values", [5, 48])
@pytest.mark.parametrize("seed", range(3))
def test_rows_accept_as_much_as_they_like(scheme, seed, values):
    """Some nothing, some to a leaf, some half way; a row that accepts nothing keeps its bits."""
    rng = np.random.default_rng(seed)
    shapes = forest([tree((-1, 0, 0, 1, 2)), chain(4), chain(4), chain(1), tree((-1, 0, 0, 1, 2))])
    inputs, state = made(rng, shapes, values=values)
    start = torch.from_numpy(state).float()
    _, snapshots = reference.verify(state, inputs, shapes)
    _, pending = scheme.verify(start, tensors(inputs, torch.float32), shapes, threads=1)
    ends = [int(rng.integers(len(each))) for each in shapes.trees]
    ends[seed], ends[seed + 1] = -1, len(shapes.trees[seed + 1]) - 1
    paths = paths_to(shapes, ends)
    kept = scheme.commit(start, pending, paths, threads=1)
    assert error(kept, reference.commit(state, snapshots, paths)) <= TOLERANCE
    assert torch.equal(kept[seed], start[seed])
    scheme.commit(start, pending, paths, into=start, threads=1)
    assert torch.equal(start, kept)


@pytest.mark.parametrize("name", COMPILED)
def test_no_number_of_threads_changes_a_bit(name):
    rng = np.random.default_rng(4)
    shapes = forest([chain(5), tree((-1, 0, 0, 1, 2)), chain(1)])
    inputs, state = made(rng, shapes, 17, 80)
    given_inputs, start = tensors(inputs, torch.float32), torch.from_numpy(state).float()
    paths, found = paths_to(shapes, [4, 3, 0]), []
    for threads in (1, 2, 3):
        scheme = SCHEMES[name]()
        outputs, pending = scheme.verify(start, given_inputs, shapes, threads=threads)
        found.append((outputs, scheme.commit(start, pending, paths, threads=threads)))
    for outputs, kept in found[1:]:
        assert torch.equal(outputs, found[0][0]) and torch.equal(kept, found[0][1])


@given(topologies(16))
def test_a_schedule_keeps_every_parent_until_its_last_child(shape):
    sources, goals, count = schedule(shape)
    holds = {}
    for node, parent in enumerate(shape.parents):
        assert sources[node] == -1 if parent < 0 else holds[sources[node]] == parent
        holds[int(goals[node])] = node
    assert count == len(holds) <= max(1, sum(not each for each in shape.children))


@pytest.mark.parametrize(
    ("shape", "count"), [(chain(9), 1), (tree((-1, 0, 0, 0, 0)), 2), (tree((-1, 0, 0, 1, 1, 2, 2)), 3)]
)
def test_a_schedule_is_as_small_as_the_shape_allows(shape, count):
    """A chain works in place, a star keeps its root beside one child, a binary tree level by level its open parents."""
    assert schedule(shape)[2] == count


def test_rows_alike_are_found_in_order():
    assert [rows.tolist() for rows in alike([3, 1, 3, 2, 1])] == [[0, 2], [1, 4], [3]]


def counted(scheme, state, inputs, shapes, ends, into=None, threads=1):
    """Traffic of a verify and of a commit."""
    verify, commit = Traffic(), Traffic()
    _, pending = scheme.verify(state, inputs, shapes, threads=threads, traffic=verify)
    scheme.commit(state, pending, paths_to(shapes, ends), into=into, threads=threads, traffic=commit)
    return verify, commit


H, K, V = 2, 32, 48
ROW = 4 * H * K * V
"""Bytes of one row's state."""
KEPT = {"inputs": 4 * H * (K + V + 2), "factors": 4 * H * (K + V + 1)}
"""Bytes a node that a commit needs."""


@pytest.mark.parametrize(
    ("name", "read", "written", "kept", "working", "replay"),
    [
        # 7 nodes in 2 rows, chains of 4 and 3; 2 and 1 of them are accepted, 3 in all.
        ("eager sequential", 21, 14, 7 * KEPT["inputs"], ROW, (9, 6)),
        ("fused tokens", 7, 7, 7 * KEPT["inputs"], 2 * ROW, (3, 3)),
        ("tile resident", 2, 0, 7 * KEPT["inputs"], 4 * K * COLUMNS, (2, 2)),
        ("snapshots", 2, 7, 7 * ROW, 0, (2, 2)),
        ("parent reload", 7, 7, 7 * ROW, 0, (2, 2)),
        ("compact factors", 2, 0, 7 * KEPT["factors"], 0, (2, 2)),
    ],
)
def test_what_a_round_of_chains_moves_and_keeps(name, read, written, kept, working, replay):
    rng = np.random.default_rng(5)
    shapes = forest([chain(4), chain(3)])
    inputs, start = window(rng, shapes)
    verify, commit = counted(SCHEMES[name](), start, inputs, shapes, [1, 0])
    assert verify == Traffic(read * ROW, written * ROW, kept, working)
    assert commit == Traffic(replay[0] * ROW, replay[1] * ROW)


@pytest.mark.parametrize(
    ("name", "read", "written", "working"),
    [
        ("eager sequential", 24, 16, 2 * ROW),  # 8 nodes
        ("fused tokens", 8, 8, 3 * ROW),  # 2 slots and 1
        ("tile resident", 2, 0, 2 * 4 * K * COLUMNS),
        ("snapshots", 2, 8, 0),
        ("parent reload", 8, 8, 0),
        ("compact factors", 2, 0, 0),
    ],
)
def test_what_a_round_of_trees_moves(name, read, written, working):
    """In place, a row that accepts nothing moves nothing; in new memory it is copied."""
    rng = np.random.default_rng(6)
    shapes = forest([tree((-1, 0, 0, 1, 2)), chain(3)])
    inputs, start = window(rng, shapes)
    scheme = SCHEMES[name]()
    verify, commit = counted(scheme, start, inputs, shapes, [-1, -1])
    assert (verify.read, verify.written, verify.working) == (read * ROW, written * ROW, working)
    assert commit == Traffic(2 * ROW, 2 * ROW)
    assert counted(scheme, start, inputs, shapes, [-1, -1], into=start)[1] == Traffic()
    half = counted(scheme, start, inputs, shapes, [-1, 0], into=start)[1]
    assert half == (Traffic(3 * ROW, 2 * ROW) if name == "eager sequential" else Traffic(ROW, ROW))


def test_eager_rows_that_are_not_neighbours_are_copied_there_and_back():
    shapes = forest([chain(2), chain(1), chain(2)])
    inputs, start = window(np.random.default_rng(11), shapes)
    verify, commit = counted(SCHEMES["eager sequential"](), start, inputs, shapes, [0, -1, 0])
    assert (verify.read, verify.written) == ((3 * 5 + 2) * ROW, (2 * 5 + 2) * ROW)
    assert commit == Traffic((3 * 2 + 2 * 2 + 1) * ROW, (2 * 2 + 2 * 2 + 1) * ROW)


@pytest.mark.parametrize("name", COMPILED)
def test_traffic_does_not_depend_on_the_number_of_threads(name):
    rng = np.random.default_rng(7)
    shapes = forest([chain(4), tree((-1, 0, 0))])
    inputs, start = window(rng, shapes)
    one, three = (counted(SCHEMES[name](), start, inputs, shapes, [2, 1], threads=threads) for threads in (1, 3))
    assert (one[0].read, one[0].written, one[0].kept) == (three[0].read, three[0].written, three[0].kept)
    assert one[1] == three[1]


def window(rng, shapes):
    inputs = tensors(random_inputs(rng, len(shapes.rows), H, K, V), torch.float32)
    return inputs, torch.from_numpy(random_state(rng, len(shapes.trees), H, K, V)).float()


@pytest.mark.parametrize("name", ["fused tokens", "snapshots", "parent reload"])
def test_memory_for_states_is_provided_once(name):
    shapes = forest([tree((-1, 0, 0, 1))])
    scheme, (inputs, start) = SCHEMES[name](), window(np.random.default_rng(8), shapes)
    scheme.verify(start, inputs, shapes)
    first = scheme._memory.data_ptr()
    scheme.verify(start, inputs, shapes)
    scheme.verify(start, mapped(inputs, lambda each: each[:2].contiguous()), forest([chain(2)]))
    assert scheme._memory.data_ptr() == first


def test_16_bit_inputs_are_summed_in_float32(scheme):
    shapes = forest([tree((-1, 0, 0, 1)), chain(6)])
    full, start = window(np.random.default_rng(9), shapes)
    short = DeltaInputs(full.q.bfloat16(), full.k.bfloat16(), full.v.bfloat16(), full.log_decay, full.beta)
    rounded = DeltaInputs(short.q.float(), short.k.float(), short.v.float(), full.log_decay, full.beta)
    found, _ = scheme.verify(start, short, shapes)
    expected, pending = scheme.verify(start, rounded, shapes)
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected.bfloat16())
    paths = paths_to(shapes, [3, 5])
    kept = scheme.commit(start, pending, paths)
    _, pending = scheme.verify(start, short, shapes)
    assert torch.equal(scheme.commit(start, pending, paths), kept)


def test_what_does_not_go_together_is_refused(scheme):
    shapes = forest([tree((-1, 0, 0))])
    inputs, start = window(np.random.default_rng(10), shapes)
    _, pending = scheme.verify(start, inputs, shapes)
    with pytest.raises(ValueError, match=r"state is torch\.float64 on cpu: the compiled forms expect float32"):
        scheme.verify(start.double(), inputs, shapes)
    with pytest.raises(ValueError, match=r"row 0: path \[1\]"):
        scheme.commit(start, pending, [np.array([1])])
    with pytest.raises(ValueError, match="state of 2 rows for a forest of 1 trees"):
        scheme.commit(torch.cat([start, start]), pending, [np.array([0])])
    with pytest.raises(ValueError, match="expected memory like the state's"):
        scheme.commit(start, pending, [np.array([0])], into=start[:, :1])
    # Compiled code would read beyond what it is given.
    with pytest.raises(ValueError, match=r"state is torch\.float64 on cpu: the compiled forms expect float32"):
        scheme.commit(start.double(), pending, [np.array([0])])
    for other in (torch.cat([start, start], 1), torch.cat([start, start], 2), torch.cat([start, start], 3)):
        with pytest.raises(ValueError, match=r"pending (k|v|states|keys|values) has shape"):
            scheme.commit(other, pending, [np.array([0])])
