from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import kstest

from specdec_core.forensics.scoring import CAP, Scorer, look
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.sampling import History, Options, law
from specdec_core.targets.table import TableTarget, random_logits
from specdec_core.targets.transformer import Transformer

V = 8
LOGITS, OTHER = random_logits(V, 1), random_logits(V, 2)
WARM = Options(temperature=1.0)


def by_hand(p, q, token):
    """Order the vocabulary by q/p descending, ties by id."""
    with np.errstate(divide="ignore", invalid="ignore"):
        order = sorted(range(len(p)), key=lambda t: (-(q[t] / p[t]) if p[t] > 0 else -np.inf, t))
    return sum(p[t] for t in order[: order.index(token)])


@given(st.integers(0, 1000), st.integers(0, V - 1))
def test_look_agrees_with_sorting(seed, token):
    p, q = np.random.default_rng(seed).dirichlet(np.ones(V), 2)
    below, at, in_set, mass, ratio = look(p, q, token)
    assert below == pytest.approx(by_hand(p, q, token)) and at == p[token]
    assert in_set == (q[token] > p[token]) and mass == pytest.approx(p[q > p].sum())
    assert ratio == pytest.approx(q[token] / p[token])


def test_masses_of_all_tokens_tile_the_unit_interval():
    p, q = np.random.default_rng(3).dirichlet(np.ones(V), 2)
    ends = sorted((look(p, q, token)[0], look(p, q, token)[0] + p[token]) for token in range(V))
    assert ends[0][0] == 0 and ends[-1][1] == pytest.approx(1)
    assert all(one[1] == pytest.approx(other[0]) for one, other in pairwise(ends))


def test_what_cannot_be_drawn_has_the_capped_ratio_and_other_vocabularies_are_read():
    p = np.array([0.5, 0.5, 0.0])
    assert look(p, np.array([0.2, 0.2, 0.6]), 2)[4] == CAP
    assert look(p, np.array([0.2, 0.8]), 1)[2:4] == (True, 0.5)
    assert look(p, np.array([0.1, 0.2, 0.3, 0.4]), 1)[2] is False


def test_scores_are_those_of_the_laws_before_each_token():
    tokens = (3, 1, 4, 1, 5)
    found = Scorer(TableTarget(LOGITS, V), TableTarget(OTHER, V)).score((0, 2), tokens, WARM, seed=4)
    uniforms = np.random.default_rng(4).random(5)
    for place, token in enumerate(tokens):
        prefix, past = (0, 2, *tokens[:place]), History(np.array([0, 2]), np.array(tokens[:place], np.int64))
        p, q = (law(logits(prefix), WARM, past) for logits in (LOGITS, OTHER))
        below, at, in_set, mass, ratio = look(p, q, token)
        assert found.pit[place] == pytest.approx(below + uniforms[place] * at)
        assert (found.in_set[place], found.mass[place], found.ratio[place]) == (in_set, mass, ratio)


def test_options_and_history_are_those_of_the_row():
    options = Options(temperature=0.7, presence_penalty=0.9, eos=(5,), min_new_tokens=2)
    found = Scorer.laws(TableTarget(LOGITS, V), (0,), (1, 2, 3), options)
    assert found[0][5] == found[1][5] == 0 < found[2][5]
    expected = law(LOGITS((0, 1)), options, History(np.array([0]), np.array([1])))
    assert np.array_equal(found[1], expected)


def sampled(logits, n, seed):
    random, tokens = np.random.default_rng(seed), []
    for _ in range(n):
        tokens.append(int(random.choice(V, p=law(logits((0, *tokens)), WARM, History(np.array([0]))))))
    return tokens


@pytest.mark.parametrize("alternative", [TableTarget(OTHER, V), None], ids=["drafter", "flatter"])
def test_right_tokens_are_uniform_and_a_drafters_lean_to_zero(alternative):
    scorer = Scorer(TableTarget(LOGITS, V, context=512), alternative)
    right = scorer.score((0,), sampled(LOGITS, 400, 0), WARM, 1).pit
    assert kstest(right, "uniform").pvalue > 0.01
    leaning = OTHER if alternative else (lambda prefix: LOGITS(prefix) / 2)
    wrong = scorer.score((0,), sampled(leaning, 400, 0), WARM, 1)
    assert kstest(wrong.pit, "uniform").pvalue < 1e-6 and wrong.pit.mean() < 0.45
    assert wrong.in_set.mean() > wrong.mass.mean() + 0.05


def test_a_real_cache_gives_the_same_laws_in_one_pass_as_step_by_step(one_thread):
    target = Transformer(tiny_llama(1), Placement(dtype="float64"))
    tokens = (5, 9, 96, 0, 3)
    whole = Scorer.laws(target, (7, 8), tokens, WARM)
    for place in range(5):
        alone = Scorer.laws(target, (7, 8, *tokens[:place]), tokens[place : place + 1], WARM)[0]
        assert np.abs(whole[place] - alone).max() < 1e-12


def test_tokens_that_the_alternative_lacks_are_read_as_its_last():
    narrow = TableTarget(random_logits(4, 2), 4)
    found = Scorer(TableTarget(LOGITS, V), narrow).score((0,), (7, 6, 1), WARM, 0)
    assert np.isfinite(found.ratio).all() and found.ratio[0] == 0
