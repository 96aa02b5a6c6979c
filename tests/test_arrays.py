import numpy as np
import pytest
import torch

from specdec_core.arrays import host


def test_numpy_is_on_the_host_already():
    values = np.arange(3.0)
    assert host(values) is values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.int8, torch.bool])
def test_what_numpy_knows_keeps_its_dtype(dtype):
    values = torch.tensor([0, 1, 1], dtype=dtype)
    assert torch.equal(torch.from_numpy(host(values)), values)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_becomes_float32_unchanged(dtype):
    values = torch.tensor([1 / 3, -2.5], dtype=dtype)
    assert host(values).dtype == np.float32 and host(values).tolist() == values.float().tolist()


def test_a_graph_is_left_behind():
    assert host(torch.ones(2, requires_grad=True)).tolist() == [1, 1]
