"""A cache for transformers' models that keeps entries by node: rows of any lengths, with holes that a mask hides."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from transformers import Cache

from specdec_core.state.slots import Slots
from specdec_core.targets.padded import PaddedBatch


class HoledCache(Slots):
    """Keys and values `[slots, kv_heads, capacity, head_dim]` of each layer, made when the layer is first run."""

    def __init__(self, slots: int, capacity: int):
        super().__init__(slots, capacity)
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def stores(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if layer not in self.layers:
            sizes = [(len(self.lengths), each.shape[1], self.capacity, each.shape[3]) for each in (keys, values)]
            # Zeros, not garbage: a masked entry is multiplied by zero, and 0 · NaN is NaN.
            self.layers[layer] = keys.new_zeros(sizes[0]), values.new_zeros(sizes[1])
        return self.layers[layer]

    def keep(self, slot: int, path: np.ndarray) -> None:
        """Move the entries of these nodes to the front of the slot's scratch."""
        moved = np.flatnonzero(path != np.arange(len(path)))
        if not len(moved):
            return
        base = int(self.lengths[slot])
        source, goal = torch.as_tensor(base + path[moved]), torch.as_tensor(base + moved)
        for pair in self.layers.values():
            for store in pair:
                row = store[slot]
                row[:, goal.to(row.device)] = row[:, source.to(row.device)]


class HoledPass(Cache):
    """What the model sees of a `HoledCache` during one pass."""

    def __init__(self, state: HoledCache, batch: PaddedBatch, slots: np.ndarray, device: torch.device):
        super().__init__(layers=[])
        self._state, self._reach = state, batch.reach
        indices = (batch.rows, batch.columns, batch.slots, batch.entries)
        self._rows, self._columns, self._slots, self._entries = (torch.as_tensor(i, device=device) for i in indices)
        first = int(slots[0])
        consecutive = np.array_equal(slots, np.arange(first, first + len(slots)))
        # Consecutive slots are looked at where they lie; others have to be gathered.
        self._chosen: Any = slice(first, first + len(slots)) if consecutive else torch.as_tensor(slots, device=device)
        self._before = batch.reach - batch.tokens.shape[1]

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        seen = []
        for store, new in zip(
            self._state.stores(layer_idx, key_states, value_states), (key_states, value_states), strict=True
        ):
            store[self._slots, :, self._entries] = new.transpose(1, 2)[self._rows, self._columns]
            seen.append(store[self._chosen][:, :, : self._reach])
        return seen[0], seen[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self._before
