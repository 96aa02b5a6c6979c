"""Figures of the backend sweep and the cost curves: from lists of records to a figure, nothing read, nothing saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
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
from specdec_core.evidence.sweep_claims import by_configuration
from specdec_core.evidence.sweep_records import Pairs, Row, conditional_acceptance, pair_up

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@in_house_style
def curve_t_of_n(rows: Sequence[Row], ceilings: Sequence[Row] = ()) -> Figure:
    """t(n) in ms with its band, and v(n) = t(n)/t(1), one series a configuration and context.

    Both scales are logarithmic: serial verification has slope 1, parallel is flat.

    rows      COST_CURVE records
    ceilings  CEILING records: the least time that memory and arithmetic of the machine allow, dotted
    """
    curves = _curves(rows)
    figure, (times, relative) = new_figure(panels=2, height=2.2 + 0.1 * max(4, len(curves)))
    styles = series_styles(list(curves))
    for name, points in curves.items():
        style, n = styles[name], [point["n"] for point in points]
        median, low, high = (
            np.array([point[f"seconds_{end}"] for point in points]) * 1e3 for end in ("median", "low", "high")
        )
        _line(times, n, median, style, name)
        times.fill_between(n, low, high, color=style.color, alpha=0.2, linewidth=0)
        if n[0] == 1:
            _line(relative, n, median / median[0], style, name)
    widest = max((row["n"] for row in rows), default=1)
    for ceiling in ceilings:
        tokens = np.arange(1, widest + 1)
        memory = ceiling["weight_bytes"] / ceiling["bytes_per_second"]
        least = np.maximum(memory, tokens * ceiling["flops_per_token"] / ceiling["flops_per_second"]) * 1e3
        color = styles[ceiling["configuration"]].color if ceiling["configuration"] in styles else "0.35"
        times.plot(
            tokens, least, color=color, linestyle=":", linewidth=1, label=f"machine's limit, {ceiling['configuration']}"
        )
    relative.plot([1, widest], [1, widest], color="0.35", linestyle="--", linewidth=0.8, label="serial, v(n) = n")
    relative.plot([1, widest], [1, 1], color="0.35", linestyle=":", linewidth=0.8, label="parallel, v(n) = 1")
    for axes, label in ((times, "t(n), ms"), (relative, "v(n) = t(n)/t(1)")):
        axes.set_xscale("log", base=2)
        axes.set_xticks(_powers_of_two(widest), [str(n) for n in _powers_of_two(widest)])
        axes.set_xlabel("new tokens in one target pass, n")
        axes.set_ylabel(label)
        axes.set_yscale("log")
        log_axis(axes.yaxis, *axes.get_ylim())
    legend_below(figure, [times, relative], list(curves))
    return figure


def curves_of_backends(rows: Sequence[Row], ceilings: Sequence[Row] = ()) -> Figure:
    """`curve_t_of_n` at the shortest context alone: of many backends, several contexts would hide one another."""
    return curve_t_of_n(at_shortest_context(rows), ceilings)


def at_shortest_context(rows: Sequence[Row]) -> list[Row]:
    """COST_CURVE records at the shortest context that any was measured at."""
    shortest = min((row["context"] for row in rows), default=0)
    return [row for row in rows if row["context"] == shortest]


@in_house_style
def acceptance_profile(rows: Sequence[Row]) -> Figure:
    """a_K against K (filled) and the conditional acceptance α_i by position at the greatest K (hollow), a panel a
    drafter, a colour a backend; T > 0 in squares.

    rows  SWEEP records, all prompts pooled; positions tested fewer than 10 times are left out
    """
    grouped, alphas = by_configuration(pair_up(rows)), conditional_acceptance(rows, minimum=10)
    drafters, colors = drafters_of(rows), backend_colors(rows)
    names = list(dict.fromkeys(drafters.values())) or [""]
    lines, columns = -(-len(names) // 4), min(4, len(names))
    figure, panels = new_figure(panels=columns, lines=lines, height=0.8 + 1.35 * lines, sharex=True, sharey=True)
    widest = max((pairs.cell.K for cells in grouped.values() for pairs in cells), default=1)
    for axes, name in zip(panels, names, strict=False):
        axes.set_title(name)
    for (name, temperature), cells in grouped.items():
        axes, color = panels[names.index(drafters[name])], colors[cells[0].backend]
        marker, alpha = "s" if temperature else "o", alphas[cells[-1].cell]
        look = {"color": color, "marker": marker, "markersize": 3.2, "linewidth": 0.9}
        axes.plot([each.cell.K for each in cells], [each.acceptance() for each in cells], **look)
        axes.plot(range(1, len(alpha) + 1), alpha, linestyle=(0, (4, 1.5)), markerfacecolor="white", **look)
    for number, axes in enumerate(panels):
        axes.set_ylim(0, 1.05)
        axes.set_xlim(0.5, widest + 0.5)
        axes.set_xticks(range(1, widest + 1, 1 if widest < 7 else 2))
        axes.set_visible(number < len(names))
        if number + columns >= len(names):
            axes.set_xlabel("K, or position i")
            axes.tick_params(labelbottom=True)
        if number % columns == 0:
            axes.set_ylabel("acceptance")
    hollow = {"marker": "o", "markerfacecolor": "white", "linestyle": "--"}
    guides: list[tuple[str, Mapping[str, Any]]] = [("$a_K$", {"marker": "o"}), (r"$\alpha_i$", hollow)]
    if any(temperature for _, temperature in grouped):
        guides.append(("T = 1 (squares)", {"marker": "s", "linestyle": "none"}))
    color_legend(figure, panels[0], colors, guides)
    return figure


@in_house_style
def speedup_heat_map(rows: Sequence[Row]) -> Figure:
    """Speedup over AR of every configuration (lines) at every K (columns): blue faster, red slower, white 1. Bold where
    the 95% interval excludes 1; framed: the best K of its line.

    rows  SWEEP records; drawn are the report prompts without repetition, those that claim B1 is judged on
    """
    import seaborn as sns
    from matplotlib.patches import Rectangle

    grouped = as_recorded(rows, pair_up(rows, split="report", repetitive=False).values())
    names, ks = series_names(grouped), sorted({each.cell.K for cells in grouped.values() for each in cells})
    figure, (axes,) = new_figure(width=1.9, height=0.75 + 0.19 * max(len(names), 2))
    table = np.full((len(names), max(len(ks), 1)), np.nan)
    for line, cells in enumerate(grouped.values()):
        found = {ks.index(each.cell.K): each.speedup() for each in cells}
        best = max(found, key=lambda column: found[column].estimate)
        for column, speedup in found.items():
            table[line, column] = math.log2(speedup.estimate)
            sure = "bold" if speedup.excludes(1.0) else "normal"
            dark = abs(table[line, column]) > 0.95
            axes.text(column, line, f"{speedup.estimate:.2f}", ha="center", va="center", fontsize=6.5, fontweight=sure,
                      color="white" if dark else "black")  # fmt: skip
        axes.add_patch(Rectangle((best - 0.48, line - 0.46), 0.96, 0.92, fill=False, edgecolor="black", linewidth=1))
    colors = sns.diverging_palette(20, 250, s=85, l=45, as_cmap=True)
    if names:
        axes.imshow(table, cmap=colors, vmin=-1.5, vmax=1.5, aspect="auto")
    axes.set_xticks(range(len(ks)), [str(k) for k in ks])
    axes.set_yticks(range(len(names)), names)
    axes.set_xlabel("speculation length K")
    axes.set_facecolor("0.9")  # what was not measured: white is a speedup of 1
    axes.grid(False)
    return figure


@in_house_style
def predicted_against_measured(rows: Sequence[Row], low: float = 0.8, high: float = 1.25) -> Figure:
    """Measured speedup (95% interval) against predicted, one point a cell, the band low ≤ measured/predicted ≤ high.

    rows  SWEEP records; drawn are the report prompts, those that claim B3 is judged on
    """
    figure, (axes,) = new_figure(width=1.3, height=3.7)
    grouped = by_configuration(pair_up(rows, split="report"))
    names = series_names(grouped)
    styles = series_styles(names)
    seen: list[float] = [1.0]
    for cells, label in zip(grouped.values(), names, strict=True):
        style = styles[label]
        predicted = [pairs.predicted_speedup() for pairs in cells]
        measured = [pairs.speedup() for pairs in cells]
        seen += predicted + [interval.estimate for interval in measured]
        axes.errorbar(
            predicted, *with_bars(measured), color=style.color, marker=style.marker, linestyle="none", capsize=1.5,
            elinewidth=0.7, label=label,
        )  # fmt: skip
    prediction_axes(axes, min(seen) / 1.3, max(seen) * 1.3, low, high)
    axes.set_aspect("equal")
    legend_below(figure, [axes], names)
    return figure


def prediction_axes(axes: Axes, first: float, last: float, low: float, high: float) -> None:
    """Both axes from `first` to `last`, logarithmic, with the lines of equality and of S = 1, and the band
    low ≤ measured/predicted ≤ high."""
    ends = np.array([first, last])
    axes.plot(ends, ends, color="0.2", linewidth=0.8)
    axes.fill_between(ends, ends * low, ends * high, color="0.5", alpha=0.15, linewidth=0,
                      label=f"measured/predicted in [{low:g}, {high:g}]")  # fmt: skip
    axes.axhline(1.0, color="0.35", linestyle=":", linewidth=0.8)
    axes.axvline(1.0, color="0.35", linestyle=":", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(first, last)
    axes.set_ylim(first, last)
    log_axis(axes.xaxis, first, last)
    log_axis(axes.yaxis, first, last)
    axes.set_xlabel("speedup predicted")
    axes.set_ylabel("speedup measured")


def _curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Label → its points in the order of n, as recorded; the context is named only where there are several."""
    several = len({row["context"] for row in rows}) > 1
    curves: dict[str, list[Row]] = {}
    order = list(dict.fromkeys(row["configuration"] for row in rows))
    for row in sorted(rows, key=lambda row: (order.index(row["configuration"]), row["context"], row["n"])):
        name = f"{row['configuration']}, context {row['context']}" if several else row["configuration"]
        curves.setdefault(name, []).append(row)
    return curves


