"""The drafter's step in torch, in float64, against one node computed by hand from the whole path that leads to it."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.eagle_step.torch import TorchEagle
from specdec_core.kernels.plan import StepPlan, plan_step
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.models.eagle_checkpoint import tiny_eagle
from specdec_core.placement import Placement
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.topology import Topology, chain, forest, tree
from tests.strategies import topologies

pytestmark = pytest.mark.usefixtures("one_thread")

DOUBLE = Placement(dtype="float64")
EXACT = {"rtol": 0, "atol": 1e-10}


def made(seed: int = 1, feature_layers=(0, 1, 2), vocabulary: int = 61, **changes):
    """A config and weights, head included."""
    target = tiny_llama(seed, hidden_size=changes.get("hidden_size", 48), vocabulary=257)
    eagle = tiny_eagle(seed, target, feature_layers, vocabulary, **changes)
    layer = eagle.layer("committed")
    return eagle.config, {**layer, "head.weight": target.weights["model.embed_tokens.weight"][eagle.tokens]}


CONFIG, WEIGHTS = made()
STEP = TorchEagle(CONFIG, WEIGHTS, DOUBLE)


class ByHand:
    """The equations for one node at a time, in numpy's float64, without a cache."""

    def __init__(self, config, weights):
        self.c = config
        self.w = {name.removesuffix(".weight"): np.asarray(w, np.float64) for name, w in weights.items()}

    def norm(self, x: np.ndarray) -> np.ndarray:
        return x / math.sqrt(sum(x * x) / len(x) + self.c.norm_eps)

    def turn(self, head: np.ndarray, position: int) -> np.ndarray:
        half, turned = len(head) // 2, np.empty(len(head))
        for i in range(half):
            angle = position * self.c.rope_theta ** (-2 * i / len(head))
            turned[i] = head[i] * math.cos(angle) - head[i + half] * math.sin(angle)
            turned[i + half] = head[i + half] * math.cos(angle) + head[i] * math.sin(angle)
        return turned

    def heads(self, name: str, x: np.ndarray) -> np.ndarray:
        return (self.w[f"self_attn.{name}_proj"] @ x).reshape(-1, self.c.head_dim)

    def project(self, features: np.ndarray) -> np.ndarray:
        return self.w["fc"] @ np.concatenate([self.norm(state) for state in features])

    def last(self, embedded: np.ndarray, hidden: np.ndarray):
        """Logits, hidden state, key and value heads of the last node of a path `[n, H]` that begins at position 0."""
        c, w, keys, values = self.c, self.w, [], []
        for position, (e, h) in enumerate(zip(embedded, hidden, strict=True)):
            x = np.concatenate([self.norm(e) * w["embedding_norm"], self.norm(h) * w["hidden_norm"]])
            keys.append([self.turn(k, position) for k in self.heads("k", x)])
            values.append(self.heads("v", x))
        queries, attended = [self.turn(q, position) for q in self.heads("q", x)], []
        for head, query in enumerate(queries):
            shared = head // (c.heads // c.kv_heads)
            scores = np.array([math.exp(query @ key[shared] / math.sqrt(c.head_dim)) for key in keys])
            attended.append(sum(p * v[shared] for p, v in zip(scores / scores.sum(), values, strict=True)))
        y = hidden[-1] + w["embedding_proj"] @ x[: c.hidden_size] + w["self_attn.o_proj"] @ np.concatenate(attended)
        n = self.norm(y) * w["post_attention_layernorm"]
        gate = w["mlp.gate_proj"] @ n
        z = y + w["mlp.down_proj"] @ (gate / (1 + np.exp(-gate)) * (w["mlp.up_proj"] @ n))
        return w["head"] @ (self.norm(z) * w["norm"]), z, np.array(keys[-1]), np.array(values[-1])


BY_HAND = ByHand(CONFIG, WEIGHTS)


def inputs(seed: int, nodes: int, size: int = CONFIG.hidden_size) -> tuple[np.ndarray, np.ndarray]:
    """Embedded tokens and hidden states, `[nodes, H]` each, of very different lengths."""
    random = np.random.default_rng(seed)
    return 0.3 * random.normal(size=(nodes, size)), 5 * random.normal(size=(nodes, size))


