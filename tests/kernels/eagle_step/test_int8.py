"""The compiled step of a drafter with int8 weights: against a float64 step with quantized factors, and the same bits in
whatever company."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.eagle_step.int8 import Int8Eagle
from specdec_core.kernels.eagle_step.int8_step import int8_eagle_step
from specdec_core.kernels.simd import padded
from specdec_core.kernels.skinny_linear.int8 import dequantize, quantize
from specdec_core.placement import Placement
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.topology import Topology, chain, tree
from tests.kernels.eagle_step import test_numba as float32
from tests.kernels.eagle_step.test_numba import assert_same, inputs, stacked
from tests.kernels.eagle_step.test_torch import ByHand, cuts_of, joined, made, plan_of
from tests.strategies import topologies

pytestmark = pytest.mark.usefixtures("one_thread")

# Broken groups of 32 and whole ones; broken tiles of 16.
EVEN, ODD = float32.EVEN, float32.ODD
BOTH = {"even": EVEN, "odd": ODD}
SHAPES = {
    **BOTH,
    # Groups of 64, several of them in all widths, and more than one unit of gates; joined is far wider than queries.
    "wide": made(3, (0, 1), 130, hidden_size=128, intermediate_size=704, heads=4, kv_heads=2, head_dim=32),
    # The input of o is the widest.
    "heads": made(4, (0,), 16, heads=2, kv_heads=2, head_dim=128, hidden_size=33, rope_theta=100.0, norm_eps=1e-2),
    "many groups": made(5, (0, 1, 2), 37, hidden_size=70, intermediate_size=1100, heads=5, kv_heads=5, head_dim=26),
}
THREADS = [1, 2, 3, 5]
CERTAIN = 2e-5
"""Error, of the largest number, where no rounding to a step was in doubt: float32's."""
IN_DOUBT = 1e-4
"""Where float32's error may turn a rounding the other way: so near, in steps of a group, to the middle of two."""


def build(name: str, threads: int) -> Int8Eagle:
    return Int8Eagle(*SHAPES[name], Placement("numba", threads=threads))


ENGINES = {(name, threads): build(name, threads) for name in BOTH for threads in THREADS}


class Cached(float32.Cached):
    """An engine and a cache, driven by hand."""

    def __init__(self, step: Int8Eagle = ENGINES["even", 1], slots: int = 4, capacity: int = 64):
        super().__init__(step, slots, capacity)


def one_by_one(name: str, given):
    """Logits, hidden states and cache entries of a sequence, each node in a pass of its own by one thread."""
    nodes = len(given[0])
    cached = Cached(ENGINES[name, 1], capacity=max(64, nodes))
    parts = [cached.feed(0, tuple(each[i : i + 1] for each in given)) for i in range(nodes)]
    return [*stacked(parts), np.stack([cached.entry(0, at) for at in range(nodes)])]


class QuantizedMatrix:
    """A weight `[out, in]` and what it is multiplied with, both quantized, in `parts` of so many inputs each."""

    def __init__(self, hand: QuantizedByHand, weight: np.ndarray, parts: int = 1, room: int | None = None):
        self.hand, self.parts, self.room = hand, parts, room or weight.shape[1] // parts
        self.weights = [dequantize(*quantize(part.astype(np.float32))) for part in self.apart(weight)]

    def apart(self, values: np.ndarray) -> list[np.ndarray]:
        parts = np.split(np.atleast_2d(values), self.parts, axis=1)
        return [np.pad(part, ((0, 0), (0, self.room - part.shape[1]))) for part in parts]

    def __matmul__(self, x: np.ndarray) -> np.ndarray:
        pairs = zip(self.weights, self.apart(x), strict=True)
        return sum(weight.astype(np.float64) @ self.hand.quantized(part[0]) for weight, part in pairs)


class Joined(QuantizedMatrix):
    """The same where the parts, padded, lie side by side in one row."""

    def apart(self, values: np.ndarray) -> list[np.ndarray]:
        return [np.concatenate(super().apart(values), axis=1)]


