"""The product with int8 weights: a quarter of the float32 stream, and a row's bits still do not depend on n.

Both factors are quantized in groups of 64 inputs (32 where `in` is no multiple of 64; zeros fill up the last group):

    scale = m / 127,   value = round(a · (127 / m)), half to even,   m the largest |a| of the group,

each operation rounded to float32. A group of zeros has scale 0; so has one with m < 2^-100, where 127 / m comes near
overflow. Weights are quantized once, for each output; activations at every call, for each row. See int8_panel.py for
the sums, which are exact within a group, and for the layout.

Weights must be finite. An activation that is NaN or infinite makes its whole row NaN. Where the product of two scales
overflows, outputs are infinite or NaN, as they may be in float32.
"""

from __future__ import annotations

import numpy as np

from specdec_core.kernels.compiled import compiled, helper, inlined
from specdec_core.kernels.simd import LANES, padded
from specdec_core.kernels.skinny_linear.int8_panel import byte_panel, group_bytes, row_group_bytes
from specdec_core.kernels.skinny_linear.int8_products import ROUNDER, TOGETHER, VALUE_BYTES, put_nearest, put_value
from specdec_core.kernels.skinny_linear.numba import UNIT_ROWS, require_float32, tiles_of_unit
from specdec_core.kernels.skinny_linear.panel import STORE
from specdec_core.kernels.threads import COUNTER, barrier, claim, team
from specdec_core.placement import physical_threads

LARGEST = 127
"""Largest magnitude of a value; −128 is not used, so that a sign costs nothing."""
SMALLEST = np.float32(2.0**-100)
"""Groups whose largest magnitude is below this count as zeros."""
OFFSET = 128
"""Added to a weight to make it unsigned."""
_LINE = 64
_INFINITE = 0x7F800000
"""Bits of float32 infinity; those of a NaN without its sign are larger."""


class QuantizedLinear:
    """`SkinnyLinear` over a float32 weight `[out, in]`, quantized once; `threads` workers (default: every core)."""

    def __init__(self, weight: np.ndarray, threads: int | None = None):
        values, scales = quantize(weight)
        self.outputs, self.inputs = weight.shape
        self.packed = pack_int8(values, scales)
        self._team = team(threads or physical_threads())

    def __call__(self, x: np.ndarray) -> np.ndarray:
        """`[n, in]` float32, contiguous → `[n, out]` float32."""
        require_float32(x, "x", ("n", "in"))
        if x.shape[1] != self.inputs:
            raise ValueError(f"x of shape {x.shape}: expected [n, {self.inputs}], the inputs of this weight")
        n, width = len(x), padded(self.outputs)
        group = group_of(self.inputs)
        y = np.empty((n, width), np.float32)
        rows = aligned_bytes(n * row_bytes(self.inputs, group))
        counters = np.zeros(2 * COUNTER, np.int64)
        self._team.run(_linear, counters, self.packed, x.reshape(-1), rows, y.reshape(-1), n, self.inputs, width, group)
        return y if width == self.outputs else np.ascontiguousarray(y[:, : self.outputs])


