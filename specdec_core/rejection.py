"""The rejection rule: which draft tokens stand and what is emitted after them, so that the target's law comes out.

Chains: accept draft token x ~ q with probability min(1, p(x)/q(x)); on rejection draw the recovered token from
norm(max(p − q, 0)); after a whole branch draw the bonus from p (Leviathan et al. 2023; Chen et al. 2023). Trees:
children are tried in order against what is left of p (recursive residual; SpecInfer, Miao et al. 2024). A deterministic
candidate c has the one-hot q: accept with probability p(c), else remove c from p and renormalise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from specdec_core.protocol import Draft
from specdec_core.randomness import Decisions


@dataclass(frozen=True)
class Outcome:
    """The accepted path (node indices, the root first) and the token after it; `ending` is 'bonus' or 'recovered'."""

    path: tuple[int, ...]
    token: int
    ending: str


def residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """norm(max(p − q, 0)) `[V]`. Where p = q nothing is left: a rejection then had probability zero, so p is returned
    rather than 0/0 (rounding can bring the sum, but never the decision, here)."""
    left = np.maximum(p - q, 0.0)
    total = left.sum()
    return left / total if total > 0 else p


def walk(draft: Draft, law_at: Callable[[int], np.ndarray], decisions: Decisions) -> Outcome:
    """Apply the rule from the root down. `law_at(node)` is the target's law `[V]` after that node; asked for only
    where the walk arrives."""
    path = [0]
    while True:
        node = path[-1]
        children = draft.topology.children[node]
        p = law_at(node)
        for child in children:
            token = int(draft.tokens[child - 1])
            if draft.law is None:
                if decisions.accept(float(p[token])):
                    path.append(child)
                    break
                p = _without(p, token)
            else:
                q = _padded(draft.law[child - 1], len(p))
                if not q[token] > 0:
                    raise ValueError(
                        f"the drafter's law gives its own draft token {token} probability {q[token]}: expected "
                        "more than 0; report the law that the token was drawn from"
                    )
                if decisions.accept(min(1.0, float(p[token] / q[token]))):
                    path.append(child)
                    break
                p = residual(p, q)
        else:
            return Outcome(tuple(path), decisions.choose(p), "recovered" if children else "bonus")


def follow(draft: Draft, greedy_at: Callable[[int], int]) -> Outcome:
    """The rule for a greedy target, whose laws are one-hot: follow the child equal to the argmax. Uses no chance."""
    path = [0]
    while True:
        node = path[-1]
        children = draft.topology.children[node]
        token = greedy_at(node)
        for child in children:
            if int(draft.tokens[child - 1]) == token:
                path.append(child)
                break
        else:
            return Outcome(tuple(path), token, "recovered" if children else "bonus")


def _without(p: np.ndarray, token: int) -> np.ndarray:
    """p with one token removed, renormalised; unchanged if nothing else is left (then it could not be rejected)."""
    left = p.copy()
    left[token] = 0.0
    total = left.sum()
    return left / total if total > 0 else p


def _padded(q: np.ndarray, vocabulary: int) -> np.ndarray:
    """A drafter's law over the target's vocabulary: tokens that the drafter does not have get probability zero."""
    if len(q) == vocabulary:
        return q
    if len(q) > vocabulary:
        if q[vocabulary:].any():
            raise ValueError(
                f"the drafter gives probability to tokens ≥ {vocabulary}, which the target does not have: "
                "pair models that share a tokenizer, and zero the padding before sampling"
            )
        return q[:vocabulary]
    return np.concatenate([q, np.zeros(vocabulary - len(q))])
