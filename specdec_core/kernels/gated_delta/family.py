"""The rest of the family: recurrences that commit by the same factors, in closed form and sequentially.

    inputs          gate       recurrence (output o_t = S_tᵀ q_t)                members
    AdditiveInputs  [N, H]     S_t = e^g S_p + k vᵀ                              retention (one g a head), Mamba-2
    AdditiveInputs  [N, H, K]  S_t = Diag(e^g) S_p + k vᵀ                        gated linear attention
    DeltaInputs     [N, H]     S′ = e^g S_p, S_t = S′ + β k (v − S′ᵀk)ᵀ          gated DeltaNet
    DeltaInputs     [N, H, K]  S′ = Diag(e^g) S_p, otherwise the same            Kimi delta attention
    LowRankInputs   either     S_t = Diag(e^g) S_p + b (S_pᵀ a)ᵀ + k vᵀ          RWKV-7, diagonal plus low rank

Mamba-2 calls them C = q, B = k and v = Δ·x with g = Δ·A. RWKV-7 has a = −κ̂ and b = κ̂ ⊙ (its in-context rate): a reads
the parent's state *before* the decay, where the delta rule's k reads it after. What a model adds to o outside the state
(a skip connection, RWKV's bonus for the present token) is the model's. One verify for all of them; commit is the one
of torch.py, or for snapshots the one of reference.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from specdec_core.arrays import Array
from specdec_core.kernels.gated_delta import DeltaInputs, Factors, Inputs, reference
from specdec_core.kernels.gated_delta import torch as closed
from specdec_core.kernels.gated_delta.ancestry import Batch, batches
from specdec_core.kernels.gated_delta.checks import check_inputs, require_tensor
from specdec_core.topology import Forest

commit = closed.commit


@dataclass(frozen=True)
class AdditiveInputs:
    """q, k `[N, H, K]`, v `[N, H, V]`, log decay ≤ 0 `[N, H]` or `[N, H, K]`: nothing stored is ever corrected."""

    LAYOUT: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "q": ("NHK",), "k": ("NHK",), "v": ("NHV",), "log_decay": ("NH", "NHK"),
    }  # fmt: skip

    q: Array
    k: Array
    v: Array
    log_decay: Array


@dataclass(frozen=True)
class LowRankInputs:
    """q, k, a, b `[N, H, K]`, v `[N, H, V]`, log decay ≤ 0 `[N, H]` or `[N, H, K]`.

    The transition Diag(e^g) + b aᵀ is the caller's: whether it makes states grow is not checked.
    """

    LAYOUT: ClassVar[Mapping[str, tuple[str, ...]]] = {
        "q": ("NHK",), "k": ("NHK",), "v": ("NHV",), "log_decay": ("NH", "NHK"), "a": ("NHK",), "b": ("NHK",),
    }  # fmt: skip

    q: Array
    k: Array
    v: Array
    log_decay: Array
    a: Array
    b: Array


def verify(state: torch.Tensor, inputs: Inputs, forest: Forest) -> tuple[torch.Tensor, Factors]:
    """As `GatedDelta.verify`, for any inputs of the family, in closed form."""
    if isinstance(inputs, DeltaInputs):
        return closed.verify(state, inputs, forest)
    if isinstance(inputs, AdditiveInputs):
        return _verify_additive(state, inputs, forest)
    if isinstance(inputs, LowRankInputs):
        return _verify_low_rank(state, inputs, forest)
    raise _unknown(inputs)


def commit_then_verify(
    state: torch.Tensor, pending: Factors, paths: Sequence[np.ndarray], inputs: Inputs, forest: Forest
) -> tuple[torch.Tensor, torch.Tensor, Factors]:
    """As `GatedDelta.commit_then_verify`, for any inputs of the family."""
    kept = commit(state, pending, paths)
    return kept, *verify(kept, inputs, forest)


def verify_sequentially(state: Array, inputs: Inputs, forest: Forest) -> tuple[np.ndarray, reference.Snapshots]:
    """As reference.verify, for any inputs of the family."""
    if type(inputs) not in _STEPS:
        raise _unknown(inputs)
    return reference.walk(state, inputs, forest, _STEPS[type(inputs)])


def _unknown(inputs: object) -> ValueError:
    return ValueError(f"inputs are {type(inputs).__name__}: expected DeltaInputs, AdditiveInputs or LowRankInputs")


def _verify_additive(state: torch.Tensor, inputs: AdditiveInputs, forest: Forest) -> tuple[torch.Tensor, Factors]:
    """O = (e^G ⊙ Q) S₀ + (M ⊙ D ⊙ Q Kᵀ) V. There is no system to solve: L = 0 and u = v."""
    require_tensor(state)
    check_inputs(state, inputs, forest)
    outputs = torch.empty_like(inputs.v)
    for batch in batches(forest, state.device):
        q, k, v = (batch.take(each).to(state.dtype) for each in (inputs.q, inputs.k, inputs.v))
        between, before = closed.decays(batch.take(inputs.log_decay), batch)
        seen = (before * q) @ state[batch.rows]
        closed.put(outputs, batch, seen + closed.pairwise(q, k, between) @ v)
    values = inputs.v.to(state.dtype)
    return outputs, Factors(inputs.k[:, :, None], values[:, :, None], inputs.log_decay, forest)


def _verify_low_rank(state: torch.Tensor, inputs: LowRankInputs, forest: Forest) -> tuple[torch.Tensor, Factors]:
    """With y_t = S_{p(t)}ᵀ a_t, D′[t, i] = D[p(t), i] and G′_t = G_{p(t)}:

    (I − D′ ⊙ A Bᵀ) Y = (e^{G′} ⊙ A) S₀ + (D′ ⊙ A Kᵀ) V
    O = (e^G ⊙ Q) S₀ + (M ⊙ D ⊙ Q Bᵀ) Y + (M ⊙ D ⊙ Q Kᵀ) V

    A node leaves two outer products, b yᵀ and k vᵀ.
    """
    require_tensor(state)
    check_inputs(state, inputs, forest)
    outputs = torch.empty_like(inputs.v)
    read = torch.empty(inputs.v.shape, dtype=state.dtype, device=state.device)
    for batch in batches(forest, state.device):
        nodes = batch.shape[1]
        arrays = (inputs.q, inputs.k, inputs.v, inputs.a, inputs.b)
        q, k, v, a, b = (batch.take(each).to(state.dtype) for each in arrays)
        between, before = closed.decays(batch.take(inputs.log_decay), batch)
        parents_between, parents_before = _of_parents(between, before, batch)
        seen = torch.cat([parents_before * a, before * q], dim=2) @ state[batch.rows]
        y = torch.linalg.solve_triangular(
            -closed.pairwise(a, b, parents_between),
            seen[:, :, :nodes] + closed.pairwise(a, k, parents_between) @ v,
            upper=False,
            unitriangular=True,
        )
        out = seen[:, :, nodes:] + closed.pairwise(q, b, between) @ y + closed.pairwise(q, k, between) @ v
        closed.put(read, batch, y)
        closed.put(outputs, batch, out)
    keys, values = torch.stack([inputs.b, inputs.k], dim=2), torch.stack([read, inputs.v.to(state.dtype)], dim=2)
    return outputs, Factors(keys, values, inputs.log_decay, forest)


def _of_parents(between: torch.Tensor, before: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """What `closed.decays` says of each node's parent. A root's is the state: it sees no node and has not decayed."""
    between = torch.cat([between, torch.zeros_like(between[:, :, :1])], dim=2)
    before = torch.cat([before, torch.ones_like(before[:, :, :1])], dim=2)
    parents = batch.parents[:, None, :, None].expand(*before.shape[:2], -1, before.shape[-1])
    wide = parents.unsqueeze(3).expand(-1, -1, -1, between.shape[3], -1)
    return between.gather(2, wide), before.gather(2, parents)


def _additive_step(state: np.ndarray, node: Mapping[str, np.ndarray]) -> np.ndarray:
    return reference.decay(state, node["log_decay"]) + np.outer(node["k"], node["v"])


def _low_rank_step(state: np.ndarray, node: Mapping[str, np.ndarray]) -> np.ndarray:
    read = state.T @ node["a"]
    return reference.decay(state, node["log_decay"]) + np.outer(node["b"], read) + np.outer(node["k"], node["v"])


_STEPS: Mapping[type, reference.Step] = {
    DeltaInputs: reference.delta_step,
    AdditiveInputs: _additive_step,
    LowRankInputs: _low_rank_step,
}
