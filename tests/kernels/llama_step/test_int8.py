"""The compiled step with int8 weights: against a float64 step with quantized factors, and the same bits in whatever
company."""

import dataclasses

import numpy as np
import pytest
import torch

from specdec_core.kernels.llama_step.int8 import Int8Llama
from specdec_core.kernels.skinny_linear.int8 import dequantize, quantize
from specdec_core.models.checkpoints import Checkpoint, tiny_llama
from specdec_core.placement import Placement
from specdec_core.topology import chain, tree
from tests.kernels.llama_step.forms import EVEN, Form, SameBits, assert_many_rows_have_the_bits_of_each, odd, tokens_of
from tests.llama_reference import Reference

pytestmark = pytest.mark.usefixtures("one_thread")

# With EVEN: broken groups of 32 and whole ones; broken tiles of 16; a tied head and one of its own.
ODD = odd(layers=2)
# Groups of 64, several of them in all widths, and more than one unit of gates.
WIDE = tiny_llama(3, hidden_size=128, intermediate_size=704, layers=2, heads=6, kv_heads=2, head_dim=32)
MANY_GROUPS = tiny_llama(4, hidden_size=70, intermediate_size=1100, layers=1, heads=5, kv_heads=5, head_dim=26)
INT8 = Form(Int8Llama, ODD)
IN_DOUBT = 1e-4
"""Where float32's error may turn a rounding the other way: so near, in steps of a group, to the middle of two."""


class QuantizedReference(Reference):
    """The float64 reference with dequantized weights, and with the input of every product quantized and dequantized."""

    def __init__(self, checkpoint: Checkpoint, layers: int | None = None):
        c = checkpoint.config
        head = "model.embed_tokens.weight" if c.tied_head else "lm_head.weight"
        weights = {
            name: torch.from_numpy(dequantize(*quantize(tensor.numpy()))) if name.endswith("proj.weight") else tensor
            for name, tensor in checkpoint.weights.items()
        }
        weights["lm_head.weight"] = torch.from_numpy(dequantize(*quantize(checkpoint.weights[head].numpy())))
        config = dataclasses.replace(c, tied_head=False)
        super().__init__(dataclasses.replace(checkpoint, config=config, weights=weights), layers)

    def certain(self, tokens: np.ndarray) -> np.ndarray:
        """`[n]` bool: tokens for which no rounding was in doubt, neither theirs nor one of a token before."""
        return self._run(tuple(int(token) for token in tokens))[2] > IN_DOUBT

    def _uncached(self, tokens):
        self._distance = np.full(len(tokens), np.inf)
        logits, hidden = super()._uncached(tokens)
        return logits, hidden, np.minimum.accumulate(self._distance)

    def _linear(self, x, name):
        return super()._linear(self._quantized(x), name)

    def _norm(self, x, name):
        normed = super()._norm(x, name)
        return self._quantized(normed) if name == "model.norm" else normed

    def _quantized(self, x):
        group = 64 if x.shape[1] % 64 == 0 else 32
        parts = []
        for first in range(0, x.shape[1], group):
            part = x[:, first : first + group]
            step = np.abs(part).max(1, keepdims=True) / 127
            steps = part / step
            distance = np.abs(steps - np.floor(steps) - 0.5).min(1)
            self._distance = np.minimum(self._distance, distance)
            parts.append(np.rint(steps) * step)
        return np.concatenate(parts, 1)


