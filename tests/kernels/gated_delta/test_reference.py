import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.gated_delta import DeltaInputs, GatedDelta, reference
from specdec_core.topology import chain, forest, tree
from tests.kernels.gated_delta.windows import error, parts, paths_to, random_inputs, random_state, tensors
from tests.strategies import topologies

LOGARITHM_OF_A_HALF = float(np.log(0.5))


def numbers(*values: float) -> np.ndarray:
    return np.array(values, np.float64)[:, None, None]


def test_three_nodes_by_hand():
    """State 2. Node 0: halved to 1, half way to 3, so 2. Two branches: all the way to 5, or forget and store −1."""
    inputs = DeltaInputs(
        q=numbers(1, 10, 100), k=numbers(1, 1, 1), v=numbers(3, 5, -1),
        log_decay=np.array([[LOGARITHM_OF_A_HALF], [0.0], [-np.inf]]), beta=np.array([[0.5], [1.0], [1.0]]),
    )  # fmt: skip
    state = np.full((1, 1, 1, 1), 2.0)
    form: GatedDelta = reference
    found, pending = form.verify(state, inputs, forest([tree((-1, 0, 0))]))
    np.testing.assert_allclose(found.ravel(), [2, 50, -100])
    for path, expected in (([], 2), ([0], 2), ([0, 1], 5), ([0, 2], -1)):
        np.testing.assert_allclose(form.commit(state, pending, [np.array(path, int)]).ravel(), [expected])
    assert state.ravel() == [2.0]


@settings(max_examples=30)
@given(topologies(), st.integers(0, 10**6))
def test_each_node_is_a_product_of_the_matrices_on_its_path(shape, seed):
    """The papers' form: S_t = e^g (I − β k kᵀ) S_p + β k vᵀ, from the row's state, path by path."""
    rng = np.random.default_rng(seed)
    inputs, state = random_inputs(rng, len(shape), 2, 4, 3), random_state(rng, 1, 2, 4, 3)
    found, pending = reference.verify(state, inputs, forest([shape]))
    for node in range(len(shape)):
        kept = reference.commit(state, pending, [shape.path(node)])
        for head in range(2):
            expected = state[0, head]
            for i in shape.path(node):
                k, beta = inputs.k[i, head], inputs.beta[i, head]
                moved = (np.eye(4) - beta * np.outer(k, k)) * np.exp(inputs.log_decay[i, head])
                expected = moved @ expected + beta * np.outer(k, inputs.v[i, head])
            assert error(kept[0, head], expected) <= 1e-13
            assert error(found[node, head], expected.T @ inputs.q[node, head]) <= 1e-13


def test_a_gate_a_key_channel_decays_rows_of_the_state():
    rng = np.random.default_rng(0)
    inputs, state = random_inputs(rng, 1, 1, 3, 2, "kimi"), random_state(rng, 1, 1, 3, 2)
    inputs.log_decay[:] = np.log([[[0.5, 1.0, 0.25]]])
    inputs.beta[:] = 0
    _, pending = reference.verify(state, inputs, forest([chain(1)]))
    kept = reference.commit(state, pending, [np.array([0])])
    np.testing.assert_allclose(kept[0, 0], state[0, 0] * [[0.5], [1.0], [0.25]])


def test_it_takes_tensors_and_computes_in_float64():
    rng = np.random.default_rng(1)
    inputs, state, shapes = random_inputs(rng, 5, 2, 3, 4), random_state(rng, 2, 2, 3, 4), forest([chain(2), chain(3)])
    expected, pending = reference.verify(state, inputs, shapes)
    given_tensors, _ = reference.verify(
        torch.from_numpy(state).float(), tensors(inputs, torch.float32), shapes
    )  # exact: the numbers are float32
    np.testing.assert_array_equal(given_tensors, expected)
    kept, outputs, _ = reference.commit_then_verify(state, pending, paths_to(shapes, [1, -1]), inputs, shapes)
    np.testing.assert_array_equal(kept, reference.commit(state, pending, paths_to(shapes, [1, -1])))
    np.testing.assert_array_equal(outputs, reference.verify(kept, inputs, shapes)[0])


def test_rows_start_from_their_own_state():
    rng = np.random.default_rng(2)
    shapes = forest([tree((-1, 0, 0)), chain(2), chain(1)])
    inputs, state = random_inputs(rng, 6, 1, 2, 2), random_state(rng, 3, 1, 2, 2)
    found, _ = reference.verify(state, inputs, shapes)
    for row, shape in enumerate(shapes.trees):
        own = np.flatnonzero(shapes.rows == row)
        alone, _ = reference.verify(state[row : row + 1], parts(inputs, own), forest([shape]))
        np.testing.assert_array_equal(found[own], alone)


def test_a_state_that_was_not_verified_is_refused():
    rng = np.random.default_rng(3)
    inputs, state = random_inputs(rng, 1, 1, 2, 2), random_state(rng, 1, 1, 2, 2)
    _, pending = reference.verify(state, inputs, forest([chain(1)]))
    with pytest.raises(ValueError, match="state of 2 rows, 1 were verified"):
        reference.commit(np.concatenate([state, state]), pending, [np.array([0])])


def test_a_convolution_by_hand():
    """Width 3, cache (1, 2): a root of 3 sees 1, 2, 3; its two children see 2, 3 and themselves."""
    cache, weights = np.array([[[1.0, 2.0]]]), np.array([[100.0, 10.0, 1.0]])
    x = np.array([[3.0], [4.0], [5.0]])
    shapes = forest([tree((-1, 0, 0))])
    found, pending = reference.convolve(cache, x, weights, shapes, np.array([-200.0]))
    total = np.array([123.0, 234.0, 235.0]) - 200
    np.testing.assert_allclose(found.ravel(), total / (1 + np.exp(-total)), rtol=1e-14)
    for path, expected in (([], [1, 2]), ([0], [2, 3]), ([0, 1], [3, 4]), ([0, 2], [3, 5])):
        kept = reference.commit(cache, pending, [np.array(path, int)])
        np.testing.assert_array_equal(kept, [[expected]])
