"""The micro-kernel for int8 weights: a few rows times a few tiles of sixteen columns, everything in registers.

    y[r, c] = Σ_g float(Σ_j x[r, j] · w[j, c]) · (s[g, c] · z[r, g])      j in group g; g ascending

for groups of 64 or 32 inputs with one scale s for each weight column and one scale z for each row. The sum within a
group is one of integers and therefore exact, in whatever order; a group then adds to the total by one fused
multiply-add. So the bits of y do not depend on what is computed together, nor on whether the CPU multiplies bytes
(VNNI) or pairs of 16 bits.

Weights are kept as unsigned bytes w + 128, for the instruction takes one unsigned and one signed factor. What that
adds, 128 Σ x, is the same for all columns: the row brings its negative along, and the sum of a group starts from it.

A tile is `[groups]` records of a group's weights `[group / 4, 16, 4]`, one byte each, and its scales `[16]`, float32.
A row is `[groups]` records of a group's values `[group]`, as int8_products.py lays them out, the scale z, float32, and
−128 Σ x, int32.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from specdec_core.kernels.compiled import inlined
from specdec_core.kernels.cpu import registers
from specdec_core.kernels.simd import (
    FLOAT,
    INT,
    INTEGERS,
    LANES,
    VECTOR,
    constant,
    load_at,
    multiply_add,
    pointer,
    prefetch_at,
    store_at,
)
from specdec_core.kernels.skinny_linear.int8_products import (
    TOGETHER,
    VALUE_BYTES,
    add_products,
    spread,
    values_of_row,
    weight_factors,
)
from specdec_core.kernels.skinny_linear.panel import ADD, rows_ahead

UNROLLED = 4
"""Steps of four inputs without a branch between them; divides the steps of a group."""
_BYTE = ir.IntType(8)


@register_jitable
def group_bytes(group: int) -> int:
    """Bytes of one group in a tile of weights."""
    return LANES * group + 4 * LANES


@register_jitable
def row_group_bytes(group: int) -> int:
    """Bytes of one group in a row."""
    return VALUE_BYTES * group + 8


def most_rows() -> int:
    """Rows computed at once: as many as their sums of a group fit in registers for."""
    if registers().lanes == 16:
        return 16
    return 4 if registers().count * registers().lanes >= 128 else 2


def tiles_at_once(rows: int) -> int:
    """Tiles that `rows` rows are computed for together: more sums in flight where rows are few.

    A cell needs a sum and a total. Only sixteen rows of one tile leave no room for all totals, which then wait in
    memory while the sums of a group are formed.
    """
    if registers().lanes < 16:
        return 1
    room = 14 // rows
    return 4 if room >= 4 else 2 if room >= 2 else 1


@intrinsic
def _micro(
    typingctx: Any, rows: Any, tiles: Any, groups: Any, group: Any, w: Any, w_at: Any, w_tile: Any, x: Any, x_at: Any,
    x_step: Any, y: Any, y_at: Any, y_step: Any, mode: Any,
) -> Any:  # fmt: skip
    """Call the micro-kernel of (rows, tiles); see `byte_panel` for the rest. Sizes that have none are not called."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        rows, tiles, groups, group, _, _, w_tile, _, _, x_step, _, _, y_step, mode = args
        w, x, y = (pointer(context, builder, sig.args[i], args[i], args[i + 1]) for i in (4, 7, 10))
        passed = [groups, group, w, w_tile, x, x_step, y, y_step, mode]
        done = builder.append_basic_block("byte_panel.done")
        choice = builder.add(builder.mul(rows, ir.Constant(INT, 8)), tiles)
        switch = builder.switch(choice, done)
        for r in range(1, MOST_ROWS + 1):
            for t in (t for t in (1, 2, 4) if t <= tiles_at_once(r)):
                block = builder.append_basic_block(f"byte_panel.{r}.{t}")
                switch.add_case(ir.Constant(INT, 8 * r + t), block)
                builder.position_at_end(block)
                builder.call(_kernel(builder.module, r, t), passed)
                builder.branch(done)
        builder.position_at_end(done)
        return context.get_dummy_value()

    n = types.intp
    return types.void(n, n, n, n, w, n, n, x, n, n, y, n, n, n), codegen


