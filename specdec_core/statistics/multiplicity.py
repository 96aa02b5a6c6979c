"""p-values of several tests that are to hold together."""

from __future__ import annotations

from collections.abc import Mapping


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Adjusted p-values by test, in the order given: those ≤ α are rejected, with P(any false rejection) ≤ α.

    The i-th smallest of m is multiplied by m − i + 1, cut at 1, and never let fall below the one before it (Holm, A
    Simple Sequentially Rejective Multiple Test Procedure, 1979). Holds under any dependence between the tests.

    Raises ValueError for no p-values, and for one outside [0, 1] or NaN.
    """
    if not p_values:
        raise ValueError("no p-values: expected one or more, by the name of the test")
    for name, p in p_values.items():
        if not 0 <= p <= 1:
            raise ValueError(f"p-value of {name!r} is {p}: expected a number in [0, 1]")
    ascending = sorted(p_values, key=lambda name: p_values[name])
    adjusted: dict[str, float] = {}
    least = 0.0
    for place, name in enumerate(ascending):
        least = max(least, min(1.0, (len(ascending) - place) * float(p_values[name])))
        adjusted[name] = least
    return {name: adjusted[name] for name in p_values}
