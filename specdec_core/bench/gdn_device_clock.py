"""Clocks of a device: a stream's own events, a graph's replays, or the host's where there is no stream."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, TypeVar

import numpy as np
import torch

from specdec_core.kernels.gated_delta import checks
from specdec_core.measure.clock import Arm, once

Stopwatch = Callable[[Arm], float]
"""Seconds of one call of an arm."""
Name = TypeVar("Name", bound=Hashable)


@dataclass
class Budget:
    """Seconds that a run may take, from when this is made."""

    seconds: float
    _start: float = field(default_factory=monotonic)

    @property
    def left(self) -> float:
        return self.seconds - (monotonic() - self._start)


def stopwatch(device: torch.device) -> tuple[str, Stopwatch]:
    """Name and clock: 'stream' on CUDA, 'host' elsewhere."""
    return ("stream", _on_stream) if device.type == "cuda" else ("host", once)


def _on_stream(arm: Arm) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    arm()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def sample(arms: Mapping[Name, Arm], repeats: int, clock: Stopwatch, seed: int = 0) -> dict[Name, np.ndarray]:
    """Seconds of each arm, `[repeats]`, as `measure.clock.interleaved` but by any clock; all have run before."""
    names, order = list(arms), np.random.default_rng(seed)
    seconds = {name: np.empty(repeats) for name in names}
    with _uncollected():
        for repeat in range(repeats):
            for index in order.permutation(len(names)):
                seconds[names[index]][repeat] = clock(arms[names[index]])
    return seconds


def graphed(arm: Arm, pool: Any) -> Arm:
    """The arm as a graph: replaying it launches everything at once. RuntimeError if it waits for the device.

    The arm must have run before, so that its kernels are compiled. Graphs of one memory `pool`
    (torch.cuda.graph_pool_handle) overwrite what the others left, which nobody reads.
    """
    graph = torch.cuda.CUDAGraph()
    # Not by torch.cuda.graph, which empties torch's memory first: there are hundreds of graphs.
    with gates_trusted(), _uncollected(), torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.synchronize()
        arm()
        torch.cuda.synchronize()
        graph.capture_begin(pool=pool)
        try:
            arm()
        finally:
            graph.capture_end()
    return graph.replay


@contextmanager
def _uncollected() -> Iterator[None]:
    """Within it the garbage collector rests: it would take time, or free what belongs to another graph."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


@contextmanager
def gates_trusted() -> Iterator[None]:
    """Within it no form looks at gates: to look at numbers is to wait for the device, which a graph cannot."""
    looking = checks.check_log_decay
    checks.check_log_decay = lambda log_decay: None
    try:
        yield
    finally:
        checks.check_log_decay = looking