def plan_of(rows, lengths: np.ndarray) -> StepPlan:
    """A pass over the nodes first … last − 1 of each row's tree: rows of (slot, tree, first, last)."""
    slots, trees, firsts, lasts = (list(each) for each in zip(*rows, strict=True))
    shape = forest(trees)
    whole = plan_step(np.zeros(len(shape.rows)), np.array(slots), lengths[slots], shape)
    kept = (whole.nodes >= np.array(firsts)[shape.rows]) & (whole.nodes < np.array(lasts)[shape.rows])
    flat = (whole.tokens, whole.slots, whole.committed, whole.depths, whole.nodes, whole.paths)
    counts = np.array(lasts) - np.array(firsts)
    return StepPlan(*(each[kept] for each in flat), offsets=np.concatenate([[0], np.cumsum(counts)]))


class Cached:
    """A step and its cache, driven by hand."""

    def __init__(self, step: TorchEagle = STEP, slots: int = 4, capacity: int = 48):
        c = step.config
        self.step, self.cache = step, RaggedKV(1, slots, c.kv_heads, capacity, c.head_dim, step.dtype)

    def run(self, rows, scored=None):
        """Rows of (slot, (embedded, hidden), tree, first, last) in one pass: logits and hidden states as numpy."""
        embedded, hidden = (np.concatenate([row[1][i][row[3] : row[4]] for row in rows]) for i in (0, 1))
        plan = plan_of([(slot, shape, first, last) for slot, _, shape, first, last in rows], self.cache.lengths)
        scored = np.arange(len(plan.tokens)) if scored is None else scored
        return tuple(each.double().numpy() for each in self.step(plan, self.cache, embedded, hidden, scored))

    def feed(self, slot: int, given, **wanted):
        """Cache a chain: its logits and hidden states."""
        nodes = len(given[0])
        found = self.run([(slot, given, chain(nodes), 0, nodes)], **wanted)
        self.cache.lengths[slot] += nodes
        return found


def cuts_of(nodes: int, wanted: list[int]) -> list[tuple[int, int]]:
    """The nodes 0 … nodes − 1 in parts, cut at the wanted places as far as there are such."""
    places = sorted({0, nodes, *(place for place in wanted if place < nodes)})
    return list(itertools.pairwise(places))


def joined(before, given, path) -> tuple[np.ndarray, np.ndarray]:
    """What leads to a node: the committed inputs, then those of its path."""
    return tuple(np.concatenate([a, b[path]]) for a, b in zip(before, given, strict=True))


def assert_by_hand(found, before, given, shape: Topology, hand: ByHand = BY_HAND) -> None:
    for node in range(len(shape)):
        logits, hidden, _, _ = hand.last(*joined(before, given, shape.path(node)))
        np.testing.assert_allclose(found[0][node], logits, **EXACT)
        np.testing.assert_allclose(found[1][node], hidden, **EXACT)


def test_features_are_normed_one_by_one_and_joined_in_order():
    features = np.random.default_rng(0).normal(size=(5, 3, 48)) * np.array([0.1, 1, 30])[:, None]
    expected = [BY_HAND.project(each) for each in features]
    np.testing.assert_allclose(STEP.project(features).numpy(), expected, **EXACT)


@pytest.mark.parametrize(
    "shape",
    [
        {"heads": 4, "kv_heads": 4},
        {"heads": 6, "kv_heads": 1},
        {"head_dim": 14, "hidden_size": 40, "intermediate_size": 31},
        {"rope_theta": 100.0, "norm_eps": 1e-1},
        {"feature_layers": (1,), "vocabulary": 7},
    ],
    ids=lambda shape: ",".join(shape),
)
def test_a_chain_of_any_shape_is_what_the_equations_say(shape):
    config, weights = made(3, **shape)
    cached, hand = Cached(TorchEagle(config, weights, DOUBLE)), ByHand(config, weights)
    given, nothing = inputs(1, 9, config.hidden_size), inputs(0, 0, config.hidden_size)
    assert_by_hand(cached.feed(0, given), nothing, given, chain(9), hand)
    features = np.random.default_rng(0).normal(size=(2, config.features, config.hidden_size))
    np.testing.assert_allclose(cached.step.project(features), [hand.project(each) for each in features], **EXACT)


