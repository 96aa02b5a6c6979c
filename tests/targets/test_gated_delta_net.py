import dataclasses
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.arrays import host
from specdec_core.decode import decode, generate, outputs
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.kernels.gated_delta import torch as closed_form
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.gdn_checkpoint import PURE, tiny_gdn
from specdec_core.placement import Placement, PlacementError
from specdec_core.protocol import Draft
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.state.slots import CacheError
from specdec_core.targets import gated_delta_net
from specdec_core.targets.gated_delta_net import GatedDeltaNet
from specdec_core.topology import chain, forest, tree
from tests.conformance import Subject, TargetConformance
from tests.gdn_reference import GdnReference
from tests.kernels.gated_delta.windows import random_tree
from tests.targets.greedy import assert_speculation_equals_autoregression

pytestmark = pytest.mark.usefixtures("one_thread")

HYBRID, PLAIN = tiny_gdn(1), tiny_gdn(2, **PURE)
CHECKPOINTS = {"hybrid": HYBRID, "pure": PLAIN}
REFERENCES = {name: GdnReference(checkpoint) for name, checkpoint in CHECKPOINTS.items()}
DOUBLE = Placement(dtype="float64")
TARGETS = {name: GatedDeltaNet(checkpoint, DOUBLE) for name, checkpoint in CHECKPOINTS.items()}
both = pytest.mark.parametrize("name", CHECKPOINTS)


class RecurrentConformance(TargetConformance):
    """The contract of a target that cannot forget what it has read, but for all of it."""

    @pytest.mark.parametrize("length", range(6))
    def test_rewinding_to_n_is_recomputing(self, length):
        if length in (0, 5):
            return super().test_rewinding_to_n_is_recomputing(length)
        subject, prompts = self.subject, [self.subject.tokens(seed, 6) for seed in (3, 4)]
        state = subject.holding(*prompts)
        with pytest.raises(CacheError, match=rf"slot 0 of length 5 cannot be rewound to {length}.*expected 0 or 5…5"):
            state.rewind(np.array([1, 0]), np.array([0, length]))
        for row, prompt in enumerate(prompts):
            subject.next_is_right(state, row, prompt)

    @pytest.mark.parametrize("change", ["commit", "rewind", "release"])
    def test_a_verification_does_not_outlive_a_change_of_the_state(self, change):
        if change != "rewind":
            return super().test_a_verification_does_not_outlive_a_change_of_the_state(change)
        subject, prompt = self.subject, self.subject.tokens(9, 4)
        for length in (0, 3):
            state = subject.holding(prompt)
            _, found = subject.verify(state, [(0, prompt[-1:], chain(1))])
            state.rewind(np.array([0]), np.array([length]))
            with pytest.raises(CacheError, match="stale"):
                subject.target.commit(state, found, [np.arange(1)])


class TestPure(RecurrentConformance):
    subject = Subject(TARGETS["pure"], REFERENCES["pure"].last, tolerance=1e-10)


class TestHybridEagerInChunks(RecurrentConformance):
    subject = Subject(GatedDeltaNet(HYBRID, DOUBLE, chunk=2, delayed=False), REFERENCES["hybrid"].last, tolerance=1e-10)


class TestHybridFloat32(RecurrentConformance):
    subject = Subject(GatedDeltaNet(HYBRID), REFERENCES["hybrid"].last, tolerance=2e-3)


# --- The core property --------------------------------------------------------------------------------------------


