"""The compiled step with int8 weights: against a float64 step with quantized factors, and the same bits in whatever
company."""

import dataclasses
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.llama_step.int8 import Int8Llama
from specdec_core.kernels.plan import plan_step
from specdec_core.kernels.skinny_linear.int8 import dequantize, quantize
from specdec_core.models.checkpoints import Checkpoint, tiny_llama
from specdec_core.placement import Placement
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.topology import Topology, chain, forest, tree
from tests.llama_reference import Reference
from tests.strategies import topologies

pytestmark = pytest.mark.usefixtures("one_thread")

# Broken groups of 32 and whole ones; broken tiles of 16; a tied head and one of its own.
EVEN = tiny_llama(1, hidden_size=48, intermediate_size=96, layers=3, heads=6, kv_heads=2, head_dim=8, vocabulary=97)
ODD = tiny_llama(2, hidden_size=50, intermediate_size=71, layers=2, heads=4, kv_heads=1, head_dim=6, vocabulary=101,
                 tied_head=not EVEN.config.tied_head)  # fmt: skip
# Groups of 64, several of them in all widths, and more than one unit of gates.
WIDE = tiny_llama(3, hidden_size=128, intermediate_size=704, layers=2, heads=6, kv_heads=2, head_dim=32)
MANY_GROUPS = tiny_llama(4, hidden_size=70, intermediate_size=1100, layers=1, heads=5, kv_heads=5, head_dim=26)
BOTH = [EVEN, ODD]
THREADS = [1, 2, 3, 5]
CONTEXT = EVEN.config.context
IN_DOUBT = 1e-4
"""Where float32's error may turn a rounding the other way: so near, in steps of a group, to the middle of two."""


def build(checkpoint: Checkpoint, threads: int) -> Int8Llama:
    return Int8Llama(checkpoint.config, checkpoint.weights, Placement("numba", threads=threads))


ENGINES = {(c.name, threads): build(c, threads) for c in BOTH for threads in THREADS}


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


def tokens_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 97, count)


class Cached:
    """An engine and a cache, driven by hand."""

    def __init__(self, checkpoint: Checkpoint = EVEN, threads: int = 1, slots: int = 4, capacity: int = 64):
        c = checkpoint.config
        if (checkpoint.name, threads) not in ENGINES:
            ENGINES[checkpoint.name, threads] = build(checkpoint, threads)
        self.step, self.layers = ENGINES[checkpoint.name, threads], c.layers
        self.cache = RaggedKV(c.layers, slots, c.kv_heads, capacity, c.head_dim)

    def run(self, rows, scored="all", layers=None, features=()):
        """Rows of (slot, tokens, shape) in one pass: logits and features. Commits nothing."""
        slots, tokens, trees = zip(*rows, strict=True)
        slots = np.array(slots)
        plan = plan_step(np.concatenate(tokens), slots, self.cache.lengths[slots], forest(trees))
        scored = np.arange(len(plan.tokens)) if isinstance(scored, str) else scored
        return self.step(plan, self.cache, layers=layers or self.layers, scored=scored, feature_layers=features)

    def feed(self, slot: int, tokens: np.ndarray, **wanted):
        """Cache a chain of tokens: its logits and features."""
        found = self.run([(slot, tokens, chain(len(tokens)))], **wanted)
        self.cache.lengths[slot] += len(tokens)
        return found


def one_by_one(checkpoint: Checkpoint, tokens, **wanted):
    """Logits and features of every token of a sequence, each computed in a pass of its own by one thread."""
    cached = Cached(checkpoint, capacity=max(64, len(tokens)))
    parts = [cached.feed(0, tokens[i : i + 1], **wanted) for i in range(len(tokens))]
    logits, features = zip(*parts, strict=True)
    return np.concatenate(logits), features[0] if features[0] is None else np.concatenate(features)


def errors(found: np.ndarray, exact: np.ndarray) -> np.ndarray:
    """Of each row, relative to the largest number of all."""
    return np.abs(found - exact).reshape(len(found), -1).max(1) / np.abs(exact).max()


