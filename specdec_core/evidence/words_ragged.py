"""Captions and alternative texts of the figures of what batches emit (plots_ragged.py)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_core.evidence.ragged_exactness import COMPILED, match_shares

Rows = Sequence[Mapping[str, Any]]


def round_caption(rows: Rows) -> str:
    return (
        f"Round {rows[0]['round']} of a batch of {len(rows)} rows, as it was decoded (drafter: the target in 4 bits). "
        "Left: as a rectangle, every row padded to the longest. Middle: the same rectangle once every row keeps what "
        "it accepted, and by how many columns all keys and values of a row have to move for that. Right: masked "
        "scatter, where a row's entries begin at its own column 0: nothing moves, a length grows, what was rejected "
        "is overwritten next. Committed tokens and padding are not to scale."
    )


def round_alt(rows: Rows) -> str:
    kept = ", ".join(f"{row['kept']} of {len(row['pieces'])}" for row in rows)
    return f"One decoding round drawn three ways; the rows keep {kept} of their nodes."


def corruption_caption(rows: Rows) -> str:
    published = _published(rows)
    first = published[0]
    return (
        f"Every emitted token against the same prompt decoded alone without a drafter, {_count(published)} prompts "
        f"(the first 12 drawn, a line each), batches of {first['slots']}, K = {first['K']}, greedy, {first['engine']}. "
        "The text of a row that was corrupted may equal the right one here and there by chance."
    )


def corruption_alt(rows: Rows) -> str:
    parts = [f"{way}: {exact:.0%} of rows exact" for way, exact, _ in match_shares(_published(rows))]
    return "Rasters of right and wrong tokens for each published way. " + "; ".join(parts) + "."


def matches_caption(rows: Rows) -> str:
    published = _published(rows)
    return (
        f"Rows whose token ids equal those of the row decoded alone, and tokens that do, {_count(published)} prompts, "
        f"batches of {published[0]['slots']}. A row is certified where a difference is a near-tie: a gap of at most "
        "2ε, reproduced without a drafter by passes of the same shapes."
    )


def matches_alt(rows: Rows) -> str:
    shares = match_shares(_published(rows))
    return "; ".join(f"{way}: {exact:.0%} of rows, {partial:.0%} of tokens" for way, exact, partial in shares) + "."


def matrix_caption(rows: Rows) -> str:
    put = {(row["fault"], row["subject"]) for row in rows if not row["sound"]}
    return (
        "Faults (lines) against detectors (columns). Shade: share of the decoders that a fault was put into "
        f"({len(put)} in all) in which the detector saw it; number: the earliest round of the evidence; •: seen, "
        "without a round; ×: the decoder crashed. Grey: not applicable. Last line: correct code, where nothing "
        "may be seen."
    )


def matrix_alt(rows: Rows) -> str:
    faults = list(dict.fromkeys(row["fault"] for row in rows if not row["sound"]))
    parts = []
    for fault in faults:
        seen = {row["detector"] for row in rows if row["fault"] == fault and row["fired"]}
        parts.append(f"{fault}: {len(seen)}")
    return f"{len(faults)} faults, and by how many detectors each is seen. " + "; ".join(parts) + "."


def _published(rows: Rows) -> Rows:
    return [row for row in rows if row["engine"] != COMPILED]


def _count(rows: Rows) -> int:
    return len({row["prompt_id"] for row in rows})
