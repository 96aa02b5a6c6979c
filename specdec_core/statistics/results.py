"""What a test returns, whichever test it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True)
class TestResult:
    """One test: its statistic, its p-value, and `n`, the number of units it is made on (tokens or sequences)."""

    __test__: ClassVar[bool] = False  # pytest takes the name for that of a class of tests

    name: str
    statistic: float
    p: float
    n: int
    note: str = ""


@dataclass(frozen=True)
class ChiSquare(TestResult):
    """A χ² with its degrees of freedom; `parts` are those of the groups where it is a sum over groups."""

    dof: int = 0
    parts: tuple[ChiSquare, ...] = ()


def chi_square_tail(statistic: float, dof: int) -> float:
    """P(χ²_dof ≥ statistic); with no degree of freedom there is nothing to test and the answer is 1."""
    if dof == 0:
        return 1.0
    from scipy.special import chdtrc  # here and not above: it takes longer to import than the command `claims` may

    return float(chdtrc(dof, statistic))
