"""The micro-kernel for int8 weights: a few rows times a few tiles of sixteen columns, everything in registers.

    y[r, c] = Σ_g float(Σ_j x[r, j] · w[j, c]) · (s[g, c] · z[r, g])      j in group g; g ascending

for groups of 64 or 32 inputs with one scale s for each weight column and one scale z for each row. The sum within a
group is one of integers and therefore exact, in whatever order; a group then adds to the total by one fused
multiply-add. So the bits of y do not depend on what is computed together, nor on whether the CPU multiplies bytes
(VNNI) or pairs of 16 bits.

Weights are kept as unsigned bytes w + 128, for the instruction takes one unsigned and one signed factor. What that
adds, 128 Σ x, is the same for all columns: the row brings its negative along, and the sum of a group starts from it.

A tile is `[groups]` records of a group's weights `[group / 4, 16, 4]`, one byte each, and its scales `[16]`, float32.
A row is `[groups]` records of a group's values `[group]`, signed, the scale z, float32, and −128 Σ x, int32. Values are
bytes for VNNI. Else they are 16 bits, of every four the two even ones first: a lane of even and a lane of odd bytes
of weights then meet their factors as they lie in memory, and nothing is left to be done for each row.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from specdec_core.kernels.compiled import helper, inlined
from specdec_core.kernels.cpu import features, registers
from specdec_core.kernels.simd import (
    FLOAT,
    INT,
    INTEGERS,
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
from specdec_core.kernels.skinny_linear.panel import ADD, rows_ahead

VNNI = {"avx512f", "avx512vnni"} <= features()
"""Whether four products of bytes and their sum are one instruction."""
VALUE_BYTES = 1 if VNNI else 2
"""Of a number in a row."""
TOGETHER = 4
"""Inputs that lie in one lane: bytes of an int32."""
UNROLLED = 4
"""Steps of four inputs without a branch between them; divides the steps of a group."""
PAIRS = (("avx512bw", 512), ("avx2", 256), ("sse2", 128))
"""Instruction sets that multiply pairs of 16 bits and add, the widest first, and the bits they do at once."""
_INSTRUCTION = {512: "llvm.x86.avx512.pmaddw.d.512", 256: "llvm.x86.avx2.pmadd.wd", 128: "llvm.x86.sse2.pmadd.wd"}
_ROUNDER_BITS = 0x4B400000
"""Of 1.5 · 2^23, a float32 whose ones are in the last place: adding a small number to it rounds that to an integer."""
_BYTE, _WORD = ir.IntType(8), ir.IntType(32)
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)


@register_jitable
def group_bytes(group: int) -> int:
    """Bytes of one group in a tile of weights."""
    return LANES * group + 4 * LANES


@register_jitable
def row_group_bytes(group: int) -> int:
    """Bytes of one group in a row."""
    return VALUE_BYTES * group + 8


@helper
def put_value(rows, record, i, value):
    """Value i, within ±127, of the group that begins at byte `record`, a multiple of 4."""
    if VNNI:
        rows[record + i] = np.uint8(value)
    else:
        within = i % TOGETHER
        rows.view(np.int16)[record // 2 + i - within + within % 2 * 2 + within // 2] = value


@intrinsic
def put_nearest(typingctx: Any, x: Any, at: Any, inverse: Any, rows: Any, goal: Any) -> Any:
    """Sixteen values, the integers nearest to x[at + i] · inverse, half to even, as they lie in a row from byte `goal`
    on; returns their sum. x and inverse are float32, their products within ±127."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        x, at, inverse, rows, goal = args
        source = load_at(builder, pointer(context, builder, sig.args[0], x, at))
        scaled = builder.fmul(source, broadcast(builder, inverse))
        rounder = ir.Constant(INTEGERS, [_ROUNDER_BITS] * LANES)
        bits = builder.bitcast(builder.fadd(scaled, builder.bitcast(rounder, VECTOR)), INTEGERS)
        values = builder.sub(bits, rounder)
        small = ir.VectorType(ir.IntType(8 * VALUE_BYTES), LANES)
        order = [i if VNNI else i - i % 4 + (0, 2, 1, 3)[i % 4] for i in range(LANES)]
        narrow = builder.trunc(values, small)
        address = pointer(context, builder, sig.args[3], rows, goal)
        builder.store(
            builder.shuffle_vector(narrow, narrow, ir.Constant(INTEGERS, order)),
            builder.bitcast(address, small.as_pointer()),
            align=4,
        )
        name = f"llvm.vector.reduce.add.v{LANES}i32"
        module = builder.module
        add = module.globals.get(name) or ir.Function(module, ir.FunctionType(_WORD, [INTEGERS]), name)
        return builder.call(add, [values])

    return types.int32(x, types.intp, types.float32, rows, types.intp), codegen


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


