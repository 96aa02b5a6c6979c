"""Notebook 06: how long a round of each scheme takes, verify and commit, against n and batch (claim G3).

A cell is a layer, a batch, a shape of draft and its nodes; all schemes of a cell work on one state, in place, and are
interleaved. Nothing is timed before every scheme's outputs and committed state have been compared with the closed form
in float64. What a scheme would need too much memory or time for is left out, and the record says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from tqdm import tqdm

from specdec_core.bench.linear_exactness import error
from specdec_core.bench.linear_traffic import (
    GDN_1B,
    GDN_340M,
    MIDDLE,
    SHAPES,
    SMALL,
    Layer,
    Round,
    prepare,
)
from specdec_core.bench.linear_windows import batch_of, in_dtype, random_inputs, random_state, spread_paths
from specdec_core.bench.serial_backends import TorchThreads
from specdec_core.bench.sources import GATED_DELTA
from specdec_core.evidence.layout import Layout, known_profile
from specdec_core.evidence.linear_claims import (
    CACHES,
    DELAYED,
    EAGER,
    FACTORS,
    FUSED,
    RELOAD,
    SCHEMES,
    SNAPSHOTS,
    by_cell,
    floors,
    speedup,
)
from specdec_core.evidence.linear_records import LINEAR_SPEED
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter
from specdec_core.kernels.gated_delta import DeltaInputs
from specdec_core.kernels.gated_delta import torch as closed
from specdec_core.kernels.gated_delta.schemes_plan import schedule
from specdec_core.measure.caches import last_level_cache
from specdec_core.measure.ceilings import gemm_arm, peak_arithmetic, read_arm, read_bandwidth
from specdec_core.measure.clock import Arm, interleaved
from specdec_core.placement import physical_threads
from specdec_core.topology import Forest, Topology

if TYPE_CHECKING:
    import pandas as pd

CODE = (
    *GATED_DELTA,
    "specdec_core/measure/caches.py",
    "specdec_core/measure/ceilings.py",
    "specdec_core/measure/clock.py",
    "specdec_core/bench/linear_windows.py",
    "specdec_core/bench/linear_exactness.py",
    "specdec_core/bench/linear_traffic.py",
    "specdec_core/bench/linear_speed.py",
)
"""What the records depend on."""

TOLERANCE = 1e-5
"""Of every scheme's float32 against float64, before anything is timed."""
LIMIT_REPEATS = 5
"""Of what bounds a cell, before and after it."""
SAMPLE_BYTES, MOST_ROUNDS = 4 << 20, 8
"""A sample is as many rounds as have so many bytes of states together, at most so many: short ones are all noise."""


class SchemesDisagree(RuntimeError):
    """A scheme that was to be timed computes something else."""


@dataclass(frozen=True)
class SpeedCell:
    """What schemes are compared on: a layer, rows, the kind of draft and its nodes a row."""

    layer: Layer
    batch: int
    shape: str
    n: int

    @property
    def topology(self) -> Topology:
        return SHAPES[self.shape](self.n)

    @property
    def forest(self) -> Forest:
        return batch_of(self.topology, self.batch)


def cells(layers: Sequence[tuple[Layer, Sequence[int]]], widths: Sequence[int]) -> tuple[SpeedCell, ...]:
    """Every layer at its batches and these widths, as chains and trees; a tree that is a chain is left to the chain."""
    return tuple(
        cell
        for layer, batches in layers
        for batch in batches
        for n in widths
        for shape in SHAPES
        if not (cell := SpeedCell(layer, batch, shape, n)).topology.is_chain or shape == "chain"
    )


@dataclass(frozen=True)
class SpeedPlan:
    """How much to measure.

    most_states  bytes of states that a scheme may keep beside the committed one.
    most_eager   bytes of states that tokens pass over, verified and committed, above which torch operations, token by
                 token, would take most of the run.
    """

    cells: tuple[SpeedCell, ...]
    repeats: int
    most_states: int = 1 << 30
    most_eager: int = 7 << 29


