"""Sequences of tokens drawn from a real model, with what the target's law says about each token."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_core.evidence.schemas import RecordError, Schema


def _consistent(row: Mapping[str, Any]) -> None:
    n = len(row["tokens"])
    for name in ("offsets", "endings", "pit", "in_set", "mass", "ratio"):
        if row[name] is not None and len(row[name]) != n:
            raise RecordError(f"field {name!r} has {len(row[name])} entries for {n} tokens: expected one each")


TOKENS = Schema(
    "tokens",
    1,
    {
        "setting": str,
        "temperature": float,
        "top_p": float,
        "method": str,  # 'AR', 'AR again', 'SD', …
        "prompt_id": str,
        "repeat": int,
        "tokens": list[int],
        "offsets": str,  # place of each token in its round, a digit each
        "endings": str,  # a accepted, r recovered, b bonus
        "pit": list[float] | None,  # scores as in forensics/scoring.py; None: not scored
        "in_set": str | None,
        "mass": list[float] | None,
        "ratio": list[float] | None,
    },
    _consistent,
)
"""One line a sequence."""
