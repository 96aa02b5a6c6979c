"""What compact factors compete with: other ways to verify a draft and commit a path, each as fast as its idea allows.

    scheme            verify                                                  commit
    eager sequential  torch operations, token by token                        the path replayed likewise
    fused tokens      one compiled launch a token, states in memory           the path replayed likewise
    tile resident     a tile stays in the cache while all tokens pass it      the path replayed on each tile
    snapshots         the same, and every node's state is written             a copy of the node's state
    parent reload     every node reads its parent's state, writes its own     a copy of the node's state
    compact factors   numba.py: a tile is read once, all nodes together       a product of the path's rank

All give the numbers of the reference to float32 rounding, on chains and trees. A scheme that keeps no node's state
still needs more than one at a time on a tree: as few as `schedule` finds, one on a chain. A scheme's memory for states
is its own and used again, since providing it anew would take longer than the work: a second verify invalidates what
the first returned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from specdec_core.kernels.gated_delta import DeltaInputs, numba
from specdec_core.kernels.gated_delta.numba import check_compiled, flat, goal_of, in_lanes
from specdec_core.kernels.gated_delta.schemes_eager import EagerSequential
from specdec_core.kernels.gated_delta.schemes_plan import (
    ReplayInputs,
    Scheme,
    States,
    copy_rows,
    nodes_of_rows,
    schedule,
)
from specdec_core.kernels.gated_delta.schemes_step import (
    COLUMNS,
    Heads,
    Steps,
    Tokens,
    heads_in_memory,
    replay,
    tiles_in_cache,
    tiles_in_memory,
)
from specdec_core.kernels.gated_delta.traffic import Traffic, size
from specdec_core.kernels.simd import padded
from specdec_core.kernels.threads import COUNTER, team
from specdec_core.placement import physical_threads
from specdec_core.topology import Forest


class _Compiled:
    """What compiled schemes share: how they check, launch and count, and the memory of their states."""

    def __init__(self) -> None:
        self._memory = torch.empty(0)

    def _states(self, count: int, state: torch.Tensor) -> torch.Tensor:
        """`[count, H, K, padded V]`, holding anything."""
        _, heads, keys, values = state.shape
        shape = (count, heads, keys, padded(values))
        if self._memory.numel() < np.prod(shape):
            self._memory = torch.empty(int(np.prod(shape)))
        return self._memory[: int(np.prod(shape))].view(shape)


class _Replaying(_Compiled):
    """Nothing is kept but the window's inputs: a commit goes through the path once more."""

    def commit(
        self, state: torch.Tensor, pending: ReplayInputs, paths: Sequence[np.ndarray], *,
        into: torch.Tensor | None = None, threads: int | None = None, traffic: Traffic | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """As `Scheme.commit`, in as many launches as the scheme has turns."""
        nodes = nodes_of_rows(state, pending, paths)
        kept = goal_of(state, into)
        source, tokens = in_lanes(state), _tokens(pending.inputs)
        goal = kept if source.shape == state.shape else source  # a copy already
        none = np.zeros(0, np.int64)
        for turn in self._turns(nodes):
            counts = [len(each) for each in turn]
            rows = np.repeat(np.arange(len(turn)), counts)
            steps = Steps(np.concatenate(turn), rows, none, none, np.cumsum([0, *counts]))
            _launch(replay, source, threads, traffic, flat(goal), tokens, steps)
            source = goal
        if goal is not kept:
            kept.copy_(goal[..., : state.shape[3]])
        copy_rows(state, kept, np.flatnonzero([len(each) == 0 for each in nodes]), traffic or Traffic())
        return kept

    def _turns(self, nodes: list[np.ndarray]) -> list[list[np.ndarray]]:
        """Launches of the rows' flat nodes: some of each row's in each."""
        raise NotImplementedError

    def _found(
        self, tokens: Tokens, inputs: DeltaInputs, forest: Forest, traffic: Traffic | None, worked_in: torch.Tensor
    ) -> tuple[torch.Tensor, ReplayInputs]:
        """What verify returns, after counting what it keeps and has worked in."""
        pending = ReplayInputs(inputs, forest)
        pending.count(traffic)
        if traffic is not None:
            traffic.working += size(worked_in)
        return _outputs(tokens, inputs), pending


class FusedTokens(_Replaying):
    """One compiled launch a token: the states of all rows are read and written for each."""

    def verify(
        self, state: torch.Tensor, inputs: DeltaInputs, forest: Forest, *, threads: int | None = None,
        traffic: Traffic | None = None,
    ) -> tuple[torch.Tensor, ReplayInputs]:  # fmt: skip
        """As `Scheme.verify`."""
        check_compiled(state, inputs, forest)
        source, tokens = in_lanes(state), _tokens(inputs)
        plans = [schedule(shape) for shape in forest.trees]
        first = np.cumsum([0, *(count for _, _, count in plans)])
        states = self._states(int(first[-1]), state)
        for node in range(int(forest.counts.max())):
            rows = np.flatnonzero(forest.counts > node)
            sources = np.array([plans[row][0][node] for row in rows])
            goals = np.array([plans[row][1][node] for row in rows])
            steps = Steps(
                forest.offsets[rows] + node, rows, np.where(sources < 0, -1, sources + first[rows]),
                goals + first[rows], np.arange(len(rows) + 1),
            )  # fmt: skip
            _launch(heads_in_memory, source, threads, traffic, flat(states), tokens, steps)
        return self._found(tokens, inputs, forest, traffic, states)

    def _turns(self, nodes: list[np.ndarray]) -> list[list[np.ndarray]]:
        """A launch a token of the longest path."""
        return [[each[depth : depth + 1] for each in nodes] for depth in range(max(map(len, nodes)))]


class TileResident(_Replaying):
    """A tile stays in the first-level cache while all tokens pass it, and is then dropped."""

    def verify(
        self, state: torch.Tensor, inputs: DeltaInputs, forest: Forest, *, threads: int | None = None,
        traffic: Traffic | None = None,
    ) -> tuple[torch.Tensor, ReplayInputs]:  # fmt: skip
        """As `Scheme.verify`. What it works on is in the cache: slots of one tile a worker."""
        check_compiled(state, inputs, forest)
        source, tokens = in_lanes(state), _tokens(inputs)
        plans = [schedule(shape) for shape in forest.trees]
        sources, goals = (np.concatenate([plan[part] for plan in plans]) for part in range(2))
        steps = Steps(np.arange(len(forest.rows)), forest.rows, sources, goals, forest.offsets)
        room = max(count for _, _, count in plans) * state.shape[2] * COLUMNS
        scratch = torch.empty((threads or physical_threads()) * room)
        _launch(tiles_in_cache, source, threads, traffic, tokens, steps, flat(scratch), room)
        return self._found(tokens, inputs, forest, traffic, scratch)

    def _turns(self, nodes: list[np.ndarray]) -> list[list[np.ndarray]]:
        """One launch."""
        return [nodes]


class _Keeping(_Compiled):
    """Every node's state is written to memory."""

    kernel: Callable[..., None]

    def verify(
        self, state: torch.Tensor, inputs: DeltaInputs, forest: Forest, *, threads: int | None = None,
        traffic: Traffic | None = None,
    ) -> tuple[torch.Tensor, States]:  # fmt: skip
        """As `Scheme.verify`."""
        check_compiled(state, inputs, forest)
        source, tokens = in_lanes(state), _tokens(inputs)
        states = self._states(len(forest.rows), state)
        parents = np.concatenate([shape.parents for shape in forest.trees])
        own = np.arange(len(forest.rows))
        steps = Steps(
            own, forest.rows, np.where(parents < 0, -1, parents + forest.offsets[forest.rows]), own, forest.offsets
        )
        _launch(type(self).kernel, source, threads, traffic, flat(states), tokens, steps)
        if traffic is not None:
            traffic.kept += size(states)
        return _outputs(tokens, inputs), States(states, forest)

    def commit(
        self, state: torch.Tensor, pending: States, paths: Sequence[np.ndarray], *, into: torch.Tensor | None = None,
        threads: int | None = None, traffic: Traffic | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """As `Scheme.commit`: copies, on torch's own threads."""
        nodes = nodes_of_rows(state, pending, paths)
        traffic = traffic or Traffic()
        kept = goal_of(state, into)
        for row, path in enumerate(nodes):
            if len(path) == 0:
                copy_rows(state, kept, np.array([row]), traffic)
                continue
            kept[row].copy_(pending.states[path[-1], ..., : state.shape[3]])
            traffic.read += size(kept[row])
            traffic.written += size(kept[row])
        return kept


class Snapshots(_Keeping):
    """A tile stays in the cache while all tokens pass it, and every node's is written: one read, n writes."""

    kernel = tiles_in_memory


class ParentReload(_Keeping):
    """Every node reads its parent's whole head and writes its own: n reads, n writes."""

    kernel = heads_in_memory


class CompactFactors:
    """The form of numba.py."""

    verify = staticmethod(numba.verify)
    commit = staticmethod(numba.commit)


SCHEMES: Mapping[str, Callable[[], Scheme]] = {
    "eager sequential": EagerSequential,
    "fused tokens": FusedTokens,
    "tile resident": TileResident,
    "snapshots": Snapshots,
    "parent reload": ParentReload,
    "compact factors": CompactFactors,
}


def _tokens(inputs: DeltaInputs) -> Tokens:
    q, k, v = inputs.q.float(), inputs.k.float(), in_lanes(inputs.v)
    return Tokens(
        flat(q), flat(k), flat(v), flat(inputs.log_decay.exp()), flat(inputs.beta), flat((q * k).sum(-1)),
        flat(torch.empty(v.numel())),
    )  # fmt: skip


def _outputs(tokens: Tokens, inputs: DeltaInputs) -> torch.Tensor:
    nodes, heads, values = inputs.v.shape
    found = torch.from_numpy(tokens.outputs).view(nodes, heads, -1)[..., :values]
    return found.contiguous().to(inputs.v.dtype)


def _launch(
    kernel: Callable[..., None], source: torch.Tensor, threads: int | None, traffic: Traffic | None, *rest: Any
) -> None:
    """One parallel region over heads or tiles of `source` `[B, H, K, V]`; what it moves is added to `traffic`."""
    workers = threads or physical_threads()
    moved = np.zeros(workers * COUNTER, np.int64)
    shape = Heads(*source.shape[1:])
    team(workers).run(kernel, np.zeros(COUNTER, np.int64), shape, flat(source), *rest, moved)
    if traffic is not None:
        traffic.read += int(moved[0::COUNTER].sum())
        traffic.written += int(moved[1::COUNTER].sum())
