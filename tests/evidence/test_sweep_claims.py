"""Each verdict of the sweep on invented data whose truth is known: supported, refuted and undecided."""

from __future__ import annotations

import math
import re
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.evidence.claims import claim
from specdec_core.evidence.sweep_claims import (
    BOTH,
    EITHER,
    LOW_ACCEPTANCE,
    SERIAL,
    SLOW_DRAFT,
    acceptance_falls,
    attribute,
    attribute_best,
    best_acceptances,
    best_speedup,
    deceleration_explained,
    prediction_holds,
)
from specdec_core.evidence.sweep_records import Cell, pair_up
from specdec_core.evidence.verdicts import Outcome
from tests.evidence.conftest import Pair, sweep

FAST = (0.85,) * 8


def test_b1_supported_refuted_and_undecided(make_pair, make_sweep):
    fast = best_speedup(claim("B1"), make_sweep([make_pair("slow", c=0.5), make_pair("fast", alpha=FAST)]))
    assert fast.outcome is Outcome.SUPPORTED and fast.value > 1.61 and fast.note.startswith("fast K=")
    slow = best_speedup(claim("B1"), make_sweep([make_pair("slow", c=0.5)]))
    assert slow.outcome is Outcome.REFUTED and slow.interval.high < 1.61
    few = best_speedup(claim("B1"), make_sweep([make_pair("fast", alpha=FAST)], prompts=12))
    assert few.outcome is Outcome.INCONCLUSIVE and few.interval.n == 5


def test_b1_is_judged_without_repetition_and_without_the_tuning_prompts(make_pair, make_sweep):
    rows = make_sweep([make_pair("a")])
    # Repetition and tuning prompts are as fast as one likes; the verdict may not see it.
    flattered = [
        row | {"seconds": row["seconds"] / 10}
        if row["arm"] == "sd" and (row["repetitive"] or row["split"] == "tuning")
        else row
        for row in rows
    ]
    honest, seen = best_speedup(claim("B1"), rows), best_speedup(claim("B1"), flattered)
    assert seen.interval == honest.interval
    assert seen.note != honest.note  # the unfiltered figure, stated apart


def test_b1_chooses_on_tuning_prompts(make_pair, make_sweep):
    rows = make_sweep([make_pair("a"), make_pair("b", alpha=FAST)])
    # b is the faster, but on the tuning prompts it looks slow: a must be chosen.
    misleading = [
        row | {"seconds": row["seconds"] * 5}
        if row["configuration"] == "b" and row["arm"] == "sd" and row["split"] == "tuning"
        else row
        for row in rows
    ]
    assert best_speedup(claim("B1"), misleading).note.startswith("a K=")


def test_b1_without_usable_prompts(make_pair, make_sweep):
    rows = [row | {"repetitive": True} for row in make_sweep([make_pair("a")])]
    found = best_speedup(claim("B1"), rows)
    assert found.outcome is Outcome.INCONCLUSIVE and "free of repetition" in found.note


