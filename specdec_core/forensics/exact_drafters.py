"""Drafters for exact tests, simple enough to be read at a glance, awkward enough to reach every branch of the rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.protocol import Draft, RowView
from specdec_core.sampling import History, law
from specdec_core.topology import chain, tree

Logits = Callable[[tuple[int, ...]], np.ndarray]


class FixedTree(NGramDrafter):
    """Deterministic candidates: the same tree every round, as deep as there is room; one sibling is repeated."""

    def __init__(self) -> None:
        super().__init__(candidates=3)

    def propose(self, views: Sequence[RowView], state: Any) -> list[Draft]:
        deep = Draft(np.array([0, 1, 0, 2]), tree((-1, 0, 0, 0, 1)))
        flat = Draft(np.array([1, 2]), tree((-1, 0, 0)))
        return [deep if view.limit > 1 else flat for view in views]


class SampledTree(NGramDrafter):
    """Two siblings drawn from a law q, the first with a child of its own drawn from the next q (room permitting).

    logits       of the drafter's model, as a function of the prefix.
    replacement  whether the second sibling may repeat the first; if not, it is drawn from q without it, and that is
                 the law that is reported for it.
    """

    def __init__(self, logits: Logits, replacement: bool):
        super().__init__(candidates=3)
        self._logits, self._replacement = logits, replacement

    def propose(self, views: Sequence[RowView], state: Any) -> list[Draft]:
        return [self._tree(view) for view in views]

    def _tree(self, view: RowView) -> Draft:
        q = self._law(view, ())
        first = view.decisions.choose(q)
        rest = q if self._replacement else _without(q, first)
        tokens, laws, parents = [first], [q], [-1, 0]
        if rest is not None:
            tokens.append(view.decisions.choose(rest))
            laws.append(rest)
            parents.append(0)
        if view.limit > 1:
            below = self._law(view, (first,))
            tokens.append(view.decisions.choose(below))
            laws.append(below)
            parents.append(1)
        return Draft(np.array(tokens, np.int64), tree(tuple(parents)), np.array(laws))

    def _law(self, view: RowView, drafted: tuple[int, ...]) -> np.ndarray:
        output = np.array([*view.committed[view.prompt :], *drafted], np.int64)
        prefix = (*view.committed.tolist(), *drafted)
        return law(self._logits(prefix), view.options, History(view.committed[: view.prompt], output))


class ScriptedChain(NGramDrafter):
    """Draws each token of a chain from the law that `law_at(depth)` gives, whatever the prefix."""

    def __init__(self, law_at: Callable[[int], np.ndarray]):
        super().__init__()
        self._law_at = law_at

    def propose(self, views: Sequence[RowView], state: Any) -> list[Draft]:
        drafts = []
        for view in views:
            laws = np.array([self._law_at(depth) for depth in range(view.limit)])
            tokens = np.array([view.decisions.choose(q) for q in laws], np.int64)
            drafts.append(Draft(tokens, chain(view.limit + 1), laws))
        return drafts


def _without(q: np.ndarray, token: int) -> np.ndarray | None:
    left = q.copy()
    left[token] = 0.0
    return left / left.sum() if left.any() else None
