"""Rotary position tables (Su et al. 2021), computed in float64 and rounded once."""

from __future__ import annotations

import numpy as np


def rotary_tables(positions: int, head_dim: int, theta: float) -> tuple[np.ndarray, np.ndarray]:
    """Cosine and sine of position × frequency, `[positions, head_dim / 2]` float64; halves rotate (x1, x2)."""
    frequencies = theta ** (-np.arange(0, head_dim, 2, dtype=np.float64) / head_dim)
    angles = np.arange(positions, dtype=np.float64)[:, None] * frequencies
    return np.cos(angles), np.sin(angles)
