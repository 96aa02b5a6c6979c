"""The compiled step in any of its forms, driven by hand, and what every form must do: a test class inherits `SameBits`
and names its form.

class TestSameBits(SameBits):
    form = Form(NumbaLlama, odd(layers=3))
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_core.kernels.llama_step import LlamaShape
from specdec_core.kernels.llama_step.numba import NumbaLlama
from specdec_core.kernels.plan import plan_step
from specdec_core.models.checkpoints import Checkpoint, tiny_llama
from specdec_core.placement import Placement
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.topology import Topology, chain, forest, tree
from tests.strategies import topologies

EVEN = tiny_llama(1, hidden_size=48, intermediate_size=96, layers=3, heads=6, kv_heads=2, head_dim=8, vocabulary=97)
NAMES = ["even", "odd"]
THREADS = [1, 2, 3, 5]


def odd(layers: int) -> Checkpoint:
    """Its hidden and intermediate sizes fill no vectors, as `EVEN`'s do; of the two heads one is tied, one its own."""
    return tiny_llama(2, hidden_size=50, intermediate_size=71, layers=layers, heads=4, kv_heads=1, head_dim=6,
                      vocabulary=101, tied_head=not EVEN.config.tied_head)  # fmt: skip


def tokens_of(seed: int, count: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, EVEN.config.vocabulary, count)


class Form:
    """A form of the step by what makes its engines, and the two models `both` on which its bits are compared."""

    def __init__(self, make: Callable[[LlamaShape, Mapping[str, Any], Placement], NumbaLlama], odd: Checkpoint):
        self.make = make
        self.both = dict(zip(NAMES, (EVEN, odd), strict=True))
        self._engines: dict[tuple[int, int], tuple[Checkpoint, NumbaLlama]] = {}
        # Before the tests: Python threads are to call one engine, not each to build its own.
        for checkpoint in self.both.values():
            for threads in THREADS:
                self.engine(checkpoint, threads)

    def engine(self, checkpoint: Checkpoint, threads: int) -> NumbaLlama:
        """The one engine of this very checkpoint, which is kept lest another take its id."""
        key = id(checkpoint), threads
        if key not in self._engines:
            placement = Placement("numba", threads=threads)
            self._engines[key] = checkpoint, self.make(checkpoint.config, checkpoint.weights, placement)
        return self._engines[key][1]

    def cached(self, checkpoint: Checkpoint = EVEN, threads: int = 1, slots: int = 4, capacity: int = 64) -> Cached:
        return Cached(self.engine(checkpoint, threads), slots, capacity)

    def one_by_one(self, checkpoint: Checkpoint, tokens: np.ndarray, **wanted):
        """Logits and features of every token of a sequence, each computed in a pass of its own by one thread."""
        cached = self.cached(checkpoint, capacity=max(64, len(tokens)))
        parts = [cached.feed(0, tokens[i : i + 1], **wanted) for i in range(len(tokens))]
        logits, features = zip(*parts, strict=True)
        return np.concatenate(logits), features[0] if features[0] is None else np.concatenate(features)


class Cached:
    """An engine and a cache, driven by hand."""

    def __init__(self, step: NumbaLlama, slots: int, capacity: int):
        c = step.config
        self.step, self.layers = step, c.layers
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


def assert_many_rows_have_the_bits_of_each(form: Form, checkpoint: Checkpoint, rows: int) -> None:
    """More rows than one unit of work takes, in one pass and each alone."""
    shapes: list[Topology] = [chain(1), chain(4), tree((-1, 0, 0, 1, 2, 2))]
    batch = [(slot, tokens_of(slot, len(shapes[slot % 3])), shapes[slot % 3]) for slot in range(rows)]
    together = form.cached(checkpoint, 3, slots=rows, capacity=16)
    alone = form.cached(checkpoint, slots=rows, capacity=16)
    for each in (together, alone):
        each.cache.keys.normal_(generator=torch.Generator().manual_seed(1))
        each.cache.values.normal_(generator=torch.Generator().manual_seed(2))
        each.cache.lengths[:] = np.arange(rows) % 9
    found = together.run(batch)[0]
    expected = [alone.run([row])[0] for row in batch]
    np.testing.assert_array_equal(found, np.concatenate(expected))


# Each form's class runs the same function, which hypothesis would take for a mistake.
inherited = settings(max_examples=25, suppress_health_check=[HealthCheck.differing_executors])
names, threads_of = st.sampled_from(NAMES), st.sampled_from(THREADS)


