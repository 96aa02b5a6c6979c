"""What is drawn of batched speed is what was measured, and no text covers another or leaves the page."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest

from specdec_core.evidence import words_ragged_speed as words
from specdec_core.evidence.plots_ragged_speed import (
    heterogeneity,
    latency_by_batch,
    realign_share,
    throughput_by_batch,
)
from specdec_core.evidence.ragged_claims import GROUPED, Keeping, best_pairs, pair_up, pooled_ratio, shares
from specdec_core.evidence.ragged_speed import completion, tau, tau_of_slowest, token_latency
from tests.evidence.test_plots_sweep import texts_of
from tests.evidence.test_ragged_claims import BATCHES, HUGGING, RIGHT, TAU, kept, run, runs

BATCHED = [*RIGHT, *(row | {"way": GROUPED, "completions": [5.0, 9.0]} for row in RIGHT if row["batch"] > 2)]
KEPT = kept()
FIGURES = {
    "throughput": (throughput_by_batch, BATCHED),
    "latency": (latency_by_batch, BATCHED),
    "realign": (realign_share, KEPT),
    "heterogeneity": (heterogeneity, BATCHED),
}
WORDS = {
    "throughput": (words.throughput_caption, words.throughput_alt),
    "latency": (words.latency_caption, words.latency_alt),
    "realign": (words.realign_caption, words.realign_alt),
    "heterogeneity": (words.heterogeneity_caption, words.heterogeneity_alt),
}


@pytest.fixture(scope="module")
def figures():
    return {name: draw(rows) for name, (draw, rows) in FIGURES.items()}


def lines(axes) -> list[np.ndarray]:
    """What is drawn with markers: heights of each series."""
    return [np.asarray(line.get_ydata()) for line in axes.get_lines() if line.get_marker() not in ("None", "", None)]


def levels(axes) -> list[float]:
    """Heights of the lines across the whole panel."""
    return [float(line.get_ydata()[0]) for line in axes.get_lines() if list(line.get_xdata()) == [0, 1]]


def is_drawn(axes, heights) -> bool:
    return any(len(line) == len(heights) and np.allclose(line, heights) for line in lines(axes))


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_overlaps_another_or_leaves_the_page(figures, name):
    figure = figures[name]
    texts = list(texts_of(figure))
    width, height = figure.canvas.get_width_height()
    for text, box in texts:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, f"{text!r} leaves"
    for (one, first), (other, second) in combinations(texts, 2):
        assert not first.overlaps(second), f"{one!r} covers {other!r}"


def test_throughput_is_drawn_as_measured_and_as_predicted(figures):
    speed, gain = figures["throughput"].axes
    best = [best_pairs(RIGHT, batch) for batch in BATCHES]
    for name, sides in (("AR", [pairs.ar for pairs in best]), ("best SD", [pairs.sd for pairs in best])):
        rates = [sum(r["tokens"] for r in own) / sum(r["seconds"][0] for r in own) for own in sides]
        predicted = [sum(r["tokens"] for r in own) / sum(r["predicted_seconds"] for r in own) for own in sides]
        assert is_drawn(speed, rates) and is_drawn(speed, predicted), name
    for speculation in TAU:
        pairs = [pair_up(RIGHT, batch)[speculation] for batch in BATCHES]
        assert is_drawn(gain, [each.speedup().estimate for each in pairs])
        assert is_drawn(gain, [each.predicted() for each in pairs])
    assert 1.0 in levels(gain)
    labels = [text.get_text() for text in figures["throughput"].legends[0].get_texts()]
    assert labels == ["AR", "best SD", "4-bit copy K=2", "n-gram K=1", "n-gram K=2", "n-gram K=4", "predicted"]


def test_latencies_are_of_tokens_and_rows(figures):
    token, row = figures["latency"].axes
    ar = [[r for r in RIGHT if r["batch"] == batch and not r["K"]] for batch in BATCHES]
    for quantile in (0.5, 0.99):
        assert is_drawn(token, [1e3 * token_latency(own, quantile) for own in ar])
        assert is_drawn(row, [completion(own, quantile) for own in ar])
    assert is_drawn(row, [5.0] * 4) and is_drawn(row, [9.0] * 4)  # grouped, where it was measured
    without = latency_by_batch(RIGHT)
    assert not any("grouped" in text.get_text() for text in without.legends[0].get_texts())


def test_a_token_counts_as_often_as_it_came():
    one = run(1, 0) | {"latencies": [1.0, 2.0], "latency_tokens": [90, 10]}
    other = run(1, 1) | {"latencies": [3.0], "latency_tokens": [100]}
    assert token_latency([one], 0.5) == 1.0 and token_latency([one], 0.95) == 2.0
    assert token_latency([one, other], 0.45) == 1.0 and token_latency([one, other], 0.55) == 3.0


def test_grouped_runs_are_those_of_the_fastest_speculation():
    slow = [run(8, r, ("n-gram", 1), GROUPED, completions=[7.0]) for r in range(3)]
    fast = [run(8, r, ("n-gram", 4), GROUPED, stretch=0.1, completions=[3.0]) for r in range(3)]
    row = latency_by_batch([*RIGHT, *slow, *fast]).axes[1]
    assert is_drawn(row, [3.0]) and not is_drawn(row, [7.0])


def test_shares_are_drawn_in_percent_with_the_threshold(figures):
    (axes,) = figures["realign"].axes
    found = shares(KEPT)
    expected = [100 * found[Keeping(HUGGING, "realign", batch)].estimate for batch in (1, 8, 32)]
    np.testing.assert_allclose(drawn_series(axes, f"realign, {HUGGING}"), expected)
    assert levels(axes) == [1.0] and axes.get_yscale() == "log"
    assert levels(realign_share(KEPT, threshold=0.05).axes[0]) == [5.0]


def drawn_series(axes, label: str) -> np.ndarray:
    """Heights of a series with bars."""
    (bars,) = [one for one in axes.containers if one.get_label() == label]
    return np.asarray(bars.lines[0].get_ydata(), float)


def test_heterogeneity_is_tau_with_and_without_the_cut(figures):
    copy, lookup = figures["heterogeneity"].axes
    assert (copy.get_title(), lookup.get_title()) == ("4-bit copy", "n-gram")
    for axes, speculation in ((copy, ("4-bit copy", 2)), (lookup, ("n-gram", 4))):
        own = [pair_up(RIGHT, batch)[speculation].sd for batch in BATCHES]
        assert is_drawn(axes, [tau(each).estimate for each in own])
        assert is_drawn(axes, [tau_of_slowest(each) for each in own])
    rows = [run(4, 0, ("n-gram", 2), tokens=100, row_rounds=60, accepted=40, least_accepted=10)]
    assert tau(rows).estimate == pytest.approx(100 / 60) and tau_of_slowest(rows) == pytest.approx(70 / 60)
    assert len(heterogeneity([row for row in RIGHT if row["drafter"] != "4-bit copy"]).axes) == 1


@pytest.mark.parametrize("draw", [throughput_by_batch, latency_by_batch, heterogeneity])
def test_a_single_repeat_is_drawn_without_bars(draw):
    figure = draw(runs(repeats=1))
    assert list(texts_of(figure))
    for axes in figure.axes:
        low, high = axes.get_ylim()
        assert low > 0 and high / low < 1e4
        assert all(start[1] == end[1] for bars in axes.containers for start, end in bars.lines[2][0].get_segments())


def test_the_ordinate_is_that_of_the_shares_and_not_of_wide_intervals():
    rows = [row | {"seconds": row["seconds"][:1]} for row in KEPT]
    assert realign_share(rows).axes[0].get_ylim() == pytest.approx((0.05 / 3, 90), rel=0.15)


@pytest.mark.parametrize("name", WORDS)
def test_captions_say_what_is_drawn(name):
    caption, alt = (say(FIGURES[name][1]) for say in WORDS[name])
    assert caption.endswith(".") and alt.endswith(".") and len(caption) > 100
    repeats = "15 repeats" if name == "realign" else "12 repeats"
    assert repeats in caption
    if name == "realign":
        share = shares(KEPT)[Keeping(HUGGING, "realign", 32)]
        assert f"{share.estimate:.2%}" in alt and "5 nodes" in caption and "128" in caption
    elif name == "throughput":
        rate = pooled_ratio([r["tokens"] for r in RIGHT if not r["K"] and r["batch"] == 8],
                            [r["seconds"][0] for r in RIGHT if not r["K"] and r["batch"] == 8]).estimate  # fmt: skip
        assert f"batch 8: AR {rate:.0f} tokens a second, best speedup" in alt
    elif name == "latency":
        median = 1e3 * token_latency([r for r in RIGHT if not r["K"] and r["batch"] == 1], 0.5)
        assert (
            f"AR at batch 1: {median:.0f} ms a token" in alt
            and median > 1
            and "AR at batch 32:" in alt
            and "grouped by length at batch 4" in alt
        )
    else:
        pairs = pair_up(RIGHT, 32)["n-gram", 4]
        assert f"{tau(pairs.sd).estimate:.2f} against {tau_of_slowest(pairs.sd):.2f} at batch 32" in alt


def test_predicted_bars_without_measured_ones_are_none(figures):
    """Only what was measured has an interval."""
    for name in ("throughput", "heterogeneity"):
        for axes in figures[name].axes:
            assert {bars.get_label() for bars in axes.containers} <= {"AR", "best SD", "K = 1", "K = 2", "K = 4",
                                                                      *(f"{d} K={k}" for d, k in TAU)}  # fmt: skip
