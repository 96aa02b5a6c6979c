"""Arrays that may live on a device: the one place where torch and numpy meet."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any
"""A numpy array on the host or a torch tensor on some device; `host` brings either to numpy."""


def host(values: Array) -> np.ndarray:
    """Values on the CPU as numpy, without a copy where they are there already; bfloat16 and float16 as float32."""
    if isinstance(values, np.ndarray):
        return values
    values = values.detach()
    if values.dtype.itemsize < 4 and values.dtype.is_floating_point:
        values = values.float()
    return values.cpu().numpy()
