"""The wrong pieces that mutants (mutants.py) put in place of right ones, each as small as the bug that it stands for.

A wrapper gets the right function and returns a wrong one; a class is the right class with one method changed.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import replace
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np

from specdec_core import decode, rejection
from specdec_core.drafters.model import _Chain
from specdec_core.protocol import Draft, RowView
from specdec_core.randomness import Decisions, StreamDecisions
from specdec_core.rejection import Outcome
from specdec_core.rows import Row
from specdec_core.sampling import Options, law
from specdec_core.topology import chain

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


# --- Drafts -------------------------------------------------------------------------------------------------------


class ShiftedLaws(_Chain):
    """Rows of q are off by one."""

    def draft(self) -> Draft:
        found = super().draft()
        return found if found.law is None else replace(found, law=np.roll(found.law, 1, axis=0))


class RoundedLaws(_Chain):
    """Drawn in double precision, tested in half."""

    def draft(self) -> Draft:
        found = super().draft()
        return found if found.law is None else replace(found, law=found.law.astype(np.float16).astype(np.float64))


class RawLaws(_Chain):
    """Drawn from the warped law, tested against the raw softmax."""

    def extend(self, logits: np.ndarray) -> None:
        super().extend(logits)
        if self._laws:
            raw = np.exp(logits - logits.max())
            self._laws[-1] = raw / raw.sum()


class CoolerLaws(_Chain):
    """Drawn at the row's temperature, tested as if at a lower one."""

    def extend(self, logits: np.ndarray) -> None:
        super().extend(logits)
        if self._laws:
            cooler = self._laws[-1] ** 1.5
            self._laws[-1] = cooler / cooler.sum()


class WithoutDoubtful(_Chain):
    """Drafting ends at the first token that its own law finds unlikely, and that token is dropped."""

    _over = False

    def extend(self, logits: np.ndarray) -> None:
        super().extend(logits)
        if self._laws and self._laws[-1][self._tokens[-1]] < 0.4:
            self._over = True

    @property
    def grows(self) -> bool:
        return not self._over and super().grows

    def draft(self) -> Draft:
        found = super().draft()
        kept = len(found.tokens) - self._over
        return Draft(found.tokens[:kept], chain(kept + 1), found.law[:kept] if found.law is not None and kept else None)


class ClaimedDeterministic(_Chain):
    """Sampled tokens, reported as if they were an argmax: lossless, for the rule then accepts with p(x)."""

    def draft(self) -> Draft:
        return replace(super().draft(), law=None)


class _Argmax:
    def choose(self, law: np.ndarray) -> int:
        return int(np.argmax(law))


def drafting_argmax(view):
    """Drafts the argmax but reports the soft law."""

    def mutated(self: Row, policy) -> RowView:
        return replace(view(self, policy), decisions=_Argmax())

    return mutated


def drafting_warmer(view):
    """Draws at another temperature *and* reports that law: lossless."""

    def mutated(self: Row, policy) -> RowView:
        found = view(self, policy)
        temperature = 1.7 * found.options.temperature
        return replace(found, options=replace(found.options, temperature=temperature))

    return mutated


# --- Rows and their endings ---------------------------------------------------------------------------------------


def ending_at_the_last_token_only(append):
    """End tokens inside a block are not looked for."""

    def mutated(self: Row, tokens) -> int:
        for token in tokens[:-1]:
            self._tokens[self.count] = token
            self.count += 1
        return len(tokens) - 1 + append(self, tokens[-1:])

    return mutated


def one_token_over(init):
    def mutated(self: Row, request, *rest) -> None:
        options = replace(request.options, max_new_tokens=request.options.max_new_tokens + 1)
        init(self, replace(request, options=options), *rest)

    return mutated


def ending_in_the_prompt(ending):
    """End tokens of the prompt count."""

    def mutated(self: Row, token: int) -> str | None:
        in_prompt = set(self.committed[: self.prompt_length].tolist()) & set(self.options.eos)
        return "eos" if in_prompt else ending(self, token)

    return mutated


# --- What target and drafter remember -----------------------------------------------------------------------------


def losing_the_last(commit):
    def mutated(self, state, verification, paths) -> None:
        commit(self, state, verification, [path[:-1] if len(path) > 1 else path for path in paths])

    return mutated


def keeping_a_rejected_one(commit):
    def mutated(self, state, verification, paths) -> None:
        counts = verification.forest.counts
        longer = [
            np.append(path, path[-1] + 1) if len(path) and path[-1] + 1 < count else path
            for path, count in zip(paths, counts, strict=True)
        ]
        commit(self, state, verification, longer)

    return mutated


def ignoring_the_path(commit):
    """Keeps the first nodes, whichever branch was accepted."""

    def mutated(self, state, verification, paths) -> None:
        commit(self, state, verification, [np.arange(len(path)) for path in paths])

    return mutated


def garbling_the_last(observe):
    """The drafter's newest cache entry is another token's."""

    def mutated(self, slots, tokens, features) -> None:
        observe(self, slots, tokens, features)
        for slot in slots:
            entries = self._state.entries[slot]
            entries[-1:] = [(entries[-1] + 1) % self.vocabulary] if entries else []

    return mutated


def forgetting_the_first(observe):
    """The drafter's cache slides: its oldest entry is lost each round."""

    def mutated(self, slots, tokens, features) -> None:
        observe(self, slots, tokens, features)
        for slot in slots:
            entries = self._state.entries[slot]
            entries[:] = [*entries[1:], entries[-1]] if entries else []

    return mutated
