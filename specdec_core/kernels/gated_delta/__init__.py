"""The gated delta rule on chains and trees: verify a draft, commit a path, in several forms under one signature.

A head remembers a matrix S `[K, V]`. A node t with parent p does, with every state read as of its own branch,

    S′ = e^{g_t} S_p,   u_t = β_t (v_t − S′ᵀ k_t),   S_t = S′ + k_t u_tᵀ,   o_t = S_tᵀ q_t

(Yang, Kautz and Hatamizadeh, Gated Delta Networks, 2024: the decay comes before the prediction, the output reads the
updated state). Two things about it make drafts cheap. First, all nodes of a tree can be worked out together from the
state before the window (torch.py has the closed form). Second, u_t depends on nothing but t's own ancestors, so what a
window does to the state is a sum of outer products along the accepted path: nothing needs to be kept of a window but
those factors, never a state a node.

Forms: reference.py (sequential, float64, a state a node), torch.py (closed form, any device), numba.py (compiled for
the CPU, one read and one write of the state a round). What they compete with is in schemes.py. The other members of the
family, with their own inputs and the same factors, are in family.py; the convolution that precedes q, k and v is in
short_convolution.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np

from specdec_core.arrays import Array
from specdec_core.topology import Forest


class Inputs(Protocol):
    """What the flat nodes of a forest bring to a recurrence: a dataclass of arrays whose axes `LAYOUT` names.

    Axes are N (flat nodes, rows one after another), H, K and V; `LAYOUT` allows more than one layout where an array
    may have them. Names in `GATES` are in the dtype of the state, all others in one dtype of their own.
    """

    LAYOUT: ClassVar[Mapping[str, tuple[str, ...]]]


GATES = ("log_decay", "beta")


@dataclass(frozen=True)
class DeltaInputs:
    """Inputs of the gated delta rule.

    q, k       `[N, H, K]`. The caller has normalised both and scaled q by K^−½, if its model does so.
    v          `[N, H, V]`.
    log_decay  `[N, H]`: g ≤ 0; 0 forgets nothing, −inf forgets all. Or `[N, H, K]`, a gate a key channel: the delta
               rule of Kimi Delta Attention.
    beta       `[N, H]`: how far the value at k is moved to v; 0…1, or 0…2 where eigenvalues may be negative.
    """

    LAYOUT: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "q": ("NHK",), "k": ("NHK",), "v": ("NHV",), "log_decay": ("NH", "NHK"), "beta": ("NH",),
    }  # fmt: skip

    q: Array
    k: Array
    v: Array
    log_decay: Array
    beta: Array


@dataclass(frozen=True)
class Factors:
    """What commit needs of a verified window. Node i of a path adds Σ_r keys_ir values_irᵀ, decayed by what follows it.

    keys       `[N, H, r, K]`: r outer products a node; 1 but for the rule with two (family.LowRankInputs).
    values     `[N, H, r, V]`, in the state's dtype: for the delta rule u, not v.
    log_decay  `[N, H]` or `[N, H, K]`: each node's own, not the sum from the root. What is wanted is the decay between
               two nodes; after one huge gate a difference of sums has lost it, and after −inf it is not a number.

    Arrays of the inputs are kept as they are, not copied: do not overwrite them before the commit.
    """

    keys: Array
    values: Array
    log_decay: Array
    forest: Forest


class GatedDelta(Protocol):
    """The operation; the forms are modules with these functions. States are `[B, H, K, V]`, contiguous, float32 or 64.

    `pending` is whatever a form's own verify returned: the compact `Factors`, or more (the reference keeps states).
    Errors are ValueError: shapes, dtypes or devices that do not go together, a log decay that is positive or NaN, a
    path that does not lead from the root to a node of its row's tree.
    """

    def verify(self, state: Array, inputs: Inputs, forest: Forest) -> tuple[Array, Any]:
        """Outputs `[N, H, V]` of every node, in the dtype of v, and what commit needs. The state is left as it is."""

    def commit(self, state: Array, pending: Any, paths: Sequence[np.ndarray]) -> Array:
        """The state after each row's path (node indices from the root; empty: the row's state, bit for bit).

        `state` is the one that was verified; what comes back is new memory.
        """

    def commit_then_verify(
        self, state: Array, pending: Any, paths: Sequence[np.ndarray], inputs: Inputs, forest: Forest
    ) -> tuple[Array, Array, Any]:
        """Commit of the last window and verify of the next in one: the state is read and written once a round.

        Returns the committed state, then what verify returns: the same numbers as one after the other.
        """
