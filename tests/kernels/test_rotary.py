import numpy as np
import pytest

from specdec_core.kernels.rotary import rotary_tables


def test_tables_are_the_angles_of_position_times_frequency():
    cosine, sine = rotary_tables(9, 8, 10000.0)
    for position in range(9):
        for pair in range(4):
            turned = np.exp(1j * position * 10000.0 ** (-pair / 4))
            assert (cosine[position, pair], sine[position, pair]) == pytest.approx((turned.real, turned.imag))


def test_tables_are_float64():
    assert {table.dtype for table in rotary_tables(3, 4, 100.0)} == {np.dtype(np.float64)}
