from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from specdec_core.decode import RequestError, decode, generate, outputs
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.evidence.ragged_exactness import SIGNATURES
from specdec_core.forensics.suspects import CONTEXT, LEARNED, ROTARY, V, make_model
from specdec_core.lengths.fixed import FixedLength
from specdec_core.measure.cost_model import count
from specdec_core.protocol import Draft
from specdec_core.published.grouping import grouped
from specdec_core.published.ways import WAYS
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.huggingface import HuggingFaceTarget
from specdec_core.topology import chain

pytestmark = pytest.mark.usefixtures("one_thread")

MODELS = (ROTARY, LEARNED)
BY_NAME = {way.name: way for way in WAYS}
SOUND = [way.name for way in WAYS if not way.broken]
LENGTHS = (1, 5, 9, 3, 12, 7, 5)


@cache
def expected(kind):
    target = HuggingFaceTarget(make_model(kind))
    return [generate(target, [replace(each, policy=None)])[0].tokens for each in requests()]


@cache
def requests(tokens=20):
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(0, V, length).tolist()) for length in LENGTHS]
    return [Request(p, Options(max_new_tokens=tokens), FixedLength(1 + i % 4), i) for i, p in enumerate(prompts)]


class HalfRight(NGramDrafter):
    """Drafts the right tokens, every other draft with a wrong one inside: rows accept unequally."""

    def __init__(self, texts):
        super().__init__()
        self._texts = texts

    def propose(self, views, state):
        return [self._draft_for(view) for view in views]

    def _draft_for(self, view):
        text = next(text for text in self._texts if text[: len(view.committed)] == tuple(view.committed.tolist()))
        tokens = np.array(text[len(view.committed) :][: view.limit], np.int64)
        if len(tokens) and (len(view.committed) + view.slot) % 2:
            place = view.slot % len(tokens)
            tokens[place] = (tokens[place] + 1) % V
        return Draft(tokens, chain(len(tokens) + 1))


def drafter(kind):
    return HalfRight([(*each.prompt, *tokens) for each, tokens in zip(requests(), expected(kind), strict=True)])


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("name", SOUND)
@pytest.mark.parametrize("slots", [1, 4])
@pytest.mark.parametrize("drafts", ["chain", "tree"])
def test_sound_ways_decode_every_row_as_alone(kind, name, slots, drafts):
    way = BY_NAME[name]
    drafting = drafter(kind) if drafts == "chain" else NGramDrafter(candidates=2)
    rounds = way.decode(way.target(make_model(kind)), requests(), drafting, slots)
    assert [each.tokens for each in outputs(rounds, len(LENGTHS))] == expected(kind)
    if drafts == "chain" and name != "batch minimum":
        assert len({row.accepted for each in rounds for row in each.rows}) > 2


@pytest.mark.parametrize("kind", MODELS)
def test_kept_positions_are_right_until_something_was_rejected_and_wrong_after(kind):
    way = BY_NAME["positions kept (BSP-like)"]
    target, adversary = way.target(make_model(kind)), WrongAfter(drafter(kind), rounds=2)
    rounds = way.decode(target, requests()[3:4], adversary, 1)
    found, right = outputs(rounds, 1)[0].tokens, expected(kind)[3]
    rows = [each.rows[0] for each in rounds]
    before = sum(
        len(row.emitted) for row in rows[: next(i for i, row in enumerate(rows) if row.ending == "recovered") + 1]
    )
    assert found[:before] == right[:before]
    assert found != right


class WrongAfter:
    """Another drafter's drafts, whole for some rounds, then wrong from the first token on."""

    def __init__(self, inner, rounds):
        self._inner, self._left = inner, rounds
        for name in ("most_nodes", "start", "admit", "observe", "release"):
            setattr(self, name, getattr(inner, name))
        inner._draft_for = self._whole

    def _whole(self, view):
        text = next(t for t in self._inner._texts if t[: view.prompt] == tuple(view.committed[: view.prompt].tolist()))
        tokens = np.array(text[len(view.committed) :][: view.limit], np.int64)
        return Draft(tokens, chain(len(tokens) + 1))

    def propose(self, views, state):
        drafts = self._inner.propose(views, state)
        self._left -= 1
        if self._left >= 0:
            return drafts
        return [Draft((each.tokens + 1) % V, each.topology) for each in drafts]


