"""The rule's exact output law, in every branch of chance, against the target's own."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core import rejection
from specdec_core.forensics.enumeration import NotALaw, Script, distance, exact_law
from specdec_core.protocol import NO_DRAFT, Draft
from specdec_core.rejection import follow, residual, walk
from specdec_core.topology import Topology, chain, tree
from tests.strategies import topologies

KINDS = ("free", "equal", "disjoint", "zeros", "one-hot drafter", "one-hot target")


@dataclass(frozen=True)
class Case:
    """Laws of target and drafter that differ for every prefix (the tokens on the path), of one kind of relation."""

    seed: int
    vocabulary: int
    kind: str

    def p(self, prefix: tuple[int, ...]) -> np.ndarray:
        return self._laws(prefix)[0]

    def q(self, prefix: tuple[int, ...]) -> np.ndarray:
        return self._laws(prefix)[1]

    def _laws(self, prefix: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        rng = np.random.default_rng([self.seed, len(prefix), *prefix])
        p, q = rng.dirichlet(np.full(self.vocabulary, 0.7), 2)
        half = rng.permutation(self.vocabulary) < self.vocabulary // 2
        if self.kind == "equal":
            q = p
        elif self.kind == "disjoint":
            p, q = np.where(half, p, 0), np.where(half, 0, q)
        elif self.kind == "zeros":
            p, q = np.where(rng.permutation(self.vocabulary) == 0, 0, p), np.where(half, 0, q)
        elif self.kind == "one-hot drafter":
            q = np.eye(self.vocabulary)[q.argmax()]
        elif self.kind == "one-hot target":
            p = np.eye(self.vocabulary)[p.argmax()]
        return p / p.sum(), q / q.sum()

    def target_law(self, length: int) -> dict[tuple[int, ...], float]:
        """Law of the next `length` tokens."""
        sequences = product(range(self.vocabulary), repeat=length)
        return {each: float(np.prod([self.p(each[:i])[t] for i, t in enumerate(each)])) for each in sequences}


def prefix_of(tokens, topology: Topology, node: int) -> tuple[int, ...]:
    return tuple(int(tokens[each - 1]) for each in topology.path(node)[1:])


def sampled_draft(case: Case, shape: Topology, decisions: Script, replace: bool = True, reshape=lambda q: q) -> Draft:
    """Every node's token is drawn from q after its parent; without replacement, siblings are excluded from q."""
    tokens: list[int] = []
    laws: list[np.ndarray] = []
    for node, parent in enumerate(shape.parents[1:], start=1):
        q = case.q(prefix_of(tokens, shape, parent)).copy()
        if not replace:
            q[[tokens[sibling - 1] for sibling in shape.children[parent] if sibling < node]] = 0
            if q.sum() == 0:
                q[:] = 1  # the drafter's support is used up: any law will do
            q /= q.sum()
        tokens.append(decisions.choose(q))
        laws.append(reshape(q))
    return Draft(np.array(tokens, np.int64), shape, np.array(laws) if laws else None)


def emitted(case: Case, draft: Draft, decisions: Script) -> tuple[int, ...]:
    outcome = walk(draft, lambda node: case.p(prefix_of(draft.tokens, draft.topology, node)), decisions)
    return (*(int(draft.tokens[node - 1]) for node in outcome.path[1:]), outcome.token)


def check_law(case: Case, shape: Topology, make_draft) -> None:
    """What a round emits, continued by the target to a common length, has the target's law."""
    length = int(shape.depths.max()) + 1
    found: dict[tuple[int, ...], float] = {}
    for tokens, weight in exact_law(lambda decisions: emitted(case, make_draft(decisions), decisions)).items():
        for rest in product(range(case.vocabulary), repeat=length - len(tokens)):
            whole = (*tokens, *rest)
            tail = np.prod([case.p(whole[:i])[whole[i]] for i in range(len(tokens), length)])
            found[whole] = found.get(whole, 0.0) + weight * float(tail)
    assert distance(found, case.target_law(length)) < 1e-12


