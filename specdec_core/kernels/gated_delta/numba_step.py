"""One round of the gated delta rule over the tiles of all states, as one compiled parallel region.

A tile is some columns of one head's state, small enough for the second-level cache. While it is there, the last
window's path is added to it (a product of rank m) and all nodes of this window read it (one skinny product for S₀ᵀk
and S₀ᵀq together). So a state is read once and written once.

Every number is one chain of fused multiply-adds in an order of its own: over key channels, over the path, or over a
node's ancestors by depth. What is no ancestor is skipped. So a node's bits depend on its ancestors and the state only:
not on the nodes beside or after it, on other rows, on tiles or on threads.
"""

from __future__ import annotations

import numpy as np

from specdec_core.kernels.compiled import compiled, helper, inlined
from specdec_core.kernels.gated_delta.numba_commit import advance, weigh_path
from specdec_core.kernels.gated_delta.numba_layout import GROUP, PAIR, WIDE, places_of
from specdec_core.kernels.simd import (
    LANES,
    copy,
    exp,
    fma,
    load,
    load_four,
    load_two,
    padded,
    prefetch,
    splat,
    store,
    store_four,
    touch,
    transpose,
)
from specdec_core.kernels.skinny_linear.panel import BEGIN, CONTINUE, MOST_ROWS, STORE, panel
from specdec_core.kernels.threads import COUNTER, barrier, claim

TILE_BYTES = 256 * 1024
"""Bytes of a tile, at most: it fits the second-level cache beside what is computed from it."""
STEPS = 128
"""Key channels of a product between which the next tile is asked for: a core waits for some twenty lines at once."""
TURNS = 8
"""Claims a worker makes, about: few enough for its tiles to be neighbours, enough for workers to end together."""


