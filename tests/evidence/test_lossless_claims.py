"""Verdicts on losslessness, from rows made by hand."""

from __future__ import annotations

import pytest

from specdec_core.evidence.claims import claim
from specdec_core.evidence.evaluate import judge
from specdec_core.evidence.verdicts import Outcome
from specdec_core.statistics import battery

FAMILY = (*battery.ONE_SAMPLE, *battery.TWO_SAMPLE)


def exact(error, level="table", **changes):
    return {
        "level": level, "axis": "K", "case": "c", "branches": 10, "outcomes": 3, "error": error,
        "total_variation": error,
    } | changes  # fmt: skip


@pytest.mark.parametrize(("id", "level", "tolerance"), [("L1", "table", 1e-12), ("L2", "transformer, torch", 1e-10)])
def test_exact_laws(id, level, tolerance):
    other = exact(1.0, "table" if level != "table" else "transformer, torch")  # belongs to the other claim
    fine, wrong = exact(tolerance / 2, level), exact(2 * tolerance, level, case="wrong")
    assert judge(id, [fine, other]).verdict is Outcome.SUPPORTED
    found = judge(id, [fine, wrong, fine])
    assert found.verdict is Outcome.REFUTED and found.value == 2 * tolerance and "wrong" in found.note
    assert judge(id, [other]).verdict is Outcome.INCONCLUSIVE
    assert judge(id, [exact(float("nan"), level)]).verdict is Outcome.REFUTED


def law(test, p, comparison="SD", adjusted=None, setting="t1", tokens=9_200, **changes):
    return {
        "setting": setting, "comparison": comparison, "test": test, "tokens": tokens, "statistic": 1.0, "dof": None,
        "p": p, "adjusted": adjusted, "note": "", "live": True,
    } | changes  # fmt: skip


def family(p=0.5, shown=0.001, **changes):
    rows = [law(name, p, adjusted=p, **changes) for name in FAMILY]
    rows += [law(battery.EQUIVALENCE, shown, **changes), law(battery.NOMINAL, 0.9, "SD against AR", dof=200, **changes)]
    return rows


def test_no_rejection_and_equivalence_support():
    found = judge("L3", family() + family(setting="t07"))
    assert found.verdict is Outcome.SUPPORTED and found.value == 0.5
    assert "χ²=1.0/200" in found.note and "shown in 2 of 2" in found.note


def test_no_rejection_alone_is_no_proof():
    assert judge("L3", family(shown=0.2)).verdict is Outcome.INCONCLUSIVE


def test_a_rejection_refutes_unless_the_null_rejects_too():
    assert judge("L3", family(p=0.001)).verdict is Outcome.REFUTED
    again = [law(name, 0.001, "AR against AR") for name in battery.TWO_SAMPLE]
    assert judge("L3", [*family(), law(battery.PERMUTED, 0.001, adjusted=0.001), *again]).verdict is (
        Outcome.INCONCLUSIVE
    )
    held = [law(name, 0.5, "AR against AR") for name in battery.TWO_SAMPLE]
    assert judge("L3", [*family(), law(battery.PERMUTED, 0.001, adjusted=0.001), *held]).verdict is Outcome.REFUTED


def test_the_level_is_shared_by_the_settings():
    both = family(p=0.03) + family(p=0.5, setting="t07")
    assert judge("L3", family(p=0.03)).verdict is Outcome.REFUTED
    assert judge("L3", both).verdict is Outcome.SUPPORTED


def test_few_tokens_or_none_say_nothing():
    assert judge("L3", family(tokens=9_199)).verdict is Outcome.INCONCLUSIVE
    assert judge("L3", []).verdict is Outcome.INCONCLUSIVE


def greedy(backend="numba float32", identical=True, certified=True, divergences=0):
    return {
        "backend": backend, "drafter": "d", "K": 4, "slots": 1, "prompt_id": "p", "tokens": 10, "identical": identical,
        "certified": certified, "divergences": divergences, "index": -1, "gap": 0.0, "epsilon": 0.0,
    }  # fmt: skip