class QuantizedByHand(ByHand):
    """The equations with dequantized weights, and with the input of every product quantized and dequantized."""

    def __init__(self, config, weights):
        super().__init__(config, weights)
        self.distance = np.inf
        for name, weight in list(self.w.items()):
            if name == "fc":
                self.w[name] = Joined(self, weight, config.features, padded(config.hidden_size))
            elif weight.ndim == 2:
                self.w[name] = QuantizedMatrix(self, weight, 2 if name[-6:] in ("q_proj", "k_proj", "v_proj") else 1)

    def certain(self) -> bool:
        """Whether no rounding was in doubt since this was last asked."""
        distance, self.distance = self.distance, np.inf
        return distance > IN_DOUBT

    def quantized(self, x: np.ndarray) -> np.ndarray:
        group, parts = 64 if len(x) % 64 == 0 else 32, []
        for first in range(0, len(x), group):
            part = x[first : first + group]
            step = np.abs(part).max() / 127
            steps = part / step
            self.distance = min(self.distance, np.abs(steps - np.floor(steps) - 0.5).min())
            parts.append(np.rint(steps) * step)
        return np.concatenate(parts)


def errors(found, exact) -> np.ndarray:
    """Of each row, relative to the largest number of all."""
    found, exact = np.asarray(found), np.asarray(exact)
    return np.abs(found - exact).reshape(len(exact), -1).max(1) / np.abs(exact).max()


def assert_quantized(found, exact, certain) -> None:
    """Within float32's rounding, unless a rounding to a step is in doubt: then within what some steps can do."""
    error = errors(found, exact)
    assert np.sum(certain) >= 10
    assert error[np.array(certain)].max() < CERTAIN
    assert error.max() < 0.05


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_the_step_with_quantized_factors(name):
    """After prompts of different lengths, trees in two parts; then a node after a commit."""
    config, weights = SHAPES[name]
    hand, cached = QuantizedByHand(config, weights), Cached(build(name, 2), slots=8, capacity=16)
    shape, certain, exact, found = tree((-1, 0, 0, 1, 2, 4)), [], [], []
    drafted = [inputs(slot + 40, 6, config) for slot in range(8)]
    before = [inputs(slot, slot % 3, config) for slot in range(8)]
    for slot in range(8):
        if len(before[slot][0]):
            cached.feed(slot, before[slot])
    parts = [cached.run([(slot, drafted[slot], shape, *part) for slot in range(8)]) for part in ((0, 2), (2, 6))]
    for slot in range(8):
        for node in range(6):
            part, at = (0, 2 * slot + node) if node < 2 else (1, 4 * slot + node - 2)
            found.append([*(each[at] for each in parts[part]), *cached.entry(slot, slot % 3 + node)])
            exact.append(hand.last(*joined(before[slot], drafted[slot], shape.path(node))))
            certain.append(hand.certain())
    for each in zip(zip(*found, strict=True), zip(*exact, strict=True), strict=True):
        assert_quantized(*each, certain)


@pytest.mark.parametrize("name", SHAPES)
def test_features_are_projected_with_quantized_factors(name):
    config, weights = SHAPES[name]
    features = np.random.default_rng(0).normal(size=(30, config.features, config.hidden_size)).astype(np.float32)
    features *= np.geomspace(0.01, 100, config.features, dtype=np.float32)[:, None]
    hand, exact, certain = QuantizedByHand(config, weights), [], []
    for each in features:
        exact.append(hand.project(each))
        certain.append(hand.certain())
    assert_quantized(build(name, 2).project(features), exact, certain)


def test_it_is_near_the_step_with_the_weights_as_they_were():
    """Quantization moves the logits of a wide random drafter by hundredths of their size; they are not the same."""
    config, weights = SHAPES["wide"]
    given, hand = inputs(5, 12, config), ByHand(config, weights)
    exact = np.array([hand.last(*(each[: node + 1] for each in given))[0] for node in range(12)])
    found, _ = Cached(build("wide", 1)).feed(0, given)
    error = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert 0.002 < np.median(error) < 0.15


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("count", [2, 7, 400])
def test_features_of_a_position_have_the_bits_they_have_alone(name, count):
    c = BOTH[name][0]
    features = np.random.default_rng(count).normal(size=(count, c.features, c.hidden_size)).astype(np.float32)
    alone = np.concatenate([ENGINES[name, 1].project(features[i : i + 1]) for i in range(count)])
    for threads in THREADS:
        np.testing.assert_array_equal(ENGINES[name, threads].project(features), alone)


@settings(max_examples=20)
@given(st.sampled_from(list(BOTH)), st.sampled_from(THREADS), st.lists(st.integers(1, 20), min_size=1, max_size=6))
def test_any_chunks_have_the_bits_of_single_steps(name, threads, chunks):
    nodes = sum(chunks)
    given, cached = inputs(nodes, nodes, BOTH[name][0]), Cached(ENGINES[name, threads], capacity=128)
    cuts = np.cumsum(chunks)[:-1]
    parts = [cached.feed(1, part) for part in zip(*(np.split(each, cuts) for each in given), strict=True)]
    assert_same([*stacked(parts), np.stack([cached.entry(1, at) for at in range(nodes)])], one_by_one(name, given))


