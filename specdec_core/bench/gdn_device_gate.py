"""Is the gated delta rule right on this device? Random forests against the sequential float64 reference, no clock."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdec_core.arrays import host
from specdec_core.bench.linear_windows import in_dtype, paths_to, random_draft, random_inputs, random_state
from specdec_core.kernels.gated_delta import DeltaInputs, GatedDelta, reference
from specdec_core.topology import Forest, chain, forest

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
TOLERANCE = {"triton ieee": 1e-5, "triton tf32x3": 1e-4, "closed form": 1e-5}
"""Largest error of each form over the largest number expected. tf32x3 leaves about 22 bits of each product."""
ROUNDED = 2.0**-7
"""A whole unit in the last place of a bfloat16 output, relative: Triton's interpreter cuts where a GPU rounds."""


@dataclass(frozen=True)
class Forests:
    """What a random case looks like: sizes of a head, the most nodes of a row, rows, and the dtype of q, k and v.

    Many rows have larger tiles than few; every width of tile wants to be seen.
    """

    heads: int
    keys: int
    values: int
    nodes: int
    rows: int = 3
    dtype: str = "float32"


@dataclass(frozen=True)
class Case:
    """Two windows, one after the other, of which the first is committed along `paths`; all float64 on the CPU."""

    seed: int
    state: torch.Tensor
    first: DeltaInputs
    shapes: Forest
    paths: list[np.ndarray]
    second: DeltaInputs
    then: Forest


def check_device(
    plan: Sequence[Forests], forms: Mapping[str, GatedDelta], device: torch.device
) -> Iterator[dict[str, Any]]:
    """GDN_DEVICE_CHECK rows: every case with every form; gates and rates of every other one are adverse."""
    for seed, each in enumerate(plan):
        case = random_case(seed, each)
        expected = expected_of(case)
        for name, form in forms.items():
            yield {
                "form": name, "dtype": each.dtype, "rows": each.rows, "most_nodes": each.nodes, "heads": each.heads,
                "keys": each.keys, "values": each.values, "seed": seed,
                **compare(form, case, expected, each.dtype, device),
                "output_tolerance": TOLERANCE[name] + (ROUNDED if each.dtype == "bfloat16" else 0.0),
                "state_tolerance": TOLERANCE[name],
            }  # fmt: skip


def random_case(seed: int, plan: Forests) -> Case:
    """A case whose q, k and v are numbers of the dtype; one row has the most nodes, one accepts nothing."""
    rng, nodes, rows, dtype = np.random.default_rng(seed), plan.nodes, plan.rows, DTYPES[plan.dtype]
    size = plan.heads, plan.keys, plan.values
    shapes, then = (forest([chain(nodes), *(random_draft(rng, nodes) for _ in range(rows - 1))]) for _ in range(2))
    windows = []
    for each in (shapes, then):
        made = random_inputs(rng, len(each.rows), *size, adverse=bool(seed % 2))
        kept = {name: getattr(made, name).to(dtype).double() for name in "qkv"}
        windows.append(DeltaInputs(**vars(made) | kept))
    ends = [nodes - 1, *(int(rng.integers(len(each))) for each in shapes.trees[1:-1]), -1][:rows]
    return Case(seed, random_state(rng, rows, *size), windows[0], shapes, paths_to(shapes, ends), windows[1], then)


def expected_of(case: Case) -> dict[str, np.ndarray]:
    """By the reference: outputs of the first window, the state after its paths, outputs and state of the second."""
    outputs, snapshots = reference.verify(case.state, case.first, case.shapes)
    kept = reference.commit(case.state, snapshots, case.paths)
    after, last = reference.verify(torch.from_numpy(kept), case.second, case.then)
    return {"outputs": outputs, "kept": kept, "after": after, "end": reference.commit(kept, last, _ends(case.then))}


def compare(
    form: GatedDelta, case: Case, expected: Mapping[str, np.ndarray], dtype: str, device: torch.device
) -> dict[str, Any]:
    """Errors of one form: verify, commit alone, commit with the next verify, and a commit of that."""

    def given(inputs: DeltaInputs) -> DeltaInputs:
        wide = in_dtype(inputs, torch.float32)
        short = {name: getattr(wide, name).to(DTYPES[dtype]) for name in "qkv"}
        return DeltaInputs(**{name: each.to(device) for name, each in (vars(wide) | short).items()})

    state = case.state.float().to(device)
    outputs, pending = form.verify(state, given(case.first), case.shapes)
    kept = form.commit(state, pending, case.paths)
    delayed, after, last = form.commit_then_verify(state, pending, case.paths, given(case.second), case.then)
    end = form.commit(delayed, last, _ends(case.then))
    of_outputs = [_error(outputs, expected["outputs"]), _error(after, expected["after"])]
    of_states = [_error(kept, expected["kept"]), _error(delayed, expected["kept"]), _error(end, expected["end"])]
    found = {"output_error": max(of_outputs), "state_error": max(of_states)}
    return {"commits": 3 * len(case.paths), **{name: _finite(each) for name, each in found.items()}}


def judged(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its verdict."""
    within = all(
        row[f"{name}_error"] is not None and row[f"{name}_error"] <= row[f"{name}_tolerance"]
        for name in ("output", "state")
    )
    return {**row, "passed": within}


def _ends(shapes: Forest) -> list[np.ndarray]:
    return paths_to(shapes, [len(each) - 1 for each in shapes.trees])


def _error(found: torch.Tensor, expected: np.ndarray) -> float:
    """Largest deviation over the largest number expected; infinite where either is not finite."""
    gap = float(np.abs(host(found).astype(np.float64) - expected).max())
    return gap / max(float(np.abs(expected).max()), 1e-3) if math.isfinite(gap) else math.inf


def _finite(error: float) -> float | None:
    return error if math.isfinite(error) else None
