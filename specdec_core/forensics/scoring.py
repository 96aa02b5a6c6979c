"""Teacher-forced scores: what the target's law says about every token of a finished sequence.

The sequence is fed to the target once more, without any decoder: whatever the decoder's caches, drafts or rounds did,
these are the laws that its tokens should have been drawn from. What is kept of each law is all that one-sample tests of
losslessness need (statistics/teacher_forced.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec_core.arrays import host
from specdec_core.protocol import Target
from specdec_core.sampling import History, Options, law
from specdec_core.statistics.teacher_forced import randomised_pit
from specdec_core.topology import chain, forest

CAP = 1e6
"""Largest ratio q/p that is reported: a token that the target cannot produce would have an infinite one."""


@dataclass(frozen=True)
class Scores:
    """One entry a token of one sequence, `[m]` each. p is the target's law there, q the alternative's, x the token.

    pit     randomised probability integral transform, the vocabulary ordered by q/p descending: uniform if x ~ p, and
            drawn to 0 if the decoder leans to q.
    in_set  whether x ∈ A, A = {q > p}; mass: p(A).
    ratio   q(x)/p(x), at most CAP.
    """

    pit: np.ndarray
    in_set: np.ndarray
    mass: np.ndarray
    ratio: np.ndarray


class Scorer:
    """Scores sequences under a target's law, in the direction of an alternative that a wrong decoder might lean to.

    alternative  the drafter's model, as a rule; None leans to the flatter law p^{1/2}.
    """

    def __init__(self, target: Target, alternative: Target | None = None):
        self._target, self._alternative = target, alternative

    def score(self, prompt: Sequence[int], tokens: Sequence[int], options: Options, seed: int) -> Scores:
        """Scores of `tokens` as a continuation of `prompt` under `options`; `seed` randomises the transform."""
        laws = self.laws(self._target, prompt, tokens, options)
        if self._alternative is None:
            leaning = [_flatter(p) for p in laws]
        else:
            leaning = self.laws(self._alternative, prompt, tokens, options)
        uniforms = np.random.default_rng(seed).random(len(tokens))
        found = [look(p, q, token) for p, q, token in zip(laws, leaning, tokens, strict=True)]
        below, at, in_set, mass, ratio = np.array(found, np.float64).reshape(-1, 5).T
        return Scores(randomised_pit(below, at, uniforms), in_set.astype(bool), mass, ratio)

    @staticmethod
    def laws(target: Target, prompt: Sequence[int], tokens: Sequence[int], options: Options) -> list[np.ndarray]:
        """The law `[V]` before each of `tokens`, given the prompt and the tokens before it. Tokens that the model does
        not have (paddings of another vocabulary) are read as its last."""
        if not len(tokens):
            return []
        everything = np.minimum([*prompt, *tokens[:-1]], target.vocabulary - 1)
        state, slot = target.new_state(1, len(everything)), np.array([0])
        target.prefill(state, slot, [everything[: len(prompt)]])
        fed = everything[len(prompt) - 1 :]
        logits = host(target.verify(state, slot, fed, forest([chain(len(fed))])).logits)
        history = History(np.array(prompt, np.int64))
        output = np.array(tokens, np.int64)
        return [law(logits[i], options, history.extended(output[:i])) for i in range(len(tokens))]


def look(p: np.ndarray, q: np.ndarray, token: int) -> tuple[float, float, bool, float, float]:
    """Of one token: the mass p before it in the order, p(x), whether x ∈ A, p(A), q(x)/p(x). Laws `[V]`; q may be
    over fewer or more tokens than p, whose vocabulary counts."""
    q = np.pad(q[: len(p)], (0, max(0, len(p) - len(q))))
    at = p[token]
    # Order by q/p without dividing: y comes before x where q_y·p_x > q_x·p_y. Ties keep the order of the vocabulary.
    left, right = q * at, q[token] * p
    before = (left > right) | ((left == right) & (np.arange(len(p)) < token))
    above = q > p
    ratio = min(CAP, q[token] / at) if at > 0 else CAP
    return float(p[before].sum()), float(at), bool(above[token]), float(p[above].sum()), float(ratio)


def _flatter(p: np.ndarray) -> np.ndarray:
    root = np.sqrt(p)
    return root / root.sum()
