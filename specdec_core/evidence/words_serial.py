"""Captions and alternative texts of the figures of serialized verification."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_core.evidence.plots_serial import backends_of
from specdec_core.evidence.serial_claims import MODEL, N, parts_over_model, serialization

Rows = Sequence[Mapping[str, Any]]


def fan_caption(rows: Rows) -> str:
    repeats = min(len(row["seconds"]) for row in rows)
    return (
        "Time of one target pass over n new tokens, relative to n = 1 (left) and in ms (right), both scales "
        f"logarithmic: serial verification has slope 1, batched slope 0. Medians of at least {repeats} repeats, "
        f"interleaved in random order within a session; context {min(row['context'] for row in rows)}."
    )


def index_alt(rows: Rows) -> str:
    found = {name: serialization(rows, name) for name in backends_of(rows)}
    parts = [f"{name} {index.estimate:.2f}" for name, index in found.items() if index is not None]
    return f"Serialization index s_{N}: {', '.join(parts)}."


def index_caption(rows: Rows) -> str:
    return (
        f"Serialization index s_{N} = (t({N})/t(1) − 1)/{N - 1}: 0 where {N} tokens cost what one costs, 1 where they "
        "cost as many passes. Medians of ratios paired by repeat, simultaneous 95% bootstrap intervals. Hollow: the "
        "same relative to the serial twin, which verifies token by token with the same weights. Dashed: thresholds of "
        "S1."
    )


def extra_caption(rows: Rows) -> str:
    return (
        f"Extra time of a pass over {N} tokens against one token, by operation: our engines' operations timed alone "
        "over the weights of all layers, llama.cpp's by groups of nodes of its graph. Diamonds: the uninstrumented "
        "model in the same interleaved run. Medians."
    )


def extra_alt(rows: Rows) -> str:
    parts = []
    for name in backends_of(rows):
        widths = sorted({row["n"] for row in rows if row["backend"] == name and row["operation"] == MODEL})
        ratios = [f"{parts_over_model(rows, name, n).estimate:.2f} at n={n}" for n in widths]
        parts.append(f"{name}: parts over model {', '.join(ratios)}")
    return f"Stacked bars of extra time by operation. {'; '.join(parts)}."


def dispatch_caption(dispatch: Rows, shares: Rows) -> str:
    return (
        "Which matrices ggml serves one column at a time (orange), and which with a kernel for many columns (blue), by "
        f"its rules, for the shipped file; grey: one token. {dispatch[0]['basis'].capitalize()}: nothing was run. "
        "Right: the share of all weight bytes that is served serially."
    )


def dispatch_alt(dispatch: Rows, shares: Rows) -> str:
    metal = {row["n"]: row["serial_share"] for row in shares if (row["backend"], row["variant"]) == ("Metal", "Q4_1")}
    told = ", ".join(f"{share:.0%} at n={n}" for n, share in sorted(metal.items()) if n in (2, 8, 9, 16))
    return f"Kernels by matrix and n. Predicted on Metal for the shipped file, served serially: {told or 'not known'}."


def context_caption(rows: Rows) -> str:
    return (
        f"Time of a pass over 1 and over {N} tokens against the number of cached tokens: attention grows with both, "
        "the products with the weights with n alone. Medians with 95% bootstrap intervals."
    )


def context_alt(rows: Rows) -> str:
    contexts = sorted({row["context"] for row in rows})
    return f"Time of a pass against the context, {', '.join(map(str, contexts))} cached tokens."