def play(name: str, seed: int, rounds: int) -> None:
    """Rounds of chains, trees and no drafts over rows that change places, come and go; all logits are right."""
    rng = np.random.default_rng(seed)
    target, expected = TARGETS[name], REFERENCES[name].last
    if rng.random() < 0.5:
        target = GatedDeltaNet(CHECKPOINTS[name], DOUBLE, step=target._step, delayed=False, chunk=3)
    state = target.new_state(4, 80)
    rows: dict[int, list[int]] = {}
    for _ in range(rounds):
        for slot in range(4):
            if slot not in rows and (not rows or rng.random() < 0.5):
                rows[slot] = rng.integers(0, target.vocabulary, rng.integers(1, 8)).tolist()
                target.prefill(state, np.array([slot]), [np.array(rows[slot])])
        # Often the same rows as before, so that commits wait for the pass that they are meant for.
        slots = np.array(sorted(rows) if rng.random() < 0.6 else rng.permutation(list(rows))[: rng.integers(1, 5)])
        shape = forest([random_tree(rng, 6) for _ in slots])
        tokens = rng.integers(0, target.vocabulary, len(shape.rows))
        tokens[shape.offsets[:-1]] = [rows[slot][-1] for slot in slots]
        found = target.verify(state, slots, tokens, shape)
        logits = host(found.logits)
        for flat in rng.permutation(len(tokens))[:3]:
            row = shape.rows[flat]
            path = shape.offsets[row] + shape.trees[row].path(int(shape.nodes[flat]))
            prefix = [*rows[slots[row]][:-1], *tokens[path]]
            np.testing.assert_allclose(logits[flat], expected(prefix), rtol=0, atol=1e-10)
        if rng.random() < 0.15:
            continue  # verified again, with other drafts
        ends = [int(rng.integers(-1, len(each))) for each in shape.trees]
        paths = [
            each.path(end) if end >= 0 else np.empty(0, np.int64) for each, end in zip(shape.trees, ends, strict=True)
        ]
        target.commit(state, found, paths)
        for slot, path, first in zip(slots, paths, shape.offsets[:-1], strict=True):
            if len(path):
                rows[slot] += [*tokens[first + path[1:]].tolist(), int(rng.integers(target.vocabulary))]
            if len(rows[slot]) > 24 or rng.random() < 0.1:
                state.release(np.array([slot]))
                del rows[slot]
    for slot, committed in rows.items():
        assert state.lengths[slot] == len(committed) - 1
        logits = target.verify(state, np.array([slot]), np.array(committed[-1:]), forest([chain(1)])).logits
        np.testing.assert_allclose(host(logits[0]), expected(committed), rtol=0, atol=1e-10)


@both
@settings(max_examples=25)
@given(seed=st.integers(0, 10**9), rounds=st.integers(1, 7))
def test_any_rounds_leave_what_a_fresh_run_leaves(name, seed, rounds):
    play(name, seed, rounds)


# --- Decoding -----------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize("candidates", [1, 2], ids=["chains", "trees"])
def test_greedy_speculation_is_autoregression(name, candidates):
    assert_speculation_equals_autoregression(TARGETS[name], 0.0, candidates, new_tokens=16)


class Oracle:
    """Drafts what the target will say: a tree whose first branch is wrong, its right one as deep as there is room."""

    def __init__(self, texts):
        self.texts = texts

    def most_nodes(self, depth):
        return 2 * depth + 1

    def propose(self, views, state):
        drafts = []
        for view in views:
            done = view.committed.tolist()
            text = next(each for each in self.texts if list(each[: len(done)]) == done)
            right = text[len(done) : len(done) + view.limit]
            wrong = [(right[0] + 1) % 97, *right[1:]]
            parents = [-1, 0, *range(1, len(wrong)), 0, *range(len(wrong) + 1, 2 * len(wrong))]
            drafts.append(Draft(np.array([*wrong, *right]), tree(tuple(parents))))
        return drafts

    def ignore(self, *given):
        """It keeps nothing."""

    start = admit = observe = release = ignore


@both
@pytest.mark.parametrize("slots", [1, 3])
def test_long_paths_of_trees_are_accepted_whole(name, slots):
    prompts = [(5, 17, 3, 88), (2,), (40, 41, 42, 43, 44, 45)]
    plain = [
        Request(prompt, Options(max_new_tokens=tokens)) for prompt, tokens in zip(prompts, (20, 9, 15), strict=True)
    ]
    alone = [generate(TARGETS[name], [request])[0].tokens for request in plain]
    texts = [[*prompt, *text] for prompt, text in zip(prompts, alone, strict=True)]
    drafted = [dataclasses.replace(request, policy=FixedLength(4)) for request in plain]
    rounds = list(decode(TARGETS[name], drafted, Oracle(texts), slots=slots))
    assert [each.tokens for each in outputs(rounds, 3)] == alone
    assert all(row.accepted == len(row.drafted) for each in rounds for row in each.rows)
    assert max(row.accepted for each in rounds for row in each.rows) == 4


@both
def test_a_sampled_row_does_not_depend_on_its_neighbours(name):
    requests = [
        Request((1, 4, 1, 4, 1), Options(temperature=1.0, max_new_tokens=14, seed=3), FixedLength(3), key=0),
        Request((9,), Options(temperature=0.7, top_k=8, max_new_tokens=9, seed=3), FixedLength(5), key=1),
        Request((7, 8, 9, 7, 8), Options(temperature=1.3, max_new_tokens=12, seed=4), FixedLength(2), key=2),
        Request((50, 60), Options(max_new_tokens=10), None, key=3),
    ]
    alone = [generate(TARGETS[name], [request], NGramDrafter(candidates=2))[0] for request in requests]
    for slots in (2, 4):
        assert generate(TARGETS[name], requests, NGramDrafter(candidates=2), slots=slots) == alone
    other = dataclasses.replace(requests[0], options=dataclasses.replace(requests[0].options, seed=5))
    assert generate(TARGETS[name], [other], NGramDrafter(candidates=2))[0] != alone[0]


