import dataclasses

import numpy as np
import pytest
import torch

from specdec_core.kernels.gated_delta import torch as closed_form
from specdec_core.kernels.gdn_step.torch import TorchGdn
from specdec_core.kernels.plan import plan_step
from specdec_core.models.gdn_checkpoint import PURE, GdnCheckpoint, tiny_gdn
from specdec_core.placement import Placement
from specdec_core.state.recurrent import RecurrentState
from specdec_core.topology import chain, forest, tree
from tests.gdn_reference import GdnReference

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKPOINT = tiny_gdn(4)
DOUBLE = Placement(dtype="float64")
EXACT = {"rtol": 0, "atol": 1e-10}
TOKENS = np.random.default_rng(0).integers(0, 97, 14)


def run(checkpoint, rows, placement=DOUBLE, scored=None, layers=4, features=()):
    """Rows of (tokens, shape) in one pass over a fresh state: logits and features as numpy."""
    step = TorchGdn(checkpoint.config, checkpoint.weights, placement)
    tokens, trees = zip(*rows, strict=True)
    state = RecurrentState(checkpoint.config, len(rows), 32, closed_form, placement.torch_dtype)
    slots, flat = np.arange(len(rows)), np.concatenate(tokens)
    window = state.open(slots, forest(trees))
    plan = plan_step(flat, slots, state.lengths[slots], forest(trees))
    scored = np.arange(len(flat)) if scored is None else scored
    logits, found = step(plan, window, layers=layers, scored=scored, feature_layers=features)
    return logits.double().numpy(), found if found is None else found.double().numpy()


@pytest.mark.parametrize(
    "changes",
    [
        {},
        PURE,
        {"tied_head": True, "norm_eps": 1e-2},
        {"negative_eigenvalues": True, **PURE},
        {"linear_value_heads": 2},
        {"linear_heads": 1, "linear_value_heads": 3, "linear_value_dim": 4},
        {"linear_heads": 3, "linear_value_heads": 6, "linear_key_dim": 1},
        {"conv_width": 1},
        {"conv_width": 2, "linear_value_dim": 1},
        {"conv_width": 7},
        {"attention_layers": (0, 2), "heads": 4, "kv_heads": 4, "rope_theta": 100.0},
        {"attention_layers": (0, 1, 2), "heads": 3, "kv_heads": 1},
    ],
    ids=lambda changes: ",".join(changes) or "tiny",
)
def test_any_shape_is_the_reference(changes):
    checkpoint = tiny_gdn(5, **changes)
    logits, _ = run(checkpoint, [(TOKENS, chain(len(TOKENS)))])
    np.testing.assert_allclose(logits, GdnReference(checkpoint).logits(TOKENS), **EXACT)


def test_rows_and_branches_see_their_own_path_only():
    reference, shape = GdnReference(CHECKPOINT), tree((-1, 0, 0, 2, 1))
    logits, _ = run(CHECKPOINT, [(TOKENS[:5], shape), (TOKENS[5:8], chain(3)), (TOKENS[8:9], chain(1))])
    for node in range(5):
        np.testing.assert_allclose(logits[node], reference.last(TOKENS[shape.path(node)]), **EXACT)
    np.testing.assert_allclose(logits[5:8], reference.logits(TOKENS[5:8]), **EXACT)
    np.testing.assert_allclose(logits[8], reference.last(TOKENS[8:9]), **EXACT)


def test_what_is_asked_for_is_returned():
    reference = GdnReference(CHECKPOINT)
    logits, features = run(CHECKPOINT, [(TOKENS, chain(14))], scored=np.array([13, 2]), features=(3, 0))
    np.testing.assert_allclose(logits, reference.logits(TOKENS)[[13, 2]], **EXACT)
    np.testing.assert_allclose(features, reference.hidden(TOKENS)[[0, 3]].swapaxes(0, 1), **EXACT)


@pytest.mark.parametrize("layers", [1, 3])
def test_the_first_layers_alone(layers):
    logits, _ = run(CHECKPOINT, [(TOKENS, chain(14))], layers=layers)
    np.testing.assert_allclose(logits, GdnReference(CHECKPOINT, layers).logits(TOKENS), **EXACT)


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.2), ("float16", 0.03)])
def test_narrower_numbers_come_close(dtype, tolerance):
    logits, _ = run(CHECKPOINT, [(TOKENS, chain(14))], Placement(dtype=dtype))
    gap = logits - GdnReference(CHECKPOINT).logits(TOKENS)
    assert np.sqrt((gap**2).mean()) <= tolerance  # of logits that spread over 2


def changed(name: str, values: torch.Tensor) -> GdnCheckpoint:
    weights = {**CHECKPOINT.weights, f"model.layers.1.attn.{name}": values}
    return dataclasses.replace(CHECKPOINT, weights=weights)


@pytest.mark.parametrize("dtype", ["float64", "float32"])
@pytest.mark.parametrize("bias", [-1e4, 0.0, 50.0])
def test_a_rate_of_decay_that_overflows_is_no_nan(dtype, bias):
    # e^1000 is infinite: times a softplus of 0 that is no number. A bias of 50 forgets all, one of −1e4 nothing.
    checkpoint = changed("A_log", torch.tensor([1000.0, 0.0, 89.0, -1000.0]))
    weights = {**checkpoint.weights, "model.layers.1.attn.dt_bias": torch.full((4,), bias)}
    logits, _ = run(dataclasses.replace(checkpoint, weights=weights), [(TOKENS, chain(14))], Placement(dtype=dtype))
    assert np.isfinite(logits).all()


def test_gates_are_worked_out_in_float32_beside_half_precision():
    # 1 + 2^−10 is no bfloat16; in a rate of e^… it must survive.
    step = TorchGdn(
        CHECKPOINT.config, changed("dt_bias", torch.full((4,), 1.0009765625)).weights, Placement(dtype="bfloat16")
    )
    assert step.recurrent[1]["bias"].tolist() == [1.0009765625] * 4
    assert step.recurrent[1]["rate"].dtype == torch.float32 and step.recurrent[1]["o"].dtype == torch.bfloat16


def test_softplus_is_exact_far_from_zero():
    checkpoint = changed("dt_bias", torch.tensor([20.2, 20.5, 21.0, 22.0]))
    weights = {**checkpoint.weights, "model.layers.1.attn.A_log": torch.full((4,), -3.0)}
    checkpoint = dataclasses.replace(checkpoint, weights=weights)
    logits, _ = run(checkpoint, [(TOKENS, chain(14))])
    np.testing.assert_allclose(logits, GdnReference(checkpoint).logits(TOKENS), rtol=0, atol=3e-12)
