"""What is drawn of the trained drafter is what was recorded, and no text covers another or leaves the page."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from matplotlib.colors import to_rgb

from specdec_core.evidence import words_training as words
from specdec_core.evidence.figures import read_captions
from specdec_core.evidence.gallery import GALLERY, draw
from specdec_core.evidence.plots_training import decided, drafter_acceptance, drafter_training, shown_checks
from specdec_core.evidence.training_records import ACCEPTANCE, TRAINING, alpha_by_position, best_check, by_arm, taus
from specdec_core.statistics.intervals import ratio_interval
from tests.evidence.test_plots_sweep import texts_of

ARMS = [("chain", 0.0), ("tree", 0.0), ("chain", 1.0), ("tree", 1.0)]
NAMES = [f"{arm}, K = 5, T = {temperature:g}" for arm, temperature in ARMS]


def check(step: int, tau: float, unroll: int = 5, **changed) -> dict:
    """A check of a drafter that learns: the better, the more steps."""
    learned = 1 - np.exp(-step / 250)
    held_out = [9 - 5.6 * learned + 0.3 * number for number in range(unroll)]
    alpha = [0.1 + 0.6 * learned - 0.02 * number for number in range(unroll)]
    row = {
        "drafter": "eagle", "step": step, "epoch": step / 300, "seconds": 2.4 * step, "learning_rate": 1e-3,
        "loss": 5.0 if step else None, "losses": [loss - 0.9 for loss in held_out] if step else [],
        "held_out_losses": held_out, "greedy_alpha": alpha, "greedy_tau": tau,
        "sampled_alpha": [0.8 * share for share in alpha], "drafted_tau": tau - 0.1 if step else None,
    }  # fmt: skip
    return TRAINING.validated(row | changed)


def training(steps=range(0, 1501, 100), unroll: int = 5) -> list[dict]:
    """Learns until the check before the last one."""
    steps = list(steps)
    rows = [check(step, 1.1 + 1.3 * place / len(steps), unroll) for place, step in enumerate(steps)]
    return [*rows[:-1], rows[-1] | {"greedy_tau": rows[-1]["greedy_tau"] - 0.2}] if len(rows) > 2 else rows


def acceptance(prompts: int = 48, arms=ARMS, k: int = 5, tokens: int = 64, seed: int = 0) -> list[dict]:
    """Every fourth prompt is for tuning, every fifth repeats itself (and accepts more); trees accept more."""
    generator, rows = np.random.default_rng(seed), []
    for domain, base in (("math", 0.62), ("code", 0.66), ("chat", 0.5)):
        for number in range(prompts):
            for arm, temperature in arms:
                repetitive = number % 5 == 2
                share = base + 0.08 * (arm == "tree") - 0.1 * temperature + 0.2 * repetitive
                rows.append(
                    {
                        "arm": arm, "K": k, "temperature": temperature, "prompt_id": f"{domain}-{number:02}",
                        "domain": domain, "split": "tuning" if number % 4 == 3 else "report",
                        "repetitive": repetitive, "identical": True, **walk(generator, share, k, tokens),
                    }
                )  # fmt: skip
    return [ACCEPTANCE.validated(row) for row in rows]


def walk(generator, share: float, k: int, tokens: int) -> dict:
    tested, accepted, emitted, passes = [0] * k, [0] * k, 0, 0
    while emitted < tokens:
        passes += 1
        emitted += 1
        for position in range(k):
            tested[position] += 1
            if generator.random() > share:
                break
            accepted[position] += 1
            emitted += 1
    return {"tokens": emitted, "target_passes": passes, "nodes": passes * k, "tested_by_position": tested,
            "accepted_by_position": accepted}  # fmt: skip


LEARNED = training()
QUICK = training((0, 6, 12), unroll=3)
SERVED = acceptance()
FIGURES = {
    "learned": (drafter_training, LEARNED),
    "quick": (drafter_training, QUICK),
    "two checks": (drafter_training, training((0, 6), unroll=3)),
    "one check": (drafter_training, training((0,), unroll=3)),
    "no check": (drafter_training, []),
    "served": (drafter_acceptance, SERVED),
    "quick serving": (drafter_acceptance, acceptance(2, k=3, tokens=16)),
    "one prompt": (drafter_acceptance, acceptance(1, arms=ARMS[:1], k=3, tokens=5)[:1]),
    "nothing served": (drafter_acceptance, []),
    "tuning prompts": (drafter_acceptance, [row for row in SERVED if row["split"] == "tuning"]),
}


@pytest.fixture(scope="module")
def figures():
    return {name: drawing(rows) for name, (drawing, rows) in FIGURES.items()}


def drawn(axes, label: str) -> np.ndarray:
    """Points of a series, `[n, 2]`."""
    (line,) = [line for line in axes.get_lines() if line.get_label() == label]
    return np.asarray(line.get_xydata(), float)


def legend(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def points_of(rows, field) -> list[tuple[float, float]]:
    return [(row["step"], row[field]) for row in rows if row[field] is not None]


@pytest.mark.parametrize("name", FIGURES)
def test_no_text_overlaps_another_or_leaves_the_page(figures, name):
    figure = figures[name]
    texts = list(texts_of(figure))
    width, height = figure.canvas.get_width_height()
    assert len(texts) > 5
    for text, box in texts:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, f"{text!r} leaves"
    for (one, first), (other, second) in combinations(texts, 2):
        assert not first.overlaps(second), f"{one!r} covers {other!r}"


@pytest.mark.parametrize(("name", "rows", "last"), [("learned", LEARNED, 5), ("quick", QUICK, 3)])
def test_losses_of_the_first_and_the_last_unrolled_step_are_drawn(figures, name, rows, last):
    axes = figures[name].axes[0]
    for number in (1, last):
        held_out = [(row["step"], row["held_out_losses"][number - 1]) for row in rows]
        training = [(row["step"], row["losses"][number - 1]) for row in rows if row["losses"]]
        assert len(training) == len(held_out) - 1  # before the first step nothing was averaged
        np.testing.assert_allclose(drawn(axes, f"held out, unrolled step {number}"), held_out)
        np.testing.assert_allclose(drawn(axes, f"training, unrolled step {number}"), training)
    assert not any(text.endswith("unrolled step 2") for text in legend(figures[name]))


def test_both_taus_are_drawn_where_they_were_worked_out(figures):
    rows = [row | {"drafted_tau": None if row["step"] == 300 else row["drafted_tau"]} for row in LEARNED]
    axes = drafter_training(rows[::-1]).axes[1]
    np.testing.assert_allclose(drawn(axes, "τ worked out in training"), points_of(rows, "greedy_tau"))
    np.testing.assert_allclose(drawn(axes, "τ by real drafting"), points_of(rows, "drafted_tau"))
    assert {0, 300}.isdisjoint(drawn(axes, "τ by real drafting")[:, 0])
    assert len(drawn(axes, "τ by real drafting")) == len(LEARNED) - 2
    assert [1.0, 1.0] in [list(line.get_ydata()) for line in axes.get_lines()]


def test_what_was_not_measured_is_not_in_the_legend():
    rows = [row | {"drafted_tau": None, "sampled_alpha": [], "held_out_losses": []} for row in QUICK]
    assert legend(drafter_training(rows)) == [
        "training, unrolled step 1", "training, unrolled step 3", "τ worked out in training", "best check",
        "τ = 1, without drafts", "α, step 0", "α, step 6", "α, step 12 (best)",
    ]  # fmt: skip


def test_the_best_check_is_marked(figures):
    assert best_check(LEARNED)["step"] == 1400
    for axes in figures["learned"].axes[:2]:
        marks = [line.get_xdata() for line in axes.get_lines() if line.get_linestyle() == ":" and len(line.get_xdata())]
        assert [list(mark) for mark in marks] == [[1400, 1400]]
    same = [check(0, 1.5), check(100, 2.0), check(200, 2.0), check(300, 1.9)]
    assert best_check(same)["step"] == best_check(same[::-1])["step"] == 200  # the newest of equals is kept


@pytest.mark.parametrize(
    ("taus_", "steps"),
    [
        ([1.0, 1.5, 2.0, 2.4, 2.3], [0, 1, 3]),
        ([1.0, 2.4, 2.0, 1.9], [0, 1, 3]),
        ([1.0, 1.2], [0, 1]),
        ([1.3, 1.2], [0, 1]),
        ([1.0], [0]),
        ([], []),
    ],
)
def test_the_first_two_checks_and_the_best_are_shown(taus_, steps):
    rows = [check(step, tau) for step, tau in enumerate(taus_)]
    assert [row["step"] for row in shown_checks(rows[::-1])] == steps


def test_acceptance_is_drawn_by_position_at_three_checks(figures):
    axes, by_step = figures["learned"].axes[2], {row["step"]: row for row in LEARNED}
    for step, label in ((0, "α, step 0"), (100, "α, step 100"), (1400, "α, step 1400 (best)")):
        expected = list(zip(range(1, 6), by_step[step]["greedy_alpha"], strict=True))
        np.testing.assert_allclose(drawn(axes, label), expected)
    sampled = list(zip(range(1, 6), by_step[1400]["sampled_alpha"], strict=True))
    np.testing.assert_allclose(drawn(axes, "Σ min(p, q), T = 1 (best)"), sampled)
    colors = {line.get_label(): line.get_color() for line in axes.get_lines()}
    assert colors["Σ min(p, q), T = 1 (best)"] == colors["α, step 1400 (best)"] and len(set(colors.values())) == 3
    assert list(axes.get_xticks()) == [1, 2, 3, 4, 5]
    assert len([text for text in legend(figures["learned"]) if text.startswith("α")]) == 3


def test_positions_that_nothing_reached_are_not_drawn_as_refused():
    assert decided([0.3, 0.1, 0.0, 0.0]) == [0.3, 0.1, 0.0]
    assert decided([0.0, 0.0]) == [0.0] and decided([0.3, 0.2]) == [0.3, 0.2] and decided([]) == []
    rows = [check(0, 1.0, greedy_alpha=[0.02, 0.0, 0.0, 0.0, 0.0]), check(100, 1.5)]
    assert drawn(drafter_training(rows).axes[2], "α, step 0").tolist() == [[1, 0.02], [2, 0.0]]


@pytest.mark.parametrize(("name", "series"), [("learned", 8), ("served", 4)])
def test_series_differ_by_more_than_colour(figures, name, series):
    looks = {
        (line.get_marker(), line.get_markerfacecolor() == "white")
        for axes in figures[name].axes
        for line in axes.get_lines()
        if line.get_marker() not in ("None", "", None) and not line.get_label().startswith("_")
    }
    assert len(looks) >= series


@pytest.mark.parametrize("name", FIGURES)
def test_every_point_lies_in_the_frame_and_can_be_told_from_the_paper(figures, name):
    for axes in figures[name].axes:
        (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
        for line in axes.get_lines():
            if line.get_marker() in ("None", "", None) or line.get_marker() == "_":  # guides; caps of bars
                continue
            points = np.asarray(line.get_xydata(), float)
            assert ((left < points[:, 0]) & (points[:, 0] < right)).all()
            assert ((bottom < points[:, 1]) & (points[:, 1] < top)).all()
            linear = [((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(line.get_color())]
            assert 1.05 / (0.05 + np.dot([0.2126, 0.7152, 0.0722], linear)) > 2  # contrast as WCAG defines it


def test_a_single_check_has_a_frame_around_it(figures, recwarn):
    axes = drafter_training(training((0,))).axes[0]
    low, high = axes.get_xlim()
    assert low == -1 and high == 1 and not recwarn.list


def test_pooled_acceptance_is_drawn_where_it_was_tested_ten_times():
    rare = [row | {"tested_by_position": [40, 10, 9], "accepted_by_position": [10, 9, 8], "split": "report",
                   "repetitive": False} for row in SERVED[:1]]  # fmt: skip
    assert alpha_by_position(rare) == pytest.approx([0.25, 0.9, np.nan], nan_ok=True)
    assert alpha_by_position(rare, minimum=41) == pytest.approx([np.nan] * 3, nan_ok=True)
    assert drawn(drafter_acceptance(rare).axes[0], NAMES[0]).tolist() == [[1, 0.25], [2, 0.9]]
    shorter = [rare[0] | {"tested_by_position": [10], "accepted_by_position": [5]}]
    assert alpha_by_position(rare + shorter) == pytest.approx([0.3, 0.9, np.nan], nan_ok=True)
    assert alpha_by_position([]) == []


def chosen(arm: str, temperature: float, all_answers: bool, domain: str = "all") -> list[dict]:
    """Report prompts of an arm, picked by hand."""
    return [
        row
        for row in SERVED
        if (row["arm"], row["temperature"], row["split"]) == (arm, temperature, "report")
        and (all_answers or not row["repetitive"])
        and domain in ("all", row["domain"])
    ]


def test_acceptance_by_position_is_of_report_prompts_without_repetition(figures):
    axes = figures["served"].axes[0]
    for name, arm in zip(NAMES, ARMS, strict=True):
        own = chosen(*arm, all_answers=False)
        accepted, tested = (
            np.sum([row[f"{field}_by_position"] for row in own], axis=0) for field in ("accepted", "tested")
        )
        np.testing.assert_allclose(drawn(axes, name), np.stack([np.arange(1, 6), accepted / tested], axis=1))


def bars(axes) -> dict[tuple[int, bool], list[tuple[float, float, float, float]]]:
    """(number of the arm, hollow) → place, height and ends of each of its points."""
    found = {}
    for number, container in enumerate(axes.containers):
        line, _, (ends,) = container.lines
        hollow = line.get_markerfacecolor() == "white"
        assert hollow == bool(number % 2)
        found[number // 2, hollow] = [
            (x, y, low, high)
            for (x, y), ((_, low), (_, high)) in zip(line.get_xydata(), ends.get_segments(), strict=True)
        ]
    return found


def test_tau_is_drawn_with_intervals_over_prompts(figures):
    axes = figures["served"].axes[1]
    found = bars(axes)
    assert len(found) == 8
    for number, arm in enumerate(ARMS):
        for hollow in (False, True):
            for place, domain in enumerate(("math", "code", "chat", "all")):
                own = chosen(*arm, all_answers=hollow, domain=domain)
                expected = ratio_interval([row["tokens"] for row in own], [row["target_passes"] for row in own])
                assert expected.n in ((29, 36) if domain != "all" else (87, 108))
                x, *heights = found[number, hollow][place]
                assert heights == pytest.approx([expected.estimate, expected.low, expected.high])
                assert abs(x - place) < 0.45
    for number in range(4):  # what repeats itself accepts more, trees accept more
        assert all(some[1] < each[1] for some, each in zip(found[number, False], found[number, True], strict=True))
    places = sorted(point[0] for points in found.values() for point in points)
    assert len(places) == 32 and np.diff(places).min() > 0.09
    low, high = axes.get_ylim()
    assert low == 0.9 and high > max(point[3] for points in found.values() for point in points)


def test_domains_say_how_many_prompts_they_have(figures):
    labels = [label.get_text() for label in figures["served"].axes[1].get_xticklabels()]
    assert labels == ["math\n29 of 36", "code\n29 of 36", "chat\n29 of 36", "all\n87 of 108"]
    assert legend(figures["served"]) == [*NAMES, "without repetitive answers", "all answers"]


def test_arms_keep_apart_and_greedy_ones_come_first():
    rows = [row for row in acceptance(4, arms=ARMS[::-1]) if row["arm"] == "chain"]
    rows += acceptance(4, arms=ARMS[:1], k=3)
    assert list(by_arm(rows)) == ["chain, K = 5, T = 0", "chain, K = 3, T = 0", "chain, K = 5, T = 1"]
    assert all(row["split"] == "report" for own in by_arm(rows).values() for row in own)
    assert taus([]) == {}


def test_few_prompts_make_no_scale_and_one_has_no_bar(figures):
    few = acceptance(2, k=3, tokens=16)
    # Math: two prompts so unlike each other that their interval says nothing; the other domains have one.
    unlike = {"math-00": {"tokens": 40, "target_passes": 10}, "math-01": {"tokens": 10, "target_passes": 10}}
    rows = [row | unlike.get(row["prompt_id"], {}) for row in few if row["prompt_id"] not in ("code-01", "chat-01")]
    axes = drafter_acceptance(rows).axes[1]
    points = bars(axes)
    heights = [point[1] for own in points.values() for point in own]
    assert axes.get_ylim() == pytest.approx((0.9, 1.03 * 1.5 * max(heights)))
    for own in points.values():
        assert own[0][3] > 10 and all(low == y == high for _, y, low, high in own[1:3])


def test_prompts_for_tuning_are_not_drawn(figures):
    figure = figures["tuning prompts"]
    assert legend(figure) == ["without repetitive answers", "all answers"] and not figure.axes[1].containers


def test_the_caption_of_training_says_how_much_of_it():
    caption, alt = words.training_caption(LEARNED), words.training_alt(LEARNED)
    assert "16 checks in 1500 optimiser steps (5 passes" in caption and "no intervals" in caption
    assert "5 unrolled steps" in caption and "chains of 5" in caption and "step 1400, whose weights" in caption
    best = LEARNED[-2]
    assert f"τ from 1.10 at step 0 to {best['greedy_tau']:.2f} at the best check, step 1400, " in alt
    assert f"{best['drafted_tau']:.2f} by real drafting" in alt
    for number in (1, 5):
        first, last = (row["held_out_losses"][number - 1] for row in (LEARNED[0], LEARNED[-1]))
        assert f"unrolled step {number} from {first:.2f} at step 0 to {last:.2f} at step 1500" in alt
    for field in ("greedy_alpha", "sampled_alpha"):
        assert ", ".join(f"{share:.2f}" for share in best[field]) in alt
    unmeasured = [row | {"drafted_tau": None, "held_out_losses": [], "sampled_alpha": []} for row in LEARNED]
    told = words.training_alt(unmeasured)
    assert not any(word in told for word in ("cross-entropy", "real drafting", "Σ min", "None"))


def test_the_caption_of_acceptance_counts_prompts_and_names_intervals():
    caption, alt = words.acceptance_caption(SERVED), words.acceptance_alt(SERVED)
    assert "108 report prompts, 87 of them with greedy answers that do not repeat themselves" in caption
    assert "95% intervals by bootstrap of the log ratio over prompts" in caption and "at least 10 times" in caption
    assert f"({'; '.join(NAMES)})" in caption
    for name, arm in zip(NAMES, ARMS, strict=True):
        clean, every = (taus(chosen(*arm, all_answers=each)) for each in (False, True))
        told = alt.split(f"{name}: ")[1].split("; ")[0]
        one = clean["all"]
        assert told.startswith(f"τ {one.estimate:.2f} [{one.low:.2f}, {one.high:.2f}] without repetitive answers")
        assert f"(math {clean['math'].estimate:.2f}, code" in told
        assert f"τ {every['all'].estimate:.2f} [" in told and "] of all answers" in told
        alpha = alpha_by_position(chosen(*arm, all_answers=False))
        assert f"α by position {', '.join(f'{share:.2f}' for share in alpha)}" in told


@pytest.mark.parametrize("name", FIGURES)
def test_words_are_sentences_without_holes(name):
    drawing, rows = FIGURES[name]
    training = drawing is drafter_training
    for say in (
        (words.training_caption, words.training_alt) if training else (words.acceptance_caption, words.acceptance_alt)
    ):
        told = say(rows)
        assert told.endswith(".") and len(told) > 40
        assert not any(hole in told for hole in ("nan", "inf", "None", "()", ": ;", ".."))


def test_only_repetitive_prompts_are_told_of_all_answers_alone():
    rows = [row for row in SERVED if row["repetitive"]]
    assert "without repetitive answers" not in words.acceptance_alt(rows)
    assert drawn(drafter_acceptance(rows).axes[0], NAMES[0]).size == 0


@pytest.mark.parametrize(
    ("name", "rows", "after"),
    [("02_drafter_training", LEARNED, "16 checks"), ("02_drafter_acceptance", SERVED, "108 report prompts")],
)
def test_the_gallery_draws_them(layout, name, rows, after):
    figure, alt = draw(name, rows, device="here-2c", layout=layout)
    entry = read_captions(layout)[name]
    assert figure.axes and entry["alt"] == alt and after in entry["caption"]
    assert (layout.figures / f"{name}.png").is_file()
    assert GALLERY[name].schemas == ((TRAINING,) if name == "02_drafter_training" else (ACCEPTANCE,))
