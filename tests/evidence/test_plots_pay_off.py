"""Why configurations pay: what is drawn and said is what was measured."""

from __future__ import annotations

import re

import pytest
from matplotlib.colors import to_hex

from specdec_core.evidence import words_sweep as words
from specdec_core.evidence.plots_pay_off import drafter_markers, pay_off, peer_speedups, round_time, speedup_forest
from specdec_core.evidence.plots_sweep import backend_colors, drafters_of, series_names
from specdec_core.evidence.sweep_claims import attribute_best
from specdec_core.evidence.sweep_records import pair_up
from tests.evidence.test_cure_claims import run
from tests.evidence.test_plots_linear import inside_and_apart
from tests.evidence.test_plots_sweep import curve


@pytest.fixture(scope="module")
def found(many_pairs):
    return attribute_best(many_pairs)


@pytest.fixture(scope="module")
def of_peers():
    """Two decoders of other packages, one of them at both temperatures, beside our own."""
    speeds = {"llama.cpp Q4_1 · lookup": 30, "transformers float32 · prompt lookup": 80, "numba int8 · n-gram": 200}
    rows = []
    for name, speed in speeds.items():
        group = (name, speed, "sd"), (f"{name.split(' · ')[0]} · AR", 40, "ar")
        rows += [run(peer, number, each, arm) for peer, each, arm in group for number in range(6)]
    warm = [row | {"temperature": 1.0, "identical": None} for row in rows if row["engine"] == "llama.cpp"]
    return [*rows, *(row | {"seconds": row["seconds"] / 3} if row["arm"] == "sd" else row for row in warm)]


def points_of(axes) -> list[tuple[float, float, str, str, str]]:
    """x, y, colour, colour of the face and marker of every point that is drawn alone."""
    alone = [
        line for line in axes.get_lines() if len(line.get_xydata()) == 1 and line.get_marker() not in ("None", "|")
    ]
    looks = [(to_hex(line.get_color()), to_hex(line.get_markerfacecolor()), line.get_marker()) for line in alone]
    return [(*map(float, line.get_xydata()[0]), *look) for line, look in zip(alone, looks, strict=True)]


def test_every_configuration_is_joined_to_what_it_needs(many_pairs, found):
    region, _ = pay_off(many_pairs).axes
    colors, markers, drafters = backend_colors(many_pairs), drafter_markers(many_pairs), drafters_of(many_pairs)
    assert len(set(markers.values())) == len(markers) == 9
    points = points_of(region)
    assert len(points) == 2 * len(found)
    for one, (tick, point) in zip(found, zip(points[::2], points[1::2], strict=True), strict=True):
        x, color = one.c + one.s, to_hex(colors[one.backend])
        face = "#ffffff" if one.cell.temperature else color
        assert tick == pytest.approx((x, one.needed, color, color, "_"))
        assert point == pytest.approx((x, one.acceptance, color, face, markers[drafters[one.cell.configuration]]))
        assert [[x, x], [one.acceptance, one.needed]] in [[*map(list, line.get_data())] for line in region.get_lines()]


def test_every_cell_is_a_point_of_the_prediction(many_pairs):
    _, prediction = pay_off(many_pairs).axes
    cells = pair_up(many_pairs, split="report").values()
    drawn = {
        (round(float(x), 9), round(float(y), 9))
        for container in prediction.containers
        for x, y in container.lines[0].get_xydata()
    }
    assert drawn == {(round(each.predicted_speedup(), 9), round(each.speedup().estimate, 9)) for each in cells}
    hollow = [each for each in prediction.containers if to_hex(each.lines[0].get_markerfacecolor()) == "#ffffff"]
    assert len(hollow) == 4  # those at T = 1
    low, high = prediction.get_xlim()
    assert low < 1 < high and prediction.get_ylim() == (low, high)


def test_a_rounds_bar_is_its_time_and_the_diamond_what_ar_takes(many_pairs, found):
    (axes,) = round_time(many_pairs).axes
    order = list(drafters_of(many_pairs))
    lines = sorted(found, key=lambda one: (order.index(one.cell.configuration), one.cell.temperature))
    names = [text.get_text() for text in axes.get_yticklabels()]
    assert names == [f"{name}, K={one.cell.K}" for name, one in zip(_names(lines), lines, strict=True)]
    assert names[0].startswith("numba float32 · n-gram tree, K=") and ", T=1, K=" in names[1]
    diamonds = {round(y): x for x, y, *_ in points_of(axes)}
    for line, one in enumerate(lines):
        bars = [bar for bar in axes.patches if abs(bar.get_y() + bar.get_height() / 2 - line) < 0.01]
        widths = [bar.get_width() for bar in bars]
        extra, draft = one.s * one.drafted, one.c * one.drafted
        assert widths == pytest.approx([one.seconds - extra - draft - one.o, extra, draft, one.o])
        assert [bar.get_x() for bar in bars] == pytest.approx([sum(widths[:n]) for n in range(4)])
        assert diamonds[line] == pytest.approx(one.seconds * one.speedup.estimate)
        assert (diamonds[line] > sum(widths)) == (one.speedup.estimate > 1)


