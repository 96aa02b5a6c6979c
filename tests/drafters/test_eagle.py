"""Trained drafters that continue a target's hidden states: what both have in common, and chains.

The drafters are held against `Naive`, which keeps nothing from round to round. Its step is the engine's: on the
compiled one results are equal to the last bit, on torch in float64 up to rounding.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import product
from typing import Any

import numpy as np
import pytest
import torch

from specdec_core.arrays import host
from specdec_core.decode import decode, generate, outputs
from specdec_core.drafters.eagle import EagleDrafter
from specdec_core.drafters.eagle_engine import build_steps
from specdec_core.drafters.eagle_tree import EagleTreeDrafter
from specdec_core.forensics import exact_grid, exact_models
from specdec_core.forensics.enumeration import distance, output_law, product_law, sequence_law
from specdec_core.kernels.eagle_step.int8 import Int8Eagle
from specdec_core.kernels.plan import plan_step
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.models.eagle_checkpoint import EagleCheckpoint, eagle_config, tiny_eagle
from specdec_core.models.errors import ModelError
from specdec_core.placement import Placement
from specdec_core.protocol import Draft, Drafter, Round, RowView
from specdec_core.randomness import DRAFT, streams
from specdec_core.rows import Request
from specdec_core.sampling import History, LogitsError, Options, law, processed
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.targets.transformer import Transformer
from specdec_core.topology import chain, forest
from specdec_core.training.distilled_loss import Loss
from specdec_core.training.eagle_batches import Batch
from specdec_core.training.eagle_learner import EagleLearner

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = (0, 1, 2)
CHECKPOINT = tiny_llama(1, vocabulary=7, context=48)
ENGINES = {"torch": Placement(dtype="float64"), "numba": Placement("numba", threads=1)}
INT8 = Placement("numba", dtype="int8", threads=1)
EXACT = {"torch": {"rtol": 0, "atol": 1e-12}, "numba": {"rtol": 0, "atol": 0}}
"""How near laws, keys and values are to those of `Naive`."""
KINDS: dict[str, Callable[..., Drafter]] = {
    "chain": EagleDrafter,
    "tree": partial(EagleTreeDrafter, nodes=7, width=3),
}
every_engine = pytest.mark.parametrize("engine", ENGINES)
every_kind = pytest.mark.parametrize("kind", KINDS)

RANDOM = tiny_eagle(1, CHECKPOINT, LAYERS, vocabulary=5)


@lru_cache
def target(engine: str) -> Transformer:
    return Transformer(CHECKPOINT, ENGINES[engine], LAYERS)


def drafter(kind: str, engine: str, checkpoint: EagleCheckpoint | None = None) -> Drafter:
    return KINDS[kind](checkpoint or trained(), CHECKPOINT, ENGINES[engine])


@lru_cache
def trained() -> EagleCheckpoint:
    """A drafter that is often right, of six tokens of seven: a hundred steps on text that the target wrote."""
    texts, length, unroll, pairs = 64, 40, 3, 39
    plain = Transformer(CHECKPOINT, Placement(threads=1), LAYERS)
    random = np.random.default_rng(0)
    options = [Options(temperature=1.0, max_new_tokens=length - 4, seed=seed) for seed in range(texts)]
    prompts = random.integers(0, 7, (texts, 4))
    written = generate(plain, [Request(tuple(p), o) for p, o in zip(prompts.tolist(), options, strict=True)], slots=32)
    tokens = np.concatenate([prompts, [each.tokens for each in written]], axis=1)
    everything = [np.append(text, 0) for text in tokens]  # the last token of a prompt has no features
    state = plain.new_state(texts, length)
    features = torch.stack(plain.prefill(state, np.arange(texts), everything))

    drafted = torch.tensor([0, 1, 2, 4, 5, 6])
    config = eagle_config(CHECKPOINT, len(LAYERS), len(drafted))
    learner = EagleLearner(config, CHECKPOINT, drafted, feature_scale=1.0, seed=0)
    optimizer = torch.optim.AdamW(learner.parameters(), lr=3e-3)
    for _ in range(100):
        rows = random.choice(texts, 16, replace=False)
        final = torch.zeros(16, pairs + unroll - 1, config.hidden_size)
        final[:, :pairs] = features[rows][:, 1:, -1]
        batch = Batch(
            tokens=torch.from_numpy(tokens[rows][:, 1:]),
            features=features[rows][:, :pairs],
            anchors=torch.arange(pairs).repeat(16, 1),
            lengths=torch.full((16,), pairs),
            final=final,
            real=torch.ones(16, pairs, dtype=torch.bool),
            greedy=torch.zeros(16, dtype=torch.bool),
        )
        optimizer.zero_grad()
        loss, _ = learner(batch, unroll, Loss(), mixed=False)
        loss.backward()
        optimizer.step()
    weights = {name: values.clone() for name, values in learner.named_weights().items()}
    return EagleCheckpoint(config, weights, drafted, CHECKPOINT.name, CHECKPOINT.fingerprint, LAYERS, {})


class Naive:
    """The drafter without memory: each answer from the whole text, on a fresh cache, one drafted token at a time."""

    def __init__(self, checkpoint: EagleCheckpoint, engine: str):
        self.tokens, self._target = checkpoint.tokens.numpy(), target(engine)
        self._config, self._placement = checkpoint.config, ENGINES[engine]
        self._steps = build_steps(checkpoint, CHECKPOINT, self._placement)
        self.read = lru_cache(maxsize=None)(self._read)

    def logits(self, text: tuple[int, ...], drafted: tuple[int, ...] = ()) -> np.ndarray:
        """Over the draft vocabulary `[D]`, after `text` and the tokens drafted behind it."""
        return host(self.read(text, drafted)[0])[-1]

    def _read(self, text: tuple[int, ...], drafted: tuple[int, ...] = ()):
        """Logits after the last token, hidden states of those read last, keys and values."""
        if drafted:
            _, hidden, *kept = self.read(text, drafted[:-1])
            return self._pass(self._steps.drafted, drafted[-1:], hidden[-1:], kept)
        state = self._target.new_state(1, len(text))
        (features,) = self._target.prefill(state, np.array([0]), [np.array(text)])
        return self._pass(self._steps.committed, text[1:], self._steps.committed.project(features), ())

    def _pass(self, step, tokens, hidden, kept):
        c, before = self._config, kept[0].shape[1] if kept else 0
        cache = RaggedKV(1, 1, c.kv_heads, before + len(tokens), c.head_dim, self._placement.torch_dtype)
        for store, earlier in zip((cache.keys, cache.values), kept, strict=False):
            store[0, 0, :, :before] = earlier
        plan = plan_step(np.array(tokens), np.array([0]), np.array([before]), forest([chain(len(tokens))]))
        embedded = CHECKPOINT.weights["model.embed_tokens.weight"][list(tokens)].numpy()
        logits, continued = step(plan, cache, embedded, hidden, np.array([len(tokens) - 1]))
        return logits, continued, cache.keys[0, 0], cache.values[0, 0]


@dataclass(frozen=True)
class Recorded:
    """A run: its rounds, and of each request the texts from which it was drafted, with the drafts."""

    rounds: list[Round]
    drafts: dict[int, list[tuple[tuple[int, ...], Draft]]]

    @property
    def accepted(self) -> int:
        return sum(row.accepted for each in self.rounds for row in each.rows)


class Watched:
    """A drafter whose drafts of this round are noted, by slot."""

    def __init__(self, drafter: Drafter):
        self._drafter, self.drafts = drafter, dict[int, Draft]()
        self.most_nodes, self.start, self.admit = drafter.most_nodes, drafter.start, drafter.admit
        self.observe, self.release = drafter.observe, drafter.release

    def propose(self, views: Sequence[RowView], state: Any) -> list[Draft]:
        found = self._drafter.propose(views, state)
        self.drafts = {view.slot: draft for view, draft in zip(views, found, strict=True)}
        return found


def record(target: Transformer, requests: Sequence[Request], drafter: Drafter, slots: int | None = None) -> Recorded:
    watched, found = Watched(drafter), Recorded([], defaultdict(list))
    texts = {key: request.prompt for key, request in enumerate(requests)}
    for each in decode(target, requests, watched, slots=slots):
        found.rounds.append(each)
        for row in each.rows:
            if row.slot in watched.drafts:
                found.drafts[row.key].append((texts[row.key], watched.drafts[row.slot]))
            texts[row.key] += row.emitted
        watched.drafts = {}
    return found


def prompt(length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(length).integers(0, 7, length).tolist())


GREEDY = [
    Request(prompt(9), Options(max_new_tokens=30), FixedLength(4)),
    Request((1,), Options(max_new_tokens=24), FixedLength(7)),
    Request(prompt(2), Options(max_new_tokens=24, repetition_penalty=1.3), FixedLength(5)),
    Request(prompt(3), Options(max_new_tokens=20, min_new_tokens=9, eos=(0, 2, 4, 6)), FixedLength(3)),
    Request(prompt(20), Options(max_new_tokens=99), FixedLength(6)),
    Request(prompt(5), Options(max_new_tokens=20, eos=(5,)), FixedLength(2)),
    Request(prompt(4), Options(max_new_tokens=15), None),
    Request(prompt(6), Options(max_new_tokens=25, presence_penalty=0.4), FixedLength(1)),
]
SAMPLED = [
    Request(prompt(3), Options(temperature=1.0, max_new_tokens=20, seed=5), FixedLength(4)),
    Request(prompt(1), Options(temperature=0.7, top_k=3, max_new_tokens=16, seed=5), FixedLength(2), key=1),
    Request(prompt(4), Options(max_new_tokens=15), FixedLength(3), key=2),
    Request(prompt(2), Options(temperature=1.3, top_p=0.8, max_new_tokens=9, seed=8, eos=(0,)), None, key=3),
    Request(
        prompt(6), Options(temperature=0.9, repetition_penalty=1.2, max_new_tokens=20, seed=2), FixedLength(7), key=4
    ),
    Request(prompt(5), Options(temperature=0.6, min_p=0.1, max_new_tokens=12, seed=4), FixedLength(5), key=5),
]


def plain(request: Request) -> Request:
    return replace(request, policy=None)


# --- Greedy text is the target's ----------------------------------------------------------------------------------


@lru_cache
def undrafted(engine: str) -> list:
    return [generate(target(engine), [plain(request)])[0] for request in GREEDY]


@every_engine
@every_kind
@pytest.mark.parametrize("slots", [1, 3, 8])
def test_greedy_tokens_are_the_targets_in_a_batch(kind, engine, slots):
    found = record(target(engine), GREEDY, drafter(kind, engine), slots)
    assert outputs(found.rounds, 8) == undrafted(engine)
    assert {each.finished for each in undrafted(engine)} == {"length", "eos", "context"}
    assert found.accepted > 30


@every_engine
@every_kind
def test_greedy_tokens_of_a_row_alone_are_the_targets_and_drafts_are_accepted(kind, engine):
    for key, request in enumerate(GREEDY):
        found = record(target(engine), [request], drafter(kind, engine))
        assert outputs(found.rounds, 1) == [undrafted(engine)[key]]
        assert found.accepted > 0 or request.policy is None


@every_kind
@pytest.mark.parametrize("k", range(1, 8))
@pytest.mark.parametrize("seed", range(3))
def test_greedy_tokens_are_the_targets_with_a_drafter_that_knows_nothing(kind, k, seed):
    requests = [replace(each, policy=FixedLength(k)) for each in GREEDY]
    found = record(target("numba"), requests, drafter(kind, "numba", tiny_eagle(seed, CHECKPOINT, LAYERS, 5)), 3)
    assert outputs(found.rounds, 8) == undrafted("numba") and found.accepted > 5


@every_kind
@pytest.mark.parametrize("where", [ENGINES["numba"], INT8], ids=["float32", "int8"])
def test_greedy_tokens_are_those_of_a_target_of_either_dtype_with_an_int8_drafter(kind, where):
    steps = build_steps(trained(), CHECKPOINT, INT8)
    assert type(steps.committed) is type(steps.drafted) is Int8Eagle
    model = Transformer(CHECKPOINT, where, LAYERS)
    found = record(model, GREEDY, KINDS[kind](trained(), CHECKPOINT, INT8), 3)
    assert outputs(found.rounds, 8) == [generate(model, [plain(request)])[0] for request in GREEDY]
    assert found.accepted > 30


@every_kind
def test_a_trained_drafter_is_right_more_often_than_one_that_knows_nothing(kind):
    """Or its features, its positions or its own hidden states are not what it was trained on."""
    requests = [Request(prompt(n), Options(max_new_tokens=30), FixedLength(3)) for n in range(2, 14)]
    share = []
    for checkpoint in (trained(), RANDOM):
        found = record(target("numba"), requests, drafter(kind, "numba", checkpoint))
        share.append(found.accepted / sum(len(each.rows) for each in found.rounds))
    assert share[0] > max(0.4, 1.5 * share[1])


# --- Sampled text has the target's law ----------------------------------------------------------------------------

LAWS: dict[str, tuple[Request, ...]] = {
    "T=1": (exact_grid.request(2),),
    "T=0.7, three rounds": (exact_grid.request(1, temperature=0.7, max_new_tokens=4),),
    "top-p 0.8": (exact_grid.request(2, temperature=1.5, top_p=0.8),),
    "penalties": (exact_grid.request(2, repetition_penalty=1.5, presence_penalty=0.3),),
    "EOS, a first token without features": (
        exact_grid.request(2, prompt=(1,), eos=(2,), min_new_tokens=2, max_new_tokens=4),
    ),
    "two rows": (
        exact_grid.request(1, max_new_tokens=2),
        exact_grid.request(2, prompt=(2, 0), temperature=0.7, max_new_tokens=2, presence_penalty=0.5),
    ),
}


@lru_cache
def tiny_target(engine: str) -> tuple[Transformer, Callable]:
    """Of vocabulary 3, and the function of its logits after a prefix."""
    found = Transformer(exact_models.tiny(1), ENGINES[engine], LAYERS)
    reference = found.float64_reference() if engine == "torch" else found
    return found, exact_models.logits_function(reference)


@every_engine
@every_kind
@pytest.mark.parametrize(("name", "drafted"), [*((name, 2) for name in LAWS), ("T=1", 3)])
def test_the_law_of_the_output_is_the_targets(kind, engine, name, drafted):
    model, logits_after = tiny_target(engine)
    checkpoint = tiny_eagle(6, exact_models.tiny(1), LAYERS, vocabulary=drafted)
    how = {"nodes": 4, "width": 2} if kind == "tree" else {}
    make = EagleTreeDrafter if kind == "tree" else EagleDrafter
    expected = product_law([sequence_law(logits_after, each, model.context) for each in LAWS[name]])
    for slots in range(1, len(LAWS[name]) + 1):
        used = make(checkpoint, exact_models.tiny(1), ENGINES[engine], **how)
        found, branches = output_law(model, LAWS[name], used, slots=slots)
        assert distance(found, expected) < 1e-10
        assert branches >= len(expected) > 3
        assert kind == "tree" or branches > len(expected), "nothing was drawn by the drafter"


@every_kind
def test_drafts_of_the_enumerated_laws_are_accepted(kind):
    """Or the laws above show nothing."""
    checkpoint = tiny_eagle(6, exact_models.tiny(1), LAYERS, vocabulary=2)
    how = {"nodes": 4, "width": 2} if kind == "tree" else {}
    make = EagleTreeDrafter if kind == "tree" else EagleDrafter
    used = make(checkpoint, exact_models.tiny(1), ENGINES["numba"], **how)
    requests = [exact_grid.request(2, seed=seed, max_new_tokens=3) for seed in range(40)]
    rounds = list(decode(tiny_target("numba")[0], requests, used))
    accepted = [row.accepted for each in rounds for row in each.rows]
    assert sum(accepted) > 5 and 0 in accepted


# --- Rows are alone -----------------------------------------------------------------------------------------------


@lru_cache
def alone(kind: str, engine: str) -> list[Recorded]:
    return [record(target(engine), [request], drafter(kind, engine)) for request in SAMPLED]


def assert_alike(one: Draft, other: Draft, engine: str) -> None:
    assert one.tokens.tolist() == other.tokens.tolist() and one.topology == other.topology
    assert (one.law is None) == (other.law is None)
    if one.law is not None:
        np.testing.assert_allclose(one.law, other.law, **EXACT[engine])


@every_engine
@every_kind
@pytest.mark.parametrize("slots", [1, 2, 6])
@pytest.mark.parametrize("turned", [0, 2, 5])
def test_a_row_and_its_drafts_do_not_feel_neighbours_slots_or_order(kind, engine, slots, turned):
    order = np.roll(np.arange(len(SAMPLED)), turned)
    found = record(target(engine), [SAMPLED[number] for number in order], drafter(kind, engine), slots)
    assert sum(map(len, found.drafts.values())) > 40 and found.accepted > 20
    everything = outputs(found.rounds, len(order))
    for place, number in enumerate(order):
        expected = alone(kind, engine)[number]
        assert everything[place] == outputs(expected.rounds, 1)[0]
        assert len(found.drafts[place]) == len(expected.drafts[0])
        for (text, draft), (text_alone, draft_alone) in zip(found.drafts[place], expected.drafts[0], strict=True):
            assert text == text_alone
            assert_alike(draft, draft_alone, engine)


def test_two_rows_of_one_seed_and_key_draw_alike_and_of_another_key_do_not():
    one = SAMPLED[0]
    first, again, other = generate(target("numba"), [one, one, replace(one, key=7)], drafter("chain", "numba"))
    assert first == again != other


# --- Chains -------------------------------------------------------------------------------------------------------


@every_engine
@pytest.mark.parametrize("checkpoint", [trained, lambda: RANDOM], ids=["trained", "random"])
@pytest.mark.parametrize("requests", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_a_chain_is_what_a_drafter_without_memory_drafts(engine, checkpoint, requests):
    naive = Naive(checkpoint(), engine)
    found = record(target(engine), requests, drafter("chain", engine, checkpoint()), slots=3)
    drafted = 0
    for key, drafts in found.drafts.items():
        options = requests[key].options
        for text, draft in drafts:
            given, tokens = requests[key].prompt, tuple(draft.tokens.tolist())
            assert draft.topology.is_chain and (draft.law is None) == (options.greedy or not tokens)
            for depth, token in enumerate(tokens):
                output = np.array([*text[len(given) :], *tokens[:depth]], np.int64)
                everywhere = np.full(7, -np.inf)
                everywhere[naive.tokens] = naive.logits(text, tokens[:depth])
                history = History(np.array(given), output)
                if options.greedy:
                    assert token == processed(everywhere, options, history).argmax()
                else:
                    expected = law(everywhere, options, history)
                    np.testing.assert_allclose(draft.law[depth], expected, rtol=0, atol=1e-12)
                    assert draft.law[depth, token] > 0
                drafted += 1
            depth = min(requests[key].policy.k, len(given) + options.max_new_tokens - len(text) - 1, 47 - len(text))
            assert len(tokens) == (depth if len(text) > 1 else 0)
    assert drafted > 60


class Counting:
    """Counts the steps that follow the first one of a round."""

    def __init__(self, drafter: Drafter, monkeypatch: pytest.MonkeyPatch):
        self.steps, self.rows, extend = 0, [], drafter.memory.extend

        def counted(slots, *rest):
            self.steps += 1
            self.rows.append(list(slots))
            return extend(slots, *rest)

        monkeypatch.setattr(drafter.memory, "extend", counted)


@dataclass(frozen=True)
class Above(FixedLength):
    """Goes on while every confidence so far is above a threshold; notes what it was asked."""

    threshold: float = 0.0
    asked: list = ()

    @property
    def uses_confidence(self) -> bool:
        return True

    def proceed(self, confidences):
        self.asked.append(list(confidences))
        return min(confidences) > self.threshold


def above(threshold: float, k: int = 7) -> Above:
    return Above(k, threshold, [])


def views(
    drafter: Drafter, policies: Sequence[FixedLength], options: Options, limit: int | None = None, shortest: int = 5
):
    """Of rows whose prompts have 5, 6, … tokens, right after the prompt, with a state of their own."""
    drafter.start(len(policies), 60)
    texts = [np.array(prompt(shortest + number)) for number in range(len(policies))]
    slots = np.arange(len(policies))
    drafter.admit(slots, texts, target("numba").prefill(target("numba").new_state(len(texts), 60), slots, texts))
    return [
        RowView(slot, text, len(text), policy.k if limit is None else limit, policy, options, streams(3, slot, DRAFT))
        for slot, text, policy in zip(slots.tolist(), texts, policies, strict=True)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_policy_that_stops_a_chain_saves_the_steps_after_it(temperature, monkeypatch):
    used = drafter("chain", "numba")
    counted, lengths = Counting(used, monkeypatch), set()
    for threshold, shortest in product((0.0, 0.2, 0.35, 0.5, 0.9), range(5, 10)):
        policy = above(threshold)
        before = counted.steps
        (draft,) = used.propose(views(used, [policy], Options(temperature=temperature), shortest=shortest), None)
        assert counted.steps - before == len(draft.tokens) - 1
        assert len(draft.confidence) == len(draft.tokens) and (draft.confidence[:-1] > threshold).all()
        assert draft.confidence[-1] <= threshold or len(draft.tokens) == 7
        assert policy.asked == [draft.confidence[: n + 1].tolist() for n in range(min(len(draft.tokens), 6))]
        lengths.add(len(draft.tokens))
    assert {1, 7} < lengths


def test_rows_that_stop_do_not_stop_others(monkeypatch):
    used = drafter("chain", "numba")
    counted = Counting(used, monkeypatch)
    policies = [FixedLength(3), above(1.0), FixedLength(6), FixedLength(1)]
    drafts = used.propose(views(used, policies, Options()), None)
    assert [len(draft.tokens) for draft in drafts] == [3, 1, 6, 1]
    assert counted.rows == [[0, 2], [0, 2], [2], [2], [2]]


@every_kind
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_confidences_are_probabilities_and_made_only_for_policies_that_use_them(kind, temperature):
    used = drafter(kind, "numba")
    with_it, without = used.propose(views(used, [above(0.0), FixedLength(7)], Options(temperature=temperature)), None)
    assert without.confidence is None
    assert (with_it.confidence > 0).all() and (with_it.confidence <= 1).all()
    assert with_it.confidence.min() < 0.9


def test_the_confidence_of_a_drawn_token_is_the_largest_probability_whichever_was_drawn():
    used = drafter("chain", "numba")
    (draft,) = used.propose(views(used, [above(0.0)], Options(temperature=1.5)), None)
    assert draft.confidence.tolist() == draft.law.max(axis=1).tolist()
    assert (draft.law[np.arange(7), draft.tokens] < draft.confidence).any()


def test_the_confidence_of_a_greedy_token_is_its_probability():
    used, naive = drafter("chain", "numba"), Naive(trained(), "numba")
    row, *_ = views(used, [above(0.0)], Options())
    (draft,) = used.propose([row], None)
    for depth, confidence in enumerate(draft.confidence):
        logits = naive.logits(tuple(row.committed.tolist()), tuple(draft.tokens[:depth].tolist())).astype(np.float64)
        assert confidence == pytest.approx(np.exp(logits.max()) / np.exp(logits).sum(), rel=1e-5)


@every_kind
def test_nothing_is_drafted_without_a_limit(kind, monkeypatch):
    used = drafter(kind, "numba")
    rows = views(used, [FixedLength(4)] * 3, Options())
    counted = Counting(used, monkeypatch)
    first, none, last = used.propose([rows[0], replace(rows[1], limit=0), rows[2]], None)
    assert len(none.tokens) == 0 and len(none.topology) == 1
    assert first.topology.depths.max() > 1 and last.topology.depths.max() > 1
    assert set(counted.rows[0]) == {0, 2} and all(1 not in each for each in counted.rows)
    assert used.propose([replace(rows[1], limit=0)], None)[0] is none


@every_kind
def test_a_row_whose_policy_begins_with_nothing_is_decoded_without_drafts(kind):
    class Never(FixedLength):
        def begin(self, limit: int) -> int:
            return 0

    requests = [replace(GREEDY[0], policy=Never(4)), GREEDY[1]]
    found = record(target("numba"), requests, drafter(kind, "numba"))
    assert outputs(found.rounds, 2) == undrafted("numba")[:2]
    drafted = [row.drafted for each in found.rounds for row in each.rows if row.key == 0]
    assert drafted == [()] * 30


def test_tokens_outside_the_draft_vocabulary_have_no_probability():
    used = drafter("chain", "numba", RANDOM)
    assert len(RANDOM.tokens) == 5
    for options in (Options(temperature=1.0), Options(temperature=1.0, repetition_penalty=1.4)):
        (draft,) = used.propose(views(used, [FixedLength(7)], options), None)
        outside = np.setdiff1d(np.arange(7), RANDOM.tokens.numpy())
        assert draft.law.shape == (7, 7) and not draft.law[:, outside].any()
        assert (draft.law[:, RANDOM.tokens.numpy()] > 0).all()
        np.testing.assert_allclose(draft.law.sum(axis=1), 1, atol=1e-12)


def test_room_for_a_chain_is_its_depth():
    assert drafter("chain", "numba").most_nodes(7) == 7


# --- Errors -------------------------------------------------------------------------------------------------------


@every_engine
@every_kind
@pytest.mark.parametrize("length", [1, 4])
def test_a_target_without_features_is_an_error_that_says_what_to_do(kind, engine, length):
    blind = Transformer(CHECKPOINT, ENGINES[engine])
    with pytest.raises(ValueError, match=r"returns no features.*make it with the feature_layers of the"):
        generate(blind, [Request(prompt(length), Options(), FixedLength(2))], drafter(kind, engine))


@every_engine
def test_a_target_with_too_few_features_is_an_error(engine):
    blind = Transformer(CHECKPOINT, ENGINES[engine], (0, 2))
    with pytest.raises(ValueError, match="feature"):
        generate(blind, [Request(prompt(4), Options(), FixedLength(2))], drafter("chain", engine))


@every_kind
def test_a_drafter_of_another_target_is_refused(kind):
    with pytest.raises(ModelError, match=r"hidden states of tiny-1 .*the target is tiny-2 "):
        KINDS[kind](RANDOM, tiny_llama(2, vocabulary=7), ENGINES["torch"])


@every_engine
@every_kind
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_weights_that_lead_to_no_law_are_an_error(kind, engine, temperature):
    broken = replace(RANDOM, weights={**RANDOM.weights, "committed.norm.weight": torch.full((48,), torch.nan)})
    how = Options(temperature=temperature)
    with pytest.raises((LogitsError, FloatingPointError), match=r"largest logit|draft logits"):
        generate(target(engine), [Request(prompt(4), how, FixedLength(2))], drafter(kind, engine, broken))


@every_engine
def test_the_head_is_the_targets_whether_or_not_it_is_the_embedding(engine):
    config = replace(CHECKPOINT.config, tied_head=not CHECKPOINT.config.tied_head)
    made = tiny_llama(1, vocabulary=7, tied_head=config.tied_head)
    for checkpoint in (CHECKPOINT, made):
        eagle = tiny_eagle(2, checkpoint, LAYERS, vocabulary=4)
        name = "model.embed_tokens.weight" if checkpoint.config.tied_head else "lm_head.weight"
        head = checkpoint.weights[name][eagle.tokens].double().numpy()
        steps = build_steps(eagle, checkpoint, ENGINES[engine])
        cache = RaggedKV(1, 1, 2, 1, 8, ENGINES[engine].torch_dtype)
        plan = plan_step(np.array([0]), np.array([0]), np.array([0]), forest([chain(1)]))
        ones = np.ones((1, 48), np.float32)
        for part, step in (("committed", steps.committed), ("drafted", steps.drafted)):
            logits, hidden = (host(each).astype(np.float64) for each in step(plan, cache, ones, ones, np.array([0])))
            normed = hidden / np.sqrt((hidden**2).mean() + eagle.config.norm_eps)
            norm = eagle.weights[f"{part}.norm.weight"].double().numpy()
            np.testing.assert_allclose(logits, normed * norm @ head.T, rtol=1e-4)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_every_token_that_can_be_drafted_is_banned_nothing_is_drafted(temperature):
    model, _ = tiny_target("torch")
    checkpoint = tiny_eagle(6, exact_models.tiny(1), LAYERS, vocabulary=2)
    banned = {"eos": tuple(checkpoint.tokens.tolist()), "min_new_tokens": 3, "max_new_tokens": 4}
    request = exact_grid.request(2, temperature=temperature, **banned)
    used = EagleDrafter(checkpoint, exact_models.tiny(1), ENGINES["torch"])
    [*first, _] = [row for each in decode(model, [request], used) for row in each.rows]
    assert [(row.drafted, len(row.emitted)) for row in first] == [((), 1)] * 3
    if temperature == 0:
        [plain] = generate(model, [replace(request, policy=None)])
        assert plain == generate(model, [request], used)[0]
