"""One pass of a Gated DeltaNet decoder, pure or with layers of attention: embedding to logits, under one signature.

A layer is a norm, a mixer, a residual, a norm, a gated MLP, a residual. In a recurrent layer the mixer is

    q, k, v ← the short convolution of their projections, then q and k of unit length, q over √K
    g = −e^A softplus(a + bias),  β = σ(b), doubled where eigenvalues may be negative
    o ← the gated delta rule (kernels.gated_delta),  mixed = W_o (norm of each head of o ⊙ SiLU(gate))

with a, b and gate projections of the same input (Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024).
"""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from specdec_core.arrays import Array
from specdec_core.kernels.gated_delta import DeltaInputs
from specdec_core.kernels.llama_step import KeyValueCache, LlamaShape
from specdec_core.kernels.plan import StepPlan


class GdnShape(LlamaShape, Protocol):
    """Sizes and constants of a Gated DeltaNet decoder (models.gdn_config.GdnConfig is one, and says what they are)."""

    @property
    def attention_layers(self) -> tuple[int, ...]: ...
    @property
    def linear_heads(self) -> int: ...
    @property
    def linear_value_heads(self) -> int: ...
    @property
    def linear_key_dim(self) -> int: ...
    @property
    def linear_value_dim(self) -> int: ...
    @property
    def conv_channels(self) -> int: ...
    @property
    def conv_width(self) -> int: ...
    @property
    def negative_eigenvalues(self) -> bool: ...


class GdnCache(KeyValueCache, Protocol):
    """What one pass reads and leaves behind (state.recurrent.Window is one).

    `keys` and `values` have one entry an attention layer; `layer` counts the recurrent layers alone. Both methods keep
    what a commit of any node will need, and change nothing that is committed.
    """

    def convolve(self, layer: int, inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """The short convolution `[N, C]` of the nodes' inputs `[N, C]` with taps `[C, W]`, then SiLU."""

    def recur(self, layer: int, inputs: DeltaInputs) -> torch.Tensor:
        """Outputs `[N, H, V]` of the gated delta rule."""


class GdnStep(Protocol):
    """The operation; arguments and results as `LlamaStep`, but for the cache."""

    def __call__(
        self,
        plan: StepPlan,
        cache: GdnCache,
        *,
        layers: int,
        scored: np.ndarray | None,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[Array | None, Array | None]: ...
