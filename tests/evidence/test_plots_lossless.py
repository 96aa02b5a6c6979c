"""The figures of losslessness are drawn from records, and show what they should."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_core.evidence import plots_lossless as plots
from specdec_core.evidence.gallery import GALLERY
from specdec_core.evidence.lossless_analysis import law_curves, law_tests, sizes
from tests.evidence.test_lossless_analysis import records
from tests.evidence.test_lossless_claims import QUIET, ZOO, exact, kill

ROWS = records()
TESTS, CURVES, SIZES = list(law_tests(ROWS, True)), list(law_curves(ROWS)), list(sizes(records(repeats=8), True, 5))
EXACT = [exact(value, case=str(value)) for value in (0.0, 1e-17, 3e-16)] + [exact(1e-15, "transformer, torch")]
KILLS = [
    *ZOO,
    *QUIET,
    kill("m0", "law", "e-process", tokens=321),
    kill("m1", "law", "e-process", False) | {"crashed": True},
]

AUDITS = [
    {"pair": "tiny, 4 bits", "setting": setting, "decoder": name, "bias": bias, "low": bias - 0.01, "high": bias + 0.01,
     "tokens": 900, "verdict": "not lossless" if bias else "lossless"}
    for setting, name, bias in (("T=1", "ours", 0.0), ("T=1", "other", -0.07), ("T=0.7", "ours", 0.0))
]  # fmt: skip

DATA = {
    "01_exact_law": (EXACT,), "01_null": (TESTS, CURVES), "01_pit_by_offset": (CURVES,), "01_bias": (CURVES,),
    "01_kill_matrix": (KILLS,), "01_sizes": (SIZES,), "01_audit": (AUDITS,),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_it_is_drawn_with_caption_and_alternative_text(name, tmp_path):
    drawing = GALLERY[name]
    figure = drawing.draw(*DATA[name])
    figure.savefig(tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 5_000
    assert len(drawing.caption(*DATA[name])) > 80 and len(drawing.alt(*DATA[name])) > 30


def test_every_figure_of_notebook_01_is_tested():
    assert set(DATA) == {name for name in GALLERY if name.startswith("01_")}


def test_errors_are_points_right_of_the_floor():
    (axes,) = plots.exact_law_errors(EXACT).axes
    points = np.concatenate([np.asarray(one.get_offsets())[:, 0] for one in axes.collections if len(one.get_offsets())])
    assert sorted(points) == pytest.approx([1e-17, 1e-17, 3e-16, 1e-15])


def test_observed_statistics_are_marked():
    axes = plots.null_and_observed(TESTS, CURVES).axes[0]
    marked = sorted(line.get_xdata()[0] for line in axes.lines if line.get_marker() not in ("None", "", None))
    assert marked == pytest.approx(sorted(one["statistic"] for one in TESTS if one["test"] == "χ², nominal"))


def test_marks_of_the_matrix():
    axes = plots.kill_matrix(KILLS).axes[0]
    marks = {(text.get_position()[0], text.get_position()[1]): text.get_text() for text in axes.texts}
    column = [label.get_text() for label in axes.get_xticklabels()].index("e-process") + 0.5
    assert marks[column, 0.5] == "321" and marks[column, 1.5] == "×" and marks[column, 2.5] == "–"
    assert marks[0.5, 0.5] == "●"


def test_one_panel_an_offset_and_bars_of_every_size():
    assert len(plots.pit_by_offset(CURVES).axes) == 3
    (axes,) = plots.sizes_under_the_null(SIZES).axes
    assert len(axes.get_yticklabels()) == len(SIZES)


def test_audits_that_reject_are_hollow():
    (axes,) = plots.audited_samplers(AUDITS).axes
    points = {
        round(line.get_xdata()[0], 3): line.get_markerfacecolor() for line in axes.lines if line.get_marker() in "os"
    }
    assert points[-0.07] == "none" and points[0.0] != "none"