@pytest.mark.parametrize("kind", MODELS)
def test_a_kept_draft_is_wrong_from_its_first_rejection_on(kind):
    way = BY_NAME["draft kept (DSD-like)"]
    rounds = way.decode(way.target(make_model(kind)), requests()[1:2], WrongAfter(drafter(kind), rounds=2), 1)
    rows = [each.rows[0] for each in rounds]
    first = sum(len(row.emitted) for row in rows[:2])
    found, right = outputs(rounds, 1)[0].tokens, expected(kind)[1]
    assert found[:first] == right[:first]
    assert found[first] == (right[first] + 1) % V


def test_the_batch_minimum_accepts_less_and_every_row_as_much():
    kind = ROTARY
    taus = {}
    for name in ("scatter (ours)", "batch minimum"):
        way = BY_NAME[name]
        rounds = way.decode(way.target(make_model(kind)), requests(), drafter(kind), 4)
        taus[name] = count(rounds).tau
        if name == "batch minimum":
            going_on = [[row for row in each.rows if not row.finished] for each in rounds]
            assert all(len({len(row.emitted) for row in rows}) <= 1 for rows in going_on)
    assert taus["batch minimum"] < 0.8 * taus["scatter (ours)"]


def test_every_broken_way_has_the_signature_that_its_verdict_looks_for():
    assert set(SIGNATURES) == {way.name for way in WAYS if way.broken}


class TestGrouping:
    target = HuggingFaceTarget(make_model(ROTARY))

    def test_rounds_take_equal_lengths_where_there_are_any(self):
        rounds = list(grouped(self.target, requests(), drafter(ROTARY), batch=3, pool=7))
        contexts = [[row.context for row in each.rows] for each in rounds]
        assert all(len(each) <= 3 for each in contexts)
        equal = [each for each in contexts if len(each) > 1 and len(set(each)) == 1]
        assert contexts[0] == [5, 5]
        assert len(equal) > 1

    def test_rows_that_no_other_equals_still_go_on(self):
        lone = [replace(each, policy=None) for each in requests()[:3]]
        rounds = list(grouped(self.target, lone, None, batch=2, pool=3))
        assert [each.tokens for each in outputs(rounds, 3)] == expected(ROTARY)[:3]
        assert sorted(row.context for row in rounds[0].rows) == [1, 5]  # the two that have waited longest
        assert 2 in {row.key for row in rounds[1].rows}

    @pytest.mark.parametrize("pool", [3, 7])
    def test_sampled_rows_are_those_of_the_loop(self, pool):
        sampled = [replace(each, options=replace(each.options, temperature=1.0), key=5) for each in requests()]
        found = outputs(grouped(self.target, sampled, NGramDrafter(), batch=2, pool=pool), len(sampled))
        assert found == generate(self.target, sampled, NGramDrafter(), slots=3)
        assert found == outputs(decode(self.target, sampled, NGramDrafter(), slots=1), len(sampled))

    @pytest.mark.parametrize(
        ("change", "how", "message"),
        [
            ({}, {"batch": 3, "pool": 2}, "batches of 3 from a pool of 2 rows"),
            ({}, {"batch": 0, "pool": 2}, "batches of 0"),
            ({"repetition_penalty": 1.2}, {"batch": 1, "pool": 2}, "request 0 has penalties"),
            ({"min_new_tokens": 2}, {"batch": 1, "pool": 2}, "request 0 has penalties"),
            ({"max_new_tokens": CONTEXT - 5}, {"batch": 1, "pool": 2}, f"may need .* tokens.*context of {CONTEXT}"),
        ],
    )
    def test_what_it_cannot_do_is_refused_before_anything_runs(self, change, how, message):
        asked = [replace(each, options=replace(each.options, **change)) for each in requests()]
        with pytest.raises(RequestError, match=message):
            grouped(self.target, asked, NGramDrafter(), **how)
