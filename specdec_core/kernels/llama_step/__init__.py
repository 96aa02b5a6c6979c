"""One pass of a Llama-family decoder over a ragged cache: embedding to logits, in two forms under one signature."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from specdec_core.arrays import Array
from specdec_core.kernels.plan import StepPlan


class LlamaShape(Protocol):
    """Sizes and constants of a Llama-family decoder (models.checkpoints.LlamaConfig is one)."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def layers(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def norm_eps(self) -> float: ...
    @property
    def tied_head(self) -> bool: ...


class KeyValueCache(Protocol):
    """Storage `[layers, slots, kv_heads, capacity, head_dim]` of keys and values (state.RaggedKV is one)."""

    keys: torch.Tensor
    values: torch.Tensor


class LlamaStep(Protocol):
    """The operation: write the nodes' keys and values to their entries, return what was asked for.

    layers          run the first so many decoder layers (then the final norm and head).
    scored          `[M]` flat nodes whose logits are wanted, or None for none (prefill: no norm, no head).
    feature_layers  decoder layers whose output (the residual stream after the layer) is wanted at every node.

    Returns logits `[M, V]` or None, and features `[N, F, H]` or None.
    """

    def __call__(
        self,
        plan: StepPlan,
        cache: KeyValueCache,
        *,
        layers: int,
        scored: np.ndarray | None,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[Array | None, Array | None]: ...
