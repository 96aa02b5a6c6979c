"""The gated delta rule on trees in closed form: any device, float32 or float64 sums.

With G_t the log decays summed from the root to t, M the ancestor mask (a node its own ancestor), A without the diagonal
and D[t, i] = e^{G_t − G_i} on M, all nodes of a window come from the state S₀ before it:

    (I + L) U = β ⊙ (V − (e^G ⊙ K) S₀),   L = A ⊙ D ⊙ (β ⊙ K Kᵀ)
    O = (e^G ⊙ Q) S₀ + (M ⊙ D ⊙ Q Kᵀ) U
    S_j = e^{G_j} S₀ + Σ_{i ∈ path(j)} D[j, i] k_i u_iᵀ

It is the chunkwise form of DeltaNet (Yang et al., Parallelizing Linear Transformers with the Delta Rule, 2024) with the
causal mask replaced by the ancestors'. Numerics: D holds products of gates along the path, never e^{G_t} e^{−G_i} nor
differences of sums; the triangular system is solved by forward substitution, which stays accurate for equal keys and
β = 2, where squaring the powers of L does not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec_core.kernels.gated_delta import DeltaInputs, Factors
from specdec_core.kernels.gated_delta.ancestry import Accepted, Batch, accepted, batches
from specdec_core.kernels.gated_delta.checks import (
    check_inputs,
    check_paths,
    check_pending,
    require_tensor,
)
from specdec_core.topology import Forest


def verify(state: torch.Tensor, inputs: DeltaInputs, forest: Forest) -> tuple[torch.Tensor, Factors]:
    """As `GatedDelta.verify`. q, k and v may also be 16-bit floats beside a float32 state; sums are the state's."""
    require_tensor(state)
    check_inputs(state, inputs, forest)
    outputs = torch.empty_like(inputs.v)
    values = torch.empty(inputs.v.shape, dtype=state.dtype, device=state.device)
    for batch in batches(forest, state.device):
        nodes = batch.shape[1]
        q, k, v = (batch.take(each).to(state.dtype) for each in (inputs.q, inputs.k, inputs.v))
        beta = batch.take(inputs.beta)
        between, before = decays(batch.take(inputs.log_decay), batch)
        # One product, so that the state is read once.
        seen = torch.cat([before * k, before * q], dim=2) @ state[batch.rows]
        # Forward substitution reads below the diagonal only, which makes M's decays those of A.
        u = torch.linalg.solve_triangular(
            beta * pairwise(k, k, between), beta * (v - seen[:, :, :nodes]), upper=False, unitriangular=True
        )
        put(values, batch, u)
        put(outputs, batch, seen[:, :, nodes:] + pairwise(q, k, between) @ u)
    return outputs, Factors(inputs.k[:, :, None], values[:, :, None], inputs.log_decay, forest)


def commit(state: torch.Tensor, pending: Factors, paths: Sequence[np.ndarray]) -> torch.Tensor:
    """As `GatedDelta.commit`, for every member of the family."""
    require_tensor(state)
    check_pending(state, pending)
    path = accepted(pending.forest, check_paths(pending.forest, paths), state.device)
    if path is None:
        return state.clone()
    advanced = _advanced(state[path.rows], pending, path)
    if len(advanced) == len(state):
        return advanced
    kept = state.clone()
    kept[path.rows] = advanced
    return kept


def _advanced(state: torch.Tensor, pending: Factors, path: Accepted) -> torch.Tensor:
    """States `[R, H, K, V]` after the rows' paths."""
    real = path.real[:, :, None, None]
    log_decay = pending.log_decay[path.up]
    gates = torch.where(real, log_decay.reshape(*log_decay.shape[:3], -1).exp(), 1.0)  # [R, m, H, 1 or K]
    through = gates.cumprod(1)
    after = torch.cat([torch.ones_like(gates[:, :1]), through[:, :-1]], dim=1) * real
    # A row shorter than the longest repeats its root with weight 0: nothing of a refused node is read.
    keys = pending.keys[path.up].to(state.dtype) * after.unsqueeze(3)
    values = pending.values[path.up]

    def terms(factors: torch.Tensor) -> torch.Tensor:
        """`[R, m, H, r, X]` → `[R·H, m·r, X]`."""
        return factors.transpose(1, 2).flatten(2, 3).flatten(0, 1)

    kept = state * through[:, -1].unsqueeze(-1)
    kept.flatten(0, 1).baddbmm_(terms(keys).mT, terms(values))
    return kept


def commit_then_verify(
    state: torch.Tensor, pending: Factors, paths: Sequence[np.ndarray], inputs: DeltaInputs, forest: Forest
) -> tuple[torch.Tensor, torch.Tensor, Factors]:
    """As `GatedDelta.commit_then_verify`: here simply one after the other."""
    kept = commit(state, pending, paths)
    return kept, *verify(kept, inputs, forest)


def decays(log_decay: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
    """Decays of one batch from its gates `[R, H, n, C]` (C is 1, or K for a gate a key channel).

    Returns D `[R, H, n, n, C]` between nodes (0 where i is no ancestor of t), and e^G `[R, H, n, C]` since the state.
    """
    rows, heads, nodes, channels = log_decay.shape
    gates = torch.cat([log_decay.exp(), torch.ones_like(log_decay[:, :, :1])], dim=2)  # the state's own: 1
    up = batch.up.flatten(1)[:, None, :, None].expand(rows, heads, -1, channels)
    along = gates.gather(2, up).unflatten(2, (nodes, -1))
    products = torch.cat([torch.ones_like(along[:, :, :, :1]), along], dim=3).cumprod(3)
    distance = batch.distance[:, None, :, :, None].expand(rows, heads, nodes, nodes + 1, channels)
    found = torch.where(distance >= 0, products.gather(3, distance.clamp(min=0)), 0.0)
    return found[:, :, :, :nodes], found[:, :, :, nodes]


def pairwise(x: torch.Tensor, y: torch.Tensor, between: torch.Tensor) -> torch.Tensor:
    """Σ_d x_td D_d[t, i] y_id of x, y `[R, H, n, K]`, `[R, H, n, n]`. With a gate a channel it takes n²K numbers."""
    if between.shape[-1] == 1:
        return between[..., 0] * (x @ y.mT)
    return torch.einsum("rhtk,rhtik,rhik->rhti", x, between, y)


def put(flat: torch.Tensor, batch: Batch, values: torch.Tensor) -> None:
    """Write `[R, H, n, X]` to the batch's nodes of flat `[N, H, X]`."""
    flat[batch.nodes] = values.transpose(1, 2).flatten(0, 1).to(flat.dtype)