cases = st.builds(Case, st.integers(0, 10**6), st.integers(2, 3), st.sampled_from(KINDS))
STAR = tree((-1, 0, 0, 0))
FORK = tree((-1, 0, 0, 1))
shapes = st.one_of(st.integers(1, 4).map(chain), st.sampled_from([STAR, FORK, tree((-1, 0, 1, 1)), tree((-1, 0, 0))]))


@settings(max_examples=60)
@given(cases, shapes)
def test_sampled_drafts_leave_the_law_the_targets(case, shape):
    check_law(case, shape, lambda decisions: sampled_draft(case, shape, decisions))


@settings(max_examples=25)
@given(cases, st.sampled_from([STAR, FORK]))
def test_siblings_drawn_without_replacement_leave_the_law_the_targets(case, shape):
    check_law(case, shape, lambda decisions: sampled_draft(case, shape, decisions, replace=False))


@settings(max_examples=80)
@given(cases, topologies(6), st.data())
def test_fixed_drafts_leave_the_law_the_targets(case, shape, data):
    # Any tokens, siblings that repeat one another among them.
    token = st.integers(0, case.vocabulary - 1)
    tokens = data.draw(st.lists(token, min_size=len(shape) - 1, max_size=len(shape) - 1))
    check_law(case, shape, lambda decisions: Draft(np.array(tokens, np.int64), shape))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("k", range(4))
def test_every_kind_of_law_in_chains(kind, k):
    case = Case(11, 3, kind)
    check_law(case, chain(k + 1), lambda decisions: sampled_draft(case, chain(k + 1), decisions))


def test_a_drafter_without_the_last_token_is_padded():
    case = Case(3, 4, "free")
    short = Case(5, 3, "free")
    check_law(case, FORK, lambda decisions: sampled_draft(short, FORK, decisions))


def test_a_drafter_with_padding_behind_the_vocabulary_is_cut():
    case = Case(3, 3, "free")

    def padded(q):
        return np.concatenate([q, np.zeros(2)])

    check_law(case, FORK, lambda decisions: sampled_draft(case, FORK, decisions, reshape=padded))


def test_probability_on_tokens_that_the_target_lacks_is_refused():
    draft = Draft(np.array([0]), chain(2), np.array([[0.5, 0.3, 0.2]]))
    with pytest.raises(ValueError, match="tokens ≥ 2, which the target does not have"):
        walk(draft, lambda node: np.array([0.5, 0.5]), Script())


def test_acceptance_is_one_minus_the_total_variation():
    case = Case(1, 4, "free")

    def accepted(decisions):
        draft = sampled_draft(case, chain(2), decisions)
        return len(walk(draft, lambda node: case.p(prefix_of(draft.tokens, draft.topology, node)), decisions).path) - 1

    p, q = case.p(()), case.q(())
    assert exact_law(accepted)[1] == pytest.approx(np.minimum(p, q).sum(), abs=1e-12)


def test_a_drafter_equal_to_the_target_is_always_accepted():
    case = Case(1, 3, "equal")

    def ending(decisions):
        draft = sampled_draft(case, chain(4), decisions)
        return walk(draft, lambda node: case.p(prefix_of(draft.tokens, draft.topology, node)), decisions).ending

    assert exact_law(ending) == {"bonus": pytest.approx(1)}


def test_outcomes_name_the_path_and_the_ending():
    def law_at(node):
        return np.eye(4)[[2, 0, 1, 3][node]]

    script = Script()
    assert walk(Draft(np.array([1, 2, 1]), FORK), law_at, script) == rejection.Outcome((0, 2), 1, "bonus")
    assert walk(Draft(np.array([1, 0, 1]), FORK), law_at, script) == rejection.Outcome((0,), 2, "recovered")
    assert walk(NO_DRAFT, law_at, script) == rejection.Outcome((0,), 2, "bonus")
    assert script.weight == 1


def test_the_law_is_asked_for_only_where_the_walk_arrives():
    asked = []

    def law_at(node):
        asked.append(node)
        return np.eye(3)[2]

    walk(Draft(np.array([0, 0, 1, 1]), tree((-1, 0, 1, 1, 0))), law_at, Script())
    assert asked == [0]


