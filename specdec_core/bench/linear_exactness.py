"""Notebook 06: outputs and committed states of linear attention against the sequential rule (claim G1).

Each form verifies random drafts and commits every node of every tree, and none; what it finds is compared with the
reference, which goes node by node in float64. Then whole sequences: rounds of chains, trees and no drafts over rows
that change places, against one sequential run over the tokens that each row kept.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from specdec_core.arrays import host
from specdec_core.bench.linear_windows import (
    RESET,
    in_dtype,
    joined,
    parts,
    paths_to,
    random_draft,
    random_inputs,
    random_state,
    random_tree,
)
from specdec_core.bench.sources import GATED_DELTA
from specdec_core.evidence.layout import Layout, known_profile
from specdec_core.evidence.linear_records import LINEAR_ERROR, LINEAR_WINDOW
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter
from specdec_core.kernels.gated_delta import DeltaInputs, numba, reference
from specdec_core.kernels.gated_delta import torch as closed
from specdec_core.topology import Forest, Topology, chain, forest, tree

CODE = (
    *GATED_DELTA,
    "specdec_core/bench/linear_windows.py",
    "specdec_core/bench/linear_exactness.py",
)
"""What the records depend on."""

KINDS = ("chains", "trees", "forests")
ROUNDS = "rounds"
KEYS, VALUES = (1, 2, 17, 32, 128), (5, 16, 48, 128)
ROWS, NODES, WINDOWS = 4, 16, 6
"""The most rows of a window, nodes of a row, and windows of a sequence."""
LONG, OFTEN = 64, 0.05
"""… and the most nodes of a row in so many of the windows."""
SCALE = 1e-3
"""An error is relative to the largest number expected, or to this where all are smaller."""
DRAWN = (tree((-1, 0, 0, 1, 1, 2, 3, 3, 5)), 7)
"""The tree of the drawn window, and the node that it accepts."""


@dataclass(frozen=True)
class Form:
    """A way to compute the rule, in one dtype."""

    name: str
    dtype: torch.dtype
    tolerance: float
    verify: Callable[..., Any]
    commit: Callable[..., torch.Tensor]
    commit_then_verify: Callable[..., Any]

    @classmethod
    def of(cls, name: str, dtype: torch.dtype, tolerance: float, module: ModuleType, **options: Any) -> Form:
        """A module of kernels.gated_delta with these options."""
        functions = (module.verify, module.commit, module.commit_then_verify)
        return cls(name, dtype, tolerance, *(partial(function, **options) for function in functions))


FORMS = (
    Form.of("torch float64", torch.float64, 1e-12, closed),
    Form.of("torch float32", torch.float32, 1e-5, closed),
    # The number of workers changes no bit, and of windows so small a second one would only be waited for.
    Form.of("numba float32", torch.float32, 1e-5, numba, threads=1),
)


@dataclass(frozen=True)
class ExactnessPlan:
    """How many trees (rows of windows), shared among chains, trees and forests; and sequences of rounds."""

    trees: int
    sequences: int


PLANS = {"quick": ExactnessPlan(trees=300, sequences=30), "full": ExactnessPlan(trees=10_000, sequences=500)}


@dataclass(frozen=True)
class ExactnessRows:
    """Records of LINEAR_ERROR and LINEAR_WINDOW."""

    errors: list[dict[str, Any]]
    window: list[dict[str, Any]]


@dataclass
class _Tally:
    """What one form did on windows of one kind."""

    trees: int = 0
    nodes: int = 0
    commits: int = 0
    resets: int = 0
    negative: int = 0
    changed: int = 0
    worst_output: float = 0.0
    worst_state: float = 0.0
    worst_seed: int = 0

    def saw(self, inputs: DeltaInputs, shapes: Forest) -> None:
        self.trees += len(shapes.trees)
        self.nodes += len(shapes.rows)
        self.resets += int((inputs.log_decay <= RESET).any(1).sum())
        self.negative += int((inputs.beta > 1).any(1).sum())

    def found(self, output: float, state: float, seed: int) -> None:
        if max(output, state) > max(self.worst_output, self.worst_state):
            self.worst_seed = seed
        self.worst_output, self.worst_state = max(self.worst_output, output), max(self.worst_state, state)


def measure_exactness(
    plan: ExactnessPlan, profile: str, layout: Layout | None = None, progress: bool = False
) -> ExactnessRows:
    """Errors of every form on windows of every kind, recorded as 06_exactness; and a window to draw, as 06_window."""
    layout = layout or Layout()
    provenance = fingerprint(known_profile(profile), dtype="float32, float64")
    rows = ExactnessRows([], [])
    for name, schema, kept, found in (
        ("06_exactness", LINEAR_ERROR, rows.errors, _error_rows(plan, progress)),
        ("06_window", LINEAR_WINDOW, rows.window, iter([drawn_window()])),
    ):
        with RecordWriter(layout.records(profile), name, schema, provenance, code=CODE, layout=layout) as file:
            for row in found:
                file.append(row)
                kept.append(schema.validated(row))
    return rows


def _error_rows(plan: ExactnessPlan, progress: bool) -> Iterator[dict[str, Any]]:
    share = -(-plan.trees // len(KINDS))
    for number, kind in enumerate(KINDS):
        tallies = {form.name: _Tally() for form in FORMS}
        seeds, done = windows_of(number), 0
        with tqdm(total=share, desc=kind, disable=not progress) as bar:
            while done < share:
                trees = _compare_window(kind, next(seeds), tallies, share - done)
                done += trees
                bar.update(trees)
        yield from (_row(form, kind, tallies[form.name]) for form in FORMS)
    tallies = {form.name: _Tally() for form in FORMS}
    for seed in tqdm(range(plan.sequences), ROUNDS, disable=not progress):
        for form in FORMS:
            _play(form, seed, tallies[form.name])
    yield from (_row(form, ROUNDS, tallies[form.name]) for form in FORMS)


def windows_of(kind: int) -> Iterator[int]:
    """Seeds of the windows of one kind: no two kinds share one."""
    seed = kind
    while True:
        yield seed
        seed += len(KINDS)


def _row(form: Form, kind: str, tally: _Tally) -> dict[str, Any]:
    return {"form": form.name, "kind": kind, "tolerance": form.tolerance, **vars(tally)}


def _compare_window(kind: str, seed: int, tallies: dict[str, _Tally], most: int) -> int:
    """Verify one window of at most so many trees and commit each of its nodes by every form; returns its trees."""
    rng = np.random.default_rng(seed)
    count = min(int(rng.integers(1, ROWS + 1)), most)
    most_nodes = LONG if rng.random() < OFTEN else NODES
    shapes = forest([_shape(kind, rng, most_nodes) for _ in range(count)])
    heads, keys, values = int(rng.integers(1, 4)), int(rng.choice(KEYS)), int(rng.choice(VALUES))
    inputs = random_inputs(rng, len(shapes.rows), heads, keys, values, adverse=True)
    state = random_state(rng, count, heads, keys, values)
    expected, snapshots = reference.verify(state, inputs, shapes)
    for form in FORMS:
        start, tally = state.to(form.dtype), tallies[form.name]
        outputs, pending = form.verify(start, in_dtype(inputs, form.dtype), shapes)
        tally.saw(inputs, shapes)
        worst = 0.0
        # Rows with fewer nodes than others commit their last one again.
        for node in range(-1, int(shapes.counts.max())):
            paths = paths_to(shapes, [min(node, len(each) - 1) for each in shapes.trees])
            kept = form.commit(start, pending, paths)
            worst = max(worst, error(kept, reference.commit(state, snapshots, paths)))
            if node < 0:
                tally.changed += sum(not torch.equal(*pair) for pair in zip(kept, start, strict=True))
        tally.commits += int((shapes.counts + 1).sum())
        tally.found(error(outputs, expected), worst, seed)
    return count


def _shape(kind: str, rng: np.random.Generator, most: int) -> Topology:
    if kind == "chains":
        return chain(int(rng.integers(1, most + 1)))
    return random_tree(rng, most) if kind == "trees" else random_draft(rng, most)


def error(found: torch.Tensor, expected: np.ndarray) -> float:
    """Largest deviation over the largest number expected. RuntimeError for another shape or a number that is none."""
    values = host(found).astype(np.float64)
    if values.shape != expected.shape or not np.isfinite(values).all():
        raise RuntimeError(
            f"found shape {values.shape} with {int((~np.isfinite(values)).sum())} numbers that are not finite: "
            f"expected {expected.shape}, all finite; the form is broken"
        )
    gap = float(np.abs(values - expected).max(initial=0.0))
    return gap / max(float(np.abs(expected).max(initial=0.0)), SCALE)


@dataclass
class _Row:
    """What a row began with, and what it committed and put out since."""

    state: torch.Tensor
    inputs: list[DeltaInputs] = field(default_factory=list)
    outputs: list[torch.Tensor] = field(default_factory=list)


def _play(form: Form, seed: int, tally: _Tally) -> None:
    """Windows of no draft, a chain or a tree a row, rows changing places between; in every second sequence a commit
    waits for the next verify, as in a decoder."""
    rng = np.random.default_rng(seed)
    count, heads, keys, values = int(rng.integers(1, ROWS + 1)), 2, int(rng.choice(KEYS)), int(rng.choice(VALUES))
    state = random_state(rng, count, heads, keys, values).to(form.dtype)
    rows = [_Row(each.double()) for each in state]
    waiting: tuple[Any, list[np.ndarray]] | None = None
    for _ in range(WINDOWS):
        if waiting is None:  # a commit that waits belongs to the rows where they are
            order = rng.permutation(count)
            rows, state = [rows[place] for place in order], state[torch.from_numpy(order)].contiguous()
        shapes = forest([random_draft(rng, NODES // 2) for _ in rows])
        inputs = random_inputs(rng, len(shapes.rows), heads, keys, values, adverse=True)
        given = in_dtype(inputs, form.dtype)
        if waiting is None:
            outputs, pending = form.verify(state, given, shapes)
        else:
            state, outputs, pending = form.commit_then_verify(state, *waiting, given, shapes)
        paths = paths_to(shapes, [int(rng.integers(-1, len(each))) for each in shapes.trees])
        waiting = (pending, paths) if seed % 2 else None
        if waiting is None:
            state = form.commit(state, pending, paths)
        for row, path, first in zip(rows, paths, shapes.offsets[:-1], strict=True):
            row.inputs.append(parts(inputs, first + path))
            row.outputs.append(outputs[torch.from_numpy(first + path)])
        tally.saw(inputs, shapes)
    if waiting is not None:
        state = form.commit(state, *waiting)
    for row, kept in zip(rows, state, strict=True):
        tally.commits += 1
        tally.found(*_against_a_fresh_run(row, kept), seed)


def _against_a_fresh_run(row: _Row, kept: torch.Tensor) -> tuple[float, float]:
    """Errors of a row's outputs and state against one sequential chain over all that it committed."""
    inputs = joined(row.inputs)
    if not len(inputs.q):
        return 0.0, error(kept, host(row.state))
    whole = forest([chain(len(inputs.q))])
    outputs, snapshots = reference.verify(row.state[None], inputs, whole)
    return error(torch.cat(row.outputs), outputs), error(kept[None], snapshots.states[-1:])


def drawn_window(seed: int = 0) -> dict[str, Any]:
    """A row of LINEAR_WINDOW: one head, one tree, mild gates; its commit by the compiled form."""
    rng, (shape, end) = np.random.default_rng(seed), DRAWN
    shapes, path = forest([shape]), shape.path(end)
    inputs, state = random_inputs(rng, len(shape), 1, 32, 32, adverse=False), random_state(rng, 1, 1, 32, 32)
    _, snapshots = reference.verify(state, inputs, shapes)
    _, pending = numba.verify(state.float(), in_dtype(inputs, torch.float32), shapes, threads=1)
    kept = numba.commit(state.float(), pending, [path], threads=1)
    gates = host(inputs.log_decay)[:, 0]
    after = [float(np.exp(gates[path[place + 1 :]].sum())) for place in range(len(path))]
    return {
        "parents": list(shape.parents),
        "path": path,
        "log_decay": gates,
        "beta": host(inputs.beta)[:, 0],
        "weights": after,
        "left": float(np.exp(gates[path].sum())),
        "error": error(kept, snapshots.states[end : end + 1]),
    }
