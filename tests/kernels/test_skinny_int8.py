import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.compiled import helper
from specdec_core.kernels.cpu import features
from specdec_core.kernels.simd import FUSES
from specdec_core.kernels.skinny_linear.int8 import (
    QuantizedLinear,
    aligned_bytes,
    dequantize,
    group_of,
    pack_int8,
    product_int8,
    quantize,
    quantize_rows,
    row_bytes,
)
from specdec_core.kernels.skinny_linear.int8_panel import row_group_bytes
from specdec_core.kernels.skinny_linear.panel import ADD, STORE
from specdec_core.kernels.threads import COUNTER

pytestmark = pytest.mark.usefixtures("one_thread")

# Whole and broken tiles, groups of 64 and of 32, whole and broken groups, one group and many.
SHAPES = [(1, 1), (16, 64), (17, 5), (97, 128), (50, 70), (70, 32), (640, 33), (64, 4000), (600, 192)]


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def in_groups(matrix: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Integers `[rows, groups, group]` and scales `[rows, groups]`, written anew here, one group at a time."""
    group = 64 if matrix.shape[1] % 64 == 0 else 32
    groups = -(-matrix.shape[1] // group)
    integers, scales = np.zeros((len(matrix), groups, group), np.int64), np.zeros((len(matrix), groups), np.float32)
    for row, g in np.ndindex(scales.shape):
        part = matrix[row, g * group : (g + 1) * group]
        largest = np.abs(part).max()
        if largest >= np.float32(2.0**-100):
            inverse = np.float32(np.float32(127) / largest)
            integers[row, g, : len(part)] = [round(float(value)) for value in part * inverse]
            scales[row, g] = largest / np.float32(127)
    return integers, scales


def reference(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    """The same arithmetic; in float64 the products are exact, so one rounding a group is a fused multiply-add."""
    (a, a_scale), (b, b_scale) = in_groups(x), in_groups(weight)
    total = np.zeros((len(x), len(weight)), np.float32)
    for g in range(a.shape[1]):
        sums = (a[:, g] @ b[:, g].T).astype(np.float32)
        scale = b_scale[None, :, g] * a_scale[:, g, None]
        if FUSES:
            total = (sums.astype(np.float64) * scale.astype(np.float64) + total).astype(np.float32)
        else:
            total = sums * scale + total
    return total


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
def test_the_product_has_the_bits_of_the_same_arithmetic_in_numpy(outputs, inputs):
    weight, x = random(1, outputs, inputs), random(2, 33, inputs)
    expected = reference(x, weight)
    linear = QuantizedLinear(weight, threads=2)
    for rows in (1, 2, 7, 16, 33):
        found = linear(x[:rows].copy())
        assert found.shape == (rows, outputs) and found.dtype == np.float32 and found.flags.c_contiguous
        np.testing.assert_array_equal(found, expected[:rows])


def test_the_largest_sums_are_exact():
    """Every product 127 · 127, all of one sign: the middle of what 16 bits or a saturating sum would get wrong."""
    signs = np.sign(random(3, 40, 128))
    x = np.concatenate([signs, -signs, np.ones((1, 128), np.float32)])
    weight = signs[:24].copy()
    np.testing.assert_array_equal(QuantizedLinear(weight, threads=1)(x), reference(x, weight))
    np.testing.assert_allclose(QuantizedLinear(weight, threads=1)(weight).diagonal(), 128, rtol=1e-6)


def test_the_error_of_a_row_is_below_a_hundredth_of_its_norm():
    weight, x = random(4, 1024, 576), random(5, 16, 576)
    exact = x.astype(np.float64) @ weight.astype(np.float64).T
    error = np.linalg.norm(QuantizedLinear(weight, threads=1)(x) - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert (error < 0.01).all() and (error > 0.004).all()


@settings(max_examples=25)
@given(st.sampled_from(SHAPES), st.integers(1, 256), st.integers(0, 10**6), st.sampled_from([1, 2, 3]), st.data())
def test_a_row_has_the_same_bits_whatever_is_computed_with_it(shape, rows, seed, threads, data):
    weight, x = random(seed, *shape), random(seed + 1, rows, shape[1])
    chosen = data.draw(st.permutations(range(rows)))[: data.draw(st.integers(1, rows))]
    together = QuantizedLinear(weight, threads=threads)(x)
    np.testing.assert_array_equal(QuantizedLinear(weight, threads=1)(x[chosen]), together[chosen])


@pytest.mark.parametrize("shape", [(16, 64), (97, 128), (50, 70)])
def test_no_number_of_rows_changes_a_bit(shape):
    """Every width of the micro-kernel, and every way of cutting rows into such widths."""
    weight, x = random(6, *shape), random(7, 40, shape[1])
    linear = QuantizedLinear(weight, threads=1)
    single = np.concatenate([linear(row[None]) for row in x])
    for rows in range(1, 41):
        np.testing.assert_array_equal(linear(x[:rows].copy()), single[:rows])


def test_weights_are_rounded_half_to_even_of_127_steps():
    weight = np.zeros((3, 64), np.float32)
    weight[0, :6] = 127, 0.5, 1.5, -2.5, 3.4, -126.6
    weight[2, 5] = -254
    values, scales = quantize(weight)
    assert values.dtype == np.int8 and scales.dtype == np.float32 and values.flags.c_contiguous
    assert values[0, :6].tolist() == [127, 0, 2, -2, 3, -127] and not values[0, 6:].any() and not values[1].any()
    assert values[2, 5] == -127 and scales[:, 0].tolist() == [1, 0, 2]


@pytest.mark.parametrize("inputs", [1, 64, 70, 96, 192])
def test_weights_come_back_within_half_a_step(inputs):
    weight = random(8, 20, inputs) * np.exp(random(9, 20, 1))
    values, scales = quantize(weight)
    integers, expected = in_groups(weight)
    np.testing.assert_array_equal(values, integers.reshape(20, -1)[:, :inputs])
    np.testing.assert_array_equal(scales, expected)
    step = np.repeat(scales, group_of(inputs), axis=1)[:, :inputs]
    back = dequantize(values, scales)
    assert back.shape == weight.shape and back.dtype == np.float32
    assert (np.abs(back - weight) <= 0.5001 * step).all()


def test_dequantize_wants_the_scales_of_its_values():
    with pytest.raises(ValueError, match=r"scales of shape \(4, 1\): expected \(4, 3\)"):
        dequantize(np.zeros((4, 70), np.int8), np.zeros((4, 1), np.float32))


def test_zeros_give_zeros():
    weight, x = random(10, 20, 128), random(11, 4, 128)
    weight[3], weight[5, 64:], x[1], x[2, :64] = 0, 0, 0, 0
    found = QuantizedLinear(weight, threads=1)(x)
    assert not found[1].any() and not found[:, 3].any()
    np.testing.assert_array_equal(found, reference(x, weight))


@pytest.mark.parametrize(
    ("of_x", "of_weight"), [(1e30, 1e-30), (3e38, 1e-5), (1e-20, 1e15), (1e-29, 1e20), (1e-33, 1e20), (1e-42, 1)]
)
def test_numbers_far_from_one(of_x, of_weight):
    """Down to 2^-100 a group keeps its precision; below, it counts as zeros, which no scale overflows for."""
    weight, x = random(12, 20, 96), random(13, 3, 96)
    weight *= np.float32(of_weight) / np.abs(weight).max()
    x *= np.float32(of_x) / np.abs(x).max()
    found = QuantizedLinear(weight, threads=1)(x)
    assert np.isfinite(found).all() and found.any() == (of_x > 2.0**-100)
    np.testing.assert_array_equal(found, reference(x, weight))


def test_an_overflow_is_not_hidden():
    weight, x = np.full((2, 32), 1e30, np.float32), np.full((1, 32), 1e30, np.float32)
    assert np.isposinf(QuantizedLinear(weight, threads=1)(x)).all()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("at", [0, 77, 99])
def test_a_row_that_is_not_finite_becomes_nan_and_harms_no_other(bad, at):
    weight, x = random(14, 20, 100), random(15, 5, 100)
    linear = QuantizedLinear(weight, threads=1)
    expected = linear(x)
    x[2, at] = bad
    found = linear(x)
    assert np.isnan(found[2]).all()
    np.testing.assert_array_equal(np.delete(found, 2, 0), np.delete(expected, 2, 0))


@helper
def two_products(x, n, inputs, group, rows, step, counters, packed, second, outputs, y, y_step):
    groups = (inputs + group - 1) // group
    tiles = outputs // 16
    quantize_rows(counters, 0, x, inputs + 3, n, inputs, group, rows, step)
    product_int8(1, counters, 1, packed, 0, groups, group, tiles, rows, step, n, y, y_step, STORE)
    product_int8(1, counters, 2, packed, second, groups, group, tiles, rows, step, n, y, y_step, ADD)


def test_a_second_product_is_added_in_place():
    """As a decoder step uses it: matrices one after another, rows apart, a residual, nothing else written, and what
    was in the quantized rows before forgotten."""
    first, second, x = random(16, 80, 70), random(17, 80, 70), random(18, 210, 73)
    packed = np.concatenate([pack_int8(*quantize(first)), pack_int8(*quantize(second))])
    step = row_bytes(70, 32) + 128
    y, counters = np.full((210, 100), 7, np.float32), np.zeros(3 * COUNTER, np.int64)
    rows = aligned_bytes(210 * step)
    rows[:] = 85
    two_products(x.reshape(-1), 210, 70, 32, rows, step, counters, packed, packed.size // 2, 80, y.reshape(-1), 100)
    seen = x[:, :70].copy()
    np.testing.assert_array_equal(y[:, :80], reference(seen, first) + reference(seen, second))
    assert (y[:, 80:] == 7).all()


@pytest.mark.parametrize("inputs", [1, 64, 576, 1536, 2048])
def test_rows_lie_an_odd_number_of_cache_lines_apart(inputs):
    group = group_of(inputs)
    lines, rest = divmod(row_bytes(inputs, group), 64)
    assert rest == 0 and lines % 2 == 1 and 0 <= 64 * lines - -(-inputs // group) * row_group_bytes(group) < 128


def test_bytes_begin_with_a_cache_line():
    for size in (1, 64, 1000):
        made = aligned_bytes(size)
        assert made.ctypes.data % 64 == 0 and made.size == size and not made.any()


@pytest.mark.parametrize(
    ("x", "error", "message"),
    [
        (np.zeros((0, 8), np.float32), ValueError, r"x has shape \(0, 8\).*none of them 0"),
        (np.zeros((2, 9), np.float32), ValueError, r"x of shape \(2, 9\): expected \[n, 8\]"),
        (np.zeros(8, np.float32), ValueError, r"x has shape \(8,\).*\[n, in\]"),
        (np.zeros((2, 8)), TypeError, "dtype float64.*float32"),
        (np.zeros((8, 2), np.float32).T, ValueError, "not contiguous.*ascontiguousarray"),
        (torch.zeros(2, 8), TypeError, "x is a Tensor"),
    ],
    ids=["no rows", "width", "one axis", "dtype", "strides", "torch"],
)
def test_what_it_cannot_compute_is_refused(x, error, message):
    with pytest.raises(error, match=message):
        QuantizedLinear(np.zeros((4, 8), np.float32), threads=1)(x)


@pytest.mark.parametrize("make", [QuantizedLinear, quantize])
def test_weights_it_cannot_quantize_are_refused(make):
    with pytest.raises(TypeError, match="weight has dtype float16"):
        make(np.zeros((4, 8), np.float16))
    with pytest.raises(ValueError, match="weight has shape"):
        make(np.zeros((4, 0), np.float32))
    for bad in (np.nan, -np.inf):
        weight = np.zeros((4, 8), np.float32)
        weight[1, 7] = bad
        with pytest.raises(ValueError, match=r"weight\[1, 7\] is (nan|-inf): expected finite numbers"):
            make(weight)


WITHOUT_VNNI = """
from specdec_core.kernels.skinny_linear import int8_products
assert not int8_products.VNNI
"""
WITH_BYTES = """
from llvmlite import ir
from specdec_core.kernels.skinny_linear import int8_products

def add_products(builder, sums, weights, values):
    for lane in range(4):
        shift = ir.Constant(int8_products.INTEGERS, [8 * (3 - lane)] * int8_products.LANES)
        last = ir.Constant(int8_products.INTEGERS, [24] * int8_products.LANES)
        factors = [builder.lshr(builder.shl(weights, shift), last), builder.ashr(builder.shl(values, shift), last)]
        sums = builder.add(sums, builder.mul(*factors))
    return sums

int8_products.VNNI, int8_products.VALUE_BYTES, int8_products.add_products = True, 1, add_products
"""
PRODUCTS = """
import sys
import numpy as np
from specdec_core.kernels.skinny_linear.int8 import QuantizedLinear
given = np.load(sys.argv[1])
linears = [QuantizedLinear(given[name], threads=1) for name in ("broken", "whole")]
found = {}
for name, linear in zip(("broken", "whole"), linears):
    for rows in (1, 2, 3, 4, 7, 17):
        found[f"{name}{rows}"] = linear(given["x_" + name][:rows].copy())
np.savez(sys.argv[2], **found)
"""


def without_vnni() -> str:
    """Features of this CPU but for the instruction."""
    return ",".join(f"+{name}" for name in sorted(features()) if "vnni" not in name)


def same_bits(before: str, folder, **environment: str) -> None:
    """Products computed elsewhere, by a process that begins with `before`, have the bits that they have here."""
    weights = {"broken": random(19, 90, 70), "whole": random(20, 128, 128)}
    signs = np.sign(random(21, 17, 128))
    rows = {"x_broken": random(22, 17, 70), "x_whole": np.where(np.arange(17)[:, None] < 8, signs, random(23, 17, 128))}
    weights["whole"][:8] = signs[:8]
    np.savez(folder / "given.npz", **weights, **rows)
    command = [sys.executable, "-c", before + PRODUCTS, str(folder / "given.npz"), str(folder / "found.npz")]
    subprocess.run(command, env=os.environ | environment | {"SPECDEC_CACHE": str(folder)}, check=True, timeout=400)
    with np.load(folder / "found.npz") as found:
        assert len(found.files) == 12
        for name in found.files:
            kind, count = name.rstrip("0123456789"), int(name.lstrip("abcdefghijklmnopqrstuvwxyz"))
            expected = QuantizedLinear(weights[kind], threads=1)(rows[f"x_{kind}"][:count].copy())
            np.testing.assert_array_equal(found[name], expected)


@pytest.mark.skipif(sys.platform == "darwin" or os.uname().machine != "x86_64", reason="ARM has none of these")
@pytest.mark.parametrize("kind", ["this CPU without VNNI", "AVX2", "SSE", "none"])
def test_a_cpu_without_the_instruction_gets_the_same_bits(kind, tmp_path):
    """Pairs of 16 bits by every instruction set, and by none. The features that fuse must be the same: a multiply-add
    in two roundings has other last bits."""
    chosen = {
        "this CPU without VNNI": without_vnni(),
        "AVX2": "+sse2,+ssse3,+sse4.1,+avx,+avx2",
        "SSE": "+sse2,+ssse3,+sse4.1",
        "none": "+sse,-sse4.1",
    }[kind]
    if kind != "this CPU without VNNI":
        chosen += ",+fma" * FUSES
    same_bits(WITHOUT_VNNI, tmp_path, NUMBA_CPU_NAME="x86-64", NUMBA_CPU_FEATURES=chosen)


def test_rows_of_bytes_give_the_same_bits(tmp_path):
    """The layout for VNNI on any CPU, its one instruction written out."""
    same_bits(WITH_BYTES, tmp_path)
