"""The product by torch, on any device and in any dtype; a row's bits may depend on how many rows there are."""

from __future__ import annotations

import torch


class TorchLinear:
    """`SkinnyLinear` over a torch weight `[out, in]`."""

    def __init__(self, weight: torch.Tensor):
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, self.weight)
