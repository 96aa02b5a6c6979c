"""One step of an EAGLE-style drafter: a decoder layer that continues its target's hidden states, in two forms.

The layer reads a token's embedding beside the hidden state of the position before it (Li et al. 2024); hidden states
of several of the target's layers are joined into the first one (Li et al. 2025), and its own output is the next. The
residual stream is that hidden state and, through a matrix, the embedding: keys and values of few heads are too narrow a
way for the token itself.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from specdec_core.arrays import Array
from specdec_core.kernels.llama_step import KeyValueCache
from specdec_core.kernels.plan import StepPlan


class EagleShape(Protocol):
    """Sizes and constants of a drafter's layer (models.eagle_checkpoint.EagleConfig is one): H, F and D among them."""

    @property
    def hidden_size(self) -> int: ...
    @property
    def intermediate_size(self) -> int: ...
    @property
    def heads(self) -> int: ...
    @property
    def kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...
    @property
    def features(self) -> int: ...
    @property
    def vocabulary(self) -> int: ...
    @property
    def context(self) -> int: ...
    @property
    def rope_theta(self) -> float: ...
    @property
    def norm_eps(self) -> float: ...


class EagleStep(Protocol):
    """The operation. Weights: fc and a layer (`EagleCheckpoint.layer`), and "head.weight" `[D, H]`, the rows of the
    target's head for the tokens that can be drafted.

    A pass may be a later part of a tree: the plan's nodes then go on where an earlier pass of the round ended, and its
    paths lead through the entries which that pass wrote. `plan.tokens` is not read.
    """

    def project(self, features: Array) -> Array:
        """The target's hidden states `[m, F, H]` of m positions, each normed on its own, joined and brought to
        `[m, H]`."""

    def __call__(
        self, plan: StepPlan, cache: KeyValueCache, embedded: Array, hidden: Array, scored: np.ndarray
    ) -> tuple[Array, Array]:
        """Write the nodes' keys and values to their entries of layer 0; logits `[M, D]` and hidden states `[N, H]`.

        embedded  `[N, H]` the nodes' tokens, embedded by the target.
        hidden    `[N, H]` the hidden state before each node: projected features, or what an earlier step returned.
        scored    `[M]` flat nodes whose logits are wanted; none of them is fine, as in a prefill.
        """

    def best_tokens(self, logits: Array, count: int) -> tuple[Array, Array]:
        """The `count` most probable draft tokens of each row of `[M, D]`: ids `[M, count]` int64, descending and the
        lower id first where equal, and their log-probabilities `[M, count]` float64 under softmax over all D.

        Raises FloatingPointError for logits whose law is not defined (NaN, +∞, or no finite one), naming the row.
        """


def take(weights: Mapping[str, Any], name: str, *shape: int) -> Any:
    """A tensor of the drafter's; KeyError if it is absent, ValueError if it has another shape."""
    if name not in weights:
        raise KeyError(
            f"the weights have no tensor {name!r}: expected those of a drafter's file, and 'head.weight', the target's "
            "head for the draft tokens"
        )
    if tuple(weights[name].shape) != shape:
        raise ValueError(f"{name} has shape {tuple(weights[name].shape)}: expected {shape} from the drafter's config")
    return weights[name]


def require_shape(values: Array, name: str, shape: tuple[int, ...], axes: str) -> None:
    """Raise unless an input has this shape; `axes` says what its axes are."""
    if tuple(values.shape) != shape:
        raise ValueError(f"{name} of shape {tuple(values.shape)}: expected {shape}, {axes}")


def require_count(count: int, vocabulary: int) -> None:
    """Raise unless so many tokens can be drafted."""
    if not 1 <= count <= vocabulary:
        raise ValueError(f"the {count} most probable tokens: expected 1…{vocabulary}, the draft vocabulary")


def no_law(row: int, rows: int) -> FloatingPointError:
    """The error for logits without a law."""
    return FloatingPointError(
        f"the draft logits of row {row} of {rows} hold NaN or +∞, or nothing finite, so no token is the most probable: "
        "look for overflow in the drafter's weights or in the target's hidden states"
    )
