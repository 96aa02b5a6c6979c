"""Who sees whom, as index tables on a device: made once a forest, used by every layer."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch

from specdec_core.topology import SMALL, Forest, Topology

Rows = torch.Tensor | slice
"""An index of the leading axis: a slice (so that no memory is copied) where the indices are consecutive."""


@dataclass(frozen=True)
class Batch:
    """The R rows of a forest that have n nodes each, worked on together. R′ is 1 where they are all of one shape.

    The state before the window counts as the parent of every root, with index n.

    rows      index of these rows in the batch of all.
    nodes     index of their R·n flat nodes.
    up        `[R′, n, D]`: the node itself, its parent, and so on, n beyond the root; D the greatest depth + 1.
    distance  `[R′, n, n + 1]`: steps up from node t to node i, −1 if i is not among its ancestors; the last column is
              the state's.
    parents   `[R′, n]`.
    """

    rows: Rows
    nodes: Rows
    shape: tuple[int, int]
    up: torch.Tensor
    distance: torch.Tensor
    parents: torch.Tensor

    def take(self, flat: torch.Tensor) -> torch.Tensor:
        """Flat `[N, H, X]` → `[R, H, n, X]`; `[N, H]` → `[R, H, n, 1]`."""
        taken = flat[self.nodes].unflatten(0, self.shape).transpose(1, 2)
        return taken if taken.ndim == 4 else taken.unsqueeze(-1)


def batches(forest: Forest, device: torch.device) -> tuple[Batch, ...]:
    """The forest's rows by their number of nodes (drafts of one budget have one, whatever their shapes)."""
    return _remembered(forest, device) if max(map(len, forest.trees)) <= SMALL else _batches(forest, device)


def _batches(forest: Forest, device: torch.device) -> tuple[Batch, ...]:
    return tuple(_batch(forest, np.flatnonzero(forest.counts == n), device) for n in np.unique(forest.counts))


_remembered = lru_cache(maxsize=64)(_batches)


def _batch(forest: Forest, rows: np.ndarray, device: torch.device) -> Batch:
    shapes = [forest.trees[row] for row in rows]
    nodes = len(shapes[0])
    tables = shapes[:1] if all(shape == shapes[0] for shape in shapes) else shapes
    width = max(shape.paths.shape[1] for shape in tables)
    flat = (forest.offsets[rows, None] + np.arange(nodes)).ravel()

    def stacked(each: list[np.ndarray]) -> torch.Tensor:
        return torch.from_numpy(np.stack(each).astype(np.int64)).to(device)

    return Batch(
        rows=index(rows, device),
        nodes=index(flat, device),
        shape=(len(rows), nodes),
        up=stacked([steps_up(shape, width) for shape in tables]),
        distance=stacked([_distance(shape) for shape in tables]),
        parents=stacked([np.array([nodes, *shape.parents[1:]]) for shape in tables]),
    )


def index(values: np.ndarray, device: torch.device) -> Rows:
    """These indices of an axis: a slice where they are consecutive."""
    first = int(values[0])
    if (values == np.arange(first, first + len(values))).all():
        return slice(first, first + len(values))
    return torch.from_numpy(values).to(device)


def steps_up(shape: Topology, width: int) -> np.ndarray:
    """Each node, its parent, and so on, `[n, width]`; n beyond the root."""
    depth = shape.depths[:, None] - np.arange(width)
    return np.where(depth >= 0, shape.paths[np.arange(len(shape))[:, None], np.maximum(depth, 0)], len(shape))


def _distance(shape: Topology) -> np.ndarray:
    between = np.where(shape.ancestors, shape.depths[:, None] - shape.depths, -1)
    return np.concatenate([between, shape.depths[:, None] + 1], axis=1)


@dataclass(frozen=True)
class Accepted:
    """The paths of the R rows that accepted anything, longest m.

    rows  index of these rows in the batch of all.
    up    `[R, m]`: flat nodes from the accepted one up to the root; then the root again, which adds nothing.
    real  `[R, m]` bool: false at those.
    """

    rows: Rows
    up: torch.Tensor
    real: torch.Tensor


@lru_cache(maxsize=64)
def accepted(forest: Forest, ends: tuple[int, ...], device: torch.device) -> Accepted | None:
    """Paths to these nodes, one a row (−1: none accepted), or None if no row accepted any."""
    rows = np.flatnonzero(np.array(ends) >= 0)
    if not len(rows):
        return None
    paths = [forest.trees[row].path(ends[row])[::-1] for row in rows]
    up = np.zeros((len(rows), max(map(len, paths))), np.int64)
    real = np.zeros(up.shape, bool)
    for line, path in enumerate(paths):
        up[line, : len(path)] = path
        real[line, : len(path)] = True
    up += forest.offsets[rows, None]
    return Accepted(index(rows, device), torch.from_numpy(up).to(device), torch.from_numpy(real).to(device))
