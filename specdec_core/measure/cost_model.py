"""What speculation costs and brings, in units of one target step t(1) (notes: the speed identity).

S = (1 + K·a_K) / (1 + K(c + s) + o): a_K accepted over drafted tokens, c = draft step / target step,
s = s_{K+1} the serialization index, o the overhead of a round. Hence S > 1 ⇔ a_K > c + s + o/K.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from specdec_core.measure.curves import TimeCurve
from specdec_core.protocol import Round


def serialization_index(t_n: float, t_1: float, n: int) -> float:
    """s_n = (t(n)/t(1) − 1)/(n − 1): 0 when n tokens cost what one costs, 1 when they cost n times as much."""
    if n < 2:
        raise ValueError(f"serialization index at n = {n}: expected n ≥ 2")
    return (t_n / t_1 - 1) / (n - 1)


def speedup(k: int, a_k: float, c: float, s: float, o: float = 0.0) -> float:
    """The identity above."""
    return (1 + k * a_k) / (1 + k * (c + s) + o)


@dataclass(frozen=True)
class DraftCost:
    """Standalone cost of drafting: seconds a draft step and seconds a drafting round."""

    step: float = 0.0
    round: float = 0.0


@dataclass(frozen=True)
class Counts:
    """What happened in rounds, by counting. Positions reach as deep as the longest draft.

    drafted, accepted `[D]`: drafts that had a node at depth d; drafts accepted up to depth d. tested `[D]`: drafts that
    had a node at depth d and were accepted up to d − 1. A row that ended inside its accepted path says nothing about
    the positions behind the cut, which are counted in none of them.
    """

    rounds: int
    tokens: int
    drafted: np.ndarray
    accepted: np.ndarray
    tested: np.ndarray

    @property
    def tau(self) -> float:
        """τ: tokens emitted per target pass of a row."""
        return self.tokens / self.rounds if self.rounds else float("nan")

    @property
    def a_k(self) -> float:
        """Accepted over drafted tokens."""
        total = self.drafted.sum()
        return float(self.accepted.sum() / total) if total else float("nan")

    @property
    def alpha(self) -> np.ndarray:
        """α_i: accepted at depth i among those where i was tested (all before it accepted), `[D]`; or NaN."""
        return np.divide(self.accepted, self.tested, out=np.full(len(self.tested), np.nan), where=self.tested > 0)


def count(rounds: Iterable[Round]) -> Counts:
    """Count the rounds of any number of rows, by depth (a tree counts a depth once)."""
    passes = tokens = 0
    drafted, accepted, tested = Counter[int](), Counter[int](), Counter[int]()
    for row in (row for each in rounds for row in each.rows):
        passes += 1
        tokens += len(row.emitted)
        known = row.accepted if row.ending == "cut" else len(row.drafted)
        drafted.update(range(1, known + 1))
        accepted.update(range(1, row.accepted + 1))
        tested.update(range(1, min(known, row.accepted + 1) + 1))
    depths = range(1, max(drafted, default=0) + 1)
    by_depth = (np.array([counter[depth] for depth in depths], np.int64) for counter in (drafted, accepted, tested))
    return Counts(passes, tokens, *by_depth)


def predict_seconds(
    rounds: Iterable[Round], curve: TimeCurve, draft: DraftCost, overhead: float, token: float = 0.0
) -> float:
    """Seconds that these rounds should take by standalone curves recorded before: Σ t(n_r, context) + draft + overhead.

    One row a round. `overhead` is seconds outside drafting and verification of a round that emits one token, `token`
    those of every further token. A drafter that steps pays one step a depth.
    """
    total = 0.0
    for each in rounds:
        for row in each.rows:
            depth = len(row.drafted)
            total += curve.at(1 + sum(row.drafted), row.context - 1)
            total += overhead + token * (len(row.emitted) - 1)
            total += draft.round + depth * draft.step
    return total
