"""Figures of ragged batches: one round drawn, corruption token by token, how much matches, faults against detectors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec_core.evidence.figures import in_house_style, new_figure
from specdec_core.evidence.ragged_exactness import COMPILED, match_shares

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

COMMITTED, PADDING = 9, 5
"""Cells that stand for a row's committed tokens and padding together, and for the most padding: not to scale."""


@in_house_style
def ragged_round(rows: Rows) -> Figure:
    """One round of a batch: what a rectangle is fed, what realigning moves afterwards, and what scatter keeps.

    rows  RAGGED_ROUND records
    """
    from matplotlib.patches import Patch

    figure, axes = new_figure(panels=3, height=0.3 * len(rows) + 0.95, width=2.1)
    colors = _round_colors()
    before = np.array([row["cached"] for row in rows])
    kept = np.array([row["kept"] for row in rows])
    after = before + kept
    pads, new_pads = before.max() - before, after.max() - after
    nodes = max(len(row["pieces"]) for row in rows)
    edge = max(_drawn(pad, pads.max())[1] + count for pad, count in zip(pads, kept, strict=True))
    titles = ("fed, as a rectangle", "kept, realigned", "kept, scattered")
    for axis, title in zip(axes, titles, strict=True):
        axis.set_title(title)
        axis.set_xlim(0, COMMITTED + nodes + (0 if axis is axes[0] else 3.4))
        axis.set_ylim(len(rows) - 0.4, -0.6)
        axis.set_xticks([])
        axis.grid(False)
        axis.spines[["left", "bottom"]].set_visible(False)
        axis.set_yticks(range(len(rows)), [f"row {row['slot']}" for row in rows] if axis is axes[0] else [])
    for place, row in enumerate(rows):
        padding, held = _drawn(pads[place], pads.max())
        rejected = len(row["pieces"]) - row["kept"]
        draft = ["kept"] * row["kept"] + ["rejected"] * rejected + ["pad"] * (nodes - len(row["pieces"]))
        _cells(axes[0], place, ["pad"] * padding + ["held"] * held + draft, colors)
        moved = int(new_pads[place] - pads[place])
        shift = int(edge - held - row["kept"])
        _cells(axes[1], place, ["pad"] * shift + ["held"] * held + ["kept"] * row["kept"], colors)
        label = f"moved {moved:+d}" if moved else "stays"
        axes[1].text(edge + 0.3, place, label, va="center", fontsize=6.5)
        _cells(axes[2], place, ["held"] * held + ["kept"] * row["kept"] + ["free"] * rejected, colors)
        axes[2].text(held + len(row["pieces"]) + 0.3, place, f"length {after[place]}", va="center", fontsize=6.5)
    names = ("padding", "committed", "accepted", "rejected", "overwritten next")
    handles = [
        Patch(facecolor=color, edgecolor="0.4", label=name, linewidth=0.4)
        for color, name in zip(colors.values(), names, strict=True)
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure


def _drawn(padding: np.integer, most: np.integer) -> tuple[int, int]:
    """Cells of padding and of committed tokens: padding in proportion to the most, at least one if there is any."""
    cells = 0 if not padding else max(1, round(PADDING * int(padding) / int(most)))
    return cells, COMMITTED - cells


def _round_colors() -> dict[str, Any]:
    import seaborn as sns

    blue, orange, green, *_ = sns.color_palette("colorblind")
    pale = tuple(0.55 + 0.45 * channel for channel in blue)
    return {"pad": "0.93", "held": pale, "kept": green, "rejected": orange, "free": "white"}


def _cells(axes: Axes, place: int, kinds: Sequence[str], colors: Mapping[str, Any]) -> None:
    for column, kind in enumerate(kinds):
        look = {"color": colors[kind], "hatch": {"rejected": "////", "free": "...."}.get(kind)}
        axes.barh(place, 0.92, left=column + 0.04, height=0.72, edgecolor="0.4", linewidth=0.4, **look)


@in_house_style
def corruption_by_token(rows: Rows, most: int = 12) -> Figure:
    """A raster a published way: a line a row, a column a token, right or wrong; the first rejection marked.

    rows  RAGGED_OUTPUT records; the first `most` prompts are drawn
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    published = [row for row in rows if row["engine"] != COMPILED]
    ways = list(dict.fromkeys(row["way"] for row in published))
    lines = -(-len(ways) // 3)
    figure, axes = new_figure(panels=3, height=1.35 * lines + 0.5, lines=lines)
    colors = _raster_colors()
    shades = ListedColormap(list(colors.values()))
    for axis, way in zip(axes, ways, strict=False):
        own = [row for row in published if row["way"] == way][:most]
        width = max(len(row["differs_at"]) for row in own)
        table = np.array([["=~x.".index(mark) for mark in row["differs_at"].ljust(width, ".")] for row in own])
        axis.imshow(table, aspect="auto", cmap=shades, vmin=0, vmax=3, interpolation="none")
        for place, row in enumerate(own):
            if row["first_rejection"] >= 0:
                axis.plot([row["first_rejection"] - 1], [place], marker="|", color="black", markersize=4, linewidth=0)
        axis.set_title(way)
        axis.set_yticks([])
        axis.grid(False)
        axis.set_xlabel("emitted token")
    for axis in axes[len(ways) :]:
        axis.set_axis_off()
    names = ("as decoded alone", "behind a certified near-tie", "another token", "row has ended")
    handles: list[Any] = [
        Patch(facecolor=c, edgecolor="0.5", label=n) for c, n in zip(colors.values(), names, strict=True)
    ]
    handles.append(
        Line2D([], [], marker="|", color="black", linewidth=0, label="first token recovered from a rejection")
    )
    figure.legend(handles=handles, loc="outside lower center", ncols=3)
    return figure


def _raster_colors() -> dict[str, Any]:
    import seaborn as sns

    blue, orange, *_ = sns.color_palette("colorblind")
    pale = tuple(0.7 + 0.3 * channel for channel in blue)
    return {"=": pale, "~": "0.6", "x": orange, ".": "white"}


@in_house_style
def matches_by_way(rows: Rows) -> Figure:
    """Share of rows that are exact and share of tokens that match, a line a published way.

    rows  RAGGED_OUTPUT records
    """
    import seaborn as sns

    published = [row for row in rows if row["engine"] != COMPILED]
    shares = match_shares(published)
    figure, (axes,) = new_figure(width=1.5, height=0.32 * len(shares) + 0.7)
    blue, orange, *_ = sns.color_palette("colorblind")
    for place, (way, exact, partial) in enumerate(shares):
        own = [row for row in published if row["way"] == way]
        certified = sum(row["certified"] for row in own) / len(own)
        axes.plot(
            [100 * partial],
            [place],
            marker="s",
            color=orange,
            linewidth=0,
            label=None if place else "tokens that match",
        )
        axes.plot([100 * exact], [place], marker="o", color=blue, linewidth=0, label=None if place else "rows exact")
        axes.plot([100 * certified], [place], marker="|", color="black", markersize=9, linewidth=0,
                  label=None if place else "rows exact or certified")  # fmt: skip
    axes.set_yticks(range(len(shares)), [way for way, _, _ in shares])
    axes.set_ylim(len(shares) - 0.5, -0.5)
    axes.set_xlim(-4, 104)
    axes.set_xlabel("% of rows, % of tokens")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


@in_house_style
def fault_matrix(rows: Rows) -> Figure:
    """Faults against detectors: which sees which, and after how many rounds, over all decoders that it was put into.

    rows  FAULT_CELL records
    """
    import seaborn as sns
    from matplotlib.colors import ListedColormap

    faults, detectors = _in_order(rows, "fault"), _in_order(rows, "detector")
    table = np.full((len(faults), len(detectors)), np.nan)
    figure, (axes,) = new_figure(width=2.1, height=0.155 * len(faults) + 1.9)
    cells: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    for row in rows:
        cells.setdefault((row["fault"], row["detector"]), []).append(row)
    for (fault, detector), own in cells.items():
        y, x = faults.index(fault), detectors.index(detector)
        table[y, x] = sum(row["fired"] for row in own) / len(own)
        ink = "white" if table[y, x] > 0.6 else "black"
        axes.text(x, y, _evidence(own), ha="center", va="center", fontsize=5.5, color=ink)
    blue = sns.color_palette("colorblind")[0]
    shades = [tuple(1 - share * (1 - channel) for channel in blue) for share in np.linspace(0, 1, 11)]
    cmap = ListedColormap(shades).with_extremes(bad="0.88")
    axes.imshow(table, aspect="auto", cmap=cmap, vmin=0, vmax=1, interpolation="none")
    for place, name in _groups([_group_of(fault, rows) for fault in faults]):
        axes.axhline(place - 0.5, color="black", linewidth=0.7)
        short = name.removeprefix("the ").removesuffix("'s state")
        axes.text(len(detectors) - 0.3, place, short, rotation=270, ha="left", va="top", fontsize=6.5)
    families = {row["detector"]: row["family"] for row in rows}
    for place, name in _groups([families[detector] for detector in detectors]):
        axes.axvline(place - 0.5, color="black", linewidth=0.7)
        axes.text(place - 0.4, -0.75, name, ha="left", va="bottom", fontsize=6.5)
    axes.set_xticks(range(len(detectors)), detectors, rotation=55, ha="right", rotation_mode="anchor", fontsize=6)
    axes.set_yticks(range(len(faults)), faults, fontsize=6)
    axes.grid(False)
    return figure


def _in_order(rows: Rows, field: str) -> list[str]:
    """Faults by seam, correct code last; detectors as they come."""
    if field == "fault":
        rows = sorted(rows, key=lambda row: (not row["seam"], row["seam"]))
    return list(dict.fromkeys(row[field] for row in rows))


def _group_of(fault: str, rows: Rows) -> str:
    return next(row["seam"] for row in rows if row["fault"] == fault)


def _groups(names: Sequence[str]) -> list[tuple[int, str]]:
    """Where each run of equal names begins."""
    return [(place, name) for place, name in enumerate(names) if not place or name != names[place - 1]]


def _evidence(rows: Rows) -> str:
    """The earliest round of what was seen; a dot if it has none; a cross for a crash."""
    fired = [row["round"] for row in rows if row["fired"]]
    if fired:
        return str(min(rounds)) if (rounds := [one for one in fired if one >= 0]) else "•"
    return "×" if any(row["crashed"] for row in rows) else ""
