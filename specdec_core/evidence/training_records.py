"""Records of a trained drafter, how it learned and how it serves, and the sums for its figures and card."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_core.evidence.schemas import RecordError, Schema
from specdec_core.statistics.intervals import Interval, ratio_interval

Row = Mapping[str, Any]
Rows = Sequence[Row]

TOGETHER = "all"
"""The name of all domains together."""
TESTED = 10
"""A position tested fewer times says nothing."""


def _check(row: Row) -> None:
    shares = (*row["greedy_alpha"], *row["sampled_alpha"])
    if not all(0 <= share <= 1 for share in shares):
        raise RecordError(f"α of {shares}: expected probabilities")
    if row["step"] < 0 or not row["seconds"] >= 0:
        raise RecordError(f"step {row['step']} after {row['seconds']} s: expected ≥ 0 of both")


TRAINING = Schema(
    "training",
    1,
    {
        "drafter": str,
        "step": int,  # optimiser steps done
        "epoch": float,  # passes over the training rows
        "seconds": float,  # of training, checks left out, all runs that it took together
        "learning_rate": float,
        "loss": float | None,  # weighted mean over steps since the last check; None at step 0
        "losses": list[float],  # mean cross-entropy of each unrolled step since the last check
        "held_out_losses": list[float],
        "greedy_alpha": list[float],  # held-out greedy rows: conditional acceptance at each position of a chain
        "greedy_tau": float,  # … and tokens a target pass, the rows walked as a decoder would
        "sampled_alpha": list[float],  # held-out rows at T = 1: Σ min(p, q) at each step
        "drafted_tau": float | None,  # by decoding held-out prompts with the drafter as it is served
    },
    _check,
)
"""One line a check."""


def _check_acceptance(row: Row) -> None:
    tested, accepted = row["tested_by_position"], row["accepted_by_position"]
    if len(tested) != len(accepted) or any(a > t for a, t in zip(accepted, tested, strict=False)):
        raise RecordError(f"accepted {accepted} of tested {tested}: expected at most as many at each position")
    if min(row["tokens"], row["target_passes"]) < 1:
        raise RecordError(f"{row['tokens']} tokens in {row['target_passes']} passes: expected at least one of each")


ACCEPTANCE = Schema(
    "acceptance",
    1,
    {
        "arm": str,  # 'chain', 'tree'
        "K": int,  # a chain's length, a tree's depth
        "temperature": float,
        "prompt_id": str,
        "domain": str,
        "split": str,
        "repetitive": bool,  # the greedy continuation repeats itself
        "identical": bool,  # the emitted tokens are those of greedy autoregressive decoding
        "tokens": int,
        "target_passes": int,
        "nodes": int,  # draft tokens that the target verified
        "tested_by_position": list[int],
        "accepted_by_position": list[int],
    },
    _check_acceptance,
)
"""One line a prompt and arm: what was accepted when the drafter served."""


def best_check(rows: Rows) -> Row:
    """The check whose weights are kept: the largest τ on held-out greedy rows, the newest of equals."""
    return max(rows, key=lambda row: (row["greedy_tau"], row["step"]))


def by_arm(rows: Rows) -> dict[str, list[Row]]:
    """Label → rows of the report prompts of an arm, lower temperatures first."""
    found: dict[str, list[Row]] = {}
    for row in sorted(report(rows), key=lambda row: row["temperature"]):
        found.setdefault(f"{row['arm']}, K = {row['K']}, T = {row['temperature']:g}", []).append(row)
    return found


def report(rows: Rows) -> list[Row]:
    return [row for row in rows if row["split"] == "report"]


def without_repetition(rows: Rows) -> list[Row]:
    return [row for row in rows if not row["repetitive"]]


def prompts(rows: Iterable[Row]) -> int:
    return len({row["prompt_id"] for row in rows})


def domains(rows: Rows) -> list[str]:
    """Domains of the report prompts as they come, and behind them all together."""
    return [*dict.fromkeys(row["domain"] for row in report(rows)), TOGETHER]


def alpha_by_position(rows: Rows, minimum: int = TESTED) -> list[float]:
    """α_i of i = 1, 2, …: Σaccepted/Σtested over prompts; NaN where it was tested fewer than `minimum` times."""
    totals = np.zeros((2, max((len(row["tested_by_position"]) for row in rows), default=0)))
    for row in rows:
        for total, field in zip(totals, ("accepted_by_position", "tested_by_position"), strict=True):
            total[: len(row[field])] += row[field]
    return [float(a / t) if t >= max(minimum, 1) else math.nan for a, t in zip(*totals, strict=True)]


def taus(rows: Rows) -> dict[str, Interval]:
    """τ = Σtokens/Σpasses of one arm with its 95% interval over prompts, by domain and of all together."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row["domain"], []).append(row)
    if rows:
        found[TOGETHER] = list(rows)
    return {
        domain: ratio_interval([row["tokens"] for row in own], [row["target_passes"] for row in own])
        for domain, own in found.items()
    }
