"""`bench gdn`: the gated delta rule on an accelerator in at most five minutes, exact first and then fast.

Needs nothing but the package, torch and Triton; weights are random. Where a form is not exact nothing is timed. With
`--device cpu` and TRITON_INTERPRET=1 a tiny run goes through the same code; its times mean nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from specdec_core.bench.gdn_device_clock import Budget, stopwatch
from specdec_core.bench.gdn_device_gate import Forests, check_device, judged
from specdec_core.bench.gdn_device_model import GDN_1B3, ModelPlan, time_steps
from specdec_core.bench.gdn_device_speed import SpeedPlan, time_layers, ways
from specdec_core.evidence.linear_device_records import (
    GDN_DEVICE_CHECK,
    GDN_DEVICE_SKIPPED,
    GDN_DEVICE_STEP,
    GDN_DEVICE_TIME,
)
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter
from specdec_core.evidence.schemas import Schema
from specdec_core.kernels.gated_delta.triton import interpreted
from specdec_core.placement import Placement, PlacementError
from specdec_core.statistics.intervals import median_interval

CODE = (
    "specdec_core/topology.py",
    *(
        f"specdec_core/kernels/gated_delta/{name}.py"
        for name in (
            "__init__",
            "ancestry",
            "checks",
            "paths",
            "reference",
            "schemes_plan",
            "torch",
            "triton",
            "triton_step",
        )
    ),
    *(
        f"specdec_core/bench/{name}.py"
        for name in (
            "gdn_device",
            "gdn_device_clock",
            "gdn_device_gate",
            "gdn_device_speed",
            "gdn_rivals",
            "linear_windows",
        )
    ),
)
"""What the records of a layer depend on."""

MODEL_CODE = (
    *CODE,
    "specdec_core/bench/gdn_device_model.py",
    "specdec_core/kernels/gated_delta/short_convolution.py",
    "specdec_core/kernels/gdn_step/torch.py",
    "specdec_core/kernels/llama_step/torch.py",
    "specdec_core/kernels/plan.py",
    "specdec_core/state/ragged_kv.py",
    "specdec_core/state/recurrent.py",
    "specdec_core/targets/gated_delta_net.py",
)
"""What the records of a model depend on."""

FORMS = ("triton ieee", "triton tf32x3", "closed form")
"""Forms of one signature: checked by themselves, and run inside the model."""


class NotExact(ArithmeticError):
    """A form is not exact on this device, so that its times would mean nothing."""


@dataclass(frozen=True)
class DevicePlan:
    """All of a run. `seconds` is what it may take altogether, of which the last `for_model` are kept for the model."""

    gate: tuple[Forests, ...]
    speed: SpeedPlan
    model: ModelPlan
    seconds: float
    for_model: float


FULL = DevicePlan(
    gate=(
        Forests(2, 24, 40, nodes=17),
        Forests(8, 128, 128, nodes=33),
        Forests(8, 128, 128, nodes=7, rows=40),
        Forests(8, 256, 256, nodes=64),
        Forests(8, 256, 256, nodes=16, rows=4),
        Forests(8, 256, 256, nodes=5, rows=40),
        Forests(8, 256, 256, nodes=32, dtype="bfloat16"),
        Forests(8, 256, 256, nodes=16, rows=40, dtype="bfloat16"),
    ),
    speed=SpeedPlan(
        sizes=((8, 128, 128), (8, 256, 256)), batches=(1, 4, 16, 64, 256), nodes=(1, 4, 8, 16, 32, 64), repeats=11
    ),
    model=ModelPlan("GDN-1.3B's sizes, random weights", GDN_1B3, (1, 8, 32), (4, 8, 16, 32), repeats=11),
    seconds=285.0,
    for_model=70.0,
)
TINY = DevicePlan(
    gate=tuple(Forests(1, 8, 24, nodes=5, rows=2, dtype=dtype) for dtype in ("float32", "bfloat16")),
    speed=SpeedPlan(sizes=((1, 8, 16),), batches=(2,), nodes=(1, 3), repeats=2, path=2, spread=1),
    model=ModelPlan(
        "a tiny decoder, random weights",
        replace(GDN_1B3, hidden_size=16, intermediate_size=16, layers=1, linear_heads=1, linear_value_heads=1,
                linear_key_dim=8, linear_value_dim=8, vocabulary=11, context=24),
        (1,), (3,), repeats=1, path=2,
    ),
    seconds=3600.0,
    for_model=60.0,
)  # fmt: skip


def bench_gdn(placement: Placement, out: Path, plan: DevicePlan | None = None) -> None:
    """Check and time, and write records 06_gdn_device_* into `out`.

    plan  FULL on CUDA, TINY elsewhere. Of the placement the device counts, and the dtype, which is the model's.

    PlacementError without Triton or a device for it; NotExact, after the checks are written, where a form is not exact.
    """
    device = placement.torch_device
    require_device(device)
    plan = plan or (FULL if device.type == "cuda" else TINY)
    budget = Budget(plan.seconds)
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    provenance = fingerprint("full" if plan is FULL else "quick", dtype=placement.dtype, gpu=gpu)
    forms = {name: way for name, way in ways().items() if name in FORMS}

    def writer(what: str, schema: Schema, code: tuple[str, ...] = CODE) -> RecordWriter:
        return RecordWriter(out, f"06_gdn_device_{what}", schema, provenance, code=code)

    with writer("checks", GDN_DEVICE_CHECK) as file:
        rows = [judged(row) for row in check_device(plan.gate, forms, device)]
        for row in rows:
            file.append(row)
    _require_exact(rows)

    clock = stopwatch(device)
    with writer("skipped", GDN_DEVICE_SKIPPED, MODEL_CODE) as left_out:

        def skipped(what: str, reason: str) -> None:
            print(f"not measured: {what}: {reason}")
            left_out.append({"what": what, "reason": reason})

        with writer("times", GDN_DEVICE_TIME) as file:
            of_layers = Budget(budget.left - plan.for_model)
            for row in time_layers(plan.speed, device, clock, of_layers, skipped):
                _keep(file, row, "{way}, {phase}, {clock}: {heads} × {keys} × {values}, batch {batch}, {shape} of {n}")
        with writer("steps", GDN_DEVICE_STEP, MODEL_CODE) as file:
            for row in time_steps(plan.model, placement, forms, clock, budget, skipped):
                _keep(file, row, "{model}, {kernel}, {dtype}: batch {batch}, {shape} of {n}")
    print(f"{plan.seconds - budget.left:.0f} s of {plan.seconds:.0f}; records in {out}")


def require_device(device: torch.device) -> None:
    """Raise unless Triton is here and can run there."""
    if device.type == "mps" or (device.type == "cpu" and not interpreted()):
        raise PlacementError(
            f"device {device.type}: bench gdn runs Triton kernels, which need CUDA; use --device cuda, or for a tiny "
            "run --device cpu with the environment variable TRITON_INTERPRET=1"
        )


def _require_exact(rows: list[dict[str, Any]]) -> None:
    failed = [row for row in rows if not row["passed"]]
    for row in failed:
        print("FAILED " + ", ".join(f"{name} {row[name]}" for name in GDN_DEVICE_CHECK.fields if name != "passed"))
    if failed:
        raise NotExact(
            f"{len(failed)} of {len(rows)} checks against the float64 reference failed, of {_names(failed)}: nothing "
            "was timed; the checks are recorded"
        )
    print(f"{len(rows)} checks against the float64 reference passed: {_names(rows)}")


def _names(rows: list[dict[str, Any]]) -> str:
    return ", ".join(dict.fromkeys(row["form"] for row in rows))


def _keep(file: RecordWriter, row: Mapping[str, Any], text: str) -> None:
    file.append(row)
    median = median_interval(row["seconds"], resamples=999)
    print(f"{text.format(**row)}: {1e6 * median.estimate:.1f} µs [{1e6 * median.low:.1f}, {1e6 * median.high:.1f}]")
