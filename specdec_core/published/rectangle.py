"""Realigning (EQSPEC, arXiv 2510.22876): all rows of the batch end at the same column of one rectangular tensor.

Rows are padded on the left. After a round every row appends what it accepted, and the rectangle is padded anew: a row
whose length grew otherwise than the longest one's has all its keys and values moved, by δ = L′ − L − a columns. Masked
scatter (HuggingFaceTarget) moves nothing, because a row's entries begin at its own column 0.

Done as well as it can be: keys and values of all layers lie in one tensor, so that a row is moved by two copies of one
block, and rows that need not move are left alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from specdec_core.arrays import Array
from specdec_core.protocol import Verification
from specdec_core.targets.huggingface import HuggingFaceTarget
from specdec_core.targets.huggingface_cache import HoledCache
from specdec_core.targets.padded import PaddedBatch
from specdec_core.topology import Forest


class Rectangle(HoledCache):
    """Keys and values `[2, layers, slots, kv_heads, capacity, head_dim]`; slot s holds columns starts[s] and on.

    starts  `[S]` first column of each slot's entries: its padding, once `align` has been called.
    """

    def __init__(self, layers: int, slots: int, capacity: int):
        super().__init__(slots, capacity)
        self.starts = np.zeros(slots, np.int64)
        self._layers = layers
        self._all: torch.Tensor | None = None

    @property
    def width(self) -> int:
        """Columns that the longest row fills: L."""
        return int(self.lengths.max())

    def stores(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self._all is None:
            shape = (2, self._layers, len(self.lengths), keys.shape[1], self.capacity, keys.shape[3])
            self._all = store = keys.new_zeros(shape)
            self.layers = {index: (store[0, index], store[1, index]) for index in range(self._layers)}
        return self.layers[layer]

    def align(self) -> None:
        """Move the entries of every slot so that all end at column `width`."""
        for slot in np.flatnonzero(self.lengths).tolist():
            self._move(slot, self.starts[slot], self.width - self.lengths[slot], self.lengths[slot])
            self.starts[slot] = self.width - self.lengths[slot]

    def rewind(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        super().rewind(slots, lengths)
        self.align()

    def release(self, slots: np.ndarray) -> None:
        super().release(slots)
        self.starts[slots] = 0

    def _move(self, slot: int, start: int, goal: int, count: int) -> None:
        if start == goal or not count or self._all is None:
            return
        rows = self._all[:, :, slot]
        # A copy between: the two blocks may overlap.
        rows[:, :, :, goal : goal + count] = rows[:, :, :, start : start + count].clone()


class RealigningTarget(HuggingFaceTarget):
    """`Target` over any causal LM of transformers whose batch is one left-padded rectangle, realigned every round."""

    def new_state(self, slots: int, capacity: int) -> Rectangle:
        return Rectangle(self._model.config.get_text_config().num_hidden_layers, slots, capacity)

    def prefill(self, state: HoledCache, slots: np.ndarray, prompts: Sequence[np.ndarray]) -> list[Array | None]:
        found = super().prefill(state, slots, prompts)
        _rectangle(state).align()
        return found

    def commit(self, state: HoledCache, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        """Keep the paths behind what each row has, count them, and realign."""
        rectangle = _rectangle(state)
        rectangle.require_paths(verification.epoch, verification.forest, paths)
        for slot, path in zip(verification.slots, paths, strict=True):
            base = rectangle.starts[slot] + rectangle.lengths[slot]
            for place in np.flatnonzero(path != np.arange(len(path))):
                rectangle._move(slot, base + path[place], base + place, 1)
        rectangle.advance(verification.slots, [len(path) for path in paths])
        rectangle.align()

    def _padded(self, state: HoledCache, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> PaddedBatch:
        return behind_padding(super()._padded(state, slots, tokens, forest), _rectangle(state).starts[slots])


def behind_padding(batch: PaddedBatch, starts: np.ndarray) -> PaddedBatch:
    """The batch with every row's entries `starts` `[B]` columns further to the right; positions stay the row's own."""
    entries = batch.entries + starts[batch.rows]
    rows, nodes, reach = batch.visible.shape
    visible = np.zeros((rows, nodes, int(entries.max()) + 1), bool)
    for row, start in enumerate(starts):
        seen = batch.visible[row, :, : visible.shape[2] - start]  # beyond it no row has entries
        visible[row, :, start : start + reach] = seen
    return replace(batch, visible=visible, entries=entries)


def _rectangle(state: HoledCache) -> Rectangle:
    assert isinstance(state, Rectangle)  # states are made by `new_state`
    return state