def errors(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Of each row, relative to the largest number of all."""
    return np.abs(found - exact).reshape(len(found), -1).max(1) / np.abs(exact).max()


@pytest.mark.parametrize("checkpoint", [EVEN, ODD, WIDE, MANY_GROUPS], ids=["even", "odd", "wide", "many groups"])
def test_it_is_the_reference_with_quantized_factors(checkpoint):
    """Within float32's rounding, unless a rounding to a step is in doubt: then within what some steps can do."""
    sequences = [tokens_of(seed, 4) for seed in range(12)]
    cached, exact = INT8.cached(checkpoint, 2, slots=12, capacity=8), QuantizedReference(checkpoint)
    kept = tuple(range(checkpoint.config.layers))
    logits, features = cached.run([(slot, tokens, chain(4)) for slot, tokens in enumerate(sequences)], features=kept)
    certain = np.concatenate([exact.certain(tokens) for tokens in sequences])
    hidden = np.concatenate([exact.hidden(tokens) for tokens in sequences], 1).transpose(1, 0, 2)
    expected = np.concatenate([exact.logits(tokens) for tokens in sequences])
    assert certain.sum() >= 10
    for error in (errors(logits, expected), errors(features, hidden)):
        assert error[certain].max() < 2e-5
        assert error.max() < 0.05


def test_nodes_of_a_tree_are_the_reference_on_their_paths():
    shape, exact = tree((-1, 0, 0, 1, 2, 2, 5)), QuantizedReference(ODD)
    found, expected, certain = [], [], []
    for seed in range(8):
        cached, before, drafted = INT8.cached(ODD, 3), tokens_of(seed, 2), tokens_of(seed + 100, 7)
        cached.feed(3, before)
        found.append(cached.run([(3, drafted, shape)])[0])
        for node in range(7):
            path = np.concatenate([before, drafted[shape.path(node)]])
            expected.append(exact.last(path))
            certain.append(exact.certain(path)[-1])
    error = errors(np.concatenate(found), np.array(expected))
    assert np.sum(certain) >= 10
    assert error[np.array(certain)].max() < 2e-5 and error.max() < 0.05


def test_it_is_near_the_step_with_the_weights_as_they_were():
    """Quantization moves the logits of a wide random model by some hundredths of their size; they are not the same."""
    tokens = tokens_of(5, 30)
    exact = Reference(WIDE).logits(tokens)
    found, _ = INT8.cached(WIDE).feed(0, tokens)
    error = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert 0.002 < np.median(error) < 0.15


class TestSameBits(SameBits):
    form = INT8

    @pytest.mark.parametrize("rows", [64, 256])
    def test_a_batch_of_many_rows_of_a_wide_model_has_the_bits_of_its_rows(self, rows):
        assert_many_rows_have_the_bits_of_each(INT8, WIDE, rows)


def test_a_node_may_be_scored_more_often_than_there_are_nodes():
    """Compiled code checks no bounds, so whether there was room for it is looked up."""
    fresh = dataclasses.replace(EVEN, name="fresh")
    cached = INT8.cached(fresh)
    logits, _ = cached.feed(0, np.array([3]), scored=np.zeros(40, np.int64))
    np.testing.assert_array_equal(logits, np.repeat(INT8.one_by_one(EVEN, np.array([3]))[0], 40, axis=0))
    assert cached.step._rows.inputs.size >= 40 * cached.step._matrices.hidden.step


def test_a_row_that_is_not_finite_harms_no_other():
    weights = {name: tensor.clone() for name, tensor in EVEN.weights.items()}
    assert not EVEN.config.tied_head
    weights["model.embed_tokens.weight"][50, 3] = float("nan")
    bad = dataclasses.replace(EVEN, name="bad", weights=weights)
    batch = [(slot, np.array([7, 8 + slot]), chain(2)) for slot in range(4)]
    expected = INT8.cached(EVEN, 2).run(batch)[0]
    batch[2] = (2, np.array([7, 50]), chain(2))
    found = INT8.cached(bad, 2).run(batch)[0]
    assert np.isnan(found[5]).all()
    np.testing.assert_array_equal(np.delete(found, 5, 0), np.delete(expected, 5, 0))


def test_what_would_reach_out_of_bounds_is_refused():
    """The checks are the float32 step's, which its own tests try one by one: here, that they are made."""
    for change, message in (
        ({"rows": [(0, np.array([97]), chain(1))]}, r"token 97: expected 0…96"),
        ({"layers": 4}, r"layers 4: expected 1…3"),
        ({"features": (3,)}, r"feature layers \(3,\)"),
        ({"scored": np.array([2])}, r"scored node 2"),
    ):
        with pytest.raises(ValueError, match=message):
            INT8.cached().run(**{"rows": [(0, tokens_of(0, 2), chain(2))], **change})


@pytest.mark.parametrize(
    ("name", "value", "error", "message"),
    [
        ("model.norm.weight", None, KeyError, r"no tensor 'model\.norm\.weight', which a Llama model of 3 layers"),
        ("model.norm.weight", torch.ones(47), ValueError, r"has shape \(47,\): expected \(48,\) from the model's conf"),
        ("model.layers.1.mlp.up_proj.weight", torch.full((96, 48), np.nan), ValueError, r"^[^ ]*up_proj.weight: .*fin"),
        ("model.layers.2.self_attn.k_proj.weight", torch.ones(48, 48), ValueError, r"^[^ ]*k_proj.weight has shape"),
    ],
    ids=["absent", "shape", "not finite", "shape of a part"],
)
def test_weights_it_cannot_take_are_named(name, value, error, message):
    weights = {key: tensor for key, tensor in EVEN.weights.items() if key != name}
    if value is not None:
        weights[name] = value
    with pytest.raises(error, match=message):
        Int8Llama(EVEN.config, weights, Placement("numba"))


def test_weights_of_another_dtype_are_what_they_are_in_float32():
    halves = tiny_llama(1, dtype=torch.bfloat16)
    same = dataclasses.replace(halves, weights={name: tensor.float() for name, tensor in halves.weights.items()})
    tokens = tokens_of(13, 6)
    found, expected = (
        INT8.cached(dataclasses.replace(each, name=name)).feed(0, tokens)[0]
        for name, each in (("bfloat16", halves), ("float32", same))
    )
    np.testing.assert_array_equal(found, expected)
