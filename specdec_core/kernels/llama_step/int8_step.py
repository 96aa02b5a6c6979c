"""The compiled decoder step with int8 weights: the phases of numba_step.py around another product.

The products of the layers and the head are those of skinny_linear/int8.py; norms, rotary embedding, attention and cache
are float32 and the very same code. The input of a product is quantized once for each row: normed rows by the worker
that normed them, gated ones by the unit of work that made them, which owns whole groups. The heads of an attended row
come from several workers, so it is quantized in a phase of its own, the only one that numba_step.py does not have.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specdec_core.kernels.compiled import compiled, helper, inlined
from specdec_core.kernels.llama_step.numba_step import (
    CLAIMS,
    DOWN,
    GATE_ROWS,
    GATE_UP,
    NORM,
    OUT,
    POST_NORM,
    QKV,
    attention,
    embed,
    keep_features,
    norm_row,
    rotate,
    silu,
)
from specdec_core.kernels.simd import LANES, load, padded, row_step, store
from specdec_core.kernels.skinny_linear.int8 import product_int8, quantize_group
from specdec_core.kernels.skinny_linear.int8_panel import byte_panel, group_bytes, row_group_bytes
from specdec_core.kernels.skinny_linear.numba import UNIT_ROWS, tiles_of_unit
from specdec_core.kernels.skinny_linear.panel import ADD, STORE
from specdec_core.kernels.threads import barrier, claim


class Width(NamedTuple):
    """Rows of one width as products read them: numbers in a row, those that share a scale, bytes to the next row."""

    size: int
    group: int
    groups: int
    step: int


class Matrices(NamedTuple):
    """What `Model.places` and `Model.head` of this step lead to, and how wide the inputs are.

    packed                  flat bytes, `pack_int8`'s tiles of every matrix; those of gate and up alternate.
    hidden, queries, inner  widths of the inputs: of q/k/v, gate/up and head; of o; of down.
    """

    packed: np.ndarray
    hidden: Width
    queries: Width
    inner: Width


class Rows(NamedTuple):
    """Flat bytes that passes reuse, rows as `product_int8` reads them.

    inputs  of whichever product comes next, but for `down`: `[max(N, M)]` rows, the step is that of their width.
    active  `[N]` rows of `Matrices.inner`.
    """

    inputs: np.ndarray
    active: np.ndarray


@compiled
def int8_step(worker, workers, control, model, matrices, work, scratch, rows):
    """`decoder_step` with int8 weights: `model.weights` holds norms alone, everything else is in `matrices`."""
    nodes = work.tokens.size
    first, last = worker * nodes // workers, (worker + 1) * nodes // workers
    own = scratch.private[worker]
    embed(model, work.tokens, scratch.hidden, first, last)
    for layer in range(work.layers):
        if not _layer(workers, control, model, matrices, work, scratch, rows, own, layer, first, last):
            return
        keep_features(work, scratch.hidden, model.hidden, layer, first, last)
    if work.scored.size:
        score_int8(worker, workers, control, model, matrices, work, scratch, rows)
    barrier(control, workers)


@inlined
def _layer(workers, control, model, matrices, work, scratch, rows, own, layer, first, last):
    """One decoder layer; False if another worker has failed. This worker's share of rows is first … last − 1."""
    nodes, claims, step = work.tokens.size, layer * CLAIMS, row_step(model.hidden)
    tiles, places, queries = padded(model.hidden) // LANES, model.places, model.heads * model.head_dim
    qkv = padded(queries + 2 * model.kv_heads * model.head_dim)
    hidden, attended, inner = matrices.hidden, matrices.queries, matrices.inner

    for node in range(first, last):
        quantize_normed(
            model, places[layer, NORM], scratch.hidden, node * step, scratch.normed, node * step, hidden,
            rows.inputs, node * hidden.step,
        )  # fmt: skip
    if not barrier(control, workers):
        return False
    product_int8(
        workers, work.counters, claims, matrices.packed, places[layer, QKV], hidden.groups, hidden.group, qkv // LANES,
        rows.inputs, hidden.step, nodes, scratch.qkv, qkv, STORE,
    )  # fmt: skip
    if not barrier(control, workers):
        return False
    for node in range(first, last):
        rotate(model, work, scratch, layer, node, qkv)
    if not barrier(control, workers):
        return False
    attention(work.counters, claims + 1, model, work, scratch, own, layer)
    if not barrier(control, workers):
        return False
    for node in range(first, last):
        quantize_row(
            scratch.attended, node * row_step(queries), 0, attended.groups, attended, rows.inputs, node * attended.step
        )
    if not barrier(control, workers):
        return False
    product_int8(
        workers, work.counters, claims + 2, matrices.packed, places[layer, OUT], attended.groups, attended.group, tiles,
        rows.inputs, attended.step, nodes, scratch.hidden, step, ADD,
    )  # fmt: skip
    if not barrier(control, workers):
        return False
    for node in range(first, last):
        quantize_normed(
            model, places[layer, POST_NORM], scratch.hidden, node * step, scratch.normed, node * step, hidden,
            rows.inputs, node * hidden.step,
        )  # fmt: skip
    if not barrier(control, workers):
        return False
    gated_int8(workers, work.counters, claims + 3, matrices, places[layer, GATE_UP], nodes, scratch.active, rows, own)
    if not barrier(control, workers):
        return False
    product_int8(
        workers, work.counters, claims + 4, matrices.packed, places[layer, DOWN], inner.groups, inner.group, tiles,
        rows.active, inner.step, nodes, scratch.hidden, step, ADD,
    )  # fmt: skip
    return barrier(control, workers)