def _kernel(module: ir.Module, rows: int, tiles: int) -> ir.Function:
    """The function (groups, group, w, w_tile, x, x_step, y, y_step, mode) of one shape, in this module."""
    name = f"specdec_byte_panel_{rows}_{tiles}"
    if name in module.globals:
        return module.globals[name]
    data = _BYTE.as_pointer()
    kind = ir.FunctionType(ir.VoidType(), [INT, INT, data, INT, data, INT, FLOAT.as_pointer(), INT, INT])
    function = ir.Function(module, kind, name)
    function.linkage = "internal"
    function.attributes.add("noinline")
    groups, group, w, w_tile, x, x_step, y, y_step, mode = function.args
    for array in (w, x, y):
        array.add_attribute("noalias")
    cells = [(r, t) for r in range(rows) for t in range(tiles)]
    entry, outer, inner, scaling, done, adding, storing, end = (
        function.append_basic_block(each) for each in ("entry", "group", "step", "scale", "done", "add", "store", "end")
    )
    builder = ir.IRBuilder(entry)
    w_group = builder.mul(builder.add(group, ir.Constant(INT, 4)), ir.Constant(INT, LANES))
    x_values = builder.mul(group, ir.Constant(INT, VALUE_BYTES))
    x_group = builder.add(x_values, ir.Constant(INT, 8))
    builder.branch(outer)

    builder.position_at_end(outer)
    g = builder.phi(INT)
    totals = {cell: builder.phi(VECTOR) for cell in cells}
    w_tiles = [
        builder.gep(w, [builder.add(builder.mul(g, w_group), builder.mul(w_tile, ir.Constant(INT, t)))])
        for t in range(tiles)
    ]
    x_rows = [
        builder.gep(x, [builder.add(builder.mul(g, x_group), builder.mul(x_step, ir.Constant(INT, r)))])
        for r in range(rows)
    ]

    def of_row(address: ir.Value, kind: ir.VectorType, offset: ir.Value) -> ir.Value:
        word = builder.bitcast(builder.gep(address, [offset]), kind.element.as_pointer())
        return spread(builder, kind, builder.load(word, align=4))

    first = [of_row(address, INTEGERS, builder.add(x_values, ir.Constant(INT, 4))) for address in x_rows]
    builder.branch(inner)

    builder.position_at_end(inner)
    j = builder.phi(INT)
    sums = {cell: builder.phi(INTEGERS) for cell in cells}
    following = dict(sums)
    for step in range(UNROLLED):
        at = builder.add(j, ir.Constant(INT, TOGETHER * step))
        weights = []
        for address in w_tiles:
            weight = builder.gep(address, [builder.mul(at, ir.Constant(INT, LANES))])
            ahead = builder.gep(weight, [ir.Constant(INT, TOGETHER * LANES * rows_ahead(tiles))])
            prefetch_at(builder, builder.bitcast(ahead, FLOAT.as_pointer()))
            lanes = builder.load(builder.bitcast(weight, INTEGERS.as_pointer()), align=4)
            weights.append(weight_factors(builder, lanes))
        for r in range(rows):
            values = values_of_row(builder, x_rows[r], at)
            for t in range(tiles):
                following[r, t] = add_products(builder, following[r, t], weights[t], values)
    successor = builder.add(j, ir.Constant(INT, TOGETHER * UNROLLED))
    for block, value in ((outer, ir.Constant(INT, 0)), (inner, successor)):
        j.add_incoming(value, block)
    for r, t in cells:
        sums[r, t].add_incoming(first[r], outer)
        sums[r, t].add_incoming(following[r, t], inner)
    builder.cbranch(builder.icmp_signed("<", successor, group), inner, scaling)

    builder.position_at_end(scaling)
    totalled = {}
    for t in range(tiles):
        scales = builder.gep(w_tiles[t], [builder.mul(group, ir.Constant(INT, LANES))])
        weight_scales = load_at(builder, scales)
        for r in range(rows):
            scale = builder.fmul(weight_scales, of_row(x_rows[r], VECTOR, x_values))
            totalled[r, t] = multiply_add(builder, builder.sitofp(following[r, t], VECTOR), scale, totals[r, t])
    next_group = builder.add(g, ir.Constant(INT, 1))
    for block, value in ((entry, ir.Constant(INT, 0)), (scaling, next_group)):
        g.add_incoming(value, block)
    for cell in cells:
        totals[cell].add_incoming(constant(0.0), entry)
        totals[cell].add_incoming(totalled[cell], scaling)
    builder.cbranch(builder.icmp_signed("<", next_group, groups), outer, done)

    def y_address(r: int, t: int) -> ir.Value:
        row = builder.mul(y_step, ir.Constant(INT, r))
        return builder.gep(y, [builder.add(row, ir.Constant(INT, LANES * t))])

    builder.position_at_end(done)
    builder.cbranch(builder.icmp_signed("==", mode, ir.Constant(INT, ADD)), adding, storing)

    builder.position_at_end(adding)
    for cell in cells:
        address = y_address(*cell)
        store_at(builder, builder.fadd(load_at(builder, address), totalled[cell]), address)
    builder.branch(end)

    builder.position_at_end(storing)
    for cell in cells:
        store_at(builder, totalled[cell], y_address(*cell))
    builder.branch(end)

    builder.position_at_end(end)
    builder.ret_void()
    return function


MOST_ROWS = most_rows()
_TILES = tuple(tiles_at_once(max(rows, 1)) for rows in range(MOST_ROWS + 1))


@inlined
def byte_panel(rows, tiles, groups, group, w, w_at, w_tile, x, x_at, x_step, y, y_at, y_step, mode):
    """Any number of rows and tiles.

    w, x flat bytes in the layout above, y flat float32; `_at` is where to begin, `_step` the distance of rows,
    `w_tile` that of tiles, in elements of the array; tiles of y are 16 apart. group: 64 or 32. mode: STORE or ADD.
    """
    passes = (rows + MOST_ROWS - 1) // MOST_ROWS
    for turn in range(passes):
        first = turn * rows // passes
        count = (turn + 1) * rows // passes - first
        at_once = _TILES[count]
        tile = 0
        while tile < tiles:
            width = at_once
            while width > tiles - tile:
                width //= 2
            _micro(
                count, width, groups, group, w, w_at + tile * w_tile, w_tile, x, x_at + first * x_step, x_step,
                y, y_at + first * y_step + tile * LANES, y_step, mode,
            )  # fmt: skip
            tile += width
