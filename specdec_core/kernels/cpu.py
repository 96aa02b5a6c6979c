"""What the compiler may use of this CPU: fused multiply-add, and how many vectors stay in registers."""

from __future__ import annotations

import platform
import warnings
from dataclasses import dataclass
from functools import lru_cache

import llvmlite.binding
import numba


@dataclass(frozen=True)
class Registers:
    """The vector registers of a CPU: how many there are and how many float32 each holds."""

    count: int
    lanes: int


@lru_cache(maxsize=1)
def features() -> frozenset[str]:
    """Names of the instruction sets that numba compiles for (its NUMBA_CPU_FEATURES override respected)."""
    chosen = numba.config.CPU_FEATURES
    if chosen is not None:
        return frozenset(name[1:] for name in chosen.split(",") if name.startswith("+"))
    return frozenset(name for name, present in llvmlite.binding.get_host_cpu_features().items() if present)


def is_arm() -> bool:
    return platform.machine().lower() in ("arm64", "aarch64")


@lru_cache(maxsize=1)
def registers() -> Registers:
    """AVX-512: 32 of 16 lanes; AVX: 16 of 8; NEON: 32 of 4; anything else is taken for SSE: 16 of 4."""
    if is_arm():
        return Registers(32, 4)
    if "avx512f" in features():
        return Registers(32, 16)
    return Registers(16, 8) if "avx" in features() else Registers(16, 4)


@lru_cache(maxsize=1)
def fuses() -> bool:
    """Whether a multiply-add is one instruction. Without it the kernels multiply, round and add: a warning says so.

    `llvm.fma` would then be a library call for every number, tens of times slower. Results stay the same bits at any
    width; only their last bits differ from those of a CPU that fuses.
    """
    present = is_arm() or bool({"fma", "fma4"} & features())
    if not present:
        warnings.warn(
            "this CPU (or NUMBA_CPU_FEATURES) has no fused multiply-add: the kernels multiply and add in two "
            "roundings, which is slower; results differ in their last bits from those of a CPU that fuses",
            RuntimeWarning,
            stacklevel=2,
        )
    return present