@pytest.mark.parametrize("checkpoint", [EVEN, ODD, WIDE, MANY_GROUPS], ids=["even", "odd", "wide", "many groups"])
def test_it_is_the_reference_with_quantized_factors(checkpoint):
    """Within float32's rounding, unless a rounding to a step is in doubt: then within what some steps can do."""
    sequences = [tokens_of(seed, 4) for seed in range(12)]
    cached, exact = Cached(checkpoint, 2, slots=12, capacity=8), QuantizedReference(checkpoint)
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
        cached, before, drafted = Cached(ODD, 3), tokens_of(seed, 2), tokens_of(seed + 100, 7)
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
    found, _ = Cached(WIDE).feed(0, tokens)
    error = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert 0.002 < np.median(error) < 0.15


@settings(max_examples=20)
@given(st.sampled_from(BOTH), st.sampled_from(THREADS), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_any_chunks_have_the_bits_of_single_steps(checkpoint, threads, chunks):
    tokens = tokens_of(sum(chunks), sum(chunks))
    cached = Cached(checkpoint, threads, capacity=128)
    parts = [cached.feed(1, part, features=(1,)) for part in np.split(tokens, np.cumsum(chunks)[:-1])]
    logits, features = one_by_one(checkpoint, tokens, features=(1,))
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), logits)
    np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), features)


@settings(max_examples=20)
@given(st.sampled_from(BOTH), st.sampled_from(THREADS), topologies(16), st.integers(0, 40), st.data())
def test_a_tree_and_what_follows_its_commit_have_the_bits_of_single_steps(checkpoint, threads, shape, before, data):
    committed, drafted = tokens_of(before, before), tokens_of(len(shape), len(shape))
    cached = Cached(checkpoint, threads, capacity=128)
    if before:
        cached.feed(2, committed)
    epoch = cached.cache.begin()
    logits, _ = cached.run([(2, drafted, shape)])
    leaf = data.draw(st.integers(0, len(shape) - 1))
    path = np.concatenate([committed, drafted[shape.path(leaf)]])
    expected = one_by_one(checkpoint, np.concatenate([path, [5, 6]]))[0]
    np.testing.assert_array_equal(logits[shape.path(leaf)], expected[before:-2])
    cached.cache.commit(np.array([2]), [shape.path(leaf)], epoch)
    np.testing.assert_array_equal(cached.feed(2, np.array([5, 6]))[0], expected[-2:])


@settings(max_examples=15)
@given(
    st.sampled_from(BOTH), st.sampled_from(THREADS),
    st.lists(st.tuples(topologies(8), st.integers(0, 30)), min_size=2, max_size=6), st.randoms(),
)  # fmt: skip
def test_a_row_has_the_bits_it_has_alone(checkpoint, threads, rows, random):
    slots = random.sample(range(8), len(rows))
    together = Cached(checkpoint, threads, slots=8)
    batch, expected = [], []
    for slot, (shape, length) in zip(slots, rows, strict=True):
        alone, tokens = Cached(checkpoint, slots=8), tokens_of(slot + 10, len(shape))
        if length:
            together.feed(slot, tokens_of(slot, length))
            alone.feed(slot, tokens_of(slot, length))
        batch.append((slot, tokens, shape))
        expected.append(alone.run([(slot, tokens, shape)])[0])
    np.testing.assert_array_equal(together.run(batch)[0], np.concatenate(expected))


@pytest.mark.parametrize("checkpoint", [*BOTH, WIDE], ids=["even", "odd", "wide"])
@pytest.mark.parametrize("rows", [64, 256])
def test_a_batch_of_many_rows_has_the_bits_of_its_rows(checkpoint, rows):
    """More rows than one unit of work takes; a sample of them computed alone."""
    shapes: list[Topology] = [chain(1), chain(4), tree((-1, 0, 0, 1, 2, 2))]
    batch = [(slot, tokens_of(slot, len(shapes[slot % 3])), shapes[slot % 3]) for slot in range(rows)]
    together = Cached(checkpoint, 3, slots=rows, capacity=16)
    alone = Cached(checkpoint, slots=rows, capacity=16)
    for each in (together, alone):
        each.cache.keys.normal_(generator=torch.Generator().manual_seed(1))
        each.cache.values.normal_(generator=torch.Generator().manual_seed(2))
        each.cache.lengths[:] = np.arange(rows) % 9
    found = np.split(together.run(batch)[0], np.cumsum([len(shape) for _, _, shape in batch])[:-1])
    for slot in range(0, rows, 7):
        np.testing.assert_array_equal(found[slot], alone.run([batch[slot]])[0])


