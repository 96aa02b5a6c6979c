"""Figures of linear-attention verification: one window drawn, errors, traffic; nothing read, nothing saved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec_core.evidence.figures import in_house_style, legend_below, log_axis, new_figure, series_styles
from specdec_core.evidence.linear_claims import HEADLINE_N, SCHEMES, Row, Rows, held_bytes, passes
from specdec_core.evidence.linear_records import SHAPES

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

ERRORS = ("worst_output", "worst_state")


@in_house_style
def window_of_one_head(rows: Rows) -> Figure:
    """The recurrence of one node (left), and one tree with its accepted path (right): how much of each outer product is
    left in the committed state.

    rows  LINEAR_WINDOW records; the first is drawn
    """
    figure, (rule, tree) = new_figure(panels=2, height=2.7)
    for axes in (rule, tree):
        axes.set_axis_off()
        axes.set_xticks([])
        axes.set_yticks([])
    _draw_rule(rule)
    _draw_tree(tree, rows[0])
    return figure


def _draw_rule(axes: Axes) -> None:
    """Four boxes from the parent's state to the node's, and what each reads."""
    steps = (
        ("decay", "$S' = e^{g_t}\\, S_p$", "$g_t$"),
        ("predict", "$\\hat v_t = S'^{\\,\\top} k_t$", "$k_t$"),
        ("correct", "$u_t = \\beta_t (v_t - \\hat v_t)$", "$v_t,\\ \\beta_t$"),
        ("write", "$S_t = S' + k_t u_t^{\\top}$", ""),
        ("read", "$o_t = S_t^{\\top} q_t$", "$q_t$"),
    )
    box: dict[str, Any] = {"boxstyle": "round,pad=0.35", "facecolor": "0.95", "edgecolor": "0.4", "linewidth": 0.7}
    arrow = {"arrowstyle": "-|>", "color": "0.3", "linewidth": 0.8}
    places = np.linspace(0.86, 0.06, len(steps))
    axes.set_xlim(0, 1)
    axes.set_ylim(-0.04, 1.04)
    axes.set_title("one node t with parent p")
    axes.annotate("$S_p$", (0.58, places[0] + 0.06), (0.58, 1.0), ha="center", va="center", arrowprops=arrow)
    for number, (y, (name, formula, reads)) in enumerate(zip(places, steps, strict=True)):
        kept = name in ("correct", "write")
        axes.text(0.58, y, formula, ha="center", va="center", bbox=box | ({"facecolor": _blue(0.7)} if kept else {}))
        axes.text(0.02, y, name, ha="left", va="center", fontsize=7)
        if reads:
            axes.text(0.97, y, reads, ha="right", va="center")
        if number:
            axes.annotate("", (0.58, y + 0.075), (0.58, places[number - 1] - 0.075), arrowprops=arrow)


def _draw_tree(axes: Axes, row: Row) -> None:
    """Nodes by depth, the accepted path in colour; at its nodes the weight of their outer product."""
    parents, path = row["parents"], row["path"]
    places = tree_places(parents)
    weights = dict(zip(path, row["weights"], strict=True))
    for node, parent in enumerate(parents):
        if parent >= 0:
            both = node in weights and parent in weights
            axes.plot(
                *zip(places[parent], places[node], strict=True), color=_blue() if both else "0.6",
                linewidth=2.0 if both else 0.8, linestyle="-" if both else (0, (4, 2)), zorder=1,
            )  # fmt: skip
    for node, (x, y) in enumerate(places):
        taken = node in weights
        look: dict[str, Any] = {
            "markerfacecolor": _blue(0.7) if taken else "white",
            "markeredgecolor": _blue() if taken else "0.5",
        }
        axes.plot([x], [y], marker="o", markersize=14, zorder=2, linestyle="none", **look)
        axes.annotate(str(node), (x, y), ha="center", va="center", fontsize=7, zorder=3)
        if taken:
            axes.annotate(
                f"{weights[node]:.2f}", (x, y), (11, 0), textcoords="offset points", va="center", fontsize=7, zorder=3
            )
    deepest = min(y for _, y in places)
    axes.set_xlim(min(x for x, _ in places) - 0.8, max(x for x, _ in places) + 1.1)
    axes.set_ylim(deepest - 1.25, 0.7)
    axes.set_title("one window: nodes verified together, one path committed")
    axes.text(
        0.5, 0.02, f"$S_{{{path[-1]}}}$ = {row['left']:.2f} $S_0$ + Σ weight $k_i u_i^\\top$ along the path",
        ha="center", va="bottom", transform=axes.transAxes,
    )  # fmt: skip


def tree_places(parents: Sequence[int]) -> list[tuple[float, float]]:
    """Where to draw each node: leaves side by side, a parent above the middle of its children, −depth as height."""
    children: list[list[int]] = [[] for _ in parents]
    depths = [0] * len(parents)
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
            depths[node] = depths[parent] + 1
    x = [0.0] * len(parents)
    leaves = 0
    order = [0]
    for node in order:  # breadth first: children are appended while it is walked
        order.extend(children[node])
    stack, visited = [0], []
    while stack:  # depth first, so that the leaves of one branch lie together
        node = stack.pop()
        visited.append(node)
        stack.extend(reversed(children[node]))
    for node in visited:
        if not children[node]:
            x[node] = float(leaves)
            leaves += 1
    for node in reversed(order):
        if children[node]:
            x[node] = float(np.mean([x[child] for child in children[node]]))
    return [(x[node], -float(depths[node])) for node in range(len(parents))]


def _blue(paler: float = 0.0) -> Any:
    import seaborn as sns

    return tuple(paler + (1 - paler) * channel for channel in sns.color_palette("colorblind")[0])


@in_house_style
def errors_by_form(rows: Rows) -> Figure:
    """Largest error of outputs (left) and of committed states (right) for each form and kind of window; the lines are
    the tolerances of float64 and float32.

    rows  LINEAR_ERROR records
    """
    figure, panels = new_figure(panels=2, height=2.6, sharey=True)
    forms, kinds = (list(dict.fromkeys(row[name] for row in rows)) for name in ("form", "kind"))
    styles = series_styles(forms)
    least = min(row["tolerance"] for row in rows) * 1e-6
    for axes, error, title in zip(panels, ERRORS, ("outputs", "committed states"), strict=True):
        for number, form in enumerate(forms):
            own = {row["kind"]: max(row[error], least) for row in rows if row["form"] == form}
            x = [kinds.index(kind) + 0.16 * (number - (len(forms) - 1) / 2) for kind in own]
            axes.plot(x, list(own.values()), color=styles[form].color, marker=styles[form].marker, linestyle="none",
                      label=form)  # fmt: skip
        for tolerance in sorted({row["tolerance"] for row in rows}):
            axes.axhline(tolerance, color="0.2", linewidth=0.9)
        axes.set_yscale("log")
        axes.set_xticks(range(len(kinds)), kinds)
        axes.set_title(title)
    panels[0].set_ylabel("largest error, relative")
    legend_below(figure, panels, forms)
    return figure


@in_house_style
def traffic_by_scheme(rows: Rows) -> Figure:
    """Bytes of states and factors that a round reads and writes (left), and that it keeps and works in beside the
    committed state (right), in units of that state, a bar a scheme and shape, at the headline's n or the largest.

    rows  LINEAR_TRAFFIC records
    """
    from matplotlib.patches import Patch

    widths = {row["n"] for row in rows}
    n = HEADLINE_N if HEADLINE_N in widths else max(widths)
    own = [row for row in rows if row["n"] == n]
    names = [name for name in SCHEMES if any(row["scheme"] == name for row in own)]
    figure, (moved, held) = new_figure(panels=2, height=0.75 + 0.36 * len(names), sharey=True)
    styles = series_styles(["read", "written", "held"])
    for row in own:
        place = names.index(row["scheme"]) + (0.2 if row["shape"] == SHAPES[1] else -0.2)
        hatch, state = "////" if row["shape"] == SHAPES[1] else "", row["state_bytes"]
        look: dict[str, Any] = {"height": 0.36, "hatch": hatch, "edgecolor": "white", "linewidth": 0.4}
        read, written = passes(row)
        moved.barh(place, read, color=styles["read"].color, **look)
        moved.barh(place, written, left=read, color=styles["written"].color, **look)
        moved.annotate(
            f"{read + written:.3g}", (read + written, place), (3, 0), textcoords="offset points", va="center",
            fontsize=6.5,
        )  # fmt: skip
        held.barh(place, held_bytes(row) / state, color=styles["held"].color, **look)
        held.annotate(
            f"{held_bytes(row) / state:.2g}", (held_bytes(row) / state, place), (3, 0), textcoords="offset points",
            va="center", fontsize=6.5,
        )  # fmt: skip
    moved.set_yticks(range(len(names)), names)
    moved.invert_yaxis()
    for axes, title in ((moved, "moved in a round"), (held, "kept and worked in, beside the state")):
        axes.set_xscale("log")
        axes.set_title(title)
        axes.set_xlabel(f"states of the batch, n = {n}")
        low, high = axes.get_xlim()
        axes.set_xlim(0.7 if axes is moved else low, high * 2.2)
        log_axis(axes.xaxis, *axes.get_xlim())
    handles = [Patch(color=styles[name].color, label=label) for name, label in
               (("read", "read"), ("written", "written"), ("held", "held"))]  # fmt: skip
    handles += [Patch(facecolor="0.6", label="chain"), Patch(facecolor="0.6", hatch="////", edgecolor="white",
                                                             label="tree")]  # fmt: skip
    figure.legend(handles=handles, loc="outside lower center", ncols=len(handles))
    return figure