@given(topologies(8), st.data())
def test_follow_is_walk_on_one_hot_laws(shape, data):
    token = st.integers(0, 2)
    tokens = np.array(data.draw(st.lists(token, min_size=len(shape) - 1, max_size=len(shape) - 1)), np.int64)
    best = data.draw(st.lists(token, min_size=len(shape), max_size=len(shape)))
    draft = Draft(tokens, shape)
    script = Script()
    assert follow(draft, best.__getitem__) == walk(draft, lambda node: np.eye(3)[best[node]], script)
    assert script.weight == 1 and max(script.widths, default=1) == 1


@given(st.integers(0, 10**6), st.integers(2, 6))
def test_the_residual_is_the_positive_part_as_a_law(seed, vocabulary):
    p, q = np.random.default_rng(seed).dirichlet(np.ones(vocabulary), 2)
    left = residual(p, q)
    assert left.sum() == pytest.approx(1) and not left[p <= q].any()
    np.testing.assert_allclose(left * np.maximum(p - q, 0).sum(), np.maximum(p - q, 0), atol=1e-15)


def test_the_residual_of_equal_laws_is_no_nought_over_nought():
    p = np.array([0.3, 0.7])
    assert residual(p, p.copy()).tolist() == p.tolist()


# --- The check is seen to fail ------------------------------------------------------------------------------------


def wrong_residual_keeps_p(p, q):
    return p


def wrong_residual_is_not_normalised(p, q):
    return np.maximum(p - q, 0.0)


def wrong_residual_is_shifted(p, q):
    left = np.maximum(p - np.roll(q, 1), 0.0)
    return left / left.sum()


def wrong_residual_is_absolute(p, q):
    return np.abs(p - q) / np.abs(p - q).sum()


@pytest.mark.parametrize(
    "wrong",
    [wrong_residual_keeps_p, wrong_residual_is_not_normalised, wrong_residual_is_shifted, wrong_residual_is_absolute],
)
@pytest.mark.parametrize("shape", [chain(2), STAR], ids=["chain", "star"])
def test_a_wrong_residual_is_seen(monkeypatch, wrong, shape):
    case = Case(2, 3, "free")
    monkeypatch.setattr(rejection, "residual", wrong)
    with pytest.raises((AssertionError, NotALaw)):
        check_law(case, shape, lambda decisions: sampled_draft(case, shape, decisions))


@pytest.mark.parametrize("wrong", [lambda p, token: p, lambda p, token: np.where(np.arange(3) == token, 0, p)])
def test_a_candidate_that_is_not_removed_or_not_renormalised_is_seen(monkeypatch, wrong):
    case = Case(2, 3, "free")
    monkeypatch.setattr(rejection, "_without", wrong)
    with pytest.raises((AssertionError, NotALaw)):
        check_law(case, STAR, lambda decisions: Draft(np.array([0, 1, 2]), STAR))


def test_an_inverted_ratio_is_seen(monkeypatch):
    case = Case(2, 3, "free")
    monkeypatch.setattr(rejection, "min", lambda one, ratio: min(one, 1 / ratio), raising=False)
    with pytest.raises((AssertionError, NotALaw)):
        check_law(case, chain(2), lambda decisions: sampled_draft(case, chain(2), decisions))


def test_an_argmax_draft_tested_against_its_soft_law_is_seen():
    case = Case(2, 3, "free")

    def wrong(decisions):
        token = int(case.q(()).argmax())
        return Draft(np.array([token]), chain(2), case.q(())[None])

    with pytest.raises((AssertionError, NotALaw)):
        check_law(case, chain(2), wrong)


def test_a_law_of_another_temperature_than_the_sampled_one_is_seen():
    case = Case(2, 3, "free")
    with pytest.raises((AssertionError, NotALaw)):
        check_law(
            case,
            chain(2),
            lambda decisions: sampled_draft(case, chain(2), decisions, reshape=lambda q: q**0.5 / (q**0.5).sum()),
        )


def test_dropping_a_token_for_its_own_low_probability_is_seen():
    case = Case(2, 3, "free")

    def picky(decisions):
        draft = sampled_draft(case, chain(2), decisions)
        return draft if draft.law[0, draft.tokens[0]] > case.q(()).min() else NO_DRAFT

    with pytest.raises((AssertionError, NotALaw)):
        check_law(case, chain(2), picky)
