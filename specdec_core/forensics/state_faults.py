"""The wrong pieces of a target's or a drafter's state that faults (faults.py) put in place of right ones.

A wrapper gets the right function and returns a wrong one. What a fault has to remember it keeps by state.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any
from unittest.mock import patch
from weakref import WeakKeyDictionary

import numpy as np
import torch

from specdec_core.drafters.model import ModelDrafter
from specdec_core.forensics.suspects import END
from specdec_core.protocol import Draft, RowView, Verification
from specdec_core.published.rectangle import Rectangle
from specdec_core.targets.huggingface_cache import HoledCache
from specdec_core.targets.padded import PaddedBatch

SHIFT = 3
"""Positions by which a constant shift is off."""

# --- The rectangle ------------------------------------------------------------------------------------------------


def padding_shown(padded):
    """Columns of padding are not masked."""

    def mutated(self, state: Rectangle, slots: np.ndarray, *rest) -> PaddedBatch:
        batch = padded(self, state, slots, *rest)
        visible = batch.visible.copy()
        for row, start in enumerate(state.starts[slots]):
            visible[row, :, :start] = True
        return replace(batch, visible=visible)

    return mutated


def columns_as_positions(padded):
    """Left padding is counted: all rows have the position ids of the rectangle's columns."""

    def mutated(self, state: Rectangle, slots: np.ndarray, *rest) -> PaddedBatch:
        batch = padded(self, state, slots, *rest)
        return replace(batch, positions=batch.positions + state.starts[slots][:, None])

    return mutated


