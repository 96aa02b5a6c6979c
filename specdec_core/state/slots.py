"""What every slot-based state keeps besides its entries: committed lengths, an epoch, and the checks of the contract.

A state of one backend inherits `Slots` and says how entries are moved and dropped there; who may commit what, and when
a verification is stale, is the same everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec_core.topology import Forest


class CacheError(RuntimeError):
    """The cache cannot do what was asked; nothing was changed."""


class Slots:
    """Lengths of `slots` rows of up to `capacity` entries each, all empty at first.

    epoch  counts passes and changes: a verification of an earlier epoch can no longer be committed.
    """

    def __init__(self, slots: int, capacity: int):
        if slots < 1 or capacity < 1:
            raise CacheError(f"a cache of {slots} slots and {capacity} entries: expected at least one of each")
        self.lengths = np.zeros(slots, np.int64)
        self.capacity = capacity
        self.epoch = 0

    def require_room(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Raise CacheError unless each slot has room for so many more entries, and is named once."""
        if len(set(slots.tolist())) != len(slots):
            raise CacheError(f"slots {slots.tolist()} name one twice: a pass scores one draft a slot")
        short = self.lengths[slots] + counts > self.capacity
        if short.any():
            row = int(np.flatnonzero(short)[0])
            raise CacheError(
                f"slot {slots[row]} holds {self.lengths[slots[row]]} entries and is asked to take {counts[row]} more, "
                f"over its capacity of {self.capacity}: make the state with room for prompt, new tokens and draft"
            )

    def begin(self) -> int:
        """A new pass writes past the committed entries: earlier verifications can no longer be committed."""
        self.epoch += 1
        return self.epoch

    def require_current(self, epoch: int) -> None:
        """Raise CacheError if a verification of that epoch is stale."""
        if epoch != self.epoch:
            raise CacheError(
                f"verification {epoch} is stale: its state has been verified, committed, rewound or released since, so "
                "its entries may be gone: commit before anything else, or verify again"
            )

    def require_paths(self, epoch: int, forest: Forest, paths: Sequence[np.ndarray]) -> None:
        """Raise CacheError if the verification is stale or a path is none from the root of its row's tree."""
        self.require_current(epoch)
        for row, (shape, path) in enumerate(zip(forest.trees, paths, strict=True)):
            if not len(path):
                continue
            last = int(path[-1])
            if not 0 <= last < len(shape) or not np.array_equal(path, shape.path(last)):
                raise CacheError(
                    f"row {row}: nodes {path.tolist()} are no path from the root of a tree with parents {shape.parents}"
                )

    def advance(self, slots: np.ndarray, counts: Sequence[int]) -> None:
        """Count so many more entries of each slot as committed, once they are where they belong."""
        self.lengths[slots] += np.asarray(counts, np.int64)
        self.epoch += 1

    def rewind(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Shorten slots to earlier lengths."""
        self.require_shorter(slots, lengths)
        self.lengths[slots] = lengths
        self.epoch += 1

    def require_shorter(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        if (lengths > self.lengths[slots]).any() or (np.asarray(lengths) < 0).any():
            raise CacheError(f"rewind slots {slots} of lengths {self.lengths[slots]} to {lengths}: expected 0…current")

    def release(self, slots: np.ndarray) -> None:
        """Empty slots for other rows."""
        self.lengths[slots] = 0
        self.epoch += 1


def require_tokens(tokens: np.ndarray, vocabulary: int) -> None:
    """Raise ValueError unless every token is one of the model's: a drafter with another vocabulary shows here."""
    outside = tokens[(tokens < 0) | (tokens >= vocabulary)]
    if len(outside):
        raise ValueError(
            f"token {outside[0]} is outside the target's vocabulary 0…{vocabulary - 1}: the prompt or the drafter "
            "belongs to another tokenizer; use one that shares the target's"
        )


def require_context(lengths: np.ndarray, depths: np.ndarray, context: int) -> None:
    """Raise CacheError if a node's position, `[N]` lengths of its row and depths, lies outside the model's context."""
    last = int((lengths + depths).max(initial=0))
    if last >= context:
        raise CacheError(
            f"position {last} is past the model's context of {context} tokens: shorten the prompt, or ask for fewer "
            "new tokens or a shorter draft"
        )