def test_b2_falls_rises_and_cannot_tell(make_pair, make_sweep):
    falling = acceptance_falls(claim("B2"), make_sweep([make_pair("a"), make_pair("b", alpha=FAST)]))
    assert falling.outcome is Outcome.SUPPORTED and falling.interval.low > 1
    rows = make_sweep([make_pair("a"), make_pair("b", alpha=FAST)])
    risen = [_accept(row, 0) if row["configuration"] == "b" and row["K"] == 1 else row for row in rows]
    assert acceptance_falls(claim("B2"), risen).outcome is Outcome.INCONCLUSIVE  # a ratio with zero has no logarithm
    risen = [_accept(row, row["drafted"] // 9) if (row["configuration"], row["K"]) == ("b", 1) else row for row in rows]
    found = acceptance_falls(claim("B2"), risen)
    assert found.outcome is Outcome.REFUTED and "b K=2 above K=1" in found.note
    assert acceptance_falls(claim("B2"), make_sweep([make_pair("a")], lengths=(4,))).outcome is Outcome.INCONCLUSIVE
    assert acceptance_falls(claim("B2"), make_sweep([make_pair("a")], prompts=8)).outcome is Outcome.INCONCLUSIVE


def test_b2_a_dip_between_neighbours_refutes_even_if_the_ends_fall(make_pair, make_sweep):
    rows = make_sweep([make_pair("a", alpha=FAST)])
    dipped = [_accept(row, row["drafted"] // 9) if row["K"] == 2 else row for row in rows]
    found = acceptance_falls(claim("B2"), dipped)
    assert found.outcome is Outcome.REFUTED and "a K=4 above K=2" in found.note


def test_b3_holds_and_fails_by_size_and_by_sign(make_pair, make_sweep):
    good = prediction_holds(claim("B3"), make_sweep([make_pair("a"), make_pair("b", c=0.5)]))
    assert good.outcome is Outcome.SUPPORTED and good.value == pytest.approx(1, abs=0.05)
    off = prediction_holds(claim("B3"), make_sweep([make_pair("a"), make_pair("b", bias=1.4)]))
    assert off.outcome is Outcome.REFUTED and "outside the band: b" in off.note and off.value < 0.8
    # In size within the band, in sign wrong: predicted just above 1, measured just below.
    near_one = make_pair("a", alpha=(0.3,), c=0.25, s=0.02, o=0.02, bias=1.15)
    wrong = prediction_holds(claim("B3"), make_sweep([near_one], lengths=(1,), prompts=200))
    assert wrong.outcome is Outcome.REFUTED and "wrong sign: a K=1" in wrong.note
    assert wrong.interval.inside(0.8, 1.25)
    few = prediction_holds(claim("B3"), make_sweep([make_pair("b", bias=1.4)], prompts=8))
    assert few.outcome is Outcome.INCONCLUSIVE
    loud = prediction_holds(claim("B3"), make_sweep([make_pair("a", bias=1.2)], noise=0.3))
    assert loud.outcome is Outcome.INCONCLUSIVE


def test_b3_every_cell_counts(make_pair, make_sweep):
    rows = make_sweep([make_pair(name) for name in "abcdefgh"], lengths=(1, 2, 4))
    broken = [
        row | {"seconds": row["seconds"] / 2} if (row["configuration"], row["K"]) == ("e", 2) else row for row in rows
    ]
    assert prediction_holds(claim("B3"), rows).outcome is Outcome.SUPPORTED
    found = prediction_holds(claim("B3"), broken)
    assert found.outcome is Outcome.REFUTED and "e K=2" in found.note


@pytest.mark.parametrize(
    ("terms", "cause"),
    [
        ({"s": 0.8, "c": 0.01}, SERIAL),
        ({"s": 0.02, "c": 0.8}, SLOW_DRAFT),
        ({"s": 0.45, "c": 0.45}, EITHER),
        ({"s": 0.9, "c": 0.9}, BOTH),
        ({"alpha": (0.02,), "s": 0.3, "c": 0.3, "o": 0.1}, LOW_ACCEPTANCE),
    ],
)
def test_causes_are_recovered(make_pair, make_sweep, terms, cause):
    rows = make_sweep([make_pair("a", **({"alpha": (0.6,)} | terms))], lengths=(1,))
    (found,) = attribute_best(rows)
    assert found.speedup.high < 1 and found.cause == cause
    pair = make_pair("a", **terms)
    assert (found.c, found.s, found.o) == pytest.approx((pair.c, pair.s, pair.o), abs=0.03)
    assert found.verification_share + found.draft_share == pytest.approx(1)
    assert found.free <= found.ideal and found.parallel <= found.ideal


def test_shares_follow_the_cost(make_pair, make_sweep):
    (serial,) = attribute_best(make_sweep([make_pair("a", s=0.9, c=0.1)], lengths=(4,)))
    (drafting,) = attribute_best(make_sweep([make_pair("a", s=0.1, c=0.9)], lengths=(4,)))
    assert serial.verification_share > 0.8 and drafting.draft_share > 0.8
    assert serial.verification_share == pytest.approx(drafting.draft_share, abs=0.05)


terms = st.fixed_dictionaries(
    {name: st.floats(0, 0.9) for name in "cso"} | {"alpha": st.lists(st.floats(0, 1), min_size=3, max_size=3)}
)


@settings(max_examples=30)
@given(terms, st.floats(0, 1), st.integers(1, 3))
def test_shares_are_those_of_all_orders_of_three_changes(terms, best, K):
    """Shapley's definition: the mean over all orders of what a change gains in log speedup where it is made."""
    (pairs,) = pair_up(sweep([Pair("a", **terms)], lengths=(K,), prompts=6)).values()
    sd, ar = ({name: each.sum() for name, each in arm.items()} for arm in (pairs.sd, pairs.ar))
    step = ar["verify_seconds"] / ar["target_passes"]

    def speedup(changes):
        verify, draft, tokens = sd["verify_seconds"], sd["draft_seconds"], sd["tokens"]
        rest = sd["seconds"] - verify - draft
        if "v" in changes:
            verify = min(verify, sd["target_passes"] * step)
        if "c" in changes:
            draft = 0.0
        if "a" in changes:
            tokens += max(0.0, best * sd["drafted"] - sd["accepted"])
        return tokens / (verify + draft + rest) * ar["seconds"] / ar["tokens"]

    gains = dict.fromkeys("vca", 0.0)
    for order in permutations("vca"):
        for place, change in enumerate(order):
            gains[change] += math.log(speedup(order[: place + 1]) / speedup(order[:place])) / 6
    found, whole = attribute(pairs, best_acceptance=best), math.log(speedup("vca") / speedup(""))
    shares = (found.verification_share, found.draft_share, found.acceptance_share)
    assert shares == pytest.approx([gain / whole for gain in gains.values()] if whole > 1e-9 else [0.0] * 3, abs=1e-6)
    ways = (found.parallel, found.free, found.ideal, found.accepting)
    assert ways == pytest.approx([speedup(changes) for changes in ("v", "c", "vc", "a")])


@settings(max_examples=30)
@given(terms, st.integers(1, 3))
def test_it_pays_exactly_where_more_is_accepted_than_needed(terms, K):
    rows = sweep([Pair("a", **terms)], lengths=(K,), prompts=6, noise=0.0)
    (found,) = (attribute(each) for each in pair_up(rows).values())
    assert found.needed == pytest.approx(terms["c"] + terms["s"] + terms["o"] / K)
    assert found.acceptance - found.needed == pytest.approx((found.speedup.estimate - 1) * found.seconds / K)
    assert (found.c, found.s, found.o, found.drafted) == pytest.approx((terms["c"], terms["s"], terms["o"], K))
    assert found.tau == pytest.approx(found.seconds * found.speedup.estimate)


def test_the_best_drafter_is_that_of_the_same_length_and_temperature_and_not_the_target(make_pair, make_sweep):
    pairs = [make_pair("good", alpha=FAST), make_pair("poor", alpha=(0.2,) * 8), make_pair("itself", alpha=(1.0,) * 8)]
    cold = make_sweep(pairs, lengths=(1, 4))
    warm = [row | {"temperature": 1.0} for row in cold if row["configuration"] == "poor"]
    cells = pair_up([*cold, *warm], split="report")
    assert best_acceptances(cells.values()) == {
        (temperature, K): cells[Cell(name, temperature, K)].acceptance()
        for K in (1, 4)
        for temperature, name in ((0.0, "good"), (1.0, "poor"))
    }
    found = {(one.cell.configuration, one.cell.temperature): one for one in attribute_best([*cold, *warm])}
    poor, good = found["poor", 0.0], found["good", 0.0]
    assert poor.accepting > 1.3 * poor.speedup.estimate and poor.acceptance_share > 0.5
    assert (good.acceptance_share, found["poor", 1.0].acceptance_share) == (0.0, 0.0)
    assert good.accepting == pytest.approx(good.speedup.estimate)


@pytest.mark.parametrize(
    ("terms", "right"),
    [({}, True), ({"s": 0.9}, True), ({"bias": 3.0}, False), ({"s": 0.9, "bias": 0.3}, False), ({"bias": 2.15}, None)],
)
def test_a_prediction_is_on_the_right_side_of_one_or_not(make_pair, make_sweep, terms, right):
    (found,) = attribute_best(make_sweep([make_pair("a", **terms)], lengths=(4,)))
    assert found.sign_is_right is right


def test_nothing_lost_has_no_shares(make_pair, make_sweep):
    rows = make_sweep([make_pair("a", s=0.0, c=0.0)], lengths=(4,), noise=0.0)
    (found,) = attribute_best(rows)
    assert (found.verification_share, found.draft_share, found.acceptance_share) == (0.0, 0.0, 0.0)


def test_b4_needs_its_breadth_and_a_decelerating_configuration(make_pair, make_sweep, five_pairs):
    narrow = deceleration_explained(claim("B4"), five_pairs)
    assert narrow.outcome is Outcome.INCONCLUSIVE and narrow.note.startswith("5 configurations, 2 backends")
    slow = [make_pair(f"slow {n}", backend=f"backend {n % 3}", s=0.8) for n in range(8)]
    wide = deceleration_explained(claim("B4"), make_sweep(slow, lengths=(4,)))
    assert wide.outcome is Outcome.SUPPORTED and wide.value == 8 and SERIAL in wide.note
    assert re.search(r"\(verification \d+%, draft \d+%, acceptance \d+%\)", wide.note)
    warm = [row | {"temperature": 1.0} for row in make_sweep(slow[:1], lengths=(4,))]
    both = deceleration_explained(claim("B4"), [*make_sweep(slow, lengths=(4,)), *warm])
    assert both.value == 9 and both.note.startswith("8 configurations, 3 backends") and "K=4, T=1" in both.note
    fast = [make_pair(f"fast {n}", backend=f"backend {n % 3}") for n in range(8)]
    refuted = deceleration_explained(claim("B4"), make_sweep(fast, lengths=(4,)))
    assert refuted.outcome is Outcome.REFUTED and refuted.value == 0
    few = deceleration_explained(claim("B4"), make_sweep(slow, lengths=(4,), prompts=8))
    assert few.outcome is Outcome.INCONCLUSIVE


def _accept(row, accepted):
    """The row with that many tokens accepted, all at the first position."""
    positions = [accepted] + [0] * (row["K"] - 1)
    return row | {"accepted": accepted, "accepted_by_position": positions}


def test_b2_a_drafter_that_is_never_wrong_is_left_out(make_pair, make_sweep):
    perfect = make_sweep([make_pair("itself", alpha=(1.0,) * 8), make_pair("a")])
    assert acceptance_falls(claim("B2"), perfect).outcome is Outcome.SUPPORTED
    alone = make_sweep([make_pair("itself", alpha=(1.0,) * 8)])
    assert acceptance_falls(claim("B2"), alone).outcome is Outcome.INCONCLUSIVE
