"""A dense product of few rows, `y = x · Wᵀ`, in two forms under one signature."""

from __future__ import annotations

from typing import Protocol

from specdec_core.arrays import Array


class SkinnyLinear(Protocol):
    """The operation, made once from a weight matrix `[out, in]`, called with rows `[n, in]`, n ≥ 1 → `[n, out]`."""

    def __call__(self, x: Array) -> Array: ...
