"""Batches of pairs: each token beside the features before it, anchors where drafts start, laws where they are due."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, islice

import numpy as np
import pytest
import torch

from specdec_core.training.corpus import IS_GREEDY, IS_HELD_OUT, Corpus
from specdec_core.training.eagle_batches import Batch, batch_of, training_order

pytestmark = pytest.mark.usefixtures("one_thread")

UNROLL = 3


def random_corpus(
    rows: Sequence[tuple[int, int]],
    greedy: Sequence[int] = (),
    held_out: Sequence[int] = (),
    vocabulary: int = 23,
    seed: int = 0,
) -> Corpus:
    """Rows of (prompt's tokens, written tokens), with random tokens; which rows are greedy, and which held out."""
    lengths = [prompt + written for prompt, written in rows]
    flags = np.zeros(len(rows), np.uint8)
    flags[list(greedy)] |= IS_GREEDY
    flags[list(held_out)] |= IS_HELD_OUT
    return Corpus(
        np.random.default_rng(seed).integers(0, vocabulary, sum(lengths)).astype(np.uint16),
        np.cumsum([0, *lengths]),
        np.array([prompt for prompt, _ in rows], np.int32),
        flags,
        np.arange(len(rows), dtype=np.int32),
        {"vocabulary": vocabulary},
    )


def random_features(corpus: Corpus, layers: int = 2, hidden: int = 4, seed: int = 1) -> np.ndarray:
    """`[tokens, layers + 1, hidden]` float16."""
    shape = (len(corpus.tokens), layers + 1, hidden)
    return np.random.default_rng(seed).normal(size=shape).astype(np.float16)


CORPUS = random_corpus([(4, 5), (1, 3), (2, 9), (6, 1), (1, 1), (3, 2)], greedy=[0, 2, 3])
FEATURES = random_features(CORPUS)
ROWS = np.array([2, 0, 1, 3, 4])


@pytest.fixture(scope="module")
def batch() -> Batch:
    return batch_of(CORPUS, FEATURES, ROWS, UNROLL)


def test_a_pair_is_a_token_and_the_features_of_the_one_before(batch):
    assert batch.lengths.tolist() == [len(CORPUS.sequence(row)) - 1 for row in ROWS]
    for place, row in enumerate(ROWS):
        start, text = CORPUS.offsets[row], CORPUS.sequence(row)
        for pair in range(len(text) - 1):
            assert batch.tokens[place, pair] == text[pair + 1]
            assert np.array_equal(batch.features[place, pair], FEATURES[start + pair, :-1].astype(np.float32))
        assert not batch.tokens[place, len(text) - 1 :].any() and not batch.features[place, len(text) - 1 :].any()
    assert batch.tokens.dtype == torch.int64 and batch.features.dtype == torch.float32


def test_drafts_start_before_every_token_that_the_target_wrote_and_behind_the_last(batch):
    for place, row in enumerate(ROWS):
        prompt, written = CORPUS.row(row)
        text, anchors = CORPUS.sequence(row), batch.anchors[place, batch.real[place]].tolist()
        # A prompt of one token has no features before its only token: nothing can be drafted behind that.
        first = max(0, len(prompt) - 2)
        assert anchors == list(range(first, len(text) - 1))
        following = [text[anchor + 2] for anchor in anchors[:-1]]
        assert following == written[len(written) - len(following) :].tolist()
        assert len(following) == len(written) - (len(prompt) == 1)


def test_padded_anchors_repeat_the_last_one_and_are_not_real(batch):
    most = batch.anchors.shape[1]
    for place in range(len(ROWS)):
        count = int(batch.real[place].sum())
        assert batch.real[place].tolist() == [True] * count + [False] * (most - count)
        assert (batch.anchors[place, count:] == batch.anchors[place, count - 1]).all()
    assert batch.real.any(0).all()  # no wider than the row with most anchors


def test_the_law_of_a_step_is_what_the_target_says_behind_the_token_which_that_step_reads(batch):
    used = np.zeros(batch.final.shape[:2], bool)
    assert batch.final.shape == (len(ROWS), batch.anchors.shape[1] + UNROLL - 1, FEATURES.shape[2])
    for step in range(UNROLL):
        for place, number in batch.reached(step).nonzero().tolist():
            read = batch.anchors[place, number] + step + 1  # the token of that pair, counted in the row
            expected = FEATURES[CORPUS.offsets[ROWS[place]] + read, -1].astype(np.float32)
            law = int(batch.anchors[place, number] - batch.anchors[place, 0]) + step
            assert np.array_equal(batch.final[place, law], expected)
            used[place, law] = True
    assert not batch.final[torch.from_numpy(~used)].any()


def test_a_step_is_reached_where_the_row_has_a_token_for_it(batch):
    for step in range(UNROLL + 9):
        reached = batch.reached(step)
        for place, row in enumerate(ROWS):
            pairs, first = len(CORPUS.sequence(row)) - 1, max(0, CORPUS.prompt_lengths[row] - 2)
            expected = [first + number + step < pairs for number in range(batch.anchors.shape[1])]
            assert reached[place].tolist() == expected, (step, row)


def test_greedy_rows_are_told(batch):
    assert batch.greedy.tolist() == [True, True, False, True, False]


def test_features_of_another_corpus_are_refused():
    with pytest.raises(ValueError, match=r"features of 37 tokens for a corpus of 38: not this corpus's"):
        batch_of(CORPUS, FEATURES[:-1], ROWS, UNROLL)


class TestTheOrder:
    CORPUS = random_corpus([(2, 1 + (7 * row) % 31) for row in range(75)])
    ROWS = np.arange(0, 75)[np.arange(75) % 7 != 0]  # 64 rows
    SIZE = 3

    def order(self, seed=5, start=0, rows=ROWS, size=SIZE):
        return training_order(self.CORPUS, rows, size, seed, start)

    def test_an_epoch_sees_every_row_once_but_for_what_fills_no_batch(self):
        order = self.order()
        epochs = [[batch.tolist() for batch in islice(order, 21)] for _ in range(4)]
        for epoch in epochs:
            seen = list(chain.from_iterable(epoch))
            assert all(len(batch) == self.SIZE for batch in epoch)
            assert len(set(seen)) == len(seen) == 63 and set(seen) < set(self.ROWS.tolist())
        assert set().union(*chain.from_iterable(epochs)) == set(self.ROWS.tolist())
        assert len({str(epoch) for epoch in epochs}) == 4

    @pytest.mark.parametrize("start", [1, 20, 21, 22, 50])
    def test_it_goes_on_from_any_batch(self, start):
        whole = [batch.tolist() for batch in islice(self.order(), 70)]
        assert [batch.tolist() for batch in islice(self.order(start=start), 70 - start)] == whole[start:]

    def test_the_seed_decides_it(self):
        first, again, other = ([b.tolist() for b in islice(self.order(seed), 30)] for seed in (5, 5, 6))
        assert first == again != other

    def test_rows_of_a_batch_are_of_like_length_but_batches_come_mixed(self):
        lengths = np.diff(self.CORPUS.offsets)
        batches = [lengths[batch] for batch in islice(self.order(), 21)]
        assert np.mean([np.ptp(batch) for batch in batches]) < 0.25 * np.ptp(lengths[self.ROWS])
        means = [batch.mean() for batch in batches]
        assert abs(np.corrcoef(np.arange(21), means)[0, 1]) < 0.5

    def test_rows_that_fill_no_batch_are_one(self):
        order = self.order(rows=self.ROWS[:2])
        for batch in islice(order, 3):
            assert sorted(batch.tolist()) == self.ROWS[:2].tolist()