def test_the_forest_puts_the_fastest_on_top_and_peers_below_a_line(many_pairs, found, of_peers):
    figure = speedup_forest(many_pairs, of_peers)
    inside_and_apart(figure)
    (axes,) = figure.axes
    ours = sorted(found, key=lambda one: -one.speedup.estimate)
    theirs = peer_speedups(of_peers)
    names = [text.get_text() for text in axes.get_yticklabels()]
    own = [f"{name}, K={one.cell.K}" for name, one in zip(_names(ours), ours, strict=True)]
    assert names == own + [name for name, _ in theirs]
    measured = {round(y): x for x, y, *_, marker in points_of(axes) if marker in "os"}
    expected = [*(one.speedup for one in ours), *(interval for _, interval in theirs)]
    assert [measured[line] for line in range(len(names))] == pytest.approx([each.estimate for each in expected])
    left, right = axes.get_xlim()
    for each in expected:  # a whole bar is seen, or as much of it as a factor of two to either side
        assert left < max(each.low, each.estimate / 2) and min(each.high, each.estimate * 2) < right
    predicted = {round(y): x for x, y, *_, marker in points_of(axes) if marker == "d"}
    assert list(predicted.values()) == pytest.approx([one.predicted for one in ours])
    assert [len(ours) - 0.5] * 2 in [list(line.get_ydata()) for line in axes.get_lines()]
    assert "other packages" in {text.get_text() for text in figure.legends[0].get_texts()}


def test_peers_are_other_packages_speculation_at_each_temperature(of_peers):
    found = peer_speedups(of_peers)
    assert [name for name, _ in found] == [
        "llama.cpp Q4_1 · lookup, T=1", "transformers float32 · prompt lookup, T=0", "llama.cpp Q4_1 · lookup, T=0"
    ]  # fmt: skip
    assert [each.estimate for _, each in found] == pytest.approx([2.25, 2.0, 0.75], rel=0.05)
    cold = [row for row in of_peers if not row["temperature"]]
    assert peer_speedups(cold)[0][0] == "transformers float32 · prompt lookup"


class TestWords:
    def test_configurations_that_pay_are_counted(self, many_pairs, found):
        above = sum(one.speedup.estimate > 1 for one in found)
        assert 0 < above < len(found) == 22
        assert words.pay_off_alt(many_pairs).startswith(
            f"{above} of {len(found)} configurations accept more than c + s + o/K. "
        )

    def test_times_of_a_round_add_up(self, many_pairs, found):
        parts = re.findall(r"K=(\d): ([\d.]+) steps.*?verifying ([\d.]+) .*?drafting ([\d.]+), for ([\d.]+) tokens",
                           words.round_alt(many_pairs))  # fmt: skip
        assert len(parts) == len(found)
        for one, (K, whole, verifying, drafting, tokens) in zip(found, parts, strict=True):
            assert int(K) == one.cell.K and float(tokens) == pytest.approx(one.tau, abs=0.005)
            assert float(whole) == pytest.approx(1 + float(verifying) + float(drafting) + one.o, abs=0.1)

    def test_the_forest_names_all_from_the_fastest(self, many_pairs, found, of_peers):
        best, (_, fastest) = max(found, key=lambda one: one.speedup.estimate), peer_speedups(of_peers)[0]
        alone, text = words.forest_alt(many_pairs), words.forest_alt(many_pairs, of_peers)
        assert alone.startswith(f"Speedups with intervals. {_names([best])[0]} {best.speedup};")
        assert text.startswith(alone[:-1]) and f"; llama.cpp Q4_1 · lookup, T=1 {fastest}" in text
        assert "Squares" in words.forest_caption(many_pairs, of_peers) and "Squares" not in words.forest_caption(
            many_pairs
        )

    def test_prompts_are_those_reported(self, many_pairs):
        assert "pooled over 3 report prompts" in words.heat_map_caption(many_pairs)  # one of four repeats itself
        assert words.pay_off_caption(many_pairs).endswith("4 report prompts.")

    def test_the_shortest_context_alone_is_told_of(self):
        rows = [*curve("a", 0.1, 0.1, context=512), *curve("a", 0.2, 0.1)]
        assert "context 128." in words.shortest_curve_caption(rows) and "128, 512" in words.curve_caption(rows)
        assert "a: 200.0 ms at n=1, 500.0 ms at n=16." in words.shortest_curve_alt(rows)


def _names(found):
    return series_names((one.cell.configuration, one.cell.temperature) for one in found)
