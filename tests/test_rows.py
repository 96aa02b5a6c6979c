import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.lengths.fixed import FixedLength
from specdec_core.randomness import DRAFT, VERIFY, streams
from specdec_core.rows import Request, Row
from specdec_core.sampling import Options

PIECES = ("a", "b", "ab", "ba", "c")


def text_of(tokens) -> str:
    return "".join(PIECES[token] for token in tokens)


def row(prompt=(0,), context: int = 100, detokenize=text_of, policy=None, key: int = 0, **options) -> Row:
    return Row(Request(tuple(prompt), Options(**options), policy, key), 0, context, streams, detokenize)


def test_tokens_are_taken_until_the_row_ends():
    this = row(eos=(3,))
    assert this.append([1, 3, 2]) == 2
    assert this.finished == "eos" and this.committed.tolist() == [0, 1, 3] and this.emitted == 2


def test_a_row_that_goes_on_takes_all():
    this = row()
    assert this.append([1, 2, 3]) == 3 and this.finished is None


def test_end_tokens_of_the_prompt_do_not_count():
    this = row(prompt=(3, 0, 3), eos=(3,))
    assert this.append([1, 1]) == 2 and this.finished is None


@pytest.mark.parametrize("cap", [1, 2, 4])
def test_the_cap_cuts_a_block(cap):
    this = row(max_new_tokens=cap)
    assert this.append([1, 1, 1, 1, 1]) == cap and this.finished == "length"


@pytest.mark.parametrize(("prompt", "taken"), [(1, 5), (3, 3), (5, 1)])
def test_the_context_cuts_a_block(prompt, taken):
    this = row(prompt=(0,) * prompt, context=6)
    assert this.append([1] * 9) == taken and this.finished == "context"


def test_an_end_token_is_named_before_the_cap():
    this = row(max_new_tokens=2, eos=(3,))
    this.append([1, 3])
    assert this.finished == "eos"


@pytest.mark.parametrize(("fewest", "taken"), [(0, 1), (1, 1), (2, 2), (3, 3)])
def test_no_end_before_the_fewest_new_tokens(fewest, taken):
    this = row(min_new_tokens=fewest, eos=(3,))
    assert this.append([3, 3, 3]) == taken and this.finished == "eos"


def first_stop(tokens, stops, fewest: int) -> int | None:
    """Tokens up to the first, from `fewest` on, whose text completes a stop string; by looking at the whole text."""
    for count in range(max(1, fewest), len(tokens) + 1):
        before, after = text_of(tokens[: count - 1]), text_of(tokens[:count])
        for stop in stops:
            ends = [start + len(stop) for start in range(len(after)) if after.startswith(stop, start)]
            if any(end > len(before) for end in ends):
                return count
    return None


@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=30),
    st.lists(st.text("abc", min_size=1, max_size=5), min_size=1, max_size=2),
    st.integers(0, 8),
)
def test_a_stop_string_ends_the_row_at_the_token_that_completes_it(tokens, stops, fewest):
    this = row(prompt=(0, 1, 4), stop=tuple(stops), min_new_tokens=fewest)
    expected = first_stop(tokens, stops, fewest)
    assert this.append(tokens) == (expected or len(tokens))
    assert this.finished == ("stop" if expected else None)


def test_a_stop_string_that_came_too_early_may_come_again():
    this = row(stop=("c",), min_new_tokens=2)
    assert this.append([4, 4, 0]) == 2


def test_a_stop_string_does_not_begin_in_the_prompt():
    this = row(prompt=(0,), stop=("ab",))
    assert this.append([1, 0, 1]) == 3 and this.finished == "stop"


def test_a_stop_string_may_lie_within_a_token_or_across_many():
    assert row(stop=("b",)).append([0, 2, 0]) == 2
    assert row(stop=("aaaaaaaa",)).append([0] * 20) == 8


def test_a_character_may_be_split_between_tokens():
    characters = "née €".encode()

    def decoded(tokens) -> str:
        return bytes(tokens).decode("utf-8", errors="replace")

    for stop, taken in (("é", 3), ("€", len(characters)), ("e", 4)):
        assert row(stop=(stop,), detokenize=decoded).append(list(characters)) == taken


def test_what_was_committed_cannot_be_written():
    with pytest.raises(ValueError, match="read-only"):
        row().committed[0] = 1


def test_history_parts_prompt_and_output():
    this = row(prompt=(0, 1))
    this.append([2, 3])
    assert (this.history.prompt.tolist(), this.history.output.tolist()) == ([0, 1], [2, 3])


@given(st.integers(1, 12), st.integers(1, 9), st.integers(0, 8), st.integers(3, 14))
def test_a_draft_leaves_room_for_the_token_after_it(cap, k, emitted, context):
    this = row(prompt=(0, 1), context=context, max_new_tokens=cap)
    this.append([1] * emitted)
    if not this.finished:
        limit = this.view(FixedLength(k)).limit
        assert limit == max(0, min(k, cap - emitted - 1, context - this.count - 1))
        this.append([1] * (limit + 1))
        assert this.emitted == emitted + limit + 1


class Eager(FixedLength):
    def begin(self, limit):
        assert limit > 0, "asked without room"
        return 99


class Reluctant(FixedLength):
    def begin(self, limit):
        return -1


def test_a_policy_gets_no_more_than_the_room():
    this = row(max_new_tokens=3)
    assert this.view(Eager(9)).limit == 2
    this.append([1, 1])
    assert this.view(Eager(9)).limit == 0
    assert row().view(Reluctant(9)).limit == 0


def test_a_view_shows_the_row_as_it_is():
    this = row(prompt=(0, 1), seed=3, key=5)
    this.append([2])
    view = this.view(FixedLength(4))
    assert (view.slot, view.prompt, view.committed.tolist(), view.options) == (0, 2, [0, 1, 2], this.options)
    law = np.full(1000, 1e-3)
    assert view.decisions.choose(law) == streams(3, 5, DRAFT).choose(law)
    assert this.decisions.choose(law) == streams(3, 5, VERIFY).choose(law)


def test_an_endless_cap_takes_no_memory():
    this = row(context=50, max_new_tokens=10**12)
    assert this.append([1] * 60) == 49 and this.finished == "context"
