from __future__ import annotations

import sys
from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec_core.models.checkpoints import tiny_llama
from specdec_core.models.errors import MissingPackage, UnsupportedModel
from specdec_core.models.registry import load
from specdec_core.placement import Placement, PlacementError
from specdec_core.state.slots import CacheError
from specdec_core.targets import mlx
from specdec_core.targets.mlx import MlxOptions, MlxTarget
from specdec_core.targets.transformer import Transformer
from specdec_core.topology import chain, forest, tree
from tests.conformance import Subject, TargetConformance
from tests.llama_reference import Reference
from tests.targets.greedy import after, assert_speculation_equals_autoregression

pytest.importorskip("mlx.core", reason="MLX is not installed: pip install 'mlx[cpu]' on Linux, mlx on a Mac")

pytestmark = pytest.mark.usefixtures("one_thread")

ODD = tiny_llama(1)  # 97 tokens, 6 heads over 2, rows of 48
EVEN = tiny_llama(2, hidden_size=64, heads=4, head_dim=16, tied_head=True)  # rows of 64 and 96: groups of 32
PLAIN = MlxTarget(ODD, chunk=3)
QUANTIZED = {bits: MlxTarget(EVEN, MlxOptions(bits=bits, group=32)) for bits in (4, 8)}


class TestFloat32(TargetConformance):
    subject = Subject(PLAIN, Reference(ODD).last, tolerance=2e-3)


class TestFourBits(TargetConformance):
    """Against float64 at the very values that the packed weights stand for."""

    subject = Subject(QUANTIZED[4], Reference(QUANTIZED[4].dequantised_checkpoint()).last, tolerance=2e-3)


class TestEightBits(TargetConformance):
    subject = Subject(QUANTIZED[8], Reference(QUANTIZED[8].dequantised_checkpoint()).last, tolerance=2e-3)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_near_float64_at_the_same_values(dtype):
    """Of logits that spread by about 2; attention of the tiny model is sharp and amplifies rounding."""
    target = MlxTarget(EVEN, MlxOptions(dtype))
    reference = Reference(target.dequantised_checkpoint())
    state, prompt, shape = target.new_state(1, 16), np.array([5, 17, 3, 88]), tree((-1, 0, 0, 1))
    target.prefill(state, np.array([0]), [prompt])
    nodes = np.array([88, 1, 2, 3])
    logits = target.verify(state, np.array([0]), nodes, forest([shape])).logits
    expected = np.array([reference.last([*prompt[:-1], *nodes[shape.path(node)]]) for node in range(4)])
    assert logits.dtype == np.float32 and state.keys[0].dtype == getattr(mlx.library(), dtype)
    assert np.sqrt(np.mean((logits - expected) ** 2)) < {"bfloat16": 0.2, "float16": 0.03}[dtype]


@pytest.mark.parametrize("bits", [4, 8])
def test_quantizing_rounds_to_the_nearest_of_each_groups_steps(bits):
    found = QUANTIZED[bits].dequantised_checkpoint().weights
    for name, tensor in EVEN.weights.items():
        if tensor.ndim == 1:
            assert torch.equal(found[name], tensor)
            continue
        groups, values = (each.reshape(-1, 32) for each in (tensor, found[name]))
        step = (groups.max(1).values - groups.min(1).values) / (2**bits - 1)
        assert ((groups - values).abs().max(1).values <= 1.2 * step).all()
        assert max(len(row.unique()) for row in values) <= 2**bits


@pytest.mark.parametrize("target", [PLAIN, *QUANTIZED.values()], ids=["float32", "4-bit", "8-bit"])
def test_greedy_speculation_is_autoregression(target):
    assert_speculation_equals_autoregression(target, tolerance=1e-3)


def test_the_real_model_is_our_engines():
    checkpoint = load("smollm2-135m-instruct")
    prompt = np.array([1, 4093, 198, 504, 3575, 282, 4649, 314])
    found, expected = (after(each, prompt) for each in (MlxTarget(checkpoint), Transformer(checkpoint, Placement())))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-2)


def test_rows_in_slots_that_are_apart():
    state = PLAIN.new_state(4, 16)
    PLAIN.prefill(state, np.array([3, 0]), [np.array([1, 2, 3]), np.array([4, 5, 6, 7])])
    found = PLAIN.verify(state, np.array([3, 0]), np.array([3, 8, 7]), forest([chain(2), chain(1)]))
    for row, prefix in enumerate([[1, 2, 3], [1, 2, 3, 8], [4, 5, 6, 7]]):
        np.testing.assert_allclose(found.logits[row], Reference(ODD).last(prefix), atol=2e-3)
    assert state.lengths.tolist() == [3, 0, 0, 2]


class TestBadInput:
    def held(self):
        state = PLAIN.new_state(1, 300)
        PLAIN.prefill(state, np.array([0]), [np.array([1, 2, 3])])
        return state

    def unharmed(self, state):
        assert state.lengths.tolist() == [2]
        found = PLAIN.verify(state, np.array([0]), np.array([3]), forest([chain(1)]))
        np.testing.assert_allclose(found.logits[0], Reference(ODD).last([1, 2, 3]), atol=2e-3)

    @pytest.mark.parametrize("token", [-1, 97])
    def test_a_token_of_another_vocabulary(self, token):
        state = self.held()
        with pytest.raises(ValueError, match=f"token {token} is outside the target's vocabulary 0…96"):
            PLAIN.verify(state, np.array([0]), np.array([3, token]), forest([chain(2)]))
        self.unharmed(state)

    def test_context_overflow(self):
        state = self.held()
        with pytest.raises(CacheError, match="position 256 is past the model's context of 256"):
            PLAIN.verify(state, np.array([0]), np.full(255, 3), forest([chain(255)]))
        self.unharmed(state)

    def test_a_path_that_is_none(self):
        state = self.held()
        found = PLAIN.verify(state, np.array([0]), np.array([3, 4, 5]), forest([tree((-1, 0, 0))]))
        with pytest.raises(CacheError, match=r"nodes \[1, 2\] are no path"):
            PLAIN.commit(state, found, [np.array([1, 2])])
        self.unharmed(state)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"dtype": "float64"}, "dtype 'float64': expected one of float32, bfloat16, float16"),
        ({"bits": 3}, "bits 3: expected one of None, 4, 8"),
        ({"group": 48}, "group 48: expected one of 32, 64, 128"),
        ({"device": "tpu"}, "device 'tpu': expected one of None, cpu, gpu"),
    ],
)
def test_bad_options(changes, why):
    with pytest.raises(PlacementError, match=why):
        MlxOptions(**changes)


def test_rows_that_are_no_whole_number_of_groups():
    with pytest.raises(UnsupportedModel, match=r"rows of model\.embed_tokens\.weight have 48 weights, no multiple"):
        MlxTarget(ODD, MlxOptions(bits=4, group=32))


def test_a_gpu_that_is_not_there(monkeypatch):
    monkeypatch.setattr(mlx.library().metal, "is_available", lambda: False)
    with pytest.raises(PlacementError, match="no Metal device"):
        MlxTarget(ODD, MlxOptions(device="gpu"))


def test_a_named_cpu_is_the_same():
    prompt = np.array([5, 17, 3])
    named = MlxTarget(replace(ODD, name="named"), MlxOptions(device="cpu"))
    np.testing.assert_allclose(after(named, prompt), Reference(ODD).last(prompt), atol=2e-3)


def test_a_missing_library_says_what_to_do(monkeypatch):
    mlx.library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "mlx.core", None)
        with pytest.raises(MissingPackage, match="pip install"):
            MlxTarget(ODD)
    assert mlx.library()
