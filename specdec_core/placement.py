"""Where and how numbers are computed: one policy object for engine, device, dtype and threads."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

ENGINES = ("numba", "torch")
DTYPES = {"float64": torch.float64, "float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
"""Dtypes of the torch engine."""
INT8 = "int8"
COMPILED = ("float32", INT8)
"""Dtypes of the numba engine."""


class PlacementError(ValueError):
    """The engine, device and dtype do not go together, or the device is absent."""


def physical_threads() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def best_device() -> str:
    """cuda, else mps, else cpu: the first that is there."""
    if torch.cuda.is_available():
        return "cuda"
    return "mps" if torch.backends.mps.is_available() else "cpu"


def synchronise(device: torch.device) -> None:
    """Wait for a device's queue; the CPU has none."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


@dataclass(frozen=True)
class Placement:
    """Engine (numba: compiled CPU kernels, bit-identical at any width; torch: any device), device, dtype and threads.

    dtype int8 quantizes a target's weights, and the inputs of its products as it goes; the numba engine alone has it.
    `threads` counts CPU workers of the numba engine; None means every core this process may use.
    """

    engine: str = "torch"
    device: str = "cpu"
    dtype: str = "float32"
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.engine not in ENGINES:
            raise PlacementError(f"engine {self.engine!r}: expected one of {', '.join(ENGINES)}")
        if self.dtype not in (*DTYPES, INT8):
            raise PlacementError(f"dtype {self.dtype!r}: expected one of {', '.join((*DTYPES, INT8))}")
        kind = self.device.split(":")[0]
        if kind not in ("cpu", "cuda", "mps"):
            raise PlacementError(f"device {self.device!r}: expected cpu, cuda, cuda:N or mps")
        if kind == "cuda" and not torch.cuda.is_available():
            raise PlacementError("device cuda: this machine has no CUDA device; use cpu")
        if kind == "mps" and not torch.backends.mps.is_available():
            raise PlacementError("device mps: this machine has no Metal device; use cpu")
        if self.engine == "numba" and (kind != "cpu" or self.dtype not in COMPILED):
            raise PlacementError(
                f"engine numba runs {' or '.join(COMPILED)} on the cpu, not {self.dtype} on {self.device}: use the "
                "torch engine there"
            )
        if self.engine == "torch" and self.dtype == INT8:
            raise PlacementError(
                f"engine torch has no int8 weights: expected one of {', '.join(DTYPES)}, or the numba engine on the cpu"
            )
        if kind == "mps" and self.dtype == "float64":
            raise PlacementError("Metal has no float64: use float32 there, or float64 on the cpu")
        if self.threads is not None and self.threads < 1:
            raise PlacementError(f"threads {self.threads}: expected at least 1")

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of caches and features, and of weights that are not int8."""
        return DTYPES.get(self.dtype, torch.float32)

    @property
    def torch_device(self) -> torch.device:
        return torch.device(self.device)

    @property
    def workers(self) -> int:
        return self.threads or physical_threads()


def default_engine(device: str, dtype: str) -> str:
    """numba where it can run (float32 and int8 on the CPU), else torch."""
    return "numba" if device == "cpu" and dtype in COMPILED else "torch"
