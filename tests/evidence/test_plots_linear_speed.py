"""Times of rounds are drawn as measured, with the bounds of the machine."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_core.evidence import words_linear as words
from specdec_core.evidence.gallery import GALLERY
from specdec_core.evidence.linear_claims import EAGER, FACTORS, SCHEMES, arithmetic_seconds, memory_seconds
from specdec_core.evidence.plots_linear_speed import ARITHMETIC, MEMORY, swept_over, time_against_batch, time_against_n
from tests.evidence.linear_rows import cell, not_timed, speed_row, speeds
from tests.evidence.test_plots_linear import inside_and_apart

BATCHES = [row for batch in (1, 8, 32) for size in ("8 × 64 × 64", "GDN-1.3B") for shape in ("chain", "tree")
           for row in cell(shape, batch=batch, size=size)]  # fmt: skip
ROWS = [*speeds(), *(row for row in BATCHES if row["batch"] < 32)]


@pytest.fixture(scope="module")
def by_n():
    return time_against_n(speeds())


@pytest.fixture(scope="module")
def by_batch():
    return time_against_batch(BATCHES)


def series(axes, label):
    (bars,) = [one for one in axes.containers if one.get_label() == label]
    return np.asarray(bars.lines[0].get_xydata())


def bound(axes, label):
    (line,) = [line for line in axes.lines if line.get_label() == label]
    return np.asarray(line.get_xydata())


def test_no_text_overlaps_another_or_leaves_the_page(by_n, by_batch):
    inside_and_apart(by_n)
    inside_and_apart(by_batch)
    four = [row | {"size": f"{row['size']}, {half}"} for row in BATCHES for half in ("one", "two")]
    inside_and_apart(time_against_batch(four))


def test_what_was_swept_is_found():
    assert swept_over(ROWS, "n") == [("GDN-1.3B", 32)]
    assert swept_over(BATCHES, "batch") == [("8 × 64 × 64",), ("GDN-1.3B",)]
    assert swept_over(cell(), "n") == swept_over(cell(), "batch") == []


def test_medians_are_drawn_in_ms_against_n(by_n):
    chains, trees = by_n.axes
    assert (chains.get_title(), trees.get_title()) == ("GDN-1.3B, batch 32, chains", "GDN-1.3B, batch 32, trees")
    for scheme in SCHEMES:
        expected = [
            (n, 1e3 * np.median(row["seconds"]))
            for n in (4, 16, 64)
            for row in [speed_row(scheme, n)]
            if (scheme, n) != (EAGER, 64)
        ]
        np.testing.assert_allclose(series(chains, scheme), expected)
    assert chains.get_ylabel() == "ms a round" and trees.get_xlabel() == "nodes a row, n" and not chains.get_xlabel()


def test_what_was_left_out_is_not_drawn(by_n):
    assert [len(series(by_n.axes[0], scheme)) for scheme in (EAGER, FACTORS)] == [2, 3]


def test_both_bounds_are_drawn(by_n):
    for axes in by_n.axes:
        rows = [speed_row(FACTORS, n) for n in (4, 16, 64)]
        np.testing.assert_allclose(bound(axes, MEMORY)[:, 1], [1e3 * memory_seconds(row) for row in rows])
        np.testing.assert_allclose(bound(axes, ARITHMETIC)[:, 1], [1e3 * arithmetic_seconds(row) for row in rows])
    labels = [text.get_text() for text in by_n.legends[0].get_texts()]
    assert labels == [*SCHEMES, MEMORY, ARITHMETIC]


def test_batches_are_drawn_a_panel_a_layer(by_batch):
    titles = [axes.get_title() for axes in by_batch.axes]
    assert titles == ["8 × 64 × 64, chains", "GDN-1.3B, chains", "8 × 64 × 64, trees", "GDN-1.3B, trees"]
    for axes in by_batch.axes:
        assert series(axes, FACTORS)[:, 0].tolist() == [1, 8, 32]
    expected = [1e3 * np.median(speed_row(FACTORS, batch=batch)["seconds"]) for batch in (1, 8, 32)]
    np.testing.assert_allclose(series(by_batch.axes[1], FACTORS)[:, 1], expected)


def test_other_n_are_no_part_of_the_sweep_over_the_batch():
    axes = time_against_batch([*BATCHES, *cell(n=4, batch=4)]).axes[1]
    assert series(axes, FACTORS)[:, 0].tolist() == [1, 8, 32]


@pytest.mark.parametrize("draw", [time_against_n, time_against_batch])
def test_a_single_cell_is_drawn_as_nothing_swept(draw):
    assert "nothing was swept" in draw(cell()).axes[0].get_title()


def test_one_repeat_has_no_bars():
    axes = time_against_n([row for n in (4, 8, 16) for row in cell(n=n, repeats=1)]).axes[0]
    for bars in axes.containers:
        assert all(start[1] == end[1] for start, end in bars.lines[2][0].get_segments())


def test_intervals_are_drawn(by_n):
    (bars,) = [one for one in by_n.axes[0].containers if one.get_label() == FACTORS]
    assert all(end[1] > start[1] for start, end in bars.lines[2][0].get_segments())


def test_words_tell_of_what_is_drawn_alone():
    # A larger state than any that is swept over n, and points of it that are left out.
    more = [row | {"batch": 64, "state_bytes": 2 * row["state_bytes"]} for row in cell(n=16)]
    rows = [*speeds(), *(not_timed(row) if row["scheme"] == EAGER else row for row in more)]
    assert "batch 32, n=16" in words.speed_by_n_alt(rows) and "memory or time: 2." in words.speed_by_n_caption(rows)
    both = [*rows, *BATCHES]
    assert "batch 64, n=16" in words.speed_by_batch_alt(both) and "time: 1." in words.speed_by_batch_caption(both)


def test_words():
    rows = speeds()
    assert "12 repeats" in words.speed_by_n_caption(rows) and "memory or time: 2." in words.speed_by_n_caption(rows)
    assert "left out" not in words.speed_by_batch_caption(BATCHES) and "n = 16" in words.speed_by_batch_caption(BATCHES)
    alt = words.speed_by_n_alt(rows)
    times = 1e3 * np.median(speed_row(FACTORS, shape="tree")["seconds"])
    assert "GDN-1.3B, batch 32, n=16" in alt and f"compact factors {times:.3g} ms" in alt
    assert f"the bound is {1e3 * max(memory_seconds(rows[0]), arithmetic_seconds(speed_row(FACTORS))):.3g} ms" in alt
    assert "eager sequential" not in words.speed_by_n_alt([not_timed(r) if r["scheme"] == EAGER else r for r in rows])
    for name, own in (("06_speed_by_n", rows), ("06_speed_by_batch", BATCHES)):
        drawing = GALLERY[name]
        assert drawing.draw(own).axes and drawing.caption(own).endswith(".") and drawing.alt(own).endswith(".")
