"""The one micro-kernel of the engine: a few rows times a few tiles of sixteen columns, accumulators in registers.

    y[r, c] = Σ_p Σ_{j in part p} x[r, j] · w[j, c]      parts and their j ascending

for r < R rows and c < 16 T columns; one fused multiply-add for every j, one addition for every part of 64. A single
chain would round each term at the size of the whole sum: logits of the real model then err three times as much
(measured). Every output is summed on its own, so its bits do not depend on R, T, or on what else is computed: the
products of the layers, the scores and (as one chain) the weighted values of attention all go through here. R and T are
whatever keeps the accumulators in registers. numba's own loops would spill them; the loop is therefore written in
LLVM's language, which lowers it to AVX-512, AVX2, NEON or SSE.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from specdec_core.kernels.compiled import inlined
from specdec_core.kernels.cpu import Registers, registers
from specdec_core.kernels.simd import (
    FLOAT,
    INT,
    LANES,
    VECTOR,
    broadcast,
    constant,
    load_at,
    multiply_add,
    pointer,
    prefetch_at,
    store_at,
)

STORE, ADD, BEGIN, CONTINUE = range(4)
"""What becomes of y. STORE: overwritten; ADD: added to (a residual). BEGIN and CONTINUE sum in one chain instead of
parts, which several calls may share, cut anywhere, without a change of bits: y is overwritten, or is its first term."""
PART = 64
"""Inputs of a part. Its addition is a 64th more arithmetic: no slower with 1 to 512 rows (measured with AVX-512)."""


def most_rows() -> int:
    """Rows computed at once: as many as leave room for their sums. Fewer passes overlap better with the weights' way
    from memory, since only the first waits for it."""
    if registers().lanes == 16:
        return 16
    return 3 if registers() == Registers(16, 4) else 6


def rows_ahead(tiles: int) -> int:
    """How far ahead of use, in rows of w, weights are asked for (measured, not derived).

    The processor's own prefetching stops at the end of a page, which one tile reaches every 64 rows; four tiles are
    four streams that hide each other's stops, and asking too early for them evicts what is still to be used.
    """
    return 16 if tiles == 4 else 64


def tiles_at_once(rows: int) -> int:
    """Tiles T that `rows` rows are computed for together: more chains in flight where rows are few."""
    vectors_per_tile = LANES // registers().lanes
    held = 24 if registers().count == 32 else 12
    room = held // vectors_per_tile // rows
    return 4 if room >= 4 else 2 if room >= 2 else 1


@intrinsic
def _micro(
    typingctx: Any, rows: Any, tiles: Any, k: Any, w: Any, w_at: Any, w_step: Any, w_tile: Any, x: Any, x_at: Any,
    x_step: Any, y: Any, y_at: Any, y_step: Any, mode: Any,
) -> Any:  # fmt: skip
    """Call the micro-kernel of (rows, tiles); see `panel` for the rest. Sizes that have none are not called."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        rows, tiles, k, _, _, w_step, w_tile, _, _, x_step, _, _, y_step, mode = args
        w, x, y = (pointer(context, builder, sig.args[i], args[i], args[i + 1]) for i in (3, 7, 10))
        passed = [k, w, w_step, w_tile, x, x_step, y, y_step, mode]
        done = builder.append_basic_block("panel.done")
        choice = builder.add(builder.mul(rows, ir.Constant(INT, 8)), tiles)
        switch = builder.switch(choice, done)
        for r in range(1, MOST_ROWS + 1):
            for t in (t for t in (1, 2, 4) if t <= tiles_at_once(r)):
                block = builder.append_basic_block(f"panel.{r}.{t}")
                switch.add_case(ir.Constant(INT, 8 * r + t), block)
                builder.position_at_end(block)
                builder.call(_kernel(builder.module, r, t), passed)
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    n = types.intp
    return types.void(n, n, n, w, n, n, n, x, n, n, y, n, n, n), codegen


