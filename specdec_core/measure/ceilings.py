"""What the machine can do at best: bytes read and floating-point operations a second, measured beside the rest.

Decoding cannot be faster than its weight bytes over the read bandwidth, nor than its operations over the peak.
"""

from __future__ import annotations

import torch

from specdec_core.measure.clock import Arm, once

READ_BYTES = 1 << 28
ROW = 4096
GEMM_SIZE = 1024
TRIALS = 3


def read_arm(device: torch.device) -> Arm:
    """Reads READ_BYTES of float32, far more than any cache holds, once, on all threads.

    By torch's sum or by its product of a matrix and a vector, whichever is faster here: how many streams are read side
    by side decides, and which of the two does it better differs between processors (measured: by a quarter).
    """
    values = torch.ones(READ_BYTES // 4, device=device)
    matrix, vector = values.view(-1, ROW), torch.ones(ROW, device=device)
    ways: list[Arm] = [lambda: values.sum().item(), lambda: (matrix @ vector).sum().item()]
    for way in ways:
        way()
    return min(ways, key=lambda way: min(once(way) for _ in range(TRIALS)))


def gemm_arm(device: torch.device) -> Arm:
    """One float32 product of two square matrices of GEMM_SIZE: 2 · GEMM_SIZE³ operations."""
    a = torch.ones(GEMM_SIZE, GEMM_SIZE, device=device)
    return lambda: (a @ a)[0, 0].item()


def read_bandwidth(seconds: float) -> float:
    """Bytes a second, from the seconds of `read_arm`."""
    return READ_BYTES / seconds


def peak_arithmetic(seconds: float) -> float:
    """Operations a second, from the seconds of `gemm_arm`."""
    return 2 * GEMM_SIZE**3 / seconds
