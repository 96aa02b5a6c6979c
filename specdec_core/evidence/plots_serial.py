"""Figures of serialized verification: from lists of records to a figure, nothing read, nothing saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec_core.evidence.figures import in_house_style, new_figure, series_styles
from specdec_core.evidence.serial_claims import MODEL, N, calibrated, samples, serialization
from specdec_core.statistics.intervals import median_interval, simultaneous

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]


def backends_of(rows: Rows) -> list[str]:
    """Backends in the order in which they were measured."""
    return list(dict.fromkeys(row["backend"] for row in rows))


@in_house_style
def fan_of_curves(rows: Rows) -> Figure:
    """v(n) = t(n)/t(1) of every backend at the shortest context (both scales logarithmic), slopes 0 and 1 drawn; right:
    t(n) itself.

    rows  SERIAL_CURVE records
    """
    figure, (relative, absolute) = new_figure(panels=2, height=3.1)
    names = backends_of(rows)
    styles = series_styles(names)
    widest = max(row["n"] for row in rows)
    for name in names:
        context = min(row["context"] for row in rows if row["backend"] == name)
        widths = sorted({row["n"] for row in rows if row["backend"] == name and row["arm"] == "verify"})
        medians = np.array([np.median(samples(rows, name, n, context)) for n in widths])
        style = styles[name]
        look = {"color": style.color, "marker": style.marker, "linestyle": style.linestyle, "markersize": 3}
        relative.plot(widths, medians / medians[0], label=name, **look)
        absolute.plot(widths, medians * 1e3, **look)
    relative.plot([1, widest], [1, widest], color="0.3", linestyle="--", linewidth=0.9)
    relative.plot([1, widest], [1, 1], color="0.3", linestyle=":", linewidth=0.9)
    relative.annotate(
        "serial, slope 1", (widest, widest), (-4, -2), textcoords="offset points", ha="right", fontsize=6.5
    )
    relative.annotate("batched, slope 0", (widest, 1), (-2, -9), textcoords="offset points", ha="right", fontsize=6.5)
    ticks = [n for n in (1, 2, 4, 8, 16, 32) if n <= widest]
    for axes in (relative, absolute):
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(ticks, [str(n) for n in ticks])
        axes.set_xlabel("tokens verified in one pass, n")
    relative.set_yticks([1, 2, 4, 8, 16, 32], ["1", "2", "4", "8", "16", "32"])
    relative.set_ylim(bottom=0.75)
    relative.minorticks_off()
    relative.set_ylabel("v(n) = t(n)/t(1)")
    absolute.set_ylabel("t(n), ms")
    figure.legend(*relative.get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


@in_house_style
def serialization_indices(rows: Rows) -> Figure:
    """s_7 of every backend and context with its interval, and the index calibrated by the serial twin (hollow).

    rows  SERIAL_CURVE records; intervals are simultaneous over what is drawn
    """
    names = backends_of(rows)
    contexts = sorted({row["context"] for row in rows})
    styles = series_styles([f"context {context}" for context in contexts])
    figure, (axes,) = new_figure(width=1.8, height=0.9 + 0.26 * len(names))
    level = simultaneous(0.95, len(names) * (len(contexts) + 1))
    for place, name in enumerate(names):
        for number, context in enumerate(contexts):
            index = serialization(rows, name, N, context, level)
            if index is None:
                continue
            style = styles[f"context {context}"]
            bars = [[index.estimate - index.low], [index.high - index.estimate]]
            y = place + 0.16 * (number - (len(contexts) - 1) / 2)
            axes.errorbar(
                [index.estimate], [y], xerr=bars, color=style.color, marker=style.marker, capsize=1.5, linestyle="none",
                label=_once(axes, f"context {context}"),
            )  # fmt: skip
        twin = calibrated(rows, name, N, level)
        if twin is not None:
            axes.plot(
                [twin.estimate], [place + 0.3], color="0.2", marker="d", markerfacecolor="none", linestyle="none",
                label=_once(axes, "against the serial twin"),
            )  # fmt: skip
    for value, text in ((0.1, "batched"), (0.5, "serial")):
        axes.axvline(value, color="0.35", linestyle="--", linewidth=0.8)
        axes.text(value, -0.75, text, ha="center", va="bottom", fontsize=6.5)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(len(names) - 0.4, -0.6)
    axes.set_xlabel(f"serialization index $s_{N}$")
    figure.legend(loc="outside lower center", ncols=3)
    return figure


@in_house_style
def extra_time_by_operation(rows: Rows) -> Figure:
    """Where the extra time t(7) − t(1) of a pass goes: each operation's part of it, a bar a backend.

    rows  OP_CURVE records; the diamond is the uninstrumented model's own extra time
    """
    names = backends_of(rows)
    wide = max(n for n in {row["n"] for row in rows} if n <= N)
    parts = list(dict.fromkeys(row["operation"] for row in rows if row["part"]))
    figure, (axes,) = new_figure(width=1.9, height=1.0 + 0.34 * len(names))
    styles = series_styles(parts)
    hatches = ("", "///", "...", "xxx", "\\\\\\", "++", "oo", "--", "**")
    for place, name in enumerate(names):
        cells = {(row["operation"], row["n"]): np.median(row["seconds"]) for row in rows if row["backend"] == name}
        left = 0.0
        for number, part in enumerate(parts):
            if (part, wide) not in cells:
                continue
            extra = (cells[part, wide] - cells[part, 1]) * 1e3
            axes.barh(
                place, extra, 0.6, left=left, color=styles[part].color, hatch=hatches[number % len(hatches)],
                edgecolor="white", linewidth=0.4, label=_once(axes, part),
            )  # fmt: skip
            left += extra
        whole = (cells[MODEL, wide] - cells[MODEL, 1]) * 1e3
        axes.plot([whole], [place], marker="D", color="0.1", linestyle="none", label=None if place else "whole model")
    axes.set_yticks(range(len(names)), names)
    axes.invert_yaxis()
    axes.set_xlabel(f"t({wide}) − t(1), ms")
    figure.legend(loc="outside lower center", ncols=4)
    return figure


@in_house_style
def predicted_dispatch(dispatch: Rows, shares: Rows) -> Figure:
    """Kernels that ggml's rules choose for the shipped file by n and matrix (left: Metal, middle: this CPU), and the
    share of weight bytes served serially (right). A prediction: nothing is run.

    dispatch, shares  DISPATCH and DISPATCH_SHARE records
    """
    import seaborn as sns
    from matplotlib.colors import ListedColormap

    variant = "Q4_1" if any(row["variant"] == "Q4_1" for row in dispatch) else dispatch[0]["variant"]
    shown = list(dict.fromkeys(row["backend"] for row in dispatch if row["variant"] == variant))[:2]
    figure, panels = new_figure(panels=len(shown) + 1, height=2.7)
    colors = ListedColormap([sns.color_palette("colorblind")[3], "0.88", sns.color_palette("colorblind")[0]])
    widths = sorted({row["n"] for row in dispatch})
    for axes, backend in zip(panels, shown, strict=False):
        own = [row for row in dispatch if (row["variant"], row["backend"]) == (variant, backend)]
        parts = list(dict.fromkeys(f"{row['part']} {row['rows']}×{row['length']}" for row in own))
        table = np.full((len(parts), len(widths)), np.nan)
        for row in own:
            kind = 0 if row["serial"] else 1 if row["n"] == 1 else 2
            table[parts.index(f"{row['part']} {row['rows']}×{row['length']}"), widths.index(row["n"])] = kind
        sns.heatmap(table, ax=axes, cmap=colors, vmin=0, vmax=2, cbar=False, linewidths=0.3, linecolor="white",
                    xticklabels=widths, yticklabels=parts)  # fmt: skip
        axes.set_title(f"{backend}, {variant}")
        axes.set_xlabel("n")
        axes.tick_params(labelsize=5.5)
        axes.grid(False)
    lines = list(
        dict.fromkeys((row["backend"], row["variant"]) for row in shares if row["variant"] in ("Q4_1", "Q4_0"))
    )
    styles = series_styles([f"{backend}, {kind}" for backend, kind in lines])
    for backend, kind in lines:
        own = [row for row in shares if (row["backend"], row["variant"]) == (backend, kind)]
        style = styles[f"{backend}, {kind}"]
        look = {"color": style.color, "marker": style.marker, "linestyle": style.linestyle, "markersize": 2.5}
        n, share = [row["n"] for row in own], [row["serial_share"] for row in own]
        panels[-1].plot(n, share, label=f"{backend}, {kind}", **look)
    panels[-1].set_xlabel("n")
    panels[-1].set_ylabel("weight bytes served serially")
    panels[-1].set_ylim(-0.03, 1.03)
    figure.legend(*panels[-1].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


@in_house_style
def context_dependence(rows: Rows) -> Figure:
    """t(n) at n = 1, 7 against the cached context, one panel an n, medians with intervals.

    rows  SERIAL_CURVE records
    """
    several = [name for name in backends_of(rows) if len({r["context"] for r in rows if r["backend"] == name}) > 1]
    names = several or backends_of(rows)  # a quick run has one context: points then
    figure, panels = new_figure(panels=2, height=2.6)
    styles = series_styles(names)
    for axes, n in zip(panels, (1, N), strict=True):
        for name in names:
            contexts = sorted({row["context"] for row in rows if row["backend"] == name})
            found = [median_interval(samples(rows, name, n, context) * 1e3) for context in contexts]
            y = np.array([one.estimate for one in found])
            bars = [y - [one.low for one in found], [one.high for one in found] - y]
            axes.errorbar(contexts, y, yerr=bars, color=styles[name].color, marker=styles[name].marker, capsize=1.5,
                          linestyle=styles[name].linestyle, label=name)  # fmt: skip
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        shown = sorted({row["context"] for row in rows if row["backend"] in names})
        axes.set_xticks(shown, [str(context) for context in shown])
        axes.minorticks_off()
        axes.set_title(f"n = {n}")
        axes.set_xlabel("cached tokens")
        low, high = axes.get_ylim()
        ticks = [value for value in (5, 10, 20, 50, 100, 200, 500) if low <= value <= high]
        axes.set_yticks(ticks, [str(value) for value in ticks])
    panels[0].set_ylabel("t(n), ms")
    if names:
        figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=3)
    return figure


def _once(axes: Axes, label: str) -> str | None:
    """The label, if the legend does not have it yet."""
    return None if label in axes.get_legend_handles_labels()[1] else label
