"""Any target as a drafter: it drafts a chain, one token a step, for all rows together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specdec_core.arrays import Array, host
from specdec_core.protocol import Draft, RowView, State, Target
from specdec_core.sampling import History, has_processors, law, processed, require_finite_peak
from specdec_core.topology import chain, forest


class ModelDrafter:
    """Drafts with a smaller model that shares the target's tokenizer, on a cache of its own.

    vocabulary  the target's (paddings may differ): tokens that only the drafter has are never drafted, those that
                only the target has are read as the drafter's last token.

    A row longer than the drafter's own context goes on without drafts.
    """

    def __init__(self, model: Target, vocabulary: int):
        self.model, self.vocabulary = model, vocabulary

    def most_nodes(self, depth: int) -> int:
        return depth

    def start(self, slots: int, capacity: int) -> None:
        self._state = self.model.new_state(slots, capacity)
        self._drafted: dict[int, tuple[int, np.ndarray]] = {}

    def admit(self, slots: np.ndarray, prompts: Sequence[np.ndarray], features: Sequence[Array | None]) -> None:
        self.model.prefill(self._state, slots, [_readable(p[: self.model.context + 1], self.model) for p in prompts])

    def propose(self, views: Sequence[RowView], state: Any) -> list[Draft]:
        room = self.model.context + 1  # the token drafted last is not fed
        views = [replace(view, limit=min(view.limit, room - len(view.committed))) for view in views]
        drafts = draft_chains(self.model, self._state, views, self.vocabulary)
        for view, draft in zip(views, drafts, strict=True):
            self._drafted[view.slot] = len(view.committed), draft.tokens
        return drafts

    def observe(self, slots: np.ndarray, tokens: Sequence[np.ndarray], features: Sequence[Array | None]) -> None:
        """Forget the drafted tokens that were not accepted. What the cache misses is fed with the next draft."""
        for slot, emitted in zip(slots, tokens, strict=True):
            committed, drafted = self._drafted.pop(int(slot), (0, emitted[:0]))
            if len(drafted):
                common = min(len(drafted), len(emitted) - 1)  # the newest token is never cached, drafted or not
                differing = np.flatnonzero(drafted[:common] != emitted[:common])
                accepted = int(differing[0]) if len(differing) else common
                valid = min(int(self._state.lengths[slot]), committed + accepted)
                self._state.rewind(np.array([slot]), np.array([valid]))

    def release(self, slots: np.ndarray) -> None:
        self._state.release(slots)
        for slot in slots:
            self._drafted.pop(int(slot), None)


def draft_chains(model: Target, state: State, views: Sequence[RowView], vocabulary: int) -> list[Draft]:
    """Draft a chain for each row by stepping `model` over `state`; its cache grows by all drafted tokens but the last.

    A row stops at its limit or where its policy says so, before the next step is paid for. Tokens are drawn with the
    row's own options (greedy: the argmax, a one-hot law), and the law they were drawn from is the law that is reported.
    """
    chains = [_Chain(view, vocabulary) for view in views]
    growing = [each for each in chains if each.view.limit > 0]
    while growing:
        # What the cache lacks: the newest token, tokens committed without a draft, or the token drafted last.
        feeds = [each.after(int(state.lengths[each.view.slot])) for each in growing]
        slots = np.array([each.view.slot for each in growing])
        shape = forest([chain(len(feed)) for feed in feeds])
        verification = model.verify(state, slots, _readable(np.concatenate(feeds), model), shape)
        model.commit(state, verification, [np.arange(len(feed)) for feed in feeds])
        for each, end in zip(growing, shape.offsets[1:], strict=True):
            each.extend(host(verification.logits[end - 1]))
        growing = [each for each in growing if each.grows]
    return [each.draft() for each in chains]


def _readable(tokens: np.ndarray, model: Target) -> np.ndarray:
    """Tokens that the model has an embedding for: it may lack some of the target's paddings."""
    return np.minimum(tokens, model.vocabulary - 1)


class _Chain:
    """One row's chain while it grows."""

    def __init__(self, view: RowView, vocabulary: int):
        self.view, self._vocabulary = view, vocabulary
        self._tokens: list[int] = []
        self._laws: list[np.ndarray] = []
        self._confidences: list[float] = []

    def after(self, cached: int) -> np.ndarray:
        """Committed and drafted tokens behind the first `cached` ones."""
        if cached < len(self.view.committed):
            return np.concatenate([self.view.committed[cached:], self._tokens]).astype(np.int64)
        return np.array(self._tokens[cached - len(self.view.committed) :], np.int64)

    @property
    def grows(self) -> bool:
        return len(self._tokens) < self.view.limit and self.view.policy.proceed(self._confidences)

    def extend(self, logits: np.ndarray) -> None:
        view, logits = self.view, logits[: self._vocabulary]
        output = np.concatenate([view.committed[view.prompt :], self._tokens]).astype(np.int64)
        history = History(view.committed[: view.prompt], output)
        if view.options.greedy:
            logits = processed(logits, view.options, history) if has_processors(view.options, len(output)) else logits
            best = int(np.argmax(logits))
            require_finite_peak(float(logits[best]), "the drafter's law")
            if view.policy.uses_confidence:
                self._confidences.append(float(1 / np.exp(logits - logits[best]).sum()))
            self._tokens.append(best)
        else:
            q = law(logits, view.options, history)
            if view.policy.uses_confidence:
                self._confidences.append(float(q.max()))
            self._laws.append(q)
            self._tokens.append(view.decisions.choose(q))

    def draft(self) -> Draft:
        tokens = np.array(self._tokens, np.int64)
        laws = np.array(self._laws) if self._laws else None
        confidence = np.array(self._confidences) if self._confidences else None
        return Draft(tokens, chain(len(tokens) + 1), laws, confidence)
