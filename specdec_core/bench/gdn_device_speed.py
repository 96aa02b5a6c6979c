"""One layer of the gated delta rule on a device: every way to verify and commit, interleaved, cell by cell."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from specdec_core.bench.gdn_device_clock import Budget, Stopwatch, graphed, sample
from specdec_core.bench.gdn_rivals import EagerSequential, EagerSnapshots
from specdec_core.bench.linear_windows import balanced_tree, batch_of
from specdec_core.kernels.gated_delta import DeltaInputs
from specdec_core.kernels.gated_delta import torch as closed_form
from specdec_core.kernels.gated_delta.triton import TritonGatedDelta
from specdec_core.measure.clock import Arm
from specdec_core.topology import Topology, chain

SNAPSHOTS = "eager snapshots"


@dataclass(frozen=True)
class Cell:
    """One size of state, batch, number of nodes and shape of the draft."""

    heads: int
    keys: int
    values: int
    batch: int
    n: int
    shape: str

    @property
    def topology(self) -> Topology:
        return chain(self.n) if self.shape == "chain" else balanced_tree(self.n)

    @property
    def state_bytes(self) -> int:
        return 4 * self.batch * self.heads * self.keys * self.values

    @property
    def work(self) -> int:
        """What its time grows with, about: state bytes, times nodes for the ways that go token by token."""
        return self.state_bytes * (self.n + 8)

    def __str__(self) -> str:
        return f"{self.heads} × {self.keys} × {self.values}, batch {self.batch}, n = {self.n}, {self.shape}"


@dataclass(frozen=True)
class SpeedPlan:
    """Which cells, how many samples of each arm.

    path    nodes committed, or as many as there are.
    spread  bytes that the states of one sample fill at least, several taking turns, but no more than `copies`: what a
            call left in the cache is then gone, unless states are so small that even these fit.
    """

    sizes: tuple[tuple[int, int, int], ...]
    batches: tuple[int, ...]
    nodes: tuple[int, ...]
    repeats: int
    path: int = 4
    spread: int = 1 << 27
    copies: int = 8

    def cells(self) -> list[Cell]:
        """Smallest first, so that a run which is cut short lacks the largest."""
        found = [
            Cell(*size, batch, n, shape)
            for size, batch, n, shape in product(self.sizes, self.batches, self.nodes, ("chain", "tree"))
            if shape == "chain" or n > 2  # a tree of two nodes is a chain
        ]
        return sorted(found, key=lambda cell: cell.work)


def ways() -> dict[str, Any]:
    """Every way by its name in the records: the Triton form in both precisions, the closed form, and the rivals."""
    return {
        "triton ieee": TritonGatedDelta("ieee"),
        "triton tf32x3": TritonGatedDelta("tf32x3"),
        "closed form": closed_form,
        "eager sequential": EagerSequential(),
        SNAPSHOTS: EagerSnapshots(),
    }


def time_layers(
    plan: SpeedPlan, device: torch.device, clock: tuple[str, Stopwatch], budget: Budget,
    skipped: Callable[[str, str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """GDN_DEVICE_TIME rows of every cell that the budget allows; `skipped(what, reason)` is told of the others."""
    last: tuple[float, int] | None = None
    for cell in plan.cells():
        # What a cell took, without compiling, tells what a larger one will take.
        expected, left = last[0] * max(1.0, cell.work / last[1]) if last else 0.0, budget.left
        if expected > left or left <= 0:
            skipped(str(cell), f"{max(left, 0):.0f} s left of {budget.seconds:.0f}, about {expected:.0f} needed")
            continue
        arms, copies = arms_of(cell, plan, device, skipped), copies_of(cell, plan)
        before = budget.left
        for (way, phase, used), samples in _sampled(arms, plan.repeats, clock, cell, skipped):
            yield {
                "way": way, "phase": phase, "clock": used, "shape": cell.shape, "batch": cell.batch,
                "heads": cell.heads, "keys": cell.keys, "values": cell.values, "n": cell.n,
                "path": min(plan.path, _depth(cell)), "copies": copies, "seconds": samples / copies,
            }  # fmt: skip
        last = (before - budget.left, cell.work)


def _sampled(
    arms: Mapping[tuple[str, str], Arm], repeats: int, clock: tuple[str, Stopwatch], cell: Cell,
    skipped: Callable[[str, str], None],
) -> Iterator[tuple[tuple[str, str, str], np.ndarray]]:  # fmt: skip
    """Samples of every arm by the clock; on a stream also as graphs, interleaved by themselves."""
    name, watch = clock
    for (way, phase), seconds in sample(arms, repeats, watch).items():
        yield (way, phase, name), seconds
    if name != "stream":
        return
    graphs: dict[tuple[str, str], Arm] = {}
    pool = torch.cuda.graph_pool_handle()
    for (way, phase), arm in arms.items():
        try:
            graphs[way, phase] = graphed(arm, pool)
        except RuntimeError as error:
            skipped(f"{way}, {phase} as a graph: {cell}", str(error).splitlines()[0])
    for (way, phase), seconds in sample(graphs, repeats, watch).items():
        yield (way, phase, "graph"), seconds


def arms_of(
    cell: Cell, plan: SpeedPlan, device: torch.device, skipped: Callable[[str, str], None]
) -> dict[tuple[str, str], Arm]:
    """(way, phase) → one call on each of the states that take turns, all called once: kernels are compiled.

    A way for whose states there is no room is left out.
    """
    copies = copies_of(cell, plan)
    shapes = batch_of(cell.topology, cell.batch)
    generator = torch.Generator(device).manual_seed(cell.work % 2**31)
    states = [_normal(generator, device, cell.batch, cell.heads, cell.keys, cell.values) for _ in range(copies)]
    inputs = _inputs(cell, generator, device)
    deepest = cell.topology.path(int(cell.topology.depths.argmax()))
    paths = [deepest[: plan.path]] * cell.batch
    arms: dict[tuple[str, str], Arm] = {}
    for name, way in ways().items():
        needed = cell.state_bytes * ((copies + 2) * cell.n if name == SNAPSHOTS else 6)
        if needed > room(device):
            skipped(f"{name}: {cell}", f"{needed / 2**30:.1f} GiB of states, {room(device) / 2**30:.1f} free")
            continue
        try:
            made = _phases(way, states, inputs, shapes, paths)
            for arm in made.values():
                arm()
        except torch.OutOfMemoryError as error:
            skipped(f"{name}: {cell}", str(error).splitlines()[0])
            continue
        arms |= {(name, phase): arm for phase, arm in made.items()}
    return arms


def _phases(
    way: Any, states: list[torch.Tensor], inputs: DeltaInputs, shapes: Any, paths: list[np.ndarray]
) -> dict[str, Arm]:
    pending = [way.verify(state, inputs, shapes)[1] for state in states]  # none is found in the cache, as no state is

    def verify() -> None:
        for state in states:
            way.verify(state, inputs, shapes)

    def commit() -> None:
        for state, own in zip(states, pending, strict=True):
            way.commit(state, own, paths)

    def together() -> None:
        for state, own in zip(states, pending, strict=True):
            way.commit_then_verify(state, own, paths, inputs, shapes)

    def apart() -> None:
        for state, own in zip(states, pending, strict=True):
            way.verify(way.commit(state, own, paths), inputs, shapes)

    return {"verify": verify, "commit": commit, "round": together if hasattr(way, "commit_then_verify") else apart}


def copies_of(cell: Cell, plan: SpeedPlan) -> int:
    """States that take turns."""
    return max(1, min(plan.copies, -(-plan.spread // cell.state_bytes)))


def room(device: torch.device) -> float:
    """Bytes that may be taken of the device's memory: nine tenths of what is free, what torch keeps ready included."""
    if device.type != "cuda":
        return float("inf")
    free, _ = torch.cuda.mem_get_info(device)
    return 0.9 * (free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))


def _inputs(cell: Cell, generator: torch.Generator, device: torch.device) -> DeltaInputs:
    """Unit keys, mild gates, rates below 1; all float32."""
    nodes = cell.batch * cell.n
    q, k = (_normal(generator, device, nodes, cell.heads, cell.keys) for _ in range(2))
    gates, rates = (torch.rand((nodes, cell.heads), generator=generator, device=device) for _ in range(2))
    return DeltaInputs(
        q=torch.nn.functional.normalize(q, dim=-1) * cell.keys**-0.5,
        k=torch.nn.functional.normalize(k, dim=-1),
        v=_normal(generator, device, nodes, cell.heads, cell.values),
        log_decay=-0.3 * gates,
        beta=rates,
    )


def _normal(generator: torch.Generator, device: torch.device, *shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=generator, device=device)


def _depth(cell: Cell) -> int:
    return int(cell.topology.depths.max()) + 1
