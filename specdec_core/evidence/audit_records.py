"""Audits of samplers, ours and others', on the same pair of models and settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_core.evidence.schemas import RecordError, Schema

OURS, PLAIN, ASSISTED = "ours", "transformers, plain", "transformers, assisted"
SINGLE = "transformers, Gemma 4's generator"
"""Of assistants that draft all tokens from one position: the argmax, tested as if it had been drawn."""
DECODERS = (ASSISTED, SINGLE, PLAIN, OURS)
VERDICTS = ("lossless", "not lossless", "undecided")
FINDINGS = "exact findings"
"""The `test` of the one row that each audit has for what no p-value is needed for; its statistic counts them."""


def _known(row: Mapping[str, Any]) -> None:
    if row["verdict"] not in VERDICTS:
        raise RecordError(f"verdict {row['verdict']!r}: expected one of {', '.join(VERDICTS)}")


AUDIT = Schema(
    "audit",
    1,
    {
        "decoder": str,
        "pair": str,
        "setting": str,
        "test": str,
        "statistic": float,
        "p": float,
        "adjusted": float | None,  # by Holm within the audit, None outside its family
        "bias": float | None,  # of the audit, in the drafter's direction; None: not measured
        "low": float | None,
        "high": float | None,
        "tv_lower": float | None,
        "tokens": int,
        "rounds": int | None,  # that they came in, None if the decoder does not tell
        "verdict": str,  # of the audit
        "note": str,
    },
    _known,
)
"""One line a test of an audit."""
