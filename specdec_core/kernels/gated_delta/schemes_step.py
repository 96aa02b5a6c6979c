"""The gated delta rule token by token, compiled: the steps of the schemes that compact factors compete with.

A token of one tile takes two passes over it: Sᵀk and Sᵀq together, then S ← e^g S + k uᵀ. With o = e^g Sᵀq + (q·k) u
the output needs no third one. Where a tile is too large for the first-level cache the second pass reads it from the
second. A tile of a scheme that goes back to memory is in memory, one that stays is in a worker's scratch.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specdec_core.kernels.compiled import compiled, helper
from specdec_core.kernels.simd import LANES, fma, load, splat, store, touch
from specdec_core.kernels.threads import COUNTER, barrier, claim

COLUMNS = 2 * LANES
"""Columns of a tile: four chains of sums, as many as a multiply-add takes cycles; 16 KiB for 128 key channels."""


class Heads(NamedTuple):
    """H heads of K × V, V a multiple of 16."""

    heads: int
    keys: int
    values: int


class Tokens(NamedTuple):
    """Flat float32: q, k `[N, H, K]`, v and outputs `[N, H, V]`; gates e^g, beta and matches q·k `[N, H]`."""

    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    gates: np.ndarray
    beta: np.ndarray
    matches: np.ndarray
    outputs: np.ndarray


class Steps(NamedTuple):
    """S steps: token `nodes[i]` takes the state at `sources[i]` (−1: the row's own, `rows[i]`) to that at `goals[i]`.

    Steps `starts[j]` to `starts[j + 1]` follow one another: they are one row's.
    """

    nodes: np.ndarray
    rows: np.ndarray
    sources: np.ndarray
    goals: np.ndarray
    starts: np.ndarray


@compiled
def heads_in_memory(worker, workers, control, counters, shape, state, states, tokens, steps, moved):
    """Each step reads a whole head from memory and writes one; `states` flat `[S, H, K, V]` is what steps index."""
    units = (len(steps.starts) - 1) * shape.heads
    unit = claim(counters, 0)
    while unit < units:
        head = unit % shape.heads
        for i in range(steps.starts[unit // shape.heads], steps.starts[unit // shape.heads + 1]):
            source, at = states, steps.sources[i]
            if at < 0:
                source, at = state, steps.rows[i]
            at = (at * shape.heads + head) * shape.keys * shape.values
            goal = (steps.goals[i] * shape.heads + head) * shape.keys * shape.values
            # In the order of memory, which the processor foresees; a token reads by columns, which it does not.
            for line in range(0, shape.keys * shape.values, LANES):
                touch(source, at + line)
            for begin in range(0, shape.values, COLUMNS):
                width = min(COLUMNS, shape.values - begin)
                _token(
                    steps.nodes[i], head, begin, width, shape, tokens,
                    source, at + begin, shape.values, states, goal + begin, shape.values,
                )  # fmt: skip
                moved[worker * COUNTER] += 4 * shape.keys * width
                moved[worker * COUNTER + 1] += 4 * shape.keys * width
        unit = claim(counters, 0)
    barrier(control, workers)


@compiled
def tiles_in_memory(worker, workers, control, counters, shape, state, states, tokens, steps, moved):
    """All of a row's steps on one tile, each result written to memory; a parent's is read while in the cache."""
    parts = (shape.values + COLUMNS - 1) // COLUMNS
    units = (len(steps.starts) - 1) * shape.heads * parts
    unit = claim(counters, 0)
    while unit < units:
        head, begin = unit // parts % shape.heads, unit % parts * COLUMNS
        row, width = unit // parts // shape.heads, min(COLUMNS, shape.values - begin)
        for i in range(steps.starts[row], steps.starts[row + 1]):
            source, at = states, steps.sources[i]
            if at < 0:
                source, at = state, steps.rows[i]
                moved[worker * COUNTER] += 4 * shape.keys * width
            at = (at * shape.heads + head) * shape.keys * shape.values + begin
            goal = (steps.goals[i] * shape.heads + head) * shape.keys * shape.values + begin
            _token(
                steps.nodes[i], head, begin, width, shape, tokens, source, at, shape.values, states, goal, shape.values
            )
            moved[worker * COUNTER + 1] += 4 * shape.keys * width
        unit = claim(counters, 0)
    barrier(control, workers)


@compiled
def tiles_in_cache(worker, workers, control, counters, shape, state, tokens, steps, scratch, room, moved):
    """All of a row's steps on one tile in scratch, where `sources` and `goals` are slots; nothing is written back."""
    parts = (shape.values + COLUMNS - 1) // COLUMNS
    units = (len(steps.starts) - 1) * shape.heads * parts
    tile = shape.keys * COLUMNS
    unit = claim(counters, 0)
    while unit < units:
        head, begin = unit // parts % shape.heads, unit % parts * COLUMNS
        row, width = unit // parts // shape.heads, min(COLUMNS, shape.values - begin)
        for i in range(steps.starts[row], steps.starts[row + 1]):
            source, at, step = scratch, worker * room + steps.sources[i] * tile, COLUMNS
            if steps.sources[i] < 0:
                source, step = state, shape.values
                at = (steps.rows[i] * shape.heads + head) * shape.keys * shape.values + begin
                moved[worker * COUNTER] += 4 * shape.keys * width
            _token(
                steps.nodes[i], head, begin, width, shape, tokens,
                source, at, step, scratch, worker * room + steps.goals[i] * tile, COLUMNS,
            )  # fmt: skip
        unit = claim(counters, 0)
    barrier(control, workers)


@compiled
def replay(worker, workers, control, counters, shape, state, goal, tokens, steps, moved):
    """All of a row's steps on one tile, without outputs; `goal` flat `[B, H, K, V]` may be the state itself.

    A step after the first finds the tile in the cache: it is read from memory once and written once.
    """
    parts = (shape.values + COLUMNS - 1) // COLUMNS
    units = (len(steps.starts) - 1) * shape.heads * parts
    unit = claim(counters, 0)
    while unit < units:
        head, begin = unit // parts % shape.heads, unit % parts * COLUMNS
        row, width = unit // parts // shape.heads, min(COLUMNS, shape.values - begin)
        first, last = steps.starts[row], steps.starts[row + 1]
        for i in range(first, last):
            at = (steps.rows[i] * shape.heads + head) * shape.keys * shape.values + begin
            _update(steps.nodes[i], head, begin, width, shape, tokens, state if i == first else goal, at, goal)
        if last > first:
            moved[worker * COUNTER] += 4 * shape.keys * width
            moved[worker * COUNTER + 1] += 4 * shape.keys * width
        unit = claim(counters, 0)
    barrier(control, workers)


@helper
def _token(node, head, begin, width, shape, tokens, source, s, s_step, goal, g, g_step):
    """One token of one tile: its output, and its state from its parent's, which may be at the same place."""
    x = (node * shape.heads + head) * shape.keys
    line = (node * shape.heads + head) * shape.values + begin
    place = node * shape.heads + head
    gate, beta, match = splat(tokens.gates[place]), splat(tokens.beta[place]), splat(tokens.matches[place])
    zero = splat(np.float32(0))
    if width == COLUMNS:
        p0, p1, o0, o1 = zero, zero, zero, zero
        for j in range(shape.keys):
            s0, s1 = load(source, s + j * s_step), load(source, s + j * s_step + LANES)
            a, b = splat(tokens.k[x + j]), splat(tokens.q[x + j])
            p0, p1, o0, o1 = fma(a, s0, p0), fma(a, s1, p1), fma(b, s0, o0), fma(b, s1, o1)
        u0 = beta * (load(tokens.v, line) - gate * p0)
        u1 = beta * (load(tokens.v, line + LANES) - gate * p1)
        store(tokens.outputs, line, fma(match, u0, gate * o0))
        store(tokens.outputs, line + LANES, fma(match, u1, gate * o1))
        for j in range(shape.keys):
            a = splat(tokens.k[x + j])
            s0, s1 = load(source, s + j * s_step), load(source, s + j * s_step + LANES)
            store(goal, g + j * g_step, fma(a, u0, gate * s0))
            store(goal, g + j * g_step + LANES, fma(a, u1, gate * s1))
    else:
        p, o = zero, zero
        for j in range(shape.keys):
            s0 = load(source, s + j * s_step)
            p, o = fma(splat(tokens.k[x + j]), s0, p), fma(splat(tokens.q[x + j]), s0, o)
        u = beta * (load(tokens.v, line) - gate * p)
        store(tokens.outputs, line, fma(match, u, gate * o))
        for j in range(shape.keys):
            store(goal, g + j * g_step, fma(splat(tokens.k[x + j]), u, gate * load(source, s + j * s_step)))


@helper
def _update(node, head, begin, width, shape, tokens, source, at, goal):
    """As `_token`, without the output; source and goal are whole states. Even and odd channels are summed apart."""
    x = (node * shape.heads + head) * shape.keys
    line = (node * shape.heads + head) * shape.values + begin
    place, step = node * shape.heads + head, shape.values
    gate, beta = splat(tokens.gates[place]), splat(tokens.beta[place])
    zero = splat(np.float32(0))
    even = shape.keys // 2 * 2
    if width == COLUMNS:
        p0, p1, o0, o1 = zero, zero, zero, zero
        for j in range(0, even, 2):
            a, b = splat(tokens.k[x + j]), splat(tokens.k[x + j + 1])
            s = at + j * step
            p0, p1 = fma(a, load(source, s), p0), fma(a, load(source, s + LANES), p1)
            o0, o1 = fma(b, load(source, s + step), o0), fma(b, load(source, s + step + LANES), o1)
        for j in range(even, shape.keys):
            a, s = splat(tokens.k[x + j]), at + j * step
            p0, p1 = fma(a, load(source, s), p0), fma(a, load(source, s + LANES), p1)
        u0 = beta * (load(tokens.v, line) - gate * (p0 + o0))
        u1 = beta * (load(tokens.v, line + LANES) - gate * (p1 + o1))
        for j in range(shape.keys):
            a, s = splat(tokens.k[x + j]), at + j * step
            s0, s1 = load(source, s), load(source, s + LANES)
            store(goal, s, fma(a, u0, gate * s0))
            store(goal, s + LANES, fma(a, u1, gate * s1))
    else:
        p, o = zero, zero
        for j in range(0, even, 2):
            s = at + j * step
            p = fma(splat(tokens.k[x + j]), load(source, s), p)
            o = fma(splat(tokens.k[x + j + 1]), load(source, s + step), o)
        for j in range(even, shape.keys):
            p = fma(splat(tokens.k[x + j]), load(source, at + j * step), p)
        u = beta * (load(tokens.v, line) - gate * (p + o))
        for j in range(shape.keys):
            s = at + j * step
            store(goal, s, fma(splat(tokens.k[x + j]), u, gate * load(source, s)))
