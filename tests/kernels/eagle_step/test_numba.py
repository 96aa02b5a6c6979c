"""The compiled step of a drafter: against torch in float64, and the same bits in whatever company."""

from __future__ import annotations

import dataclasses
import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.eagle_step.numba import NumbaEagle
from specdec_core.kernels.eagle_step.numba_step import eagle_step
from specdec_core.kernels.eagle_step.torch import TorchEagle
from specdec_core.models.eagle_checkpoint import EagleConfig
from specdec_core.placement import Placement
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.topology import Topology, chain, tree
from tests.kernels.eagle_step.test_torch import cuts_of, joined, made, plan_of
from tests.strategies import topologies

pytestmark = pytest.mark.usefixtures("one_thread")

THREADS = [1, 2, 3, 5]


EVEN = made(1, hidden_size=48, intermediate_size=96, heads=6, kv_heads=2, head_dim=8)
ODD = made(2, (0, 1), 37, hidden_size=50, intermediate_size=71, heads=4, kv_heads=1, head_dim=6)
BOTH = {"even": EVEN, "odd": ODD}
ENGINES = {
    (name, threads): NumbaEagle(*eagle, Placement("numba", threads=threads))
    for name, eagle in BOTH.items()
    for threads in THREADS
}
CONTEXT = EVEN[0].context


def inputs(seed: int, nodes: int, config: EagleConfig = EVEN[0]) -> tuple[np.ndarray, np.ndarray]:
    """Embedded tokens and hidden states, `[nodes, H]` each, of very different lengths."""
    random = np.random.default_rng(seed)
    shape = (nodes, config.hidden_size)
    return (0.3 * random.normal(size=shape)).astype(np.float32), (5 * random.normal(size=shape)).astype(np.float32)


class Cached:
    """An engine and a cache, driven by hand."""

    def __init__(self, step: NumbaEagle | TorchEagle = ENGINES["even", 1], slots: int = 4, capacity: int = 64):
        c, dtype = step.config, getattr(step, "dtype", torch.float32)
        self.step, self.cache = step, RaggedKV(1, slots, c.kv_heads, capacity, c.head_dim, dtype)

    def run(self, rows, scored=None):
        """Rows of (slot, (embedded, hidden), tree, first, last) in one pass: logits and hidden states. No commit."""
        embedded, hidden = (np.concatenate([row[1][i][row[3] : row[4]] for row in rows]) for i in (0, 1))
        plan = plan_of([(slot, shape, first, last) for slot, _, shape, first, last in rows], self.cache.lengths)
        scored = np.arange(len(plan.tokens)) if scored is None else scored
        return self.step(plan, self.cache, embedded, hidden, scored)

    def feed(self, slot: int, given, **wanted):
        """Cache a chain: its logits and hidden states."""
        nodes = len(given[0])
        found = self.run([(slot, given, chain(nodes), 0, nodes)], **wanted)
        self.cache.lengths[slot] += nodes
        return found

    def entry(self, slot: int, at: int) -> np.ndarray:
        """Key and value of one cache entry."""
        return np.stack([self.cache.keys[0, slot, :, at], self.cache.values[0, slot, :, at]])


def stacked(parts) -> list[np.ndarray]:
    return [np.concatenate(each) for each in zip(*parts, strict=True)]


def one_by_one(name: str, given):
    """Logits, hidden states and cache entries of a sequence, each node in a pass of its own by one thread."""
    nodes = len(given[0])
    cached = Cached(ENGINES[name, 1], capacity=max(64, nodes))
    parts = [cached.feed(0, tuple(each[i : i + 1] for each in given)) for i in range(nodes)]
    return [*stacked(parts), np.stack([cached.entry(0, at) for at in range(nodes)])]


def assert_close(found, exact) -> None:
    """Within float32's rounding, of the largest number."""
    exact = np.asarray(exact)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


