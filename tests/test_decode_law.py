"""The production loop's exact output law: every branch of every decision, target's and drafter's, of whole batches."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from specdec_core import rejection
from specdec_core.decode import generate
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.lengths.fixed import FixedLength
from specdec_core.protocol import Draft
from specdec_core.rows import Request
from specdec_core.sampling import History, Options, law
from specdec_core.targets.table import TableTarget, random_logits
from specdec_core.topology import tree
from tests.branches import distance, exact_law

V = 3
TABLE = random_logits(V, seed=1)
TARGET = TableTarget(TABLE, V, context=8)
PLAIN = Options(temperature=1.0, max_new_tokens=3)


class Fixed(NGramDrafter):
    """Drafts the same tree every round, as deep as there is room: siblings, one of them repeated."""

    def propose(self, views, state):
        deep = Draft(np.array([0, 1, 0, 2]), tree((-1, 0, 0, 0, 1)))
        flat = Draft(np.array([1, 2]), tree((-1, 0, 0)))
        return [deep if view.limit > 1 else flat for view in views]


DRAFTERS = {
    "far": lambda: ModelDrafter(TableTarget(random_logits(V, seed=2), V), V),
    "equal": lambda: ModelDrafter(TARGET, V),
    "narrow": lambda: ModelDrafter(TableTarget(random_logits(2, seed=2), 2), V),
    "wide": lambda: ModelDrafter(TableTarget(random_logits(5, seed=2), 5), V),
    "ngram": lambda: NGramDrafter(candidates=1),
    "ngram tree": lambda: NGramDrafter(candidates=3),
    "fixed tree": Fixed,
}


def expected_law(request: Request) -> dict[tuple[int, ...], float]:
    """Law of the output by the definition of autoregressive sampling."""
    options, prompt = request.options, request.prompt
    found: dict[tuple[int, ...], float] = {}

    def grow(output: tuple[int, ...], weight: float) -> None:
        p = law(TABLE((*prompt, *output)), options, History(np.array(prompt), np.array(output, np.int64)))
        for token in np.flatnonzero(p).tolist():
            longer = (*output, token)
            ends = token in options.eos and len(longer) >= options.min_new_tokens
            full = len(longer) == options.max_new_tokens or len(prompt) + len(longer) == TARGET.context
            if ends or full:
                found[longer] = weight * p[token]
            else:
                grow(longer, weight * p[token])

    grow((), 1.0)
    return found


def found_law(requests, drafter, slots=None):
    """Law of the outputs of a batch, as tuples of tokens."""

    def run(decisions):
        how = {"slots": slots, "source": lambda seed, key, purpose: decisions}
        return tuple(output.tokens for output in generate(TARGET, requests, drafter, **how))

    return exact_law(run)


def check(requests, drafter, slots=None) -> None:
    laws = [expected_law(request) for request in requests]
    expected = {(): 1.0}
    for one in laws:
        expected = {(*done, each): w * v for done, w in expected.items() for each, v in one.items()}
    found = found_law(requests, drafter, slots)
    assert distance(found, expected) < 1e-12 and math.isclose(sum(found.values()), 1, abs_tol=1e-12)


def request(k: int | None = 2, prompt=(0, 1, 0), **options) -> Request:
    return Request(prompt, replace(PLAIN, **options), k and FixedLength(k))


@pytest.mark.parametrize("k", [1, 2, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_every_drafter_and_length(name, k):
    check([request(k, max_new_tokens=4 if k == 3 and name != "wide" else 3)], DRAFTERS[name]())


def test_without_a_drafter():
    check([request(None, max_new_tokens=4)], None)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.6},
        {"top_k": 2},
        {"top_p": 0.7},
        {"min_p": 0.4},
        {"repetition_penalty": 1.7},
        {"presence_penalty": 0.9},
        {"eos": (1,)},
        {"eos": (1, 2), "min_new_tokens": 2},
        {"top_k": 2, "presence_penalty": -0.5, "eos": (0,), "temperature": 1.4},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["far", "fixed tree"])
def test_every_option(name, options):
    check([request(**options)], DRAFTERS[name]())


def test_a_context_that_ends_inside_a_draft():
    check([request(prompt=(0, 1, 0, 2, 1), max_new_tokens=9)], DRAFTERS["far"]())


def test_a_prompt_of_one_token():
    check([request(prompt=(2,))], DRAFTERS["far"]())


@pytest.mark.parametrize("slots", [1, 2])
@pytest.mark.parametrize("name", ["far", "fixed tree"])
def test_rows_of_a_batch_are_independent(name, slots):
    rows = [request(1, max_new_tokens=2), request(2, prompt=(1,), max_new_tokens=2, temperature=0.7, eos=(2,))]
    check(rows, DRAFTERS[name](), slots)


def test_a_drafted_and_a_plain_row_share_a_batch():
    check([request(None, max_new_tokens=2), request(1, prompt=(2, 2), max_new_tokens=2)], DRAFTERS["far"]())


def test_a_greedy_row_uses_no_chance_and_leaves_its_neighbours_law():
    check([request(2, temperature=0.0), request(1, prompt=(1,), max_new_tokens=2)], DRAFTERS["far"]())


# --- The check is seen to fail ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("residual", lambda p, q: p),
        ("residual", lambda p, q: q),
        ("_padded", lambda q, size: np.roll(q, 1)),
    ],
)
def test_a_wrong_rule_is_seen(monkeypatch, name, wrong):
    monkeypatch.setattr(rejection, name, wrong)
    with pytest.raises(AssertionError):
        check([request()], DRAFTERS["far"]())


def test_a_candidate_that_is_not_removed_is_seen(monkeypatch):
    monkeypatch.setattr(rejection, "_without", lambda p, token: p)
    with pytest.raises(AssertionError):
        check([request()], DRAFTERS["fixed tree"]())


def test_a_history_without_the_drafted_tokens_is_seen(monkeypatch):
    monkeypatch.setattr(History, "extended", lambda self, tokens: self)
    with pytest.raises(AssertionError):
        check([request(presence_penalty=0.9)], DRAFTERS["far"]())


def test_entries_kept_of_the_wrong_branch_are_seen(monkeypatch):
    commit = TableTarget.commit
    monkeypatch.setattr(
        TableTarget,
        "commit",
        lambda self, state, found, paths: commit(self, state, found, [np.arange(len(p)) for p in paths]),
    )
    with pytest.raises(AssertionError):
        check([request()], DRAFTERS["fixed tree"]())
