from itertools import islice

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.lengths.fixed import FixedLength
from specdec_core.protocol import NO_DRAFT, Draft, RowView
from specdec_core.randomness import DRAFT, streams
from specdec_core.sampling import Options


def proposed(drafter: NGramDrafter, tokens, depth: int, slot: int = 0) -> Draft:
    view = RowView(slot, np.array(tokens), 1, depth, FixedLength(9), Options(), streams(0, 0, DRAFT))
    return drafter.propose([view], None)[0]


def drafted(tokens, depth: int, parts: int = 1, **how) -> Draft:
    """What is drafted after `tokens`, of which the drafter learns in `parts` pieces."""
    drafter = NGramDrafter(**how)
    drafter.start(1, 100)
    prompt, *pieces = np.array_split(np.array(tokens, np.int64), parts)
    drafter.admit(np.array([0]), [prompt], [None])
    for piece in pieces:
        drafter.observe(np.array([0]), [piece], [None])
    return proposed(drafter, tokens, depth)


def naive_continuations(tokens: list[int], depth: int, longest: int, shortest: int, candidates: int) -> list[list[int]]:
    """By scanning: longest suffix first, latest match first; a continuation past the end goes round."""

    def matches():
        for n in range(longest, shortest - 1, -1):
            for start in range(len(tokens) - 1, n - 1, -1):
                if tokens[start - n : start] == tokens[len(tokens) - n :]:
                    yield start

    found: list[list[int]] = []
    for start in islice(matches(), 16 * candidates):
        period = len(tokens) - start
        continuation = [tokens[start + place % period] for place in range(depth)]
        if continuation not in found and len(found) < candidates:
            found.append(continuation)
    return found


def branches(draft: Draft) -> list[list[int]]:
    """Tokens from the root to every leaf, leaves in order."""
    shape = draft.topology
    leaves = [node for node, children in enumerate(shape.children) if not children and node]
    return [[int(draft.tokens[node - 1]) for node in shape.path(leaf)[1:]] for leaf in leaves]


texts = st.lists(st.integers(0, 2), min_size=1, max_size=25)
lengths = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted)


@given(texts, st.integers(1, 6), lengths, st.integers(1, 4))
def test_a_chain_is_the_first_continuation_that_a_scan_finds(tokens, depth, bounds, parts):
    shortest, longest = bounds
    draft = drafted(tokens, depth, min(parts, len(tokens)), longest=longest, shortest=shortest)
    expected = naive_continuations(tokens, depth, longest, shortest, 1)
    assert branches(draft) == expected
    assert draft.topology.is_chain and draft.law is None


@given(texts, st.integers(1, 5), lengths, st.integers(2, 4))
def test_a_tree_is_the_trie_of_what_a_scan_finds(tokens, depth, bounds, candidates):
    shortest, longest = bounds
    draft = drafted(tokens, depth, longest=longest, shortest=shortest, candidates=candidates)
    expected = naive_continuations(tokens, depth, longest, shortest, candidates)
    assert sorted(branches(draft)) == sorted(expected)
    shape = draft.topology
    for children in shape.children:
        tried = [int(draft.tokens[child - 1]) for child in children]
        assert len(set(tried)) == len(tried)
    # Siblings are tried in the order of the candidates that brought them.
    best = [int(draft.tokens[child - 1]) for child in shape.children[0]]
    assert best == list(dict.fromkeys(each[0] for each in expected))


def test_the_longest_suffix_wins_over_the_latest():
    assert drafted([1, 2, 3, 7, 3, 8, 1, 2, 3], 1).tokens.tolist() == [7]


def test_the_latest_match_wins_among_equal_suffixes():
    assert drafted([3, 7, 3, 8, 3], 1).tokens.tolist() == [8]


def test_a_continuation_past_the_end_repeats_the_loop():
    assert drafted([9, 1, 2, 1, 2], 5).tokens.tolist() == [1, 2, 1, 2, 1]
    assert drafted([4, 4], 3).tokens.tolist() == [4, 4, 4]


def test_without_a_match_nothing_is_drafted():
    assert drafted([1, 2, 3], 4) is NO_DRAFT and drafted([1], 4) is NO_DRAFT


def test_suffixes_shorter_than_the_shortest_do_not_count():
    assert drafted([1, 5, 2, 1], 2, shortest=2) is NO_DRAFT


@given(texts, st.integers(1, 5), st.integers(1, 4))
def test_a_draft_fits_the_room_that_was_asked_for(tokens, depth, candidates):
    draft = drafted(tokens, depth, candidates=candidates)
    assert len(draft.tokens) <= NGramDrafter(candidates=candidates).most_nodes(depth)
    assert draft.topology.depths.max() <= depth


def test_nothing_is_drafted_without_a_limit():
    assert not len(drafted([4, 4, 4], 0).tokens)


def test_rows_do_not_see_each_other_and_released_slots_start_afresh():
    drafter = NGramDrafter()
    drafter.start(2, 50)
    drafter.admit(np.arange(2), [np.array([1, 2, 1]), np.array([1, 3, 1])], [None, None])
    assert proposed(drafter, [1, 2, 1], 1, slot=0).tokens.tolist() == [2]
    assert proposed(drafter, [1, 3, 1], 1, slot=1).tokens.tolist() == [3]
    drafter.release(np.array([0]))
    drafter.admit(np.array([0]), [np.array([5, 1])], [None])
    assert proposed(drafter, [5, 1], 1, slot=0) is NO_DRAFT


@pytest.mark.parametrize("bounds", [(2, 3), (0, 0), (3, 0)])
def test_suffix_lengths_are_checked(bounds):
    longest, shortest = bounds
    with pytest.raises(ValueError, match=f"suffix lengths {shortest}…{longest}: expected 1 ≤ shortest ≤ longest"):
        NGramDrafter(longest, shortest)


def test_candidates_are_checked():
    with pytest.raises(ValueError, match="candidates 0: expected at least 1"):
        NGramDrafter(candidates=0)