class SameBits:
    """The same bits in whatever company, and arrays and refusals as they must be, of `form`."""

    form: Form

    @inherited
    @given(names, threads_of, st.lists(st.integers(1, 20), min_size=1, max_size=6))
    def test_any_chunks_have_the_bits_of_single_steps(self, name, threads, chunks):
        checkpoint, tokens = self.form.both[name], tokens_of(sum(chunks), sum(chunks))
        cached = self.form.cached(checkpoint, threads, capacity=128)
        parts = [cached.feed(1, part, features=(1,)) for part in np.split(tokens, np.cumsum(chunks)[:-1])]
        logits, features = self.form.one_by_one(checkpoint, tokens, features=(1,))
        np.testing.assert_array_equal(np.concatenate([part[0] for part in parts]), logits)
        np.testing.assert_array_equal(np.concatenate([part[1] for part in parts]), features)

    @inherited
    @given(names, threads_of, topologies(16), st.integers(0, 40), st.data())
    def test_a_tree_and_what_follows_its_commit_have_the_bits_of_single_steps(self, name, threads, shape, before, data):
        form, checkpoint = self.form, self.form.both[name]
        committed, drafted = tokens_of(before, before), tokens_of(len(shape), len(shape))
        cached = form.cached(checkpoint, threads, capacity=128)
        if before:
            cached.feed(2, committed)
        epoch = cached.cache.begin()
        logits, _ = cached.run([(2, drafted, shape)])
        for node in range(len(shape)):
            path = np.concatenate([committed, drafted[shape.path(node)]])
            np.testing.assert_array_equal(logits[node], form.one_by_one(checkpoint, path)[0][-1])
        kept = shape.path(data.draw(st.integers(0, len(shape) - 1)))
        cached.cache.commit(np.array([2]), [kept], epoch)
        after = cached.feed(2, np.array([5, 6]))[0]
        path = np.concatenate([committed, drafted[kept], [5, 6]])
        np.testing.assert_array_equal(after, form.one_by_one(checkpoint, path)[0][-2:])

    @inherited
    @given(
        names, threads_of, st.lists(st.tuples(topologies(8), st.integers(0, 30)), min_size=2, max_size=6), st.randoms()
    )
    def test_a_row_has_the_bits_it_has_alone(self, name, threads, rows, random):
        checkpoint, slots = self.form.both[name], random.sample(range(8), len(rows))
        together = self.form.cached(checkpoint, threads, slots=8)
        batch, expected = [], []
        for slot, (shape, length) in zip(slots, rows, strict=True):
            alone, tokens = self.form.cached(checkpoint, slots=8), tokens_of(slot + 10, len(shape))
            if length:
                together.feed(slot, tokens_of(slot, length))
                alone.feed(slot, tokens_of(slot, length))
            batch.append((slot, tokens, shape))
            expected.append(alone.run([(slot, tokens, shape)])[0])
        np.testing.assert_array_equal(together.run(batch)[0], np.concatenate(expected))

    @pytest.mark.parametrize("name", NAMES)
    @pytest.mark.parametrize("rows", [64, 256])
    def test_a_batch_of_many_rows_has_the_bits_of_its_rows(self, name, rows):
        assert_many_rows_have_the_bits_of_each(self.form, self.form.both[name], rows)

    def test_early_exit_is_the_shorter_model_and_only_what_is_asked_for_is_scored(self):
        tokens, cached = tokens_of(9, 12), self.form.cached(EVEN, 2)
        logits, features = cached.feed(0, tokens[:9], layers=2, scored=None, features=(1, 0))
        assert logits is None and features.shape == (9, 2, 48)
        scored = np.array([2, 0, 2, 2, 1])  # more of them than nodes
        logits, none = cached.feed(0, tokens[9:], layers=2, scored=scored)
        assert none is None
        whole = self.form.cached(EVEN)
        expected, kept = whole.feed(0, tokens, layers=2, features=(0, 1))
        np.testing.assert_array_equal(logits, expected[9 + scored])
        np.testing.assert_array_equal(features[:, ::-1], kept[:9])
        shorter = dataclasses.replace(EVEN, name="shorter", config=dataclasses.replace(EVEN.config, layers=2))
        np.testing.assert_array_equal(expected, self.form.cached(shorter).feed(0, tokens)[0])

    def test_returned_arrays_are_the_callers_own(self):
        cached, tokens = self.form.cached(), tokens_of(11, 8)
        first, features = cached.feed(0, tokens[:4], features=(0,))
        kept, kept_features = first.copy(), features.copy()
        cached.feed(0, tokens[4:], features=(0,))
        np.testing.assert_array_equal(first, kept)
        np.testing.assert_array_equal(features, kept_features)
        assert first.dtype == features.dtype == np.float32 and first.shape == (4, 97) and first.flags.c_contiguous

    def test_engines_and_python_threads_do_not_disturb_each_other(self):
        form = self.form
        expected = {name: form.one_by_one(checkpoint, tokens_of(3, 30))[0] for name, checkpoint in form.both.items()}
        wrong = []

        def call(name):
            for _ in range(5):
                found = form.cached(form.both[name], 2).feed(0, tokens_of(3, 30))[0]
                if not np.array_equal(found, expected[name]):
                    wrong.append(name)

        callers = [threading.Thread(target=call, args=(NAMES[i % 2],)) for i in range(4)]
        for each in callers:
            each.start()
        for each in callers:
            each.join()
        assert not wrong

    def test_a_cache_of_another_model_or_type_is_refused(self):
        cached = self.form.cached()
        cached.cache = RaggedKV(3, 4, 3, 64, 8)
        with pytest.raises(ValueError, match="expected \\[3, slots, 2, capacity, 8\\]"):
            cached.run([(0, np.array([1]), chain(1))])
        cached.cache = RaggedKV(3, 4, 2, 64, 8, torch.float64)
        with pytest.raises(TypeError, match=r"torch\.float64"):
            cached.run([(0, np.array([1]), chain(1))])
