"""Figures of the trained drafter, how it learned and how it serves: from lists of records to a figure, nothing read,
nothing saved."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from specdec_core.evidence.figures import Series, in_house_style, legend_below, new_figure, series_styles, with_bars
from specdec_core.evidence.training_records import (
    TOGETHER,
    Row,
    Rows,
    alpha_by_position,
    best_check,
    by_arm,
    domains,
    prompts,
    report,
    taus,
    without_repetition,
)
from specdec_core.statistics.intervals import Interval

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Points = list[tuple[float, float]]
"""Abscissae and heights of a series."""

DASHED: Any = (0, (4, 1.5))
WORKED_OUT, DRAFTED = "τ worked out in training", "τ by real drafting"


@in_house_style
def drafter_training(rows: Rows) -> Figure:
    """Loss (left) and τ (middle) against optimiser steps, and acceptance by draft position at three checks (right).

    Hollow, dashed: training's loss beside the held-out one; Σ min(p, q) of the best check beside its greedy α.

    rows  TRAINING records of one run
    """
    figure, (loss, tau, alpha) = new_figure(panels=3, height=3.0)
    ordered = sorted(rows, key=lambda row: row["step"])
    checks = {_check_name(row, rows): row for row in shown_checks(rows)}
    unrolled = sorted({1, widest(rows)})
    losses = [f"unrolled step {number}" for number in unrolled]
    best_first = sorted(checks, key=lambda name: checks[name] is not best_check(rows))
    styles = series_styles([*losses, WORKED_OUT, DRAFTED, *best_first[:2], "too pale for print", *best_first[2:]])
    for number, name in zip(unrolled, losses, strict=True):
        for field, words, line in (("losses", "training", _hollow), ("held_out_losses", "held out", _filled)):
            if points := _against_step(ordered, [_at(row[field], number) for row in ordered]):
                line(loss, points, styles[name], f"{words}, {name}")
    for name, field in ((WORKED_OUT, "greedy_tau"), (DRAFTED, "drafted_tau")):
        if points := _against_step(ordered, [row[field] for row in ordered]):
            _filled(tau, points, styles[name], name)
    for name, row in checks.items():
        _filled(alpha, _by_position(decided(row["greedy_alpha"])), styles[name], name)
    if rows:
        best = best_check(rows)
        for axes in (loss, tau):
            axes.axvline(best["step"], color="0.2", linestyle=":", linewidth=0.9)
        tau.plot([], [], color="0.2", linestyle=":", linewidth=0.9, label="best check")
        tau.axhline(1.0, color="0.2", linewidth=0.9, label="τ = 1, without drafts")
        if common := _by_position(best["sampled_alpha"]):
            _hollow(alpha, common, styles[_check_name(best, rows)], "Σ min(p, q), T = 1 (best)")
    for axes, label in ((loss, "cross-entropy, nats"), (tau, "tokens a target pass, τ")):
        _step_axis(axes, rows)
        axes.set_ylabel(label)
    _position_axis(alpha, widest(rows))
    legend_below(figure, [loss, tau, alpha], [])
    return figure


@in_house_style
def drafter_acceptance(rows: Rows) -> Figure:
    """Conditional acceptance α_i by draft position (left, answers without repetition) and τ with 95% intervals by
    domain (right; filled: answers without repetition, hollow: all), a series an arm and temperature.

    rows  ACCEPTANCE records; drawn are the report prompts. Positions tested fewer than `TESTED` times are left out
    """
    figure, (alpha, tau) = new_figure(panels=2, height=3.0, width_ratios=[1, 1.7])
    arms = by_arm(rows)
    styles = series_styles(list(arms))
    for name, own in arms.items():
        _filled(alpha, _by_position(alpha_by_position(without_repetition(own))), styles[name], name)
    _position_axis(alpha, max((len(row["tested_by_position"]) for own in arms.values() for row in own), default=1))
    places = {domain: place for place, domain in enumerate(domains(rows))}
    drawn: list[Interval] = []
    for number, (name, own) in enumerate(arms.items()):
        for all_answers in (False, True):
            found = taus(own if all_answers else without_repetition(own))
            # Eight points of a domain side by side: within 0.8 of the way to the next one.
            aside = 0.8 * ((2 * number + all_answers + 0.5) / (2 * len(arms)) - 0.5)
            _points(tau, [places[domain] + aside for domain in found], list(found.values()), styles[name], all_answers)
            drawn += found.values()
    _domain_axis(tau, rows)
    tau.axhline(1.0, color="0.2", linewidth=0.9)
    tau.set_ylim(0.9, _top(drawn))
    tau.set_ylabel("tokens a target pass, τ")
    for label, face in (("without repetitive answers", "0.35"), ("all answers", "white")):
        tau.plot([], [], color="0.35", linestyle="none", marker="o", markerfacecolor=face, label=label)
    legend_below(figure, [alpha, tau], list(arms))
    return figure


def shown_checks(rows: Rows) -> list[Row]:
    """Up to three checks in the order of steps: the first two and the best, or the last if the best is one of them."""
    ordered = sorted(rows, key=lambda row: row["step"])
    if not ordered:
        return []
    first, best = ordered[:2], best_check(rows)
    late = ordered[-1] if best in first else best
    return first if late in first else [*first, late]


def decided(alpha: Sequence[float]) -> list[float]:
    """α up to the first position that accepted nothing: those behind it were never tested, and are recorded as 0."""
    found = list(alpha)
    return found[: found.index(0) + 1] if 0 in found else found


def widest(rows: Rows) -> int:
    """U, the unrolled steps of a training run; 1 if there are no rows."""
    return max((len(row["greedy_alpha"]) for row in rows), default=1)


def _check_name(row: Row, rows: Rows) -> str:
    return f"α, step {row['step']}" + (" (best)" if row is best_check(rows) else "")


def _at(values: Sequence[float], number: int) -> float | None:
    """The value of unrolled step `number`; None where nothing was averaged."""
    return values[number - 1] if len(values) >= number else None


def _against_step(rows: Rows, values: Sequence[float | None]) -> Points:
    """Steps and values of the rows that have one."""
    return [(row["step"], one) for row, one in zip(rows, values, strict=True) if one is not None]


def _by_position(alpha: Sequence[float]) -> Points:
    return [(place, share) for place, share in enumerate(alpha, 1) if not math.isnan(share)]


def _filled(axes: Axes, points: Points, style: Series, label: str) -> None:
    x, y = [one for one, _ in points], [one for _, one in points]
    axes.plot(x, y, color=style.color, marker=style.marker, linestyle=style.linestyle, label=label)


def _hollow(axes: Axes, points: Points, style: Series, label: str) -> None:
    x, y = [one for one, _ in points], [one for _, one in points]
    axes.plot(
        x, y, color=style.color, marker=style.marker, markerfacecolor="white", linestyle=DASHED, linewidth=0.8,
        label=label,
    )  # fmt: skip


def _points(axes: Axes, x: Sequence[float], intervals: Sequence[Interval], style: Series, hollow: bool) -> None:
    closed = [one if one.n > 1 else replace(one, low=one.estimate, high=one.estimate) for one in intervals]
    axes.errorbar(
        x, *with_bars(closed), color=style.color, marker=style.marker, markersize=3.5, linestyle="none", capsize=1.2,
        elinewidth=0.8, markerfacecolor="white" if hollow else style.color,
    )  # fmt: skip


def _position_axis(axes: Axes, last: int) -> None:
    axes.set_xlabel("draft position i")
    axes.set_xticks(range(1, last + 1))
    axes.set_xlim(0.7, last + 0.3)
    axes.set_ylabel("conditional acceptance, $α_i$")
    axes.set_ylim(-0.03, 1.03)


def _step_axis(axes: Axes, rows: Rows) -> None:
    steps = [row["step"] for row in rows] or [0]
    beside = 0.05 * (max(steps) - min(steps)) or 1.0  # a single check has no span
    axes.set_xlim(min(steps) - beside, max(steps) + beside)
    axes.locator_params(axis="x", nbins=4, integer=True)
    axes.set_xlabel("optimiser step")


def _domain_axis(axes: Axes, rows: Rows) -> None:
    """Domains, each with the number of its prompts: those without repetitive answers of all."""
    labels = []
    for domain in domains(rows):
        own = [row for row in report(rows) if domain in (TOGETHER, row["domain"])]
        labels.append(f"{domain}\n{prompts(without_repetition(own))} of {prompts(own)}")
    axes.set_xticks(range(len(labels)), labels)
    axes.set_xlim(-0.5, len(labels) - 0.5)
    axes.set_xlabel("domain; report prompts without repetitive answers, of all")
    axes.grid(False, axis="x")
    for edge in range(1, len(labels)):
        axes.axvline(edge - 0.5, color="0.8", linewidth=0.6)


def _top(intervals: Sequence[Interval]) -> float:
    """Above all bars, except where few prompts make one so long that nothing else could be read."""
    ends = [one.high if one.n > 1 else one.estimate for one in intervals]
    return 1.03 * min(max(ends, default=2.0), 1.5 * max((one.estimate for one in intervals), default=2.0))
