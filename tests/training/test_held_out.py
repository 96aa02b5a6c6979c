"""Checks on held-out rows: which rows, and what their agreement amounts to when it is walked as a decoder does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from specdec_core.training import held_out as module
from specdec_core.training.corpus import IS_GREEDY
from specdec_core.training.distill import DistillPlan
from specdec_core.training.distilled_loss import Steps
from specdec_core.training.eagle_batches import Batch, batch_of
from specdec_core.training.held_out import check_rows, judge, walk
from tests.training.test_eagle_batches import random_corpus, random_features

pytestmark = pytest.mark.usefixtures("one_thread")

UNROLL = 3
PLAN = DistillPlan(
    (0,), 5, UNROLL, rows=2, steps=1, learning_rate=1.0, check_every=1, patience=1, held_out_rows=4, mixed=False
)


class TestTheRows:
    CORPUS = random_corpus(
        [(2, 2 + row % 5) for row in range(120)],
        greedy=[row for row in range(120) if row % 3],
        held_out=[row for row in range(120) if row % 2],
    )

    def test_half_of_them_are_greedy_and_all_are_held_out(self):
        rows = check_rows(self.CORPUS, 12)
        greedy = self.CORPUS.flagged(IS_GREEDY)[rows]
        assert len(rows) == len(set(rows.tolist())) == 12 and greedy.sum() == 6
        assert set(rows.tolist()) <= set(self.CORPUS.held_out.tolist())

    def test_they_are_spread_over_the_corpus(self):
        rows = check_rows(self.CORPUS, 12)
        for greedy in (True, False):
            chosen = np.sort(rows[self.CORPUS.flagged(IS_GREEDY)[rows] == greedy])
            assert chosen[0] < 20 and chosen[-1] > 90 and np.diff(chosen).max() < 40

    def test_all_of_them_where_there_are_no_more(self):
        assert sorted(check_rows(self.CORPUS, 1000).tolist()) == self.CORPUS.held_out.tolist()

    def test_answers_of_one_token_are_left_out(self):
        corpus = random_corpus([(3, 1), (3, 2), (9, 1), (1, 2)], greedy=[0, 1], held_out=range(4))
        assert check_rows(corpus, 8).tolist() == [1, 3]

    def test_none_is_none(self):
        assert len(check_rows(random_corpus([(3, 4)] * 3), 8)) == 0


class TestTheWalk:
    @pytest.mark.parametrize(
        ("agree", "rounds"),
        [
            # One line a step, one column an anchor. Six anchors: those near the end have less steps.
            (["000000", "000000", "000000"], [(0, 3), (0, 3), (0, 3), (0, 3), (0, 2), (0, 1)]),
            (["111111", "111111", "111111"], [(3, 3), (2, 2)]),
            (["100000", "111111", "111111"], [(3, 3), (0, 2), (0, 1)]),  # only the first steps of anchors 1… fail
            (["111111", "000000", "111111"], [(1, 3), (1, 3), (1, 2)]),
            (["010010", "010001", "000111"], [(0, 3), (2, 3), (1, 2)]),
        ],
        ids=str,
    )
    def test_a_round_goes_on_behind_what_was_accepted_and_the_token_added(self, agree, rounds):
        corpus = random_corpus([(3, 5), (4, 9)])
        batch = batch_of(corpus, random_features(corpus), np.array([1, 0]), UNROLL)
        flags = np.ones((UNROLL, batch.anchors.shape[1]), bool)  # padded anchors say yes, which nobody asks
        flags[:, :6] = [[mark == "1" for mark in line] for line in agree]
        assert walk(flags, batch, 1) == rounds


class Stub:
    """A learner that knows behind which tokens it is right: `right[u]` of those that step u reads. It notes what it
    sees, and can draft `drafted` only."""

    def __init__(self, right: Sequence[set[int]], drafted: Sequence[int]):
        self._right, self.seen, self.tokens = right, list[Batch](), torch.tensor(drafted)

    def eval(self) -> None:
        pass

    def judge(self, batch: Batch, unroll: int, mixed: bool) -> Steps:
        assert (unroll, mixed) == (UNROLL, False)
        self.seen.append(batch)
        read = [(batch.anchors + step).clamp(max=batch.tokens.shape[1] - 1) for step in range(unroll)]
        agree = torch.stack(
            [
                torch.isin(batch.tokens.gather(1, places), torch.tensor(sorted(right))) & batch.reached(step)
                for step, (places, right) in enumerate(zip(read, self._right, strict=True))
            ]
        )
        mean = batch.real.sum() * torch.ones(unroll)
        return Steps(mean, agree, mean / 1000)


class TestJudging:
    CORPUS = random_corpus(
        [(2, 6), (3, 9), (2, 7), (1, 8), (4, 5), (2, 12), (5, 3)], greedy=[0, 2, 3, 4], held_out=[2, 3, 5, 6],
        vocabulary=6,
    )  # fmt: skip
    FEATURES = random_features(CORPUS)
    RIGHT = ({0, 1, 2, 5}, {1, 2, 3, 4}, {0, 2, 4})

    def found(self, rows, drafted=range(6), **changes) -> tuple[Any, Stub]:
        stub: Any = Stub(self.RIGHT, list(drafted))
        return judge(stub, self.CORPUS, self.FEATURES, np.array(rows), replace(PLAN, **changes)), stub

    def by_hand(self, rows, drafted) -> tuple[list[float], float]:
        """α and τ, row by row and token by token. What follows a row's last token counts as one that can be drafted."""
        tested, accepted, tokens, rounds = [0] * UNROLL, [0] * UNROLL, 0, 0
        for row in rows:
            text = self.CORPUS.sequence(row).tolist()
            newest = max(1, int(self.CORPUS.prompt_lengths[row]) - 1)
            while newest < len(text):
                step = 0
                while step < UNROLL and newest + step < len(text):
                    tested[step] += 1
                    following = text[newest + step + 1 : newest + step + 2]
                    if text[newest + step] not in self.RIGHT[step] or not set(following) <= set(drafted):
                        break
                    accepted[step] += 1
                    step += 1
                tokens, rounds, newest = tokens + step + 1, rounds + 1, newest + step + 1
        return [a / t for a, t in zip(accepted, tested, strict=True)], tokens / rounds

    @pytest.mark.parametrize("together", [1, 16])
    @pytest.mark.parametrize("drafted", [range(6), (0, 1, 3, 4, 5), (0, 2, 3, 5)], ids=str)
    def test_greedy_rows_are_walked(self, monkeypatch, together, drafted):
        monkeypatch.setattr(module, "ROWS", together)
        found, _ = self.found([2, 3, 0, 5], drafted)
        alpha, tau = self.by_hand([2, 3, 0], drafted)
        assert found.greedy_alpha == pytest.approx(alpha, rel=1e-12)
        assert found.greedy_tau == pytest.approx(tau, rel=1e-12) and 1 < tau < 1 + UNROLL

    def test_losses_are_those_of_sampled_rows_weighed_by_their_anchors(self, monkeypatch):
        monkeypatch.setattr(module, "ROWS", 1)
        found, _ = self.found([2, 5, 6])
        expected = (13 * 13 + 4 * 4) / (13 + 4)  # 12 written tokens and 3, and one anchor behind them
        assert found.losses == pytest.approx([expected] * UNROLL)
        assert found.sampled_alpha == pytest.approx([expected / 1000] * UNROLL)

    def test_nothing_else_is_looked_at(self):
        rows = [2, 3, 5, 6]
        _, stub = self.found(rows)
        seen = [
            batch.tokens[place, : batch.lengths[place]].tolist()
            for batch in stub.seen for place in range(len(batch.tokens))
        ]  # fmt: skip
        assert sorted(seen) == sorted(self.CORPUS.sequence(row)[1:].tolist() for row in rows)
        assert all(batch.greedy.all() or not batch.greedy.any() for batch in stub.seen)

    def test_no_rows_of_a_kind(self):
        only_greedy, _ = self.found([2])
        assert only_greedy.losses == [] and only_greedy.sampled_alpha == [] and only_greedy.greedy_tau >= 1
        only_sampled, _ = self.found([5])
        assert only_sampled.greedy_alpha == [0.0] * UNROLL and only_sampled.greedy_tau == 0
