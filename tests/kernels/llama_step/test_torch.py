import numpy as np
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.llama import modeling_llama

from specdec_core.kernels.llama_step.torch import TorchLlama
from specdec_core.kernels.plan import plan_step
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.topology import chain, forest, tree
from tests.llama_reference import Reference
from tests.strategies import topologies

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKPOINT = tiny_llama(4)
REFERENCE = Reference(CHECKPOINT)
DOUBLE = Placement(dtype="float64")
STEP = TorchLlama(CHECKPOINT.config, CHECKPOINT.weights, DOUBLE)
LAYERS = CHECKPOINT.config.layers
EXACT = {"rtol": 0, "atol": 1e-10}


def tokens_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, CHECKPOINT.config.vocabulary, count)


class Cached:
    """A step and its cache, driven by hand."""

    def __init__(self, step: TorchLlama = STEP, slots: int = 4, capacity: int = 48):
        c = step.config
        self.step = step
        self.cache = RaggedKV(c.layers, slots, c.kv_heads, capacity, c.head_dim, step.dtype)

    def run(self, rows, scored=None, layers=LAYERS, features=()):
        """Rows of (slot, tokens, shape) in one pass: logits and features as numpy. Commits nothing."""
        slots, tokens, trees = zip(*rows, strict=True)
        slots = np.array(slots)
        plan = plan_step(np.concatenate(tokens), slots, self.cache.lengths[slots], forest(trees))
        scored = np.arange(len(plan.tokens)) if scored is None else scored
        logits, found = self.step(plan, self.cache, layers=layers, scored=scored, feature_layers=features)
        return logits.double().numpy(), found if found is None else found.double().numpy()

    def feed(self, slot: int, tokens: np.ndarray) -> np.ndarray:
        """Cache a chain of tokens: its logits."""
        logits, _ = self.run([(slot, tokens, chain(len(tokens)))])
        self.cache.lengths[slot] += len(tokens)
        return logits


def test_a_whole_sequence_in_one_pass_is_the_reference():
    tokens = tokens_of(0, 30)
    np.testing.assert_allclose(Cached().feed(0, tokens), REFERENCE.logits(tokens), **EXACT)


@pytest.mark.parametrize(
    "shape",
    [
        {"tied_head": True},
        {"heads": 4, "kv_heads": 4},
        {"heads": 6, "kv_heads": 1},
        {"head_dim": 14, "hidden_size": 40},
        {"rope_theta": 100.0, "norm_eps": 1e-2, "layers": 1},
    ],
    ids=lambda shape: ",".join(shape),
)
def test_any_shape_is_the_reference(shape):
    checkpoint, tokens = tiny_llama(5, **shape), tokens_of(1, 12)
    found = Cached(TorchLlama(checkpoint.config, checkpoint.weights, DOUBLE))
    logits, _ = found.run([(0, tokens, chain(12))], layers=checkpoint.config.layers)
    np.testing.assert_allclose(logits, Reference(checkpoint).logits(tokens), **EXACT)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=8))
def test_any_chunks_of_a_sequence_are_one_pass(chunks):
    tokens, cached = tokens_of(2, sum(chunks)), Cached()
    found = [cached.feed(1, part) for part in np.split(tokens, np.cumsum(chunks)[:-1])]
    np.testing.assert_allclose(np.concatenate(found), REFERENCE.logits(tokens), **EXACT)


@settings(max_examples=15)
@given(topologies(8), st.integers(0, 6), st.integers(0, 10**6))
def test_a_node_of_a_tree_is_the_end_of_its_own_path(shape, cached_tokens, seed):
    cached, before, tokens = Cached(), tokens_of(seed, cached_tokens), tokens_of(seed + 1, len(shape))
    if cached_tokens:
        cached.feed(2, before)
    logits, _ = cached.run([(2, tokens, shape)])
    for node in range(len(shape)):
        np.testing.assert_allclose(logits[node], REFERENCE.last([*before, *tokens[shape.path(node)]]), **EXACT)


@settings(max_examples=15)
@given(st.lists(st.tuples(topologies(6), st.integers(0, 9)), min_size=1, max_size=4), st.randoms())
def test_a_row_of_a_ragged_batch_is_the_row_alone(rows, random):
    slots = random.sample(range(4), len(rows))
    together, alone = Cached(), Cached()
    batch = []
    for slot, (shape, length) in zip(slots, rows, strict=True):
        for each in (together, alone):
            if length:
                each.feed(slot, tokens_of(slot, length))
        batch.append((slot, tokens_of(slot + 10, len(shape)), shape))
    found, _ = together.run(batch)
    expected = np.concatenate([alone.run([row])[0] for row in batch])
    np.testing.assert_allclose(found, expected, **EXACT)


def test_rejected_entries_leave_no_trace():
    cached, tokens = Cached(), tokens_of(3, 10)
    cached.feed(0, tokens[:6])
    cached.run([(0, tokens_of(4, 20), chain(20))])
    np.testing.assert_allclose(cached.feed(0, tokens[6:]), REFERENCE.logits(tokens)[6:], **EXACT)


