"""A coarser copy of a model: the matrices of its layers in few bits. A cheap drafter that is nearly the target."""

from __future__ import annotations

from dataclasses import replace
from types import MappingProxyType

import torch

from specdec_core.models.checkpoints import Checkpoint, fingerprint


def rounded(checkpoint: Checkpoint, bits: int, group: int = 32) -> Checkpoint:
    """The checkpoint with every matrix of its layers rounded to `bits` bits; embedding, head and norms as they are.

    Round to nearest, symmetric, one scale for `group` neighbouring inputs of an output: values w become
    s·round(w/s) with s = max|w| / (2^(bits−1) − 1). ValueError if bits or group are out of range, or if a matrix's
    inputs do not divide into groups.
    """
    if not 2 <= bits <= 8:
        raise ValueError(f"bits {bits}: expected 2…8")
    weights = {}
    for name, tensor in checkpoint.weights.items():
        is_layer_matrix = tensor.ndim == 2 and name.startswith("model.layers.")
        weights[name] = _round(name, tensor, bits, group) if is_layer_matrix else tensor
    name = f"{checkpoint.name} in {bits} bits"
    return replace(
        checkpoint, name=name, weights=MappingProxyType(weights), folder=None, fingerprint=fingerprint(weights)
    )


def _round(name: str, weight: torch.Tensor, bits: int, group: int) -> torch.Tensor:
    outputs, inputs = weight.shape
    if group < 1 or inputs % group:
        raise ValueError(f"group {group}: expected a divisor of the {inputs} inputs of {name}")
    values = weight.reshape(outputs, inputs // group, group)
    scale = values.abs().amax(dim=-1, keepdim=True) / (2 ** (bits - 1) - 1)
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))  # a group of zeros stays as it is
    return (scale * torch.round(values / scale)).reshape(outputs, inputs)
