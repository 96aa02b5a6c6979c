import numpy as np
import pytest
import torch

from specdec_core.arrays import host
from specdec_core.kernels.llama_step.int8 import Int8Llama
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.targets.transformer import Transformer
from specdec_core.topology import chain, forest, tree
from tests.conformance import Subject, TargetConformance
from tests.kernels.llama_step.forms import Cached
from tests.llama_reference import Reference

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKPOINT = tiny_llama(1)
REFERENCE = Reference(CHECKPOINT)
DOUBLE = Placement(dtype="float64")


class TestFloat64(TargetConformance):
    subject = Subject(Transformer(CHECKPOINT, DOUBLE), REFERENCE.last, tolerance=1e-10)


class TestFloat32(TargetConformance):
    subject = Subject(Transformer(CHECKPOINT, Placement()), REFERENCE.last, tolerance=2e-3)


class TestFloat64Reference(TargetConformance):
    subject = Subject(Transformer(CHECKPOINT, Placement()).float64_reference(), REFERENCE.last, tolerance=1e-10)


class TestTiedHeadInChunks(TargetConformance):
    tied = tiny_llama(2, tied_head=True)
    subject = Subject(Transformer(tied, DOUBLE, chunk=2), Reference(tied).last, tolerance=1e-10)


class TestInt8(TargetConformance):
    """To the bit what the int8 step makes of a whole prefix in one pass."""

    step = Int8Llama(CHECKPOINT.config, CHECKPOINT.weights, Placement("numba"))
    subject = Subject(
        Transformer(CHECKPOINT, Placement("numba", dtype="int8")),
        lambda tokens: Cached(TestInt8.step, 1, 64).run([(0, np.array(tokens), chain(len(tokens)))])[0][-1],
        tolerance=0,
    )


class TestEarlyExit(TargetConformance):
    subject = Subject(Transformer(CHECKPOINT, DOUBLE).early_exit(2), Reference(CHECKPOINT, 2).last, tolerance=1e-10)


PROMPT = np.array([5, 17, 3, 88, 41, 9])


def prefilled(target: Transformer, prompt: np.ndarray = PROMPT):
    state = target.new_state(1, 32)
    return state, target.prefill(state, np.array([0]), [prompt])[0]


@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
def test_any_chunk_of_prefill_gives_the_same_cache_and_features(chunk):
    state, features = prefilled(Transformer(CHECKPOINT, DOUBLE, feature_layers=(0, 2), chunk=chunk))
    whole, expected = prefilled(Transformer(CHECKPOINT, DOUBLE, feature_layers=(0, 2)))
    assert state.lengths.tolist() == [5] and features.shape == (5, 2, 48)
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(state.keys[:, :, :, :5], whole.keys[:, :, :, :5], rtol=0, atol=1e-11)


def test_features_are_the_hidden_states_after_the_layers_asked_for():
    target = Transformer(CHECKPOINT, DOUBLE, feature_layers=(2, 0))
    state, of_prompt = prefilled(target)
    shape = tree((-1, 0, 0, 2))
    found = target.verify(state, np.array([0]), np.array([9, 1, 2, 3]), forest([shape]))
    hidden = REFERENCE.hidden(PROMPT)
    assert target.feature_layers == (0, 2)
    np.testing.assert_allclose(host(of_prompt), hidden[[0, 2], :5].swapaxes(0, 1), atol=1e-10)
    np.testing.assert_allclose(host(found.features[0]), hidden[[0, 2], 5], atol=1e-10)
    np.testing.assert_allclose(host(found.features[3]), REFERENCE.hidden([*PROMPT, 2, 3])[[0, 2], 7], atol=1e-10)


def test_features_are_none_unless_asked_for():
    target = Transformer(CHECKPOINT, DOUBLE)
    state, features = prefilled(target)
    assert features is None
    assert target.verify(state, np.array([0]), PROMPT[-1:], forest([chain(1)])).features is None


def test_early_exit_shares_weights_and_works_on_the_targets_state():
    target = Transformer(CHECKPOINT, DOUBLE)
    view = target.early_exit(1)
    state, _ = prefilled(target)
    found = view.verify(state, np.array([0]), PROMPT[-1:], forest([chain(1)]))
    np.testing.assert_allclose(host(found.logits[0]), Reference(CHECKPOINT, 1).last(PROMPT), atol=1e-10)
    assert view._step is target._step and view.name == f"{target.name}[:1]"
    assert target.layers == 3


@pytest.mark.parametrize("layers", [0, 3, -1])
def test_early_exit_leaves_out_at_least_one_layer(layers):
    with pytest.raises(ValueError, match=f"early exit after {layers} layers: expected 1…2"):
        Transformer(CHECKPOINT, DOUBLE).early_exit(layers)


@pytest.mark.parametrize("layer", [-1, 3])
def test_feature_layers_exist(layer):
    with pytest.raises(ValueError, match=rf"feature layers \[{layer}\]: expected layers in 0…2"):
        Transformer(CHECKPOINT, DOUBLE, feature_layers=(0, layer))


def test_sizes_are_the_checkpoints():
    target = Transformer(CHECKPOINT, DOUBLE)
    assert (target.vocabulary, target.context, target.name) == (97, 256, CHECKPOINT.name)
    assert target.new_state(3, 17).keys.shape == (3, 3, 2, 17, 8)


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16", "float16"])
def test_state_and_logits_have_the_placements_dtype(dtype):
    target = Transformer(CHECKPOINT, Placement(dtype=dtype))
    state, _ = prefilled(target)
    logits = target.verify(state, np.array([0]), PROMPT[-1:], forest([chain(1)])).logits
    assert state.keys.dtype == logits.dtype == target.placement.torch_dtype