@settings(max_examples=20)
@given(topologies(8), st.integers(0, 6), st.lists(st.integers(1, 7), max_size=3), st.integers(0, 10**6))
def test_a_tree_in_any_parts_is_what_the_equations_say(shape, committed, cuts, seed):
    cached, before, given = Cached(), inputs(seed, committed), inputs(seed + 1, len(shape))
    if committed:
        cached.feed(2, before)
    parts = [cached.run([(2, given, shape, *part)]) for part in cuts_of(len(shape), cuts)]
    assert_by_hand([np.concatenate(each) for each in zip(*parts, strict=True)], before, given, shape)
    for node in range(len(shape)):
        _, _, key, value = BY_HAND.last(*joined(before, given, shape.path(node)))
        entry = np.s_[0, 2, :, committed + node]
        np.testing.assert_allclose(cached.cache.keys[entry], key, **EXACT)
        np.testing.assert_allclose(cached.cache.values[entry], value, **EXACT)


@settings(max_examples=15)
@given(st.lists(st.tuples(topologies(6), st.integers(0, 9), st.integers(0, 5)), min_size=1, max_size=4), st.randoms())
def test_a_row_of_a_ragged_batch_is_the_row_alone(rows, random):
    slots = random.sample(range(4), len(rows))
    together, alone, batch, expected = Cached(), Cached(), [], []
    for slot, (shape, length, first) in zip(slots, rows, strict=True):
        given, first = inputs(slot + 10, len(shape)), min(first, len(shape) - 1)
        for each in (together, alone):
            if length:
                each.feed(slot, inputs(slot, length))
            if first:
                each.run([(slot, given, shape, 0, first)])
        batch.append((slot, given, shape, first, len(shape)))
        expected.append(alone.run(batch[-1:]))
    found = together.run(batch)
    for which in (0, 1):
        np.testing.assert_allclose(found[which], np.concatenate([each[which] for each in expected]), **EXACT)


def test_only_the_nodes_own_entries_are_written():
    cached = Cached()
    for store in (cached.cache.keys, cached.cache.values):
        store.normal_(generator=torch.Generator().manual_seed(1))
    before = [store.clone() for store in (cached.cache.keys, cached.cache.values)]
    cached.cache.lengths[:] = (3, 0, 5, 0)
    cached.run([(2, inputs(6, 4), tree((-1, 0, 0, 1)), 1, 3), (0, inputs(7, 2), chain(2), 0, 2)])
    for store, was in zip((cached.cache.keys, cached.cache.values), before, strict=True):
        changed = (store != was).any(-1).any(2)[0]
        assert changed.nonzero().tolist() == [[0, 3], [0, 4], [2, 6], [2, 7]]


def test_a_rejected_draft_leaves_no_trace():
    given, cached = inputs(3, 10), Cached()
    first = cached.feed(0, tuple(each[:6] for each in given))
    cached.run([(0, inputs(4, 20), chain(20), 0, 20)])
    rest = cached.feed(0, tuple(each[6:] for each in given))
    found = [np.concatenate(each) for each in zip(first, rest, strict=True)]
    assert_by_hand(found, inputs(0, 0), given, chain(10))


@pytest.mark.parametrize("scored", [[2], [0, 3], [3, 1], [3, 2, 1, 0], []])
def test_only_the_nodes_asked_for_are_scored_in_that_order(scored):
    given = inputs(7, 4)
    every, continued = Cached().feed(0, given)
    logits, still = Cached().feed(0, given, scored=np.array(scored, np.int64))
    assert logits.shape == (len(scored), 61)
    np.testing.assert_allclose(logits, every[scored], **EXACT)
    np.testing.assert_array_equal(still, continued)


def test_what_it_returns_is_a_tensor_of_its_dtype_and_may_be_given_back():
    cached = Cached(TorchEagle(CONFIG, WEIGHTS, Placement(dtype="float32")))
    plan, scored = plan_of([(0, chain(2), 0, 2)], cached.cache.lengths), np.arange(2)
    hidden = cached.step.project(torch.ones(2, 3, 48, dtype=torch.float64))
    logits, continued = cached.step(plan, cached.cache, np.ones((2, 48)), hidden, scored)
    assert hidden.dtype == logits.dtype == continued.dtype == cached.step(
        plan, cached.cache, np.ones((2, 48)), continued, scored
    )[0].dtype == torch.float32  # fmt: skip


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.6), ("float16", 0.1)])
def test_narrow_dtypes_run_near_the_equations(dtype, tolerance):
    cached, shape = Cached(TorchEagle(CONFIG, WEIGHTS, Placement(dtype=dtype))), tree((-1, 0, 0, 1, 2))
    before, given = inputs(11, 6), inputs(12, 5)
    cached.feed(0, before)
    logits, _ = cached.run([(0, given, shape, 0, 5)])
    for node in range(5):
        np.testing.assert_allclose(
            logits[node], BY_HAND.last(*joined(before, given, shape.path(node)))[0], atol=tolerance
        )


