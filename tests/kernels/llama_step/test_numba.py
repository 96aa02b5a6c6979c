"""The compiled decoder step: against the reference in float64, and the same bits in whatever company."""

import numpy as np
import pytest
import torch

from specdec_core.kernels.llama_step.numba import NumbaLlama
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.topology import chain
from tests.kernels.llama_step.forms import EVEN, Form, SameBits, odd, tokens_of
from tests.llama_reference import Reference

FLOAT32 = Form(NumbaLlama, odd(layers=3))
CONTEXT = EVEN.config.context


def assert_close(found: np.ndarray, exact: np.ndarray) -> None:
    """Within float32's rounding, accumulated over the layers."""
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize("checkpoint", FLOAT32.both.values(), ids=FLOAT32.both)
def test_it_is_the_reference(checkpoint):
    tokens = tokens_of(0, 40)
    logits, features = FLOAT32.one_by_one(checkpoint, tokens, features=(0, 2))
    exact = Reference(checkpoint)
    assert_close(logits, exact.logits(tokens))
    assert_close(features.transpose(1, 0, 2), exact.hidden(tokens)[[0, 2]])


@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 64, "heads": 9, "kv_heads": 3, "hidden_size": 144},
        {"head_dim": 128, "heads": 2, "kv_heads": 2, "hidden_size": 33},
        {"head_dim": 10, "heads": 8, "kv_heads": 1, "layers": 1},
        {"intermediate_size": 1300, "hidden_size": 320, "vocabulary": 1030, "rope_theta": 100.0, "norm_eps": 1e-2},
    ],
    ids=["64", "128", "10", "wide"],
)
def test_any_shape_is_the_reference(shape):
    checkpoint, tokens = tiny_llama(5, **shape), tokens_of(1, 25) % EVEN.config.vocabulary
    logits, _ = FLOAT32.cached(checkpoint, 2).feed(0, tokens)
    assert_close(logits, Reference(checkpoint).logits(tokens))


class TestSameBits(SameBits):
    form = FLOAT32

    def test_early_exit_is_the_shorter_model_and_only_what_is_asked_for_is_scored(self):
        """The shorter model is the reference's, too."""
        super().test_early_exit_is_the_shorter_model_and_only_what_is_asked_for_is_scored()
        tokens, cached = tokens_of(9, 12), FLOAT32.cached(EVEN, 2)
        cached.feed(0, tokens[:9], layers=2, scored=None)
        logits, _ = cached.feed(0, tokens[9:], layers=2, scored=np.array([2, 0]))
        assert_close(logits, Reference(EVEN, layers=2).logits(tokens)[[11, 9]])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda c: c.run([(0, np.array([97]), chain(1))]), r"token 97: expected 0…96, the vocabulary"),
        (lambda c: c.run([(0, np.array([-1]), chain(1))]), r"token -1"),
        (lambda c: c.run([(0, tokens_of(0, 70), chain(70))]), r"cache entry 69: expected 0…63"),
        (lambda c: c.run([(0, tokens_of(0, 2), chain(2))], layers=4), r"layers 4: expected 1…3"),
        (lambda c: c.run([(0, tokens_of(0, 2), chain(2))], features=(3,)), r"feature layers \(3,\)"),
        (lambda c: c.run([(0, tokens_of(0, 2), chain(2))], scored=np.array([2])), r"scored node 2"),
    ],
    ids=["token", "negative token", "entry", "layers", "feature", "scored"],
)
def test_what_would_reach_out_of_bounds_is_refused(change, message):
    with pytest.raises(ValueError, match=message):
        change(FLOAT32.cached())


def test_a_position_beyond_the_context_is_refused():
    cached = FLOAT32.cached(capacity=CONTEXT + 8)
    cached.cache.lengths[0] = CONTEXT
    with pytest.raises(ValueError, match=f"position {CONTEXT}: expected 0…{CONTEXT - 1}"):
        cached.run([(0, np.array([1]), chain(1))])


def test_weights_that_do_not_fit_the_config_are_named():
    weights = dict(EVEN.weights)
    weights["model.norm.weight"] = torch.ones(47)
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(47,\): expected \(48,\)"):
        NumbaLlama(EVEN.config, weights, Placement("numba"))
    del weights["model.norm.weight"]
    with pytest.raises(KeyError, match=r"model\.norm\.weight"):
        NumbaLlama(EVEN.config, weights, Placement("numba"))
