"""What is drawn is what was measured, and no text covers another or leaves the page."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from specdec_core.evidence.plots_sweep import (
    acceptance_profile,
    curve_t_of_n,
    predicted_against_measured,
    speedup_by_k,
)
from specdec_core.evidence.sweep_records import pair_up


def curve(name: str, step: float, serial: float, context: int = 128) -> list[dict]:
    return [
        {"configuration": name, "backend": name, "n": n, "context": context, "samples": 9,
         "seconds_median": step * (1 + serial * (n - 1)), "seconds_low": step * (0.9 + serial * (n - 1)),
         "seconds_high": step * (1.2 + serial * (n - 1))}
        for n in (1, 2, 4, 7, 8, 16)
    ]  # fmt: skip


CEILING = {
    "configuration": "skinny f32", "weight_bytes": 540e6, "flops_per_token": 270e6, "bytes_per_second": 20e9,
    "flops_per_second": 80e9,
}  # fmt: skip


def drawn(axes, label: str) -> np.ndarray:
    (line,) = [line for line in axes.get_lines() if line.get_label() == label]
    return np.asarray(line.get_xydata())


def texts_of(figure):
    """Visible texts with their boxes, as laid out for print."""
    FigureCanvasAgg(figure).draw()
    for axes in figure.axes:
        ticks = []
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            ticks += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        for text in (*ticks, axes.xaxis.label, axes.yaxis.label, axes.title):
            if text.get_text() and text.get_visible():
                yield text.get_text(), text.get_window_extent()
    for legend in figure.legends:
        for text in legend.get_texts():
            yield text.get_text(), text.get_window_extent()


@pytest.fixture(scope="module")
def figures(five_pairs):
    curves = [*curve("skinny f32", 0.027, 0.04), *curve("llama.cpp Q4_1", 0.013, 0.68), *curve("peer", 0.1, 0.09)]
    return {
        "curve": curve_t_of_n(curves, [CEILING]),
        "acceptance": acceptance_profile(five_pairs),
        "speedup": speedup_by_k(five_pairs),
        "prediction": predicted_against_measured(five_pairs),
    }


@pytest.mark.parametrize("name", ["curve", "acceptance", "speedup", "prediction"])
def test_no_text_overlaps_another_or_leaves_the_page(figures, name):
    figure = figures[name]
    texts = list(texts_of(figure))
    width, height = figure.canvas.get_width_height()
    for text, box in texts:
        inside = box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1
        assert inside, f"{text!r} leaves the page"
    for (one, first), (other, second) in combinations(texts, 2):
        assert not first.overlaps(second), f"{one!r} covers {other!r}"


def test_the_cost_curve_shows_medians_bands_and_ceiling(figures):
    times, relative = figures["curve"].axes
    expected = [27 * (1 + 0.04 * (n - 1)) for n in (1, 2, 4, 7, 8, 16)]
    np.testing.assert_allclose(drawn(times, "skinny f32")[:, 1], expected)
    np.testing.assert_allclose(drawn(relative, "llama.cpp Q4_1")[-1], [16, 1 + 15 * 0.68])
    floor = drawn(times, "machine's limit, skinny f32")[:, 1]
    assert floor[0] == pytest.approx(27.0) and floor[-1] == pytest.approx(16 * 270e6 / 80e9 * 1e3)
    assert len(times.collections) == 3


def test_contexts_are_named_only_where_there_are_several():
    one = curve_t_of_n(curve("a", 0.1, 0.1))
    two = curve_t_of_n([*curve("a", 0.1, 0.1), *curve("a", 0.1, 0.1, context=512)])
    assert {text for text, _ in texts_of(one)} >= {"a"}
    assert {text for text, _ in texts_of(two)} >= {"a, context 128", "a, context 512"}


def test_the_acceptance_profile_shows_pooled_counts(figures, five_pairs):
    falling, conditional = figures["acceptance"].axes
    label = "skinny f32 + layer skip"
    expected = [p.acceptance() for cell, p in pair_up(five_pairs).items() if cell.configuration == label]
    np.testing.assert_allclose(drawn(falling, label), list(zip(range(1, 9), expected, strict=True)))
    assert len(drawn(conditional, label)) == 8


def test_measured_and_predicted_speedups_are_shown_with_the_line_at_one(figures, five_pairs):
    (axes,) = figures["speedup"].axes
    cells = pair_up(five_pairs, split="report", repetitive=False)
    measured = {round(p.speedup().estimate, 6) for p in cells.values()}
    predicted = {round(p.predicted_speedup(), 6) for p in cells.values()}
    heights = {round(float(y), 6) for line in axes.get_lines() for y in line.get_ydata()}
    assert measured | predicted | {1.0} <= heights


def test_every_cell_is_a_point_of_the_prediction(figures, five_pairs):
    (axes,) = figures["prediction"].axes
    points = sum(len(line.get_xdata()) for line in axes.get_lines() if line.get_linestyle() == "None")
    assert points >= 40 == len(pair_up(five_pairs, split="report"))
    low, high = axes.get_xlim()
    assert low < 1 < high and axes.get_ylim() == (low, high)


def test_one_prompt_is_drawn_without_bars(make_pair, make_sweep):
    speedup_by_k([row for row in make_sweep([make_pair("a")], prompts=4) if row["prompt_id"] in ("p002", "p003")])


def test_nothing_measured_draws_an_empty_frame():
    for draw in (curve_t_of_n, acceptance_profile, speedup_by_k, predicted_against_measured):
        assert list(texts_of(draw([])))
