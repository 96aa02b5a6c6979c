"""Tests, curves and sizes from token records made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_core.bench import token_records
from specdec_core.evidence import lossless_analysis as analysis
from specdec_core.evidence.lossless_analysis import AR, AR_AGAIN, LOOKUP, SD, law_curves, law_tests, sizes
from specdec_core.evidence.lossless_records import LAW_CURVE, LAW_TEST, SIZE
from specdec_core.evidence.schemas import RecordError
from specdec_core.evidence.token_records import TOKENS
from specdec_core.statistics import battery

V, LENGTH = 9, 60


def row(method, prompt, repeat, seed, scored=True, low=0.0, setting="t1"):
    """Uniform tokens; `low` of them are drawn from the lower half instead, which the scores lean to."""
    random = np.random.default_rng(seed)
    tokens = random.integers(0, V - 1, LENGTH)
    moved = random.random(LENGTH) < low
    tokens[moved] = random.integers(0, (V - 1) // 2, moved.sum())
    scores = {
        "pit": ((tokens + random.random(LENGTH)) / (V - 1)).tolist(),
        "in_set": "".join("01"[int(token < (V - 1) // 2)] for token in tokens),
        "mass": [0.5] * LENGTH,
        "ratio": np.where(tokens < (V - 1) // 2, 1.5, 0.5).tolist(),
    }
    return {
        "setting": setting, "temperature": 1.0, "top_p": 1.0, "method": method, "prompt_id": f"p{prompt}",
        "repeat": repeat, "tokens": tokens.tolist(), "offsets": "012" * (LENGTH // 3), "endings": "aab" * (LENGTH // 3),
        **(scores if scored else dict.fromkeys(scores)),
    }  # fmt: skip


def records(low=0.0, repeats=4, prompts=6, seed=0):
    found = []
    for number, method in enumerate((AR, AR_AGAIN, SD, LOOKUP)):
        for prompt in range(prompts):
            for repeat in range(repeats):
                leaning = low if method == SD else 0.0
                found.append(row(method, prompt, repeat, (seed, number, prompt, repeat), low=leaning))
    return found


def test_rows_are_token_records():
    for one in records(repeats=1):
        TOKENS.validated(one)
    with pytest.raises(RecordError, match=r"'offsets' has 3 entries for 60 tokens"):
        TOKENS.validated(records(repeats=1)[0] | {"offsets": "012"})


def test_methods_are_named_as_they_are_drawn():
    assert (AR, AR_AGAIN, SD, LOOKUP) == token_records.METHODS


def test_the_same_law_passes_and_both_comparisons_are_made():
    found = list(law_tests(records(), live=False))
    assert all(LAW_TEST.validated(one) and one["live"] is False for one in found)
    by = {(one["comparison"], one["test"]): one for one in found}
    assert {test for comparison, test in by if comparison == "AR against AR"} == {battery.NOMINAL, *battery.TWO_SAMPLE}
    assert {test for comparison, test in by if comparison == LOOKUP} == set(battery.ONE_SAMPLE)
    assert {one["test"] for one in found if one["adjusted"] is not None} == {*battery.ONE_SAMPLE, *battery.TWO_SAMPLE}
    assert min(one["adjusted"] for one in found if one["adjusted"] is not None) > 0.05
    assert by[SD, battery.EQUIVALENCE]["p"] > 0.001  # 1,440 tokens do not show 0.02
    assert by["SD against AR", battery.NOMINAL]["dof"] <= V - 2


def test_a_leaning_decoder_is_seen_in_its_own_arm_only():
    by = {(one["comparison"], one["test"]): one for one in law_tests(records(low=0.3), live=True)}
    assert all(by[SD, name]["adjusted"] < 1e-3 for name in battery.ONE_SAMPLE)
    assert by["SD against AR", battery.PERMUTED]["adjusted"] < 0.05
    assert all(by[LOOKUP, name]["p"] > 1e-3 for name in battery.ONE_SAMPLE)
    assert by["AR against AR", battery.PERMUTED]["p"] > 0.01


def test_bins_come_from_the_pilot_arm():
    rows = records()
    tokens = [one for one in rows if one["method"] == LOOKUP]
    bins = analysis.pilot_bins(rows, 10_000)
    assert set(bins.tokens.tolist()) == {token for one in tokens for token in one["tokens"]}
    assert analysis.pilot_bins(rows, 20).count < bins.count


def test_curves():
    found = list(law_curves(records()))
    assert all(LAW_CURVE.validated(one) for one in found)
    kinds = {kind: [one for one in found if one["kind"] == kind] for kind in ("null", "pit", "bias")}
    assert [one["series"] for one in kinds["null"]] == ["SD against AR", "AR against AR"]
    assert [one["series"] for one in kinds["pit"]] == [f"offset {offset} (480)" for offset in range(3)]
    assert all(np.mean(one["y"]) == pytest.approx(1) for one in kinds["pit"])
    assert [one["series"] for one in kinds["bias"]] == [SD, AR] and kinds["bias"][0]["x"][-1] == 24 * LENGTH
    assert all(
        low < y < high for one in kinds["bias"] for low, y, high in zip(one["low"], one["y"], one["high"], strict=True)
    )


def test_sizes_of_right_tests_are_small_and_of_clustered_tokens_the_nominal_one_is_not():
    found = {one["test"]: one for one in sizes(records(repeats=8), False, replicates=60)}
    assert all(SIZE.validated(one) for one in found.values())
    assert set(found) == {*battery.ONE_SAMPLE, *battery.TWO_SAMPLE, battery.NOMINAL}
    assert {name for name, one in found.items() if not one["family"]} == {battery.NOMINAL}
    assert found[battery.KS]["replicates"] == 96 and found[battery.PERMUTED]["replicates"] == 60
    assert all(one["rejections"] <= 0.17 * one["replicates"] for one in found.values())
    clustered = records(repeats=8)
    for one in clustered:
        one["tokens"] = [one["tokens"][0]] * (LENGTH // 2) + [one["tokens"][1]] * (LENGTH // 2)
    found = {one["test"]: one for one in sizes(clustered, False, replicates=60)}
    assert found[battery.NOMINAL]["rejections"] > 50 and found[battery.PERMUTED]["rejections"] <= 10


def test_a_test_that_is_wrong_under_the_null_has_a_large_size():
    wrong = records(repeats=8)
    for one in wrong:
        one["mass"] = [0.3] * LENGTH
    found = {one["test"]: one for one in sizes(wrong, True, replicates=1)}
    assert found[battery.DIRECTED]["rejections"] > 80
