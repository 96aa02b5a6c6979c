"""Every refusal, in both forms: nothing is computed from what does not go together."""

import numpy as np
import pytest
import torch

from specdec_core.kernels.gated_delta import reference
from specdec_core.kernels.gated_delta import torch as closed
from specdec_core.topology import Forest, chain, forest, tree
from tests.kernels.gated_delta.windows import mapped, random_inputs, random_state, tensors

SHAPES = forest([chain(1), tree((-1, 0, 0))])
FORMS = {"reference": reference, "torch": closed}


def made():
    """Inputs and state, float32 tensors: N 4, B 2, H 2, K 3, V 5."""
    rng = np.random.default_rng(0)
    inputs = tensors(random_inputs(rng, 4, 2, 3, 5), torch.float32)
    return inputs, torch.from_numpy(random_state(rng, 2, 2, 3, 5)).float()


@pytest.fixture(params=FORMS)
def form(request):
    return FORMS[request.param]


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("q", (4, 2, 4), r"q has shape \(4, 2, 4\): expected \[N, H, K\] = \[4, 2, 3\]"),
        ("q", (0, 2, 3), r"q has shape \(0, 2, 3\): expected \[N, H, K\] = \[4, 2, 3\]"),
        ("k", (4, 1, 3), r"k has shape \(4, 1, 3\): expected \[N, H, K\] = \[4, 2, 3\]"),
        ("v", (4, 2, 3), r"v has shape \(4, 2, 3\): expected \[N, H, V\] = \[4, 2, 5\]"),
        ("log_decay", (4,), r"log_decay has shape \(4,\): expected \[N, H\] = \[4, 2\] or \[N, H, K\] = \[4, 2, 3\]"),
        ("beta", (4, 2, 1), r"beta has shape \(4, 2, 1\): expected \[N, H\] = \[4, 2\]"),
        ("beta", (5, 2), r"beta has shape \(5, 2\)"),
    ],
)
def test_an_input_of_another_shape(form, name, shape, message):
    inputs, state = made()
    with pytest.raises(ValueError, match=message):
        form.verify(state, type(inputs)(**vars(inputs) | {name: -torch.ones(shape)}), SHAPES)


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(2, 3, 5), r"state has shape \(2, 3, 5\): expected \[B, H, K, V\], none of them 0"),
        (torch.zeros(2, 2, 0, 5), r"state has shape \(2, 2, 0, 5\): expected \[B, H, K, V\], none of them 0"),
        (torch.zeros(3, 2, 3, 5), "state of 3 rows for a forest of 2 trees: expected one tree a row"),
        (torch.zeros(2, 2, 3, 5).bfloat16(), "state is bfloat16: expected float32 or float64"),
        (torch.zeros(2, 2, 5, 3).mT, r"state of shape \(2, 2, 3, 5\) is not contiguous"),
    ],
)
def test_a_state_of_another_kind(form, state, message):
    inputs, _ = made()
    with pytest.raises(ValueError, match=message):
        form.verify(state, inputs, SHAPES)


def test_a_numpy_state_that_is_not_contiguous():
    inputs, state = made()
    inputs = mapped(inputs, lambda each: each.numpy())
    assert reference.verify(state.numpy(), inputs, SHAPES)[0].shape == (4, 2, 5)
    with pytest.raises(ValueError, match="not contiguous"):
        reference.verify(np.asfortranarray(state.numpy()), inputs, SHAPES)


@pytest.mark.parametrize(
    ("name", "dtype", "message"),
    [
        ("log_decay", torch.float64, "log_decay is float64: expected float32 beside this state"),
        ("log_decay", torch.bfloat16, "log_decay is bfloat16: expected float32"),
        ("beta", torch.float16, "beta is float16: expected float32"),
        ("q", torch.float64, "q is float64: expected float32 or bfloat16 or float16"),
        ("q", torch.int32, "q is int32: expected float32"),
        ("v", torch.bfloat16, "q is float32, k is float32, v is bfloat16: expected one dtype for all of them"),
    ],
)
def test_an_input_of_another_dtype(form, name, dtype, message):
    inputs, state = made()
    changed = type(inputs)(**vars(inputs) | {name: getattr(inputs, name).to(dtype)})
    with pytest.raises(ValueError, match=message):
        form.verify(state, changed, SHAPES)