def assert_same(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


SHAPES = {
    "even": EVEN,
    "odd": ODD,
    "wide": made(3, (0, 1, 2), 130, heads=9, kv_heads=3, head_dim=64, hidden_size=144, intermediate_size=300),
    "128": made(4, (0,), 16, heads=2, kv_heads=2, head_dim=128, hidden_size=33, rope_theta=100.0, norm_eps=1e-2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_the_torch_form(name):
    """A prompt in chunks, then trees in parts and chains, in rows of different lengths, committed as they come."""
    config, weights = SHAPES[name]
    numba = Cached(NumbaEagle(config, weights, Placement("numba", threads=2)), capacity=256)
    exact = Cached(TorchEagle(config, weights, Placement(dtype="float64")), capacity=256)
    random = np.random.default_rng(5)

    def both(*rows) -> None:
        for found, expected in zip(numba.run(rows), exact.run(rows), strict=True):
            assert_close(found, expected)
        for found, expected in ((numba.cache.keys, exact.cache.keys), (numba.cache.values, exact.cache.values)):
            assert_close(found, expected)

    def keep(slot: int, path) -> None:
        for each in (numba.cache, exact.cache):
            each.commit(np.array([slot]), [np.array(path)], each.begin())

    for slot, chunks in ((1, (100, 7)), (3, (1, 20))):
        for nodes in chunks:
            both((slot, inputs(random.integers(1000), nodes, config), chain(nodes), 0, nodes))
            keep(slot, range(nodes))
    shape, given = tree((-1, 0, 0, 2, 1, 2, 5, 3)), inputs(6, 8, config)
    other = inputs(7, 8, config)
    both((1, given, shape, 0, 3), (0, other, chain(4), 0, 2), (3, other, shape, 0, 8))
    both((0, other, chain(4), 2, 4), (1, given, shape, 3, 8))
    keep(1, (0, 2, 5, 6))
    keep(0, (0, 1, 2))
    both((0, other, shape, 0, 5), (2, other, chain(1), 0, 1), (1, given, chain(3), 0, 3))


@pytest.mark.parametrize("name", SHAPES)
def test_features_are_projected_as_in_torch(name):
    config, weights = SHAPES[name]
    features = np.random.default_rng(0).normal(size=(9, config.features, config.hidden_size)).astype(np.float32)
    features *= np.geomspace(0.01, 100, config.features, dtype=np.float32)[:, None]
    exact = TorchEagle(config, weights, Placement(dtype="float64")).project(features)
    assert_close(NumbaEagle(config, weights, Placement("numba", threads=2)).project(features), exact)


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("count", [2, 7, 400])
def test_features_of_a_position_have_the_bits_they_have_alone(name, count):
    c = BOTH[name][0]
    features = np.random.default_rng(count).normal(size=(count, c.features, c.hidden_size)).astype(np.float32)
    alone = np.concatenate([ENGINES[name, 1].project(features[i : i + 1]) for i in range(count)])
    for threads in THREADS:
        np.testing.assert_array_equal(ENGINES[name, threads].project(features), alone)


@settings(max_examples=25)
@given(st.sampled_from(list(BOTH)), st.sampled_from(THREADS), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_any_chunks_have_the_bits_of_single_steps(name, threads, chunks):
    nodes = sum(chunks)
    given, cached = inputs(nodes, nodes, BOTH[name][0]), Cached(ENGINES[name, threads], capacity=128)
    cuts = np.cumsum(chunks)[:-1]
    parts = [cached.feed(1, part) for part in zip(*(np.split(each, cuts) for each in given), strict=True)]
    assert_same([*stacked(parts), np.stack([cached.entry(1, at) for at in range(nodes)])], one_by_one(name, given))


@pytest.mark.parametrize("name", BOTH)
def test_a_long_prompt_has_the_bits_of_single_steps(name):
    given = inputs(8, 210, BOTH[name][0])
    found = Cached(ENGINES[name, 3], capacity=210).feed(0, given)
    assert_same(found, one_by_one(name, given)[:2])


@settings(max_examples=30)
@given(
    st.sampled_from(list(BOTH)), st.sampled_from(THREADS), topologies(16), st.integers(0, 40),
    st.lists(st.integers(1, 15), max_size=4), st.data(),
)  # fmt: skip
def test_a_tree_in_any_parts_and_what_follows_have_the_bits_of_single_steps(name, threads, shape, before, cuts, data):
    config = BOTH[name][0]
    committed, given = inputs(before, before, config), inputs(len(shape) + 50, len(shape), config)
    cached = Cached(ENGINES[name, threads], capacity=128)
    if before:
        cached.feed(2, committed)
    epoch = cached.cache.begin()
    found = stacked([cached.run([(2, given, shape, *part)]) for part in cuts_of(len(shape), cuts)])
    for node in range(len(shape)):
        expected = [each[-1] for each in one_by_one(name, joined(committed, given, shape.path(node)))]
        assert_same([found[0][node], found[1][node], cached.entry(2, before + node)], expected)
    kept = shape.path(data.draw(st.integers(0, len(shape) - 1)))
    cached.cache.commit(np.array([2]), [kept], epoch)
    more = inputs(99, 2, config)
    path = joined(joined(committed, given, kept), more, np.arange(2))
    assert_same(cached.feed(2, more), [each[-2:] for each in one_by_one(name, path)[:2]])


@settings(max_examples=20)
@given(
    st.sampled_from(list(BOTH)), st.sampled_from(THREADS),
    st.lists(st.tuples(topologies(8), st.integers(0, 30), st.integers(0, 7)), min_size=2, max_size=6), st.randoms(),
)  # fmt: skip
def test_a_row_has_the_bits_it_has_alone(name, threads, rows, random):
    slots = random.sample(range(8), len(rows))
    together, alone = Cached(ENGINES[name, threads], slots=8), Cached(ENGINES[name, 1], slots=8)
    batch, expected, config = [], [], BOTH[name][0]
    for slot, (shape, length, first) in zip(slots, rows, strict=True):
        given, first = inputs(slot + 10, len(shape), config), min(first, len(shape) - 1)
        for each in (together, alone):
            if length:
                each.feed(slot, inputs(slot, length, config))
            if first:
                each.run([(slot, given, shape, 0, first)])
        batch.append((slot, given, shape, first, len(shape)))
        expected.append(alone.run(batch[-1:]))
    assert_same(together.run(batch), stacked(expected))
    np.testing.assert_array_equal(together.cache.keys, alone.cache.keys)
    np.testing.assert_array_equal(together.cache.values, alone.cache.values)


@pytest.mark.parametrize("name", BOTH)
def test_a_batch_of_many_rows_has_the_bits_of_its_rows(name):
    shapes: list[Topology] = [chain(1), chain(4), tree((-1, 0, 0, 1, 2, 2))]
    rows = [(slot, inputs(slot, 6, BOTH[name][0]), shapes[slot % 3]) for slot in range(128)]
    batch = [(*row, slot % len(row[2]), len(row[2])) for slot, row in enumerate(rows)]
    together, alone = (Cached(ENGINES[name, threads], slots=128, capacity=16) for threads in (3, 1))
    for each in (together, alone):
        each.cache.keys.normal_(generator=torch.Generator().manual_seed(1))
        each.cache.values.normal_(generator=torch.Generator().manual_seed(2))
        each.cache.lengths[:] = np.arange(128) % 9
    assert_same(together.run(batch), stacked([alone.run([row]) for row in batch]))


@pytest.mark.parametrize("scored", [[2], [3, 1], [0, 0], []])
def test_only_the_nodes_asked_for_are_scored_in_that_order(scored):
    for name in BOTH:
        given = inputs(7, 4, BOTH[name][0])
        every, continued = Cached(ENGINES[name, 1]).feed(0, given)
        logits, still = Cached(ENGINES[name, 2]).feed(0, given, scored=np.array(scored, np.int64))
        assert logits.shape == (len(scored), BOTH[name][0].vocabulary)
        assert_same((logits, still), (every[scored], continued))


def test_tokens_are_not_read():
    given, cached = inputs(1, 3), Cached()
    plan = plan_of([(0, chain(3), 0, 3)], cached.cache.lengths)
    expected = cached.step(plan, cached.cache, *given, np.arange(3))
    astray = dataclasses.replace(plan, tokens=np.full(3, 10**9))
    assert_same(cached.step(astray, cached.cache, *given, np.arange(3)), expected)


def test_returned_arrays_are_the_callers_own_and_what_is_given_is_left_as_it_is():
    cached, given = Cached(), inputs(11, 8)
    was = [each.copy() for each in given]
    first = cached.feed(0, given)
    kept = [each.copy() for each in first]
    again = cached.step(plan_of([(1, chain(8), 0, 8)], cached.cache.lengths), cached.cache, *given, np.arange(8))
    assert all(each.flags.c_contiguous and each.dtype == np.float32 for each in again)
    cached.feed(0, inputs(12, 8))
    assert_same((*first, *given), (*kept, *was))


def test_read_only_inputs_are_read_without_compiling_anew():
    given, cached = inputs(11, 8), Cached()
    expected = cached.feed(0, given)
    plan, scored = plan_of([(1, chain(8), 0, 8)], cached.cache.lengths), np.arange(8, dtype=np.int32)
    for each in (*given, plan.slots, plan.committed, plan.depths, plan.nodes, plan.paths, plan.offsets, scored):
        each.flags.writeable = False
    assert_same(cached.step(plan, cached.cache, *given, scored), expected)
    assert len(eagle_step.nopython_signatures) == 1


def test_engines_and_python_threads_do_not_disturb_each_other():
    given = {name: inputs(3, 30, BOTH[name][0]) for name in BOTH}
    expected = {name: one_by_one(name, given[name])[0] for name in BOTH}
    wrong = []

    def call(name):
        for _ in range(5):
            found = Cached(ENGINES[name, 2]).feed(0, given[name])[0]
            if not np.array_equal(found, expected[name]):
                wrong.append(name)

    callers = [threading.Thread(target=call, args=(name,)) for name in [*BOTH, *BOTH]]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert not wrong


# --- the best tokens ----------------------------------------------------------------------------------------------


def of_size(vocabulary: int) -> NumbaEagle:
    return NumbaEagle(*made(1, (0,), vocabulary), Placement("numba", threads=1))


SIZES = {size: of_size(size) for size in (7, 61, 64, 257)}


@settings(max_examples=60)
@given(st.sampled_from(list(SIZES)), st.integers(1, 4), st.integers(1, 20), st.data())
def test_the_best_tokens_are_those_of_a_stable_sort_with_their_log_probabilities(size, rows, count, data):
    count = min(count, size)
    random = np.random.default_rng(data.draw(st.integers(0, 10**6)))
    levels = data.draw(st.sampled_from([1, 2, 5, 10**6]))  # few levels: many ties
    logits = (random.integers(-levels, levels + 1, (rows, size)) * (20 / levels)).astype(np.float32)
    logits[random.random((rows, size)) < data.draw(st.sampled_from([0, 0.5]))] = -np.inf
    logits[:, random.integers(size)] = 1
    exact = logits.astype(np.float64)
    exact -= np.log(np.exp(exact).sum(-1, keepdims=True))
    tokens, found = SIZES[size].best_tokens(logits, count)
    assert tokens.dtype == np.int64 and found.dtype == np.float64
    np.testing.assert_array_equal(tokens, np.argsort(-logits, axis=-1, kind="stable")[:, :count])
    np.testing.assert_allclose(found, np.take_along_axis(exact, tokens, -1), rtol=0, atol=1e-6)


@pytest.mark.parametrize("count", [1, 3, 257])
def test_a_token_that_comes_late_or_all_of_them_are_found(count):
    for logits in (np.arange(257), -np.arange(257)):
        tokens, _ = SIZES[257].best_tokens(logits[None].astype(np.float32), count)
        np.testing.assert_array_equal(tokens[0], np.argsort(-logits)[:count])


def test_large_logits_do_not_overflow():
    logits = np.zeros((1, 61), np.float32)
    logits[0, 5] = 3e4
    tokens, found = SIZES[61].best_tokens(logits, 2)
    assert tokens.tolist() == [[5, 0]] and found.tolist() == [[0, -3e4]]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("wrong", [{0: np.nan}, {-1: np.nan}, {4: np.inf}, dict.fromkeys(range(-7, 250), -np.inf)])
def test_logits_without_a_law_are_refused(size, wrong):
    logits = np.zeros((3, size), np.float32)
    for place, value in wrong.items():
        logits[1, place % size] = value
    with pytest.raises(FloatingPointError, match="row 1 of 3 hold NaN"):
        SIZES[size].best_tokens(logits, 2)


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 62])
def test_more_tokens_than_there_are_cannot_be_asked_for(count):
    with pytest.raises(ValueError, match=rf"the {count} most probable tokens: expected 1…61"):
        SIZES[61].best_tokens(np.zeros((1, 61), np.float32), count)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c, e, h: c.step.project(np.ones((4, 2, 48), np.float32)), ValueError, r"expected \(4, 3, 48\)"),
        (lambda c, e, h: c.step.project(np.ones((4, 3, 48))), TypeError, "features has dtype float64"),
        (lambda c, e, h: c.feed(0, (e[:, :47].copy(), h)), ValueError, r"embedded of shape \(4, 47\)"),
        (lambda c, e, h: c.feed(0, (e, h[:3])), ValueError, r"hidden of shape \(3, 48\): expected \(4, 48\)"),
        (lambda c, e, h: c.feed(0, (e, h.astype(np.float64))), TypeError, "hidden has dtype float64"),
        (lambda c, e, h: c.step.best_tokens(np.zeros((1, 60), np.float32), 1), ValueError, r"expected \(1, 61\)"),
        (lambda c, e, h: c.step.best_tokens(np.zeros((1, 61)), 1), TypeError, "logits has dtype float64"),
        (lambda c, e, h: c.feed(0, (e, h), scored=np.array([4])), ValueError, "scored node 4: expected 0…3"),
        (lambda c, e, h: c.feed(0, (e, h), scored=np.array([-1])), ValueError, "scored node -1"),
        (lambda c, e, h: c.feed(0, inputs(0, 65)), ValueError, "cache entry 64: expected 0…63"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        change(Cached(), *inputs(0, 4))


def test_a_position_beyond_the_context_is_refused():
    cached = Cached(capacity=CONTEXT + 8)
    cached.cache.lengths[0] = CONTEXT - 1
    with pytest.raises(ValueError, match=f"position {CONTEXT}: expected 0…{CONTEXT - 1}"):
        cached.feed(0, inputs(0, 2))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"slots": [0, 0, 0, 4]}, "slot 4: expected 0…3"),
        ({"slots": [0, 0, 0, -1]}, "slot -1"),
        ({"committed": [3, 3, 3, -1]}, "flat node 3 is node 3 of its tree, after -1 entries"),
        ({"nodes": [0, 1, 2, -4]}, "cache entry -1"),
        ({"nodes": [0, 1, 2, -1]}, "flat node 3 is node -1"),
        ({"depths": [0, 1, 2, 4]}, "flat node 3 is node 3 of its tree, after 3 entries, at depth 4"),
        ({"depths": [0, -1, 1, 2]}, "at depth -1"),
        ({"depths": [0, 1, 1, 1]}, r"flat node 3 .* at depth 1 by the path \[0 1 3\]"),
        ({"depths": [0, 1, 1, 2], "paths": [[0], [1], [0], [2]]}, "flat node 2 .* at depth 1"),
        ({"depths": [0, 1, 1, 4], "paths": [[0] * 5, [0] * 5, [0, 2, 0, 0, 0], [0, 1, 2, 0, 3]]}, "at depth 4"),
        ({"paths": [[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, -1, 3]]}, r"flat node 3 .* path \[ ?0 -1  ?3\]"),
        ({"paths": [[0, -1, -1], [0, 1, -1], [0, 2, -1], [0, 9, 3]]}, r"flat node 3 .* path \[0 9 3\]"),
        ({"offsets": [0, 3]}, r"offsets \[0 3\]: expected 0 to 4"),
        ({"offsets": [1, 4]}, r"offsets \[1 4\]"),
        ({"offsets": [0, 5, 4]}, r"offsets \[0 5 4\]"),
        ({"offsets": []}, r"offsets \[\]"),
        ({"slots": [0, 0, 0]}, "a plan of"),
        ({"paths": [[0, -1, -1]]}, "a plan of"),
    ],
)
def test_a_plan_that_would_reach_out_of_bounds_is_refused(change, message):
    cached, given = Cached(), inputs(0, 4)
    cached.cache.lengths[0] = 3
    plan = plan_of([(0, tree((-1, 0, 0, 1)), 0, 4)], cached.cache.lengths)
    changed = {name: np.array(values, getattr(plan, name).dtype) for name, values in change.items()}
    with pytest.raises(ValueError, match=message):
        cached.step(dataclasses.replace(plan, **changed), cached.cache, *given, np.arange(4))


