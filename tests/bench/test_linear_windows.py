"""Random windows are what they say they are: shapes, adverse numbers, paths."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec_core.bench.linear_windows import (
    ADVERSE,
    MILD,
    RESET,
    balanced_tree,
    batch_of,
    in_dtype,
    joined,
    parts,
    paths_to,
    random_draft,
    random_inputs,
    random_state,
    random_tree,
    spread_paths,
)
from specdec_core.kernels.gated_delta.checks import check_inputs
from specdec_core.topology import chain, forest, tree

SEEDS = range(200)


def inputs_of(seed, adverse, nodes=12, heads=3, keys=8, values=5):
    return random_inputs(np.random.default_rng(seed), nodes, heads, keys, values, adverse=adverse)


def test_trees_have_all_sizes_and_some_are_stars():
    shapes = [random_tree(np.random.default_rng(seed), 9) for seed in SEEDS]
    assert {len(shape) for shape in shapes} == set(range(1, 10))
    stars = sum(shape.depths.max() == 1 and len(shape) > 4 for shape in shapes)
    assert 10 < stars < 80 and any(shape.depths.max() > 3 for shape in shapes)


def test_drafts_are_none_chains_and_trees():
    shapes = [random_draft(np.random.default_rng(seed), 9) for seed in SEEDS]
    assert sum(len(shape) == 1 for shape in shapes) > 60
    assert sum(shape.is_chain and len(shape) > 2 for shape in shapes) > 30
    assert sum(not shape.is_chain for shape in shapes) > 30


def test_a_balanced_tree_has_two_children_a_node():
    assert balanced_tree(7) == tree((-1, 0, 0, 1, 1, 2, 2)) and balanced_tree(1) == chain(1)
    assert balanced_tree(64).depths.max() == 6


def test_inputs_fit_a_state_and_are_float32_numbers():
    shapes = forest([chain(4), random_tree(np.random.default_rng(1), 8)])
    inputs = inputs_of(0, True, nodes=len(shapes.rows))
    state = random_state(np.random.default_rng(2), 2, 3, 8, 5)
    check_inputs(state, inputs, shapes)
    check_inputs(state.float(), in_dtype(inputs, torch.float32), shapes)
    for values in (*vars(inputs).values(), state):
        assert values.dtype == torch.float64 and torch.equal(values.float().double(), values)


def test_adverse_inputs_have_resets_tiny_gates_negative_eigenvalues_and_repeated_keys():
    windows = [inputs_of(seed, True) for seed in SEEDS]
    gates = torch.cat([each.log_decay for each in windows])
    assert set(gates.unique().tolist()) == {float(np.float32(gate)) for gate in ADVERSE}
    assert (gates <= RESET).any() and (gates == -torch.inf).any()
    rates = torch.cat([each.beta for each in windows])
    assert rates.min() == 0 and rates.max() == 2 and 0.3 < (rates > 1).double().mean() < 0.7
    repeated = sum(bool((each.k.abs() == each.k[:1].abs()).all()) for each in windows)
    assert 25 < repeated < 80 and any(bool((each.k == -each.k[:1]).any()) for each in windows)
    for each in windows:
        torch.testing.assert_close(each.k.norm(dim=-1), torch.ones(12, 3, dtype=torch.float64))


def test_mild_inputs_are_those_of_a_model():
    for seed in range(20):
        each = inputs_of(seed, False)
        assert set(each.log_decay.unique().tolist()) <= {float(np.float32(gate)) for gate in MILD}
        assert each.beta.min() >= 0 and each.beta.max() < 1 and not (each.k == each.k[:1]).all()
        assert 0.5 < each.v.std() < 1.5 and 0.5 < float(each.q.std()) * 8**0.5 < 1.5


def test_windows_are_taken_apart_and_joined():
    inputs = inputs_of(3, True)
    halves = [parts(inputs, np.arange(5)), parts(inputs, np.arange(5, 12))]
    for name, values in vars(joined(halves)).items():
        assert torch.equal(values, getattr(inputs, name))
    assert torch.equal(parts(inputs, np.array([7, 2])).v, inputs.v[[7, 2]])


def test_paths_lead_to_their_nodes():
    shapes = forest([tree((-1, 0, 0, 2)), chain(3)])
    assert [path.tolist() for path in paths_to(shapes, [3, -1])] == [[0, 2, 3], []]


def test_spread_paths_start_at_half_of_the_deepest_branch_and_have_all_lengths():
    lengths = [len(path) for path in spread_paths(batch_of(chain(16), 16))]
    assert lengths[0] == 9 and sorted(lengths) == list(range(1, 17))
    (path,) = spread_paths(batch_of(tree((-1, 0, 0, 2, 3)), 1))
    assert path.tolist() == [0, 2, 3]
    assert [len(path) for path in spread_paths(batch_of(chain(1), 3))] == [1, 1, 1]


@pytest.mark.parametrize("rows", [1, 3])
def test_a_batch_is_one_shape_a_row(rows):
    assert batch_of(chain(2), rows).trees == (chain(2),) * rows
