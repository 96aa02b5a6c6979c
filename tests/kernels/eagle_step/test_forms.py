"""What both compiled forms of a drafter's step keep to, float32 and int8: the same bits in whatever company."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.eagle_step.int8 import Int8Eagle
from specdec_core.kernels.eagle_step.int8_step import int8_eagle_step
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

# For int8, broken groups of 32 and whole ones; broken tiles of 16.
EVEN = made(1, hidden_size=48, intermediate_size=96, heads=6, kv_heads=2, head_dim=8)
ODD = made(2, (0, 1), 37, hidden_size=50, intermediate_size=71, heads=4, kv_heads=1, head_dim=6)
BOTH = {"even": EVEN, "odd": ODD}
# For int8, groups of 64, several of them in all widths, and more than one unit of gates; joined is far wider than
# queries.
WIDE = made(3, (0, 1), 130, hidden_size=128, intermediate_size=704, heads=4, kv_heads=2, head_dim=32)


def inputs(seed: int, nodes: int, config: EagleConfig = EVEN[0]) -> tuple[np.ndarray, np.ndarray]:
    """Embedded tokens and hidden states, `[nodes, H]` each, of very different lengths."""
    random = np.random.default_rng(seed)
    shape = (nodes, config.hidden_size)
    return (0.3 * random.normal(size=shape)).astype(np.float32), (5 * random.normal(size=shape)).astype(np.float32)


class Cached:
    """An engine and a cache, driven by hand."""

    def __init__(self, step: NumbaEagle | TorchEagle, slots: int = 4, capacity: int = 64):
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


class Form:
    """A class of engines, the compiled step that they run, and engines of both drafters."""

    def __init__(self, engine: type[NumbaEagle], compiled):
        self.engine, self.compiled = engine, compiled
        self.engines = {(name, threads): self.build(BOTH[name], threads) for name in BOTH for threads in THREADS}

    def build(self, eagle, threads: int = 1) -> NumbaEagle:
        """An engine of a config and weights."""
        return self.engine(*eagle, Placement("numba", threads=threads))

    def cached(self, name: str = "even", threads: int = 1, slots: int = 4, capacity: int = 64) -> Cached:
        return Cached(self.engines[name, threads], slots, capacity)

    def one_by_one(self, name: str, given) -> list[np.ndarray]:
        """Logits, hidden states and cache entries of a sequence, each node in a pass of its own by one thread."""
        nodes = len(given[0])
        cached = self.cached(name, capacity=max(64, nodes))
        parts = [cached.feed(0, tuple(each[i : i + 1] for each in given)) for i in range(nodes)]
        return [*stacked(parts), np.stack([cached.entry(0, at) for at in range(nodes)])]


FLOAT32, INT8 = Form(NumbaEagle, eagle_step), Form(Int8Eagle, int8_eagle_step)
FORMS = {"float32": FLOAT32, "int8": INT8}
in_every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)


def assert_same(found, expected) -> None:
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b)


@in_every_form
@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("count", [2, 7, 400])
def test_features_of_a_position_have_the_bits_they_have_alone(form, name, count):
    c = BOTH[name][0]
    features = np.random.default_rng(count).normal(size=(count, c.features, c.hidden_size)).astype(np.float32)
    alone = np.concatenate([form.engines[name, 1].project(features[i : i + 1]) for i in range(count)])
    for threads in THREADS:
        np.testing.assert_array_equal(form.engines[name, threads].project(features), alone)


@in_every_form
@settings(max_examples=25)
@given(st.sampled_from(list(BOTH)), st.sampled_from(THREADS), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_any_chunks_have_the_bits_of_single_steps(form, name, threads, chunks):
    nodes = sum(chunks)
    given, cached = inputs(nodes, nodes, BOTH[name][0]), form.cached(name, threads, capacity=128)
    cuts = np.cumsum(chunks)[:-1]
    parts = [cached.feed(1, part) for part in zip(*(np.split(each, cuts) for each in given), strict=True)]
    assert_same([*stacked(parts), np.stack([cached.entry(1, at) for at in range(nodes)])], form.one_by_one(name, given))


@in_every_form
@pytest.mark.parametrize("name", BOTH)
def test_a_long_prompt_has_the_bits_of_single_steps(form, name):
    """More rows than one unit of work takes."""
    given = inputs(8, 210, BOTH[name][0])
    found = form.cached(name, 3, capacity=210).feed(0, given)
    assert_same(found, form.one_by_one(name, given)[:2])


@in_every_form
@settings(max_examples=30)
@given(
    st.sampled_from(list(BOTH)), st.sampled_from(THREADS), topologies(16), st.integers(0, 40),
    st.lists(st.integers(1, 15), max_size=4), st.data(),
)  # fmt: skip
def test_a_tree_in_any_parts_and_what_follows_have_the_bits_of_single_steps(
    form, name, threads, shape, before, cuts, data
):
    config = BOTH[name][0]
    committed, given = inputs(before, before, config), inputs(len(shape) + 50, len(shape), config)
    cached = form.cached(name, threads, capacity=128)
    if before:
        cached.feed(2, committed)
    epoch = cached.cache.begin()
    found = stacked([cached.run([(2, given, shape, *part)]) for part in cuts_of(len(shape), cuts)])
    for node in range(len(shape)):
        expected = [each[-1] for each in form.one_by_one(name, joined(committed, given, shape.path(node)))]
        assert_same([found[0][node], found[1][node], cached.entry(2, before + node)], expected)
    kept = shape.path(data.draw(st.integers(0, len(shape) - 1)))
    cached.cache.commit(np.array([2]), [kept], epoch)
    more = inputs(99, 2, config)
    path = joined(joined(committed, given, kept), more, np.arange(2))
    assert_same(cached.feed(2, more), [each[-2:] for each in form.one_by_one(name, path)[:2]])


@in_every_form
@settings(max_examples=20)
@given(
    st.sampled_from(list(BOTH)), st.sampled_from(THREADS),
    st.lists(st.tuples(topologies(8), st.integers(0, 30), st.integers(0, 7)), min_size=2, max_size=6), st.randoms(),
)  # fmt: skip
def test_a_row_has_the_bits_it_has_alone(form, name, threads, rows, random):
    slots = random.sample(range(8), len(rows))
    together, alone = form.cached(name, threads, slots=8), form.cached(name, 1, slots=8)
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


@pytest.mark.parametrize(
    ("form", "eagle"),
    [(FLOAT32, EVEN), (FLOAT32, ODD), (INT8, EVEN), (INT8, ODD), (INT8, WIDE)],
    ids=["float32-even", "float32-odd", "int8-even", "int8-odd", "int8-wide"],
)
def test_a_batch_of_many_rows_has_the_bits_of_its_rows(form, eagle):
    shapes: list[Topology] = [chain(1), chain(4), tree((-1, 0, 0, 1, 2, 2))]
    rows = [(slot, inputs(slot, 6, eagle[0]), shapes[slot % 3]) for slot in range(128)]
    batch = [(*row, slot % len(row[2]), len(row[2])) for slot, row in enumerate(rows)]
    together, alone = (Cached(form.build(eagle, threads), slots=128, capacity=16) for threads in (3, 1))
    for each in (together, alone):
        each.cache.keys.normal_(generator=torch.Generator().manual_seed(1))
        each.cache.values.normal_(generator=torch.Generator().manual_seed(2))
        each.cache.lengths[:] = np.arange(128) % 9
    assert_same(together.run(batch), stacked([alone.run([row]) for row in batch]))


@in_every_form
@pytest.mark.parametrize("scored", [[2], [3, 1], [0, 0], []])
def test_only_the_nodes_asked_for_are_scored_in_that_order(form, scored):
    for name in BOTH:
        given = inputs(7, 4, BOTH[name][0])
        every, continued = form.cached(name, 1).feed(0, given)
        logits, still = form.cached(name, 2).feed(0, given, scored=np.array(scored, np.int64))
        assert logits.shape == (len(scored), BOTH[name][0].vocabulary)
        assert_same((logits, still), (every[scored], continued))


@in_every_form
def test_returned_arrays_are_the_callers_own_and_what_is_given_is_left_as_it_is(form):
    cached, given = form.cached(), inputs(11, 8)
    was = [each.copy() for each in given]
    first = cached.feed(0, given)
    kept = [each.copy() for each in first]
    again = cached.step(plan_of([(1, chain(8), 0, 8)], cached.cache.lengths), cached.cache, *given, np.arange(8))
    assert all(each.flags.c_contiguous and each.dtype == np.float32 for each in again)
    cached.feed(0, inputs(12, 8))
    assert_same((*first, *given), (*kept, *was))


@in_every_form
def test_read_only_inputs_are_read_without_compiling_anew(form):
    given, cached = inputs(11, 8), form.cached()
    expected = cached.feed(0, given)
    plan, scored = plan_of([(1, chain(8), 0, 8)], cached.cache.lengths), np.arange(8, dtype=np.int32)
    for each in (*given, plan.slots, plan.committed, plan.depths, plan.nodes, plan.paths, plan.offsets, scored):
        each.flags.writeable = False
    assert_same(cached.step(plan, cached.cache, *given, scored), expected)
    assert len(form.compiled.nopython_signatures) == 1


@in_every_form
def test_engines_and_python_threads_do_not_disturb_each_other(form):
    given = {name: inputs(3, 30, BOTH[name][0]) for name in BOTH}
    expected = {name: form.one_by_one(name, given[name])[0] for name in BOTH}
    wrong = []

    def call(name):
        for _ in range(5):
            found = form.cached(name, 2).feed(0, given[name])[0]
            if not np.array_equal(found, expected[name]):
                wrong.append(name)

    callers = [threading.Thread(target=call, args=(name,)) for name in [*BOTH, *BOTH]]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert not wrong


# --- errors -------------------------------------------------------------------------------------------------------


@in_every_form
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c, e, h: c.step.project(np.ones((4, 2, 48), np.float32)), ValueError, r"expected \(4, 3, 48\)"),
        (lambda c, e, h: c.step.project(np.ones((4, 3, 48))), TypeError, "features has dtype float64"),
        (lambda c, e, h: c.feed(0, (e[:, :47].copy(), h)), ValueError, r"embedded of shape \(4, 47\)"),
        (lambda c, e, h: c.feed(0, (e, h[:3])), ValueError, r"hidden of shape \(3, 48\): expected \(4, 48\)"),
        (lambda c, e, h: c.feed(0, (e, h.astype(np.float64))), TypeError, "hidden has dtype float64"),
        (lambda c, e, h: c.step.best_tokens(np.zeros((1, 60), np.float32), 1), ValueError, r"expected \(1, 61\)"),
        (lambda c, e, h: c.feed(0, (e, h), scored=np.array([4])), ValueError, "scored node 4: expected 0…3"),
        (lambda c, e, h: c.feed(0, inputs(0, 65)), ValueError, "cache entry 64: expected 0…63"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(form, change, error, message):
    with pytest.raises(error, match=message):
        change(form.cached(), *inputs(0, 4))


@in_every_form
@pytest.mark.parametrize(
    ("cache", "error", "message"),
    [
        (RaggedKV(1, 4, 3, 64, 8), ValueError, r"expected \[1, slots, 2, capacity, 8\]"),
        (RaggedKV(1, 4, 2, 64, 8, torch.float64), TypeError, r"a cache of torch\.float64"),
    ],
)
def test_a_cache_of_another_model_or_type_is_refused(form, cache, error, message):
    cached = form.cached()
    cached.cache = cache
    with pytest.raises(error, match=message):
        cached.feed(0, inputs(0, 1))
