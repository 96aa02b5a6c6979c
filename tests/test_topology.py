import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.topology import Topology, TopologyError, chain, forest, tree
from tests.strategies import parents, topologies


def naive_path(shape: tuple[int, ...], node: int) -> list[int]:
    return ([] if shape[node] < 0 else naive_path(shape, shape[node])) + [node]


@given(parents())
def test_paths_lead_from_the_root_to_each_node(shape):
    for node in range(len(shape)):
        assert tree(shape).path(node).tolist() == naive_path(shape, node)


@given(parents())
def test_path_table_is_the_paths_padded(shape):
    table = tree(shape).paths
    longest = max(len(naive_path(shape, node)) for node in range(len(shape)))
    assert table.dtype == np.int32
    assert table.tolist() == [(p := naive_path(shape, n)) + [-1] * (longest - len(p)) for n in range(len(shape))]


@given(parents())
def test_depth_counts_the_steps_to_the_root(shape):
    assert tree(shape).depths.tolist() == [len(naive_path(shape, node)) - 1 for node in range(len(shape))]


@given(parents())
def test_a_node_sees_exactly_its_path(shape):
    mask = tree(shape).ancestors
    for node in range(len(shape)):
        assert np.flatnonzero(mask[node]).tolist() == naive_path(shape, node)


@given(parents())
def test_children_are_the_nodes_with_that_parent_in_order(shape):
    expected = tuple(tuple(n for n, p in enumerate(shape) if p == node) for node in range(len(shape)))
    assert tree(shape).children == expected


@given(parents())
def test_a_chain_is_a_tree_with_one_branch(shape):
    assert tree(shape).is_chain == all(len(each) <= 1 for each in tree(shape).children)


@given(st.integers(1, 40))
def test_chain_puts_each_node_behind_the_one_before(nodes):
    assert chain(nodes).parents == tuple(node - 1 for node in range(nodes))
    assert chain(nodes).is_chain


@given(parents())
def test_equal_shapes_are_one_object(shape):
    assert tree(shape) is tree(tuple(shape)) and forest([tree(shape)]) is forest([tree(shape)])


@pytest.mark.parametrize("shape", [(), (0,), (-1, 1), (-1, 0, 2), (-1, -1), (-1, 0, -1), (1, -1), (-1, 5)])
def test_parents_that_make_no_tree_are_refused(shape):
    with pytest.raises(TopologyError, match="expected"):
        Topology(shape)


def test_error_names_the_node_and_its_parent():
    with pytest.raises(TopologyError, match=r"node 2 has parent 3.*0…1"):
        Topology((-1, 0, 3))


@pytest.mark.parametrize("nodes", [0, -1])
def test_a_chain_holds_at_least_the_newest_token(nodes):
    with pytest.raises(TopologyError, match=f"chain of {nodes} nodes"):
        chain(nodes)


def test_a_forest_has_rows():
    with pytest.raises(TopologyError, match="without rows"):
        forest([])


@given(st.lists(topologies(), min_size=1, max_size=5))
def test_forest_lists_the_nodes_of_its_rows_one_after_another(trees):
    whole = forest(trees)
    expected = [(row, node, depth) for row, t in enumerate(trees) for node, depth in enumerate(t.depths.tolist())]
    assert list(zip(whole.rows.tolist(), whole.nodes.tolist(), whole.depths.tolist(), strict=True)) == expected
    assert whole.counts.tolist() == [len(t) for t in trees]


@given(st.lists(topologies(), min_size=1, max_size=5))
def test_forest_offsets_cut_the_flat_list_into_rows(trees):
    whole = forest(trees)
    assert whole.offsets[0] == 0 and whole.offsets[-1] == len(whole.rows)
    for row, (start, end) in enumerate(zip(whole.offsets, whole.offsets[1:], strict=False)):
        assert set(whole.rows[start:end].tolist()) == {row} and end - start == len(trees[row])


@given(st.lists(topologies(), min_size=1, max_size=5))
def test_forest_paths_are_those_of_the_own_tree(trees):
    whole = forest(trees)
    for row, node, path in zip(whole.rows, whole.nodes, whole.paths, strict=True):
        assert path[path >= 0].tolist() == trees[row].path(node).tolist()
