"""The gate before any timing: the logits of a placement against the same weights in float64."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specdec_core.arrays import host
from specdec_core.targets.transformer import Transformer
from specdec_core.topology import chain, forest, tree

TOLERANCE = {"float64": 1e-9, "float32": 2e-5, "bfloat16": 6e-2, "float16": 8e-3, "int8": 0.15}
"""Largest error allowed, relative to the largest absolute logit; set from the unit roundoff × the depth of a model.
Weights in int8 are another model, near to this one: a coarse bound, that only tells them from wrong ones."""


class ConformanceError(ArithmeticError):
    """The placement's logits are wrong: nothing may be timed."""


@dataclass(frozen=True)
class Conformance:
    """Largest error of a placement's logits, relative to the largest absolute logit, over shapes of passes."""

    errors: dict[str, float]
    tolerance: float

    @property
    def passed(self) -> bool:
        return all(error <= self.tolerance for error in self.errors.values())


SHAPES = {
    "single": [chain(1)],
    "chain": [chain(7)],
    "tree": [tree((-1, 0, 0, 1, 1, 2, 4))],
    "ragged batch": [chain(1), tree((-1, 0, 0, 2)), chain(5)],
}


def check_conformance(target: Transformer, reference: Transformer, context: int = 40, seed: int = 0) -> Conformance:
    """Compare logits on fresh random input over single nodes, chains, trees and ragged batches.

    Raises ConformanceError if any shape is off by more than TOLERANCE.
    """
    expected = _reference_logits(reference, context, seed)
    errors = {}
    for name, logits in _logits(target, context, seed).items():
        errors[name] = float(np.abs(logits - expected[name]).max() / np.abs(expected[name]).max())
    found = Conformance(errors, TOLERANCE[target.placement.dtype])
    if not found.passed:
        raise ConformanceError(
            f"logits of {target.name} on {target.placement} are off by {errors}, relative to the largest logit: "
            f"expected at most {found.tolerance}; no timing is reported while this is so"
        )
    return found


def _logits(target: Transformer, context: int, seed: int) -> dict[str, np.ndarray]:
    """Logits `[N, V]` float64 of every shape on the random input of this seed."""
    random, found = np.random.default_rng(seed), {}
    for name, trees in SHAPES.items():
        shape, rows = forest(trees), np.arange(len(trees))
        prompts = [random.integers(0, target.vocabulary, context + 5 * row) for row in rows]
        nodes = random.integers(0, target.vocabulary, len(shape.rows))
        state = target.new_state(len(rows), context + 5 * len(rows) + len(nodes))
        target.prefill(state, rows, prompts)
        found[name] = np.asarray(host(target.verify(state, rows, nodes, shape).logits), np.float64)
    return found


_reference_logits = lru_cache(maxsize=1)(_logits)
"""The reference is slow, and several placements are compared with it."""