def test_early_exit_is_the_shorter_model_and_only_what_is_asked_for_is_scored():
    tokens, cached = tokens_of(9, 12), Cached(EVEN, 2)
    logits, features = cached.feed(0, tokens[:9], layers=2, scored=None, features=(1, 0))
    assert logits is None and features.shape == (9, 2, 48)
    scored = np.array([2, 0, 2, 2, 1])  # more of them than nodes
    logits, none = cached.feed(0, tokens[9:], layers=2, scored=scored)
    assert none is None
    whole = Cached(EVEN)
    expected, kept = whole.feed(0, tokens, layers=2, features=(0, 1))
    np.testing.assert_array_equal(logits, expected[9 + scored])
    np.testing.assert_array_equal(features[:, ::-1], kept[:9])
    shorter = dataclasses.replace(EVEN, name="shorter", config=dataclasses.replace(EVEN.config, layers=2))
    np.testing.assert_array_equal(expected, Cached(shorter).feed(0, tokens)[0])


def test_a_node_may_be_scored_more_often_than_there_are_nodes():
    """Compiled code checks no bounds, so whether there was room for it is looked up."""
    fresh = dataclasses.replace(EVEN, name="fresh")
    cached = Cached(fresh)
    logits, _ = cached.feed(0, np.array([3]), scored=np.zeros(40, np.int64))
    np.testing.assert_array_equal(logits, np.repeat(one_by_one(EVEN, np.array([3]))[0], 40, axis=0))
    assert cached.step._rows.inputs.size >= 40 * cached.step._matrices.hidden.step


def test_a_row_that_is_not_finite_harms_no_other():
    weights = {name: tensor.clone() for name, tensor in EVEN.weights.items()}
    assert not EVEN.config.tied_head
    weights["model.embed_tokens.weight"][50, 3] = float("nan")
    bad = dataclasses.replace(EVEN, name="bad", weights=weights)
    batch = [(slot, np.array([7, 8 + slot]), chain(2)) for slot in range(4)]
    expected = Cached(EVEN, 2).run(batch)[0]
    batch[2] = (2, np.array([7, 50]), chain(2))
    found = Cached(bad, 2).run(batch)[0]
    assert np.isnan(found[5]).all()
    np.testing.assert_array_equal(np.delete(found, 5, 0), np.delete(expected, 5, 0))


def test_returned_arrays_are_the_callers_own():
    cached, tokens = Cached(), tokens_of(11, 8)
    first, features = cached.feed(0, tokens[:4], features=(0,))
    kept, kept_features = first.copy(), features.copy()
    cached.feed(0, tokens[4:], features=(0,))
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(features, kept_features)
    assert first.dtype == features.dtype == np.float32 and first.shape == (4, 97) and first.flags.c_contiguous


def test_engines_and_python_threads_do_not_disturb_each_other():
    expected = {c.name: one_by_one(c, tokens_of(3, 30))[0] for c in BOTH}
    wrong = []

    def call(checkpoint):
        for _ in range(5):
            found = Cached(checkpoint, 2).feed(0, tokens_of(3, 30))[0]
            if not np.array_equal(found, expected[checkpoint.name]):
                wrong.append(checkpoint.name)

    callers = [threading.Thread(target=call, args=(BOTH[i % 2],)) for i in range(4)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert not wrong


def test_what_would_reach_out_of_bounds_is_refused():
    """The checks are the float32 step's, which its own tests try one by one: here, that they are made."""
    for change, message in (
        ({"rows": [(0, np.array([97]), chain(1))]}, r"token 97: expected 0…96"),
        ({"layers": 4}, r"layers 4: expected 1…3"),
        ({"features": (3,)}, r"feature layers \(3,\)"),
        ({"scored": np.array([2])}, r"scored node 2"),
    ):
        with pytest.raises(ValueError, match=message):
            Cached().run(**{"rows": [(0, tokens_of(0, 2), chain(2))], **change})


def test_the_cache_must_be_float32():
    cached = Cached()
    cached.cache = RaggedKV(3, 4, 2, 64, 8, torch.float64)
    with pytest.raises(TypeError, match=r"torch\.float64"):
        cached.run([(0, np.array([1]), chain(1))])


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
        Cached(dataclasses.replace(each, name=name)).feed(0, tokens)[0]
        for name, each in (("bfloat16", halves), ("float32", same))
    )
    np.testing.assert_array_equal(found, expected)
