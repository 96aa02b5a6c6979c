"""The tokens that can be drafted: what the target writes most, as far as training may know."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specdec_core.training.corpus import IS_HELD_OUT, Corpus
from specdec_core.training.draft_vocabulary import coverage, draft_vocabulary


def make_corpus(*rows: tuple[list[int], list[int]], held_out: tuple[int, ...] = (), vocabulary: int = 12) -> Corpus:
    """Rows of prompt and written tokens."""
    texts = [[*prompt, *written] for prompt, written in rows]
    return Corpus(
        np.concatenate(texts).astype(np.uint16),
        np.cumsum([0, *map(len, texts)]),
        np.array([len(prompt) for prompt, _ in rows], np.int32),
        np.array([IS_HELD_OUT * (row in held_out) for row in range(len(rows))], np.uint8),
        np.arange(len(rows), dtype=np.int32),
        {"vocabulary": vocabulary},
    )


CORPUS = make_corpus(
    ([9, 9, 9], [7, 7, 7, 2, 5]),
    ([9], [2, 5, 7, 3]),
    ([1], [4, 4, 4, 4, 4, 4, 4, 8, 8, 8]),
    ([9], [2, 3, 11]),
    held_out=(2,),
)
"""Written in training rows: 7 four times, 2 three times, 3 and 5 twice, 11 once."""


@pytest.mark.parametrize(
    ("size", "tokens"),
    [(1, [7]), (2, [2, 7]), (3, [2, 3, 7]), (4, [2, 3, 5, 7]), (5, [2, 3, 5, 7, 11]), (7, [0, 1, 2, 3, 5, 7, 11])],
)
def test_the_most_frequent_in_what_was_written_ascending_ties_to_the_lower(size, tokens):
    found = draft_vocabulary(CORPUS, size)
    assert found.tolist() == tokens and found.dtype == np.int64


def test_the_whole_vocabulary():
    assert draft_vocabulary(CORPUS, 12).tolist() == list(range(12))


def test_held_out_rows_change_nothing():
    other = replace(CORPUS, tokens=np.where(CORPUS.tokens == 4, 11, CORPUS.tokens))
    assert draft_vocabulary(other, 4).tolist() == draft_vocabulary(CORPUS, 4).tolist()
    trained_on = replace(CORPUS, flags=CORPUS.flags * 0)
    assert draft_vocabulary(trained_on, 2).tolist() == [4, 7]


@pytest.mark.parametrize("size", [0, -1, 13])
def test_a_size_that_cannot_be(size):
    with pytest.raises(ValueError, match=rf"a draft vocabulary of {size} tokens: expected 1…12"):
        draft_vocabulary(CORPUS, size)


def test_coverage_is_the_share_of_written_tokens():
    assert coverage(CORPUS, np.array([2, 7]), CORPUS.training) == pytest.approx(7 / 12)
    assert coverage(CORPUS, np.array([4]), CORPUS.held_out) == pytest.approx(0.7)
    assert coverage(CORPUS, np.arange(12), np.array([0])) == 1
