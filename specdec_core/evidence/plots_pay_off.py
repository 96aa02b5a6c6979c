"""Figures of why configurations of a sweep pay or do not, each at its best K: nothing read, nothing saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from specdec_core.evidence.figures import in_house_style, log_axis, new_figure, series_styles, with_bars
from specdec_core.evidence.peer_records import OUR_ENGINES, Among, peers, speedup
from specdec_core.evidence.plots_sweep import backend_colors, color_legend, drafters_of, prediction_axes, series_names
from specdec_core.evidence.sweep_claims import Attribution, attribute_best, by_configuration
from specdec_core.evidence.sweep_records import Row, pair_up
from specdec_core.statistics.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@in_house_style
def pay_off(rows: Sequence[Row], low: float = 0.8, high: float = 1.25) -> Figure:
    """Left: a_K against c + s of every configuration at its best K; it pays where a_K exceeds c + s + o/K, the tick
    that a line joins it to. Right: measured against predicted speedup of every cell (95% intervals), and the band
    low ≤ measured/predicted ≤ high. A colour a backend, a marker a drafter; hollow at T > 0.

    rows  SWEEP records; drawn are the report prompts
    """
    figure, (region, prediction) = new_figure(panels=2, height=3.6)
    colors, markers = backend_colors(rows), drafter_markers(rows)
    drafters = drafters_of(rows)
    found = attribute_best(rows)
    for one in found:
        x, color = one.c + one.s, colors[one.backend]
        region.plot([x, x], [one.acceptance, one.needed], color=color, linewidth=0.7)
        region.plot([x], [one.needed], color=color, marker="_", markersize=6)
        region.plot([x], [one.acceptance], **_point(one, colors, markers[drafters[one.cell.configuration]]))
    widest = max([1.0, *(1.05 * (one.c + one.s) for one in found)])
    region.plot([0, widest], [0, widest], color="0.2", linewidth=0.8)
    region.fill_between([0, widest], [0, widest], [1.05, max(1.05, widest)], color="0.5", alpha=0.1, linewidth=0)
    region.set_xlim(0, widest)
    region.set_ylim(0, 1.05)
    region.set_xlabel("cost of a draft position, c + s")
    region.set_ylabel("$a_K$ = accepted / drafted")
    region.set_title("pays above its tick: $a_K$ > c + s + o/K")
    _predicted(prediction, rows, colors, markers, low, high)
    guides: list[tuple[str, Mapping[str, Any]]] = [
        (name, {"marker": marker, "linestyle": "none"}) for name, marker in markers.items()
    ]
    if any(one.cell.temperature for one in found):
        guides.append(("T = 1 (hollow)", {"marker": "o", "linestyle": "none", "markerfacecolor": "white"}))
    guides.append(("c + s + o/K", {"marker": "_", "linestyle": "none", "markersize": 6}))
    color_legend(figure, region, colors, guides)
    return figure


@in_house_style
def round_time(rows: Sequence[Row]) -> Figure:
    """Where a round's time goes, in target steps: one step, what the verification of the draft takes more, the draft,
    the rest. Diamond: what AR takes for as many tokens; it is faster where the diamond lies beyond the bar.

    rows  SWEEP records; every configuration at its best K, on the report prompts
    """
    order = list(drafters_of(rows))
    found = sorted(attribute_best(rows), key=lambda one: (order.index(one.cell.configuration), one.cell.temperature))
    figure, (axes,) = new_figure(height=1.1 + 0.17 * max(len(found), 2))
    parts = series_styles(["one target step", "verifying the draft", "drafting", "the rest of a round"])
    hatches = ("", "///", "...", "xxx")
    for line, one in enumerate(found):
        extra, draft = one.drafted * one.s, one.drafted * one.c
        left = 0.0
        widths = (one.seconds - extra - draft - one.o, extra, draft, one.o)
        for (part, style), width, hatch in zip(parts.items(), widths, hatches, strict=True):
            axes.barh(line, width, 0.72, left=left, color=style.color, hatch=hatch, edgecolor="white", linewidth=0.3,
                      label=None if line else part)  # fmt: skip
            left += width
        axes.plot([one.seconds * one.speedup.estimate], [line], marker="D", color="0.1", linestyle="none",
                  label=None if line else "AR for as many tokens")  # fmt: skip
    axes.set_yticks(range(len(found)), _names_at_best(found))
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.set_xlim(left=0)
    axes.set_xlabel("time of a round, in target steps t(1)")
    axes.grid(False, axis="y")
    if found:
        figure.legend(loc="outside lower center", ncols=5)
    return figure


@in_house_style
def speedup_forest(rows: Sequence[Row], peer_rows: Sequence[Row] = ()) -> Figure:
    """Speedups over AR of the same backend with 95% intervals, the fastest on top: every configuration at its best K,
    with its prediction (hollow), and below a line the decoders of other packages over their own AR.

    rows, peer_rows  SWEEP and PEER records; drawn are the report prompts
    """
    ours = sorted(attribute_best(rows), key=lambda one: -one.speedup.estimate)
    theirs = peer_speedups(peer_rows)
    names, colors = [*_names_at_best(ours), *(name for name, _ in theirs)], backend_colors(rows)
    figure, (axes,) = new_figure(height=0.95 + 0.16 * max(len(names), 2))
    for line, one in enumerate(ours):
        _interval(axes, line, one.speedup, colors[one.backend], "o")
        color = colors[one.backend]
        axes.plot([one.predicted], [line], marker="d", color=color, markerfacecolor="white", markersize=3.5)
    for line, (_, interval) in enumerate(theirs, len(ours)):
        _interval(axes, line, interval, "0.3", "s")
    axes.axvline(1.0, color="0.2", linewidth=0.9)
    if ours and theirs:
        axes.axhline(len(ours) - 0.5, color="0.5", linewidth=0.7)
    seen = [1.0, *(one.predicted for one in ours)]
    for interval in (*(one.speedup for one in ours), *(interval for _, interval in theirs)):
        # Whole bars, but those of a few prompts, which may span decades, up to a factor of two.
        seen += [max(interval.estimate / 2, interval.low), min(interval.estimate * 2, interval.high)]
    ends = min(seen) / 1.1, max(seen) * 1.1
    axes.set_xscale("log")
    axes.set_xlim(*ends)
    log_axis(axes.xaxis, *ends)
    axes.set_yticks(range(len(names)), names)
    axes.set_ylim(max(len(names), 1) - 0.4, -0.6)
    axes.set_xlabel("speedup over AR of the same backend")
    guides: list[tuple[str, Mapping[str, Any]]] = [
        ("measured", {"marker": "o"}),
        ("predicted", {"marker": "d", "markerfacecolor": "white", "linestyle": "none"}),
    ]
    color_legend(figure, axes, colors, guides + ([("other packages", {"marker": "s"})] if theirs else []))
    return figure


def peer_speedups(peer_rows: Sequence[Row]) -> list[tuple[str, Interval]]:
    """(name, speedup over its own AR) of every speculating decoder of another package, the fastest first."""
    others = [row for row in peer_rows if row["engine"] not in OUR_ENGINES]
    warm = sorted({row["temperature"] for row in others})
    found = []
    for temperature in warm:
        among = Among(temperature=temperature)
        for name in peers(among.rows(others), "sd"):
            label = f"{name}, T={temperature:g}" if len(warm) > 1 else name
            found.append((label, speedup(others, name, among)))
    return sorted(found, key=lambda each: -each[1].estimate)


def drafter_markers(rows: Sequence[Row]) -> dict[str, str]:
    """Drafter → marker, in the order of the records."""
    names = list(dict.fromkeys(drafters_of(rows).values()))
    return {name: style.marker for name, style in series_styles(names).items()}


def _predicted(
    axes: Axes, rows: Sequence[Row], colors: Mapping[str, Any], markers: Mapping[str, str], low: float, high: float
) -> None:
    grouped, drafters, seen = by_configuration(pair_up(rows, split="report")), drafters_of(rows), [0.9, 1.1]
    for (name, temperature), cells in grouped.items():
        predicted, measured = [each.predicted_speedup() for each in cells], [each.speedup() for each in cells]
        seen += predicted + [interval.estimate for interval in measured]
        axes.errorbar(
            predicted, *with_bars(measured), color=colors[cells[0].backend], marker=markers[drafters[name]],
            linestyle="none", elinewidth=0.5, markersize=3.2, markerfacecolor="white" if temperature else None,
        )  # fmt: skip
    prediction_axes(axes, min(seen) / 1.2, max(seen) * 1.2, low, high)
    axes.set_title(f"measured/predicted, band [{low:g}, {high:g}]")


def _interval(axes: Axes, line: int, interval: Interval, color: Any, marker: str) -> None:
    [middle], bars = with_bars([interval])
    axes.errorbar([middle], [line], xerr=bars, color=color, marker=marker, markersize=3.5, capsize=1.5, elinewidth=0.9)


def _point(one: Attribution, colors: Mapping[str, Any], marker: str) -> dict[str, Any]:
    color = colors[one.backend]
    return {"color": color, "marker": marker, "markerfacecolor": "white" if one.cell.temperature else color}


def _names_at_best(found: Sequence[Attribution]) -> list[str]:
    labels = series_names((one.cell.configuration, one.cell.temperature) for one in found)
    return [f"{label}, K={one.cell.K}" for label, one in zip(labels, found, strict=True)]
