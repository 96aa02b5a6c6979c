"""Invented records of notebook 04."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def output(
    way: str,
    prompt: str,
    *,
    broken: bool = False,
    engine: str = "transformers float32",
    first: int = -1,
    rejection: int = 7,
    certified: bool | None = None,
    tokens: int = 12,
    expected: int = 12,
) -> Row:
    """A row of RAGGED_OUTPUT that is wrong from token `first` on (−1: nowhere)."""
    right = tokens if first < 0 else first
    return {
        "way": way,
        "broken": broken,
        "engine": engine,
        "drafter": "4-bit copy",
        "K": 4,
        "slots": 4,
        "prompt_id": prompt,
        "tokens": tokens,
        "expected": expected,
        "exact": first < 0,
        "matching": right,
        "first_divergence": first,
        "certified": first < 0 if certified is None else certified,
        "divergences": int(first >= 0),
        "first_rejection": rejection,
        "rounds": 4,
        "drafted": 16,
        "accepted": 8,
        "differs_at": "=" * right + ("~" if certified else "x") * (tokens - right),
    }


def cell(fault: str, subject: str, detector: str = "detector", **changes: Any) -> Row:
    """A row of FAULT_CELL."""
    fired = changes.pop("fired", False)
    return {
        "fault": fault,
        "seam": "" if fault == "none" else "the target's state",
        "subject": subject,
        "expected": "" if fault == "none" else "divergence",
        "sound": fault == "none",
        "detector": detector,
        "family": "oracle",
        "fired": fired,
        "crashed": False,
        "round": 2 if fired else -1,
        "tokens": 5 if fired else -1,
        "where": "row 1" if fired else "",
    } | changes


def seeded(**changes: Any) -> Row:
    """A row of SEEDED_ROW."""
    return {
        "engine": "numba float32",
        "drafter": "look-up tree",
        "change": "alone",
        "slots": 4,
        "prompt_id": "p0",
        "tokens": 8,
        "same": True,
        "own": True,
    } | changes


def ragged_round() -> list[Row]:
    """Rows of RAGGED_ROUND: four rows that keep 2, 5, 1 and 3 of their five nodes."""
    return [
        {
            "engine": "numba float32",
            "round": 3,
            "slot": slot,
            "prompt_id": f"p{slot}",
            "cached": cached,
            "pieces": list("abcde"),
            "kept": kept,
            "emitted": list("abcde")[:kept],
            "ending": "bonus" if kept == 5 else "recovered",
        }
        for slot, (cached, kept) in enumerate([(61, 2), (38, 5), (44, 1), (52, 3)])
    ]
