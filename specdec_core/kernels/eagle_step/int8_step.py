"""The compiled step of the drafter with int8 weights: the phases of numba_step.py around another product.

As in llama_step.int8_step, whose parts do most of the work. The two halves of the attention's input are quantized apart
and lie one behind the other, so that the matrix for the embedding alone reads the first half of the same row.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specdec_core.kernels.compiled import compiled
from specdec_core.kernels.eagle_step.numba_step import EMBEDDING, EMBEDDING_CLAIM, take_row
from specdec_core.kernels.llama_step.int8_step import Width, gated_int8, quantize_normed, quantize_row, score_int8
from specdec_core.kernels.llama_step.numba_step import (
    DOWN,
    GATE_UP,
    NORM,
    OUT,
    POST_NORM,
    QKV,
    attention,
    rotate,
)
from specdec_core.kernels.simd import LANES, copy, padded, row_step
from specdec_core.kernels.skinny_linear.int8 import product_int8
from specdec_core.kernels.skinny_linear.int8_panel import row_group_bytes
from specdec_core.kernels.skinny_linear.panel import ADD, STORE
from specdec_core.kernels.threads import barrier


class EagleMatrices(NamedTuple):
    """`llama_step.int8_step.Matrices` of the drafter's layer.

    packed          flat bytes, `pack_int8`'s tiles; those of gate and up alternate, and a tile of q/k/v has the groups
                    of the embedding before those of the hidden state.
    joined          width of the input of q/k/v: twice the groups of `hidden`.
    hidden, queries, inner  widths of the inputs: of embedding_proj (its rows are those of `joined`), gate/up and head;
                    of o; of down.
    """

    packed: np.ndarray
    joined: Width
    hidden: Width
    queries: Width
    inner: Width


@compiled
def int8_eagle_step(worker, workers, control, model, matrices, work, scratch, rows, embedded, hidden, continued):
    """`eagle_step` with int8 weights: `model.weights` holds norms alone, everything else is in `matrices`."""
    nodes, size, step = work.tokens.size, model.hidden, row_step(model.hidden)
    first, last = worker * nodes // workers, (worker + 1) * nodes // workers
    places, counters, own = model.places, work.counters, scratch.private[worker]
    joined, single, attended, inner = matrices.joined, matrices.hidden, matrices.queries, matrices.inner
    half = single.groups * row_group_bytes(single.group)
    queries, tiles = model.heads * model.head_dim, padded(size) // LANES
    qkv = padded(queries + 2 * model.kv_heads * model.head_dim)

    for node in range(first, last):
        at, goal = node * step, node * joined.step
        take_row(embedded, node * size, scratch.normed, at, size)
        quantize_normed(
            model, places[0, NORM], scratch.normed, at, scratch.normed, at, single, rows.inputs, goal
        )  # fmt: skip
        take_row(hidden, node * size, scratch.hidden, at, size)
        quantize_normed(
            model, places[0, NORM] + padded(size), scratch.hidden, at, scratch.normed, at, single,
            rows.inputs, goal + half,
        )  # fmt: skip
    if not barrier(control, workers):
        return
    product_int8(
        workers, counters, 0, matrices.packed, places[0, QKV], joined.groups, joined.group, qkv // LANES,
        rows.inputs, joined.step, nodes, scratch.qkv, qkv, STORE,
    )  # fmt: skip
    product_int8(
        workers, counters, EMBEDDING_CLAIM, matrices.packed, places[0, EMBEDDING], single.groups, single.group, tiles,
        rows.inputs, joined.step, nodes, scratch.hidden, step, ADD,
    )  # fmt: skip
    if not barrier(control, workers):
        return
    for node in range(first, last):
        rotate(model, work, scratch, 0, node, qkv)
    if not barrier(control, workers):
        return
    attention(counters, 1, model, work, scratch, own, 0)
    if not barrier(control, workers):
        return
    for node in range(first, last):
        quantize_row(
            scratch.attended, node * row_step(queries), 0, attended.groups, attended, rows.inputs, node * attended.step
        )
    if not barrier(control, workers):
        return
    product_int8(
        workers, counters, 2, matrices.packed, places[0, OUT], attended.groups, attended.group, tiles,
        rows.inputs, attended.step, nodes, scratch.hidden, step, ADD,
    )  # fmt: skip
    if not barrier(control, workers):
        return
    for node in range(first, last):
        quantize_normed(
            model, places[0, POST_NORM], scratch.hidden, node * step, scratch.normed, node * step, single,
            rows.inputs, node * single.step,
        )  # fmt: skip
    if not barrier(control, workers):
        return
    gated_int8(workers, counters, 3, matrices, places[0, GATE_UP], nodes, scratch.active, rows, own)
    if not barrier(control, workers):
        return
    product_int8(
        workers, counters, 4, matrices.packed, places[0, DOWN], inner.groups, inner.group, tiles,
        rows.active, inner.step, nodes, scratch.hidden, step, ADD,
    )  # fmt: skip
    if not barrier(control, workers):
        return
    for node in range(first, last):
        copy(scratch.hidden, node * step, continued, node * size, size)
    if work.scored.size:
        score_int8(worker, workers, control, model, matrices, work, scratch, rows)
    barrier(control, workers)