@pytest.mark.parametrize("name", BOTH)
def test_a_long_prompt_has_the_bits_of_single_steps(name):
    """More rows than one unit of work takes."""
    given = inputs(8, 210, BOTH[name][0])
    found = Cached(ENGINES[name, 3], capacity=210).feed(0, given)
    assert_same(found, one_by_one(name, given)[:2])


@settings(max_examples=20)
@given(
    st.sampled_from(list(BOTH)), st.sampled_from(THREADS), topologies(12), st.integers(0, 30),
    st.lists(st.integers(1, 11), max_size=4), st.data(),
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


@settings(max_examples=15)
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


@pytest.mark.parametrize("name", ["even", "odd", "wide"])
def test_a_batch_of_many_rows_has_the_bits_of_its_rows(name):
    shapes: list[Topology] = [chain(1), chain(4), tree((-1, 0, 0, 1, 2, 2))]
    rows = [(slot, inputs(slot, 6, SHAPES[name][0]), shapes[slot % 3]) for slot in range(128)]
    batch = [(*row, slot % len(row[2]), len(row[2])) for slot, row in enumerate(rows)]
    together, alone = (Cached(build(name, threads), slots=128, capacity=16) for threads in (3, 1))
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


@pytest.mark.parametrize("name", ["even", "heads", "wide"])
def test_there_is_room_for_every_pass(name):
    """Compiled code checks no bounds: a node may be scored more often than there are nodes, and any input be widest."""
    cached, config = Cached(build(name, 1)), SHAPES[name][0]
    widths = cached.step._matrices
    for slot, (nodes, scored) in enumerate(((1, 0), (1, 40), (40, 1))):
        given = inputs(1, nodes, config)
        logits, _ = cached.feed(slot, given, scored=np.zeros(scored, np.int64))
        rows = cached.step._rows
        assert rows.active.size >= nodes * widths.inner.step
        for width in (widths.joined, widths.hidden, widths.queries):
            assert rows.inputs.size >= nodes * width.step
            assert width.step >= width.groups * (width.group + 8)
        assert rows.inputs.size >= scored * widths.hidden.step
        expected = Cached(build(name, 1)).feed(0, tuple(each[:1] for each in given))[0]
        np.testing.assert_array_equal(logits, np.repeat(expected, scored, axis=0))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("which", [0, 1])
def test_a_row_that_is_not_finite_harms_no_other(name, which):
    """Nor a later pass, which works in the memory that this one leaves."""
    rows = [(slot, inputs(slot, 3, BOTH[name][0]), chain(3), 0, 3) for slot in range(4)]
    step = build(name, 2)
    expected = Cached(step).run(rows)
    sound = rows[2][1][which].copy()
    rows[2][1][which][1, 5] = np.nan
    for each, without in zip(Cached(step).run(rows), expected, strict=True):
        assert np.isnan(each[7:9]).all()
        np.testing.assert_array_equal(np.delete(each, [7, 8], 0), np.delete(without, [7, 8], 0))
    rows[2][1][which][:] = sound
    assert_same(Cached(step).run(rows), expected)


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
    assert len(int8_eagle_step.nopython_signatures) == 1


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


def test_only_one_python_thread_at_a_time_sees_to_the_memory_that_passes_reuse(monkeypatch):
    step, inside, most = build("even", 1), [], []
    room = step._room

    def slow_room(*sizes):
        inside.append(sizes)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return room(*sizes)

    monkeypatch.setattr(step, "_room", slow_room)
    callers = [threading.Thread(target=Cached(step).feed, args=(0, inputs(3, 2))) for _ in range(3)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert most == [1, 1, 1]


def test_the_best_tokens_are_those_of_its_logits():
    cached = Cached()
    logits, _ = cached.feed(0, inputs(4, 5))
    tokens, found = cached.step.best_tokens(logits, 3)
    np.testing.assert_array_equal(tokens, np.argsort(-logits, axis=-1, kind="stable")[:, :3])
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(found, np.take_along_axis(exact, tokens, -1), rtol=0, atol=1e-6)


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c, e, h: c.step.project(np.ones((4, 2, 48), np.float32)), ValueError, r"expected \(4, 3, 48\)"),
        (lambda c, e, h: c.step.project(np.ones((4, 3, 48))), TypeError, "features has dtype float64"),
        (lambda c, e, h: c.feed(0, (e[:, :47].copy(), h)), ValueError, r"embedded of shape \(4, 47\)"),
        (lambda c, e, h: c.feed(0, (e, h[:3])), ValueError, r"hidden of shape \(3, 48\): expected \(4, 48\)"),
        (lambda c, e, h: c.feed(0, (e.astype(np.float64), h)), TypeError, "embedded has dtype float64"),
        (lambda c, e, h: c.feed(0, (e, h.astype(np.float64))), TypeError, "hidden has dtype float64"),
        (lambda c, e, h: c.step.best_tokens(np.zeros((1, 60), np.float32), 1), ValueError, r"expected \(1, 61\)"),
        (lambda c, e, h: c.step.best_tokens(np.zeros((1, 61), np.float32), 62), ValueError, r"62 most probable"),
        (lambda c, e, h: c.feed(0, (e, h), scored=np.array([4])), ValueError, "scored node 4: expected 0…3"),
        (lambda c, e, h: c.feed(0, inputs(0, 65)), ValueError, "cache entry 64: expected 0…63"),
    ],
)
def test_inputs_that_do_not_fit_are_refused(change, error, message):
    """The checks are the float32 step's, which its own tests try one by one: here, that they are made."""
    with pytest.raises(error, match=message):
        change(Cached(), *inputs(0, 4))


