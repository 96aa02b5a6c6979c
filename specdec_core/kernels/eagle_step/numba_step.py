"""The compiled parts of the drafter's step: one function that every worker runs from its inputs to its logits.

Layout and phases are those of llama_step.numba_step, whose parts do the work. The two halves of the attention's input
lie `padded(hidden)` apart, and the packed matrix has columns of zeros between them.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specdec_core.kernels.compiled import compiled, helper
from specdec_core.kernels.llama_step.numba_step import (
    DOWN,
    GATE_UP,
    NORM,
    OUT,
    POST_NORM,
    QKV,
    attention,
    gated,
    norm_row,
    norm_rows,
    rotate,
    score,
)
from specdec_core.kernels.simd import LANES, copy, exp, highest, load, maximum, padded, row_step, splat, total
from specdec_core.kernels.skinny_linear.numba import product
from specdec_core.kernels.skinny_linear.panel import ADD, STORE
from specdec_core.kernels.threads import barrier

EMBEDDING = 6
"""Column of `Model.places` behind those of a target's layer: the matrix that brings the embedding into the residual."""
EMBEDDING_CLAIM = 6
"""Phase of claims behind those of a layer and the head."""
LOOK = 4 * LANES
"""Logits that are looked at together for one that is among the best."""
SUM = 16 * LANES
"""Exponentials that are added in float32 before the sum goes on in float64."""


class Bounds(NamedTuple):
    """What a plan must stay within: slots and entries of the cache, positions of the rotary tables."""

    slots: int
    capacity: int
    context: int


@compiled
def first_astray(slots, nodes, depths, visible, offsets, scored, bounds):
    """The first of a plan's N nodes that would read or write out of bounds; N if offsets or `scored` would, else −1.

    `visible` as in attention, `straight` unread. A node whose depth is its index sees entries in order: only the paths
    of others are read.
    """
    count = slots.size
    if offsets.size < 2 or offsets[0] != 0 or offsets[offsets.size - 1] != count:
        return count
    for row in range(offsets.size - 1):
        if offsets[row] > offsets[row + 1]:
            return count
    for each in scored:
        if each < 0 or each >= count:
            return count
    for node in range(count):
        committed, own, depth = visible.committed[node], nodes[node], depths[node]
        if slots[node] < 0 or slots[node] >= bounds.slots or committed < 0 or committed + own >= bounds.capacity:
            return node
        if depth < 0 or depth > own or committed + depth >= bounds.context:
            return node
        if depth != own:
            at = node * visible.depths
            if depth >= visible.depths or visible.paths[at + depth] != own:
                return node
            for rank in range(depth):
                if visible.paths[at + rank] < 0 or visible.paths[at + rank] >= own:
                    return node
    return -1


