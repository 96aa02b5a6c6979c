"""Figures of the backend sweep and the cost curves: from lists of records to a figure, nothing read, nothing saved."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
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
    figure, (times, relative) = new_figure(panels=2, height=2.6)
    curves = _curves(rows)
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


@in_house_style
def acceptance_profile(rows: Sequence[Row]) -> Figure:
    """a_K against K (left) and the conditional acceptance α_i by position, at each configuration's greatest K (right).

    rows  SWEEP records, all prompts pooled; positions tested fewer than 10 times are left out
    """
    figure, (falling, conditional) = new_figure(panels=2, height=2.6, sharey=True)
    grouped = by_configuration(pair_up(rows))
    alphas = conditional_acceptance(rows, minimum=10)
    styles = series_styles(_names(grouped))
    for label, cells in zip(_names(grouped), grouped.values(), strict=True):
        style = styles[label]
        _line(falling, [pairs.cell.K for pairs in cells], [pairs.acceptance() for pairs in cells], style, label)
        alpha = alphas[cells[-1].cell]
        _line(conditional, range(1, len(alpha) + 1), alpha, style, label)
    widest = max((pairs.cell.K for cells in grouped.values() for pairs in cells), default=1)
    for axes, label in ((falling, "speculation length K"), (conditional, "draft position i")):
        axes.set_xlabel(label)
        axes.set_xticks(range(1, widest + 1))
    falling.set_ylim(0, 1.03)
    falling.set_ylabel("acceptance")
    falling.set_title("$a_K$ = accepted / drafted")
    conditional.set_title(r"$\alpha_i$ = accepted / tested at $i$")
    legend_below(figure, [falling], list(styles))
    return figure


@in_house_style
def speedup_by_k(rows: Sequence[Row]) -> Figure:
    """Speedup over AR against K: measured with 95% interval, predicted dashed and hollow, S = 1 marked.

    rows  SWEEP records; drawn are the report prompts without repetition, those that claim B1 is judged on
    """
    figure, (axes,) = new_figure(width=1.6, height=3.0)
    grouped = by_configuration(pair_up(rows, split="report", repetitive=False))
    names = _names(grouped)
    styles = series_styles(names)
    for number, (cells, label) in enumerate(zip(grouped.values(), names, strict=True)):
        style = styles[label]
        shift = 0.12 * (number - (len(names) - 1) / 2)  # so that the intervals of several configurations stay apart
        k = np.array([pairs.cell.K for pairs in cells])
        measured = [pairs.speedup() for pairs in cells]
        axes.errorbar(
            k + shift, *with_bars(measured), color=style.color, marker=style.marker, linestyle="-", capsize=1.5,
            elinewidth=0.8, label=label,
        )  # fmt: skip
        axes.plot(
            k + shift, [pairs.predicted_speedup() for pairs in cells], color=style.color, marker=style.marker,
            markerfacecolor="white", linestyle=(0, (4, 1.5)), linewidth=0.9,
        )  # fmt: skip
    axes.axhline(1.0, color="0.2", linewidth=0.9)
    axes.plot([], [], color="0.35", linestyle=(0, (4, 1.5)), marker="o", markerfacecolor="white", label="predicted")
    axes.set_xlabel("speculation length K")
    axes.set_xticks(sorted({pairs.cell.K for cells in grouped.values() for pairs in cells}))
    axes.set_ylabel("speedup S over AR")
    axes.set_ylim(bottom=0)
    legend_below(figure, [axes], names)
    return figure


@in_house_style
def predicted_against_measured(rows: Sequence[Row], low: float = 0.8, high: float = 1.25) -> Figure:
    """Measured speedup (95% interval) against predicted, one point a cell, the band low ≤ measured/predicted ≤ high.

    rows  SWEEP records; drawn are the report prompts, those that claim B3 is judged on
    """
    figure, (axes,) = new_figure(width=1.3, height=3.7)
    grouped = by_configuration(pair_up(rows, split="report"))
    names = _names(grouped)
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
    ends = np.array([min(seen) / 1.3, max(seen) * 1.3])
    axes.plot(ends, ends, color="0.2", linewidth=0.8)
    axes.fill_between(ends, ends * low, ends * high, color="0.5", alpha=0.15, linewidth=0,
                      label=f"measured/predicted in [{low:g}, {high:g}]")  # fmt: skip
    axes.axhline(1.0, color="0.35", linestyle=":", linewidth=0.8)
    axes.axvline(1.0, color="0.35", linestyle=":", linewidth=0.8)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    log_axis(axes.xaxis, *ends)
    log_axis(axes.yaxis, *ends)
    axes.set_aspect("equal")
    axes.set_xlabel("speedup predicted")
    axes.set_ylabel("speedup measured")
    legend_below(figure, [axes], names)
    return figure


def _curves(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Label → its points in the order of n; the context is named only where there are several."""
    several = len({row["context"] for row in rows}) > 1
    curves: dict[str, list[Row]] = {}
    for row in sorted(rows, key=lambda row: (row["configuration"], row["context"], row["n"])):
        name = f"{row['configuration']}, context {row['context']}" if several else row["configuration"]
        curves.setdefault(name, []).append(row)
    return curves


def _names(grouped: dict[tuple[str, float], list[Pairs]]) -> list[str]:
    several = len({temperature for _, temperature in grouped}) > 1
    return [f"{name}, T={temperature:g}" if several else name for name, temperature in grouped]


def _line(axes: Axes, x: Iterable[Any], y: Any, style: Series, label: str) -> None:
    axes.plot(list(x), y, color=style.color, marker=style.marker, linestyle=style.linestyle, label=label)


def _powers_of_two(widest: int) -> list[int]:
    return [2**power for power in range(int(math.log2(max(widest, 1))) + 1)]
