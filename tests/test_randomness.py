import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import binomtest, chisquare

from specdec_core.randomness import DRAFT, VERIFY, StreamDecisions, streams

whole = st.integers(0, 2**70)
laws = (
    st.lists(st.floats(0, 1), min_size=1, max_size=8)
    .filter(lambda w: sum(w) > 1e-3)
    .map(lambda w: np.array(w) / sum(w))
)


def numbers(decisions: StreamDecisions, count: int = 4) -> list[int]:
    return [decisions.choose(np.full(1000, 1e-3)) for _ in range(count)]


@given(whole, whole, st.sampled_from([DRAFT, VERIFY]))
def test_a_stream_is_named_by_seed_key_and_purpose(seed, key, purpose):
    assert numbers(streams(seed, key, purpose)) == numbers(streams(seed, key, purpose))


names = st.tuples(
    st.sampled_from([0, 1, 2, 2**32, 2**32 + 1, 2**33, 2**64, 2**64 + 2**32]),
    st.sampled_from([0, 1, 2, 2**32, 2**32 + 1]),
    st.sampled_from([DRAFT, VERIFY]),
)


@given(names, names)
def test_different_names_are_different_streams(one, other):
    assert (numbers(streams(*one), 6) == numbers(streams(*other), 6)) == (one == other)


def test_a_stream_does_not_feel_its_neighbours():
    alone = numbers(streams(5, 1, VERIFY), 8)
    row, neighbour, draft = streams(5, 1, VERIFY), streams(5, 2, VERIFY), streams(5, 1, DRAFT)
    together = []
    for _ in range(8):
        numbers(neighbour), numbers(draft, 3)
        together += numbers(row, 1)
    assert together == alone


def test_streams_of_rows_and_purposes_are_uncorrelated():
    law = np.full(2, 0.5)
    draws = np.array([numbers_of(streams(3, key, purpose), law) for key in (0, 1) for purpose in (DRAFT, VERIFY)])
    assert np.abs(np.corrcoef(draws) - np.eye(4)).max() < 4 / np.sqrt(draws.shape[1])


def numbers_of(decisions: StreamDecisions, law: np.ndarray, count: int = 4000) -> list[int]:
    return [decisions.choose(law) for _ in range(count)]


@pytest.mark.parametrize("law", [(0.5, 0.3, 0.15, 0.05), (0.2,) * 5, (0.0, 0.1, 0.0, 0.9, 0.0)])
def test_choose_follows_the_law(law):
    law = np.array(law)
    counts = np.bincount(numbers_of(streams(1, 0, VERIFY), law, 20_000), minlength=len(law))
    assert not counts[law == 0].any()
    assert chisquare(counts[law > 0], 20_000 * law[law > 0]).pvalue > 1e-3


@pytest.mark.parametrize("probability", [0.02, 0.5, 0.9])
def test_accept_has_the_probability_asked_for(probability):
    decisions = streams(2, 0, VERIFY)
    accepted = sum(decisions.accept(probability) for _ in range(20_000))
    assert binomtest(accepted, 20_000, probability).pvalue > 1e-3


def test_accept_of_nothing_and_of_certainty():
    decisions = streams(0, 0, VERIFY)
    assert not any(decisions.accept(0.0) for _ in range(2000))
    assert all(decisions.accept(1.0) for _ in range(2000))


def test_every_decision_costs_one_uniform():
    one, other = streams(0, 0, VERIFY), streams(0, 0, VERIFY)
    one.accept(0.0), one.accept(1.0), one.choose(np.array([1.0]))
    other.accept(0.5), other.accept(0.2), other.choose(np.array([0.3, 0.7]))
    assert numbers(one) == numbers(other)


class Fixed:
    def __init__(self, uniform: float):
        self.uniform = uniform

    def random(self) -> float:
        return self.uniform


@given(laws, st.floats(0, 1, exclude_max=True))
def test_no_uniform_reaches_a_token_of_probability_zero(law, uniform):
    decisions = StreamDecisions(0, 0, VERIFY)
    decisions._generator = Fixed(uniform)
    assert law[decisions.choose(law)] > 0


@pytest.mark.parametrize("uniform", [0.0, np.nextafter(1.0, 0.0)])
def test_tails_of_probability_zero_are_unreachable_at_the_ends(uniform):
    decisions = StreamDecisions(0, 0, VERIFY)
    decisions._generator = Fixed(uniform)
    for size in range(1, 200):
        # A total that is not one: cumulative sums of 1/size rarely end at exactly 1.
        law = np.concatenate([[0.0], np.full(size, 1 / size), [0.0, 0.0]])
        assert 1 <= decisions.choose(law) <= size


def test_a_negative_seed_is_refused():
    with pytest.raises(ValueError, match="seed -1: expected a non-negative integer"):
        streams(-1, 0, VERIFY)
