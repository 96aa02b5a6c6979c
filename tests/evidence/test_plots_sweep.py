"""What is drawn is what was measured, and no text covers another or leaves the page."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg

from specdec_core.evidence.plots_pay_off import pay_off, round_time, speedup_forest
from specdec_core.evidence.plots_sweep import (
    acceptance_profile,
    as_recorded,
    backend_colors,
    curve_t_of_n,
    curves_of_backends,
    predicted_against_measured,
    speedup_heat_map,
)
from specdec_core.evidence.sweep_records import conditional_acceptance, pair_up

OF_SWEEP = {
    "acceptance": acceptance_profile, "speedup": speedup_heat_map, "prediction": predicted_against_measured,
    "pay off": pay_off, "round": round_time, "speedups": speedup_forest,
}  # fmt: skip


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
    for axes in (each for each in figure.axes if each.get_visible()):
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
def figures(five_pairs, many_pairs):
    curves = [*curve("skinny f32", 0.027, 0.04), *curve("llama.cpp Q4_1", 0.013, 0.68), *curve("peer", 0.1, 0.09)]
    drawn = {"curve": curve_t_of_n(curves, [CEILING])}
    drawn |= {name: draw(five_pairs) for name, draw in OF_SWEEP.items()}
    return drawn | {f"{name}, full": draw(many_pairs) for name, draw in OF_SWEEP.items() if name != "prediction"}


@pytest.mark.parametrize("name", ["curve", *OF_SWEEP, *(f"{name}, full" for name in OF_SWEEP if name != "prediction")])
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


def test_of_several_contexts_the_shortest_is_drawn():
    (times, _) = curves_of_backends([*curve("a", 0.1, 0.1, context=512), *curve("a", 0.2, 0.1)]).axes
    assert drawn(times, "a")[0] == pytest.approx([1, 200])


def lines_of(axes, **look) -> list[list[tuple[float, float]]]:
    """Points of the lines that look like this."""
    return [
        [(float(x), float(y)) for x, y in line.get_xydata()]
        for line in axes.get_lines()
        if len(line.get_xydata()) and all(getattr(line, f"get_{name}")() == value for name, value in look.items())
    ]


def test_the_acceptance_profile_has_a_panel_a_drafter_and_a_colour_a_backend(figures, many_pairs):
    panels = {axes.get_title(): axes for axes in figures["acceptance, full"].axes if axes.get_visible()}
    assert list(panels) == list(dict.fromkeys(row["drafter"] for row in many_pairs))
    cells, alphas, colors = pair_up(many_pairs), conditional_acceptance(many_pairs, 10), backend_colors(many_pairs)
    for (name, temperature), own in as_recorded(many_pairs, cells.values()).items():
        backend, drafter = name.split(" · ")
        look = {"color": colors[backend], "marker": "s" if temperature else "o"}
        pooled = [(pairs.cell.K, pairs.acceptance()) for pairs in own]
        assert lines_of(panels[drafter], linestyle="-", **look) == [pooled]
        shares = list(enumerate(alphas[own[-1].cell], 1))
        assert [
            np.allclose(line, shares, equal_nan=True) for line in lines_of(panels[drafter], linestyle="--", **look)
        ] == [True]


def test_the_heat_map_says_every_speedup_which_is_sure_and_which_is_best(figures, many_pairs):
    (axes,) = figures["speedup, full"].axes
    grouped = as_recorded(many_pairs, pair_up(many_pairs, split="report", repetitive=False).values())
    ks, texts = [1, 2, 4, 8], {(text.get_position()): text for text in axes.texts}
    assert [text.get_text() for text in axes.get_xticklabels()] == [str(k) for k in ks]
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == [f"{name}, T={t:g}" if t else name for name, t in grouped]
    assert names[:2] == ["numba float32 · n-gram tree", "numba float32 · n-gram tree, T=1"]  # as recorded, not sorted
    framed = {(patch.get_y(), patch.get_x()) for patch in axes.patches}
    (image,) = axes.images
    for line, cells in enumerate(grouped.values()):
        found = {ks.index(pairs.cell.K): pairs.speedup() for pairs in cells}
        best = max(found, key=lambda column: found[column].estimate)
        assert (line - 0.46, best - 0.48) in framed
        for column, speedup in found.items():
            text = texts.pop((column, line))
            assert text.get_text() == f"{speedup.estimate:.2f}"
            assert (text.get_fontweight() == "bold") == (not speedup.low <= 1 <= speedup.high)
            assert image.get_array()[line, column] == pytest.approx(np.log2(speedup.estimate))
    assert not texts and len(framed) == len(grouped)


def test_what_was_not_measured_has_no_colour(make_pair, make_sweep):
    rows = [row for row in make_sweep([make_pair("a"), make_pair("b")]) if (row["configuration"], row["K"]) != ("a", 2)]
    (axes,) = speedup_heat_map(rows).axes
    assert np.isnan(axes.images[0].get_array().filled(np.nan)).tolist() == [[False, True, False, False], [False] * 4]
    assert len(axes.texts) == 7


def test_every_cell_is_a_point_of_the_prediction(figures, five_pairs):
    (axes,) = figures["prediction"].axes
    points = sum(len(line.get_xdata()) for line in axes.get_lines() if line.get_linestyle() == "None")
    assert points >= 40 == len(pair_up(five_pairs, split="report"))
    low, high = axes.get_xlim()
    assert low < 1 < high and axes.get_ylim() == (low, high)


def test_one_prompt_is_drawn_without_bars(make_pair, make_sweep):
    speedup_heat_map([row for row in make_sweep([make_pair("a")], prompts=4) if row["prompt_id"] in ("p002", "p003")])


def test_nothing_measured_draws_an_empty_frame():
    for draw in (curve_t_of_n, curves_of_backends, *OF_SWEEP.values()):
        assert list(texts_of(draw([])))