@helper
def quantize_normed(model, norm, source, at, normed, normed_at, width, goal, goal_at):
    """RMSNorm of the row that begins at source[at], then its bytes, from goal[goal_at] on."""
    norm_row(model.weights, norm, model, source, at, normed, normed_at)
    quantize_row(normed, normed_at, 0, width.groups, width, goal, goal_at)


@helper
def quantize_row(source, at, first, last, width, goal, goal_at):
    """Groups first … last − 1 of the row that begins at source[at], as bytes of one that begins at goal[goal_at]."""
    for group in range(first, last):
        start = group * width.group
        quantize_group(
            source, at + start, min(width.group, width.size - start), width.group,
            goal, goal_at + group * row_group_bytes(width.group),
        )  # fmt: skip


@inlined
def gated_int8(workers, counters, phase, matrices, at, nodes, active, rows, own):
    """SiLU(gate) · up and its bytes; tiles of gate and up lie side by side in the packed matrix."""
    hidden, inner, step = matrices.hidden, matrices.inner, row_step(matrices.inner.size)
    tiles, tile_bytes = 2 * padded(inner.size) // LANES, hidden.groups * group_bytes(hidden.group)
    # A unit has whole groups of what it makes, so that it alone knows their scales.
    tiles_of_group = 2 * inner.group // LANES
    some = tiles_of_unit(tile_bytes // (4 * LANES), tiles, workers)
    unit_tiles = max(1, some // tiles_of_group) * tiles_of_group
    row_blocks = (nodes + UNIT_ROWS - 1) // UNIT_ROWS
    units = (tiles + unit_tiles - 1) // unit_tiles * row_blocks
    unit = claim(counters, phase)
    while unit < units:
        tile, block = unit // row_blocks * unit_tiles, unit % row_blocks
        count = min(unit_tiles, tiles - tile)
        group = tile // tiles_of_group
        end = min(inner.groups, group + unit_tiles // tiles_of_group)
        last = (block + 1) * nodes // row_blocks
        for first in range(block * nodes // row_blocks, last, GATE_ROWS):
            together = min(GATE_ROWS, last - first)
            byte_panel(
                together, count, hidden.groups, hidden.group, matrices.packed, at + tile * tile_bytes, tile_bytes,
                rows.inputs, first * hidden.step, hidden.step, own, 0, count * LANES, STORE,
            )  # fmt: skip
            for row in range(together):
                for pair in range(count // 2):
                    source = (row * count + 2 * pair) * LANES
                    goal = (first + row) * step + (tile // 2 + pair) * LANES
                    store(active, goal, silu(load(own, source)) * load(own, source + LANES))
                quantize_row(active, (first + row) * step, group, end, inner, rows.active, (first + row) * inner.step)
        unit = claim(counters, phase)


@inlined
def score_int8(worker, workers, control, model, matrices, work, scratch, rows):
    """Final norm and head of the scored nodes only."""
    count, hidden, step = work.scored.size, matrices.hidden, row_step(model.hidden)
    for row in range(worker * count // workers, (worker + 1) * count // workers):
        quantize_normed(
            model, model.final_norm, scratch.hidden, work.scored[row] * step, scratch.scored, row * step, hidden,
            rows.inputs, row * hidden.step,
        )  # fmt: skip
    if not barrier(control, workers):
        return
    vocabulary = padded(model.vocabulary)
    product_int8(
        workers, work.counters, work.layers * CLAIMS, matrices.packed, model.head, hidden.groups, hidden.group,
        vocabulary // LANES, rows.inputs, hidden.step, count, work.logits, vocabulary, STORE,
    )  # fmt: skip
