"""Figures of batched speed: from lists of records to a figure, nothing read, nothing saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
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
from specdec_core.evidence.ragged_claims import Rows, batches_of, keepings, name_of, pooled_ratio, shares, total
from specdec_core.evidence.ragged_speed import (
    AR,
    BEST,
    completion,
    decoders,
    pairs_by_speculation,
    speculations,
    tau,
    tau_of_slowest,
    token_latency,
)
from specdec_core.statistics.intervals import Interval, simultaneous

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DASHED: Any = (0, (4, 1.5))


@in_house_style
def throughput_by_batch(rows: Rows) -> Figure:
    """Tokens a second of AR and of the best SD against the batch (left); speedup of SD over AR, a series a drafter and
    K, with the line at 1 (right). Filled: measured, with 95% intervals; hollow, dashed: predicted.

    rows  BATCH_RUN records; drawn are those over masked scatter
    """
    figure, (speed, gain) = new_figure(panels=2, height=3.0)
    by_name = decoders(rows)
    styles = series_styles([AR, BEST, *map(name_of, speculations(rows))])
    for name in (AR, BEST):
        found = by_name[name]
        rates = [pooled_ratio(total(own, "tokens"), total(own, "seconds")) for own in found.values()]
        predicted = [total(own, "tokens").sum() / total(own, "predicted_seconds").sum() for own in found.values()]
        _filled(speed, list(found), rates, styles[name], name)
        _hollow(speed, list(found), predicted, styles[name])
    found_pairs = pairs_by_speculation(rows)
    for number, (speculation, pairs) in enumerate(found_pairs.items()):
        # Aside of one another, so that their intervals can be told apart.
        batches = np.array(list(pairs)) * 2 ** (0.07 * (number - (len(found_pairs) - 1) / 2))
        style = styles[name_of(speculation)]
        _filled(gain, batches, [each.speedup() for each in pairs.values()], style, name_of(speculation))
        _hollow(gain, batches, [each.predicted() for each in pairs.values()], style)
    gain.axhline(1.0, color="0.2", linewidth=0.9)
    gain.plot([], [], color="0.35", linestyle=DASHED, marker="o", markerfacecolor="white", label="predicted")
    for axes, label in ((speed, "tokens a second"), (gain, "speedup S over AR")):
        _batch_axis(axes, rows)
        _log_scale(axes)
        axes.set_ylabel(label)
    legend_below(figure, [speed, gain], list(styles))
    return figure


@in_house_style
def latency_by_batch(rows: Rows) -> Figure:
    """Seconds a token (left) and seconds until a row was complete (right) against the batch, for AR, the best SD and SD
    with rows grouped by length where it was measured. Filled: medians; hollow, dashed: 99th percentiles.

    rows  BATCH_RUN records
    """
    figure, (token, row) = new_figure(panels=2, height=2.7)
    by_name = decoders(rows)
    styles = series_styles(list(by_name))
    for name, found in by_name.items():
        batches = list(found)
        for axes, quantiles, unit in ((token, token_latency, 1e3), (row, completion, 1.0)):
            half, most = ([quantiles(own, q) * unit for own in found.values()] for q in (0.5, 0.99))
            style = styles[name]
            axes.plot(batches, half, color=style.color, marker=style.marker, linestyle="-", label=name)
            _hollow(axes, batches, most, style)
    token.plot([], [], color="0.35", linestyle="-", marker="o", label="median")
    token.plot([], [], color="0.35", linestyle=DASHED, marker="o", markerfacecolor="white", label="99th percentile")
    for axes, label in ((token, "ms a token"), (row, "seconds until a row is complete")):
        _batch_axis(axes, rows)
        _log_scale(axes)
        axes.set_ylabel(label)
    legend_below(figure, [token], list(by_name))
    return figure


@in_house_style
def realign_share(rows: Rows, threshold: float = 0.01) -> Figure:
    """Share of a round that is spent on keeping what was accepted, against the batch, a series a way and engine, with
    simultaneous 95% intervals; the line is R4's threshold.

    rows  REALIGN records
    """
    figure, (axes,) = new_figure(width=1.4, height=3.0)
    found = shares(rows, simultaneous(0.95, len(keepings(rows))))
    names = {(cell.way, cell.engine): f"{cell.way}, {cell.engine}" for cell in found}
    styles = series_styles(list(names.values()))
    for number, (key, name) in enumerate(names.items()):
        own = {cell.batch: share for cell, share in found.items() if (cell.way, cell.engine) == key}
        batches = np.array(list(own)) * 2 ** (0.08 * (number - (len(names) - 1) / 2))
        percent = [replace(one, estimate=100 * one.estimate, low=100 * one.low, high=100 * one.high)
                   for one in own.values()]  # fmt: skip
        _filled(axes, batches, percent, styles[name], name)
    axes.axhline(100 * threshold, color="0.2", linewidth=0.9)
    _batch_axis(axes, rows)
    estimates = [100 * share.estimate for share in found.values()]
    axes.set_ylim(min(estimates) / 3, max(*estimates, 100 * threshold) * 3)  # an interval of few repeats is no scale
    _log_scale(axes)
    axes.set_ylabel("commit, % of the round")
    legend_below(figure, [axes], list(names.values()))
    return figure


@in_house_style
def heterogeneity(rows: Rows) -> Figure:
    """τ, tokens a row and pass, as measured (filled) and if every row were cut to the slowest of its batch (hollow,
    dashed), against the batch; a panel a drafter, a series a K.

    rows  BATCH_RUN records; drawn are those over masked scatter
    """
    by_speculation = pairs_by_speculation(rows)
    drafters = list(dict.fromkeys(drafter for drafter, _ in by_speculation))
    figure, panels = new_figure(width=2.0 if len(drafters) > 1 else 1.3, panels=len(drafters), height=2.8, sharey=True)
    styles = series_styles([f"K = {k}" for k in sorted({k for _, k in by_speculation})])
    for (drafter, k), pairs in by_speculation.items():
        axes, style = panels[drafters.index(drafter)], styles[f"K = {k}"]
        _filled(axes, list(pairs), [tau(each.sd) for each in pairs.values()], style, f"K = {k}")
        _hollow(axes, list(pairs), [tau_of_slowest(each.sd) for each in pairs.values()], style)
    for axes, drafter in zip(panels, drafters, strict=True):
        axes.set_title(drafter)
        _batch_axis(axes, rows)
    panels[0].set_ylabel("tokens a row and pass, τ")
    panels[0].set_ylim(bottom=0.9)
    panels[0].plot([], [], color="0.35", linestyle="-", marker="o", label="as measured")
    panels[0].plot(
        [], [], color="0.35", linestyle=DASHED, marker="o", markerfacecolor="white", label="if cut to the slowest"
    )
    legend_below(figure, panels, list(styles))
    return figure


def _filled(
    axes: Axes, x: Sequence[float] | np.ndarray, intervals: Sequence[Interval], style: Series, label: str
) -> None:
    closed = [one if one.n > 1 else replace(one, low=one.estimate, high=one.estimate) for one in intervals]
    axes.errorbar(
        x, *with_bars(closed), color=style.color, marker=style.marker, linestyle="-", linewidth=1.0, capsize=1.5,
        elinewidth=0.8, label=label,
    )  # fmt: skip


def _hollow(axes: Axes, x: Sequence[float] | np.ndarray, y: Sequence[float], style: Series) -> None:
    axes.plot(
        x, y, color=style.color, marker=style.marker, markerfacecolor="white", linestyle=DASHED, linewidth=0.8
    )  # fmt: skip


def _batch_axis(axes: Axes, rows: Sequence[Mapping[str, Any]]) -> None:
    batches = batches_of(rows)
    axes.set_xscale("log", base=2)
    axes.set_xticks(batches, [str(batch) for batch in batches])
    axes.set_xlabel("batch, rows decoded together")


def _log_scale(axes: Axes) -> None:
    """A logarithmic ordinate with plain numbers, over what is drawn."""
    axes.set_yscale("log")
    log_axis(axes.yaxis, *axes.get_ylim())
