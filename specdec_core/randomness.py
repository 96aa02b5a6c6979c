"""Randomness as decisions: what a decoder asks for is `accept` and `choose`, never a uniform.

The production source draws uniforms on the CPU from one stream per (seed, row key, purpose), so a row's decisions do
not depend on its neighbours, on the device, or on how often another purpose draws. The exact enumerator of the
forensics is another source with the same two methods, so the code under test is the production code.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

DRAFT, VERIFY = 0, 1
"""Purposes: the drafter's own sampling, and the target's acceptances, recovered and bonus tokens."""


class Decisions(Protocol):
    """What a decoder may ask of chance."""

    def accept(self, probability: float) -> bool:
        """True with this probability."""

    def choose(self, law: np.ndarray) -> int:
        """An index drawn from `law`, `[V]` float64, summing to one."""


class Source(Protocol):
    """Makes the decisions of a row for a purpose."""

    def __call__(self, seed: int, key: int, purpose: int) -> Decisions: ...


class StreamDecisions:
    """Decisions from one reproducible stream of uniforms."""

    def __init__(self, seed: int, key: int, purpose: int):
        if seed < 0:
            raise ValueError(f"seed {seed}: expected a non-negative integer")
        # Not a list of the three: numbers of more than 32 bits would run into one another there.
        self._generator = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(key, purpose))))

    def accept(self, probability: float) -> bool:
        # A fresh uniform even for 0 and 1: how much of the stream is used then never depends on rounding.
        return bool(self._generator.random() < probability)

    def choose(self, law: np.ndarray) -> int:
        cumulative = np.cumsum(law)
        # The total is not exactly one in floating point; scaling the uniform keeps zero-probability tails unreachable.
        point = self._generator.random() * cumulative[-1]
        index = int(np.searchsorted(cumulative, point, side="right"))
        # The product can round up to the total itself: then the last token with any probability is meant.
        return index if index < len(law) else int(np.flatnonzero(law)[-1])


def streams(seed: int, key: int, purpose: int) -> Decisions:
    """The production source."""
    return StreamDecisions(seed, key, purpose)
