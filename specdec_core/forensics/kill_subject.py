"""What mutants are seen in: a small table of laws with drafters that err, and what a test says of one."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import numpy as np

from specdec_core.drafters.model import ModelDrafter
from specdec_core.forensics.exact_grid import DraftModel
from specdec_core.targets.table import TableTarget, random_logits

V, K, LENGTH = 12, 3, 16
"""Vocabulary, speculation length, and most tokens of a row."""

Inject = Callable[[], AbstractContextManager[Any]]
"""A context in which a mutant is in place."""


@dataclass(frozen=True)
class Sight:
    """What one test saw of one decoder. `tokens`: how many it took, −1 if it saw nothing or counts none."""

    seen: bool
    statistic: float = 0.0
    tokens: int = -1


LOGITS = random_logits(V, seed=7)
_NOISE = random_logits(V, seed=8, spread=0.5)
_TILT = np.linspace(1.5, -1.5, V)


def leaning(prefix: tuple[int, ...]) -> np.ndarray:
    """Logits of a drafter that errs at random, and always to low ids, so that errors do not average out."""
    return LOGITS(prefix) + _NOISE(prefix) + _TILT


def target() -> TableTarget:
    return TableTarget(LOGITS, V)


def alternative() -> TableTarget:
    return DraftModel(leaning, V)


def soft_drafter() -> ModelDrafter:
    return ModelDrafter(alternative(), V)