def beyond_cache(layer: Layer, at_least: int, at_most: int = 128, cache: int | None = None) -> int:
    """Rows whose states exceed the caches that the headline asks for, within these bounds.

    cache  bytes; None: the last-level cache of this machine, if it says how large that is.
    """
    cache = cache or last_level_cache() or 0
    return min(max(at_least, CACHES * cache // layer.state_bytes() + 1), at_most)


N_SWEEP, BATCH_SWEEP = (1, 2, 4, 8, 16, 32, 64), (1, 4, 16, 64)
LARGE = beyond_cache(GDN_1B, 40)
PLANS = {
    "quick": SpeedPlan(
        tuple(dict.fromkeys((*cells([(MIDDLE, (1,))], (1, 4, 16)), *cells([(GDN_1B, (1, 8, LARGE))], (16,))))),
        repeats=3,
    ),
    "full": SpeedPlan(
        tuple(
            dict.fromkeys(
                (
                    *cells([(MIDDLE, (1, 16)), (GDN_1B, (32,))], N_SWEEP),
                    *cells([(each, BATCH_SWEEP) for each in (SMALL, MIDDLE, GDN_1B)], (16,)),
                    *cells([(GDN_1B, (max(LARGE, BATCH_SWEEP[-1]),))], (16,)),
                    *cells([(GDN_340M, (1, 4, 16, 32))], (16,)),
                )
            )
        ),
        repeats=10,
    ),
}


def measure_speed(
    plan: SpeedPlan,
    profile: str,
    layout: Layout | None = None,
    threads: int | None = None,
    progress: bool = False,
) -> list[dict[str, Any]]:
    """LINEAR_SPEED rows of every cell and scheme, recorded as 06_speed. SchemesDisagree before a wrong one is timed."""
    layout, workers, kept = layout or Layout(), threads or physical_threads(), list[dict[str, Any]]()
    provenance = fingerprint(known_profile(profile), threads=workers)
    with (
        TorchThreads(workers),
        RecordWriter(layout.records(profile), "06_speed", LINEAR_SPEED, provenance, code=CODE, layout=layout) as file,
    ):
        before = machine_limits(LIMIT_REPEATS)
        for cell in tqdm(plan.cells, "rounds", disable=not progress):
            rows = list(cell_rows(cell, plan, workers))
            after = machine_limits(LIMIT_REPEATS)
            # A bound holds for what was measured between: what the machine did before or after, whichever is more.
            machine = {name: max(before[name], after[name]) for name in before}
            before = after
            for row in rows:
                row |= machine | {"cache_bytes": last_level_cache(), "threads": workers}
                file.append(row)
                kept.append(LINEAR_SPEED.validated(row))
    return kept


def machine_limits(repeats: int) -> dict[str, float]:
    """Bytes read and operations a second, at best."""
    cpu = torch.device("cpu")
    seconds = interleaved({"read": read_arm(cpu), "gemm": gemm_arm(cpu)}, repeats, warmup=2)
    return {
        "bytes_per_second": read_bandwidth(float(seconds["read"].min())),
        "flops_per_second": peak_arithmetic(float(seconds["gemm"].min())),
    }


def cell_rows(cell: SpeedCell, plan: SpeedPlan, threads: int) -> Iterator[dict[str, Any]]:
    """Rows of one cell, but for what the machine allows: every scheme checked, then all timed together."""
    layer, shapes = cell.layer, cell.forest
    rng, paths = np.random.default_rng(0), spread_paths(shapes)
    start = random_state(rng, cell.batch, layer.heads, layer.keys, layer.values).float()
    inputs = in_dtype(random_inputs(rng, len(shapes.rows), *start.shape[1:], adverse=False), torch.float32)
    left_out = {name: why for name in SCHEMES if (why := _too_much(name, cell, paths, plan))}
    state = start.clone()
    judge = Judge(start, inputs, shapes, paths)
    rounds, errors = dict[str, Round](), dict[str, float]()
    for name in (one for one in SCHEMES if one not in left_out):
        state.copy_(start)
        rounds[name] = prepare(name, state, inputs, shapes, paths, threads)
        errors[name] = judge.error(name, *rounds[name]())
    del judge, start
    per_sample = max(1, min(MOST_ROUNDS, SAMPLE_BYTES // layer.state_bytes(cell.batch)))
    # The comparison has warmed every scheme up.
    seconds = interleaved({name: _arm(run, per_sample) for name, run in rounds.items()}, plan.repeats, warmup=0)
    common = {"operations": operations(layer, shapes, paths)}
    for name in SCHEMES:
        yield {
            "scheme": name,
            **layer.fields(cell.shape, cell.batch, cell.n, sum(map(len, paths))),
            **common,
            "seconds": seconds[name] / per_sample if name in seconds else [],
            "left_out": left_out.get(name, ""),
            "worst_error": errors.get(name),
        }


def _arm(run: Round, rounds: int) -> Arm:
    def arm() -> None:
        for _ in range(rounds):
            run()

    return arm


def _too_much(name: str, cell: SpeedCell, paths: Sequence[np.ndarray], plan: SpeedPlan) -> str:
    """Why a scheme is left out of a cell, or ''."""
    state, shape = cell.layer.state_bytes(cell.batch), cell.topology
    states = {SNAPSHOTS: cell.n, RELOAD: cell.n}
    states |= dict.fromkeys((EAGER, FUSED), schedule(shape)[2])
    needed = states.get(name, 0) * state
    if needed > plan.most_states:
        return f"needs {needed} bytes for states, the plan allows {plan.most_states}"
    work = (cell.batch * cell.n + sum(map(len, paths))) * cell.layer.state_bytes()
    if name == EAGER and work > plan.most_eager:
        return f"its tokens pass over {work} bytes of states, the plan allows {plan.most_eager}"
    return ""


class Judge:
    """What a round must give, by the closed form in float64."""

    def __init__(self, start: torch.Tensor, inputs: DeltaInputs, shapes: Forest, paths: list[np.ndarray]):
        inputs = in_dtype(inputs, torch.float64)
        outputs, pending = closed.verify(start.double(), inputs, shapes)
        kept = closed.commit(start.double(), pending, paths)
        self._outputs, self._kept = outputs.numpy(), kept.numpy()
        # A delayed commit's round verifies behind the commit.
        self._next = closed.verify(kept, inputs, shapes)[0].numpy()

    def error(self, name: str, outputs: torch.Tensor, kept: torch.Tensor) -> float:
        """The larger error of both. SchemesDisagree above TOLERANCE."""
        expected = self._next if name == DELAYED else self._outputs
        found = max(error(outputs, expected), error(kept, self._kept))
        if not found <= TOLERANCE:
            raise SchemesDisagree(
                f"{name} is off by {found:.2g} from the closed form in float64, {TOLERANCE:g} is allowed: nothing is "
                "timed until it is mended"
            )
        return found


def operations(layer: Layer, shapes: Forest, paths: Sequence[np.ndarray]) -> float:
    """Floating-point operations that a round of the closed form cannot do without.

    S₀ᵀk and S₀ᵀq of every node; products of its key with its ancestors' and of its query with those and its own; their
    sums of u; and for each row that keeps anything the decay of its state and a product of the path's rank.
    """
    nodes, above = len(shapes.rows), int(shapes.depths.sum())
    related = 2 * above + nodes
    kept = sum(layer.keys * layer.values * (1 + 2 * len(path)) for path in paths if len(path))
    a_head = 4 * nodes * layer.keys * layer.values + 2 * related * (layer.keys + layer.values) + kept
    return float(layer.heads * a_head)


def speed_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Every cell, smallest states first: ms a round of compact factors, in units of the floor, and what each other
    scheme takes in units of them (NaN: left out). Ratios are medians of those paired by repeat."""
    import pandas as pd

    table = []
    for cell, own in by_cell(rows).items():
        ours = own[FACTORS]
        found: dict[str, Any] = {"layer": cell.size, "batch": cell.batch, "n": cell.n, "shape": cell.shape}
        found["states, MiB"] = cell.state_bytes / 2**20
        found["compact factors, ms"] = 1e3 * float(np.median(ours["seconds"]))
        found["× floor"] = floors(ours).estimate
        for name in (one for one in SCHEMES if one != FACTORS):
            found[f"{name}, ×"] = speedup(own[name], ours).estimate if own[name]["seconds"] else np.nan
        table.append(found)
    return pd.DataFrame(table).set_index(["layer", "batch", "n", "shape"])
