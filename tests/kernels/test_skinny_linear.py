import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.skinny_linear.numba import PackedLinear
from specdec_core.kernels.skinny_linear.panel import PART
from specdec_core.kernels.skinny_linear.torch import TorchLinear

SHAPES = [(1, 1), (16, 16), (17, 5), (97, 48), (50, 70), (40, 257), (640, 33), (2048, 24), (64, 9000)]


def random(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


@pytest.mark.parametrize(("outputs", "inputs"), SHAPES)
@pytest.mark.parametrize("rows", [1, 2, 7, 16, 33])
def test_the_product_is_that_of_float64(outputs, inputs, rows):
    weight, x = random(1, outputs, inputs), random(2, rows, inputs)
    found = PackedLinear(weight, threads=2)(x)
    bound = np.abs(x.astype(np.float64)) @ np.abs(weight.astype(np.float64)).T
    assert found.shape == (rows, outputs) and found.dtype == np.float32 and found.flags.c_contiguous
    assert (np.abs(found - x.astype(np.float64) @ weight.astype(np.float64).T) <= 1e-7 * inputs * bound + 1e-12).all()


@settings(max_examples=30)
@given(st.sampled_from(SHAPES), st.integers(1, 256), st.integers(0, 10**6), st.sampled_from([1, 2, 3, 5]), st.data())
def test_a_row_has_the_same_bits_whatever_is_computed_with_it(shape, rows, seed, threads, data):
    weight, x = random(seed, *shape), random(seed + 1, rows, shape[1])
    first = data.draw(st.integers(0, rows - 1))
    count = data.draw(st.integers(1, rows - first))
    together = PackedLinear(weight, threads=threads)(x)
    np.testing.assert_array_equal(PackedLinear(weight, threads=1)(x[first : first + count].copy()),
                                  together[first : first + count])  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_no_number_of_rows_changes_a_bit(shape):
    """Every width of the micro-kernel, and every way of cutting rows into such widths."""
    weight, x = random(3, *shape), random(4, 40, shape[1])
    linear = PackedLinear(weight, threads=1)
    single = np.concatenate([linear(row[None]) for row in x])
    for rows in range(1, 41):
        np.testing.assert_array_equal(linear(x[:rows].copy()), single[:rows])


@pytest.mark.parametrize("inputs", [40, 64, 65, 150, 192])
def test_every_output_is_a_sum_of_chains_of_fused_multiply_adds(inputs):
    """In float64 a product of two float32 is exact, so one rounding a step is what a fused multiply-add does."""
    weight, x = random(5, 20, inputs), random(6, 3, inputs)
    expected = np.zeros((3, 20), np.float32)
    for part in range(0, inputs, PART):
        chain = np.zeros((3, 20), np.float32)
        for j in range(part, min(part + PART, inputs)):
            chain = (x[:, j, None].astype(np.float64) * weight[:, j].astype(np.float64) + chain).astype(np.float32)
        expected += chain
    np.testing.assert_array_equal(PackedLinear(weight)(x), expected)


def test_the_torch_form_has_the_same_signature():
    weight, x = random(7, 30, 20), random(8, 4, 20)
    found = TorchLinear(torch.from_numpy(weight))(torch.from_numpy(x)).numpy()
    np.testing.assert_allclose(found, PackedLinear(weight)(x), atol=1e-5)


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
        PackedLinear(np.zeros((4, 8), np.float32))(x)


def test_weights_it_cannot_pack_are_refused():
    with pytest.raises(TypeError, match="weight has dtype float16"):
        PackedLinear(np.zeros((4, 8), np.float16))
    with pytest.raises(ValueError, match="weight has shape"):
        PackedLinear(np.zeros((4, 0), np.float32))


WITHOUT_FMA = """
import warnings
import numpy as np
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from specdec_core.kernels.skinny_linear.numba import PackedLinear
said = [str(each.message) for each in caught if "fused" in str(each.message)]
assert len(said) == 1 and "two roundings" in said[0], said
draw = np.random.default_rng(0).standard_normal
weight, x = draw((40, 30), np.float32), draw((9, 30), np.float32)
y = PackedLinear(weight, threads=2)(x)
assert np.allclose(y, x @ weight.T, atol=1e-4)
for row in range(9):
    assert np.array_equal(PackedLinear(weight, threads=1)(x[row : row + 1]), y[row : row + 1])
"""


@pytest.mark.skipif(sys.platform == "darwin" or os.uname().machine != "x86_64", reason="every ARM CPU fuses")
@pytest.mark.parametrize("features", ["+sse2", "+sse2,+avx,+avx2"])
def test_a_cpu_without_fused_multiply_add_is_slower_and_says_so(features, tmp_path):
    environment = {**os.environ, "NUMBA_CPU_NAME": "x86-64", "NUMBA_CPU_FEATURES": features,
                   "SPECDEC_CACHE": str(tmp_path)}  # fmt: skip
    subprocess.run([sys.executable, "-c", WITHOUT_FMA], env=environment, check=True, timeout=300)