@compiled
def eagle_step(worker, workers, control, model, work, scratch, embedded, hidden, continued):
    """embedded, hidden, continued flat `[N, hidden]`, rows neither padded nor apart; the rest as in `decoder_step`."""
    nodes, size, width = work.tokens.size, model.hidden, padded(model.hidden)
    first, last = worker * nodes // workers, (worker + 1) * nodes // workers
    weights, places, counters = model.weights, model.places, work.counters
    own, step, joined = scratch.private[worker], row_step(size), row_step(width + size)
    queries = model.heads * model.head_dim
    qkv = padded(queries + 2 * model.kv_heads * model.head_dim)

    for node in range(first, last):
        take_row(embedded, node * size, scratch.normed, node * joined, size)
        take_row(hidden, node * size, scratch.hidden, node * step, size)
        norm_row(weights, places[0, NORM], model, scratch.normed, node * joined, scratch.normed, node * joined)
        norm_row(
            weights, places[0, NORM] + width, model, scratch.hidden, node * step, scratch.normed, node * joined + width
        )  # fmt: skip
    if not barrier(control, workers):
        return
    product(
        workers, counters, 0, weights, places[0, QKV], width + size, qkv // LANES,
        scratch.normed, joined, nodes, scratch.qkv, qkv, STORE,
    )  # fmt: skip
    product(
        workers, counters, EMBEDDING_CLAIM, weights, places[0, EMBEDDING], size, width // LANES,
        scratch.normed, joined, nodes, scratch.hidden, step, ADD,
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
    product(
        workers, counters, 2, weights, places[0, OUT], queries, width // LANES,
        scratch.attended, row_step(queries), nodes, scratch.hidden, step, ADD,
    )  # fmt: skip
    if not barrier(control, workers):
        return
    norm_rows(weights, places[0, POST_NORM], model, scratch.hidden, scratch.normed, first, last)
    if not barrier(control, workers):
        return
    gated(workers, counters, 3, model, places[0, GATE_UP], nodes, scratch, own)
    if not barrier(control, workers):
        return
    product(
        workers, counters, 4, weights, places[0, DOWN], model.inner, width // LANES,
        scratch.active, row_step(model.inner), nodes, scratch.hidden, step, ADD,
    )  # fmt: skip
    if not barrier(control, workers):
        return
    for node in range(first, last):
        copy(scratch.hidden, node * step, continued, node * size, size)
    if work.scored.size:
        score(worker, workers, control, model, work, scratch)
    barrier(control, workers)


@compiled
def unit_states(model, ones, states, goal):
    """RMSNorm without weights of hidden states, flat `[·, hidden]` → flat `[·, padded hidden]`; `ones` as weights."""
    size, width = model.hidden, padded(model.hidden)
    for state in range(states.size // size):
        take_row(states, state * size, goal, state * width, size)
        norm_row(ones, 0, model, goal, state * width, goal, state * width)


@helper
def take_row(source, at, goal, goal_at, size):
    """Copy a row to where rows are padded with zeros."""
    copy(source, at, goal, goal_at, size)
    for j in range(size, padded(size)):
        goal[goal_at + j] = 0


@compiled
def best_of_rows(logits, size, tokens, log_probabilities):
    """Fill tokens and log-probabilities `[M, count]` of flat logits `[M, size]`; the first row without a law or −1."""
    rows, count = tokens.shape
    values = np.empty(count, np.float32)
    rest = np.empty(SUM, np.float32)
    for row in range(rows):
        _find_best(logits, row * size, size, tokens[row], values)
        normaliser = np.float64(values[0]) + np.log(_sum_of_exponentials(logits, row * size, size, values[0], rest))
        if not np.isfinite(normaliser):
            return row
        for rank in range(count):
            log_probabilities[row, rank] = np.float64(values[rank]) - normaliser
    return -1


@helper
def _find_best(logits, at, size, tokens, values):
    """The largest logits, descending, the lower id first where equal, and their ids."""
    count, held = values.size, 0
    for start in range(0, size, LOOK):
        stop = min(size, start + LOOK)
        if held == count and stop - start == LOOK:
            top = load(logits, at + start)
            for i in range(LANES, LOOK, LANES):
                top = maximum(top, load(logits, at + start + i))
            if not highest(top) > values[count - 1]:
                continue
        for token in range(start, stop):
            value = logits[at + token]
            if held == count and not value > values[count - 1]:
                continue
            place = min(held, count - 1)
            while place > 0 and values[place - 1] < value:
                values[place], tokens[place] = values[place - 1], tokens[place - 1]
                place -= 1
            values[place], tokens[place] = value, token
            held = min(held + 1, count)


@helper
def _sum_of_exponentials(logits, at, size, top, rest):
    """Σ exp(logit − top) over a row; NaN if the law is not defined. `rest` is room for SUM floats."""
    shift, found = splat(top), 0.0
    for start in range(0, size, SUM):
        source, place = logits, at + start
        if size - start < SUM:
            # A vector must not reach beyond the row: what is left goes where −∞, whose exponential is 0, follows it.
            rest[:] = -np.inf
            copy(logits, place, rest, 0, size - start)
            source, place = rest, 0
        lanes = splat(np.float32(0))
        for i in range(0, SUM, LANES):
            lanes = lanes + exp(load(source, place + i) - shift)
        found += np.float64(total(lanes))
    return found
