"""The compiled decoder step: one function that every worker runs from embedding to logits.

Phases are separated by barriers; within one, workers share the rows, the units of a product or those of attention.
Rows of scratch arrays are padded with zeros to a multiple of sixteen and lie `row_step` apart.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specdec_core.kernels.attention.numba import Heads, Visible, attend
from specdec_core.kernels.compiled import compiled, helper, inlined
from specdec_core.kernels.simd import LANES, copy, exp, fma, load, padded, row_step, splat, store, total
from specdec_core.kernels.skinny_linear.numba import UNIT_ROWS, product, tiles_of_unit
from specdec_core.kernels.skinny_linear.panel import ADD, MOST_ROWS, STORE, panel
from specdec_core.kernels.threads import barrier, claim

NORM, QKV, OUT, POST_NORM, GATE_UP, DOWN = range(6)
"""Columns of `Model.places`."""
CLAIMS = 5
"""Phases of a layer whose work is claimed."""
GATE_ROWS = 4 * MOST_ROWS
"""Rows whose gates and ups are computed before the activation is applied to them."""


class Model(NamedTuple):
    """Weights, packed into one flat float32 array, and sizes.

    places      `[layers, 6]` where in `weights` a layer's norms and packed matrices begin.
    embedding   flat; packed as the head if `tied`, else `[V, hidden]` from 0 on.
    cosine      `[context · head_dim / 2]`, and sine.
    """

    weights: np.ndarray
    places: np.ndarray
    embedding: np.ndarray
    tied: bool
    final_norm: int
    head: int
    cosine: np.ndarray
    sine: np.ndarray
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    epsilon: float


class Pass(NamedTuple):
    """What one pass works on: N nodes, units of attention `[U, 2]` (first and last node), M scored nodes.

    keys, values  the cache, flat `[layers, slots, kv_heads, capacity, head_dim]`.
    features      flat `[N, F, hidden]`; logits flat `[M, padded vocabulary]`; counters for `claim`, zeros.
    """

    tokens: np.ndarray
    slots: np.ndarray
    entries: np.ndarray
    positions: np.ndarray
    visible: Visible
    units: np.ndarray
    scored: np.ndarray
    layers: int
    feature_layers: np.ndarray
    keys: np.ndarray
    values: np.ndarray
    cache_slots: int
    capacity: int
    features: np.ndarray
    logits: np.ndarray
    counters: np.ndarray


class Scratch(NamedTuple):
    """Flat float32 arrays that passes reuse.

    hidden, normed  `[N, hidden]`: residual stream, and the input of the next product.
    qkv             `[N, (heads + 2 kv_heads) · head_dim]`, rows only padded.
    query           `[kv_heads, N, group, head_dim]` rotated and scaled, rows neither padded nor apart.
    attended        `[N, heads · head_dim]`.
    active          `[N, inner]`.
    scored          `[M, hidden]`.
    private         two-dimensional, `[workers, ·]`: each worker's own.
    """

    hidden: np.ndarray
    normed: np.ndarray
    qkv: np.ndarray
    query: np.ndarray
    attended: np.ndarray
    active: np.ndarray
    scored: np.ndarray
    private: np.ndarray


@compiled
def decoder_step(worker, workers, control, model, work, scratch):
    nodes = work.tokens.size
    first, last = worker * nodes // workers, (worker + 1) * nodes // workers
    own = scratch.private[worker]
    embed(model, work.tokens, scratch.hidden, first, last)
    for layer in range(work.layers):
        if not _layer(workers, control, model, work, scratch, own, layer, first, last):
            return
        keep_features(work, scratch.hidden, model.hidden, layer, first, last)
    if work.scored.size:
        score(worker, workers, control, model, work, scratch)
    barrier(control, workers)


@inlined
def _layer(workers, control, model, work, scratch, own, layer, first, last):
    """One decoder layer; False if another worker has failed. This worker's share of rows is first … last − 1."""
    nodes, claims, step = work.tokens.size, layer * CLAIMS, row_step(model.hidden)
    tiles, places, weights = padded(model.hidden) // LANES, model.places, model.weights
    queries = model.heads * model.head_dim
    qkv = padded(queries + 2 * model.kv_heads * model.head_dim)

    norm_rows(weights, places[layer, NORM], model, scratch.hidden, scratch.normed, first, last)
    if not barrier(control, workers):
        return False
    product(
        workers, work.counters, claims, weights, places[layer, QKV], model.hidden, qkv // LANES,
        scratch.normed, step, nodes, scratch.qkv, qkv, STORE,
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
    product(
        workers, work.counters, claims + 2, weights, places[layer, OUT], queries, tiles,
        scratch.attended, row_step(queries), nodes, scratch.hidden, step, ADD,
    )  # fmt: skip
    if not barrier(control, workers):
        return False
    norm_rows(weights, places[layer, POST_NORM], model, scratch.hidden, scratch.normed, first, last)
    if not barrier(control, workers):
        return False
    gated(workers, work.counters, claims + 3, model, places[layer, GATE_UP], nodes, scratch, own)
    if not barrier(control, workers):
        return False
    product(
        workers, work.counters, claims + 4, weights, places[layer, DOWN], model.inner, tiles,
        scratch.active, row_step(model.inner), nodes, scratch.hidden, step, ADD,
    )  # fmt: skip
    return barrier(control, workers)


@helper
def embed(model, tokens, hidden, first, last):
    """Rows first … last − 1 of the residual stream: their tokens' rows of the embedding, padded with zeros."""
    for node in range(first, last):
        token, goal = tokens[node], node * row_step(model.hidden)
        for j in range(model.hidden):
            if model.tied:
                place = model.head + (token // LANES * model.hidden + j) * LANES + token % LANES
            else:
                place = token * model.hidden + j
            hidden[goal + j] = model.embedding[place]
        for j in range(model.hidden, padded(model.hidden)):
            hidden[goal + j] = 0


@helper
def norm_rows(weights, at, model, source, goal, first, last):
    """RMSNorm of rows first … last − 1."""
    step = row_step(model.hidden)
    for row in range(first, last):
        norm_row(weights, at, model, source, row * step, goal, row * step)


@helper
def norm_row(weights, at, model, source, source_at, goal, goal_at):
    """x / √(mean x² + ε) · weight. Lanes sum x² separately, then by halves."""
    width = padded(model.hidden)
    squares = splat(np.float32(0))
    for j in range(0, width, LANES):
        x = load(source, source_at + j)
        squares = fma(x, x, squares)
    mean = np.float64(total(squares)) / model.hidden
    scale = splat(np.float32(1.0 / np.sqrt(mean + model.epsilon)))
    for j in range(0, width, LANES):
        store(goal, goal_at + j, load(source, source_at + j) * scale * load(weights, at + j))


@helper
def rotate(model, work, scratch, layer, node, width):
    """Rotate a node's queries and keys by its position; keys and values go to its cache entry."""
    size, half, nodes = model.head_dim, model.head_dim // 2, work.tokens.size
    group = model.heads // model.kv_heads
    angle, source = work.positions[node] * half, node * width
    scale = np.float32(1.0 / np.sqrt(np.float64(size)))
    for head in range(model.heads):
        goal = ((head // group * nodes + node) * group + head % group) * size
        _rotate_head(model, angle, scratch.qkv, source + head * size, scratch.query, goal, half, scale)
    for head in range(model.kv_heads):
        row = (layer * work.cache_slots + work.slots[node]) * model.kv_heads + head
        goal = (row * work.capacity + work.entries[node]) * size
        key = source + (model.heads + head) * size
        _rotate_head(model, angle, scratch.qkv, key, work.keys, goal, half, np.float32(1))
        value = key + model.kv_heads * size
        copy(scratch.qkv, value, work.values, goal, size)


@helper
def _rotate_head(model, angle, source, source_at, goal, goal_at, half, scale):
    """(a, b) → (a cos − b sin, b cos + a sin) · scale, of the halves of a head."""
    whole = half // LANES * LANES
    scales = splat(scale)
    for d in range(0, whole, LANES):
        cosine, sine = load(model.cosine, angle + d), load(model.sine, angle + d)
        a, b = load(source, source_at + d), load(source, source_at + half + d)
        store(goal, goal_at + d, (a * cosine - b * sine) * scales)
        store(goal, goal_at + half + d, (b * cosine + a * sine) * scales)
    for d in range(whole, half):
        cosine, sine = model.cosine[angle + d], model.sine[angle + d]
        a, b = source[source_at + d], source[source_at + half + d]
        goal[goal_at + d] = (a * cosine - b * sine) * scale
        goal[goal_at + half + d] = (b * cosine + a * sine) * scale


@inlined
def attention(counters, phase, model, work, scratch, own, layer):
    """Units of attention: nodes of one row times one KV head. The last nodes see most and are given out first."""
    size, nodes, group = model.head_dim, work.tokens.size, model.heads // model.kv_heads
    count, step = work.units.shape[0] * model.kv_heads, row_step(model.heads * size)
    unit = claim(counters, phase)
    while unit < count:
        chosen = work.units.shape[0] - 1 - unit // model.kv_heads
        head = unit % model.kv_heads
        first, last = work.units[chosen, 0], work.units[chosen, 1]
        row = (layer * work.cache_slots + work.slots[first]) * model.kv_heads + head
        attend(
            first, last, work.visible, Heads(work.keys, work.values, row * work.capacity * size, group, size),
            scratch.query, (head * nodes + first) * group * size,
            scratch.attended, first * step + head * group * size, step, own,
        )  # fmt: skip
        unit = claim(counters, phase)


@inlined
def gated(workers, counters, phase, model, at, nodes, scratch, own):
    """active = SiLU(gate) · up; tiles of gate and up lie side by side in the packed matrix."""
    k, step, active = model.hidden, row_step(model.hidden), row_step(model.inner)
    tiles = 2 * padded(model.inner) // LANES
    unit_tiles = max(2, tiles_of_unit(k, tiles, workers) // 2 * 2)
    row_blocks = (nodes + UNIT_ROWS - 1) // UNIT_ROWS
    units = (tiles + unit_tiles - 1) // unit_tiles * row_blocks
    unit = claim(counters, phase)
    while unit < units:
        tile, block = unit // row_blocks * unit_tiles, unit % row_blocks
        count = min(unit_tiles, tiles - tile)
        last = (block + 1) * nodes // row_blocks
        for first in range(block * nodes // row_blocks, last, GATE_ROWS):
            rows = min(GATE_ROWS, last - first)
            panel(
                rows, count, k, model.weights, at + tile * k * LANES, LANES, k * LANES,
                scratch.normed, first * step, step, own, 0, count * LANES, STORE,
            )  # fmt: skip
            for row in range(rows):
                for pair in range(count // 2):
                    source = (row * count + 2 * pair) * LANES
                    goal = (first + row) * active + (tile // 2 + pair) * LANES
                    store(scratch.active, goal, silu(load(own, source)) * load(own, source + LANES))
        unit = claim(counters, phase)


@helper
def silu(x):
    """x / (1 + e^−x), lane by lane."""
    one = splat(np.float32(1))
    return x / (one + exp(splat(np.float32(0)) - x))


@helper
def keep_features(work, hidden, size, layer, first, last):
    """Copy this worker's rows of the residual stream if the layer's output was asked for."""
    kept = work.feature_layers.size
    for column in range(kept):
        if work.feature_layers[column] == layer:
            for node in range(first, last):
                copy(hidden, node * row_step(size), work.features, (node * kept + column) * size, size)


@inlined
def score(worker, workers, control, model, work, scratch):
    """Final norm and head of the scored nodes only."""
    count, step = work.scored.size, row_step(model.hidden)
    for row in range(worker * count // workers, (worker + 1) * count // workers):
        norm_row(
            model.weights, model.final_norm, model, scratch.hidden, work.scored[row] * step,
            scratch.scored, row * step,
        )  # fmt: skip
    if not barrier(control, workers):
        return
    vocabulary = padded(model.vocabulary)
    product(
        workers, work.counters, work.layers * CLAIMS, model.weights, model.head, model.hidden, vocabulary // LANES,
        scratch.scored, step, count, work.logits, vocabulary, STORE,
    )  # fmt: skip


@compiled
def find_visible(committed, depths, nodes, paths, width, straight):
    """Fill `straight` `[N]` (see `Visible`): a chain's nodes see entries in order, a tree's only up to a branch."""
    for node in range(committed.size):
        rank = 0
        if depths[node] == nodes[node]:
            rank = depths[node] + 1
        else:
            while rank <= depths[node] and paths[node * width + rank] == rank:
                rank += 1
        straight[node] = committed[node] + rank


@compiled
def find_units(offsets, most, units):
    """Cut every row's nodes into units of at most `most` of nearly equal size; their number."""
    count = 0
    for row in range(offsets.size - 1):
        nodes = offsets[row + 1] - offsets[row]
        pieces = (nodes + most - 1) // most
        for piece in range(pieces):
            units[count, 0] = offsets[row] + piece * nodes // pieces
            units[count, 1] = offsets[row] + (piece + 1) * nodes // pieces
            count += 1
    return count
