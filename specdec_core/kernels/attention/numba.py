"""Attention over a ragged cache, summed by rank among the entries a node sees.

A node's visible entries are the committed ones and its path from the root, in this order; an entry's *rank* is its
place among them. Per (node, head), with everything in an order that depends on ranks only:

    s_r = Σ_d q_d k_rd          d ascending, in the micro-kernel's parts
    m   = max_r s_r
    p_r = exp(s_r − m)          the same polynomial in every lane
    l   = Σ_r p_r               lane r mod 16, r ascending; then the lanes by halves
    o_d = Σ_r p_r v_rd / l      r ascending

So a token's output has the same bits as a single step, a node of a chain or of a tree, in any batch and any chunk.
Entries it does not see are skipped, not added as zeros. The nodes of a row and the heads of a KV group share each pass
over keys and values: keys of sixteen ranks are transposed into a tile, then scores and weighted values are products
by the same micro-kernel as the layers'.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from specdec_core.kernels.compiled import helper, inlined
from specdec_core.kernels.simd import (
    LANES,
    copy,
    exp,
    highest,
    keep_first,
    load,
    maximum,
    padded,
    splat,
    store,
    total,
    touch,
    transpose,
)
from specdec_core.kernels.skinny_linear.panel import BEGIN, CONTINUE, MOST_ROWS, STORE, panel

BLOCK = 4 * LANES
"""Ranks whose keys are transposed together, and whose entries are gathered together."""
QUERIES = 48
"""Queries (nodes × heads of a KV group) of one unit of work: they share each tile of keys."""


class Visible(NamedTuple):
    """What each of N nodes sees.

    committed  `[N]` cached entries before the pass.
    lengths    `[N]` visible entries, itself included.
    straight   `[N]` ranks below this are the entry of the same number: all of them on a chain.
    paths      `[N · depths]` the nodes from root to node, by depth.
    depths     columns of `paths`.
    """

    committed: np.ndarray
    lengths: np.ndarray
    straight: np.ndarray
    paths: np.ndarray
    depths: int


class Heads(NamedTuple):
    """One KV head of one row: flat keys and values, where its entry 0 begins, query heads in the group, head size."""

    keys: np.ndarray
    values: np.ndarray
    at: int
    group: int
    size: int


def workspace(group: int, size: int, longest: int) -> int:
    """Floats of scratch that `attend` needs for up to `longest` visible entries; the layout is `_places`."""
    return _places(nodes_of_unit(group) * group, size, longest)[-1]


def nodes_of_unit(group: int) -> int:
    return max(1, QUERIES // group)


def _places(queries, size, longest):
    """Where in the scratch: key tiles, gathered entries, outputs, sums, scores; and the end."""
    gathered = BLOCK * size
    outputs = gathered + BLOCK * (size + LANES)
    sums = outputs + queries * (size + LANES)
    scores = sums + queries + LANES
    return 0, gathered, outputs, sums, scores, scores + queries * (longest + BLOCK)


_places_of = helper(_places)


@inlined
def attend(first, last, visible, heads, query, query_at, output, output_at, output_step, scratch):
    """Nodes first … last − 1 of one row, the heads of one KV group; at most `QUERIES` queries, or one node.

    query[query_at …] `[nodes, group, size]` rotated and scaled; scratch is this worker's own;
    output[output_at + (node − first) · output_step …] `[group, size]`.
    """
    size, group = heads.size, heads.group
    queries = (last - first) * group
    longest, reach = 0, 0
    for node in range(first, last):
        longest = max(longest, visible.lengths[node])
        reach = max(reach, visible.straight[node])
    tiles, gathered, outputs, sums, scores, _ = _places_of(queries, size, longest)
    span = (longest + BLOCK - 1) // BLOCK * BLOCK

    _ask_for(heads.keys, heads.at, min(BLOCK, reach) * size)
    for rank in range(0, reach, BLOCK):
        count = min(BLOCK, reach - rank)
        # The cache was last read a whole pass of weights ago: ask in time, for the values too, which come next.
        _ask_for(heads.keys, heads.at + (rank + count) * size, min(BLOCK, reach - rank - count) * size)
        _ask_for(heads.values, heads.at + rank * size, count * size)
        _key_tiles(heads.keys, heads.at + rank * size, count, size, scratch, tiles)
        panel(
            queries, (count + LANES - 1) // LANES, size, scratch, tiles, LANES, LANES * size,
            query, query_at, size, scratch, scores + rank, span, STORE,
        )  # fmt: skip
    for node in range(first, last):
        own = scores + (node - first) * group * span
        for rank in range(visible.straight[node] // LANES * LANES, visible.lengths[node], LANES):
            if visible.lengths[node] == visible.straight[node]:
                break
            count = min(LANES, visible.lengths[node] - rank)
            _gather(heads.keys, heads.at, visible, node, rank, count, size, size, scratch, gathered)
            _key_tiles(scratch, gathered, count, size, scratch, tiles)
            panel(
                group, 1, size, scratch, tiles, LANES, LANES * size,
                query, query_at + (node - first) * group * size, size, scratch, own + rank, span, STORE,
            )  # fmt: skip
        for head in range(group):
            place = sums + (node - first) * group + head
            scratch[place] = _exponentials(scratch, own + head * span, visible.lengths[node])

    _weighted_values(first, last, visible, heads, scratch, scores, span, gathered, outputs)

    width = padded(size)
    for node in range(first, last):
        for head in range(group):
            q = (node - first) * group + head
            goal, source = output_at + (node - first) * output_step + head * size, outputs + q * width
            divisor = splat(scratch[sums + q])
            for d in range(0, width, LANES):
                store(scratch, source + d, load(scratch, source + d) / divisor)
            copy(scratch, source, output, goal, size)


@helper
def _ask_for(source, at, count):
    for i in range(0, count, LANES):
        touch(source, at + i)


@helper
def _key_tiles(source, at, count, size, goal, goal_at):
    """The keys of `count` ≤ 64 consecutive entries as tiles `[⌈count / 16⌉, size, 16]`, lanes beyond `count` finite."""
    for start in range(0, count, LANES):
        tile = goal_at + start * size
        rows = min(LANES, count - start)
        if rows == LANES and size % LANES == 0:
            for d in range(0, size, LANES):
                transpose(source, at + start * size + d, size, goal, tile + LANES * d)
        else:
            for d in range(size):
                for row in range(rows):
                    goal[tile + LANES * d + row] = source[at + (start + row) * size + d]
                for row in range(rows, LANES):
                    goal[tile + LANES * d + row] = 0


@helper
def _gather(source, at, visible, node, rank, count, size, step, goal, goal_at):
    """Copy the entries of ranks rank … rank + count − 1 of a node to rows `step` apart."""
    committed = visible.committed[node]
    for row in range(count):
        entry = rank + row
        if entry >= committed:
            entry = committed + visible.paths[node * visible.depths + entry - committed]
        copy(source, at + entry * size, goal, goal_at + row * step, size)


@helper
def _exponentials(scores, at, length):
    """Replace scores by exp(score − highest) and return their sum."""
    nothing = splat(np.float32(-np.inf))
    top = nothing
    for rank in range(0, length, LANES):
        top = maximum(top, keep_first(load(scores, at + rank), length - rank, nothing))
    shift = splat(highest(top))
    zero = splat(np.float32(0))
    lanes = zero
    for rank in range(0, length, LANES):
        weights = keep_first(exp(load(scores, at + rank) - shift), length - rank, zero)
        store(scores, at + rank, weights)
        lanes = lanes + weights
    return total(lanes)


@inlined
def _weighted_values(first, last, visible, heads, scratch, scores, span, gathered, outputs):
    """Σ p · v of every query. Nodes go together as far as all of them see the same entries, then each on its own."""
    size, group = heads.size, heads.group
    width = padded(size)
    together = max(1, MOST_ROWS // group)
    whole = width == size  # else a tile would reach into the next entry: gather into padded rows
    for start in range(first, last, together):
        stop = min(last, start + together)
        common = 0
        if whole:
            common = visible.straight[start]
            for node in range(start, stop):
                common = min(common, visible.straight[node])
            panel(
                (stop - start) * group, width // LANES, common, heads.values, heads.at, size, LANES,
                scratch, scores + (start - first) * group * span, span,
                scratch, outputs + (start - first) * group * width, width, BEGIN,
            )  # fmt: skip
        for node in range(start, stop):
            own, goal = scores + (node - first) * group * span, outputs + (node - first) * group * width
            rank = common
            if whole and visible.straight[node] > rank:
                panel(
                    group, width // LANES, visible.straight[node] - rank, heads.values, heads.at + rank * size, size,
                    LANES, scratch, own + rank, span, scratch, goal, width, CONTINUE,
                )  # fmt: skip
                rank = visible.straight[node]
            while rank < visible.lengths[node]:
                count = min(BLOCK, visible.lengths[node] - rank)
                _gather(heads.values, heads.at, visible, node, rank, count, size, width, scratch, gathered)
                panel(
                    group, width // LANES, count, scratch, gathered, width, LANES, scratch, own + rank, span,
                    scratch, goal, width, BEGIN if rank == 0 else CONTINUE,
                )  # fmt: skip
                rank += count
