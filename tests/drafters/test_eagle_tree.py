"""Trees of a trained drafter: the best candidates of all that could be read, found without reading all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.decode import generate, outputs
from specdec_core.drafters.eagle_tree import EagleTreeDrafter, _tempered, _Tree
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.eagle_checkpoint import PARTS, EagleCheckpoint
from specdec_core.protocol import Draft, RowView
from specdec_core.randomness import DRAFT, streams
from specdec_core.rows import Request
from specdec_core.sampling import Options
from tests.drafters.test_eagle import (
    CHECKPOINT,
    ENGINES,
    GREEDY,
    RANDOM,
    SAMPLED,
    Counting,
    Naive,
    above,
    every_engine,
    prompt,
    record,
    target,
    trained,
    views,
)

pytestmark = pytest.mark.usefixtures("one_thread")

Path = tuple[int, ...]
Followers = Callable[[Path], tuple[np.ndarray, np.ndarray]]
"""Tokens and log-probabilities `[width]` after a path of drafted tokens, the most probable first."""


def trees(nodes: int, width: int, engine: str = "numba", checkpoint: EagleCheckpoint | None = None):
    return EagleTreeDrafter(checkpoint or trained(), CHECKPOINT, ENGINES[engine], nodes, width)


# --- Everything is read -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Exhaustive:
    """The tree that is found when the `width` best newest candidates are read at every depth, whatever they promise.

    paths   of the nodes, in their order.
    useful  depths that had to be read: behind each was a candidate which was among the best of its time.
    shares  of each depth that had to be looked at: what is left of the probability of the depth before.
    """

    paths: list[Path]
    useful: int
    shares: list[float]


def exhaustive(followers: Followers, nodes: int, width: int, limit: int) -> Exhaustive:
    found: list[tuple[float, Path]] = []
    newest: list[tuple[float, Path]] = [(0.0, ())]
    masses, useful = [1.0], None
    for depth in range(1, limit + 1):
        fresh = [
            (before + share, (*path, token))
            for before, path in newest
            for token, share in zip(*(each.tolist() for each in followers(path)), strict=True)
        ]
        found += fresh
        newest = sorted(fresh, key=lambda each: -each[0])[:width]
        kept = [each for each in best(found, nodes) if each in newest]
        if useful is None:
            masses.append(sum(np.exp(share) for share, _ in kept))
            if not kept or depth == limit:
                useful = depth - 1
    kept = [path for _, path in best(found, nodes)]

    def lines(before: Path) -> Iterator[Path]:
        for path in kept:
            if path[:-1] == before:
                yield path
                yield from lines(path)

    paths = list(lines(()))
    shares = [after / before if before else 0.0 for before, after in pairwise(masses)]
    return Exhaustive(paths, useful, shares)


def best(found: list[tuple[float, Path]], nodes: int) -> list[tuple[float, Path]]:
    return sorted(found, key=lambda each: -each[0])[:nodes]


def paths_of(draft: Draft) -> list[Path]:
    """The drafted tokens from the root to each node."""
    return [tuple(draft.tokens[draft.topology.path(node)[1:] - 1].tolist()) for node in range(1, len(draft.topology))]


# --- Without a model ----------------------------------------------------------------------------------------------


def scripted(kind: str, width: int, seed: int) -> Followers:
    """Laws that depend on the path alone: with ties, with certainties, with impossible tokens."""

    def followers(path: Path) -> tuple[np.ndarray, np.ndarray]:
        random = np.random.default_rng((seed, *path))
        tokens = random.permutation(6)[:width]
        if kind == "equal":
            law = np.full(6, 1 / 6)
        elif kind == "ties":
            law = random.choice([1, 2, 4], 6).astype(float)
        elif kind == "certain":
            law = np.eye(6)[0]
        else:
            law = random.exponential(size=6) ** 3
        with np.errstate(divide="ignore"):
            return tokens, np.log(np.sort(law / law.sum())[::-1][:width])

    return followers


def grown(followers: Followers, nodes: int, width: int, policy: FixedLength) -> tuple[Draft, list[list[Path]]]:
    """A tree that is fed by hand; and the paths that were read, depth by depth."""
    view = RowView(0, np.array([1]), 1, policy.k, policy, Options(), streams(0, 0, DRAFT))
    tree, numbers, read = _Tree(view, nodes, width), [], []
    tokens, shares = followers(())
    tree.extend(tokens[None], shares[None])
    while tree.grows:
        chosen, places = tree.newest_tokens, tree.places()
        assert places.nodes.tolist() == list(range(len(numbers), len(numbers) + len(chosen)))
        assert places.depths.tolist() == [len(read)] * len(chosen) and 1 <= len(chosen) <= width
        numbers += chosen.tolist()
        assert places.paths.shape == (len(chosen), len(read) + 1) and places.paths.dtype == np.int32
        paths = [tuple(numbers[number] for number in line) for line in places.paths.tolist()]
        assert [path[-1] for path in paths] == chosen.tolist()
        before = read[-1] if read else [()]
        assert [before[row] for row in tree.parent_rows.tolist()] == [path[:-1] for path in paths]
        read.append(paths)
        laws = [followers(path) for path in paths]
        tree.extend(np.stack([tokens for tokens, _ in laws]), np.stack([shares for _, shares in laws]))
    return tree.draft(), read


@settings(max_examples=250)
@given(
    kind=st.sampled_from(["equal", "ties", "certain", "any"]),
    nodes=st.integers(1, 9),
    width=st.integers(1, 4),
    limit=st.integers(1, 6),
    seed=st.integers(0, 2**20),
)
def test_a_tree_is_the_best_of_everything_and_no_depth_is_read_in_vain(kind, nodes, width, limit, seed):
    width, policy = min(width, nodes), above(-1.0, limit)
    followers = scripted(kind, width, seed)
    expected = exhaustive(followers, nodes, width, limit)
    draft, read = grown(followers, nodes, width, policy)
    assert paths_of(draft) == expected.paths
    assert len(read) == expected.useful
    assert len(draft.tokens) <= nodes and draft.topology.depths.max() <= limit
    assert sum(map(len, read)) <= width * limit
    # The policy is asked between the steps, and knows the share of each depth so far.
    assert len(policy.asked) == expected.useful
    for depth, asked in enumerate(policy.asked, start=1):
        np.testing.assert_allclose(asked, expected.shares[:depth], rtol=1e-12)


@pytest.mark.parametrize("kind", ["equal", "ties", "any"])
def test_a_node_is_followed_by_its_line_and_siblings_stand_by_descending_probability(kind):
    for seed in range(30):
        followers = scripted(kind, 3, seed)
        draft, _ = grown(followers, 8, 3, FixedLength(4))
        topology = draft.topology
        # What follows a node stands behind it without a gap: the likeliest path is a chain at the tree's front.
        for node in range(len(topology)):
            below = [each for each in range(len(topology)) if node in topology.path(each)]
            assert below == list(range(node, node + len(below)))
        for node, children in enumerate(topology.children):
            tokens, _ = followers(tuple(draft.tokens[topology.path(node)[1:] - 1].tolist()))
            taken = [draft.tokens[child - 1] for child in children]
            assert taken == tokens[: len(taken)].tolist()


def test_equal_candidates_are_taken_in_the_order_of_their_depth_and_tokens():
    draft, read = grown(lambda path: (np.array([5, 2, 3]), np.log([0.25, 0.25, 0.25])), 5, 3, FixedLength(4))
    assert paths_of(draft) == [(5,), (5, 5), (5, 2), (2,), (3,)]
    assert read == [[(5,), (2,), (3,)], [(5, 5), (5, 2)]]


def test_a_sure_drafter_drafts_a_chain_as_deep_as_there_is_room():
    draft, read = grown(lambda path: (np.array([4, 1]), np.array([0.0, -np.inf])), 3, 2, FixedLength(6))
    assert paths_of(draft) == [(4,), (4, 4), (4, 4, 4)]
    assert read == [[(4,), (1,)], [(4, 4)], [(4, 4, 4)]]


# --- With a model -------------------------------------------------------------------------------------------------


def followers_of(naive: Naive, text: Path, temperature: float, width: int) -> Followers:
    def followers(path: Path) -> tuple[np.ndarray, np.ndarray]:
        logits = naive.logits(text, path).astype(np.float64) / temperature
        chosen = np.argsort(-logits, kind="stable")[:width]
        peak = logits.max()
        return naive.tokens[chosen], (logits - peak - np.log(np.exp(logits - peak).sum()))[chosen]

    return followers


@every_engine
@pytest.mark.parametrize("checkpoint", [trained, lambda: RANDOM], ids=["trained", "random"])
@pytest.mark.parametrize(("nodes", "width"), [(7, 3), (4, 4), (12, 2), (3, 1)])
def test_a_tree_is_what_a_drafter_without_memory_finds_when_it_reads_everything(engine, checkpoint, nodes, width):
    naive = Naive(checkpoint(), engine)
    requests = [*GREEDY[:3], *SAMPLED[:2], SAMPLED[5]]
    found = record(target(engine), requests, trees(nodes, width, engine, checkpoint()), slots=3)
    shapes = set()
    for key, drafts in found.drafts.items():
        request = requests[key]
        for text, draft in drafts:
            left = len(request.prompt) + request.options.max_new_tokens - len(text)
            limit = min(request.policy.k, left - 1, 47 - len(text))
            if len(text) == 1:
                assert not len(draft.tokens)
                continue
            followers = followers_of(naive, text, request.options.temperature or 1.0, width)
            assert paths_of(draft) == exhaustive(followers, nodes, width, limit).paths
            assert draft.law is None and draft.confidence is None
            shapes.add(draft.topology)
    assert len(shapes) > 5 or width == 1
    assert found.accepted > 10


def flat() -> EagleCheckpoint:
    none = {f"{part}.norm.weight": torch.zeros(48) for part in PARTS}
    return replace(RANDOM, weights={**RANDOM.weights, **none})


@every_engine
def test_tokens_of_equal_probability_are_taken_by_their_ids_and_drafting_ends_when_the_tree_is_full(
    engine, monkeypatch
):
    used = trees(4, 4, engine, flat())
    counted = Counting(used, monkeypatch)
    found = record(target(engine), [Request(prompt(6), Options(max_new_tokens=12), FixedLength(7))], used)
    lowest = [(int(token),) for token in RANDOM.tokens[:4]]
    for _, draft in found.drafts[0][:-1]:
        assert paths_of(draft) == lowest
    # Once a round, behind the first four, where nothing can be as probable; not where there is room for one token.
    assert counted.steps == sum(1 for text, draft in found.drafts[0] if len(text) + 2 < 18 and len(draft.tokens))


def test_trees_of_rows_that_end_at_different_depths_share_the_steps(monkeypatch):
    used = trees(16, 3)
    counted = Counting(used, monkeypatch)
    policies = [FixedLength(2), above(2.0), FixedLength(4), FixedLength(1)]
    drafts = used.propose(views(used, policies, Options()), None)
    assert [int(draft.topology.depths.max()) for draft in drafts][1::2] == [1, 1]
    assert drafts[0].topology.depths.max() == 2 < drafts[2].topology.depths.max()
    assert counted.rows[0] == [0, 2] and len(counted.rows) > 1
    assert all(rows == [2] for rows in counted.rows[1:])


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_policy_that_stops_a_tree_saves_the_steps_after_it(temperature, monkeypatch):
    used = trees(12, 3)
    counted, steps = Counting(used, monkeypatch), set()
    for threshold in (0.0, 0.5, 0.7, 0.8, 1.0):
        policy, before = above(threshold), counted.steps
        (draft,) = used.propose(views(used, [policy], Options(temperature=temperature)), None)
        paid = counted.steps - before
        assert paid == sum(min(asked) > threshold for asked in policy.asked)
        assert all(min(asked) > threshold for asked in policy.asked[:-1])
        assert all(0 < each <= 1 for asked in policy.asked for each in asked)
        assert draft.topology.depths.max() <= paid + 1
        steps.add(paid)
    assert 0 in steps and len(steps) > 2


def test_the_confidence_of_a_node_is_its_probability_after_its_parent():
    used, naive = trees(7, 3), Naive(trained(), "numba")
    for temperature in (0.0, 0.6):
        row, *_ = views(used, [above(0.0)], Options(temperature=temperature))
        (draft,) = used.propose([row], None)
        text = tuple(row.committed.tolist())
        for path, confidence in zip(paths_of(draft), draft.confidence, strict=True):
            tokens, shares = followers_of(naive, text, temperature or 1.0, 3)(path[:-1])
            assert confidence == pytest.approx(np.exp(shares[tokens.tolist().index(path[-1])]), rel=1e-5)


# --- Temperature --------------------------------------------------------------------------------------------------


def test_rows_at_temperature_one_keep_their_bits_beside_others():
    logits = np.random.default_rng(0).normal(size=(3, 5)).astype(np.float32) * 9
    found = _tempered(logits, np.array([1.0, 0.7, 1.0]))
    assert found.dtype == np.float32
    np.testing.assert_array_equal(found[[0, 2]], logits[[0, 2]])
    np.testing.assert_allclose(found[1], (logits[1] - logits[1].max()) / 0.7, rtol=1e-6)


@every_engine
@pytest.mark.parametrize("temperature", [1e-3, 1e-42, 1e-300, 1e30])
def test_no_temperature_is_too_low_or_too_high_for_a_tree(engine, temperature):
    requests = [
        Request(prompt(5), Options(temperature=temperature, max_new_tokens=9), FixedLength(4)),
        Request(prompt(4), Options(temperature=1.0, max_new_tokens=9), FixedLength(4), key=1),
    ]
    found = generate(target(engine), requests, trees(7, 3, engine))
    assert found[1] == generate(target(engine), requests[1:], trees(7, 3, engine))[0]
    if temperature < 1e-2:
        assert found[0] == generate(target(engine), [Request(prompt(5), Options(max_new_tokens=9))])[0]


def test_penalties_and_banned_tokens_cost_acceptance_and_never_output():
    how = Options(repetition_penalty=2.5, max_new_tokens=20, min_new_tokens=10, eos=(1, 2, 6))
    requests = [Request(prompt(5), how, FixedLength(4)), Request(prompt(7), how, FixedLength(2))]
    found = record(target("numba"), requests, trees(7, 3))
    assert outputs(found.rounds, 2) == generate(target("numba"), [replace(each, policy=None) for each in requests])


# --- Sizes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("nodes", "width"), [(3, 4), (0, 0), (4, 0), (16, 6)])
def test_a_tree_that_cannot_be_is_refused(nodes, width):
    with pytest.raises(ValueError, match=rf"a tree of {nodes} nodes, {width} a depth: expected 1 ≤ width ≤ nodes.*5"):
        trees(nodes, width, checkpoint=RANDOM)


@pytest.mark.parametrize(("nodes", "width", "depth", "room"), [(16, 4, 3, 16), (16, 4, 7, 28), (5, 5, 1, 5)])
def test_room_is_for_the_tree_and_for_what_is_read_while_it_grows(nodes, width, depth, room):
    assert trees(nodes, width).most_nodes(depth) == room


def test_a_tree_is_never_larger_than_was_said():
    found = record(target("numba"), GREEDY, trees(6, 6))
    sizes = [len(draft.tokens) for drafts in found.drafts.values() for _, draft in drafts]
    assert max(sizes) == 6 and outputs(found.rounds, 8)[0].finished == "length"
