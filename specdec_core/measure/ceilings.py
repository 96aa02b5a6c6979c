"""What the machine can do at best: bytes read and floating-point operations a second, measured beside the rest.

Decoding cannot be faster than its weight bytes over the read bandwidth, nor than its operations over the peak.
"""

from __future__ import annotations

import torch

from specdec_core.measure.clock import Arm

READ_BYTES = 1 << 28
GEMM_SIZE = 1024


def read_arm(device: torch.device) -> Arm:
    """Reads READ_BYTES of float32, far more than any cache holds, once (torch's own sum: vectorised, all threads)."""
    values = torch.ones(READ_BYTES // 4, device=device)
    return lambda: values.sum().item()


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
