"""Captions and alternative texts of the figures of linear-attention verification."""

from __future__ import annotations

import numpy as np

from specdec_core.evidence.linear_claims import (
    FACTORS,
    HEADLINE_N,
    SCHEMES,
    Row,
    Rows,
    by_cell,
    floor_seconds,
    held_bytes,
    passes,
)
from specdec_core.evidence.plots_linear_speed import drawn_over


def window_caption(rows: Rows) -> str:
    row = rows[0]
    return (
        "Left: the gated delta rule of one node; the state decays before it is asked for what is stored at k, the "
        "output reads the updated state. Shaded: u depends on the node's own ancestors only, so what a window does to "
        "the state is a sum of outer products. Right: one head's window of "
        f"{len(row['parents'])} nodes, verified together; solid: the accepted path, with the share of each outer "
        f"product that is left after the decays behind it. The committed state is off by {row['error']:.1e} from the "
        "sequential rule in float64 (relative, computed in float32)."
    )


def window_alt(rows: Rows) -> str:
    row = rows[0]
    told = ", ".join(f"{node} with {weight:.2f}" for node, weight in zip(row["path"], row["weights"], strict=True))
    return (
        f"The steps decay, predict, correct, write, read of one node; and a tree of {len(row['parents'])} nodes whose "
        f"path of nodes {told} is committed onto {row['left']:.2f} of the state."
    )


def errors_caption(rows: Rows) -> str:
    trees = sum(row["trees"] for row in rows if row["form"] == rows[0]["form"] and row["kind"] != "rounds")
    return (
        "Largest deviation from the sequential rule in float64, relative to the largest number expected, over all "
        f"nodes and over every commit (each node of each tree, and none), {trees} random trees a form: decays from "
        "none to a full reset, rates up to 2, equal and opposite keys. Rounds: windows of chains, trees and no drafts "
        "in turn, rows changing places, against one sequential run. Lines: the tolerances of G1; an error of 0 is "
        "drawn at the foot."
    )


def errors_alt(rows: Rows) -> str:
    parts = []
    for form in dict.fromkeys(row["form"] for row in rows):
        worst = max(max(row["worst_output"], row["worst_state"]) for row in rows if row["form"] == form)
        parts.append(f"{form} {worst:.1e}")
    return f"Largest errors of each form: {', '.join(parts)}."


def traffic_caption(rows: Rows) -> str:
    row = _headline_rows(rows)[0]
    return (
        "Bytes of states and factors that a round moves (left) and that it keeps for the commit or works in beside the "
        "committed state (right), in units of that state, counted in the loops that move them. "
        f"{row['size']}: {row['heads']} "
        f"heads of {row['keys']} × {row['values']}, batch {row['batch']}, n = {row['n']}; both scales logarithmic. "
        "Plain: a chain, hatched: a tree of two children a node; half of the deepest branch is committed. Snapshots "
        "count the copy of the accepted state; inputs and outputs count nowhere, nor do those that tile resident keeps "
        "to go through the path again."
    )


def traffic_alt(rows: Rows) -> str:
    parts = []
    for row in _headline_rows(rows):
        moved = sum(passes(row))
        held = held_bytes(row) / row["state_bytes"]
        parts.append(f"{row['scheme']} on a {row['shape']} moves {moved:.3g} and holds {held:.2g}")
    return f"States moved and held by a round of each scheme. {'; '.join(parts)}."


def _headline_rows(rows: Rows) -> list[Row]:
    widths = {row["n"] for row in rows}
    n = HEADLINE_N if HEADLINE_N in widths else max(widths)
    return sorted((row for row in rows if row["n"] == n), key=lambda row: SCHEMES.index(row["scheme"]))


def speed_by_n_caption(rows: Rows) -> str:
    own = drawn_over(rows, "n") or rows
    return f"Time of a round, verify and commit, against the nodes a row; a panel a layer and batch. {_how(own)}"


def speed_by_batch_caption(rows: Rows) -> str:
    own = drawn_over(rows, "batch") or rows
    return f"Time of a round, verify and commit, at n = {own[0]['n']} against the batch; a panel a layer. {_how(own)}"


def speed_by_n_alt(rows: Rows) -> str:
    return _speed_alt(drawn_over(rows, "n") or rows)


def speed_by_batch_alt(rows: Rows) -> str:
    return _speed_alt(drawn_over(rows, "batch") or rows)


def _how(rows: Rows) -> str:
    repeats = min(len(row["seconds"]) for row in rows if row["seconds"])
    keys = ("scheme", "shape", "n", "batch", "size")
    missing = len({tuple(row[key] for key in keys) for row in rows if row["left_out"]})
    told = f" Points left out for too much memory or time: {missing}." if missing else ""
    return (
        "Chains above trees of two children a node; the rows of a batch commit paths of different lengths. Medians "
        f"of {repeats} repeats, all schemes interleaved on one state, with 95% bootstrap intervals. Lines without "
        "markers: states read once and written once at the machine's best reading bandwidth, and the operations of the "
        f"closed form at the best rate of a product of matrices.{told}"
    )


def _speed_alt(rows: Rows) -> str:
    """At the cell of the largest state at the headline's n: what each scheme takes, and the floor."""
    cells = [(cell, own) for cell, own in by_cell(rows).items() if FACTORS in own and own[FACTORS]["seconds"]]
    at = [pair for pair in cells if pair[0].n == HEADLINE_N] or cells
    cell, own = at[-1]
    timed = [row for row in own.values() if row["seconds"]]
    parts = [f"{row['scheme']} {1e3 * float(np.median(row['seconds'])):.3g} ms" for row in timed]
    floor = 1e3 * floor_seconds(timed[0])
    return f"Time of a round of each scheme. {cell}: {', '.join(parts)}; the bound is {floor:.3g} ms."