def entries_not_moved(commit):
    """Realigned are mask and starts; keys and values stay where they were."""

    def mutated(self, state: Rectangle, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        with patch.object(Rectangle, "_move", lambda *anything: None):
            commit(self, state, verification, paths)

    return mutated


_masked: WeakKeyDictionary[Rectangle, dict[int, int]] = WeakKeyDictionary()


def remembering_starts(commit):
    """Of `mask_not_moved`: where rows began before the realignment."""

    def mutated(self, state: Rectangle, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        _masked[state] = {int(slot): int(state.starts[slot]) for slot in verification.slots}
        commit(self, state, verification, paths)

    return mutated


def mask_not_moved(padded):
    """The mask is the one from before the last realignment."""

    def mutated(self, state: Rectangle, slots: np.ndarray, tokens: np.ndarray, forest) -> PaddedBatch:
        batch = padded(self, state, slots, tokens, forest)
        visible, old = batch.visible.copy(), _masked.get(state, {})
        for row, slot in enumerate(slots.tolist()):
            start, length = int(state.starts[slot]), int(state.lengths[slot])
            if not length:
                old.pop(slot, None)  # a new row
            before = old.get(slot, start)
            visible[row, :, start : start + length] = False
            visible[row, :, before : min(before + length, start + length)] = True
        return replace(batch, visible=visible)

    return mutated


_ids: WeakKeyDictionary[HoledCache, dict[tuple[int, int], int]] = WeakKeyDictionary()


def mask_from_ids(padded):
    """Masked is every entry whose token is the padding token, which the end token is too."""

    def mutated(self, state: Rectangle, slots: np.ndarray, tokens: np.ndarray, forest) -> PaddedBatch:
        batch = padded(self, state, slots, tokens, forest)
        ids, visible = _ids.setdefault(state, {}), batch.visible.copy()
        starts = state.starts[slots]
        for row, token, slot, entry in zip(batch.rows, tokens, batch.slots, batch.entries, strict=True):
            ids[int(slot), int(entry - starts[row])] = int(token)
        for row, slot in enumerate(slots.tolist()):
            for column in range(int(starts[row]), batch.reach):
                if ids.get((slot, column - int(starts[row]))) == END:
                    visible[row, :, column] = False
        return replace(batch, visible=visible)

    return mutated


# --- Masked scatter -----------------------------------------------------------------------------------------------


def shifted(padded):
    """Positions of keys and queries are off by a constant."""

    def mutated(self, *given) -> PaddedBatch:
        batch = padded(self, *given)
        return replace(batch, positions=batch.positions + SHIFT)

    return mutated


def every_chunk_from_zero(prefill_row):
    """Every chunk of a prompt is at the positions of the first one."""

    def mutated(self, state: HoledCache, slots: np.ndarray, prompt: np.ndarray) -> None:
        right = self._padded

        def padded(state: HoledCache, slots: np.ndarray, *what) -> PaddedBatch:
            batch = right(state, slots, *what)
            return replace(batch, positions=batch.positions - state.lengths[slots][:, None])

        self._padded = padded
        try:
            prefill_row(self, state, slots, prompt)
        finally:
            del self._padded

    return mutated


_rejected: WeakKeyDictionary[HoledCache, dict[int, int]] = WeakKeyDictionary()


def keeping_the_rejected(commit):
    """Rejected entries stay in the cache, and visible."""

    def mutated(self, state: HoledCache, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        counts = verification.forest.counts.tolist()
        kept = _rejected.setdefault(state, defaultdict(int))
        for slot, path, nodes in zip(verification.slots.tolist(), paths, counts, strict=True):
            kept[slot] += nodes - len(path)
        whole = [np.arange(nodes if len(path) else 0) for path, nodes in zip(paths, counts, strict=True)]
        commit(self, state, verification, whole)

    return mutated


def positions_of_the_accepted(padded):
    """Of `keeping_the_rejected`: positions are rolled back all the same."""

    def mutated(self, state: HoledCache, slots: np.ndarray, *rest) -> PaddedBatch:
        batch, kept = padded(self, state, slots, *rest), _rejected.get(state, defaultdict(int))
        for slot in slots[state.lengths[slots] == 0].tolist():
            kept[slot] = 0  # a new row
        drift = np.array([kept[slot] for slot in slots.tolist()])
        return replace(batch, positions=batch.positions - drift[:, None])

    return mutated


def without_the_last_entry(commit):
    """When a draft is accepted whole, its last token's keys and values are never stored."""

    def mutated(self, state: HoledCache, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        commit(self, state, verification, paths)
        for slot, path, nodes in zip(verification.slots, paths, verification.forest.counts, strict=True):
            if 1 < len(path) == nodes:
                for stores in state.layers.values():
                    for store in stores:
                        store[slot][:, state.lengths[slot] - 1] = 0

    return mutated


def overwriting_the_neighbour(commit):
    """A row's newest entry is also written over the next row's."""

    def mutated(self, state: HoledCache, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        commit(self, state, verification, paths)
        slots = [int(slot) for slot, path in zip(verification.slots, paths, strict=True) if len(path)]
        for one, other in pairwise(slots):
            for stores in state.layers.values():
                for store in stores:
                    store[other][:, state.lengths[other] - 1] = store[one][:, state.lengths[one] - 1]

    return mutated


def gathered_by_the_widest(verify):
    """Logits are read at row × (nodes of the widest row), as if none were narrower."""

    def mutated(self, *given) -> Verification:
        found = verify(self, *given)
        shape = found.forest
        flat = np.minimum(shape.rows * shape.counts.max() + shape.nodes, len(shape.rows) - 1)
        return replace(found, logits=found.logits[torch.as_tensor(flat)])

    return mutated


_rounds: WeakKeyDictionary[HoledCache, dict[int, int]] = WeakKeyDictionary()


def counting_rounds(commit):
    """Of `evicted_by_rounds`: entries that there would be if every round had emitted one token."""

    def mutated(self, state: HoledCache, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        counted = _rounds.setdefault(state, {})
        for slot in verification.slots.tolist():
            counted[slot] = counted.get(slot, int(state.lengths[slot])) + 1
        commit(self, state, verification, paths)

    return mutated


def evicted_by_rounds(first):
    """The window moves on by one entry a round, however many tokens were emitted."""

    def mutated(self, state: HoledCache, slots: np.ndarray, batch: PaddedBatch) -> np.ndarray:
        counted = _rounds.setdefault(state, {})
        for slot in slots[state.lengths[slots] == 0].tolist():
            counted.pop(slot, None)  # a new row
        lag = [state.lengths[slot] - counted.get(slot, state.lengths[slot]) for slot in slots.tolist()]
        return first(self, state, slots, batch) - np.array(lag)[:, None]

    return mutated


# --- The drafter's state ------------------------------------------------------------------------------------------


def never_fed_the_last(observe):
    """After a draft that was accepted whole its last token is taken for cached, though it was never fed."""

    def mutated(self: ModelDrafter, slots: np.ndarray, tokens: Sequence[np.ndarray], features) -> None:
        drafted = {int(slot): self._drafted.get(int(slot)) for slot in slots}
        observe(self, slots, tokens, features)
        for slot, emitted in zip(slots.tolist(), tokens, strict=True):
            known = drafted[slot]
            if known is not None and len(known[1]) and np.array_equal(known[1], emitted[: len(known[1])]):
                self._state.lengths[slot] += 1

    return mutated


def swapping_rows(observe):
    """The entries of the first two rows are exchanged."""

    def mutated(self: ModelDrafter, slots: np.ndarray, *rest) -> None:
        observe(self, slots, *rest)
        if len(slots) > 1:
            one, other = slots[:2].tolist()
            state: Any = self._state
            for stores in state.layers.values():
                for store in stores:
                    store[[one, other]] = store[[other, one]]

    return mutated


class Mistrimmed(ModelDrafter):
    """A drafter that rolls back to a wrong length and goes on from there: what it has read is no longer the text.

    EXTRA  entries kept after a rejection: −1 (one trimmed too many) or 1 (one rejected token stays).
    """

    EXTRA = 0

    def start(self, slots: int, capacity: int) -> None:
        super().start(slots, 2 * capacity)  # for what is kept too much
        self._read: dict[int, list[int]] = {}

    def admit(self, slots: np.ndarray, prompts: Sequence[np.ndarray], features: Any) -> None:
        super().admit(slots, prompts, features)
        self._read |= {int(slot): prompt.tolist() for slot, prompt in zip(slots, prompts, strict=True)}

    def propose(self, views: Sequence[RowView], state: Any) -> list[Draft]:
        """From what was read."""
        return super().propose([replace(view, committed=np.array(self._read[view.slot])) for view in views], state)

    def observe(self, slots: np.ndarray, tokens: Sequence[np.ndarray], features: Any) -> None:
        drafts = {int(slot): self._drafted.get(int(slot), (0, np.empty(0, np.int64)))[1] for slot in slots}
        super().observe(slots, tokens, features)
        for slot, emitted in zip(slots.tolist(), tokens, strict=True):
            read, cached = self._read[slot], int(self._state.lengths[slot])
            accepted = cached - len(read) if len(drafts[slot]) else 0
            read += emitted.tolist()
            rejected = len(drafts[slot]) > len(emitted) - 1
            if not rejected or not cached:
                continue
            if self.EXTRA > 0 and len(drafts[slot]) > accepted + 1:  # the last one has no entry
                read.insert(cached, int(drafts[slot][accepted]))
                self._state.lengths[slot] += 1
            elif self.EXTRA < 0:
                del read[cached - 1]
                self._state.lengths[slot] -= 1
