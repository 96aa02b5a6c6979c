"""A key/value cache with a length a row: masked scatter in, rollback by moving a number.

Row b writes its nodes at its own entries length_b … length_b + n − 1; the pass hides every entry that a node may not
see; committing a chain only adds to length_b. A tree's accepted path is gathered to the front. Nothing is realigned,
no row knows of another: this is where the ragged tensor problem is solved.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class CacheError(RuntimeError):
    """The cache cannot do what was asked; nothing was changed."""


class RaggedKV:
    """Keys and values `[layers, slots, kv_heads, capacity, head_dim]` and one length a slot."""

    def __init__(
        self,
        layers: int,
        slots: int,
        kv_heads: int,
        capacity: int,
        head_dim: int,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
    ):
        if slots < 1 or capacity < 1:
            raise CacheError(f"a cache of {slots} slots and {capacity} entries: expected at least one of each")
        shape = (layers, slots, kv_heads, capacity, head_dim)
        # Zeros, not garbage: a masked entry is multiplied by zero in some forms of attention, and 0 · NaN is NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)
        self.lengths = np.zeros(slots, np.int64)
        self.epoch = 0

    @property
    def slots(self) -> int:
        return len(self.lengths)

    @property
    def capacity(self) -> int:
        return self.keys.shape[3]

    def scratch_view(self) -> RaggedKV:
        """The same storage under lengths of its own, for a drafter that borrows this cache.

        What it writes lies past the committed entries and is overwritten by the next verification.
        """
        view = object.__new__(RaggedKV)
        view.keys, view.values = self.keys, self.values
        view.lengths, view.epoch = self.lengths.copy(), 0
        return view

    def require_room(self, slots: np.ndarray, counts: np.ndarray) -> None:
        """Raise unless each slot has room for so many more entries."""
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

    def commit(self, slots: np.ndarray, paths: Sequence[np.ndarray], epoch: int) -> None:
        """Keep the nodes on each row's path (node indices, ascending from the root; empty: none)."""
        if epoch != self.epoch:
            raise CacheError(
                f"verification {epoch} is stale: its state has been verified, committed, rewound or released since, so "
                "its entries may be gone: commit before anything else, or verify again"
            )
        for slot, path in zip(slots, paths, strict=True):
            base, kept = self.lengths[slot], len(path)
            moved = np.flatnonzero(path != np.arange(kept))
            if len(moved):
                # Paths ascend, so an entry is never moved behind one that is still to be read.
                source, goal = torch.as_tensor(base + path[moved]), torch.as_tensor(base + moved)
                for store in (self.keys, self.values):
                    row = store[:, slot]
                    row[:, :, goal.to(row.device)] = row[:, :, source.to(row.device)]
        for slot, path in zip(slots, paths, strict=True):
            self.lengths[slot] += len(path)
        self.epoch += 1

    def rewind(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Shorten slots to earlier lengths."""
        if (lengths > self.lengths[slots]).any() or (np.asarray(lengths) < 0).any():
            raise CacheError(f"rewind slots {slots} of lengths {self.lengths[slots]} to {lengths}: expected 0…current")
        self.lengths[slots] = lengths
        self.epoch += 1

    def release(self, slots: np.ndarray) -> None:
        """Empty slots for other rows."""
        self.lengths[slots] = 0
        self.epoch += 1