@compiled
def gated_delta_round(
    worker, workers, control, counters, sizes, widest, source, goal, fresh, accepted, window, scratch, room, moved
):
    """Commit `accepted` from `source` to `goal`, then verify `window` on `goal`.

    source, goal  flat `[B, H, K, V]`; may be the same memory. `fresh`: goal holds nothing yet.
    widest        columns of the widest tile.
    scratch       `room` floats a worker.
    moved         `[workers · COUNTER]`: bytes read and written by each worker.
    """
    tiles = sizes.rows * sizes.heads * sizes.tiles
    turn = max(1, tiles // (TURNS * workers))
    mine = scratch[worker * room : (worker + 1) * room]
    first = claim(counters, 0) * turn
    while first < tiles:
        last = min(tiles, first + turn)
        ready = -1
        for tile in range(first, last):
            ready = _tile(
                tile, tile + 1 < last, ready, sizes, widest, source, goal, fresh, accepted, window, mine, moved, worker
            )
        first = claim(counters, 0) * turn
    barrier(control, workers)


@inlined
def _tile(tile, more, ready, sizes, widest, source, goal, fresh, accepted, window, scratch, moved, worker):
    """One tile of one head; `ready` is the head whose scores and path the scratch holds. Returns it anew.

    more  whether this worker goes on with the next tile.
    """
    head = tile // sizes.tiles
    row = head // sizes.heads
    begin, width = _columns(sizes, tile % sizes.tiles)
    nodes = window.offsets[row + 1] - window.offsets[row]
    path = accepted.starts[row + 1] - accepted.starts[row]
    at = head * sizes.keys * sizes.values + begin
    places = places_of(nodes, path, sizes.keys, widest)
    if ready != head:
        if path > 0:
            weigh_path(row, head % sizes.heads, path, sizes, accepted, places, scratch)
        if nodes > 0:
            _gather(row, head % sizes.heads, nodes, sizes, window, places, scratch)
            _scores(nodes, sizes, places, scratch)
            _decays(window.offsets[row], nodes, window, places, scratch)
    if path > 0:
        advance(row, head % sizes.heads, path, at, begin, width, sizes, source, goal, accepted, places, scratch)
    elif fresh:
        for k in range(sizes.keys):
            copy(source, at + k * sizes.values, goal, at + k * sizes.values, width)
    elif nodes > 0:
        # In the order of memory, which the processor foresees; the product reads by columns, which it does not.
        for k in range(sizes.keys):
            for c in range(0, width, LANES):
                touch(goal, at + k * sizes.values + c)
    if nodes > 0:
        following = (tile + 1) // sizes.tiles * sizes.keys * sizes.values + _columns(sizes, (tile + 1) % sizes.tiles)[0]
        _see(nodes, at, width, sizes, goal, source, following if more else -1, places, scratch)
        _solve(window.offsets[row], nodes, head % sizes.heads, begin, width, sizes, window, places, scratch)
    size = 4 * sizes.keys * width
    if nodes > 0 or path > 0 or fresh:
        moved[worker * COUNTER] += size
    if path > 0 or fresh:
        moved[worker * COUNTER + 1] += size
    return head


@helper
def _columns(sizes, part):
    """First column and number of columns of a head's tile."""
    whole = sizes.values // LANES
    begin = part * whole // sizes.tiles * LANES
    return begin, (part + 1) * whole // sizes.tiles * LANES - begin


@inlined
def _see(nodes, at, width, sizes, goal, ahead, ahead_at, places, scratch):
    """S₀ᵀk and S₀ᵀq of all nodes in one product; meanwhile the tile that begins at ahead[ahead_at] is asked for.

    Lines of the cache that lie a row of the state apart evict each other. So where the product reads sixteen columns
    more than once, they are first put side by side.
    """
    if 2 * nodes <= MOST_ROWS:
        panel(
            2 * nodes, width // LANES, sizes.keys, goal, at, sizes.values, LANES,
            scratch, places.x, places.x_step, scratch, places.seen, places.y_step, BEGIN,
        )  # fmt: skip
        return
    blocks, parts = (2 * nodes + MOST_ROWS - 1) // MOST_ROWS, (sizes.keys + STEPS - 1) // STEPS
    for c in range(0, width, LANES):
        for k in range(sizes.keys):
            store(scratch, places.columns + k * LANES, load(goal, at + k * sizes.values + c))
        for turn in range(blocks * parts):
            block, begin = turn // parts, turn % parts * STEPS
            first, last = block * 2 * nodes // blocks, (block + 1) * 2 * nodes // blocks
            if ahead_at >= 0:
                for k in range(turn * sizes.keys // (blocks * parts), (turn + 1) * sizes.keys // (blocks * parts)):
                    prefetch(ahead, ahead_at + k * sizes.values + c)
            panel(
                last - first, 1, min(STEPS, sizes.keys - begin), scratch, places.columns + begin * LANES, LANES, LANES,
                scratch, places.x + first * places.x_step + begin, places.x_step,
                scratch, places.seen + first * places.y_step + c, places.y_step, CONTINUE if begin else BEGIN,
            )  # fmt: skip


@helper
def _gather(row, head, nodes, sizes, window, places, scratch):
    """Keys and queries of one head, in rows that do not clash in the cache."""
    first, queries = window.offsets[row], places.x + nodes * places.x_step
    for t in range(nodes):
        source = ((first + t) * sizes.heads + head) * sizes.keys
        copy(window.k, source, scratch, places.x + t * places.x_step, sizes.keys)
        copy(window.q, source, scratch, queries + t * places.x_step, sizes.keys)
        scratch[places.gates + t] = window.log_decay[(first + t) * sizes.heads + head]


@inlined
def _scores(nodes, sizes, places, scratch):
    """k_t·k_i and q_t·k_i for i ≤ t, and more that is not used."""
    deep, queries = padded(sizes.keys), places.x + nodes * places.x_step
    for i in range(0, nodes, LANES):
        for d in range(0, deep, LANES):
            transpose(
                scratch, places.x + i * places.x_step + d, places.x_step, scratch, places.blocks + i * deep + d * LANES
            )
    for i in range(0, nodes, LANES):
        for half in range(2):
            panel(
                nodes - i, 1, sizes.keys, scratch, places.blocks + i * deep, LANES, deep * LANES,
                scratch, (queries if half else places.x) + i * places.x_step, places.x_step,
                scratch, (places.by_q if half else places.by_k) + i * places.step + i, places.step, STORE,
            )  # fmt: skip


@helper
def _decays(first, nodes, window, places, scratch):
    """D of every node by that of its parent, so that a huge gate costs those after it no precision; then the scores
    times it."""
    step = places.step
    for t in range(0, nodes, LANES):
        store(scratch, places.gates + t, exp(load(scratch, places.gates + t)))
    for t in range(nodes):
        gate, depth, own = scratch[places.gates + t], window.depths[first + t], places.decay + t * step
        if depth == 0:
            scratch[places.before + t] = gate
            for i in range(0, step, LANES):
                store(scratch, own + i, splat(np.float32(0)))
        else:
            parent = np.int64(window.paths[(first + t) * window.columns + depth - 1])
            scratch[places.before + t] = gate * scratch[places.before + parent]
            for i in range(0, step, LANES):
                store(scratch, own + i, splat(gate) * load(scratch, places.decay + parent * step + i))
        scratch[own + t] = np.float32(1)
        for i in range(0, t + 1, LANES):
            by_k, by_q, decay = places.by_k + t * step + i, places.by_q + t * step + i, load(scratch, own + i)
            store(scratch, by_k, splat(np.float32(0)) - decay * load(scratch, by_k))
            store(scratch, by_q, decay * load(scratch, by_q))


@helper
def _solve(first, nodes, head, begin, width, sizes, window, places, scratch):
    """u and o of every node from those of its ancestors, root first: forward substitution in (I + L) U = …"""
    for t in range(nodes):
        node = first + t
        line = (node * sizes.heads + head) * sizes.values + begin
        before, beta = splat(scratch[places.before + t]), splat(window.beta[node * sizes.heads + head])
        seen_k, seen_q = places.seen + t * places.y_step, places.seen + (nodes + t) * places.y_step
        by_k, by_q = places.by_k + t * places.step, places.by_q + t * places.step
        path, depth, own = node * window.columns, window.depths[node], splat(scratch[by_q + t])
        c = 0
        # Four vectors of columns: as many chains in flight as a multiply-add takes cycles.
        while WIDE and c + GROUP <= width:
            v0, v1, v2, v3 = load_four(window.v, line + c)
            s0, s1, s2, s3 = load_four(scratch, seen_k + c)
            o0, o1, o2, o3 = load_four(scratch, seen_q + c)
            r0, r1, r2, r3 = v0 - before * s0, v1 - before * s1, v2 - before * s2, v3 - before * s3
            o0, o1, o2, o3 = before * o0, before * o1, before * o2, before * o3
            for rank in range(depth):
                i = np.int64(window.paths[path + rank])
                a, b, u = splat(scratch[by_k + i]), splat(scratch[by_q + i]), places.u + i * places.y_step + c
                u0, u1, u2, u3 = load_four(scratch, u)
                r0, r1, r2, r3 = fma(a, u0, r0), fma(a, u1, r1), fma(a, u2, r2), fma(a, u3, r3)
                o0, o1, o2, o3 = fma(b, u0, o0), fma(b, u1, o1), fma(b, u2, o2), fma(b, u3, o3)
            r0, r1, r2, r3 = beta * r0, beta * r1, beta * r2, beta * r3
            store_four(scratch, places.u + t * places.y_step + c, r0, r1, r2, r3)
            store_four(window.written, line + c, r0, r1, r2, r3)
            store_four(window.outputs, line + c, fma(own, r0, o0), fma(own, r1, o1), fma(own, r2, o2), fma(own, r3, o3))
            c += GROUP
        while c + PAIR <= width:
            v0, v1 = load_two(window.v, line + c)
            s0, s1 = load_two(scratch, seen_k + c)
            o0, o1 = load_two(scratch, seen_q + c)
            r0, r1, o0, o1 = v0 - before * s0, v1 - before * s1, before * o0, before * o1
            for rank in range(depth):
                i = np.int64(window.paths[path + rank])
                a, b = splat(scratch[by_k + i]), splat(scratch[by_q + i])
                u0, u1 = load_two(scratch, places.u + i * places.y_step + c)
                r0, r1, o0, o1 = fma(a, u0, r0), fma(a, u1, r1), fma(b, u0, o0), fma(b, u1, o1)
            r0, r1 = beta * r0, beta * r1
            for lanes, r, o in ((0, r0, o0), (LANES, r1, o1)):
                store(scratch, places.u + t * places.y_step + c + lanes, r)
                store(window.written, line + c + lanes, r)
                store(window.outputs, line + c + lanes, fma(own, r, o))
            c += PAIR
        while c < width:
            r = load(window.v, line + c) - before * load(scratch, seen_k + c)
            o = before * load(scratch, seen_q + c)
            for rank in range(depth):
                i = np.int64(window.paths[path + rank])
                u = load(scratch, places.u + i * places.y_step + c)
                r, o = fma(splat(scratch[by_k + i]), u, r), fma(splat(scratch[by_q + i]), u, o)
            r = beta * r
            store(scratch, places.u + t * places.y_step + c, r)
            store(window.written, line + c, r)
            store(window.outputs, line + c, fma(own, r, o))
            c += LANES