def _pairs(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The sums of two products of 16 bits in each lane."""
    wide = next((bits for kind, bits in PAIRS if kind in features()), None)
    if wide is None:
        factors = [
            builder.sext(builder.shuffle_vector(each, each, lanes), INTEGERS)
            for lanes in (ir.Constant(INTEGERS, list(range(first, 2 * LANES, 2))) for first in (0, 1))
            for each in (a, b)
        ]
        return builder.add(builder.mul(*factors[:2]), builder.mul(*factors[2:]))
    name, size = _INSTRUCTION[wide], wide // 16
    halves, result = ir.VectorType(ir.IntType(16), size), ir.VectorType(_WORD, size // 2)
    module = builder.module
    multiply = module.globals.get(name) or ir.Function(module, ir.FunctionType(result, [halves] * 2), name)
    parts = []
    for first in range(0, 2 * LANES, size):
        chosen = ir.Constant(ir.VectorType(_WORD, size), list(range(first, first + size)))
        parts.append(builder.call(multiply, [builder.shuffle_vector(each, each, chosen) for each in (a, b)]))
    while len(parts) > 1:
        joined = ir.VectorType(_WORD, 2 * parts[0].type.count)
        lanes = ir.Constant(joined, list(range(joined.count)))
        parts = [builder.shuffle_vector(low, high, lanes) for low, high in zip(parts[::2], parts[1::2], strict=True)]
    return parts[0]


def _add_products(builder: ir.IRBuilder, sums: ir.Value, weights: Any, values: Any) -> ir.Value:
    """Add the four products of each lane; the factors as `_weights` and `_values` prepared them."""
    if VNNI:
        name = "llvm.x86.avx512.vpdpbusd.512"
        module = builder.module
        kind = ir.FunctionType(INTEGERS, [INTEGERS] * 3)
        return builder.call(module.globals.get(name) or ir.Function(module, kind, name), [sums, weights, values])
    for a, b in zip(weights, values, strict=True):
        sums = builder.add(sums, _pairs(builder, a, b))
    return sums


def _weights(builder: ir.IRBuilder, lanes: ir.Value) -> Any:
    """Unsigned bytes as they are for VNNI, else the even and the odd ones as 16 bits."""
    if VNNI:
        return lanes
    halves = builder.bitcast(lanes, _HALVES)
    even = builder.and_(halves, ir.Constant(_HALVES, [255] * 2 * LANES))
    return even, builder.lshr(halves, ir.Constant(_HALVES, [8] * 2 * LANES))


def _values(builder: ir.IRBuilder, row: ir.Value, at: ir.Value) -> Any:
    """Four values of a row from number `at` of its group on, in every lane: bytes for VNNI, else even and odd ones."""
    address = builder.gep(row, [builder.mul(at, ir.Constant(INT, VALUE_BYTES))])
    words = [
        _spread(builder, INTEGERS, builder.load(builder.bitcast(each, _WORD.as_pointer()), align=4))
        for each in (builder.gep(address, [ir.Constant(INT, 4 * word)]) for word in range(VALUE_BYTES))
    ]
    return words[0] if VNNI else [builder.bitcast(word, _HALVES) for word in words]


def _spread(builder: ir.IRBuilder, kind: ir.VectorType, scalar: ir.Value) -> ir.Value:
    """The scalar in every lane."""
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(INTEGERS, [0] * LANES))


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
        return _spread(builder, kind, builder.load(word, align=4))

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
            weights.append(_weights(builder, lanes))
        for r in range(rows):
            values = _values(builder, x_rows[r], at)
            for t in range(tiles):
                following[r, t] = _add_products(builder, following[r, t], weights[t], values)
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
