"""The commit of one tile: the state decays, and the accepted path is added to it."""

from __future__ import annotations

import numpy as np

from specdec_core.kernels.compiled import helper
from specdec_core.kernels.gated_delta.numba_layout import GROUP, PAIR, WIDE
from specdec_core.kernels.simd import (
    LANES,
    copy,
    exp,
    fma,
    load,
    load_four,
    load_two,
    padded,
    splat,
    store,
    store_four,
    store_two,
)


@helper
def weigh_path(row, head, path, sizes, accepted, places, scratch):
    """Keys of the path, each times the decay of what follows it; and e^G of its end, after the gates."""
    first = accepted.starts[row]
    for i in range(path):
        scratch[places.path_gates + i] = accepted.log_decay[accepted.nodes[first + i] * sizes.heads + head]
    for i in range(0, path, LANES):
        store(scratch, places.path_gates + i, exp(load(scratch, places.path_gates + i)))
    weight = np.float32(1)
    for i in range(path):
        node, goal = accepted.nodes[first + i], places.path_x + i * places.x_step
        copy(accepted.keys, (node * sizes.heads + head) * sizes.keys, scratch, goal, sizes.keys)
        for d in range(0, sizes.keys, LANES):
            store(scratch, goal + d, load(scratch, goal + d) * splat(weight))
        weight = weight * scratch[places.path_gates + i]
    scratch[places.path_gates + padded(path)] = weight


@helper
def advance(row, head, path, at, begin, width, sizes, source, goal, accepted, places, scratch):
    """goal = e^G source + Σ_i key_i u_iᵀ, the node nearest to the end first."""
    first = accepted.starts[row]
    for i in range(path):
        node = accepted.nodes[first + i]
        copy(
            accepted.values, (node * sizes.heads + head) * sizes.values + begin,
            scratch, places.path_u + i * places.y_step, width,
        )  # fmt: skip
    gate = splat(scratch[places.path_gates + padded(path)])
    for k in range(0, sizes.keys, 2):
        # Two rows of the state share each load of u. An odd last row is computed twice, from the same numbers.
        other = k + 1 if k + 1 < sizes.keys else k
        up, down = at + k * sizes.values, at + other * sizes.values
        c = 0
        while WIDE and c + GROUP <= width:
            a0, a1, a2, a3 = load_four(source, up + c)
            b0, b1, b2, b3 = load_four(source, down + c)
            a0, a1, a2, a3 = gate * a0, gate * a1, gate * a2, gate * a3
            b0, b1, b2, b3 = gate * b0, gate * b1, gate * b2, gate * b3
            for i in range(path):
                u0, u1, u2, u3 = load_four(scratch, places.path_u + i * places.y_step + c)
                key = places.path_x + i * places.x_step
                x, y = splat(scratch[key + k]), splat(scratch[key + other])
                a0, a1, a2, a3 = fma(x, u0, a0), fma(x, u1, a1), fma(x, u2, a2), fma(x, u3, a3)
                b0, b1, b2, b3 = fma(y, u0, b0), fma(y, u1, b1), fma(y, u2, b2), fma(y, u3, b3)
            store_four(goal, up + c, a0, a1, a2, a3)
            store_four(goal, down + c, b0, b1, b2, b3)
            c += GROUP
        while c + PAIR <= width:
            a0, a1 = load_two(source, up + c)
            b0, b1 = load_two(source, down + c)
            a0, a1, b0, b1 = gate * a0, gate * a1, gate * b0, gate * b1
            for i in range(path):
                u0, u1 = load_two(scratch, places.path_u + i * places.y_step + c)
                key = places.path_x + i * places.x_step
                x, y = splat(scratch[key + k]), splat(scratch[key + other])
                a0, a1, b0, b1 = fma(x, u0, a0), fma(x, u1, a1), fma(y, u0, b0), fma(y, u1, b1)
            store_two(goal, up + c, a0, a1)
            store_two(goal, down + c, b0, b1)
            c += PAIR
        while c < width:
            a, b = gate * load(source, up + c), gate * load(source, down + c)
            for i in range(path):
                u = load(scratch, places.path_u + i * places.y_step + c)
                key = places.path_x + i * places.x_step
                a, b = fma(splat(scratch[key + k]), u, a), fma(splat(scratch[key + other]), u, b)
            store(goal, up + c, a)
            store(goal, down + c, b)
            c += LANES
