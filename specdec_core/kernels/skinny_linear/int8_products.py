"""How this CPU multiplies int8 weights and activations, and rows of activations as it reads them.

With VNNI one instruction adds the products of four unsigned and four signed bytes to each lane; values of a row are
bytes. Any other CPU multiplies pairs of 16 bits. Values then are 16 bits, of every four the two even ones first: a lane
of even and a lane of odd bytes of weights meet their factors as they lie in memory, and nothing is left to be done for
each row. All sums are exact, so every CPU finds the same.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, register_jitable

from specdec_core.kernels.compiled import helper
from specdec_core.kernels.cpu import features
from specdec_core.kernels.simd import INT, INTEGERS, LANES, broadcast, constant, load_at, pointer

VNNI = {"avx512f", "avx512vnni"} <= features()
"""Whether four products of bytes and their sum are one instruction."""
VALUE_BYTES = 1 if VNNI else 2
"""Of a number in a row."""
TOGETHER = 4
"""Inputs that lie in one lane: bytes of an int32."""
PAIRS = {
    "avx512bw": ("llvm.x86.avx512.pmaddw.d.512", 32),
    "avx2": ("llvm.x86.avx2.pmadd.wd", 16),
    "sse2": ("llvm.x86.sse2.pmadd.wd", 8),
}
"""Instructions that multiply pairs of 16 bits and add, by instruction set, the widest first, and how many 16 bits each
takes at once."""
ROUNDER = np.float32(1.5 * 2**23)
"""A float32 this large has its ones in the last place, so adding a small number to it rounds that to an integer."""
_WORD = ir.IntType(32)
_HALVES = ir.VectorType(ir.IntType(16), 2 * LANES)


@register_jitable
def _place(i: int) -> int:
    """Where value i is among 16 bits: of four, those of even number first."""
    within = i % TOGETHER
    return i - within + within % 2 * 2 + within // 2


@helper
def put_value(rows, record, i, value):
    """Value i, within ±127, of the group that begins at byte `record`, a multiple of 4."""
    if VNNI:
        rows[record + i] = np.uint8(value)
    else:
        rows.view(np.int16)[record // 2 + _place(i)] = value


@intrinsic
def put_nearest(typingctx: Any, x: Any, at: Any, inverse: Any, rows: Any, goal: Any) -> Any:
    """Put the integers nearest to x[at + i] · inverse, half to even, i < 16, into a row from byte `goal` on; their sum.

    x and inverse are float32, their products within ±127.
    """

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        x, at, inverse, rows, goal = args
        source = load_at(builder, pointer(context, builder, sig.args[0], x, at))
        scaled = builder.fmul(source, broadcast(builder, inverse))
        bits = builder.bitcast(builder.fadd(scaled, constant(float(ROUNDER))), INTEGERS)
        values = builder.sub(bits, ir.Constant(INTEGERS, [int(ROUNDER.view(np.int32))] * LANES))
        small = ir.VectorType(ir.IntType(8 * VALUE_BYTES), LANES)
        order = [i if VNNI else _place(i) for i in range(LANES)]  # it is its own inverse
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


def _pairs(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    """The sums of two products of 16 bits in each lane."""
    kind = next((each for each in PAIRS if each in features()), None)
    if kind is None:
        factors = [
            builder.sext(builder.shuffle_vector(each, each, lanes), INTEGERS)
            for lanes in (ir.Constant(INTEGERS, list(range(first, 2 * LANES, 2))) for first in (0, 1))
            for each in (a, b)
        ]
        return builder.add(builder.mul(*factors[:2]), builder.mul(*factors[2:]))
    name, size = PAIRS[kind]
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


def add_products(builder: ir.IRBuilder, sums: ir.Value, weights: Any, values: Any) -> ir.Value:
    """Add the four products of each lane; the factors as `weight_factors` and `values_of_row` prepared them."""
    if VNNI:
        name = "llvm.x86.avx512.vpdpbusd.512"
        module = builder.module
        kind = ir.FunctionType(INTEGERS, [INTEGERS] * 3)
        return builder.call(module.globals.get(name) or ir.Function(module, kind, name), [sums, weights, values])
    for a, b in zip(weights, values, strict=True):
        sums = builder.add(sums, _pairs(builder, a, b))
    return sums


def weight_factors(builder: ir.IRBuilder, lanes: ir.Value) -> Any:
    """Unsigned bytes as they are for VNNI, else the even and the odd ones as 16 bits."""
    if VNNI:
        return lanes
    halves = builder.bitcast(lanes, _HALVES)
    even = builder.and_(halves, ir.Constant(_HALVES, [255] * 2 * LANES))
    return even, builder.lshr(halves, ir.Constant(_HALVES, [8] * 2 * LANES))


def values_of_row(builder: ir.IRBuilder, row: ir.Value, at: ir.Value) -> Any:
    """Four values of a row from number `at` of its group on, in every lane: bytes for VNNI, else even and odd ones."""
    address = builder.gep(row, [builder.mul(at, ir.Constant(INT, VALUE_BYTES))])
    words = [
        spread(builder, INTEGERS, builder.load(builder.bitcast(each, _WORD.as_pointer()), align=4))
        for each in (builder.gep(address, [ir.Constant(INT, 4 * word)]) for word in range(VALUE_BYTES))
    ]
    return words[0] if VNNI else [builder.bitcast(word, _HALVES) for word in words]


def spread(builder: ir.IRBuilder, kind: ir.VectorType, scalar: ir.Value) -> ir.Value:
    """The scalar in every lane."""
    undefined = ir.Constant(kind, ir.Undefined)
    one = builder.insert_element(undefined, scalar, ir.Constant(_WORD, 0))
    return builder.shuffle_vector(one, undefined, ir.Constant(INTEGERS, [0] * LANES))