def series_names(grouped: Iterable[tuple[str, float]]) -> list[str]:
    """Names of (configuration, temperature), the temperature where it is not 0."""
    return [f"{name}, T={temperature:g}" if temperature else name for name, temperature in grouped]


def as_recorded(rows: Sequence[Row], cells: Iterable[Pairs]) -> dict[tuple[str, float], list[Pairs]]:
    """Cells by configuration and temperature, in the order in which the configurations were recorded."""
    order, grouped = list(drafters_of(rows)), by_configuration({each.cell: each for each in cells})
    return {key: grouped[key] for key in sorted(grouped, key=lambda key: (order.index(key[0]), key[1]))}


def drafters_of(rows: Sequence[Row]) -> dict[str, str]:
    """Configuration → its drafter, in the order of the records."""
    return {row["configuration"]: row["drafter"] for row in rows if row["arm"] == "sd"}


def backend_colors(rows: Sequence[Row]) -> dict[str, Any]:
    """Backend → colour, in the order of the records: the same in every figure of a sweep."""
    styles = series_styles(list(dict.fromkeys(row["backend"] for row in rows)))
    return {name: style.color for name, style in styles.items()}


def color_legend(
    figure: Figure, axes: Axes, colors: Mapping[str, Any], guides: Sequence[tuple[str, Mapping[str, Any]]]
) -> None:
    """A legend below of backends by colour, then of `guides` in grey: (label, how its line is drawn)."""
    for name, color in colors.items():
        axes.plot([], [], color=color, linewidth=3, label=name)
    for label, look in guides:
        axes.plot([], [], **{"color": "0.35", "linewidth": 0.9, **look}, label=label)
    legend_below(figure, [axes], list(colors))


def _line(axes: Axes, x: Iterable[Any], y: Any, style: Series, label: str) -> None:
    axes.plot(list(x), y, color=style.color, marker=style.marker, linestyle=style.linestyle, label=label)


def _powers_of_two(widest: int) -> list[int]:
    return [2**power for power in range(int(math.log2(max(widest, 1))) + 1)]