# --- Prefill and features -----------------------------------------------------------------------------------------

PROMPT = np.array([5, 17, 3, 88, 41, 9])


def prefilled(target: GatedDeltaNet, prompt: np.ndarray = PROMPT):
    state = target.new_state(1, 32)
    return state, target.prefill(state, np.array([0]), [prompt])[0]


@both
@pytest.mark.parametrize("chunk", [1, 2, 3, 5, 100])
def test_any_chunk_of_prefill_gives_the_same_state_and_features(name, chunk):
    state, features = prefilled(GatedDeltaNet(CHECKPOINTS[name], DOUBLE, feature_layers=(3, 0), chunk=chunk))
    whole, expected = prefilled(GatedDeltaNet(CHECKPOINTS[name], DOUBLE, feature_layers=(0, 3)))
    assert state.lengths.tolist() == [5] and features.shape == (5, 2, 48)
    torch.testing.assert_close(features, expected, rtol=0, atol=1e-11)
    torch.testing.assert_close(state.keys[:, :, :, :5], whole.keys[:, :, :, :5], rtol=0, atol=1e-11)
    for mine, other in zip(state.memory + state.convolution, whole.memory + whole.convolution, strict=True):
        torch.testing.assert_close(mine, other, rtol=0, atol=1e-11)
        assert mine.any()


def test_prefill_leaves_nothing_to_be_committed():
    state, _ = prefilled(TARGETS["hybrid"])
    before = [each.clone() for each in state.memory]
    state.flush()
    assert all(torch.equal(mine, other) for mine, other in zip(state.memory, before, strict=True))


@both
def test_features_are_the_hidden_states_after_the_layers_asked_for(name):
    target = GatedDeltaNet(CHECKPOINTS[name], DOUBLE, feature_layers=(3, 1))
    state, of_prompt = prefilled(target)
    shape = tree((-1, 0, 0, 2))
    found = target.verify(state, np.array([0]), np.array([9, 1, 2, 3]), forest([shape]))
    hidden = REFERENCES[name].hidden(PROMPT)
    assert target.feature_layers == (1, 3)
    np.testing.assert_allclose(host(of_prompt), hidden[[1, 3], :5].swapaxes(0, 1), atol=1e-10)
    np.testing.assert_allclose(host(found.features[0]), hidden[[1, 3], 5], atol=1e-10)
    after = REFERENCES[name].hidden([*PROMPT, 2, 3])[[1, 3], 7]
    np.testing.assert_allclose(host(found.features[3]), after, atol=1e-10)


def test_features_are_none_unless_asked_for():
    state, features = prefilled(TARGETS["pure"])
    assert features is None
    assert TARGETS["pure"].verify(state, np.array([0]), PROMPT[-1:], forest([chain(1)])).features is None
    assert prefilled(GatedDeltaNet(PLAIN, DOUBLE, feature_layers=(0,)), PROMPT[:1])[1] is None


# --- Where and how ------------------------------------------------------------------------------------------------


@both
def test_the_kernel_comes_from_one_place_and_commits_with_the_next_pass(name, monkeypatch):
    calls = []

    def recorded(function):
        def run(*given):
            calls.append(function.__name__)
            return function(*given)

        return run

    functions = ("verify", "commit", "commit_then_verify")
    recording = SimpleNamespace(**{each: recorded(getattr(closed_form, each)) for each in functions})
    monkeypatch.setattr(gated_delta_net, "build_kernel", lambda placement: recording)
    target = GatedDeltaNet(CHECKPOINTS[name], DOUBLE)
    layers = 4 - len(target.config.attention_layers)
    state, _ = prefilled(target)
    assert calls == ["verify"] * layers + ["commit"] * layers
    for _ in range(2):
        calls.clear()
        found = target.verify(state, np.array([0]), np.array([9, 1]), forest([chain(2)]))
        target.commit(state, found, [np.arange(2)])
    assert calls == ["commit_then_verify"] * layers


