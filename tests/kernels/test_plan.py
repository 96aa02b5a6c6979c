import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.kernels.plan import StepPlan, plan_step
from specdec_core.topology import chain, forest, tree
from tests.strategies import topologies


def planned(trees, lengths) -> StepPlan:
    """Row r in slot r + 2 of a state, whose token at flat node i is 10 + i."""
    whole = forest(trees)
    slots = np.arange(len(trees)) + 2
    return plan_step(np.arange(len(whole.rows)) + 10, slots, np.array(lengths), whole)


batches = st.lists(st.tuples(topologies(6), st.integers(0, 9)), min_size=1, max_size=4)


@given(batches)
def test_every_node_has_its_rows_slot_and_length_and_its_own_depth(rows):
    plan = planned(*zip(*rows, strict=True))
    expected = [
        (row + 2, length, node, len(shape.path(node)) - 1)
        for row, (shape, length) in enumerate(rows)
        for node in range(len(shape))
    ]
    columns = (plan.slots, plan.committed, plan.nodes, plan.depths)
    assert list(zip(*(column.tolist() for column in columns), strict=True)) == expected
    assert plan.tokens.tolist() == list(range(10, 10 + len(expected)))


@given(batches)
def test_positions_count_by_depth_and_entries_by_node(rows):
    plan = planned(*zip(*rows, strict=True))
    assert (plan.positions == plan.committed + plan.depths).all()
    assert (plan.entries == plan.committed + plan.nodes).all()


@given(batches)
def test_no_two_nodes_of_a_pass_write_one_entry(rows):
    plan = planned(*zip(*rows, strict=True))
    assert len(set(zip(plan.slots.tolist(), plan.entries.tolist(), strict=True))) == len(plan.tokens)


@given(batches)
def test_a_node_sees_as_many_entries_as_its_position_and_itself(rows):
    plan = planned(*zip(*rows, strict=True))
    assert (plan.committed + (plan.paths >= 0).sum(axis=1) == plan.positions + 1).all()


def test_in_a_chain_position_and_entry_are_one():
    plan = planned([chain(4)], [7])
    assert plan.positions.tolist() == plan.entries.tolist() == [7, 8, 9, 10]


def test_siblings_share_a_position_but_not_an_entry():
    plan = planned([tree((-1, 0, 0))], [7])
    assert plan.positions.tolist() == [7, 8, 8] and plan.entries.tolist() == [7, 8, 9]


def test_offsets_cut_the_rows():
    assert planned([chain(2), chain(3)], [0, 5]).offsets.tolist() == [0, 2, 5]


def test_a_plan_owns_its_tokens():
    tokens = np.arange(3)
    tokens.flags.writeable = False  # as a row's committed tokens are
    plan = plan_step(tokens, np.array([0]), np.array([0]), forest([chain(3)]))
    assert plan.tokens.flags.writeable and plan.tokens.dtype == np.int64
