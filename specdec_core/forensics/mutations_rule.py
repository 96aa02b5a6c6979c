"""Wrong pieces of the rule, its random streams and its laws, which mutants (mutants.py) put in place of right ones.

Each is as small as the bug that it stands for: a wrapper gets the right function and returns a wrong one; a class is
the right class with one method changed. Those of drafts, rows and memory are in mutations_parts.py.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from specdec_core import decode, rejection
from specdec_core.protocol import Draft
from specdec_core.randomness import Decisions, StreamDecisions
from specdec_core.rejection import Outcome
from specdec_core.sampling import Options, law

# --- The rejection rule -------------------------------------------------------------------------------------------


def leaking_residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    """Not renormalised: the missing mass falls where an inverse transform ends."""
    left = np.maximum(p - q, 0.0)
    left[-1] += 1 - left.sum()
    return left


def absolute_residual(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    left = np.abs(p - q)
    return left / left.sum() if left.any() else p


class SecondChance:
    """A token that was rejected is tested once more."""

    def __init__(self, inner: Decisions):
        self._inner = inner
        self.choose = inner.choose

    def accept(self, probability: float) -> bool:
        return self._inner.accept(probability) or self._inner.accept(probability)


def bonus_from_q(walk):
    def mutated(draft: Draft, law_at, decisions: Decisions) -> Outcome:
        found = walk(draft, law_at, decisions)
        if found.ending == "bonus" and draft.law is not None:
            return replace(found, token=decisions.choose(draft.law[-1]))
        return found

    return mutated


def without_bonus(walk):
    """A draft accepted whole yields its own tokens and no more."""

    def mutated(draft: Draft, law_at, decisions: Decisions) -> Outcome:
        found = walk(draft, law_at, decisions)
        if found.ending == "bonus" and len(found.path) > 1:
            return Outcome(found.path[:-1], int(draft.tokens[found.path[-1] - 1]), "bonus")
        return found

    return mutated


def recovered_after_the_rejected(walk):
    """Goes on behind the rejected token: what replaces it is drawn from the law after it."""

    def mutated(draft: Draft, law_at, decisions: Decisions) -> Outcome:
        found = walk(draft, law_at, decisions)
        if found.ending == "recovered":
            rejected = draft.topology.children[found.path[-1]][0]
            return replace(found, token=decisions.choose(law_at(rejected)))
        return found

    return mutated


def greedy_acceptance(walk):
    """Accepts what is the target's argmax, and samples only where it is not."""

    def mutated(draft: Draft, law_at, decisions: Decisions) -> Outcome:
        found = rejection.follow(draft, lambda node: int(np.argmax(law_at(node))))
        return replace(found, token=decisions.choose(law_at(found.path[-1])))

    return mutated


def sample_and_match(walk):
    """Draws from p, and goes on while the draft happens to hold what was drawn: lossless, though it accepts less."""

    def mutated(draft: Draft, law_at, decisions: Decisions) -> Outcome:
        return rejection.follow(draft, lambda node: decisions.choose(law_at(node)))

    return mutated


# --- Random streams -----------------------------------------------------------------------------------------------


class ReusedUniform(StreamDecisions):
    """The recovered token's uniform is the one that decided the rejection."""

    _last: float | None = None

    def accept(self, probability: float) -> bool:
        self._last = float(self._generator.random())
        return self._last < probability

    def choose(self, law: np.ndarray) -> int:
        uniform = float(self._generator.random()) if self._last is None else self._last
        self._last = None
        return int(np.searchsorted(np.cumsum(law), uniform * law.sum(), side="right").clip(0, len(law) - 1))


_beginnings: WeakKeyDictionary[Any, Any] = WeakKeyDictionary()


def reseeded_each_round(walk):
    """Every round begins with the same random numbers."""

    def mutated(draft: Draft, law_at, decisions: Decisions) -> Outcome:
        if isinstance(decisions, StreamDecisions):
            bits = decisions._generator.bit_generator
            bits.state = deepcopy(_beginnings.setdefault(decisions, deepcopy(bits.state)))
        return walk(draft, law_at, decisions)

    return mutated


class OneForAll(StreamDecisions):
    """One generator for all rows of a seed and purpose."""

    shared: dict[tuple[int, int], np.random.Generator]

    def __init__(self, seed: int, key: int, purpose: int):
        super().__init__(seed, 0, purpose)
        self._generator = type(self).shared.setdefault((seed, purpose), self._generator)


def one_for_all() -> type[OneForAll]:
    """Fresh, so that runs do not share generators with earlier ones."""
    return type("OneForAll", (OneForAll,), {"shared": {}})


# --- Target laws and their history --------------------------------------------------------------------------------


class ParentsLaw(decode._Laws):
    """Rows of the target's logits are off by one."""

    def at(self, node: int) -> np.ndarray:
        return super().at(max(0, self._draft.topology.parents[node]))


class RawBonus(decode._Laws):
    """The bonus is drawn from the raw softmax: no temperature, no truncation, no penalty."""

    def at(self, node: int) -> np.ndarray:
        if node and not self._draft.topology.children[node]:
            return law(self._inputs(node)[0], Options(temperature=1.0), self._history)
        return super().at(node)


class WholeDraftInHistory(decode._Laws):
    """Processors see the whole draft, rejected and untested tokens too."""

    def _inputs(self, node: int):
        logits, options, _ = super()._inputs(node)
        return logits, options, self._history.extended(self._draft.tokens)
