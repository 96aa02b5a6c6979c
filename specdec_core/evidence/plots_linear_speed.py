"""Figures of how long a round of linear-attention verification takes, with the bounds of the machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec_core.evidence.figures import (
    Series,
    in_house_style,
    legend_below,
    log_axis,
    new_figure,
    series_styles,
    with_bars,
)
from specdec_core.evidence.linear_claims import (
    HEADLINE_N,
    SCHEMES,
    Cell,
    Row,
    Rows,
    arithmetic_seconds,
    cell_of,
    memory_seconds,
)
from specdec_core.evidence.linear_records import SHAPES
from specdec_core.statistics.intervals import median_interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MEMORY, ARITHMETIC = "memory: states read and written once", "arithmetic"
Key = tuple[Any, ...]
"""(size, batch) or (size,)."""


@in_house_style
def time_against_n(rows: Rows) -> Figure:
    """Time of a round against the nodes a row, a panel a layer and batch (smallest states left), chains above trees, a
    series a scheme; lines without markers are the bounds by memory and by arithmetic.

    rows  LINEAR_SPEED records; drawn are layers and batches with at least three n
    """
    return _panels(rows, "n", "nodes a row, n", lambda key: f"{key[0]}, batch {key[1]}")


@in_house_style
def time_against_batch(rows: Rows) -> Figure:
    """Time of a round against the batch at the headline's n, a panel a layer, chains above trees; as `time_against_n`.

    rows  LINEAR_SPEED records; drawn are layers with at least two batches
    """
    own = [row for row in rows if row["n"] == HEADLINE_N]
    return _panels(own, "batch", "batch (rows)", lambda key: str(key[0]))


def swept_over(rows: Rows, field: str) -> list[Key]:
    """What was swept over n (layers with their batch, at least three n) or over the batch (layers, at least two), the
    smallest states first."""
    least = 3 if field == "n" else 2
    values: dict[Key, set[int]] = {}
    largest: dict[Key, int] = {}
    for row in rows:
        key = _key(row, field)
        values.setdefault(key, set()).add(row[field])
        largest[key] = max(largest.get(key, 0), row["state_bytes"])
    return sorted((key for key, seen in values.items() if len(seen) >= least), key=lambda key: largest[key])


def drawn_over(rows: Rows, field: str) -> list[Row]:
    """The rows that the figure against n, or against the batch (at the headline's n), has panels for."""
    own = [row for row in rows if field == "n" or row["n"] == HEADLINE_N]
    keys = swept_over(own, field)
    return [row for row in own if _key(row, field) in keys]


def _key(row: Row, field: str) -> Key:
    return (row["size"], row["batch"]) if field == "n" else (row["size"],)


def _panels(rows: Rows, field: str, label: str, title: Callable[[Key], str]) -> Figure:
    keys = swept_over(rows, field)
    shapes = [shape for shape in SHAPES if any(row["shape"] == shape for row in rows)] if keys else list(SHAPES[:1])
    figure, panels = new_figure(panels=max(1, len(keys)), lines=len(shapes), height=1.1 + 1.85 * len(shapes))
    names = [name for name in SCHEMES if any(row["scheme"] == name and row["seconds"] for row in rows)]
    styles = series_styles(names)
    for axes, (shape, key) in zip(panels, ((shape, key) for shape in shapes for key in keys), strict=False):
        own = [row for row in rows if row["shape"] == shape and _key(row, field) == key]
        for name in names:
            _timed(axes, [row for row in own if row["scheme"] == name], field, styles[name], name)
        _bounds(axes, own, field)
        values = sorted({row[field] for row in own})
        axes.set_xscale("log", base=2)
        axes.set_xticks(values, [str(value) for value in values])
        axes.set_yscale("log")
        log_axis(axes.yaxis, *axes.get_ylim())
        axes.set_title(f"{title(key)}, {shape}s")
        if shape == shapes[-1]:
            axes.set_xlabel(label)
        if key == keys[0]:
            axes.set_ylabel("ms a round")
    if not keys:
        panels[0].set_title(f"nothing was swept over {field}")
        return figure
    legend_below(figure, panels, names)
    return figure


def _timed(axes: Axes, rows: Rows, field: str, style: Series, label: str) -> None:
    own = sorted((row for row in rows if row["seconds"]), key=lambda row: row[field])
    if not own:
        return
    estimates, (below, above) = with_bars([median_interval(1e3 * np.array(row["seconds"])) for row in own])
    below = [value if np.isfinite(value) else 0.0 for value in below]  # one repeat has no interval
    axes.errorbar(
        [row[field] for row in own], estimates, yerr=[below, above], color=style.color, marker=style.marker,
        linestyle=style.linestyle, linewidth=1.0, markersize=3, capsize=1.2, elinewidth=0.7, label=label,
    )  # fmt: skip


def _bounds(axes: Axes, rows: Rows, field: str) -> None:
    """What memory and arithmetic of the machine allow, over what was measured."""
    cells = _one_a_cell(rows)
    x = [getattr(cell, field) for cell in cells]
    for bound, label, line in ((memory_seconds, MEMORY, ":"), (arithmetic_seconds, ARITHMETIC, (0, (6, 2)))):
        y = [1e3 * bound(row) for row in cells.values()]
        axes.plot(x, y, color="0.15", linestyle=line, linewidth=1.1, label=label)


def _one_a_cell(rows: Iterable[Row]) -> dict[Cell, Row]:
    """Any row of each cell, by n and batch: what the bounds are made of is the same in all."""
    found = {cell_of(row): row for row in rows}
    return dict(sorted(found.items(), key=lambda item: (item[0].n, item[0].batch)))