def test_other_slots_are_left_as_they_are():
    cached = Cached()
    cached.feed(1, tokens_of(5, 6))
    before = cached.cache.keys[:, [0, 1, 3]].clone(), cached.cache.values[:, [0, 1, 3]].clone()
    cached.run([(2, tokens_of(6, 9), chain(9))])
    assert torch.equal(cached.cache.keys[:, [0, 1, 3]], before[0])
    assert torch.equal(cached.cache.values[:, [0, 1, 3]], before[1])


@pytest.mark.parametrize("scored", [[2], [0, 3], [3, 1], [3, 2, 1, 0], [0, 1, 2, 3]])
def test_only_the_nodes_asked_for_are_scored_in_that_order(scored):
    tokens = tokens_of(7, 4)
    logits, _ = Cached().run([(0, tokens, chain(4))], scored=np.array(scored))
    np.testing.assert_allclose(logits, REFERENCE.logits(tokens)[scored], **EXACT)


def test_without_scored_nodes_there_are_no_logits():
    cached, tokens = Cached(), tokens_of(8, 4)
    plan = plan_step(tokens, np.array([0]), np.array([0]), forest([chain(4)]))
    assert STEP(plan, cached.cache, layers=LAYERS, scored=None) == (None, None)
    cached.cache.lengths[0] = 4  # the entries are written all the same
    np.testing.assert_allclose(cached.feed(0, tokens[:1])[0], REFERENCE.last([*tokens, tokens[0]]), **EXACT)


@pytest.mark.parametrize("asked", [(0,), (1, 2), (0, 1, 2)])
def test_features_are_the_residual_stream_after_the_layers(asked):
    tokens = tokens_of(9, 7)
    _, features = Cached().run([(0, tokens, chain(7))], features=asked)
    np.testing.assert_allclose(features, REFERENCE.hidden(tokens)[list(asked)].swapaxes(0, 1), **EXACT)


@pytest.mark.parametrize("layers", [1, 2])
def test_an_early_exit_runs_the_first_layers_only(layers):
    cached, tokens = Cached(), tokens_of(10, 7)
    logits, _ = cached.run([(0, tokens, chain(7))], layers=layers)
    np.testing.assert_allclose(logits, Reference(CHECKPOINT, layers).logits(tokens), **EXACT)
    assert cached.cache.keys[:layers, 0].any() and not cached.cache.keys[layers:].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.6), ("float16", 0.1)])
def test_narrow_dtypes_run_near_the_reference(dtype, tolerance):
    shape = tree((-1, 0, 0, 1, 2))
    cached = Cached(TorchLlama(CHECKPOINT.config, CHECKPOINT.weights, Placement(dtype=dtype)))
    before, tokens = tokens_of(11, 6), tokens_of(12, 5)
    cached.feed(0, before)
    logits, _ = cached.run([(0, tokens, shape)])
    for node in range(5):
        np.testing.assert_allclose(logits[node], REFERENCE.last([*before, *tokens[shape.path(node)]]), atol=tolerance)


# --- transformers -------------------------------------------------------------------------------------------------


def norm_in_float64(self, hidden):
    return self.weight * hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)


def rotary_in_float64(self, x, position_ids):
    head_dim = self.config.head_dim
    powers = torch.arange(0, head_dim, 2, dtype=torch.float64) / head_dim
    angles = position_ids[..., None].double() / self.config.rope_parameters["rope_theta"] ** powers
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_own_llama_agrees(monkeypatch, tied):
    # It computes norms and rotary tables in float32 whatever its dtype: these two are given float64 here.
    monkeypatch.setattr(modeling_llama.LlamaRMSNorm, "forward", norm_in_float64)
    monkeypatch.setattr(modeling_llama.LlamaRotaryEmbedding, "forward", rotary_in_float64)
    checkpoint = tiny_llama(6, tied_head=tied)
    c = checkpoint.config
    config = transformers.LlamaConfig(
        hidden_size=c.hidden_size, intermediate_size=c.intermediate_size, num_hidden_layers=c.layers,
        num_attention_heads=c.heads, num_key_value_heads=c.kv_heads, head_dim=c.head_dim, vocab_size=c.vocabulary,
        max_position_embeddings=c.context, rms_norm_eps=c.norm_eps, tie_word_embeddings=tied,
        rope_parameters={"rope_type": "default", "rope_theta": c.rope_theta},
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).double().eval()
    missing = model.load_state_dict(dict(checkpoint.weights), strict=False).missing_keys
    assert missing == (["lm_head.weight"] if tied else [])
    model.tie_weights()
    tokens = tokens_of(13, 40)
    with torch.inference_mode():
        expected = model(torch.as_tensor(tokens[None])).logits[0].numpy()
    step = TorchLlama(c, checkpoint.weights, DOUBLE)
    np.testing.assert_allclose(Cached(step).feed(0, tokens), expected, **EXACT)
