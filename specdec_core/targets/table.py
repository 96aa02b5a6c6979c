"""Tiny laws for exact tests: a target whose logits are any function of the whole prefix.

It obeys the same contract as a real model, and it remembers tokens where a model remembers keys and values, so that a
decoder that commits, rewinds or shows the wrong entries gets the wrong law.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache

import numpy as np

from specdec_core.arrays import Array
from specdec_core.protocol import Verification
from specdec_core.state.slots import CacheError
from specdec_core.topology import Forest

Logits = Callable[[tuple[int, ...]], np.ndarray]


def random_logits(vocabulary: int, seed: int, spread: float = 1.5) -> Logits:
    """Logits `[V]` that differ for every prefix: normal with standard deviation `spread`, seeded by the prefix."""

    @lru_cache(maxsize=65536)
    def logits(prefix: tuple[int, ...]) -> np.ndarray:
        return spread * np.random.default_rng([seed, len(prefix), *prefix]).standard_normal(vocabulary)

    return logits


class TableState:
    """Committed tokens but the newest, a list a slot."""

    def __init__(self, slots: int, capacity: int):
        self.entries: list[list[int]] = [[] for _ in range(slots)]
        self.capacity, self.epoch = capacity, 0

    @property
    def lengths(self) -> np.ndarray:
        return np.array([len(each) for each in self.entries], np.int64)

    def rewind(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        if (lengths > self.lengths[slots]).any() or (np.asarray(lengths) < 0).any():
            raise CacheError(f"rewind slots {slots} of lengths {self.lengths[slots]} to {lengths}: expected 0…current")
        for slot, length in zip(slots, lengths, strict=True):
            del self.entries[slot][length:]
        self.epoch += 1

    def release(self, slots: np.ndarray) -> None:
        for slot in slots:
            self.entries[slot].clear()
        self.epoch += 1


class TableTarget:
    """`Target` with the law given as a function of the prefix."""

    def __init__(self, logits: Logits, vocabulary: int, context: int = 64):
        self._logits, self.vocabulary, self.context = logits, vocabulary, context

    def new_state(self, slots: int, capacity: int) -> TableState:
        return TableState(slots, capacity)

    def prefill(self, state: TableState, slots: np.ndarray, prompts: Sequence[np.ndarray]) -> list[Array | None]:
        for slot, prompt in zip(slots, prompts, strict=True):
            state.entries[slot] = prompt[:-1].tolist()
        return [None] * len(prompts)

    def verify(self, state: TableState, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> Verification:
        if (state.lengths[slots] + forest.counts > state.capacity).any():
            raise CacheError(f"lengths {state.lengths[slots]} + nodes {forest.counts} over capacity {state.capacity}")
        state.epoch += 1
        logits = np.empty((len(tokens), self.vocabulary))
        for flat, (row, path) in enumerate(zip(forest.rows, forest.paths, strict=True)):
            nodes = forest.offsets[row] + path[path >= 0]
            logits[flat] = self._logits((*state.entries[slots[row]], *tokens[nodes].tolist()))
        return Verification(logits, None, slots, forest, state.epoch, pending=tokens)

    def commit(self, state: TableState, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        if verification.epoch != state.epoch:
            raise CacheError(f"verification {verification.epoch} is stale: {state.epoch} came after it")
        for slot, start, path in zip(verification.slots, verification.forest.offsets, paths, strict=False):
            state.entries[slot] += verification.pending[start + path].tolist()
        state.epoch += 1

    def synchronise(self) -> None:
        """Nothing runs elsewhere."""
