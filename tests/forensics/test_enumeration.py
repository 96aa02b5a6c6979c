"""The enumerator itself, on laws that are known by hand, and the definition of a law against transformers' warpers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.forensics.enumeration import (
    NotALaw,
    Script,
    branches,
    distance,
    exact_law,
    plain_law,
    product_law,
    sequence_law,
    total_variation,
)
from specdec_core.rows import Request
from specdec_core.sampling import History, Options, law
from specdec_core.targets.table import random_logits

HALF = np.array([0.5, 0.5])


def test_two_coins():
    assert exact_law(lambda chance: chance.choose(HALF) + chance.choose(HALF)) == {0: 0.25, 1: 0.5, 2: 0.25}


def test_decisions_that_depend_on_earlier_ones():
    def run(chance):
        return chance.choose(np.array([0.0, 0.2, 0.8])) if chance.accept(0.3) else "no"

    found = exact_law(run)
    assert found == pytest.approx({"no": 0.7, 1: 0.06, 2: 0.24})


@given(st.lists(st.floats(0.01, 1), min_size=1, max_size=4), st.integers(1, 3))
def test_weights_of_all_branches_sum_to_one(weights, steps):
    values = np.array(weights) / sum(weights)
    found = list(branches(lambda chance: tuple(chance.choose(values) for _ in range(steps))))
    assert len(found) == len(weights) ** steps and math.isclose(sum(weight for _, weight in found), 1, rel_tol=1e-9)


def test_certain_decisions_do_not_branch():
    assert (
        len(list(branches(lambda chance: (chance.accept(1.0), chance.accept(0.0), chance.choose(np.eye(3)[1]))))) == 1
    )


@pytest.mark.parametrize("probability", [-0.1, 1.1, float("nan")])
def test_an_impossible_probability_is_refused(probability):
    with pytest.raises(NotALaw, match="expected 0…1"):
        Script().accept(probability)


@pytest.mark.parametrize("values", [[0.5, 0.4], [1.5, -0.5], [float("nan"), 1.0]])
def test_what_is_no_law_is_refused(values):
    with pytest.raises(NotALaw, match="sum to one"):
        Script().choose(np.array(values))


def test_distances():
    assert distance({"a": 0.5, "b": 0.5}, {"b": 0.3, "c": 0.7}) == 0.7
    assert total_variation({"a": 0.5, "b": 0.5}, {"b": 0.3, "c": 0.7}) == pytest.approx(0.7)


def test_rows_are_independent_in_a_product():
    found = product_law([{(0,): 0.25, (1,): 0.75}, {(2,): 1.0}])
    assert found == {((0,), (2,)): 0.25, ((1,), (2,)): 0.75}


OPTIONS = st.builds(
    Options,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 1.7]),
    top_k=st.integers(0, 6),
    top_p=st.floats(0.05, 1.0),
    min_p=st.floats(0.0, 0.9),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.8]),
    presence_penalty=st.sampled_from([0.0, 0.7, -0.4]),
    max_new_tokens=st.just(4),
    min_new_tokens=st.integers(0, 4),
    eos=st.sampled_from([(), (1,), (0, 3)]),
)


@given(OPTIONS, st.integers(0, 10_000), st.lists(st.integers(0, 6), min_size=1, max_size=4), st.integers(0, 3))
def test_the_plain_law_is_the_production_one(options, seed, tokens, prompt):
    logits = random_logits(7, seed)(tuple(tokens))
    head, tail = tokens[:prompt], tokens[prompt:]
    found = law(logits, options, History(np.array(head, np.int64), np.array(tail, np.int64)))
    assert np.abs(plain_law(logits, options, head, tail) - found).max() < 1e-12


def test_the_plain_law_by_hand():
    logits = np.log([0.5, 0.3, 0.2])
    assert plain_law(logits, Options(temperature=1.0, top_k=2), (), ()) == pytest.approx([0.625, 0.375, 0])
    assert plain_law(logits, Options(temperature=1.0, top_p=0.5), (), ()) == pytest.approx([1, 0, 0])
    assert plain_law(logits, Options(temperature=1.0, min_p=0.5), (), ()) == pytest.approx([0.625, 0.375, 0])
    assert plain_law(logits, Options(temperature=0.5), (), ()) == pytest.approx(np.array([25, 9, 4]) / 38)
    assert plain_law(logits, Options(temperature=0.0), (), ()).tolist() == [1, 0, 0]
    banned = Options(temperature=1.0, eos=(0,), min_new_tokens=1)
    assert plain_law(logits, banned, (), ()) == pytest.approx([0, 0.6, 0.4])
    assert plain_law(logits, banned, (), (2,)) == pytest.approx([0.5, 0.3, 0.2])


@pytest.mark.parametrize(
    ("options", "outputs"),
    [
        ({"max_new_tokens": 1}, {(0,), (1,)}),
        ({"eos": (1,)}, {(0, 0, 0), (0, 0, 1), (0, 1), (1,)}),
        ({"eos": (1,), "min_new_tokens": 2}, {(0, 0, 0), (0, 0, 1)}),  # the ban holds until two are there
        ({"stop": ("ab",)}, {(0, 0, 0), (0, 0, 1), (0, 1), (1, 0, 0), (1, 0, 1), (1, 1, 0), (1, 1, 1)}),
    ],
)
def test_where_sequences_end(options, outputs):
    request = Request((0,), Options(**{"temperature": 1.0, "max_new_tokens": 3} | options))
    text = lambda tokens: "".join("ab"[token] for token in tokens)  # noqa: E731
    found = sequence_law(random_logits(2, 1), request, 9, text)
    assert set(found) == outputs and math.isclose(sum(found.values()), 1)
    assert max(map(len, sequence_law(random_logits(2, 1), request, 2, text))) == 1  # the context is full
