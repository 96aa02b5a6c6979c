"""Padding without position repair (BSP-like): position ids go on counting the columns of a rectangle.

Every row of the batch takes as many columns a round as the longest draft has nodes; rejected ones are masked, but the
next token's position is its column. A row that accepts little is torn apart: its newest tokens are at positions far
from those that they follow. Prompts are right; the drift of a row is the number of its columns that were rejected.

Columns that a mask hides need no storage, so the entries are kept without them; what the model computes is the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from specdec_core.protocol import Verification
from specdec_core.targets.huggingface import HuggingFaceTarget
from specdec_core.targets.huggingface_cache import HoledCache
from specdec_core.targets.padded import PaddedBatch
from specdec_core.topology import Forest


class DriftingCache(HoledCache):
    """Also counts, a slot, the columns that were rejected so far: `drift` `[S]`."""

    def __init__(self, slots: int, capacity: int):
        super().__init__(slots, capacity)
        self.drift = np.zeros(slots, np.int64)

    def release(self, slots: np.ndarray) -> None:
        super().release(slots)
        self.drift[slots] = 0


class KeptPositionsTarget(HuggingFaceTarget):
    """`Target` over any causal LM of transformers that corrupts its output as described above."""

    def new_state(self, slots: int, capacity: int) -> DriftingCache:
        return DriftingCache(slots, capacity)

    def commit(self, state: HoledCache, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        super().commit(state, verification, paths)
        columns = verification.forest.counts.max()
        _drifting(state).drift[verification.slots] += [columns - len(path) for path in paths]

    def _padded(self, state: HoledCache, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> PaddedBatch:
        batch = super()._padded(state, slots, tokens, forest)
        drifted = batch.positions + _drifting(state).drift[slots][:, None]
        return replace(batch, positions=np.minimum(drifted, self.context - 1))


def _drifting(state: HoledCache) -> DriftingCache:
    assert isinstance(state, DriftingCache)  # states are made by `new_state`
    return state
