"""Records of notebook 04: outputs of batched decoders, faults and detectors, seeded rows, realigning, batch sizes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_core.evidence.schemas import RecordError, Schema


def _check_output(row: Mapping[str, Any]) -> None:
    if row["exact"] != (row["first_divergence"] < 0) or (row["exact"] and not row["certified"]):
        raise RecordError(
            f"exact {row['exact']}, first divergence {row['first_divergence']}, certified {row['certified']}: an exact "
            "output diverges nowhere (−1) and counts as certified"
        )
    if not 0 <= row["matching"] <= max(row["tokens"], row["expected"]):
        raise RecordError(f"{row['matching']} matching tokens of {row['tokens']}, expected {row['expected']}")


def _check_cell(row: Mapping[str, Any]) -> None:
    if row["fired"] != (row["round"] >= 0 or row["where"] != ""):
        raise RecordError(f"fired {row['fired']}, round {row['round']}, where {row['where']!r}: they contradict")


def _check_seconds(row: Mapping[str, Any]) -> None:
    if row["batch"] < 1 or any(value < 0 for value in row["seconds"]):
        raise RecordError(f"batch {row['batch']}, seconds {row['seconds'][:3]}…: expected a batch ≥ 1, no time < 0")


def _check_run(row: Mapping[str, Any]) -> None:
    _check_seconds(row)
    if len(row["latencies"]) != len(row["latency_tokens"]) or sum(row["latency_tokens"]) != row["tokens"]:
        raise RecordError(
            f"{len(row['latencies'])} latencies of {sum(row['latency_tokens'])} tokens: expected a latency for each of "
            f"the {row['tokens']} emitted, and how many took it"
        )
    if not row["least_accepted"] <= row["accepted"] <= row["drafted"] or bool(row["K"]) != bool(row["drafter"]):
        raise RecordError(
            f"drafter {row['drafter']!r}, K = {row['K']}, drafted {row['drafted']}, accepted {row['accepted']}, by the "
            f"slowest {row['least_accepted']}: expected each at most the one before, and K = 0 without a drafter"
        )


RAGGED_OUTPUT = Schema(
    "ragged_output",
    1,
    {
        "way": str,  # how the batch is kept and accepted: 'scatter', 'realign (EQSPEC)', 'positions kept (BSP-like)', …
        "broken": bool,  # published as a way that corrupts its output
        "engine": str,  # 'numba float32', 'transformers float32', …
        "drafter": str,
        "K": int,
        "slots": int,  # rows decoded together
        "prompt_id": str,
        "tokens": int,  # emitted, greedily
        "expected": int,  # tokens of the same prompt decoded autoregressively, alone
        "exact": bool,  # the very same token ids
        "matching": int,  # positions at which both have the same token
        "first_divergence": int,  # index of the first emitted token that differs, −1 if none
        "certified": bool,  # exact, or every divergence a certified near-tie
        "divergences": int,  # counted on after each certified one
        "first_rejection": int,  # tokens emitted when the first draft token had been rejected, −1 if none ever was
        "rounds": int,  # target passes that the row took part in
        "drafted": int,
        "accepted": int,
        "differs_at": str,  # a character a token: '=' the same, 'x' another, '~' after a certified near-tie
    },
    _check_output,
)
"""One line a (way, engine, drafter, slots, prompt)."""

RAGGED_ROUND = Schema(
    "ragged_round",
    1,
    {
        "engine": str,
        "round": int,
        "slot": int,
        "prompt_id": str,
        "cached": int,  # entries of the row before the round
        "pieces": list[str],  # text of the nodes: the newest token, then its draft (a chain)
        "kept": int,  # nodes whose entries stay, the first included
        "emitted": list[str],
        "ending": str,
    },
)
"""One line a row of one round of a batch, as it was decoded."""

FAULT_CELL = Schema(
    "fault_cell",
    1,
    {
        "fault": str,  # 'none' for correct code
        "seam": str,  # what is replaced: a state, the loop, the drafter's state
        "subject": str,  # the correct state and the model that it is put in: 'scatter, rotary', 'rectangle, learned', …
        "expected": str,  # the signature that it should leave: a hypothesis
        "sound": bool,  # correct code, or a fault that cannot matter in this subject (a control): nothing may be seen
        "detector": str,
        "family": str,  # oracle, invariant, metamorphic, canary, law
        "fired": bool,
        "crashed": bool,  # the run ended in an error instead: no detection
        "round": int,  # of the first evidence, −1 if it has none
        "tokens": int,  # that the row had emitted before it, −1 if unknown
        "where": str,  # row, event, layer, slot, position; '' if nothing was seen
    },
    _check_cell,
)
"""One line a (fault, subject, detector)."""

SEEDED_ROW = Schema(
    "seeded_row",
    1,
    {
        "engine": str,
        "drafter": str,
        "change": str,  # what the row's neighbours had changed: 'alone', 'other seeds', 'permuted', 'fewer slots', …
        "slots": int,
        "prompt_id": str,
        "tokens": int,
        "same": bool,  # the row's tokens and rounds are those of the batch before the change
        "own": bool,  # another seed gives this row another output (a row that ignores its seed would be isolated too)
    },
)
"""One line a (drafter, change, sampled row)."""

REALIGN = Schema(
    "realign",
    1,
    {
        "way": str,  # 'scatter', 'realign', 'scatter, tree'
        "engine": str,
        "batch": int,
        "n": int,  # nodes a row
        "context": int,
        "phase": str,  # 'commit' (keeping what was accepted: what realigning adds) or 'round' (verification and commit)
        "seconds": list[float],  # a sample a repeat, all ways interleaved
    },
    _check_seconds,
)
"""One line a (way, engine, batch, phase)."""

BATCH_RUN = Schema(
    "batch_run",
    1,
    {
        "engine": str,
        "way": str,  # 'scatter' or 'grouped by length'
        "drafter": str,  # '' without speculation
        "K": int,
        "batch": int,
        "repeat": int,  # runs of one repeat decode the same prompts: they pair
        "rows": int,
        "tokens": int,
        "target_passes": int,
        "row_rounds": int,
        "drafted": int,
        "accepted": int,
        "seconds": list[float],  # one: the whole run without admissions
        "latencies": list[float],  # seconds a token: since its row's round before, divided by the round's tokens
        "latency_tokens": list[int],  # tokens that took each of them
        "completions": list[float],  # seconds until each row was complete, from the start of the run
        "least_accepted": int,  # sum over passes of (rows × the batch's smallest number of accepted tokens)
        "predicted_seconds": float,  # by standalone curves recorded before
        "identical": bool,  # every row equals its batch-1 autoregressive output
    },
    _check_run,
)
"""One line a decoded batch."""

BATCH_CURVE = Schema(
    "batch_curve",
    1,
    {
        "engine": str,
        "batch": int,
        "n": int,  # nodes a row
        "context": int,
        "seconds": list[float],
    },
    _check_seconds,
)
"""One line a (batch, n): a standalone pass over batch × n nodes, recorded before any decoding."""
