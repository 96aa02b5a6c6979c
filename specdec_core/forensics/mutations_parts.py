"""Wrong pieces of drafts, rows and what target and drafter remember, as those of the rule in mutations_rule.py."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from specdec_core.drafters.model import _Chain
from specdec_core.protocol import Draft, RowView
from specdec_core.rows import Row
from specdec_core.topology import chain

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
