"""A forest as a padded batch, for backends that take `[B, n]`: one row a tree, its nodes left-aligned.

Ragged lengths become holes in a mask: every row looks at the same stretch of its slot's entries, of which it sees its
committed ones and, of the scratch entries after them, those of its own path.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdec_core.topology import Forest


@dataclass(frozen=True)
class PaddedBatch:
    """What one pass feeds.

    tokens     `[B, n]` int64, n the nodes of the largest tree; padding repeats the row's root.
    positions  `[B, n]` int64: committed length plus depth; padding has the root's.
    visible    `[B, n, R]` bool: entries of the row's slot that a node may look at, R = `reach`.
    rows, columns  `[N]`: where each flat node lies in the batch.
    slots, entries `[N]`: the slot of each flat node and the entry that it writes there.
    """

    tokens: np.ndarray
    positions: np.ndarray
    visible: np.ndarray
    rows: np.ndarray
    columns: np.ndarray
    slots: np.ndarray
    entries: np.ndarray

    @property
    def reach(self) -> int:
        """Entries of a slot that any row looks at: the longest row's, its draft included."""
        return self.visible.shape[2]


def pad(tokens: np.ndarray, slots: np.ndarray, lengths: np.ndarray, forest: Forest) -> PaddedBatch:
    """The batch of `tokens` `[N]` (flat) for rows in `slots` `[B]` with committed `lengths` `[B]`."""
    counts = forest.counts
    shape = (len(counts), int(counts.max()))
    rows, columns = forest.rows, forest.nodes
    padded = np.repeat(tokens[forest.offsets[:-1], None], shape[1], axis=1)
    padded[rows, columns] = tokens
    positions = np.repeat(lengths[:, None], shape[1], axis=1)
    positions[rows, columns] += forest.depths
    visible = np.zeros((*shape, int((lengths + counts).max())), bool)
    for row, tree in enumerate(forest.trees):
        length, count = lengths[row], counts[row]
        # Padding sees what the root sees: a query that sees nothing would be NaN in some forms of attention.
        visible[row, :, :length] = True
        visible[row, :, length] = True
        visible[row, :count, length : length + count] = tree.ancestors
    return PaddedBatch(padded, positions, visible, rows, columns, slots[rows], lengths[rows] + columns)
