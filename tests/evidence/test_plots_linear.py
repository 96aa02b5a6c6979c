"""What is drawn of linear-attention verification is what was recorded, and no text covers another."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from specdec_core.evidence import words_linear as words
from specdec_core.evidence.gallery import GALLERY
from specdec_core.evidence.linear_claims import DELAYED, EAGER, FACTORS, FUSED, RELOAD, RESIDENT, SCHEMES, SNAPSHOTS
from specdec_core.evidence.plots_linear import errors_by_form, traffic_by_scheme, tree_places, window_of_one_head
from tests.evidence.linear_rows import ERRORS, WINDOW, error_row, traffic
from tests.evidence.test_plots_sweep import texts_of

TRAFFIC = traffic()
FIGURES = {
    "06_window": (window_of_one_head, [WINDOW]),
    "06_errors": (errors_by_form, ERRORS),
    "06_traffic": (traffic_by_scheme, TRAFFIC),
}


@pytest.fixture(scope="module")
def figures():
    return {name: draw(rows) for name, (draw, rows) in FIGURES.items()}


def inside_and_apart(figure) -> None:
    """No text leaves the page or covers another."""
    texts = list(texts_of(figure))
    width, height = figure.canvas.get_width_height()
    for text, box in texts:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, f"{text!r} leaves"
    for (one, first), (other, second) in combinations(texts, 2):
        assert not first.overlaps(second), f"{one!r} covers {other!r}"


def annotations(axes) -> list[str]:
    return [text.get_text() for text in axes.texts if text.get_text()]


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_overlaps_another_or_leaves_the_page(figures, name):
    inside_and_apart(figures[name])


@pytest.mark.parametrize("name", FIGURES)
def test_the_gallery_draws_it_with_caption_and_alternative_text(name, figures):
    drawing, rows = GALLERY[name], FIGURES[name][1]
    assert drawing.draw is FIGURES[name][0] and drawing.schemas[0].validated(rows[0])
    caption, alt = drawing.caption(rows), drawing.alt(rows)
    assert caption.endswith(".") and alt.endswith(".") and len(caption) > 100 and len(alt) > 50


def test_every_figure_of_notebook_06_is_tested():
    assert {name for name in GALLERY if name.startswith("06_")} == {*FIGURES, "06_speed_by_n", "06_speed_by_batch"}


def test_no_formula_or_weight_covers_another(figures):
    figure = figures["06_window"]
    FigureCanvasAgg(figure).draw()
    boxes = [(text.get_text(), text.get_window_extent()) for axes in figure.axes for text in axes.texts]
    for (one, first), (other, second) in combinations([pair for pair in boxes if pair[0]], 2):
        assert not first.overlaps(second), f"{one!r} covers {other!r}"


# --- The window ---------------------------------------------------------------------------------------------------


def test_the_rule_is_drawn_in_its_order(figures):
    rule, _ = figures["06_window"].axes
    steps = {text.get_text(): text.get_position()[1] for text in rule.texts}
    heights = [steps[name] for name in ("decay", "predict", "correct", "write", "read")]
    assert heights == sorted(heights, reverse=True)


def test_the_accepted_path_is_drawn_with_its_weights(figures):
    _, tree = figures["06_window"].axes
    assert {"0", "1", "2", "3", "4", "5", "0.78", "0.95", "1.00"} <= set(annotations(tree))
    assert any("$S_{4}$ = 0.70 $S_0$" in text for text in annotations(tree))
    places = tree_places(WINDOW["parents"])
    edges = {}
    for line in tree.lines:
        ends = [places.index(end) for end in zip(line.get_xdata(), line.get_ydata(), strict=True)]
        if len(ends) == 2:
            edges[tuple(ends)] = line.get_linewidth()
    assert set(edges) == {(0, 1), (0, 2), (1, 3), (1, 4), (2, 5)}
    thick = {edge for edge, width in edges.items() if width == max(edges.values())}
    assert thick == {(0, 1), (1, 4)}


def test_nodes_of_a_tree_lie_apart_under_their_parents():
    places = tree_places([-1, 0, 0, 1, 1, 2])
    assert places == [(1.25, 0), (0.5, -1), (2, -1), (0, -2), (1, -2), (2, -2)]
    assert tree_places([-1, 0, 1, 2]) == [(0, 0), (0, -1), (0, -2), (0, -3)]
    assert [x for x, _ in tree_places([-1, 0, 0, 0, 2])][1:4] == [0, 1, 2]


def test_words_of_the_window_are_its_own():
    caption, alt = words.window_caption([WINDOW]), words.window_alt([WINDOW])
    assert "6 nodes" in caption and "2.5e-07" in caption
    assert "0 with 0.78, 1 with 0.95, 4 with 1.00" in alt and "0.70 of the state" in alt


# --- Errors -------------------------------------------------------------------------------------------------------


def test_errors_are_drawn_by_form_with_the_tolerances(figures):
    outputs, states = figures["06_errors"].axes
    for axes, field in ((outputs, "worst_output"), (states, "worst_state")):
        for form in ("torch float64", "torch float32", "numba float32"):
            (line,) = [line for line in axes.lines if line.get_label() == form]
            expected = [row[field] for row in ERRORS if row["form"] == form]
            np.testing.assert_allclose(line.get_ydata(), expected)
        levels = [line.get_ydata()[0] for line in axes.lines if list(line.get_xdata()) == [0, 1]]
        assert levels == [1e-12, 1e-5] and axes.get_yscale() == "log"
        assert [tick.get_text() for tick in axes.get_xticklabels()] == ["chains", "trees", "forests", "rounds"]


def test_an_error_of_zero_is_drawn_at_the_foot():
    axes = errors_by_form([error_row(worst_output=0.0)]).axes[0]
    assert axes.lines[0].get_ydata() == pytest.approx([1e-18])


def test_words_of_the_errors():
    assert "120 random trees a form" in words.errors_caption(ERRORS)
    assert "torch float64 3.0e-16" in words.errors_alt(ERRORS) and "numba float32 6.0e-07" in words.errors_alt(ERRORS)


# --- Traffic ------------------------------------------------------------------------------------------------------


def test_bars_are_passes_over_the_states_at_the_headline(figures):
    moved, held = figures["06_traffic"].axes
    assert [tick.get_text() for tick in moved.get_yticklabels()] == list(SCHEMES)
    ends = {}
    for bar in moved.patches:
        ends.setdefault(round(bar.get_y() + bar.get_height() / 2, 3), []).append(bar.get_x() + bar.get_width())
    expected = {EAGER: 125, FUSED: 50, RESIDENT: 3, SNAPSHOTS: 19, RELOAD: 34, FACTORS: 3.25, DELAYED: 2.25}
    for number, name in enumerate(SCHEMES):
        for aside in (-0.2, 0.2):
            assert max(ends[round(number + aside, 3)]) == pytest.approx(expected[name], rel=1e-3), name
    assert annotations(moved).count("125") == 2 and annotations(held).count("16") == 4
    assert moved.yaxis_inverted() and moved.get_xscale() == held.get_xscale() == "log"


def test_without_the_headline_the_largest_n_is_drawn():
    rows = traffic((1, 4))
    assert "n = 4" in traffic_by_scheme(rows).axes[0].get_xlabel()
    assert "n = 4" in words.traffic_caption(rows)
    assert "n = 16" in words.traffic_caption(TRAFFIC)


def test_chains_and_trees_are_told_apart(figures):
    moved, _ = figures["06_traffic"].axes
    hatches = {bool(bar.get_hatch()): bar.get_y() % 1 for bar in moved.patches}
    assert set(hatches) == {True, False} and hatches[True] != hatches[False]
    labels = [text.get_text() for text in figures["06_traffic"].legends[0].get_texts()]
    assert labels == ["read", "written", "held", "chain", "tree"]


def test_words_of_the_traffic():
    alt = words.traffic_alt(TRAFFIC)
    assert "snapshots on a chain moves 19 and holds 16" in alt and "compact factors on a tree moves 3" in alt
    assert "8 heads of 256 × 256, batch 1" in words.traffic_caption(TRAFFIC)
