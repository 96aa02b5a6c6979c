from __future__ import annotations

import matplotlib.colors
import numpy as np
import pytest

from specdec_core.evidence import words_ragged as words
from specdec_core.evidence.plots_ragged import corruption_by_token, fault_matrix, matches_by_way, ragged_round
from specdec_core.forensics.faults import FAULTS
from tests.evidence import ragged_rows
from tests.evidence.ragged_rows import cell, output
from tests.evidence.test_plots_sweep import texts_of

WAYS = ("scatter (ours)", "realign (EQSPEC)", "draft kept (DSD-like)")
OUTPUTS = [output(way, f"p{i}", first=4 if way == WAYS[2] else -1) for way in WAYS for i in range(3)]
OUTPUTS.append(output("scatter (ours)", "p0", engine="numba float32"))
CELLS = [
    cell("none", "scatter"),
    cell("stale", "scatter", fired=True),
    cell("stale", "rectangle"),
    cell("stale", "scatter", detector="other", crashed=True),
    cell("seen without a round", "scatter", fired=True, round=-1),
]


LONG = [
    cell(fault, "scatter", detector="target's keys and values", fired=True)
    for fault in ("all rows cut to the batch's minimum", "mask from ids, padding is the end", "none")
]
FIGURES = {
    "round": (ragged_round, ragged_rows.ragged_round()),
    "corruption": (corruption_by_token, OUTPUTS),
    "matches": (matches_by_way, OUTPUTS),
    "faults": (fault_matrix, LONG),
}


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_leaves_the_page(name):
    draw, rows = FIGURES[name]
    figure = draw(rows)
    written = list(texts_of(figure))
    width, height = figure.canvas.get_width_height()
    for text, box in written:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, f"{text!r} leaves"


def test_the_names_of_faults_are_no_longer_than_what_is_drawn_here():
    longest = max(len(row["fault"]) for row in LONG)
    assert max(len(fault.name) for fault in FAULTS) <= longest


def texts(axes):
    return [text.get_text() for text in axes.texts]


def test_a_round_is_drawn_with_how_far_each_row_has_to_move():
    figure = ragged_round(ragged_rows.ragged_round())
    fed, realigned, scattered = figure.axes
    # 61 + 2 = 63 columns afterwards: 38 + 5 is 20 short of them and was 23 short before.
    assert texts(realigned) == ["stays", "moved -3", "moved +1", "moved -1"]
    assert texts(scattered) == ["length 63", "length 43", "length 45", "length 55"]
    ends = {}
    for axes in (fed, realigned):
        for bar in axes.patches:
            row = round(bar.get_y() + 0.36)
            ends[axes, row] = max(ends.get((axes, row), 0), bar.get_x() + bar.get_width())
        assert len({end for (owner, _), end in ends.items() if owner is axes}) == 1
    assert "2 of 5, 5 of 5, 1 of 5, 3 of 5" in words.round_alt(ragged_rows.ragged_round())


def test_rasters_show_what_is_wrong_and_where_the_first_rejection_was():
    figure = corruption_by_token(OUTPUTS)
    rasters = [axes for axes in figure.axes if axes.images]
    assert [axes.get_title() for axes in rasters] == list(WAYS)
    wrong = rasters[2].images[0].get_array()
    np.testing.assert_array_equal(wrong, np.tile([0] * 4 + [2] * 8, (3, 1)))
    assert (rasters[0].images[0].get_array() == 0).all()
    assert [line.get_xdata()[0] for line in rasters[2].lines] == [6, 6, 6]
    assert "3 prompts" in words.corruption_caption(OUTPUTS)
    assert "draft kept (DSD-like): 0% of rows exact" in words.corruption_alt(OUTPUTS)


def test_shares_of_rows_and_tokens():
    figure = matches_by_way(OUTPUTS)
    (axes,) = figure.axes
    assert [label.get_text() for label in axes.get_yticklabels()] == list(WAYS)
    points = [line.get_xdata()[0] for line in axes.lines]
    assert points[-3:] == pytest.approx([100 * 4 / 12, 0, 0])
    assert points[:3] == [100, 100, 100]
    assert "33% of tokens" in words.matches_alt(OUTPUTS)


def test_the_matrix_shades_the_share_of_decoders_and_names_the_earliest_round():
    figure = fault_matrix(CELLS)
    (axes,) = figure.axes
    faults = [label.get_text() for label in axes.get_yticklabels()]
    assert faults[-1] == "none"
    table = np.ma.filled(axes.images[0].get_array(), np.nan)
    np.testing.assert_array_equal(table[faults.index("stale")], [0.5, 0])
    assert np.isnan(table[faults.index("none"), 1])
    assert sorted(filter(None, texts(axes))) == sorted(["2", "×", "•", "oracle", "target"])
    assert isinstance(axes.images[0].cmap, matplotlib.colors.ListedColormap)
    assert "stale: 1" in words.matrix_alt(CELLS) and "none" not in words.matrix_alt(CELLS)
    assert "(3 in all)" in words.matrix_caption(CELLS)
