"""Records of a training run: one line a check."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_core.evidence.schemas import RecordError, Schema


def _check(row: Mapping[str, Any]) -> None:
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


def _check_acceptance(row: Mapping[str, Any]) -> None:
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
