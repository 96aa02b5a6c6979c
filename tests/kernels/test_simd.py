import numpy as np
import pytest

from specdec_core.kernels.compiled import helper
from specdec_core.kernels.simd import exp, highest, keep_first, load, padded, splat, store, total, transpose


@helper
def exponentials(x, y):
    for i in range(0, x.size, 16):
        store(y, i, exp(load(x, i)))


@helper
def folded(x, count):
    kept = keep_first(load(x, 0), count, splat(np.float32(-1)))
    return total(kept), highest(kept)


@helper
def transposed(source, at, step, goal):
    transpose(source, at, step, goal, 0)


def compute(values: np.ndarray) -> np.ndarray:
    y = np.empty_like(values)
    exponentials(values, y)
    return y


def test_the_exponential_is_within_1_1_units_in_the_last_place():
    x = np.random.default_rng(0).uniform(-87, 88, 160_000).astype(np.float32)
    exact = np.exp(x.astype(np.float64))
    assert (np.abs(compute(x) - exact) <= 1.1 * np.spacing(exact.astype(np.float32))).all()


def test_the_exponential_at_its_ends():
    x = np.array([0, -0.0, -np.inf, -200, np.nan, 200, 1, -87.4] * 2, np.float32)
    y = compute(x)[:8]
    assert y[0] == y[1] == 1 and y[2] == y[3] == y[7] == 0 and np.isnan(y[4])
    assert np.isfinite(y[5]) and y[5] > 1e38


@pytest.mark.parametrize("count", [1, 5, 16, 40])
def test_lanes_are_folded_by_halves(count):
    x = np.random.default_rng(1).standard_normal(16, np.float32)
    kept = np.where(np.arange(16) < count, x, np.float32(-1))
    expected = kept
    while len(expected) > 1:
        expected = expected[: len(expected) // 2] + expected[len(expected) // 2 :]
    assert folded(x, count) == (expected[0], kept.max())


def test_a_block_is_transposed():
    source, goal = np.arange(400, dtype=np.float32), np.zeros(256, np.float32)
    transposed(source, 7, 20, goal)
    np.testing.assert_array_equal(goal.reshape(16, 16), source[7 : 7 + 320].reshape(16, 20)[:, :16].T)


def test_padding():
    assert [padded(n) for n in (0, 1, 16, 17)] == [0, 16, 16, 32]