@pytest.mark.parametrize(
    ("cache", "error", "message"),
    [
        (RaggedKV(1, 4, 3, 64, 8), ValueError, r"expected \[1, slots, 2, capacity, 8\]"),
        (RaggedKV(3, 4, 2, 64, 8), ValueError, r"keys \(3, 4, 2, 64, 8\)"),
        (RaggedKV(1, 4, 2, 64, 8, torch.float64), TypeError, r"a cache of torch\.float64"),
    ],
)
def test_a_cache_of_another_model_or_type_is_refused(cache, error, message):
    cached = Cached()
    cached.cache = cache
    with pytest.raises(error, match=message):
        cached.feed(0, inputs(0, 1))


def test_a_cache_that_is_not_whole_or_not_of_one_shape_is_refused():
    cached = Cached()
    cached.cache.values = cached.cache.values[:, :3]
    with pytest.raises(ValueError, match=r"values \(1, 3, 2, 64, 8\)"):
        cached.feed(0, inputs(0, 1))
    cached.cache.values = torch.zeros(1, 4, 2, 8, 64).transpose(3, 4)
    with pytest.raises(TypeError, match="contiguous: False"):
        cached.feed(0, inputs(0, 1))


def test_weights_that_do_not_fit_the_config_are_named():
    config, weights = EVEN
    with pytest.raises(ValueError, match=r"mlp.up_proj.weight has shape \(95, 48\): expected \(96, 48\)"):
        NumbaEagle(
            config, {**weights, "mlp.up_proj.weight": weights["mlp.up_proj.weight"][:95]}, Placement("numba", threads=1)
        )
    without = {name: tensor for name, tensor in weights.items() if name != "head.weight"}
    with pytest.raises(KeyError, match=r"no tensor 'head\.weight'"):
        NumbaEagle(config, without, Placement("numba", threads=1))
