"""The target's own first layers as drafter (self-speculation): no second model, no second cache.

The first m layers, the final norm and the head draft on scratch entries of the target's cache past the committed ones;
verification overwrites them with the same layers' entries, so the drafter is always in step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec_core.arrays import Array
from specdec_core.drafters.model import draft_chains
from specdec_core.protocol import Draft, RowView
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.targets.transformer import Transformer


class LayerSkipDrafter:
    """Drafts with the first `layers` layers of `target`, sharing its weights and its committed cache."""

    def __init__(self, target: Transformer, layers: int):
        self._model = target.early_exit(layers)

    def most_nodes(self, depth: int) -> int:
        return depth

    def start(self, slots: int, capacity: int) -> None:
        """Nothing to make: the cache is the target's."""

    def admit(self, slots: np.ndarray, prompts: Sequence[np.ndarray], features: Sequence[Array | None]) -> None:
        """Nothing to prefill."""

    def propose(self, views: Sequence[RowView], state: RaggedKV) -> list[Draft]:
        return draft_chains(self._model, state.scratch_view(), views, self._model.vocabulary)

    def observe(self, slots: np.ndarray, tokens: Sequence[np.ndarray], features: Sequence[Array | None]) -> None:
        """Nothing to undo: the target has committed for both."""

    def release(self, slots: np.ndarray) -> None:
        """Nothing is kept."""
