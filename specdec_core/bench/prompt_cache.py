"""Prefill once: benches that decode the same prompts in many arms copy a prompt's entries in, not compute them anew."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec_core.arrays import Array
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.targets.transformer import Transformer


class PromptCache:
    """A transformer that prefills every prompt once, and copies its entries in ever after."""

    def __init__(self, target: Transformer):
        self._target = target
        self.vocabulary, self.context = target.vocabulary, target.context
        self.new_state, self.verify, self.commit = target.new_state, target.verify, target.commit
        self.synchronise = target.synchronise
        self._states: dict[bytes, RaggedKV] = {}

    def prefill(self, state: RaggedKV, slots: np.ndarray, prompts: Sequence[np.ndarray]) -> list[Array | None]:
        state.release(slots)
        for slot, prompt in zip(slots, prompts, strict=True):
            known, cached = self._prefilled(np.asarray(prompt, np.int64)), len(prompt) - 1
            state.keys[:, slot, :, :cached] = known.keys[:, 0, :, :cached]
            state.values[:, slot, :, :cached] = known.values[:, 0, :, :cached]
            state.commit(np.array([slot]), [np.arange(cached)], state.begin())
        return [None] * len(prompts)

    def _prefilled(self, prompt: np.ndarray) -> RaggedKV:
        if (name := prompt.tobytes()) not in self._states:
            self._states[name] = self._target.new_state(1, max(len(prompt) - 1, 1))
            self._target.prefill(self._states[name], np.array([0]), [prompt])
        return self._states[name]
