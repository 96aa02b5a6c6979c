"""What compact factors compete with on an accelerator: torch operations token by token, on any device.

`kernels.gated_delta.schemes_eager` is the same idea on the CPU, row by row of any shape, with its traffic counted. Here
all rows have one shape, as in a timing they do, so that nodes are views and nothing is copied to the device or waited
for: a graph can be made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec_core.kernels.gated_delta import DeltaInputs
from specdec_core.kernels.gated_delta.schemes_plan import schedule
from specdec_core.topology import Forest, Topology


@dataclass(frozen=True)
class Replayed:
    """A window whose path is gone through once more to commit it."""

    inputs: DeltaInputs
    forest: Forest


@dataclass(frozen=True)
class Kept:
    """Every node's state, `[n, B, H, K, V]`."""

    states: torch.Tensor
    forest: Forest


class EagerSequential:
    """As few states as the shape needs, one on a chain; a commit goes through the path again."""

    def verify(self, state: torch.Tensor, inputs: DeltaInputs, forest: Forest) -> tuple[torch.Tensor, Replayed]:
        """As `GatedDelta.verify`, for rows of one shape."""
        shape = _one_shape(forest)
        sources, goals, count = schedule(shape)
        slots = [torch.empty_like(state) for _ in range(count)]
        outputs = torch.empty_like(inputs.v)
        for node in range(len(shape)):
            source = state if sources[node] < 0 else slots[sources[node]]
            _step(source, slots[goals[node]], _rows_of(inputs, shape), node, _by_row(outputs, shape)[:, node])
        return outputs, Replayed(inputs, forest)

    def commit(self, state: torch.Tensor, pending: Replayed, paths: Sequence[np.ndarray]) -> torch.Tensor:
        """As `GatedDelta.commit`, for rows that all keep one path."""
        path, views = _one_path(paths), _rows_of(pending.inputs, _one_shape(pending.forest))
        kept = state.clone() if not len(path) else torch.empty_like(state)
        for place, node in enumerate(path):
            _step(kept if place else state, kept, views, int(node), None)
        return kept


class EagerSnapshots:
    """Every node's state is written to memory, where its children read it; a commit copies one."""

    def verify(self, state: torch.Tensor, inputs: DeltaInputs, forest: Forest) -> tuple[torch.Tensor, Kept]:
        """As `GatedDelta.verify`, for rows of one shape."""
        shape = _one_shape(forest)
        states = torch.empty((len(shape), *state.shape), dtype=state.dtype, device=state.device)
        outputs = torch.empty_like(inputs.v)
        for node, parent in enumerate(shape.parents):
            source = states[parent] if parent >= 0 else state
            _step(source, states[node], _rows_of(inputs, shape), node, _by_row(outputs, shape)[:, node])
        return outputs, Kept(states, forest)

    def commit(self, state: torch.Tensor, pending: Kept, paths: Sequence[np.ndarray]) -> torch.Tensor:
        """As `GatedDelta.commit`, for rows that all keep one path."""
        path = _one_path(paths)
        return pending.states[path[-1]].clone() if len(path) else state.clone()


def _one_shape(forest: Forest) -> Topology:
    if any(each is not forest.trees[0] for each in forest.trees):
        raise ValueError(
            f"{len(set(forest.trees))} shapes among {len(forest.trees)} rows: the eager rivals expect one for all; "
            "kernels.gated_delta.schemes takes any"
        )
    return forest.trees[0]


def _one_path(paths: Sequence[np.ndarray]) -> np.ndarray:
    if any(not np.array_equal(each, paths[0]) for each in paths):
        raise ValueError("paths differ among the rows: the eager rivals expect one for all")
    return paths[0]


def _by_row(flat: torch.Tensor, shape: Topology) -> torch.Tensor:
    """Flat `[N, …]` → `[B, n, …]`."""
    return flat.unflatten(0, (-1, len(shape)))


def _rows_of(inputs: DeltaInputs, shape: Topology) -> DeltaInputs:
    return DeltaInputs(**{name: _by_row(values, shape) for name, values in vars(inputs).items()})


def _step(source: torch.Tensor, goal: torch.Tensor, rows: DeltaInputs, node: int, output: torch.Tensor | None) -> None:
    """goal `[B, H, K, V]` = the states after one node of every row, output `[B, H, V]` its outputs (None: not wanted).

    One product reads the state for u and o, one pass decays it and one adds the outer product; goal may be source.
    """
    k, v = rows.k[:, node].to(source.dtype), rows.v[:, node].to(source.dtype)
    gate = rows.log_decay[:, node].exp()[..., None, None]
    readers = k[:, :, None] if output is None else torch.stack([k, rows.q[:, node].to(source.dtype)], dim=2)
    seen = gate * (readers @ source)
    u = rows.beta[:, node, :, None] * (v - seen[:, :, 0])
    torch.mul(source, gate, out=goal)
    goal.addcmul_(k[..., None], u[:, :, None])
    if output is not None:
        output.copy_(seen[:, :, 1] + (readers[:, :, 1] * k).sum(-1, keepdim=True) * u)