@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_logits_have_the_placements_dtype_and_states_at_least_float32(dtype):
    target = GatedDeltaNet(HYBRID, Placement(dtype=dtype))
    state, _ = prefilled(target)
    logits = target.verify(state, np.array([0]), PROMPT[-1:], forest([chain(1)])).logits
    wanted = target.placement.torch_dtype
    assert state.keys.dtype == state.convolution[0].dtype == logits.dtype == wanted
    assert state.memory[0].dtype == (torch.float64 if dtype == "float64" else torch.float32)
    expected = REFERENCES["hybrid"].last(PROMPT)
    assert np.abs(host(logits[0]) - expected).max() < (0.5 if dtype == "bfloat16" else 1e-3)


def test_the_same_weights_elsewhere():
    target = GatedDeltaNet(HYBRID, Placement(), feature_layers=(2,), chunk=7, delayed=False)
    moved = target.float64_reference()
    assert moved.placement == DOUBLE and moved.feature_layers == (2,) and moved.name == HYBRID.name
    state, _ = prefilled(moved)
    assert state.memory[0].dtype == torch.float64 and not state.delayed and moved._chunk == 7
    assert (moved.vocabulary, moved.context, moved.layers) == (97, 256, 4)
    moved.synchronise()


# --- Refusals -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layer", [-1, 4])
def test_feature_layers_that_are_not_there(layer):
    with pytest.raises(ValueError, match=rf"feature layers \[{layer}\]: expected layers in 0…3"):
        GatedDeltaNet(HYBRID, DOUBLE, feature_layers=(1, layer))


def test_a_chunk_of_nothing():
    with pytest.raises(ValueError, match="chunk of 0 tokens: expected at least 1"):
        GatedDeltaNet(HYBRID, DOUBLE, chunk=0)


def test_an_engine_without_this_step():
    with pytest.raises(PlacementError, match="'numba' has no Gated DeltaNet step: use the torch engine"):
        GatedDeltaNet(HYBRID, Placement("numba", threads=1))


@pytest.mark.parametrize("token", [-1, 97])
def test_a_token_of_another_vocabulary_changes_nothing(token):
    state, _ = prefilled(TARGETS["pure"])
    with pytest.raises(ValueError, match=rf"token {token} is outside the target's vocabulary 0…96"):
        TARGETS["pure"].verify(state, np.array([0]), np.array([9, token]), forest([chain(2)]))
    assert state.lengths.tolist() == [5]


@both
def test_no_position_lies_past_the_context(name):
    target = GatedDeltaNet(tiny_gdn(1, context=8, **(PURE if name == "pure" else {})), DOUBLE)
    state, _ = prefilled(target)
    target.verify(state, np.array([0]), np.array([9, 1, 2, 3]), forest([tree((-1, 0, 1, 1))]))
    with pytest.raises(CacheError, match="position 8 is past the model's context of 8 tokens"):
        target.verify(state, np.array([0]), np.array([9, 1, 2, 3]), forest([chain(4)]))
    assert state.lengths.tolist() == [5]


@both
@pytest.mark.parametrize("path", [[1], [0, 2], [0, 1, 2, 3], [0, 4]])
def test_a_path_that_is_none_changes_nothing(name, path):
    state, _ = prefilled(TARGETS[name])
    found = TARGETS[name].verify(state, np.array([0]), np.array([9, 1, 2, 3]), forest([tree((-1, 0, 1, 1))]))
    with pytest.raises(CacheError, match="expected the indices of all nodes from the root"):
        TARGETS[name].commit(state, found, [np.array(path)])
    assert state.lengths.tolist() == [5]
    TARGETS[name].commit(state, found, [np.array([0, 1, 3])])
    logits = TARGETS[name].verify(state, np.array([0]), np.array([4]), forest([chain(1)])).logits
    np.testing.assert_allclose(host(logits[0]), REFERENCES[name].last([*PROMPT, 1, 3, 4]), rtol=0, atol=1e-10)


def test_a_form_of_the_rule_that_was_given_stays_and_the_reference_has_its_own(monkeypatch):
    given_form, other = SimpleNamespace(**vars(closed_form)), SimpleNamespace(**vars(closed_form))
    elsewhere = Placement("torch", "cpu", "bfloat16")
    monkeypatch.setattr(gated_delta_net, "build_kernel", lambda where: other if where == elsewhere else closed_form)
    target = GatedDeltaNet(tiny_gdn(3), kernel=given_form)
    assert target.placed(elsewhere).new_state(1, 4).kernel is given_form
    assert target.float64_reference().new_state(1, 4).kernel is closed_form
    assert GatedDeltaNet(tiny_gdn(3)).placed(elsewhere).new_state(1, 4).kernel is other
