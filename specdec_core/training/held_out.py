"""How good a drafter is on rows that it did not see, worked out in training's own pass.

On a row that the target wrote greedily, what would be accepted is known exactly: the drafter's most probable token is
the target's, or it is not. Walking such a row as a decoder does gives τ; a decoder that uses the drafter gets the same
(tests/training/test_served_as_trained.py).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch

from specdec_core.prompts import spread
from specdec_core.training.corpus import IS_GREEDY, Corpus
from specdec_core.training.eagle_batches import Batch, batch_of
from specdec_core.training.eagle_learner import EagleLearner

if TYPE_CHECKING:
    from specdec_core.training.distill import DistillPlan

ROWS = 16
"""Rows judged together."""


@dataclass(frozen=True)
class Check:
    """losses, sampled_alpha `[U]` (mean cross-entropy; Σ min(p, q) on rows at T = 1), greedy_alpha `[U]` and greedy_tau
    of chains of U tokens on greedy rows."""

    losses: list[float]
    greedy_alpha: list[float]
    greedy_tau: float
    sampled_alpha: list[float]


def check_rows(corpus: Corpus, count: int) -> np.ndarray:
    """Held-out rows to look at, half of them greedy, spread over the corpus, long enough for a draft."""
    long_enough = np.diff(corpus.offsets) - corpus.prompt_lengths >= 2
    chosen = []
    for greedy in (True, False):
        rows = [r for r in corpus.held_out if long_enough[r] and corpus.flagged(IS_GREEDY)[r] == greedy]
        chosen += spread(rows, count // 2)
    return np.array(chosen, np.int64)


@torch.no_grad()
def judge(learner: EagleLearner, corpus: Corpus, features: np.ndarray, rows: np.ndarray, plan: DistillPlan) -> Check:
    """Losses and acceptance on these rows, as `Check`. Greedy and sampled rows are judged apart."""
    learner.eval()
    greedy = [r for r in rows if corpus.flagged(IS_GREEDY)[r]]
    sampled = [r for r in rows if not corpus.flagged(IS_GREEDY)[r]]
    losses, common = _means(learner, corpus, features, sampled, plan)
    taken, rounds = 0, 0
    tested, accepted = np.zeros(plan.unroll, np.int64), np.zeros(plan.unroll, np.int64)
    for batch in _batches(corpus, features, greedy, plan.unroll):
        agree = learner.judge(batch, plan.unroll, plan.mixed).agree & draftable(batch, learner.tokens, plan.unroll)
        for row in range(len(batch.tokens)):
            for run, depth in walk(agree[:, row].numpy(), batch, row):
                taken, rounds = taken + run + 1, rounds + 1
                tested[: min(run + 1, depth)] += 1
                accepted[:run] += 1
    alpha = np.divide(accepted, tested, out=np.zeros(plan.unroll), where=tested > 0)
    return Check(losses, alpha.tolist(), taken / max(1, rounds), common)


def draftable(batch: Batch, tokens: torch.Tensor, unroll: int) -> torch.Tensor:
    """`[U, B, A]` bool: the token that the text has next can be drafted. On a greedy row that is the target's choice.

    The learner looks for the target's most probable token in the draft vocabulary, so it does not see one outside it
    missed. What follows a row's last token is not known and taken for draftable.
    """
    known = torch.isin(batch.tokens, tokens)
    rows, after = torch.arange(len(batch.tokens))[:, None], batch.anchors + 1
    steps = [after + step for step in range(unroll)]
    last = batch.tokens.shape[1] - 1
    return torch.stack([known[rows, each.clamp(max=last)] | (each >= batch.lengths[:, None]) for each in steps])


def walk(agree: np.ndarray, batch: Batch, row: int) -> list[tuple[int, int]]:
    """(tokens accepted, tokens drafted) of each round of a decoder on this row; agree `[U, A]`.

    A round that starts at an anchor goes on behind its accepted tokens and the one that the target adds.
    """
    anchors, reached = int(batch.real[row].sum()), [batch.reached(step)[row].numpy() for step in range(len(agree))]
    rounds, at = [], 0
    while at < anchors:
        depth = sum(int(each[at]) for each in reached)
        run = 0
        while run < depth and agree[run, at]:
            run += 1
        rounds.append((run, depth))
        at += run + 1
    return rounds


def _means(
    learner: EagleLearner, corpus: Corpus, features: np.ndarray, rows: list[int], plan: DistillPlan
) -> tuple[list[float], list[float]]:
    losses, common, weights = [], [], []
    for batch in _batches(corpus, features, rows, plan.unroll):
        steps = learner.judge(batch, plan.unroll, plan.mixed)
        losses.append(steps.losses.numpy())
        common.append(steps.common.numpy())
        weights.append(int(batch.real.sum()))
    if not rows:
        return [], []
    return np.average(losses, 0, weights).tolist(), np.average(common, 0, weights).tolist()


def _batches(corpus: Corpus, features: np.ndarray, rows: list[int], unroll: int):
    ordered = sorted(rows, key=lambda row: corpus.offsets[row + 1] - corpus.offsets[row])
    for start in range(0, len(ordered), ROWS):
        yield batch_of(corpus, features, np.array(ordered[start : start + ROWS]), unroll)
