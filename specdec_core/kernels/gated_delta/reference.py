"""The gated delta rule and its convolution node by node along the parents, in float64: slow and obviously right.

Every node's state is kept, so nothing here knows of closed forms or factors: a commit is a look-up.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specdec_core.arrays import Array, host
from specdec_core.kernels.gated_delta import DeltaInputs, Inputs
from specdec_core.kernels.gated_delta.checks import check_inputs, check_paths
from specdec_core.topology import Forest

Step = Callable[[np.ndarray, Mapping[str, np.ndarray]], np.ndarray]
"""One node of one head: the state `[K, V]` of its parent and its own inputs → its own state `[K, V]`."""


@dataclass(frozen=True)
class Snapshots:
    """What each node leaves behind, `[N, …]`: its state, or its window of the convolution."""

    states: np.ndarray
    forest: Forest


def delta_step(state: np.ndarray, node: Mapping[str, np.ndarray]) -> np.ndarray:
    """Decay, then correct the value stored at k towards v."""
    decayed = decay(state, node["log_decay"])
    u = node["beta"] * (node["v"] - decayed.T @ node["k"])
    return decayed + np.outer(node["k"], u)


def decay(state: np.ndarray, log_decay: np.ndarray) -> np.ndarray:
    """The state `[K, V]` under one gate, or under a gate `[K]` a key channel."""
    return np.exp(np.atleast_1d(log_decay))[:, None] * state


def walk(state: Array, inputs: Inputs, forest: Forest, step: Step) -> tuple[np.ndarray, Snapshots]:
    """Outputs `[N, H, V]` and states `[N, H, K, V]` of all nodes, each from its parent's."""
    check_inputs(state, inputs, forest)
    start = host(state).astype(np.float64)
    arrays = {name: host(getattr(inputs, name)).astype(np.float64) for name in inputs.LAYOUT}
    heads = start.shape[1]
    states = np.empty((len(forest.rows), *start.shape[1:]))
    for flat, before in _in_order(forest, start, states):
        for head in range(heads):
            states[flat, head] = step(before[head], {name: array[flat, head] for name, array in arrays.items()})
    return np.einsum("nhkv,nhk->nhv", states, arrays["q"]), Snapshots(states, forest)


def _in_order(forest: Forest, start: np.ndarray, left: np.ndarray):
    """Each flat node with what its parent left behind (the root: what the row started with)."""
    for flat, (row, node) in enumerate(zip(forest.rows, forest.nodes, strict=True)):
        parent = forest.trees[row].parents[node]
        yield flat, start[row] if parent < 0 else left[forest.offsets[row] + parent]


def verify(state: Array, inputs: DeltaInputs, forest: Forest) -> tuple[np.ndarray, Snapshots]:
    """As `GatedDelta.verify`, in float64 whatever is given."""
    return walk(state, inputs, forest, delta_step)


def commit(state: Array, pending: Snapshots, paths: Sequence[np.ndarray]) -> np.ndarray:
    """As `GatedDelta.commit`; also for a convolution's cache."""
    kept = host(state).astype(np.float64)  # a copy
    if len(kept) != len(pending.forest.trees):
        raise ValueError(f"state of {len(kept)} rows, {len(pending.forest.trees)} were verified: commit to that state")
    for row, end in enumerate(check_paths(pending.forest, paths)):
        if end >= 0:
            kept[row] = pending.states[pending.forest.offsets[row] + end]
    return kept


def commit_then_verify(
    state: Array, pending: Snapshots, paths: Sequence[np.ndarray], inputs: DeltaInputs, forest: Forest
) -> tuple[np.ndarray, np.ndarray, Snapshots]:
    """As `GatedDelta.commit_then_verify`."""
    kept = commit(state, pending, paths)
    return kept, *verify(kept, inputs, forest)


def convolve(
    cache: Array, inputs: Array, weights: Array, forest: Forest, bias: Array | None = None
) -> tuple[np.ndarray, Snapshots]:
    """As `short_convolution.convolve`: every node shifts its parent's last W − 1 inputs by its own."""
    start, x, taps = (host(each).astype(np.float64) for each in (cache, inputs, weights))
    offset = np.zeros(len(taps)) if bias is None else host(bias).astype(np.float64)
    windows = np.empty((len(x), *start.shape[1:]))
    outputs = np.empty_like(x)
    for flat, before in _in_order(forest, start, windows):
        seen = np.concatenate([before, x[flat][:, None]], axis=1)  # [C, W], the newest last
        total = (seen * taps).sum(1) + offset
        outputs[flat] = total * np.exp(-np.logaddexp(0.0, -total))
        windows[flat] = seen[:, 1:]
    return outputs, Snapshots(windows, forest)
