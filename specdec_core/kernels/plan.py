"""What one pass over a key/value cache reads and writes: positions, write slots and visible entries of every node."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from specdec_core.topology import Forest


@dataclass(frozen=True)
class StepPlan:
    """One target pass over N flat nodes of B rows.

    tokens     `[N]` int64.
    slots      `[N]` int64: cache slot of each node's row.
    committed  `[N]` int64: cached length of that slot before the pass.
    depths     `[N]` int64: a node's rotary position is committed + depth.
    nodes      `[N]` int64: index in the own tree; a node's key and value go to cache entry committed + node.
    paths      `[N, D]` int32: node indices from the root to the node by depth (-1 beyond it). A node sees the entries
               0…committed − 1, then committed + path[0], committed + path[1], … up to itself: in this order, so that
               the *rank* of an entry among the visible ones is the same for a chain, a tree and single steps.
    offsets    `[B + 1]` int64: flat range of each row.
    """

    tokens: np.ndarray
    slots: np.ndarray
    committed: np.ndarray
    depths: np.ndarray
    nodes: np.ndarray
    paths: np.ndarray
    offsets: np.ndarray

    @property
    def positions(self) -> np.ndarray:
        """Rotary position of each node, `[N]`."""
        return self.committed + self.depths

    @property
    def entries(self) -> np.ndarray:
        """Cache entry that each node writes, `[N]`."""
        return self.committed + self.nodes


def plan_step(tokens: np.ndarray, slots: np.ndarray, lengths: np.ndarray, forest: Forest) -> StepPlan:
    """Plan a pass: `tokens` `[N]`, `slots` `[B]` of the rows, `lengths` `[B]` cached in them."""
    rows = forest.rows
    return StepPlan(
        tokens=np.array(tokens, np.int64),  # a copy: the caller's may be read-only, which torch dislikes
        slots=slots[rows].astype(np.int64),
        committed=lengths[rows].astype(np.int64),
        depths=forest.depths,
        nodes=forest.nodes,
        paths=forest.paths,
        offsets=forest.offsets,
    )
