"""Accepted paths as flat nodes of a forest."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec_core.kernels.gated_delta.checks import check_paths
from specdec_core.topology import Forest


def path_nodes(forest: Forest, paths: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
    """Flat nodes of every row's path, root first, one row after another; and where each row's begin, `[B + 1]`.

    ValueError as of `check_paths`, which looks at one row after another: here all of them are looked at together, since
    a large batch would otherwise wait longer for this than for its commit.
    """
    arrays = [np.asarray(path) for path in paths]
    if not _fine(forest, arrays):
        ends = check_paths(forest, paths)
        arrays = [tree.path(end if end >= 0 else 0)[: end + 1] for tree, end in zip(forest.trees, ends, strict=True)]
    lengths = [len(each) for each in arrays]
    starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64)
    return np.concatenate(arrays).astype(np.int64) + np.repeat(forest.offsets[:-1], lengths), starts


def _fine(forest: Forest, arrays: Sequence[np.ndarray]) -> bool:
    """Whether these are plain arrays of the indices that the forest has for the last of each."""
    if len(arrays) != len(forest.trees) or any(each.ndim != 1 or each.dtype.kind != "i" for each in arrays):
        return False
    lengths = np.array([len(each) for each in arrays])
    rows = np.flatnonzero(lengths)
    given = np.concatenate(arrays)
    ends = given[np.cumsum(lengths)[rows] - 1]
    if ((ends < 0) | (ends >= forest.counts[rows])).any():
        return False
    last = forest.offsets[rows] + ends
    real = np.arange(forest.paths.shape[1]) <= forest.depths[last][:, None]
    return bool((real.sum(1) == lengths[rows]).all()) and bool((forest.paths[last][real] == given).all())


def upwards(starts: np.ndarray) -> np.ndarray:
    """An index that turns each row's part around."""
    lengths = np.diff(starts)
    return np.repeat(starts[1:] + starts[:-1] - 1, lengths) - np.arange(starts[-1])
