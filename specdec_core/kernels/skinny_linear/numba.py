"""The product with packed weights: streams them once at the memory's speed, and a row's bits do not depend on n.

Weights are kept as tiles `[out / 16, in, 16]`: the sixteen weights of one input lie together, so a tile is one
sequential stream, and outputs are lanes that never have to be summed across. See panel.py for the order of summation.
"""

from __future__ import annotations

import numpy as np

from specdec_core.kernels.compiled import compiled, helper, inlined
from specdec_core.kernels.simd import LANES, padded, row_step, transpose
from specdec_core.kernels.skinny_linear.panel import STORE, panel
from specdec_core.kernels.threads import COUNTER, barrier, claim, team
from specdec_core.placement import physical_threads

UNIT_BYTES = 384 * 1024
"""Weights in one unit of work, about: small enough for the second-level cache to hold them for all rows."""
MOST_TILES = 64
UNIT_ROWS = 192
"""Rows in one unit of work; their inputs stay in the second-level cache beside the weights."""


class PackedLinear:
    """`SkinnyLinear` over a float32 weight `[out, in]`, packed once; `threads` workers (default: every core)."""

    def __init__(self, weight: np.ndarray, threads: int | None = None):
        require_float32(weight, "weight", ("out", "in"))
        self.outputs, self.inputs = weight.shape
        self.packed = np.empty(padded(self.outputs) * self.inputs, np.float32)
        pack(weight, self.packed, 0, LANES)
        self._team = team(threads or physical_threads())

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """`[n, in]` float32, contiguous → `[n, out]` float32."""
        require_float32(x, "x", ("n", "in"))
        if x.shape[1] != self.inputs:
            raise ValueError(f"x of shape {x.shape}: expected [n, {self.inputs}], the inputs of this weight")
        n, width = len(x), padded(self.outputs)
        y = np.empty((n, width), np.float32)
        counters = np.zeros(COUNTER, np.int64)
        rows, step = _apart(x)
        self._team.run(_linear, counters, self.packed, rows, step, y.reshape(-1), n, self.inputs, width)
        return y if width == self.outputs else np.ascontiguousarray(y[:, : self.outputs])


def _apart(x: np.ndarray) -> tuple[np.ndarray, int]:
    """The rows, flat, and their distance: many rows are copied to lie `row_step` apart, so as not to clash."""
    n, inputs = x.shape
    if n <= 8 or inputs == row_step(inputs):
        return x.reshape(-1), inputs
    apart = np.empty((n, row_step(inputs)), np.float32)
    apart[:, :inputs] = x
    return apart.reshape(-1), row_step(inputs)


def require_float32(array: np.ndarray, name: str, axes: tuple[str, ...]) -> None:
    """Raise unless `array` is a non-empty, C-contiguous float32 numpy array with these axes."""
    expected = f"expected a C-contiguous float32 numpy array [{', '.join(axes)}], none of them 0"
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{name} is a {type(array).__name__}: {expected}")
    if array.dtype != np.float32:
        raise TypeError(f"{name} has dtype {array.dtype}: {expected}; convert it with .astype(np.float32)")
    if array.ndim != len(axes) or not all(array.shape):
        raise ValueError(f"{name} has shape {array.shape}: {expected}")
    if not array.flags.c_contiguous:
        raise ValueError(f"{name} is not contiguous (strides {array.strides}): {expected}; use np.ascontiguousarray")


def pack(weight: np.ndarray, goal: np.ndarray, at: int, stride: int) -> None:
    """Write `weight` `[out, in]` as tiles from goal[at] on, one every `stride / 16` tiles; zeros beyond `out`.

    A stride of 32 leaves room for the tiles of a second matrix between these.
    """
    outputs, inputs = weight.shape
    _pack(np.ascontiguousarray(weight, np.float32).reshape(-1), outputs, inputs, goal, at, stride)


@compiled
def _pack(weight, outputs, inputs, goal, at, stride):
    for tile in range((outputs + LANES - 1) // LANES):
        source, start = tile * LANES * inputs, at + tile * stride * inputs
        rows = min(LANES, outputs - tile * LANES)
        blocks = inputs // LANES * LANES if rows == LANES else 0
        for j in range(0, blocks, LANES):
            transpose(weight, source + j, inputs, goal, start + LANES * j)
        for j in range(blocks, inputs):
            for row in range(LANES):
                goal[start + LANES * j + row] = weight[source + row * inputs + j] if row < rows else 0


@compiled
def _linear(worker, workers, control, counters, packed, x, x_step, y, n, inputs, width):
    product(workers, counters, 0, packed, 0, inputs, width // LANES, x, x_step, n, y, width, STORE)
    barrier(control, workers)


@inlined
def product(workers, counters, phase, w, w_at, k, tiles, x, x_step, n, y, y_step, mode):
    """This worker's share of y = x · wᵀ: units of a few tiles and rows, claimed as they come.

    w[w_at …] packed `[tiles, k, 16]`; x, y flat with rows `x_step`, `y_step` apart; mode as in `panel`.
    """
    unit_tiles = tiles_of_unit(k, tiles, workers)
    row_blocks = (n + UNIT_ROWS - 1) // UNIT_ROWS
    units = (tiles + unit_tiles - 1) // unit_tiles * row_blocks
    unit = claim(counters, phase)
    while unit < units:
        tile = unit // row_blocks * unit_tiles
        block = unit % row_blocks
        first, last = block * n // row_blocks, (block + 1) * n // row_blocks
        panel(
            last - first, min(unit_tiles, tiles - tile), k, w, w_at + tile * k * LANES, LANES, k * LANES,
            x, first * x_step, x_step, y, first * y_step + tile * LANES, y_step, mode,
        )  # fmt: skip
        unit = claim(counters, phase)


@helper
def tiles_of_unit(k, tiles, workers):
    """Tiles in one unit of work: a multiple of 4 if possible, since few rows are computed for 4 tiles at once.

    Where there are few tiles, fewer of them, so that every worker gets several units.
    """
    size = 4 * LANES * k
    many = min(MOST_TILES, max(1, UNIT_BYTES // size), max(1, tiles // (4 * workers)))
    if many >= 4:
        return many // 4 * 4
    return 4 if 4 * size <= 512 * 1024 and tiles >= 8 * workers else many