def _kernel(module: ir.Module, rows: int, tiles: int) -> ir.Function:
    """The function (k, w, w_step, w_tile, x, x_step, y, y_step, mode) of one shape, in this module."""
    name = f"specdec_panel_{rows}_{tiles}"
    if name in module.globals:
        return module.globals[name]
    data = FLOAT.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [INT, data, INT, INT, data, INT, data, INT, INT])
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    k, w, w_step, w_tile, x, x_step, y, y_step, mode = function.args
    for array in (w, x, y):
        array.add_attribute("noalias")
    cells = [(r, t) for r in range(rows) for t in range(tiles)]

    entry = function.append_basic_block("entry")
    loop, ended, more, done = (function.append_basic_block(each) for each in ("loop", "ended", "more", "done"))
    continuing, adding, storing, end = (
        function.append_basic_block(each) for each in ("continue", "add", "store", "end")
    )
    builder = ir.IRBuilder(entry)
    zero = {cell: constant(0.0) for cell in cells}

    def y_address(r: int, t: int) -> ir.Value:
        row = builder.mul(y_step, ir.Constant(INT, r))
        return builder.gep(y, [builder.add(row, ir.Constant(INT, LANES * t))])

    def at_most_k(count: ir.Value) -> ir.Value:
        return builder.select(builder.icmp_signed("<", count, k), count, k)

    in_parts = builder.icmp_signed("<=", mode, ir.Constant(INT, ADD))
    first_stop = builder.select(in_parts, at_most_k(ir.Constant(INT, PART)), k)
    builder.cbranch(builder.icmp_signed("==", mode, ir.Constant(INT, CONTINUE)), continuing, loop)

    builder.position_at_end(continuing)
    earlier = {cell: load_at(builder, y_address(*cell)) for cell in cells}
    builder.branch(loop)

    builder.position_at_end(loop)
    j, stop = builder.phi(INT), builder.phi(INT)
    sums, totals = ({cell: builder.phi(VECTOR) for cell in cells} for _ in range(2))
    weights = []
    for t in range(tiles):
        offset = builder.add(builder.mul(j, w_step), builder.mul(w_tile, ir.Constant(INT, t)))
        address = builder.gep(w, [offset])
        weights.append(load_at(builder, address))
        ahead = builder.mul(w_step, ir.Constant(INT, rows_ahead(tiles)))
        prefetch_at(builder, builder.gep(address, [ahead]))
    following = {}
    for r in range(rows):
        value = builder.load(builder.gep(x, [builder.add(j, builder.mul(x_step, ir.Constant(INT, r)))]))
        spread = broadcast(builder, value)
        for t in range(tiles):
            following[r, t] = multiply_add(builder, weights[t], spread, sums[r, t])
    successor = builder.add(j, ir.Constant(INT, 1))
    again = builder.cbranch(builder.icmp_signed("<", successor, stop), loop, ended)
    if 2 * len(cells) * (LANES // registers().lanes) >= registers().count:
        keep_rolled(again)

    builder.position_at_end(ended)
    summed = {cell: builder.fadd(totals[cell], following[cell]) for cell in cells}
    builder.cbranch(builder.icmp_signed("<", stop, k), more, done)

    builder.position_at_end(more)
    next_stop = at_most_k(builder.add(stop, ir.Constant(INT, PART)))
    builder.branch(loop)

    start = ir.Constant(INT, 0)
    for block, at, until, of_part, of_all in (
        (entry, start, first_stop, zero, zero),
        (continuing, start, first_stop, earlier, zero),
        (loop, successor, stop, following, totals),
        (more, successor, next_stop, zero, summed),
    ):
        j.add_incoming(at, block)
        stop.add_incoming(until, block)
        for cell in cells:
            sums[cell].add_incoming(of_part[cell], block)
            totals[cell].add_incoming(of_all[cell], block)

    builder.position_at_end(done)
    builder.cbranch(builder.icmp_signed("==", mode, ir.Constant(INT, ADD)), adding, storing)

    builder.position_at_end(adding)
    for cell in cells:
        address = y_address(*cell)
        store_at(builder, builder.fadd(load_at(builder, address), summed[cell]), address)
    builder.branch(end)

    builder.position_at_end(storing)
    for cell in cells:
        store_at(builder, summed[cell], y_address(*cell))
    builder.branch(end)

    builder.position_at_end(end)
    builder.ret_void()
    return function


def keep_rolled(branch: ir.Instruction) -> None:
    """Keep LLVM from unrolling the loop that this branch closes.

    Where the sums fill half the registers, the weights and inputs of two steps at once push some out into memory: nine
    to eleven rows of two tiles took half as long again, six rows of four tiles a third.
    """
    module = branch.function.module
    asked = module.add_metadata([ir.MetaDataString(module, "llvm.loop.unroll.disable")])
    identity = ir.MDValue(module, [asked], name=str(len(module.metadata)))
    identity.operands = (identity, asked)  # what tells one loop from another refers to itself
    branch.set_metadata("llvm.loop", identity)


MOST_ROWS = most_rows()
_TILES = tuple(tiles_at_once(max(rows, 1)) for rows in range(MOST_ROWS + 1))


@inlined
def panel(rows, tiles, k, w, w_at, w_step, w_tile, x, x_at, x_step, y, y_at, y_step, mode):
    """Any number of rows and tiles.

    Arrays are flat float32; `_at` is where to begin, `_step` the distance of rows (of w: from j to j + 1), `w_tile`
    that of w's tiles; tiles of y are 16 apart. k ≥ 1. mode: STORE, ADD, BEGIN or CONTINUE.
    """
    groups = (rows + MOST_ROWS - 1) // MOST_ROWS
    for group in range(groups):
        first = group * rows // groups
        count = (group + 1) * rows // groups - first
        at_once = _TILES[count]
        tile = 0
        while tile < tiles:
            width = at_once
            while width > tiles - tile:
                width //= 2
            _micro(
                count, width, k, w, w_at + tile * w_tile, w_step, w_tile, x, x_at + first * x_step, x_step,
                y, y_at + first * y_step + tile * LANES, y_step, mode,
            )  # fmt: skip
            tile += width
