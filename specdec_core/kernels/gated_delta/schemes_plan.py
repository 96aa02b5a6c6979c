"""What the competing schemes share: their signature, what they keep, and how few states a tree needs at a time."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from specdec_core.kernels.gated_delta import DeltaInputs
from specdec_core.kernels.gated_delta.checks import check_state, require_shape
from specdec_core.kernels.gated_delta.numba import require_compiled
from specdec_core.kernels.gated_delta.paths import path_nodes
from specdec_core.kernels.gated_delta.traffic import Traffic, size
from specdec_core.kernels.simd import padded
from specdec_core.topology import Forest, Topology


class Scheme(Protocol):
    """A way to verify and commit: arguments as in `GatedDelta`, keywords and errors as in numba.py."""

    def verify(
        self, state: torch.Tensor, inputs: DeltaInputs, forest: Forest, *, threads: int | None = None,
        traffic: Traffic | None = None,
    ) -> tuple[torch.Tensor, Any]: ...  # fmt: skip

    def commit(
        self, state: torch.Tensor, pending: Any, paths: Sequence[np.ndarray], *, into: torch.Tensor | None = None,
        threads: int | None = None, traffic: Traffic | None = None,
    ) -> torch.Tensor: ...  # fmt: skip


@dataclass(frozen=True)
class ReplayInputs:
    """What a replay needs of a window: its inputs (of q nothing), kept as they are."""

    inputs: DeltaInputs
    forest: Forest

    def require_fit(self, sizes: dict[str, int]) -> None:
        """Raise unless it is of a state of these sizes."""
        require_shape("pending k", self.inputs.k, ("NHK",), sizes)
        require_shape("pending v", self.inputs.v, ("NHV",), sizes)

    def count(self, traffic: Traffic | None) -> None:
        if traffic is not None:
            traffic.kept += size(self.inputs.k, self.inputs.v, self.inputs.log_decay, self.inputs.beta)


@dataclass(frozen=True)
class States:
    """The state of every node, `[N, H, K, V]`, V padded to a multiple of 16."""

    states: torch.Tensor
    forest: Forest

    def require_fit(self, sizes: dict[str, int]) -> None:
        """Raise unless it is of a state of these sizes."""
        require_shape("pending states", self.states, ("NHKV",), sizes | {"V": padded(sizes["V"])})


@lru_cache(maxsize=1024)
def schedule(shape: Topology) -> tuple[np.ndarray, np.ndarray, int]:
    """Slots that each node's state comes from and goes to, `[n]` each (−1: the committed state), and their number.

    A parent's last child takes over its slot, and a leaf's is free at once.
    """
    sources: list[int] = []
    goals: list[int] = []
    free: list[int] = []
    count = 0
    for node, parent in enumerate(shape.parents):
        sources.append(goals[parent] if parent >= 0 else -1)
        if parent >= 0 and node == shape.children[parent][-1]:
            goals.append(sources[-1])
        elif free:
            goals.append(free.pop())
        else:
            goals.append(count)
            count += 1
        if not shape.children[node]:
            free.append(goals[-1])
    return np.array(sources, np.int64), np.array(goals, np.int64), count


def nodes_of_rows(state: torch.Tensor, pending: ReplayInputs | States, paths: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Flat nodes of each row's path. ValueError unless the state is like the one that was verified: compiled code does
    not look."""
    require_compiled(state)
    sizes = check_state(state, len(pending.forest.trees), "BHKV")
    pending.require_fit(sizes | {"N": int(pending.forest.counts.sum())})
    nodes, starts = path_nodes(pending.forest, paths)
    return np.split(nodes, starts[1:-1])


def copy_rows(state: torch.Tensor, goal: torch.Tensor, rows: np.ndarray, traffic: Traffic) -> None:
    """Rows that keep their state; nothing is moved in place."""
    if state.data_ptr() == goal.data_ptr():
        return
    for row in rows:
        goal[row].copy_(state[row])
        traffic.read += size(goal[row])
        traffic.written += size(goal[row])


def alike(kinds: Sequence[Hashable]) -> list[np.ndarray]:
    """Rows of each kind."""
    found: dict[Hashable, list[int]] = {}
    for row, kind in enumerate(kinds):
        found.setdefault(kind, []).append(row)
    return [np.array(rows) for rows in found.values()]
