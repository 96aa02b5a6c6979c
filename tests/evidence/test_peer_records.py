"""Records of peers contradict themselves loudly, and ratios pair by prompt."""

from __future__ import annotations

import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.evidence.peer_records import PEER, PEER_TUNING, Among, over, over_fastest, peers, speed, speedup, work
from specdec_core.evidence.schemas import RecordError

ROW: dict[str, Any] = {
    "peer": "llama.cpp Q8_0 · prompt lookup", "backend": "llama.cpp Q8_0", "engine": "llama.cpp", "format": "Q8_0",
    "file": "Q8_0.gguf", "threads": 2, "method": "prompt lookup", "draft": 4, "ngram": 2, "schedule": None,
    "temperature": 0.0, "prompt_id": "math-01", "domain": "math", "split": "report", "repetitive": False, "arm": "sd",
    "identical": False, "difference": 5, "near_tie": True, "gap": 0.01, "epsilon": 0.02, "tokens": 16, "counted": 15,
    "seconds": 0.5, "passes": 9,
}  # fmt: skip
SAME = {"identical": True, "difference": -1, "near_tie": None, "gap": None, "epsilon": None}
AR = {"peer": "llama.cpp Q8_0 · AR", "method": "AR", "arm": "ar", "draft": 0, "ngram": None, "passes": 15, **SAME}
SAMPLED = {**SAME, "temperature": 1.0, "identical": None}
TUNING: dict[str, Any] = {
    "peer": "p", "draft": 4, "ngram": None, "schedule": "constant", "temperature": 0.0, "prompts": 3, "counted": 45,
    "seconds": 1.0, "chosen": True,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {},
        SAME,
        AR,
        SAMPLED,
        {"passes": None},
        {"near_tie": None, "gap": None, "epsilon": None},  # nobody could judge it
        {"tokens": 1, "counted": 0, "seconds": 0.0, "passes": 0, **SAME},
        {"tokens": 3, "counted": 0, "seconds": 0.0, "passes": 0, **SAME},  # a first pass that emitted it all
        {"counted": 15, "passes": 15},
        {"difference": 0},
    ],
)
def test_a_good_row_is_taken_as_it_is(change):
    assert PEER.validated(ROW | change) == ROW | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"arm": "AR"}, "expected 'sd' or 'ar'"),
        ({"split": "test"}, "'tuning' or 'report'"),
        ({"draft": 0}, "expected ≥ 1 in 'sd' rows"),
        ({**AR, "draft": 4}, "and 0 in 'ar' rows"),
        ({"counted": 16}, "all counted but the first pass's"),
        ({"counted": -1}, "all counted but the first pass's"),
        ({"tokens": 0, "counted": 0, "seconds": 0.0, "passes": 0}, "expected at least one token"),
        ({"seconds": -0.1}, "expected a time > 0 if any"),
        ({"seconds": 0.0}, "expected a time > 0 if any"),
        ({"counted": 0, "passes": 0}, "else 0"),
        ({"passes": 16}, "at least a token a pass"),
        ({"passes": 0}, "at least a token a pass"),
        ({**SAMPLED, "identical": True}, "only greedy output"),
        ({"identical": None}, "only greedy output"),
        ({"difference": -1}, "expected a place ≥ 0"),
        ({"identical": True}, "expected a place ≥ 0"),
        ({**SAME, "near_tie": False}, "no difference to be judged"),
        ({**SAME, "gap": 0.0}, "no difference to be judged"),
        ({**SAMPLED, "epsilon": 0.0}, "no difference to be judged"),
        ({"seconds": math.inf}, "not finite"),
    ],
)
def test_contradictions_are_refused(change, message):
    with pytest.raises(RecordError, match=message):
        PEER.validated(ROW | change)


def test_settings_that_were_tried():
    assert PEER_TUNING.validated(TUNING) == TUNING
    for change in ({"draft": 0}, {"prompts": 0}, {"counted": 0}, {"seconds": 0.0}):
        with pytest.raises(RecordError, match="expected ≥ 1, ≥ 1, ≥ 1, > 0"):
            PEER_TUNING.validated(TUNING | change)


def rows_of(backend: str, speeds: dict[str, float], method: str = "AR", **changes: Any) -> list[dict[str, Any]]:
    """Rows of 15 counted tokens a prompt at these tokens a second."""
    engine = backend.split()[0]
    base = ROW | SAME | {"backend": backend, "engine": engine, "method": method, "peer": f"{backend} · {method}"}
    base |= {"arm": "ar", "draft": 0, "ngram": None} if method == "AR" else {}
    return [base | {"prompt_id": prompt, "seconds": 15 / speed, **changes} for prompt, speed in speeds.items()]


def test_work_is_summed_by_prompt_and_leaves_out_what_was_not_timed():
    rows = rows_of("a", {"x": 30, "y": 10}) + rows_of("a", {"x": 15}) + rows_of("a", {"z": 5}, counted=0)
    assert work(rows) == {"x": (30, 1.5), "y": (15, 1.5)}
    assert work(rows, tokens="tokens")["x"] == (32, 1.5)  # of a sweep, which counts all


def test_speed_is_tokens_over_seconds_and_no_mean_of_speeds():
    found = speed(work(rows_of("a", {"x": 30, "y": 10})))
    assert found.estimate == pytest.approx(30 / (0.5 + 1.5)) and found.n == 2 and found.low < 15 < found.high
    with pytest.raises(RecordError, match="no prompt of which a token was timed"):
        speed({})


