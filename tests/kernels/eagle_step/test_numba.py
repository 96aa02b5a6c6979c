"""The compiled step of a drafter in float32, against torch in float64; its best tokens; what it refuses.

What it has in common with the int8 form is in test_forms.py.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.eagle_step.torch import TorchEagle
from specdec_core.placement import Placement
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.topology import chain, tree
from tests.kernels.eagle_step.test_forms import BOTH, EVEN, FLOAT32, Cached, assert_same, inputs
from tests.kernels.eagle_step.test_torch import made, plan_of

pytestmark = pytest.mark.usefixtures("one_thread")

CONTEXT = EVEN[0].context


def assert_close(found, exact) -> None:
    """Within float32's rounding, of the largest number."""
    exact = np.asarray(exact)
    np.testing.assert_allclose(found, exact, rtol=0, atol=1e-5 * np.abs(exact).max())


SHAPES = {
    **BOTH,
    "wide": made(3, (0, 1, 2), 130, heads=9, kv_heads=3, head_dim=64, hidden_size=144, intermediate_size=300),
    "128": made(4, (0,), 16, heads=2, kv_heads=2, head_dim=128, hidden_size=33, rope_theta=100.0, norm_eps=1e-2),
}


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_the_torch_form(name):
    """A prompt in chunks, then trees in parts and chains, in rows of different lengths, committed as they come."""
    config, weights = SHAPES[name]
    numba = Cached(FLOAT32.build(SHAPES[name], 2), capacity=256)
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
    assert_close(FLOAT32.build(SHAPES[name], 2).project(features), exact)


def test_tokens_are_not_read():
    given, cached = inputs(1, 3), FLOAT32.cached()
    plan = plan_of([(0, chain(3), 0, 3)], cached.cache.lengths)
    expected = cached.step(plan, cached.cache, *given, np.arange(3))
    astray = dataclasses.replace(plan, tokens=np.full(3, 10**9))
    assert_same(cached.step(astray, cached.cache, *given, np.arange(3)), expected)


# --- the best tokens ----------------------------------------------------------------------------------------------


SIZES = {size: FLOAT32.build(made(1, (0,), size)) for size in (7, 61, 64, 257)}


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
        (lambda c, e, h: c.step.best_tokens(np.zeros((1, 61)), 1), TypeError, "logits has dtype float64"),
        (lambda c, e, h: c.feed(0, (e, h), scored=np.array([-1])), ValueError, "scored node -1"),
    ],
)
def test_logits_of_another_type_and_nodes_before_the_first_are_refused(change, error, message):
    with pytest.raises(error, match=message):
        change(FLOAT32.cached(), *inputs(0, 4))


def test_a_position_beyond_the_context_is_refused():
    cached = FLOAT32.cached(capacity=CONTEXT + 8)
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
    cached, given = FLOAT32.cached(), inputs(0, 4)
    cached.cache.lengths[0] = 3
    plan = plan_of([(0, tree((-1, 0, 0, 1)), 0, 4)], cached.cache.lengths)
    changed = {name: np.array(values, getattr(plan, name).dtype) for name, values in change.items()}
    with pytest.raises(ValueError, match=message):
        cached.step(dataclasses.replace(plan, **changed), cached.cache, *given, np.arange(4))


def test_a_cache_of_more_layers_is_refused():
    cached = FLOAT32.cached()
    cached.cache = RaggedKV(3, 4, 2, 64, 8)
    with pytest.raises(ValueError, match=r"keys \(3, 4, 2, 64, 8\)"):
        cached.feed(0, inputs(0, 1))


def test_a_cache_that_is_not_whole_or_not_of_one_shape_is_refused():
    cached = FLOAT32.cached()
    cached.cache.values = cached.cache.values[:, :3]
    with pytest.raises(ValueError, match=r"values \(1, 3, 2, 64, 8\)"):
        cached.feed(0, inputs(0, 1))
    cached.cache.values = torch.zeros(1, 4, 2, 8, 64).transpose(3, 4)
    with pytest.raises(TypeError, match="contiguous: False"):
        cached.feed(0, inputs(0, 1))


def test_weights_that_do_not_fit_the_config_are_named():
    config, weights = EVEN
    with pytest.raises(ValueError, match=r"mlp.up_proj.weight has shape \(95, 48\): expected \(96, 48\)"):
        FLOAT32.build((config, {**weights, "mlp.up_proj.weight": weights["mlp.up_proj.weight"][:95]}))
    without = {name: tensor for name, tensor in weights.items() if name != "head.weight"}
    with pytest.raises(KeyError, match=r"no tensor 'head\.weight'"):
        FLOAT32.build((config, without))
