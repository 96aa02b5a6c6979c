"""Random windows for the recurrences: gates from none to a full reset, keys that repeat, rates up to 2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import torch

from specdec_core.kernels.gated_delta import DeltaInputs, Inputs
from specdec_core.kernels.gated_delta.family import AdditiveInputs, LowRankInputs
from specdec_core.topology import Forest, Topology, chain, forest, tree

GATES = (0.0, -1e-12, -0.01, -0.3, -2.0, -90.0, -1e4, -np.inf)
MILD = (0.0, -1e-12, -0.01, -0.3)
MEMBERS = ("delta", "kimi", "retention", "mamba", "gated linear", "low rank", "rwkv")


def random_tree(rng: np.random.Generator, most: int) -> Topology:
    """A chain, no draft at all, a star, or any tree of up to `most` nodes."""
    nodes = int(rng.integers(1, most + 1))
    kind = rng.integers(5)
    if kind == 0:
        return chain(nodes)
    if kind == 1:
        return chain(1)
    if kind == 2:
        return tree((-1, *(0 for _ in range(nodes - 1))))
    return tree((-1, *(int(rng.integers(node)) for node in range(1, nodes))))


def random_forest(rng: np.random.Generator, most: int = 16, rows: int = 4) -> Forest:
    """Up to so many rows; sometimes several share a shape, or a number of nodes."""
    trees = [random_tree(rng, most) for _ in range(int(rng.integers(1, rows + 1)))]
    if rng.random() < 0.3:
        trees = [trees[int(rng.integers(len(trees)))] for _ in trees]
    return forest(trees)


def unit(values: np.ndarray) -> np.ndarray:
    return values / np.linalg.norm(values, axis=-1, keepdims=True)


def keys(rng: np.random.Generator, *shape: int) -> np.ndarray:
    """Unit vectors; in one window of four all of a head are equal, or opposite."""
    found = unit(rng.standard_normal(shape))
    if rng.random() < 0.25:
        found = found[:1] * rng.choice([-1.0, 1.0], (shape[0], 1, 1))
    return found


def random_inputs(
    rng: np.random.Generator, nodes: int, heads: int, keys_size: int, values_size: int, member: str = "delta",
    gates: Sequence[float] = GATES,
) -> Any:  # fmt: skip
    """Inputs of any member of the family, float32 numbers in float64 arrays (so that both precisions see the same)."""
    by_key = (nodes, heads, keys_size)
    vector = member in ("kimi", "gated linear", "rwkv")
    kept = {
        "q": rng.standard_normal(by_key) * keys_size**-0.5,
        "k": keys(rng, *by_key),
        "v": rng.standard_normal((nodes, heads, values_size)),
        "log_decay": rng.choice(gates, by_key if vector else by_key[:2]) * rng.choice([1.0, 0.5]),
    }
    if member == "retention":
        kept["log_decay"] = np.broadcast_to(np.log1p(-(2.0 ** -np.arange(1, heads + 1))), (nodes, heads))
    made: type = AdditiveInputs
    if member in ("delta", "kimi"):
        made, kept["beta"] = DeltaInputs, rng.choice([0.0, 2.0, *rng.uniform(0, 2, 6)], by_key[:2])
    if member in ("low rank", "rwkv"):
        made, kept["a"] = LowRankInputs, -keys(rng, *by_key)
        kept["b"] = -kept["a"] * rng.uniform(0, 1, (*by_key[:2], 1))
        if member == "low rank":
            kept["b"] = 0.4 * unit(rng.standard_normal(by_key))
    return made(**{name: np.ascontiguousarray(each.astype(np.float32), np.float64) for name, each in kept.items()})


def random_state(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape).astype(np.float32).astype(np.float64)


def mapped(inputs: Inputs, change: Any) -> Any:
    """The inputs with every array changed alike."""
    return type(inputs)(**{each.name: change(getattr(inputs, each.name)) for each in fields(inputs)})


def tensors(inputs: Inputs, dtype: torch.dtype = torch.float64) -> Any:
    return mapped(inputs, lambda array: torch.from_numpy(np.ascontiguousarray(array)).to(dtype))


def parts(inputs: Inputs, nodes: np.ndarray) -> Any:
    """The inputs of some flat nodes."""
    return mapped(inputs, lambda array: array[nodes])


def joined(windows: Sequence[Inputs]) -> Any:
    """The inputs of several windows, one after another."""
    names = [each.name for each in fields(windows[0])]
    return type(windows[0])(**{name: np.concatenate([getattr(each, name) for each in windows]) for name in names})


def paths_to(shapes: Forest, ends: Sequence[int]) -> list[np.ndarray]:
    """Paths from the roots to these nodes; −1: none."""
    return [each.path(end) if end >= 0 else np.empty(0, np.int64) for each, end in zip(shapes.trees, ends, strict=True)]


def error(found: torch.Tensor | np.ndarray, expected: np.ndarray) -> float:
    """Largest deviation over the largest number expected."""
    found = found.double().numpy() if isinstance(found, torch.Tensor) else found
    assert found.shape == expected.shape
    gap = float(np.abs(found - expected).max(initial=0.0))
    assert np.isfinite(gap)
    return gap / max(float(np.abs(expected).max(initial=0.0)), 1e-3)