def test_the_mean_square_of_a_narrow_dtype_does_not_overflow():
    step = TorchEagle(CONFIG, WEIGHTS, Placement(dtype="float16"))
    features = np.full((1, 3, 48), 3e4)
    np.testing.assert_allclose(step.project(features).double(), STEP.project(features), atol=0.02)


# --- the best tokens ----------------------------------------------------------------------------------------------


def test_the_best_tokens_are_those_of_a_stable_sort_with_their_log_probabilities():
    logits = np.random.default_rng(1).normal(size=(3, 61)) * 4
    logits[0, [7, 3, 50]] = logits[0].max() + 1
    logits[1] = 0
    logits[2, 5:] = -np.inf
    exact = logits - np.log(np.exp(logits).sum(-1, keepdims=True))
    order = np.argsort(-logits, axis=-1, kind="stable")
    for count in (1, 4, 61):
        tokens, found = (each.numpy() for each in STEP.best_tokens(torch.as_tensor(logits), count))
        assert tokens.dtype == np.int64 and found.dtype == np.float64
        np.testing.assert_array_equal(tokens, order[:, :count])
        np.testing.assert_allclose(found, np.take_along_axis(exact, tokens, -1), rtol=1e-12)


def test_log_probabilities_are_computed_in_float64():
    logits = torch.randn(2, 61, generator=torch.Generator().manual_seed(1)).half()
    narrow = TorchEagle(CONFIG, WEIGHTS, Placement(dtype="float16"))
    for found, exact in zip(narrow.best_tokens(logits, 5), STEP.best_tokens(logits.double(), 5), strict=True):
        assert torch.equal(found, exact)


@pytest.mark.parametrize("wrong", [{4: np.nan}, {4: np.inf}, dict.fromkeys(range(61), -np.inf)])
def test_logits_without_a_law_are_refused(wrong):
    logits = np.zeros((3, 61))
    logits[1, list(wrong)] = list(wrong.values())
    with pytest.raises(FloatingPointError, match="row 1 of 3 hold NaN"):
        STEP.best_tokens(torch.as_tensor(logits), 2)


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [0, 62])
def test_more_tokens_than_there_are_cannot_be_asked_for(count):
    with pytest.raises(ValueError, match=rf"the {count} most probable tokens: expected 1…61"):
        STEP.best_tokens(torch.zeros(1, 61), count)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda e, h: STEP.project(np.ones((4, 2, 48))), r"features of shape \(4, 2, 48\): expected \(4, 3, 48\)"),
        (lambda e, h: Cached().feed(0, (e[:, :47], h)), r"embedded of shape \(4, 47\): expected \(4, 48\)"),
        (lambda e, h: Cached().feed(0, (e, h[:3])), r"hidden of shape \(3, 48\): expected \(4, 48\)"),
        (lambda e, h: STEP.best_tokens(torch.zeros(1, 60), 1), r"logits of shape \(1, 60\): expected \(1, 61\)"),
    ],
    ids=["features", "embedded", "hidden", "logits"],
)
def test_inputs_of_another_shape_are_refused(change, message):
    with pytest.raises(ValueError, match=message):
        change(*inputs(0, 4))


def test_weights_that_do_not_fit_the_config_are_named():
    with pytest.raises(ValueError, match=r"head.weight has shape \(60, 48\): expected \(61, 48\)"):
        TorchEagle(CONFIG, {**WEIGHTS, "head.weight": WEIGHTS["head.weight"][:60]}, DOUBLE)
    without = {name: tensor for name, tensor in WEIGHTS.items() if name != "head.weight"}
    with pytest.raises(KeyError, match=r"no tensor 'head\.weight'"):
        TorchEagle(CONFIG, without, DOUBLE)


def test_the_placements_threads_are_torchs():
    try:
        TorchEagle(CONFIG, WEIGHTS, Placement(threads=2))
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
