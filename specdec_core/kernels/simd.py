"""Sixteen float32 lanes as a type inside compiled code: every operation has one fixed order, whatever the CPU's width.

LLVM lowers the type to AVX-512, AVX2, NEON or SSE registers. No operation is left to the vectoriser, whose remainder
loops may sum in another order or call another exponential, so a row's result never depends on its place in an array.
Arrays are one-dimensional, contiguous float32; an offset counts elements and is not checked.
"""

from __future__ import annotations

import operator
from typing import Any, ClassVar

from llvmlite import ir
from numba import types
from numba.core.typing.templates import ConcreteTemplate, infer_global, signature
from numba.extending import intrinsic, lower_builtin, models, register_jitable, register_model

from specdec_core.kernels.compiled import helper
from specdec_core.kernels.cpu import fuses

LANES = 16
FLOAT, INT = ir.FloatType(), ir.IntType(64)
VECTOR = ir.VectorType(FLOAT, LANES)
INTEGERS = ir.VectorType(ir.IntType(32), LANES)
FUSES = fuses()


class _Vector(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"float32x{LANES}")


vector = _Vector()


@register_model(_Vector)
class _VectorModel(models.PrimitiveModel):
    def __init__(self, manager: Any, numba_type: Any) -> None:
        super().__init__(manager, numba_type, VECTOR)


