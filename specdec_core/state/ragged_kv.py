"""A key/value cache with a length a row: masked scatter in, rollback by moving a number.

Row b writes its nodes at its own entries length_b … length_b + n − 1; the pass hides every entry that a node may not
see; committing a chain only adds to length_b. A tree's accepted path is moved to the front, run by run. Nothing is
realigned, no row knows of another: this is where the ragged tensor problem is solved.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch

from specdec_core.state.slots import CacheError, Slots


class RaggedKV(Slots):
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
        super().__init__(slots, capacity)
        shape = (layers, slots, kv_heads, capacity, head_dim)
        # Zeros, not garbage: a masked entry is multiplied by zero in some forms of attention, and 0 · NaN is NaN.
        self.keys = torch.zeros(shape, dtype=dtype, device=device)
        self.values = torch.zeros(shape, dtype=dtype, device=device)

    @property
    def slots(self) -> int:
        return len(self.lengths)

    def scratch_view(self) -> RaggedKV:
        """The same storage under lengths of its own, for a drafter that borrows this cache.

        What it writes lies past the committed entries and is overwritten by the next verification.
        """
        view = object.__new__(RaggedKV)
        view.keys, view.values, view.capacity = self.keys, self.values, self.capacity
        view.lengths, view.epoch = self.lengths.copy(), 0
        return view

    def commit(self, slots: np.ndarray, paths: Sequence[np.ndarray], epoch: int) -> None:
        """Keep the nodes on each row's path (node indices, ascending from the root; empty: none).

        Raises CacheError, and moves nothing, if the verification is stale or a path leads out of its slot.
        """
        self.require_current(epoch)
        moves = [(slot, self._moved(slot, path.tolist())) for slot, path in zip(slots, paths, strict=True)]
        for slot, runs in moves:
            for source, goal, count in runs:
                for store in (self.keys, self.values):
                    _move(store[:, slot], source, goal, count)
        self.advance(slots, [len(path) for path in paths])

    def _moved(self, slot: int, path: list[int]) -> list[tuple[int, int, int]]:
        """Runs of a slot's entries that do not lie in front yet, ascending: (from, to, how many)."""
        base, places = int(self.lengths[slot]), range(len(path))
        in_front = path == list(places)
        ascending = in_front or all(node > before for before, node in pairwise([-1, *path]))
        if path and not (ascending and base + path[-1] < self.capacity):
            raise CacheError(
                f"commit of nodes {path} behind the {base} entries of slot {slot}: expected ascending nodes of the "
                f"last pass, counted from 0, within its capacity of {self.capacity}"
            )
        if in_front:
            return []
        starts = [at for at in places if path[at] - at != (path[at - 1] - at + 1 if at else 0)]
        return [(base + path[first], base + first, last - first) for first, last in pairwise([*starts, len(path)])]


def _move(row: torch.Tensor, source: int, goal: int, count: int) -> None:
    """Entries source … source + count − 1 of a slot, `[layers, kv_heads, capacity, head_dim]`, to `goal` < source."""
    moved = row[:, :, source : source + count]
    # What a copy between places that overlap does is not defined.
    row[:, :, goal : goal + count] = moved.clone() if goal + count > source else moved
