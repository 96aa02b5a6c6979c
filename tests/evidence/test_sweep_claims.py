"""Each verdict of the sweep on invented data whose truth is known: supported, refuted and undecided."""

from __future__ import annotations

import pytest

from specdec_core.evidence.claims import claim
from specdec_core.evidence.sweep_claims import (
    BOTH,
    EITHER,
    LOW_ACCEPTANCE,
    SERIAL,
    SLOW_DRAFT,
    acceptance_falls,
    attribute_best,
    best_speedup,
    deceleration_explained,
    prediction_holds,
)
from specdec_core.evidence.verdicts import Outcome

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


def test_nothing_lost_has_no_shares(make_pair, make_sweep):
    rows = make_sweep([make_pair("a", s=0.0, c=0.0)], lengths=(4,), noise=0.0)
    (found,) = attribute_best(rows)
    assert (found.verification_share, found.draft_share) == (0.0, 0.0)


def test_b4_needs_its_breadth_and_a_decelerating_configuration(make_pair, make_sweep, five_pairs):
    narrow = deceleration_explained(claim("B4"), five_pairs)
    assert narrow.outcome is Outcome.INCONCLUSIVE and narrow.note.startswith("5 configurations, 2 backends")
    slow = [make_pair(f"slow {n}", backend=f"backend {n % 3}", s=0.8) for n in range(8)]
    wide = deceleration_explained(claim("B4"), make_sweep(slow, lengths=(4,)))
    assert wide.outcome is Outcome.SUPPORTED and wide.value == 8 and SERIAL in wide.note
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