def _binary(symbol: Any, emit: str) -> None:
    """Make `symbol` (+, -, *, /) work between two vectors, lane by lane."""

    @infer_global(symbol)
    class Template(ConcreteTemplate):
        cases: ClassVar = [signature(vector, vector, vector)]

    @lower_builtin(symbol, vector, vector)
    def lower(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return getattr(builder, emit)(*args)


for _symbol, _emit in (
    (operator.add, "fadd"),
    (operator.sub, "fsub"),
    (operator.mul, "fmul"),
    (operator.truediv, "fdiv"),
):
    _binary(_symbol, _emit)


def pointer(context: Any, builder: ir.IRBuilder, array_type: Any, array: ir.Value, offset: ir.Value) -> ir.Value:
    """Address of element `offset` of a contiguous array."""
    data = context.make_array(array_type)(context, builder, array).data
    return builder.gep(data, [offset])


def multiply_add(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a · b + c in one rounding, or in two on a CPU that cannot fuse."""
    if not FUSES:
        return builder.fadd(builder.fmul(a, b), c)
    name = f"llvm.fma.v{LANES}f32"
    module = builder.module
    fma = module.globals.get(name) or ir.Function(module, ir.FunctionType(VECTOR, [VECTOR] * 3), name)
    return builder.call(fma, [a, b, c])


def broadcast(builder: ir.IRBuilder, scalar: ir.Value) -> ir.Value:
    """The scalar in every lane."""
    one = builder.insert_element(ir.Constant(VECTOR, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
    return builder.shuffle_vector(one, ir.Constant(VECTOR, ir.Undefined), ir.Constant(INTEGERS, [0] * LANES))


def constant(value: float) -> ir.Constant:
    """A vector with `value`, rounded to float32, in every lane."""
    return ir.Constant(VECTOR, [ir.Constant(FLOAT, value)] * LANES)


def load_at(builder: ir.IRBuilder, address: ir.Value) -> ir.Value:
    return builder.load(builder.bitcast(address, VECTOR.as_pointer()), align=4)


def store_at(builder: ir.IRBuilder, value: ir.Value, address: ir.Value) -> None:
    builder.store(value, builder.bitcast(address, VECTOR.as_pointer()), align=4)


def prefetch_at(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Ask for the cache line at an address, to be read, into the second-level cache."""
    small = ir.IntType(32)
    kind = ir.FunctionType(ir.VoidType(), [FLOAT.as_pointer(), small, small, small])
    module, name = builder.module, "llvm.prefetch.p0"
    function = module.globals.get(name) or ir.Function(module, kind, name)
    builder.call(function, [address, ir.Constant(small, 0), ir.Constant(small, 2), ir.Constant(small, 1)])


@intrinsic
def load(typingctx: Any, array: Any, offset: Any) -> Any:
    """Elements offset … offset + 15."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return load_at(builder, pointer(context, builder, sig.args[0], args[0], args[1]))

    return vector(array, types.intp), codegen


@intrinsic
def store(typingctx: Any, array: Any, offset: Any, value: Any) -> Any:
    """Write elements offset … offset + 15."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        store_at(builder, args[2], pointer(context, builder, sig.args[0], args[0], args[1]))
        return context.get_dummy_value()

    return types.void(array, types.intp, vector), codegen


@intrinsic
def prefetch(typingctx: Any, array: Any, offset: Any) -> Any:
    """Ask for the cache line of an element, to be read, into the second-level cache."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        prefetch_at(builder, pointer(context, builder, sig.args[0], *args))
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def touch(typingctx: Any, array: Any, offset: Any) -> Any:
    """Load an element and drop it, so that its cache line is there when needed.

    Unlike a prefetch, which a busy core may ignore, a load is always served, and the processor's own prefetching
    learns from it. Atomic, though of no use as such, because the compiler removes any other load without a user.
    """

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        word = builder.bitcast(pointer(context, builder, sig.args[0], *args), ir.IntType(32).as_pointer())
        builder.load_atomic(word, "monotonic", 4)
        return context.get_dummy_value()

    return types.void(array, types.intp), codegen


@intrinsic
def splat(typingctx: Any, scalar: Any) -> Any:
    """The scalar, as float32, in every lane."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return broadcast(builder, args[0])

    return vector(types.float32), codegen


@intrinsic
def fma(typingctx: Any, a: Any, b: Any, c: Any) -> Any:
    """a · b + c, lane by lane."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return multiply_add(builder, *args)

    return vector(vector, vector, vector), codegen


@intrinsic
def maximum(typingctx: Any, a: Any, b: Any) -> Any:
    """The larger, lane by lane."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return _larger(builder, *args)

    return vector(vector, vector), codegen


@intrinsic
def keep_first(typingctx: Any, value: Any, count: Any, other: Any) -> Any:
    """The first `count` lanes of `value`, then those of `other`."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        value, count, other = args
        wide = ir.VectorType(INT, LANES)
        one = builder.insert_element(ir.Constant(wide, ir.Undefined), count, ir.Constant(ir.IntType(32), 0))
        counts = builder.shuffle_vector(one, ir.Constant(wide, ir.Undefined), ir.Constant(INTEGERS, [0] * LANES))
        kept = builder.icmp_signed("<", ir.Constant(wide, list(range(LANES))), counts)
        return builder.select(kept, value, other)

    return vector(vector, types.intp, vector), codegen


@intrinsic
def total(typingctx: Any, value: Any) -> Any:
    """Sum of the lanes: the upper half is added to the lower one until one is left."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return _fold(builder, args[0], builder.fadd)

    return types.float32(vector), codegen


@intrinsic
def highest(typingctx: Any, value: Any) -> Any:
    """Largest lane."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return _fold(builder, args[0], lambda a, b: _larger(builder, a, b))

    return types.float32(vector), codegen


@intrinsic
def exp(typingctx: Any, value: Any) -> Any:
    """e^x within 1.1 units in the last place; 0 below -87.3, e^88.3 above 88.3, NaN for NaN.

    x = n ln 2 + r with |r| ≤ ln 2 / 2; the polynomial for e^r is that of Cephes' expf (Moshier), 2^n is put together
    from its bits.
    """

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        low, high = constant(-87.33654), constant(88.37626)
        tiny = builder.fcmp_ordered("<", args[0], low)
        x = builder.select(tiny, low, args[0])
        x = builder.select(builder.fcmp_ordered(">", x, high), high, x)
        # Adding 1.5 · 2^23 rounds to an integer and leaves it in the low bits.
        shifter = constant(12582912.0)
        shifted = multiply_add(builder, x, constant(1.44269504088896341), shifter)
        n = builder.fsub(shifted, shifter)
        r = multiply_add(builder, n, constant(-0.693359375), x)
        r = multiply_add(builder, n, constant(2.12194440e-4), r)
        poly = constant(1.9875691500e-4)
        for coefficient in (1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1, 5.0000001201e-1):
            poly = multiply_add(builder, poly, r, constant(coefficient))
        poly = multiply_add(builder, poly, builder.fmul(r, r), r)
        poly = builder.fadd(poly, constant(1.0))
        bits = builder.shl(builder.bitcast(shifted, INTEGERS), ir.Constant(INTEGERS, [23] * LANES))
        power = builder.bitcast(builder.add(bits, ir.Constant(INTEGERS, [0x3F800000] * LANES)), VECTOR)
        return builder.select(tiny, constant(0.0), builder.fmul(poly, power))

    return vector(vector), codegen


@intrinsic
def transpose(typingctx: Any, source: Any, at: Any, step: Any, goal: Any, goal_at: Any) -> Any:
    """goal[goal_at + 16 j + i] = source[at + step i + j] for i, j < 16."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        source, at, step, goal, goal_at = args
        start = pointer(context, builder, sig.args[0], source, at)
        rows = [load_at(builder, builder.gep(start, [builder.mul(step, ir.Constant(INT, i))])) for i in range(LANES)]
        # Interleaving row i with row i + 8, four times over, is a transposition (a perfect shuffle of the index bits).
        half = LANES // 2
        low = ir.Constant(INTEGERS, [lane // 2 + LANES * (lane % 2) for lane in range(LANES)])
        high = ir.Constant(INTEGERS, [half + lane // 2 + LANES * (lane % 2) for lane in range(LANES)])
        for _ in range(4):
            pairs = [(rows[i], rows[i + half]) for i in range(half)]
            rows = [builder.shuffle_vector(a, b, order) for a, b in pairs for order in (low, high)]
        end = pointer(context, builder, sig.args[3], goal, goal_at)
        for j, column in enumerate(rows):
            store_at(builder, column, builder.gep(end, [ir.Constant(INT, LANES * j)]))
        return context.get_dummy_value()

    return types.void(source, types.intp, types.intp, goal, types.intp), codegen


def _larger(builder: ir.IRBuilder, a: ir.Value, b: ir.Value) -> ir.Value:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _fold(builder: ir.IRBuilder, value: ir.Value, combine: Any) -> ir.Value:
    width = LANES
    while width > 1:
        width //= 2
        halves = [
            builder.shuffle_vector(
                value, value, ir.Constant(ir.VectorType(ir.IntType(32), width), list(range(start, start + width)))
            )
            for start in (0, width)
        ]
        value = combine(*halves)
    return builder.extract_element(value, ir.Constant(ir.IntType(32), 0))


@register_jitable
def padded(count: int) -> int:
    """The next multiple of 16."""
    return (count + LANES - 1) // LANES * LANES


@register_jitable
def row_step(count: int) -> int:
    """Distance of rows of `count` floats: padded, and an odd number of cache lines.

    Sixteen rows that are read in step would otherwise fall into the same few sets of the first-level cache and evict
    each other (measured: 48 instead of 117 GFLOP/s for rows of 2048).
    """
    return (count + LANES - 1) // LANES // 2 * 2 * LANES + LANES


@helper
def load_two(source, at):
    return load(source, at), load(source, at + LANES)


@helper
def load_four(source, at):
    return (
        load(source, at),
        load(source, at + LANES),
        load(source, at + 2 * LANES),
        load(source, at + 3 * LANES),
    )


@helper
def store_two(goal, at, a, b):
    store(goal, at, a)
    store(goal, at + LANES, b)


@helper
def store_four(goal, at, a, b, c, d):
    store(goal, at, a)
    store(goal, at + LANES, b)
    store(goal, at + 2 * LANES, c)
    store(goal, at + 3 * LANES, d)


@helper
def copy(source, at, goal, goal_at, count):
    """goal[goal_at + i] = source[at + i] for i < count."""
    whole = count // LANES * LANES
    for i in range(0, whole, LANES):
        store(goal, goal_at + i, load(source, at + i))
    for i in range(whole, count):
        goal[goal_at + i] = source[at + i]