def test_over_is_a_ratio_of_pooled_speeds_over_shared_prompts():
    one, other = work(rows_of("a", {"x": 30, "y": 10, "w": 1})), work(rows_of("b", {"x": 10, "y": 10, "v": 99}))
    assert over(one, other).estimate == pytest.approx((30 / 2.0) / (30 / 3.0)) and over(one, other).n == 2
    assert over(other, one).estimate == pytest.approx(1 / 1.5)
    with pytest.raises(RecordError, match="none in common"):
        over(one, work(rows_of("b", {"q": 10})))


@given(st.lists(st.floats(1, 100), min_size=3, max_size=8), st.floats(0.2, 5))
def test_a_decoder_that_is_faster_on_every_prompt_alike_leads_by_that(speeds, factor):
    slow = rows_of("a", {str(n): each for n, each in enumerate(speeds)})
    fast = rows_of("b", {str(n): each * factor for n, each in enumerate(speeds)})
    found = over(work(fast), work(slow))
    assert found.estimate == pytest.approx(factor)
    assert found.low == pytest.approx(factor, rel=1e-6) and found.high == pytest.approx(factor, rel=1e-6)


LOOKUP = "prompt lookup"


def run() -> list[dict[str, Any]]:
    """Two backends, the second faster without speculation and slower with it."""
    rows = rows_of("a", {"x": 10, "y": 10}) * 2 + rows_of("a", {"x": 20, "y": 20}, LOOKUP)
    rows += rows_of("b", {"x": 30, "y": 30}) * 2 + rows_of("b", {"x": 15, "y": 15}, LOOKUP)
    return rows


def test_speculation_is_compared_with_its_own_backends_autoregression():
    assert speedup(run(), "a · prompt lookup").estimate == pytest.approx(2)
    assert speedup(run(), "b · prompt lookup").estimate == pytest.approx(0.5)


def test_speedup_looks_at_the_rows_that_it_is_asked_for():
    rows = run() + rows_of("a", {"t": 10}, split="tuning") + rows_of("a", {"t": 50}, LOOKUP, split="tuning")
    rows += rows_of("a", {"r": 10}, repetitive=True) + rows_of("a", {"r": 60}, LOOKUP, repetitive=True)
    warm = {**SAMPLED, "temperature": 1.0}
    rows += rows_of("a", {"x": 10}, **warm) + rows_of("a", {"x": 70}, LOOKUP, **warm)
    name = "a · prompt lookup"
    assert speedup(rows, name).n == 3
    assert speedup(rows, name, Among(repetitive=False)).estimate == pytest.approx(2)
    assert speedup(rows, name, Among(repetitive=True)).estimate == pytest.approx(6)
    assert speedup(rows, name, Among(split="tuning")).estimate == pytest.approx(5)
    assert speedup(rows, name, Among(split=None, repetitive=False)).n == 3
    assert speedup(rows, name, Among(temperature=1.0)).estimate == pytest.approx(7)


def test_what_cannot_be_compared():
    with pytest.raises(RecordError, match=r"no speculative rows of 'c' .*a · AR, a · prompt lookup, b · AR"):
        speedup(run(), "c")
    with pytest.raises(RecordError, match=r"prompts \['x', 'y'\] have no autoregressive row of 'a'"):
        speedup(rows_of("a", {"x": 20, "y": 20}, LOOKUP) + rows_of("b", {"x": 1, "y": 1}), "a · prompt lookup")


def test_names():
    assert peers(run()) == ["a · AR", "a · prompt lookup", "b · AR", "b · prompt lookup"]
    assert peers(run(), "ar") == ["a · AR", "b · AR"]


OURS = {"x": (15.0, 0.25), "y": (15.0, 0.25)}
"""60 tokens a second."""


class TestLead:
    def test_over_the_fastest_autoregression(self):
        found = over_fastest(OURS, run())
        assert found.peer == "b · AR" and found.ratio.estimate == pytest.approx(2)

    def test_over_the_fastest_speculation_and_over_either(self):
        rows = run() + rows_of("a", {"x": 120, "y": 120}, "assisted")
        assert over_fastest(OURS, run(), arm="sd").peer == "a · prompt lookup"
        assert over_fastest(OURS, rows, arm=None).peer == "a · assisted"
        assert over_fastest(OURS, rows, arm=None).ratio.estimate == pytest.approx(0.5)
        assert over_fastest(OURS, rows).peer == "b · AR"

    def test_our_own_rows_are_no_peers(self):
        rows = run() + rows_of("numba int8", {"x": 60, "y": 60}) + rows_of("torch float32", {"x": 90, "y": 90})
        assert over_fastest(OURS, rows).peer == "b · AR"

    def test_every_peer_on_the_prompts_that_it_shares_with_ours(self):
        rows = run() + rows_of("c", {"x": 25, "far": 1e6})
        assert over_fastest(OURS, rows).peer == "b · AR"
        assert over_fastest({"x": (15.0, 0.25)}, rows_of("c", {"x": 40}) + run()).peer == "c · AR"

    def test_other_rows_are_passed_over(self):
        rows = run() + rows_of("c", {"x": 99, "y": 99}, split="tuning")
        rows += rows_of("c", {"x": 99, "y": 99}, repetitive=True)
        assert over_fastest(OURS, rows, Among(repetitive=False)).peer == "b · AR"
        assert over_fastest(OURS, rows, Among(split="tuning")).peer == "c · AR"

    def test_nothing_to_compare(self):
        with pytest.raises(RecordError, match="no peer decoded any of our 1 prompts"):
            over_fastest({"q": (1.0, 1.0)}, run())
