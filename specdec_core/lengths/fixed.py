"""The same speculation length every round."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class FixedLength:
    """Draft K tokens in depth whenever there is room for them, fewer near the end of a row."""

    k: int

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ValueError(f"K = {self.k}: expected at least 1 (decode without a drafter for K = 0)")

    @property
    def largest(self) -> int:
        return self.k

    @property
    def uses_confidence(self) -> bool:
        return False

    def begin(self, limit: int) -> int:
        return min(self.k, limit)

    def proceed(self, confidences: Sequence[float]) -> bool:
        return True
