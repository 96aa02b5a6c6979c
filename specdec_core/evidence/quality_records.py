"""Records of what a cheaper engine loses: how far its laws are from those of the same weights in float32."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from specdec_core.evidence.schemas import RecordError, Schema
from specdec_core.statistics.intervals import Interval, binomial_interval, ratio_interval

Row = Mapping[str, Any]


def _check_quality(row: Row) -> None:
    if row["positions"] < 1 or not 0 <= row["agreed"] <= row["positions"]:
        raise RecordError(
            f"{row['agreed']} of {row['positions']} positions agree: expected at least one position, and 0…all of them"
        )
    # The sum is of nonnegative terms, none above the largest; up to the rounding of adding them up.
    if not 0 <= row["kl_largest"] <= row["kl"] * (1 + 1e-9) <= row["kl_largest"] * row["positions"] * (1 + 2e-9):
        raise RecordError(
            f"KL {row['kl']} over {row['positions']} positions, the largest {row['kl_largest']}: expected "
            "0 ≤ largest ≤ sum ≤ positions · largest"
        )


QUALITY = Schema(
    "quality",
    1,
    {
        "engine": str,  # whose laws are looked at: 'llama.cpp Q8_0', 'numba int8'
        "reference": str,  # whose they are compared with: the same weights, 'llama.cpp F32', 'numba float32'
        "answers": str,  # who wrote the texts, greedily: both are forced along them
        "prompt_id": str,
        "domain": str,
        "positions": int,  # tokens of the answer
        "kl": float,  # Σ KL(reference ‖ engine), nats
        "kl_largest": float,  # of a position
        "agreed": int,  # positions at which both hold the same token for the most probable
    },
    _check_quality,
)
"""One line a (engine, reference, prompt)."""


@dataclass(frozen=True)
class Quality:
    """One engine against its reference, pooled over prompts.

    kl          mean nats a position, by prompt; None where all are exactly zero.
    agreement   share of positions with the same most probable token.
    kl_largest  nats, of all positions.
    """

    engine: str
    reference: str
    prompts: int
    positions: int
    kl: Interval | None
    agreement: Interval
    kl_largest: float


def pooled_quality(rows: Iterable[Row], level: float = 0.95) -> list[Quality]:
    """One `Quality` a pair of engine and reference, in the order of the rows. RecordError for a prompt that occurs
    twice: intervals resample prompts."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["engine"], row["reference"]), []).append(row)
    return [_pooled(*pair, group, level) for pair, group in groups.items()]


def _pooled(engine: str, reference: str, rows: list[Row], level: float) -> Quality:
    if len({row["prompt_id"] for row in rows}) < len(rows):
        raise RecordError(f"{engine} against {reference}: a prompt has two rows; give one run's records")
    positions, agreed, kl = ([row[name] for row in rows] for name in ("positions", "agreed", "kl"))
    return Quality(
        engine,
        reference,
        len(rows),
        sum(positions),
        ratio_interval(kl, positions, level=level) if sum(kl) > 0 else None,
        _agreement(agreed, positions, level),
        max(row["kl_largest"] for row in rows),
    )


def _agreement(agreed: list[int], positions: list[int], level: float) -> Interval:
    """Share of positions that agree, by prompt.

    The interval is that of the share that does not, which is the one with a spread on the log scale. If all agree, it
    is bounded by the share of prompts that have any position that does not.
    """
    differing = [all_ - some for all_, some in zip(positions, agreed, strict=True)]
    if not any(differing):
        exact = binomial_interval(len(positions), len(positions), level=level)
        return Interval(1.0, exact.low, 1.0, level, len(positions), f"{exact.method}, by prompt, all agree")
    found = ratio_interval(differing, positions, level=level)
    return Interval(1 - found.estimate, max(0.0, 1 - found.high), 1 - found.low, level, found.n, f"1 − {found.method}")
