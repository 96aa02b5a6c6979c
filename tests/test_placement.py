import pytest
import torch

from specdec_core import placement
from specdec_core.placement import DTYPES, Placement, PlacementError, best_device, default_engine, physical_threads


def test_default_runs_everywhere():
    where = Placement()
    assert (where.torch_device, where.torch_dtype) == (torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_engine_takes_every_dtype_on_the_cpu(dtype):
    assert str(Placement(dtype=dtype).torch_dtype) == f"torch.{dtype}"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"engine": "jax"}, "engine 'jax': expected one of numba, torch"),
        ({"dtype": "int4"}, "dtype 'int4': expected one of float64, float32, bfloat16, float16, int8"),
        ({"dtype": "int8"}, "torch has no int8 weights: expected one of float64, .*float16, or the numba engine"),
        ({"device": "tpu"}, "device 'tpu': expected cpu"),
        ({"threads": 0}, "threads 0: expected at least 1"),
        ({"engine": "numba", "dtype": "float64"}, "numba runs float32 or int8 on the cpu, not float64 on cpu"),
    ],
)
def test_errors_name_what_was_given_and_what_was_expected(given, message):
    with pytest.raises(PlacementError, match=message):
        Placement(**given)


def test_int8_weights_are_the_numba_engines_and_leave_caches_in_float32():
    where = Placement("numba", dtype="int8")
    assert (where.dtype, where.torch_dtype, where.workers) == ("int8", torch.float32, physical_threads())


@pytest.mark.parametrize(
    ("device", "dtype", "engine"),
    [("cpu", "float32", "numba"), ("cpu", "int8", "numba"), ("cpu", "float64", "torch"), ("cuda", "float32", "torch")],
)
def test_the_compiled_engine_is_taken_where_it_can_run(device, dtype, engine):
    assert default_engine(device, dtype) == engine


@pytest.mark.parametrize(("device", "what"), [("cuda", "CUDA"), ("cuda:0", "CUDA"), ("mps", "Metal")])
def test_an_absent_device_is_refused_with_the_way_out(monkeypatch, device, what):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: False)
    with pytest.raises(PlacementError, match=f"no {what} device; use cpu"):
        Placement(device=device)


def test_metal_has_no_float64(monkeypatch):
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    with pytest.raises(PlacementError, match="no float64"):
        Placement(device="mps", dtype="float64")


@pytest.mark.parametrize(
    ("cuda", "mps", "best"), [(True, False, "cuda"), (True, True, "cuda"), (False, True, "mps"), (False, False, "cpu")]
)
def test_best_device_prefers_cuda_then_metal(monkeypatch, cuda, mps, best):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: cuda)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: mps)
    assert best_device() == best


def test_workers_are_the_threads_asked_for_or_all_cores():
    assert Placement(threads=3).workers == 3
    assert Placement().workers == physical_threads() >= 1


def test_waiting_for_the_cpu_is_nothing(monkeypatch):
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: pytest.fail("no CUDA here"))
    placement.synchronise(torch.device("cpu"))
