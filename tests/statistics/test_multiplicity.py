"""Holm's adjustment against a case by hand, its monotony, and the error rate that it promises."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.statistics.intervals import binomial_interval
from specdec_core.statistics.multiplicity import holm

families = st.dictionaries(st.text(max_size=3), st.floats(0, 1), min_size=1, max_size=8)


def test_a_case_by_hand():
    # Sorted .01·4, .02·3, .04·2, .05·1; the last may not fall below the one before it.
    given_ps = {"ks": 0.04, "directed": 0.01, "mmd": 0.05, "χ²": 0.02}
    adjusted = holm(given_ps)
    assert adjusted == pytest.approx({"ks": 0.08, "directed": 0.04, "mmd": 0.08, "χ²": 0.06})
    assert list(adjusted) == list(given_ps)


def test_one_test_stays_as_it_is_and_nothing_exceeds_one():
    assert holm({"only": 0.03}) == {"only": 0.03}
    assert holm({"a": 0.6, "b": 0.7}) == {"a": 1.0, "b": 1.0}


@given(families)
def test_between_the_raw_p_and_bonferroni_in_the_same_order(p_values):
    adjusted = holm(p_values)
    for name, p in p_values.items():
        assert p <= adjusted[name] <= min(1.0, len(p_values) * p)
    names = sorted(p_values, key=lambda name: p_values[name])
    assert all(adjusted[a] <= adjusted[b] for a, b in pairwise(names))


def test_the_family_errs_at_its_level_where_raw_p_values_err_often():
    draws = np.random.default_rng(0).random((2000, 5))
    families = [dict(zip("abcde", row, strict=True)) for row in draws]
    wrong = sum(min(holm(family).values()) <= 0.05 for family in families)
    interval = binomial_interval(wrong, len(families), level=0.99)
    assert interval.low <= 1 - 0.99**5 <= interval.high  # all null: the smallest is compared with .05/5
    assert (draws.min(axis=1) <= 0.05).mean() > 0.2


@pytest.mark.parametrize("p", [-0.1, 1.1, math.nan])
def test_bad_p_values_are_named(p):
    with pytest.raises(ValueError, match=r"p-value of 'ks' is .*expected a number in \[0, 1\]"):
        holm({"mmd": 0.5, "ks": p})
    with pytest.raises(ValueError, match="no p-values"):
        holm({})
