import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.targets.padded import pad
from specdec_core.topology import chain, forest, tree
from tests.strategies import topologies


def test_two_rows_by_hand():
    shape = forest([tree((-1, 0, 0)), chain(2)])
    batch = pad(np.array([5, 6, 7, 8, 9]), np.array([3, 1]), np.array([2, 0]), shape)
    assert batch.tokens.tolist() == [[5, 6, 7], [8, 9, 8]]
    assert batch.positions.tolist() == [[2, 3, 3], [0, 1, 0]]
    assert batch.reach == 5
    assert batch.visible.astype(int).tolist() == [
        [[1, 1, 1, 0, 0], [1, 1, 1, 1, 0], [1, 1, 1, 0, 1]],
        [[1, 0, 0, 0, 0], [1, 1, 0, 0, 0], [1, 0, 0, 0, 0]],
    ]
    assert batch.rows.tolist() == [0, 0, 0, 1, 1] and batch.columns.tolist() == [0, 1, 2, 0, 1]
    assert batch.slots.tolist() == [3, 3, 3, 1, 1] and batch.entries.tolist() == [2, 3, 4, 0, 1]


@given(st.lists(st.tuples(topologies(7), st.integers(0, 9)), min_size=1, max_size=4))
def test_a_node_sees_its_row_and_path_and_padding_sees_something(rows):
    trees, lengths = [shape for shape, _ in rows], np.array([length for _, length in rows])
    shape = forest(trees)
    batch = pad(np.arange(len(shape.rows)), np.arange(len(rows)), lengths, shape)
    assert batch.visible.any(axis=2).all()
    assert np.array_equal(batch.tokens[batch.rows, batch.columns], np.arange(len(shape.rows)))
    for row, column, position in zip(
        batch.rows, batch.columns, batch.positions[batch.rows, batch.columns], strict=True
    ):
        expected = {*range(lengths[row]), *(lengths[row] + trees[row].path(int(column)))}
        assert set(np.flatnonzero(batch.visible[row, column])) == expected and position == len(expected) - 1


@pytest.mark.parametrize("slots", [[0], [4]])
def test_one_row_is_not_padded(slots):
    batch = pad(np.array([1, 2, 3]), np.array(slots), np.array([7]), forest([chain(3)]))
    assert batch.visible.shape == (1, 3, 10) and batch.positions.tolist() == [[7, 8, 9]]