def quantize(weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Float32 `[out, in]` → int8 values `[out, in]` within ±127 and float32 scales `[out, groups]`.

    Errors as for every weight; ValueError if any of it is NaN or infinite.
    """
    require_float32(weight, "weight", ("out", "in"))
    if not np.isfinite(weight).all():
        output, column = np.argwhere(~np.isfinite(weight))[0]
        raise ValueError(
            f"weight[{output}, {column}] is {weight[output, column]}: expected finite numbers, which alone can be "
            "quantized; look for the cause where the weight was loaded or trained"
        )
    grouped = _in_groups(weight)
    largest = np.abs(grouped).max(2)
    largest[largest < SMALLEST] = 0
    inverse = np.divide(np.float32(LARGEST), largest, out=np.zeros_like(largest), where=largest > 0)
    values = np.rint(grouped * inverse[:, :, None]).astype(np.int8)
    inputs = weight.shape[1]
    return np.ascontiguousarray(values.reshape(len(weight), -1)[:, :inputs]), largest / np.float32(LARGEST)


def dequantize(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """What `quantize` kept: value · scale of its group, float32 `[out, in]`. ValueError if the shapes do not agree."""
    outputs, inputs = values.shape
    expected = (outputs, groups_of(inputs, group_of(inputs)))
    if scales.shape != expected:
        raise ValueError(f"scales of shape {scales.shape}: expected {expected}, those of values {values.shape}")
    return values * np.repeat(scales, group_of(inputs), axis=1)[:, :inputs]


def group_of(inputs: int) -> int:
    """Inputs that share a scale."""
    return 64 if inputs % 64 == 0 else 32


def groups_of(inputs: int, group: int) -> int:
    return (inputs + group - 1) // group


def row_bytes(inputs: int, group: int) -> int:
    """Distance of quantized rows: an odd number of cache lines, so that rows read in step do not evict each other."""
    lines = (groups_of(inputs, group) * row_group_bytes(group) + _LINE - 1) // _LINE
    return (lines | 1) * _LINE


def aligned_bytes(size: int) -> np.ndarray:
    """`size` zero bytes from the start of a cache line on: a load across two lines takes twice as long."""
    memory = np.zeros(size + _LINE, np.uint8)
    return memory[-memory.ctypes.data % _LINE :][:size]


def pack_int8(values: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """The tiles of int8_panel.py, flat bytes, from what `quantize` returns; zeros beyond `out`."""
    outputs, inputs = values.shape
    group = group_of(inputs)
    grouped = _in_groups(values)
    groups = grouped.shape[1]
    tiles = padded(outputs) // LANES
    packed = aligned_bytes(tiles * groups * group_bytes(group))
    records = packed.reshape(tiles, groups, group_bytes(group))
    bytes_of_tile = records[:, :, : LANES * group].reshape(tiles, groups, group // TOGETHER, LANES, TOGETHER)
    scales_of_tile = records[:, :, LANES * group :].view(np.float32)
    for lane in range(LANES):
        ours = grouped[lane::LANES]
        unsigned = (ours.astype(np.int16) + OFFSET).astype(np.uint8)
        bytes_of_tile[: len(ours), :, :, lane] = unsigned.reshape(len(ours), groups, group // TOGETHER, TOGETHER)
        scales_of_tile[: len(ours), :, lane] = scales[lane::LANES]
    return packed


def _in_groups(matrix: np.ndarray) -> np.ndarray:
    """`[out, in]` → `[out, groups, group]`, filled up with zeros."""
    outputs, inputs = matrix.shape
    group = group_of(inputs)
    missing = -inputs % group
    whole = np.pad(matrix, ((0, 0), (0, missing))) if missing else matrix
    return whole.reshape(outputs, -1, group)


@compiled
def _linear(worker, workers, control, counters, packed, x, rows, y, n, inputs, width, group):
    groups = (inputs + group - 1) // group
    step = rows.size // n
    quantize_rows(counters, 0, x, inputs, n, inputs, group, rows, step)
    if not barrier(control, workers):
        return
    product_int8(workers, counters, 1, packed, 0, groups, group, width // LANES, rows, step, n, y, width, STORE)


@helper
def quantize_rows(counters, phase, x, x_step, n, inputs, group, rows, rows_step):
    """This worker's share of the n rows of x, flat float32 and `x_step` apart: one unit of work each.

    rows: the bytes that `product_int8` reads, `rows_step` ≥ `row_bytes` apart, which must start at a multiple of 4.
    """
    row = claim(counters, phase)
    while row < n:
        for first in range(0, inputs, group):
            record = row * rows_step + first // group * row_group_bytes(group)
            quantize_group(x, row * x_step + first, min(group, inputs - first), group, rows, record)
        row = claim(counters, phase)


@helper
def quantize_group(x, at, count, group, rows, record):
    """x[at] … x[at + count − 1] and zeros up to `group` numbers, as the record that begins at rows[record]."""
    largest = _largest(x.view(np.int32), at, count)
    scale, inverse, count = np.float32(np.nan), np.float32(0), count if largest < _INFINITE else 0
    if largest < _INFINITE:
        scale, inverse = _scales(_float_of(largest))
    total, whole = np.int32(0), count // LANES * LANES
    for i in range(0, whole, LANES):
        total += put_nearest(x, at + i, inverse, rows, record + VALUE_BYTES * i)
    for i in range(whole, count):
        value = _nearest(x[at + i] * inverse)
        put_value(rows, record, i, value)
        total += np.int32(value)
    for i in range(count, group):
        put_value(rows, record, i, 0)
    scales = record // 4 + VALUE_BYTES * group // 4
    rows.view(np.float32)[scales] = scale
    rows.view(np.int32)[scales + 1] = -OFFSET * total


@helper
def _largest(bits, at, count):
    """Bits of the largest magnitude. Without signs, floats are ordered as their bits are, NaN above all numbers."""
    largest = np.int32(0)
    for i in range(at, at + count):
        largest = max(largest, np.int32(bits[i] & 0x7FFFFFFF))
    return largest


@helper
def _scales(largest):
    """The scale of a group and its inverse."""
    if largest < SMALLEST:
        return np.float32(0), np.float32(0)
    return largest / np.float32(LARGEST), np.float32(LARGEST) / largest


@helper
def _nearest(value):
    """The nearest integer to a float32 within ±127, half to even: what adding the rounder leaves in the low bits."""
    return np.int8(np.float32(value + ROUNDER).view(np.int32))


@helper
def _float_of(bits):
    return np.int32(bits).view(np.float32)


@inlined
def product_int8(workers, counters, phase, w, w_at, groups, group, tiles, x, x_step, n, y, y_step, mode):
    """This worker's share of y = x · wᵀ: units of a few tiles and rows, claimed as they come.

    w[w_at …] from `pack_int8`; x from `quantize_rows`, rows `x_step` bytes apart; y flat with rows `y_step` apart;
    mode: STORE or ADD.
    """
    tile_bytes = groups * group_bytes(group)
    unit_tiles = tiles_of_unit(tile_bytes // (4 * LANES), tiles, workers)
    row_blocks = (n + UNIT_ROWS - 1) // UNIT_ROWS
    units = (tiles + unit_tiles - 1) // unit_tiles * row_blocks
    unit = claim(counters, phase)
    while unit < units:
        tile = unit // row_blocks * unit_tiles
        block = unit % row_blocks
        first, last = block * n // row_blocks, (block + 1) * n // row_blocks
        byte_panel(
            last - first, min(unit_tiles, tiles - tile), groups, group, w, w_at + tile * tile_bytes, tile_bytes,
            x, first * x_step, x_step, y, first * y_step + tile * LANES, y_step, mode,
        )  # fmt: skip
        unit = claim(counters, phase)
