"""The short causal convolution of linear-attention layers, on trees: depthwise, width W, then SiLU.

A node looks at itself and its W − 1 nearest ancestors; what lies beyond the root is in the cache. A commit keeps inputs
from *before* the convolution, so it moves numbers and computes none: a row with an empty path keeps its bits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
import torch.nn.functional as F

from specdec_core.kernels.gated_delta.ancestry import steps_up
from specdec_core.kernels.gated_delta.checks import (
    check_paths,
    dtype_name,
    require_alike,
    require_shape,
    require_tensor,
)
from specdec_core.topology import Forest


@dataclass(frozen=True)
class ConvolutionFactors:
    """What commit needs of a window: its inputs `[N, C]` before the convolution, kept as they are, not copied."""

    inputs: torch.Tensor
    forest: Forest


def convolve(
    cache: torch.Tensor, inputs: torch.Tensor, weights: torch.Tensor, forest: Forest, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, ConvolutionFactors]:
    """SiLU(bias + Σ_s weights[:, W − 1 − s] · (input of the s-th ancestor)) of every node, `[N, C]`.

    cache    `[B, C, W − 1]`: the last inputs before the window, the newest last (zeros where a sequence begins).
    inputs   `[N, C]`, flat, in the dtype of the cache.
    weights  `[C, W]`, the present input's tap last; bias `[C]` or None. Both in the dtype of the cache.

    16-bit floats are summed in float32. The cache is left as it is. ValueError for shapes, dtypes or devices that do
    not go together.
    """
    _check(cache, forest)
    sizes = {"B": len(cache), "C": cache.shape[1], "N": int(forest.counts.sum()), "W": cache.shape[2] + 1}
    require_shape("inputs", inputs, ("NC",), sizes)
    if tuple(weights.shape) != (sizes["C"], sizes["W"]):
        raise ValueError(
            f"weights have shape {tuple(weights.shape)}: expected [C, W] = {[sizes['C'], sizes['W']]}, a width of one "
            f"more than the {sizes['W'] - 1} inputs that the cache keeps; make the cache for this layer's width"
        )
    if bias is not None:
        require_shape("bias", bias, ("C",), sizes)
    for name, values in {"inputs": inputs, "weights": weights, "bias": bias}.items():
        if values is not None:
            require_alike(name, values, cache, (dtype_name(cache),))
    sums = torch.promote_types(cache.dtype, torch.float32)
    seen = _buffer(cache, inputs)[_taps(forest, sizes["W"], cache.device)]  # [N, W, C]
    total = (seen.to(sums) * weights.to(sums).T).sum(1)
    if bias is not None:
        total = total + bias.to(sums)
    return F.silu(total).to(cache.dtype), ConvolutionFactors(inputs, forest)


def commit(cache: torch.Tensor, pending: ConvolutionFactors, paths: Sequence[np.ndarray]) -> torch.Tensor:
    """The cache after each row's path (node indices from the root; empty: as it was): new memory, `[B, C, W − 1]`."""
    _check(cache, pending.forest)
    require_alike("pending inputs", pending.inputs, cache, (dtype_name(cache),))
    require_shape("pending inputs", pending.inputs, ("NC",), {"N": len(pending.inputs), "C": cache.shape[1]})
    kept = _kept(pending.forest, check_paths(pending.forest, paths), cache.shape[2], cache.device)
    return _buffer(cache, pending.inputs)[kept].transpose(1, 2).contiguous()


def _check(cache: torch.Tensor, forest: Forest) -> None:
    require_tensor(cache, "cache")
    if cache.ndim != 3 or 0 in cache.shape[:2] or len(cache) != len(forest.trees):
        raise ValueError(
            f"cache has shape {tuple(cache.shape)}: expected [B, C, W − 1] with {len(forest.trees)} rows, one a tree"
        )


def _buffer(cache: torch.Tensor, inputs: torch.Tensor) -> torch.Tensor:
    """All inputs that anything may look at, `[B (W − 1) + N, C]`: each row's cache, then the nodes."""
    return torch.cat([cache.transpose(1, 2).flatten(0, 1), inputs])


@lru_cache(maxsize=64)
def _taps(forest: Forest, width: int, device: torch.device) -> torch.Tensor:
    """Where in the buffer the inputs of each node are, oldest first, `[N, W]`."""
    return torch.from_numpy(_places(forest, width)).to(device)


@lru_cache(maxsize=64)
def _kept(forest: Forest, ends: tuple[int, ...], size: int, device: torch.device) -> torch.Tensor:
    """Where in the buffer the last W − 1 inputs of each row are once it went to its node (−1: none), `[B, W − 1]`."""
    stay = np.arange(len(ends) * size).reshape(len(ends), size)
    places = _places(forest, size + 1)[:, 1:]
    moved = [places[forest.offsets[row] + end] if end >= 0 else stay[row] for row, end in enumerate(ends)]
    return torch.from_numpy(np.stack(moved)).to(device)


def _places(forest: Forest, width: int) -> np.ndarray:
    cached = width - 1
    total = len(forest.trees) * cached
    table = []
    for row, (shape, first) in enumerate(zip(forest.trees, forest.offsets[:-1], strict=True)):
        step = np.arange(width)
        # Beyond the root: 1 step is the cache's last entry, W − 1 steps its first.
        beyond = step - shape.depths[:, None]
        table.append(np.where(beyond > 0, row * cached + cached - beyond, total + first + steps_up(shape, width)))
    return np.concatenate(table)[:, ::-1].copy()
