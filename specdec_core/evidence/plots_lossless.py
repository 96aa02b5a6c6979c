"""Figures of losslessness: from lists of records to a figure, nothing read, nothing saved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec_core.evidence.figures import in_house_style, new_figure, series_styles
from specdec_core.statistics import battery
from specdec_core.statistics.intervals import binomial_interval, simultaneous

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Mapping[str, Any]]

SETTING_NAMES = {"t1": "T=1", "t1_nucleus": "T=1, top-p 0.9", "t07": "T=0.7", "t07_nucleus": "T=0.7, top-p 0.9"}
_FLOOR = 1e-17


@in_house_style
def exact_law_errors(rows: Rows) -> Figure:
    """Total variation of every enumerated law (log scale), one strip an axis of the grid or a transformer engine.

    rows  EXACT_LAW records; errors of exactly zero are drawn at 1e-17
    """
    import seaborn as sns

    figure, (axes,) = new_figure(width=2.0, height=2.9)
    labels = [row["axis"] if row["level"] == "table" else row["level"] for row in rows]
    errors = [max(_FLOOR, row["total_variation"]) for row in rows]
    kinds = ["table" if row["level"] == "table" else "tiny transformer" for row in rows]
    palette = dict(zip(("table", "tiny transformer"), sns.color_palette("colorblind", 2), strict=True))
    axes.set_xscale("log")
    axes.set_xlim(_FLOOR / 2, 1e-8)
    places = {label: place for place, label in enumerate(dict.fromkeys(labels))}
    # Jitter of our own: that of seaborn is another at every drawing.
    heights = [places[label] for label in labels] + np.random.default_rng(0).uniform(-0.25, 0.25, len(labels))
    sns.scatterplot(x=errors, y=heights, hue=kinds, palette=palette, s=16, alpha=0.8, ax=axes, legend=False)
    axes.set_ylim(len(places) - 0.4, -0.6)
    for value, text in ((1e-12, "L1: 1e-12"), (1e-10, "L2: 1e-10")):
        axes.axvline(value, color="0.25", linestyle="--", linewidth=0.9)
        axes.text(value * 1.25, -0.62, text, ha="left", va="bottom", fontsize=7)
    counts = {label: labels.count(label) for label in dict.fromkeys(labels)}
    axes.set_yticks(range(len(counts)), [f"{label} ({count})" for label, count in counts.items()])
    axes.set_xlabel("total variation between enumerated and defined law")
    axes.set_ylabel("")
    return figure


@in_house_style
def null_and_observed(tests: Rows, curves: Rows) -> Figure:
    """Two-sample χ²: its law under relabelling, the nominal χ² law, and what was observed, a panel a setting.

    tests  LAW_TEST records; curves: LAW_CURVE records of kind 'null'
    """
    from scipy.stats import chi2

    settings = list(dict.fromkeys(row["setting"] for row in tests))
    figure, panels = new_figure(panels=len(settings), height=2.3)
    styles = series_styles(["SD against AR", "AR against AR"])
    for axes, setting in zip(panels, settings, strict=True):
        nominal = {
            row["comparison"]: row for row in tests if row["setting"] == setting and row["test"] == battery.NOMINAL
        }
        top = 0.0
        for name in nominal:
            null = next(c for c in curves if (c["kind"], c["setting"], c["series"]) == ("null", setting, name))
            density, edges = np.histogram(null["y"], 24, density=True)
            top = max(top, float(density.max()))
            axes.stairs(
                density, edges, color=styles[name].color, linestyle=styles[name].linestyle, label=f"null of {name}"
            )
        dof = nominal["SD against AR"]["dof"]
        low, high = axes.get_xlim()
        grid = np.linspace(min(low, chi2.ppf(0.001, dof)), max(high, chi2.ppf(0.999, dof)), 200)
        axes.plot(grid, chi2.pdf(grid, dof), color="0.4", linestyle=":", label="nominal χ²")
        for name, row in nominal.items():
            axes.axvline(
                row["statistic"], 0, 0.92, color=styles[name].color, linewidth=1.6, linestyle=styles[name].linestyle
            )
            axes.plot(
                row["statistic"],
                top * 1.06,
                marker=styles[name].marker,
                color=styles[name].color,
                label=f"{name}, observed",
            )
        axes.set_title(f"{SETTING_NAMES.get(setting, setting)}, {dof} dof")
        axes.set_xlabel("χ² of pooled tokens")
        axes.set_yticks([])
    panels[0].set_ylabel("density")
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3)
    return figure


@in_house_style
def pit_by_offset(curves: Rows) -> Figure:
    """Histograms of the probability integral transform by a token's offset in its round; flat is right.

    curves  LAW_CURVE records of kind 'pit'; drawn is the first setting, with the band that 95% of all bins of a panel
            stay in together if the law is right
    """
    from scipy.stats import binom

    setting = next(row["setting"] for row in curves if row["kind"] == "pit")
    shown = [row for row in curves if row["kind"] == "pit" and row["setting"] == setting]
    figure, panels = new_figure(panels=len(shown), height=1.9, sharey=True)
    style = series_styles(["SD"])["SD"]
    for axes, row in zip(panels, shown, strict=True):
        bins, n = len(row["x"]), int(row["series"].split("(")[1].rstrip(")"))
        tail = (1 - simultaneous(0.95, bins)) / 2
        low, high = (binom.ppf(level, n, 1 / bins) / n * bins for level in (tail, 1 - tail))
        axes.axhspan(low, high, color="0.5", alpha=0.2, linewidth=0)
        axes.axhline(1, color="0.4", linewidth=0.8, linestyle="--")
        axes.stairs(row["y"], np.linspace(0, 1, bins + 1), color=style.color, linewidth=1.2)
        axes.set_title(f"{row['series'].split(' (')[0]}, n = {n:,}")
        axes.set_xlabel("PIT")
        axes.set_xticks([0, 0.5, 1])
    panels[0].set_ylabel("density")
    panels[0].set_ylim(0.5, 1.5)
    return figure


@in_house_style
def bias_against_n(curves: Rows) -> Figure:
    """Directed bias with its 95% interval against the number of tokens, and the pre-registered band of equivalence.

    curves  LAW_CURVE records of kind 'bias'
    """
    shown = [row for row in curves if row["kind"] == "bias"]
    settings = list(dict.fromkeys(row["setting"] for row in shown))
    figure, panels = new_figure(panels=len(settings), height=2.2, sharey=True)
    styles = series_styles(["SD", "AR"])
    for axes, setting in zip(panels, settings, strict=True):
        axes.axhspan(-battery.DELTA, battery.DELTA, color="0.5", alpha=0.15, linewidth=0)
        axes.axhline(0, color="0.4", linewidth=0.8)
        for row in shown:
            if row["setting"] == setting:
                style = styles[row["series"]]
                axes.plot(row["x"], row["y"], color=style.color, linestyle=style.linestyle, label=row["series"])
                axes.fill_between(row["x"], row["low"], row["high"], color=style.color, alpha=0.2, linewidth=0)
        axes.set_xscale("log")
        axes.set_title(SETTING_NAMES.get(setting, setting))
        axes.set_xlabel("tokens n")
    panels[0].set_ylabel("directed bias")
    panels[0].set_ylim(-0.06, 0.06)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=2)
    return figure


@in_house_style
def kill_matrix(rows: Rows) -> Figure:
    """Mutants against tests: exact tests that see it filled, sampled ones coloured by the tokens that they took.

    rows  KILL records. A cross: the mutant crashed there, which is no kill; a dash: the test was not made
    """
    import seaborn as sns
    from matplotlib.colors import LogNorm

    mutants = list(dict.fromkeys(row["mutant"] for row in rows))
    tests = list(dict.fromkeys(row["test"] for row in rows))
    effects = {row["mutant"]: row["effect"] for row in rows}
    cells = {(row["mutant"], row["test"]): row for row in rows}
    values = np.full((len(mutants), len(tests)), np.nan)
    marks = np.full(values.shape, "", dtype=object)
    for i, mutant in enumerate(mutants):
        for j, test in enumerate(tests):
            row = cells.get((mutant, test))
            if row is None:
                marks[i, j] = "–"
            elif row["seen"]:
                values[i, j] = max(1, row["tokens"])
                marks[i, j] = f"{row['tokens']}" if row["tokens"] > 0 else "●"
            elif row["crashed"]:
                marks[i, j] = "×"
    figure, (axes,) = new_figure(width=2.0, height=0.8 + 0.155 * len(mutants))
    colors = sns.color_palette("crest_r", as_cmap=True)
    sns.heatmap(
        values, annot=marks, fmt="", annot_kws={"size": 5}, norm=LogNorm(1, 20_000), cmap=colors, linewidths=0.4,
        linecolor="0.85", cbar_kws={"label": "tokens to detection (1: exact)", "shrink": 0.5}, ax=axes,
        xticklabels=tests, yticklabels=[f"{name}  [{effects[name]}]" for name in mutants],
    )  # fmt: skip
    for text, mark in zip(axes.texts, marks[~np.isnan(values)], strict=False):
        text.set_text(mark)
    for (i, j), mark in np.ndenumerate(marks):
        if np.isnan(values[i, j]) and mark:
            axes.text(j + 0.5, i + 0.5, mark, ha="center", va="center", fontsize=5, color="0.4")
    axes.set_xticklabels(tests, rotation=40, ha="right", fontsize=6)
    axes.tick_params(axis="y", labelsize=5.5)
    axes.grid(False)
    return figure


@in_house_style
def sizes_under_the_null(rows: Rows) -> Figure:
    """How often each test rejects where there is nothing to find, simultaneous Clopper–Pearson intervals, α marked.

    rows  SIZE records
    """
    figure, (axes,) = new_figure(width=1.4, height=2.3)
    level = simultaneous(0.95, len(rows), "bonferroni")
    styles = series_styles(["in the family", "outside it"])
    for place, row in enumerate(rows):
        rate = binomial_interval(row["rejections"], row["replicates"], level=level)
        style = styles["in the family" if row["family"] else "outside it"]
        bars = [[rate.estimate - rate.low], [rate.high - rate.estimate]]
        axes.errorbar([rate.estimate], [place], xerr=bars, color=style.color, marker=style.marker, capsize=2)
    axes.axvline(rows[0]["alpha"], color="0.25", linestyle="--", linewidth=0.9)
    axes.set_yticks(range(len(rows)), [f"{row['test']} ({row['replicates']})" for row in rows])
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.set_xlim(0.004, 1.3)
    axes.set_xticks([0.01, 0.05, 0.2, 1], ["1%", "5%", "20%", "100%"])
    axes.minorticks_off()
    axes.set_xlabel(f"rejections at α = {rows[0]['alpha']:g}")
    return figure


@in_house_style
def audited_samplers(rows: Rows) -> Figure:
    """Directed bias of every audited sampler with its 95% interval; hollow where the audit called it not lossless.

    rows  AUDIT records
    """
    audits = {(row["pair"], row["setting"], row["decoder"]): row for row in rows if row["bias"] is not None}
    groups = list(dict.fromkeys(key[:2] for key in audits))
    names = list(dict.fromkeys(key[2] for key in audits))
    styles = series_styles(names)
    figure, (axes,) = new_figure(width=1.8, height=0.9 + 0.34 * len(groups))
    axes.axvspan(-battery.DELTA, battery.DELTA, color="0.5", alpha=0.15, linewidth=0)
    axes.axvline(0, color="0.4", linewidth=0.8)
    for name in names:
        shown = [(place, audits[*group, name]) for place, group in enumerate(groups) if (*group, name) in audits]
        for number, (place, row) in enumerate(shown):
            y = place + 0.17 * (names.index(name) - (len(names) - 1) / 2)
            bars = [[row["bias"] - row["low"]], [row["high"] - row["bias"]]]
            face = "none" if row["verdict"] == "not lossless" else styles[name].color
            axes.errorbar(
                [row["bias"]], [y], xerr=bars, color=styles[name].color, marker=styles[name].marker, capsize=1.5,
                markerfacecolor=face, linestyle="none", label=None if number else name,
            )  # fmt: skip
    axes.set_yticks(range(len(groups)), [f"{pair.split(',')[0]}: {setting}" for pair, setting in groups])
    axes.set_ylim(len(groups) - 0.5, -0.5)
    axes.set_xlabel("directed bias")
    figure.legend(loc="outside lower center", ncols=2)
    return figure
