"""Exact laws of code that asks for decisions: run it once for every way that chance can go, with that way's weight."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator
from typing import TypeVar

import numpy as np

Result = TypeVar("Result", bound=Hashable)


class Script:
    """`Decisions` that replays a prefix of choices and then takes the first possible one each time."""

    def __init__(self, prefix: tuple[int, ...] = ()):
        self._prefix = prefix
        self.taken: list[int] = []
        self.widths: list[int] = []
        self.weight = 1.0

    def accept(self, probability: float) -> bool:
        assert -1e-12 <= probability <= 1 + 1e-12, f"accept with probability {probability}"
        return bool(self._decide([1.0 - min(probability, 1.0), min(probability, 1.0)]))

    def choose(self, law: np.ndarray) -> int:
        assert (law >= 0).all() and abs(law.sum() - 1) < 1e-12, f"choose from {law}, which is no law"
        return self._decide(law.tolist())

    def _decide(self, weights: list[float]) -> int:
        possible = [value for value, weight in enumerate(weights) if weight > 0]
        place = len(self.taken)
        number = self._prefix[place] if place < len(self._prefix) else 0
        self.taken.append(number)
        self.widths.append(len(possible))
        self.weight *= weights[possible[number]]
        return possible[number]


def branches(run: Callable[[Script], Result]) -> Iterator[tuple[Result, float]]:
    """Results of `run` in every branch of its decisions, each with the branch's probability."""
    open_prefixes: list[tuple[int, ...]] = [()]
    while open_prefixes:
        prefix = open_prefixes.pop()
        script = Script(prefix)
        yield run(script), script.weight
        for place in range(len(prefix), len(script.taken)):
            open_prefixes += [(*script.taken[:place], other) for other in range(1, script.widths[place])]


def exact_law(run: Callable[[Script], Result]) -> dict[Result, float]:
    """Probability of every result of `run`."""
    found: dict[Result, float] = defaultdict(float)
    for result, weight in branches(run):
        found[result] += weight
    return dict(found)


def distance(found: dict[Result, float], expected: dict[Result, float]) -> float:
    """Largest difference between two laws at any result."""
    return max(abs(found.get(key, 0.0) - expected.get(key, 0.0)) for key in {*found, *expected})