def test_16_bit_inputs_beside_a_float64_state(form):
    inputs, state = made()
    short = {name: getattr(inputs, name).bfloat16() for name in ("q", "k", "v")}
    double = {name: getattr(inputs, name).double() for name in ("log_decay", "beta")}
    with pytest.raises(ValueError, match="q is bfloat16: expected float64 beside this state"):
        form.verify(state.double(), type(inputs)(**short | double), SHAPES)


@pytest.mark.parametrize(
    ("other", "message"),
    [(lambda each: each.numpy(), "k is a ndarray on cpu"), (lambda each: each.to("meta"), "k is a Tensor on meta")],
)
def test_an_input_elsewhere(form, other, message):
    inputs, state = made()
    with pytest.raises(ValueError, match=message + ", the state a Tensor on cpu: expected both of one kind"):
        form.verify(state, type(inputs)(**vars(inputs) | {"k": other(inputs.k)}), SHAPES)


@pytest.mark.parametrize("value", [np.nan, np.inf, 2.0**-100])
def test_a_log_decay_that_is_none(form, value):
    inputs, state = made()
    inputs.log_decay[2, 1] = value
    with pytest.raises(ValueError, match=rf"log_decay at \(2, 1\) is {value}.*: expected −inf…0"):
        form.verify(state, inputs, SHAPES)


@pytest.mark.parametrize(
    ("paths", "message"),
    [
        ([[0]], "1 paths for 2 rows: expected one a row"),
        ([[0], [0], [0]], "3 paths for 2 rows"),
        ([[0], [1]], r"row 1: path \[1\] in a tree with parents \(-1, 0, 0\): expected the indices of all nodes"),
        ([[0], [0, 1, 2]], r"row 1: path \[0, 1, 2\]"),
        ([[0], [2, 0]], r"row 1: path \[2, 0\]"),
        ([[0], [0, 3]], r"row 1: path \[0, 3\]"),
        ([[0, 1], [0]], r"row 0: path \[0, 1\]"),
        ([[-1], [0]], r"row 0: path \[-1\]"),
        ([[0], [0, 1, -1]], r"row 1: path \[0, 1, -1\]"),
        ([[0], [0, 0, 1]], r"row 1: path \[0, 0, 1\]"),
        ([[0], [0, 1.0]], r"row 1: path \[0.0, 1.0\]"),
        ([[0], [[0, 1]]], r"row 1: path \[\[0, 1\]\]"),
    ],
)
def test_a_path_that_does_not_lead_from_the_root_to_a_node(form, paths, message):
    inputs, state = made()
    _, pending = form.verify(state, inputs, SHAPES)
    with pytest.raises(ValueError, match=message):
        form.commit(state, pending, [np.array(path) for path in paths])


@pytest.mark.parametrize(
    ("state", "message"),
    [
        (torch.zeros(3, 2, 3, 5), "state of 3 rows for a forest of 2 trees"),
        (torch.zeros(2, 2, 4, 5), r"pending keys has shape \(4, 2, 1, 3\): expected \[N, H, r, K\] = \[4, 2, 1, 4\]"),
        (torch.zeros(2, 2, 3, 1), r"pending values has shape \(4, 2, 1, 5\): expected \[N, H, r, V\] = \[4, 2, 1, 1\]"),
        (torch.zeros(2, 2, 3, 5).double(), "pending values are torch.float32, the state torch.float64"),
        (torch.zeros(2, 2, 5, 3).mT, "not contiguous"),
        (np.zeros((2, 2, 3, 5)), "state is a ndarray: expected a torch tensor; use torch.from_numpy"),
    ],
)
def test_a_commit_to_another_state(state, message):
    inputs, verified = made()
    _, pending = closed.verify(verified, inputs, SHAPES)
    with pytest.raises(ValueError, match=message):
        closed.commit(state, pending, [np.array([0]), np.array([0])])


def test_the_closed_form_takes_no_numpy_state():
    inputs, state = made()
    with pytest.raises(ValueError, match="state is a ndarray: expected a torch tensor"):
        closed.verify(state.numpy(), mapped(inputs, lambda each: each.numpy()), SHAPES)


def test_a_forest_without_rows(form):
    inputs, state = made()
    with pytest.raises(ValueError, match="state of 2 rows for a forest of 0 trees"):
        form.verify(state, inputs, Forest(()))
