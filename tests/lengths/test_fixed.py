import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.lengths.fixed import FixedLength


@given(st.integers(1, 20), st.integers(0, 30))
def test_k_tokens_or_what_there_is_room_for(k, room):
    assert FixedLength(k).begin(room) == min(k, room)


@given(st.integers(1, 20), st.lists(st.floats(0, 1)))
def test_it_never_stops_early_and_asks_for_no_confidence(k, confidences):
    policy = FixedLength(k)
    assert policy.proceed(confidences) and not policy.uses_confidence and policy.largest == k


@pytest.mark.parametrize("k", [0, -3])
def test_k_is_at_least_one(k):
    with pytest.raises(ValueError, match=f"K = {k}: expected at least 1"):
        FixedLength(k)
