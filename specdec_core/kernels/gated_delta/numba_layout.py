"""What the compiled round is given, and where a worker's scratch holds what it computes."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specdec_core.kernels.compiled import helper
from specdec_core.kernels.cpu import registers
from specdec_core.kernels.simd import LANES, padded, row_step

GROUP, PAIR = 4 * LANES, 2 * LANES
"""Columns whose sums are formed side by side."""
WIDE = registers().count * registers().lanes >= 32 * LANES
"""Whether registers hold two groups of sums and what is added to them; else sums are formed by pairs of vectors."""


class Sizes(NamedTuple):
    """B rows, H heads, K key channels, V value channels (a multiple of 16), and in how many tiles a head is cut."""

    rows: int
    heads: int
    keys: int
    values: int
    tiles: int


class FlatWindow(NamedTuple):
    """The nodes to verify; a row may have none. Everything but the tables is flat float32.

    offsets, depths, paths  as in `Forest`; `paths` flat, `columns` numbers a node.
    outputs, written        `[N, H, V]`, to be filled: outputs and the factors u.
    """

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    log_decay: np.ndarray
    beta: np.ndarray
    offsets: np.ndarray
    depths: np.ndarray
    paths: np.ndarray
    columns: int
    outputs: np.ndarray
    written: np.ndarray


class AcceptedFactors(NamedTuple):
    """What is to be committed: factors flat as in `Factors`, and flat nodes from each row's last up to its root.

    nodes   row b's are those from `starts[b]` to `starts[b + 1]`.
    """

    keys: np.ndarray
    values: np.ndarray
    log_decay: np.ndarray
    nodes: np.ndarray
    starts: np.ndarray


class Places(NamedTuple):
    """Where in a worker's scratch its arrays begin, and the distance of their rows.

    x       `[2 n, x_step]` keys, then queries (and room to read n₁₆ rows).
    blocks  `[n₁₆ / 16, K, 16]` keys, transposed.
    by_k    `[n, n₁₆]` k_t·k_i, then −D[t, i] k_t·k_i; by_q the same with q_t, without the sign.
    decay   `[n, n₁₆]` D[t, i], 0 where i is no ancestor of t; before `[n₁₆]` e^{G_t}; gates `[n₁₆]` e^{g_t}.
    seen    `[2 n, y_step]` S₀ᵀk and S₀ᵀq of one tile; u `[n, y_step]`.
    columns `[K, 16]` sixteen columns of a tile.
    path_x  `[m, x_step]` keys of the accepted path, weighted by the decay of what follows them; path_u `[m, y_step]`;
            path_gates `[m₁₆ + 1]`.
    """

    x: int
    x_step: int
    blocks: int
    by_k: int
    by_q: int
    decay: int
    before: int
    gates: int
    step: int
    seen: int
    u: int
    y_step: int
    path_x: int
    path_u: int
    path_gates: int
    columns: int
    end: int


def _places(nodes, path, keys, width):
    n, m, k, x_step, y_step = padded(nodes), padded(path), padded(keys), row_step(keys), row_step(width)
    x = 0
    blocks = x + 2 * n * x_step
    by_k = blocks + n * k
    by_q = by_k + n * n
    decay = by_q + n * n
    before = decay + n * n
    gates = before + n
    seen = gates + n
    u = seen + 2 * n * y_step
    path_x = u + n * y_step
    path_u = path_x + m * x_step
    path_gates = path_u + m * y_step
    columns = path_gates + m + LANES
    end = columns + k * LANES
    return Places(
        x, x_step, blocks, by_k, by_q, decay, before, gates, n, seen, u, y_step, path_x, path_u, path_gates,
        columns, end,
    )  # fmt: skip


places_of = helper(_places)


def workspace(nodes: int, path: int, keys: int, width: int) -> int:
    """Floats of scratch of one worker, whole cache lines."""
    return row_step(_places(nodes, path, keys, width).end)
