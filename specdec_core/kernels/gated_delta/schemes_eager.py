"""The first of the competing schemes: torch operations, token by token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from specdec_core.kernels.gated_delta import DeltaInputs
from specdec_core.kernels.gated_delta.ancestry import Rows, index
from specdec_core.kernels.gated_delta.numba import check_compiled, goal_of
from specdec_core.kernels.gated_delta.schemes_plan import ReplayInputs, alike, copy_rows, nodes_of_rows, schedule
from specdec_core.kernels.gated_delta.traffic import Traffic, size
from specdec_core.topology import Forest


class EagerSequential:
    """Torch operations token by token, on torch's own threads; rows of one shape go together."""

    def verify(
        self, state: torch.Tensor, inputs: DeltaInputs, forest: Forest, *, threads: int | None = None,
        traffic: Traffic | None = None,
    ) -> tuple[torch.Tensor, ReplayInputs]:  # fmt: skip
        """As `Scheme.verify`."""
        check_compiled(state, inputs, forest)
        traffic = traffic or Traffic()
        outputs, most = torch.empty_like(inputs.v, dtype=torch.float32), 0
        for rows in alike(forest.trees):
            shape = forest.trees[rows[0]]
            sources, goals, count = schedule(shape)
            start = _taken(state, index(rows, state.device), traffic)
            slots = [torch.empty_like(start) for _ in range(count)]
            most = max(most, size(*slots))
            for node in range(len(shape)):
                own = torch.from_numpy(forest.offsets[rows] + node)
                source = start if sources[node] < 0 else slots[sources[node]]
                k, q = inputs.k[own].float(), inputs.q[own].float()
                seen, u = _eager_step(source, slots[goals[node]], torch.stack([k, q], 2), inputs, own, traffic)
                outputs[own] = seen[:, :, 1] + (q * k).sum(-1, keepdim=True) * u
        window = ReplayInputs(inputs, forest)
        window.count(traffic)
        traffic.working += most
        return outputs.to(inputs.v.dtype), window

    def commit(
        self, state: torch.Tensor, pending: ReplayInputs, paths: Sequence[np.ndarray], *,
        into: torch.Tensor | None = None, threads: int | None = None, traffic: Traffic | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """As `Scheme.commit`."""
        nodes = nodes_of_rows(state, pending, paths)
        traffic = traffic or Traffic()
        kept = goal_of(state, into)
        for rows in alike([len(each) for each in nodes]):
            path = np.stack([nodes[row] for row in rows])
            if path.shape[1] == 0:
                copy_rows(state, kept, rows, traffic)
                continue
            which = index(rows, state.device)
            source = _taken(state, which, traffic)
            goal = kept[which] if isinstance(which, slice) else torch.empty_like(source)
            for own in torch.from_numpy(path.T.copy()):
                _eager_step(source, goal, pending.inputs.k[own].float()[:, :, None], pending.inputs, own, traffic)
                source = goal
            if not isinstance(which, slice):
                kept[which] = goal
                traffic.read += size(goal)
                traffic.written += size(goal)
        return kept


def _taken(state: torch.Tensor, rows: Rows, traffic: Traffic) -> torch.Tensor:
    """The states of these rows: a copy unless they are consecutive."""
    if not isinstance(rows, slice):
        traffic.read += size(state[:1]) * len(rows)
        traffic.written += size(state[:1]) * len(rows)
    return state[rows]


def _eager_step(
    source: torch.Tensor, goal: torch.Tensor, readers: torch.Tensor, inputs: DeltaInputs, nodes: torch.Tensor,
    traffic: Traffic,
) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
    """goal = the states `[R, H, K, V]` after these flat nodes `[R]`; what readers (k first) see of S′, and u.

    Three operations that each pass over the states.
    """
    k, v, beta = readers[:, :, 0], inputs.v[nodes].float(), inputs.beta[nodes][..., None]
    gate = inputs.log_decay[nodes].exp()[..., None, None]
    seen = gate * (readers @ source)
    u = beta * (v - seen[:, :, 0])
    torch.mul(source, gate, out=goal)
    goal.addcmul_(k[..., None], u[:, :, None])
    traffic.read += 3 * size(source)
    traffic.written += 2 * size(source)
    return seen, u