def test_logits_without_a_law_are_refused():
    with pytest.raises(FloatingPointError, match="row 1 of 2 hold NaN"):
        ENGINES["even", 1].best_tokens(np.array([[0] * 61, [np.nan] * 61], np.float32), 2)


@pytest.mark.parametrize(
    ("cache", "error", "message"),
    [
        (RaggedKV(1, 4, 3, 64, 8), ValueError, r"expected \[1, slots, 2, capacity, 8\]"),
        (RaggedKV(1, 4, 2, 64, 8, torch.float64), TypeError, r"a cache of torch\.float64"),
    ],
)
def test_a_cache_of_another_model_or_type_is_refused(cache, error, message):
    cached = Cached()
    cached.cache = cache
    with pytest.raises(error, match=message):
        cached.feed(0, inputs(0, 1))


def spoilt(name: str, *at: int) -> dict[str, torch.Tensor]:
    """A weight with a number that is not finite."""
    weight = EVEN[1][name].clone()
    weight[at] = float("inf")
    return {name: weight}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"norm.weight": None}, KeyError, r"no tensor 'norm\.weight'"),
        ({"fc.weight": None}, KeyError, r"no tensor 'fc\.weight'"),
        ({"head.weight": None}, KeyError, r"no tensor 'head\.weight'"),
        ({"mlp.up_proj.weight": torch.ones(95, 48)}, ValueError, r"has shape \(95, 48\): expected \(96, 48\)"),
        ({"self_attn.k_proj.weight": torch.ones(16, 48)}, ValueError, r"k_proj.weight has shape \(16, 48\): exp.* 96"),
        (spoilt("self_attn.k_proj.weight", 3, 47), ValueError, r"^self_attn.k_proj.weight, first half: weight\[3, 47"),
        (spoilt("self_attn.v_proj.weight", 0, 50), ValueError, r"^self_attn.v_proj.weight, second half: weight\[0, 2"),
        (spoilt("embedding_proj.weight", 1, 2), ValueError, r"^embedding_proj.weight: weight\[1, 2\] is inf: .*finite"),
        (spoilt("fc.weight", 4, 5), ValueError, r"^fc.weight: weight\[4, 5\] is inf: expected finite"),
    ],
)  # fmt: skip
def test_weights_it_cannot_take_are_named(changed, error, message):
    weights = {name: tensor for name, tensor in {**EVEN[1], **changed}.items() if tensor is not None}
    with pytest.raises(error, match=message):
        Int8Eagle(EVEN[0], weights, Placement("numba", threads=1))


def test_weights_of_another_dtype_are_what_they_are_in_float32():
    config, weights = EVEN
    halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
    same = {name: tensor.float() for name, tensor in halves.items()}
    given = inputs(13, 6)
    found, expected = (
        Cached(Int8Eagle(config, each, Placement("numba", threads=1))).feed(0, given) for each in (halves, same)
    )
    assert_same(found, expected)
