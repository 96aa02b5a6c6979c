"""Notebook 06: what a round of each scheme reads, writes and keeps, counted in the loops that do it (claim G2)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from specdec_core.bench.linear_windows import (
    balanced_tree,
    batch_of,
    in_dtype,
    random_inputs,
    random_state,
    spread_paths,
)
from specdec_core.bench.sources import GATED_DELTA
from specdec_core.evidence.layout import Layout, known_profile
from specdec_core.evidence.linear_claims import DELAYED, SCHEMES, held_bytes, passes
from specdec_core.evidence.linear_records import LINEAR_TRAFFIC
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter
from specdec_core.kernels.gated_delta import DeltaInputs, numba, schemes
from specdec_core.kernels.gated_delta.traffic import Traffic
from specdec_core.kernels.threads import Team
from specdec_core.topology import Forest, Topology, chain

if TYPE_CHECKING:
    import pandas as pd

CODE = (
    *GATED_DELTA,
    "specdec_core/bench/linear_windows.py",
    "specdec_core/bench/linear_traffic.py",
)
"""What the records depend on."""


@dataclass(frozen=True)
class Layer:
    """The heads of one layer; key and value channels of each."""

    name: str
    heads: int
    keys: int
    values: int

    def state_bytes(self, batch: int = 1) -> int:
        """Of a float32 state."""
        return 4 * batch * self.heads * self.keys * self.values

    def fields(self, shape: str, batch: int, n: int, accepted: int) -> dict[str, Any]:
        """What records say of a round of this layer."""
        return {
            "shape": shape,
            "size": self.name,
            "heads": self.heads,
            "keys": self.keys,
            "values": self.values,
            "batch": batch,
            "n": n,
            "accepted": accepted,
            "state_bytes": self.state_bytes(batch),
        }


SMALL, MIDDLE = Layer("8 × 64 × 64", 8, 64, 64), Layer("8 × 128 × 128", 8, 128, 128)
GDN_340M, GDN_1B = Layer("GDN-340M", 6, 256, 512), Layer("GDN-1.3B", 8, 256, 256)
"""Layers of the published models: heads and head_dim of their configurations, values 2 and 1 times as wide as keys."""

SHAPES: dict[str, Callable[[int], Topology]] = {"chain": chain, "tree": balanced_tree}


@dataclass(frozen=True)
class TrafficPlan:
    """Nodes a row, and rows, of the rounds that are counted."""

    widths: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    batch: int = 1
    layer: Layer = GDN_1B

    def __post_init__(self) -> None:
        if self.layer.heads == self.layer.keys:
            raise ValueError(
                f"layer {self.layer}: expected another number of heads than of key channels, by which states "
                "[…, K, V] are told from inputs [N, H, …]"
            )


PLANS = {"quick": TrafficPlan(), "full": TrafficPlan()}


def count_traffic(
    plan: TrafficPlan, profile: str, layout: Layout | None = None, threads: int | None = None
) -> list[dict[str, Any]]:
    """LINEAR_TRAFFIC rows of every scheme, shape and n, recorded as 06_traffic."""
    layout, kept = layout or Layout(), []
    provenance = fingerprint(known_profile(profile), threads=threads)
    with RecordWriter(
        layout.records(profile), "06_traffic", LINEAR_TRAFFIC, provenance, code=CODE, layout=layout
    ) as file:
        for row in _rows(plan, threads):
            file.append(row)
            kept.append(LINEAR_TRAFFIC.validated(row))
    return kept


def _rows(plan: TrafficPlan, threads: int | None) -> Iterator[dict[str, Any]]:
    layer, rng = plan.layer, np.random.default_rng(0)
    for shape, make in SHAPES.items():
        for n in plan.widths:
            shapes = batch_of(make(n), plan.batch)
            paths = spread_paths(shapes)
            for name in SCHEMES:
                state = random_state(rng, plan.batch, layer.heads, layer.keys, layer.values).float()
                inputs = in_dtype(random_inputs(rng, len(shapes.rows), *state.shape[1:], adverse=False), torch.float32)
                yield {
                    "scheme": name,
                    **layer.fields(shape, plan.batch, n, sum(map(len, paths))),
                    **counted(prepare(name, state, inputs, shapes, paths, threads), (layer.keys, layer.values)),
                }


class Round(Protocol):
    """One round on memory that it was prepared for: outputs `[N, H, V]` of the verified nodes, and the committed state,
    in the memory of the given one."""

    def __call__(self, traffic: Traffic | None = None) -> tuple[torch.Tensor, torch.Tensor]: ...


def prepare(
    name: str, state: torch.Tensor, inputs: DeltaInputs, shapes: Forest, paths: list[np.ndarray], threads: int | None
) -> Round:
    """The round of a scheme (a name of evidence.linear_claims): verify these inputs, commit these paths, in place."""
    if name == DELAYED:
        return _delayed(state, inputs, shapes, paths, threads)
    scheme = schemes.SCHEMES[name]()

    def run(traffic: Traffic | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, pending = scheme.verify(state, inputs, shapes, threads=threads, traffic=traffic)
        return outputs, scheme.commit(state, pending, paths, into=state, threads=threads, traffic=traffic)

    return run


def _delayed(
    state: torch.Tensor, inputs: DeltaInputs, shapes: Forest, paths: list[np.ndarray], threads: int | None
) -> Round:
    """The commit of the round before and the verify of this one, in one pass. The round before is one like it."""
    _, waiting = numba.verify(state, inputs, shapes, threads=threads)

    def run(traffic: Traffic | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        nonlocal waiting
        kept, outputs, waiting = numba.commit_then_verify(
            state, waiting, paths, inputs, shapes, into=state, threads=threads, traffic=traffic
        )
        return outputs, kept

    return run


def counted(run: Round, channels: tuple[int, int]) -> dict[str, int]:
    """What one round moves, keeps and launches; states are what ends in `channels` (K, V), which no input does."""
    traffic = Traffic()
    with counted_launches(channels) as launches:
        run(traffic)
    return {
        "read_bytes": traffic.read,
        "written_bytes": traffic.written,
        "kept_bytes": traffic.kept,
        "working_bytes": traffic.working,
        "launches": launches.count,
    }


class _Launches(TorchDispatchMode):
    """Counts torch operations on states; views and the providing of memory are none."""

    def __init__(self, channels: tuple[int, int]):
        super().__init__()
        self.count = 0
        self._channels = channels

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        given = [each for each in (*args, *(kwargs or {}).values(), found) if isinstance(each, torch.Tensor)]
        if not func.is_view and "empty" not in str(func):
            self.count += any(tuple(each.shape[-2:]) == self._channels for each in given)
        return found


@contextmanager
def counted_launches(channels: tuple[int, int]) -> Iterator[_Launches]:
    """Within: compiled parallel regions and torch operations on states `[…, K, V]` are counted."""
    launches, run = _Launches(channels), Team.run

    def counting(team: Team, *arguments: Any) -> None:
        launches.count += 1
        run(team, *arguments)

    Team.run = counting  # type: ignore[assignment, method-assign]
    try:
        with launches:
            yield launches
    finally:
        Team.run = run  # type: ignore[method-assign]


def traffic_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """States and factors moved (read and written, in states), KiB held beside the committed state, and launches of a
    round: a row a shape and scheme, a column a number of nodes."""
    import pandas as pd

    table = pd.DataFrame(rows)
    table["states moved"] = [sum(passes(row)) for row in rows]
    table["KiB held"] = [round(held_bytes(row) / 1024) for row in rows]
    columns = ["states moved", "KiB held", "launches"]
    table = table.pivot_table(index=["shape", "scheme"], columns="n", values=columns, sort=False)
    return table[columns].round(2).astype({name: int for name in table if name[0] != "states moved"})
