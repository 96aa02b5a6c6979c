import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.kernels.gated_delta.ancestry import accepted, batches, index, steps_up
from specdec_core.topology import chain, forest, tree
from tests.strategies import topologies

CPU = torch.device("cpu")


@given(topologies(), st.integers(1, 12))
def test_steps_lead_up_to_the_root_and_stay_beyond_it(shape, width):
    table = steps_up(shape, width)
    for node in range(len(shape)):
        at = node
        for found in table[node]:
            assert found == (len(shape) if at < 0 else at)
            at = shape.parents[at] if at >= 0 else -1


@given(st.lists(topologies(6), min_size=1, max_size=6))
def test_rows_are_batched_by_their_number_of_nodes(trees):
    shapes = forest(trees)
    found = batches(shapes, CPU)
    assert [batch.shape[1] for batch in found] == sorted({len(each) for each in trees})
    everything = torch.arange(len(shapes.rows))
    for batch in found:
        rows = torch.arange(len(trees))[batch.rows]
        assert [len(trees[row]) for row in rows] == [batch.shape[1]] * batch.shape[0]
        own = everything[batch.nodes].reshape(batch.shape)
        for line, row in enumerate(rows):
            assert own[line].tolist() == np.flatnonzero(shapes.rows == int(row)).tolist()
            table = line if len(batch.up) > 1 else 0
            up = batch.up[table].numpy()
            np.testing.assert_array_equal(up, steps_up(trees[row], up.shape[1]))
            root = len(trees[row])
            assert batch.parents[table].tolist() == [root, *trees[row].parents[1:]]
            for node, distances in enumerate(batch.distance[table].tolist()):
                expected = [-1] * (root + 1)
                for step, ancestor in enumerate([*trees[row].path(node)[::-1], root]):
                    expected[ancestor] = step
                assert distances == expected


def test_rows_of_one_shape_share_their_tables_and_memory():
    (batch,) = batches(forest([chain(3), chain(3), chain(3)]), CPU)
    assert len(batch.up) == len(batch.distance) == 1 and batch.shape == (3, 3)
    flat = torch.zeros(9, 2, 4)
    assert batch.take(flat).shape == (3, 2, 3, 4) and batch.take(flat).data_ptr() == flat.data_ptr()
    assert batch.take(flat[..., 0]).shape == (3, 2, 3, 1)


def test_tables_are_made_once_for_every_layer():
    shapes = [chain(2), tree((-1, 0, 0))]
    assert batches(forest(shapes), CPU) is batches(forest(list(shapes)), CPU)
    assert accepted(forest(shapes), (1, 2), CPU) is accepted(forest(shapes), (1, 2), CPU)
    long = forest([chain(65)])
    assert batches(long, CPU) is not batches(long, CPU)


def test_consecutive_indices_are_a_slice():
    assert index(np.array([2, 3, 4]), CPU) == slice(2, 5)
    assert index(np.array([2, 4]), CPU).tolist() == [2, 4]
    assert index(np.array([1, 0]), CPU).tolist() == [1, 0]


def test_accepted_paths_go_from_the_node_up_and_repeat_the_root():
    shapes = forest([tree((-1, 0, 0, 2)), chain(2), chain(2)])
    found = accepted(shapes, (3, -1, 0), CPU)
    assert found.rows.tolist() == [0, 2]
    assert found.up.tolist() == [[3, 2, 0], [6, 6, 6]]
    assert found.real.tolist() == [[True, True, True], [True, False, False]]
    assert accepted(shapes, (-1, -1, -1), CPU) is None
