"""The family as a whole: right samples pass, wrong ones do not, and the pieces are put together as they should be."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specdec_core.statistics import battery
from specdec_core.statistics.battery import ONE_SAMPLE, TWO_SAMPLE, Sample, adjusted, equivalent, one_sample, two_sample
from specdec_core.statistics.results import ChiSquare
from specdec_core.statistics.two_sample import choose_bins

V, LENGTH = 6, 40
BINS = choose_bins(np.arange(V), V)


def rows(n, seed, tilt=0.0):
    """Sequences of a model whose law depends on prompt and place; `tilt` of the way to a rival law."""
    random = np.random.default_rng(seed)
    laws = np.random.default_rng(99)
    tables = laws.dirichlet(np.ones(V), (4, LENGTH, 2))
    found = []
    for number in range(n):
        prompt = number % 4
        p, q = tables[prompt, :, 0], tables[prompt, :, 1]
        drawn = (1 - tilt) * p + tilt * q
        tokens = [int(random.choice(V, p=law)) for law in drawn]
        at = np.arange(LENGTH), tokens
        order = np.argsort(-(q / p), axis=1)
        place = np.array([list(order[i]).index(token) for i, token in enumerate(tokens)])
        below = np.array([p[i][order[i][: place[i]]].sum() for i in range(LENGTH)])
        found.append(
            {
                "prompt_id": prompt,
                "tokens": tokens,
                "offsets": "0123" * (LENGTH // 4),
                "pit": (below + random.random(LENGTH) * p[at]).tolist(),
                "in_set": "".join("01"[int(value)] for value in (q > p)[at]),
                "mass": np.where(q > p, p, 0).sum(axis=1).tolist(),
                "ratio": (q[at] / p[at]).tolist(),
            }
        )
    return found


RIGHT, REFERENCE, WRONG = Sample.of(rows(64, 1)), Sample.of(rows(64, 2)), Sample.of(rows(64, 3, tilt=0.6))


def test_a_sample_joins_its_rows():
    one, other = rows(2, 5)
    sample = Sample.of([one, other])
    assert sample.tokens == 2 * LENGTH and sample.strata == [0, 1]
    assert sample.pit.tolist() == [*one["pit"], *other["pit"]]
    assert sample.offsets.tolist() == [0, 1, 2, 3] * (LENGTH // 2)
    assert sample.in_set.tolist() == [digit == "1" for digit in one["in_set"] + other["in_set"]]


def test_rows_without_scores_count_as_sequences_only():
    bare = rows(1, 5)[0] | {"pit": None, "in_set": None, "mass": None, "ratio": None}
    sample = Sample.of([bare, rows(1, 6)[0]])
    assert sample.tokens == 2 * LENGTH and len(sample.pit) == len(sample.offsets) == LENGTH


def test_first_cuts_every_score_alike():
    cut = RIGHT.first(7)
    assert {len(getattr(cut, name)) for name in ("offsets", "pit", "in_set", "mass", "ratio")} == {7}
    assert cut.pit.tolist() == RIGHT.pit[:7].tolist() and cut.tokens == 0


def test_right_tokens_pass_and_wrong_ones_do_not():
    found = one_sample(RIGHT) | two_sample(RIGHT, REFERENCE, BINS, 499)
    assert set(found) == {*ONE_SAMPLE, *TWO_SAMPLE, battery.NOMINAL} and all(found[name].name == name for name in found)
    assert min(adjusted(found).values()) > 0.05
    wrong = one_sample(WRONG)
    assert all(value < 1e-3 for value in adjusted(wrong).values())
    assert "TV ≥ 0.0" in found[battery.DIRECTED].note and "TV ≥ 0.2" in wrong[battery.DIRECTED].note


def test_two_samples_of_other_tokens_differ():
    rarer = [[max(token, 1) for token in one] for one in RIGHT.sequences]
    found = two_sample(replace(RIGHT, sequences=rarer), REFERENCE, BINS, 499)
    assert all(found[name].p < 0.01 for name in (battery.NOMINAL, *TWO_SAMPLE))


def test_only_the_family_is_adjusted():
    found = one_sample(RIGHT) | two_sample(RIGHT, REFERENCE, BINS, 199)
    assert set(adjusted(found)) == {*ONE_SAMPLE, *TWO_SAMPLE}
    assert all(value >= found[name].p for name, value in adjusted(found).items())


def test_mmd_needs_more_than_one_sequence_a_prompt_and_method():
    four, other = Sample.of(rows(4, 1)), Sample.of(rows(4, 2))
    assert battery.DISCREPANCY not in two_sample(four, other, BINS, 99)


def test_degrees_of_freedom_are_those_of_the_bins():
    found = two_sample(RIGHT, REFERENCE, BINS, 99)[battery.NOMINAL]
    assert isinstance(found, ChiSquare) and battery.dof(found) == V - 1
    assert battery.dof(one_sample(RIGHT)[battery.KS]) is None


def test_equivalence_is_shown_for_right_tokens_only():
    assert equivalent(RIGHT, delta=0.05).p < 0.01 < 0.5 < equivalent(WRONG, delta=0.05).p
    assert equivalent(Sample.of(rows(1, 1)), delta=0.02).p > 0.05  # few tokens show nothing


def test_bins_are_merged_until_each_expects_five():
    bins = choose_bins(np.concatenate(RIGHT.sequences), V)
    few = battery.merged_bins(bins, RIGHT, tokens=30)
    assert few.count < bins.count
    assert battery.merged_bins(bins, RIGHT, tokens=10_000).count == bins.count


@pytest.mark.parametrize("fault_at", [1, 3])
def test_a_fault_at_one_offset_shows_by_offset(fault_at):
    right, wrong = rows(64, 1), rows(64, 3, tilt=0.5)
    for one, other in zip(right, wrong, strict=True):
        for place in range(fault_at, LENGTH, 4):
            one["pit"][place] = other["pit"][place]
    result = one_sample(Sample.of(right))[battery.BY_OFFSET]
    assert result.p < 0.01
    assert min(result.parts, key=lambda part: part.p).name == str(fault_at)
