"""Trained layers that continue the target's hidden states (EAGLE; Li et al. 2024, 2025), drafting a chain.

The first step of a round reads the tokens committed since the last one, with the target's features; every further step,
by a layer of its own, reads the token drafted last with the hidden state of the step before. A token outside the draft
vocabulary has probability zero: it is never drafted, and the rejection rule makes up for it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specdec_core.arrays import host
from specdec_core.drafters.eagle_memory import EagleBase, Places
from specdec_core.models.checkpoints import Checkpoint
from specdec_core.models.eagle_checkpoint import EagleCheckpoint
from specdec_core.placement import Placement
from specdec_core.protocol import NO_DRAFT, Draft, RowView
from specdec_core.sampling import History, Options, has_processors, law, processed, require_finite_peak
from specdec_core.topology import chain


class EagleDrafter(EagleBase):
    """Drafts chains with a trained drafter; rows step together."""

    def __init__(self, checkpoint: EagleCheckpoint, target: Checkpoint, placement: Placement):
        super().__init__(checkpoint, target, placement)
        self._words = DraftWords(checkpoint.tokens.numpy(), target.config.vocabulary)

    def most_nodes(self, depth: int) -> int:
        return depth

    def propose(self, views: Sequence[RowView], state: Any) -> list[Draft]:
        chains = [_Chain(view, self._words) for view in views]
        growing = [each for each in chains if each.view.limit > 0 and self.memory.can_draft(each.view.slot)]
        if not growing:
            return [NO_DRAFT] * len(views)
        found = self.memory.read([each.view.slot for each in growing])
        while True:
            for each, logits in zip(growing, host(found.logits), strict=True):
                each.extend(logits)
            going = [place for place, each in enumerate(growing) if each.grows]
            if not going:
                return [each.draft() for each in chains]
            growing = [growing[place] for place in going]
            found = self.memory.extend(
                [each.view.slot for each in growing],
                [each.newest for each in growing],
                found.hidden if len(going) == len(found.hidden) else found.hidden[going],
                [_at_end(len(each.tokens)) for each in growing],
            )


class DraftWords:
    """The draft vocabulary: from a drafter's logits over it to laws over the target's."""

    def __init__(self, tokens: np.ndarray, vocabulary: int):
        self.tokens, self._vocabulary = tokens, vocabulary

    def processed(self, logits: np.ndarray, options: Options, history: History) -> np.ndarray:
        """Logits `[D]` after penalties and the end-token ban."""
        everywhere = np.full(self._vocabulary, -np.inf)
        everywhere[self.tokens] = logits
        return processed(everywhere, options, history)[self.tokens]

    def spread(self, laws: Sequence[np.ndarray]) -> np.ndarray:
        """Laws over the target's vocabulary, `[k, V]`."""
        everywhere = np.zeros((len(laws), self._vocabulary))
        everywhere[:, self.tokens] = laws
        return everywhere


class _Chain:
    """One row's chain while it grows."""

    def __init__(self, view: RowView, words: DraftWords):
        self.view, self._words = view, words
        self.tokens: list[int] = []
        self._laws: list[np.ndarray] = []
        self._confidences: list[float] = []
        self._stuck = False

    @property
    def newest(self) -> np.ndarray:
        return np.array(self.tokens[-1:], np.int64)

    @property
    def grows(self) -> bool:
        return not self._stuck and len(self.tokens) < self.view.limit and self.view.policy.proceed(self._confidences)

    def extend(self, logits: np.ndarray) -> None:
        """Take one more token after `logits` `[D]`."""
        view, options = self.view, self.view.options
        if has_processors(options, len(view.committed) - view.prompt + len(self.tokens)):
            logits = self._words.processed(logits, options, self._history())
            if np.isneginf(logits).all():  # every token that could be drafted is banned; the target has others
                self._stuck = True
                return
        if options.greedy:
            best = int(np.argmax(logits))
            require_finite_peak(float(logits[best]), "the drafter's law")
            if view.policy.uses_confidence:
                self._confidences.append(float(1 / np.exp(logits - logits[best]).sum()))
        else:
            warps = replace(options, repetition_penalty=1.0, presence_penalty=0.0, min_new_tokens=0)
            q = law(logits, warps, History(view.committed[:0]))
            if view.policy.uses_confidence:
                self._confidences.append(float(q.max()))
            self._laws.append(q)
            best = view.decisions.choose(q)
        self.tokens.append(int(self._words.tokens[best]))

    def _history(self) -> History:
        view = self.view
        output = np.concatenate([view.committed[view.prompt :], self.tokens]).astype(np.int64)
        return History(view.committed[: view.prompt], output)

    def draft(self) -> Draft:
        if not self.tokens:
            return NO_DRAFT
        laws = self._words.spread(self._laws) if self._laws else None
        confidence = np.array(self._confidences) if self._confidences else None
        return Draft(np.array(self.tokens, np.int64), chain(len(self.tokens) + 1), laws, confidence)


def _at_end(drafted: int) -> Places:
    """Of the last of so many drafted tokens of a chain."""
    last = np.array([drafted - 1], np.int64)
    return Places(last, last, np.arange(drafted, dtype=np.int32)[None])