def test_greedy_ids():
    tie = greedy("torch float32", identical=False, divergences=2)
    found = judge("L4", [greedy(), tie])
    assert found.verdict is Outcome.SUPPORTED and "2 certified near-ties" in found.note
    assert judge("L4", [greedy(), greedy(identical=False, divergences=1)]).verdict is Outcome.REFUTED
    bug = greedy("torch float32", identical=False, certified=False, divergences=1)
    assert judge("L4", [greedy(), bug]).verdict is Outcome.REFUTED
    assert judge("L4", [tie]).verdict is Outcome.INCONCLUSIVE  # nothing of the compiled engine
    assert judge("L4", []).verdict is Outcome.INCONCLUSIVE


def kill(mutant, effect, test, seen=True, tokens=-1):
    return {
        "mutant": mutant, "effect": effect, "test": test, "seen": seen, "crashed": False, "statistic": 0.0,
        "tokens": tokens, "budget": 0,
    }  # fmt: skip


ZOO = [kill(f"m{number}", "law", "exact law") for number in range(20)]
QUIET = [kill("clean code", "nothing", test, seen=False) for test in ("exact law", "acceptance canary")]


def test_mutants():
    others = [
        kill("draft", "acceptance", "acceptance canary"), kill("rows", "isolation", "row isolation"),
        kill("control", "nothing", "acceptance canary"), kill("m0", "law", "e-process", tokens=12),
    ]  # fmt: skip
    found = judge("L5", ZOO + QUIET + others)
    assert found.verdict is Outcome.SUPPORTED and found.value == 0 and "22 mutants" in found.note
    assert judge("L5", ZOO[:19] + QUIET).verdict is Outcome.INCONCLUSIVE


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (kill("alive", "law", "exact law", seen=False), "survived: alive"),
        (kill("alive", "law", "acceptance canary"), "survived: alive"),  # the canary sees no law
        (kill("draft", "acceptance", "exact law"), "survived: draft"),
        (kill("rows", "isolation", "acceptance canary"), "survived: rows"),
        (kill("control", "nothing", "e-process"), "false alarms: control by e-process"),
        (kill("clean code", "nothing", "acceptance canary"), "false alarms: clean code"),
    ],
)
def test_survivors_and_false_alarms_refute(row, said):
    found = judge("L5", [*ZOO, *QUIET, row])
    assert found.verdict is Outcome.REFUTED and said in found.note


def size(rejections, test="e-process", replicates=500, family=True):
    return {
        "test": test, "family": family, "rejections": rejections, "replicates": replicates, "tokens": 200,
        "alpha": 0.05, "live": True,
    }  # fmt: skip


def test_sizes():
    nominal = size(250, battery.NOMINAL, family=False)
    found = judge("L6", [size(25), size(3, "other"), nominal])
    assert found.verdict is Outcome.SUPPORTED and found.value == 0.05 and "rejects 50.0%" in found.note
    assert judge("L6", [size(25), size(60, "other")]).verdict is Outcome.REFUTED
    assert judge("L6", [size(25, replicates=499)]).verdict is Outcome.INCONCLUSIVE
    assert judge("L6", [nominal]).verdict is Outcome.INCONCLUSIVE


def test_what_is_replayed_is_said():
    assert "all drawn in this run" in judge("L3", family()).note
    assert "replayed from committed tokens: t07" in judge("L3", family() + family(setting="t07", live=False)).note
    assert "replayed from committed tokens" in judge("L6", [size(25) | {"live": False}]).note


def test_sizes_are_judged_together():
    """39 of 500 exceeds .05 by itself; among seven tests it may happen."""
    assert judge("L6", [size(37)]).verdict is Outcome.REFUTED
    assert judge("L6", [size(37), *(size(25, f"t{number}") for number in range(7))]).verdict is Outcome.SUPPORTED


def test_thresholds_are_the_registered_ones():
    assert claim("L3").minimum_n == 9_200 and claim("L6").minimum_n == 500
