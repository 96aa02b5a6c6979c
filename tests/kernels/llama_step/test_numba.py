"""The compiled decoder step: against the reference in float64, and the same bits in whatever company."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.llama_step.numba import NumbaLlama
from specdec_core.kernels.plan import plan_step
from specdec_core.models.checkpoints import Checkpoint, tiny_llama
from specdec_core.placement import Placement
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.topology import Topology, chain, forest, tree
from tests.llama_reference import Reference
from tests.strategies import topologies

EVEN = tiny_llama(1, hidden_size=48, intermediate_size=96, layers=3, heads=6, kv_heads=2, head_dim=8, vocabulary=97)
ODD = tiny_llama(2, hidden_size=50, intermediate_size=71, layers=3, heads=4, kv_heads=1, head_dim=6, vocabulary=101,
                 tied_head=not EVEN.config.tied_head)  # fmt: skip
BOTH = [EVEN, ODD]
THREADS = [1, 2, 3, 5]
CONTEXT = EVEN.config.context


def build(checkpoint: Checkpoint, threads: int) -> NumbaLlama:
    return NumbaLlama(checkpoint.config, checkpoint.weights, Placement("numba", threads=threads))


ENGINES = {(c.name, threads): build(c, threads) for c in BOTH for threads in THREADS}
REFERENCES = {c.name: Reference(c) for c in BOTH}


def tokens_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 97, count)


class Cached:
    """An engine and a cache, driven by hand."""

    def __init__(self, checkpoint: Checkpoint = EVEN, threads: int = 1, slots: int = 4, capacity: int = 64):
        c = checkpoint.config
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


def assert_close(found: np.ndarray, exact: np.ndarray) -> None:
    """Within float32's rounding, accumulated over the layers."""
    np.testing.assert_allclose(found, exact, rtol=0, atol=2e-5 * np.abs(exact).max())


@pytest.mark.parametrize("checkpoint", BOTH, ids=["even", "odd"])
def test_it_is_the_reference(checkpoint):
    tokens = tokens_of(0, 40)
    logits, features = one_by_one(checkpoint, tokens, features=(0, 2))
    exact = REFERENCES[checkpoint.name]
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
    ENGINES[checkpoint.name, 2] = build(checkpoint, 2)
    logits, _ = Cached(checkpoint, 2).feed(0, tokens)
    assert_close(logits, Reference(checkpoint).logits(tokens))


@settings(max_examples=25)
@given(st.sampled_from(BOTH), st.sampled_from(THREADS), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_any_chunks_have_the_bits_of_single_steps(checkpoint, threads, chunks):
    tokens = tokens_of(sum(chunks), sum(chunks))
    cached = Cached(checkpoint, threads, capacity=128)
    parts = [cached.feed(1, part, features=(1,)) for part in np.split(tokens, np.cumsum(chunks)[:-1])]
    logits, features = one_by_one(checkpoint, tokens, features=(1,))
    np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), logits)
    np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), features)


@settings(max_examples=25)
@given(st.sampled_from(BOTH), st.sampled_from(THREADS), topologies(16), st.integers(0, 40), st.data())
def test_a_tree_and_what_follows_its_commit_have_the_bits_of_single_steps(checkpoint, threads, shape, before, data):
    committed, drafted = tokens_of(before, before), tokens_of(len(shape), len(shape))
    cached = Cached(checkpoint, threads, capacity=128)
    if before:
        cached.feed(2, committed)
    epoch = cached.cache.begin()
    logits, _ = cached.run([(2, drafted, shape)])
    for node in range(len(shape)):
        path = np.concatenate([committed, drafted[shape.path(node)]])
        np.testing.assert_array_equal(logits[node], one_by_one(checkpoint, path)[0][-1])
    kept = shape.path(data.draw(st.integers(0, len(shape) - 1)))
    cached.cache.commit(np.array([2]), [kept], epoch)
    after = cached.feed(2, np.array([5, 6]))[0]
    path = np.concatenate([committed, drafted[kept], [5, 6]])
    np.testing.assert_array_equal(after, one_by_one(checkpoint, path)[0][-2:])


@settings(max_examples=20)
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


@pytest.mark.parametrize("checkpoint", BOTH, ids=["even", "odd"])
@pytest.mark.parametrize("rows", [64, 256])
def test_a_batch_of_many_rows_has_the_bits_of_its_rows(checkpoint, rows):
    shapes: list[Topology] = [chain(1), chain(4), tree((-1, 0, 0, 1, 2, 2))]
    batch = [(slot, tokens_of(slot, len(shapes[slot % 3])), shapes[slot % 3]) for slot in range(rows)]
    together = Cached(checkpoint, 3, slots=rows, capacity=16)
    alone = Cached(checkpoint, slots=rows, capacity=16)
    for each in (together, alone):
        each.cache.keys.normal_(generator=torch.Generator().manual_seed(1))
        each.cache.values.normal_(generator=torch.Generator().manual_seed(2))
        each.cache.lengths[:] = np.arange(rows) % 9
    found = together.run(batch)[0]
    expected = [alone.run([row])[0] for row in batch]
    np.testing.assert_array_equal(found, np.concatenate(expected))


def test_early_exit_is_the_shorter_model_and_only_what_is_asked_for_is_scored():
    tokens, cached = tokens_of(9, 12), Cached(EVEN, 2)
    logits, features = cached.feed(0, tokens[:9], layers=2, scored=None, features=(1,))
    assert logits is None and features.shape == (9, 1, 48)
    logits, features = cached.feed(0, tokens[9:], layers=2, scored=np.array([2, 0]))
    assert features is None
    expected = Reference(EVEN, layers=2).logits(tokens)[[11, 9]]
    assert_close(logits, expected)
    whole = Cached(EVEN)
    np.testing.assert_array_equal(logits, whole.feed(0, tokens, layers=2)[0][[11, 9]])


def test_returned_arrays_are_the_callers_own():
    cached, tokens = Cached(), tokens_of(11, 8)
    first, features = cached.feed(0, tokens[:4], features=(0,))
    kept, kept_features = first.copy(), features.copy()
    cached.feed(0, tokens[4:], features=(0,))
    np.testing.assert_array_equal(first, kept)
    np.testing.assert_array_equal(features, kept_features)


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
        change(Cached())


def test_a_position_beyond_the_context_is_refused():
    cached = Cached(capacity=CONTEXT + 8)
    cached.cache.lengths[0] = CONTEXT
    with pytest.raises(ValueError, match=f"position {CONTEXT}: expected 0…{CONTEXT - 1}"):
        cached.run([(0, np.array([1]), chain(1))])


def test_a_cache_of_another_model_or_type_is_refused():
    cached = Cached()
    cached.cache = RaggedKV(3, 4, 3, 64, 8)
    with pytest.raises(ValueError, match="expected \\[3, slots, 2, capacity, 8\\]"):
        cached.run([(0, np.array([1]), chain(1))])
    cached.cache = RaggedKV(3, 4, 2, 64, 8, torch.float64)
    with pytest.raises(TypeError, match=r"torch\.float64"):
        cached.run([(0, np.array([1]), chain(1))])


def test_weights_that_do_not_fit_the_config_are_named():
    weights = dict(EVEN.weights)
    weights["model.norm.weight"] = torch.ones(47)
    with pytest.raises(ValueError, match=r"model.norm.weight has shape \(47,\): expected \(48,\)"):
        NumbaLlama(EVEN.config, weights, Placement("numba"))
    del weights["model.norm.weight"]
    with pytest.raises(KeyError, match=r"model\.norm\.weight"):
        NumbaLlama(EVEN.config, weights, Placement("numba"))
