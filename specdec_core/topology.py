"""The shape of what a target verifies in one pass: a chain, a tree, or a forest (one tree a row of the batch).

Node 0 is the newest committed token, nodes 1…k are draft tokens. A parent precedes its children, so the order of the
nodes is topological and a chain is the tree with one branch.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

Parents = tuple[int, ...]


class TopologyError(ValueError):
    """The parents do not describe a tree in topological order."""


@dataclass(frozen=True)
class Topology:
    """A rooted tree of n nodes: `parents[0] == -1` and `parents[i] < i`."""

    parents: Parents

    def __post_init__(self) -> None:
        if not self.parents or self.parents[0] != -1:
            raise TopologyError(f"parents {self.parents}: expected node 0 to be the root, with parent -1")
        for node, parent in enumerate(self.parents[1:], start=1):
            if not 0 <= parent < node:
                raise TopologyError(f"node {node} has parent {parent}: expected 0…{node - 1} (parents come first)")

    def __len__(self) -> int:
        return len(self.parents)

    @cached_property
    def depths(self) -> np.ndarray:
        """Distance to the root, `[n]`; a token's position is the committed length plus its depth."""
        depths = np.zeros(len(self), np.int64)
        for node, parent in enumerate(self.parents[1:], start=1):
            depths[node] = depths[parent] + 1
        return depths

    @cached_property
    def children(self) -> tuple[tuple[int, ...], ...]:
        """Children of each node, in the order in which they are tried."""
        found: list[list[int]] = [[] for _ in self.parents]
        for node, parent in enumerate(self.parents[1:], start=1):
            found[parent].append(node)
        return tuple(tuple(each) for each in found)

    @cached_property
    def ancestors(self) -> np.ndarray:
        """Ancestor mask, itself included, `[n, n]`: entry (i, j) says that node i sees node j."""
        mask = np.eye(len(self), dtype=bool)
        for node, parent in enumerate(self.parents[1:], start=1):
            mask[node] |= mask[parent]
        return mask

    @cached_property
    def paths(self) -> np.ndarray:
        """Nodes from the root to each node, by depth, `[n, max depth + 1]`, padded with -1."""
        table = np.full((len(self), int(self.depths.max()) + 1), -1, np.int32)
        for node, parent in enumerate(self.parents):
            if parent >= 0:
                table[node] = table[parent]
            table[node, self.depths[node]] = node
        return table

    def path(self, node: int) -> np.ndarray:
        """Nodes from the root to `node`, both included."""
        return self.paths[node, : self.depths[node] + 1].astype(np.int64)

    @cached_property
    def is_chain(self) -> bool:
        return self.parents == tuple(range(-1, len(self) - 1))


SMALL = 64
"""Nodes up to which shapes are remembered: drafts come again every round, a long prompt's chain does not."""


def tree(parents: Parents) -> Topology:
    """The tree with these parents; equal small shapes are one object, so their tables are computed once."""
    return _tree(parents) if len(parents) <= SMALL else Topology(parents)


_tree = lru_cache(maxsize=4096)(Topology)


def chain(nodes: int) -> Topology:
    """A chain of `nodes` nodes: the newest token and `nodes - 1` drafted ones."""
    if nodes < 1:
        raise TopologyError(f"a chain of {nodes} nodes: expected at least the newest committed token")
    return tree(tuple(range(-1, nodes - 1)))


@dataclass(frozen=True)
class Forest:
    """One tree a row, nodes of all rows in one flat list of N: what one target pass works on.

    Rows are never padded here; a batch of different shapes costs the sum of its nodes.
    """

    trees: tuple[Topology, ...]

    @cached_property
    def counts(self) -> np.ndarray:
        """Nodes of each row, `[B]`."""
        return np.array([len(t) for t in self.trees], np.int64)

    @cached_property
    def offsets(self) -> np.ndarray:
        """Row b owns the flat nodes `offsets[b]:offsets[b + 1]`, `[B + 1]`."""
        return np.concatenate([[0], np.cumsum(self.counts)]).astype(np.int64)

    @cached_property
    def rows(self) -> np.ndarray:
        """Row of each flat node, `[N]`."""
        return np.repeat(np.arange(len(self.trees)), self.counts)

    @cached_property
    def nodes(self) -> np.ndarray:
        """Index of each flat node in its own tree, `[N]`."""
        return np.arange(int(self.counts.sum())) - np.repeat(self.offsets[:-1], self.counts)

    @cached_property
    def depths(self) -> np.ndarray:
        """Depth of each flat node, `[N]`."""
        return np.concatenate([t.depths for t in self.trees])

    @cached_property
    def paths(self) -> np.ndarray:
        """Nodes (indices in the own tree) from root to node by depth, `[N, deepest + 1]` int32, padded with -1."""
        width = max(t.paths.shape[1] for t in self.trees)
        table = np.full((int(self.counts.sum()), width), -1, np.int32)
        for t, start in zip(self.trees, self.offsets[:-1], strict=True):
            table[start : start + len(t), : t.paths.shape[1]] = t.paths
        return table


def forest(trees: Sequence[Topology]) -> Forest:
    """The forest of these rows; equal small shapes are one object."""
    if not trees:
        raise TopologyError("a forest without rows: expected at least one")
    return _forest(tuple(trees)) if sum(map(len, trees)) <= 4 * SMALL else Forest(tuple(trees))


_forest = lru_cache(maxsize=1024)(Forest)
