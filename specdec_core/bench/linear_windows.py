"""Random windows for linear attention: shapes of drafts, inputs from mild to adverse, states, paths."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

import numpy as np
import torch

from specdec_core.kernels.gated_delta import DeltaInputs
from specdec_core.topology import Forest, Topology, chain, forest, tree

MILD = (0.0, -1e-12, -0.01, -0.1, -0.3)
ADVERSE = (*MILD, -2.0, -90.0, -1e4, -np.inf)
"""Log decays: from none, over the tiniest, to a full reset."""
RESET = -90.0
"""Below it a float32 remembers nothing."""


def random_tree(rng: np.random.Generator, most: int) -> Topology:
    """Any tree of 1…`most` nodes; one in four a star, whose nodes see the root alone."""
    nodes = int(rng.integers(1, most + 1))
    star = rng.random() < 0.25
    return tree((-1, *(0 if star else int(rng.integers(node)) for node in range(1, nodes))))


def random_draft(rng: np.random.Generator, most: int) -> Topology:
    """No draft at all, a chain, or a tree, each as likely."""
    kind = rng.integers(3)
    if kind == 0:
        return chain(1)
    return chain(int(rng.integers(1, most + 1))) if kind == 1 else random_tree(rng, most)


def balanced_tree(nodes: int) -> Topology:
    """Two children a node, level by level."""
    return tree((-1, *((node - 1) // 2 for node in range(1, nodes))))


def random_inputs(
    rng: np.random.Generator, nodes: int, heads: int, keys: int, values: int, *, adverse: bool
) -> DeltaInputs:
    """Inputs in float64 that are float32 numbers, so that both precisions are given the same.

    adverse  log decays down to −inf beside tiny ones, rates up to 2 (negative eigenvalues), in some windows the same
             key or its opposite at every node. Otherwise decays of at most a quarter and rates below 1.
    """
    key = _unit(rng.standard_normal((nodes, heads, keys)))
    gates: Sequence[float] = MILD
    rates = rng.uniform(0.0, 1.0, (nodes, heads))
    if adverse:
        gates = ADVERSE
        rates = rng.choice([0.0, 2.0, *rng.uniform(0.0, 2.0, 6)], (nodes, heads))
        if rng.random() < 0.25:
            key = key[:1] * rng.choice([-1.0, 1.0], (nodes, heads, 1))
    return DeltaInputs(
        q=_float32(rng.standard_normal((nodes, heads, keys)) * keys**-0.5),
        k=_float32(key),
        v=_float32(rng.standard_normal((nodes, heads, values))),
        log_decay=_float32(rng.choice(gates, (nodes, heads))),
        beta=_float32(rates),
    )


def random_state(rng: np.random.Generator, *shape: int) -> torch.Tensor:
    """Standard normal, float64 that is float32."""
    return _float32(rng.standard_normal(shape))


def in_dtype(inputs: DeltaInputs, dtype: torch.dtype) -> DeltaInputs:
    return DeltaInputs(**{field.name: getattr(inputs, field.name).to(dtype) for field in fields(inputs)})


def parts(inputs: DeltaInputs, nodes: np.ndarray) -> DeltaInputs:
    """The inputs of these flat nodes."""
    chosen = torch.from_numpy(nodes)
    return DeltaInputs(**{field.name: getattr(inputs, field.name)[chosen] for field in fields(inputs)})


def joined(windows: Sequence[DeltaInputs]) -> DeltaInputs:
    """The inputs of several windows, one after another."""
    names = [field.name for field in fields(DeltaInputs)]
    return DeltaInputs(**{name: torch.cat([getattr(each, name) for each in windows]) for name in names})


def paths_to(shapes: Forest, ends: Sequence[int]) -> list[np.ndarray]:
    """Each row's path to its node; −1: none."""
    return [each.path(end) if end >= 0 else np.empty(0, np.int64) for each, end in zip(shapes.trees, ends, strict=True)]


def spread_paths(shapes: Forest) -> list[np.ndarray]:
    """Paths of all lengths, rows in turn: the first row keeps half of what its deepest branch has, and so on around.

    Half is what a middling draft keeps, and in a batch all lengths come together.
    """
    found = []
    for row, each in enumerate(shapes.trees):
        deepest = each.path(int(each.depths.argmax()))
        found.append(deepest[: 1 + (len(deepest) // 2 + row) % len(deepest)])
    return found


def batch_of(shape: Topology, rows: int) -> Forest:
    return forest([shape] * rows)


def _unit(values: np.ndarray) -> np.ndarray:
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def _float32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values.astype(np.float32), np.float64))
