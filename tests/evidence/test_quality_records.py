"""What an engine loses, pooled over prompts."""

from __future__ import annotations

import pytest

from specdec_core.evidence.quality_records import QUALITY, pooled_quality
from specdec_core.evidence.schemas import RecordError
from specdec_core.statistics.intervals import ratio_interval

ROW = {
    "engine": "numba int8", "reference": "numba float32", "answers": "numba float32", "prompt_id": "math-01",
    "domain": "math", "positions": 20, "kl": 0.2, "kl_largest": 0.05, "agreed": 18,
}  # fmt: skip


@pytest.mark.parametrize(
    "change",
    [
        {},
        {"kl": 0.0, "kl_largest": 0.0},
        {"agreed": 20},
        {"agreed": 0},
        {"positions": 1, "agreed": 1, "kl": 0.1, "kl_largest": 0.1},
        {"positions": 3, "agreed": 1, "kl": 0.1 + 0.1 + 0.1, "kl_largest": 0.1},  # sums round
        {"kl": 0.05 * (1 - 1e-15)},
    ],
)
def test_a_good_row_is_taken_as_it_is(change):
    assert QUALITY.validated(ROW | change) == ROW | change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"positions": 0, "agreed": 0}, "expected at least one position"),
        ({"agreed": 21}, "0…all of them"),
        ({"agreed": -1}, "0…all of them"),
        ({"kl": -0.1}, "0 ≤ largest ≤ sum"),
        ({"kl_largest": -0.1}, "0 ≤ largest ≤ sum"),
        ({"kl_largest": 0.3}, "0 ≤ largest ≤ sum"),
        ({"kl": 1.1}, "positions · largest"),
    ],
)
def test_contradictions_are_refused(change, message):
    with pytest.raises(RecordError, match=message):
        QUALITY.validated(ROW | change)


def rows(positions, agreed, kl, **changes):
    return [
        ROW | {"prompt_id": f"p{n}", "positions": all_, "agreed": some, "kl": sum_, "kl_largest": sum_ / 2, **changes}
        for n, (all_, some, sum_) in enumerate(zip(positions, agreed, kl, strict=True))
    ]


def test_means_are_by_position_and_intervals_by_prompt():
    positions, kl = [10, 20, 30], [0.1, 0.4, 0.3]
    (found,) = pooled_quality(rows(positions, [9, 15, 30], kl))
    assert (found.engine, found.reference, found.prompts, found.positions) == ("numba int8", "numba float32", 3, 60)
    assert found.kl == ratio_interval(kl, positions) and found.kl.estimate == pytest.approx(0.8 / 60)
    assert found.kl_largest == 0.2
    differing = ratio_interval([1, 5, 0], positions)
    assert found.agreement.estimate == pytest.approx(0.9) and found.agreement.n == 3
    assert found.agreement.low == pytest.approx(max(0, 1 - differing.high))
    assert found.agreement.high == pytest.approx(1 - differing.low)
    assert 0 <= found.agreement.low < 0.9 < found.agreement.high <= 1


def test_the_level_is_that_of_both_intervals():
    some = rows([10, 20, 30, 20], [9, 15, 28, 19], [0.1, 0.4, 0.3, 0.3])
    (narrow,), (wide,) = pooled_quality(some, 0.5), pooled_quality(some, 0.99)
    assert wide.kl.low < narrow.kl.low and wide.agreement.low < narrow.agreement.low
    assert narrow.agreement.level == narrow.kl.level == 0.5


def test_if_all_agree_the_bound_is_that_of_prompts():
    (found,) = pooled_quality(rows([10] * 9, [10] * 9, [0.1] * 9))
    assert found.agreement.estimate == found.agreement.high == 1
    assert found.agreement.low == pytest.approx(0.025 ** (1 / 9)) and found.agreement.n == 9


def test_equal_laws_have_no_interval_of_their_distance():
    (found,) = pooled_quality(rows([10, 10], [10, 10], [0.0, 0.0]))
    assert found.kl is None and found.kl_largest == 0


def test_one_line_a_pair_in_the_order_of_the_rows():
    other = rows([10], [5], [1.0], engine="llama.cpp Q4_0", reference="llama.cpp F32")
    floor = rows([10], [10], [0.0], engine="numba float32", reference="torch float64")
    found = pooled_quality(other + floor + rows([10], [9], [0.5]))
    assert [each.engine for each in found] == ["llama.cpp Q4_0", "numba float32", "numba int8"]
    assert [each.agreement.estimate for each in found] == pytest.approx([0.5, 1.0, 0.9])
    same = rows([10], [9], [0.5]) + rows([10], [5], [0.5], reference="torch float64")
    assert len(pooled_quality(same)) == 2


def test_a_prompt_that_occurs_twice():
    with pytest.raises(RecordError, match="numba int8 against numba float32: a prompt has two rows"):
        pooled_quality(rows([10], [9], [0.5]) * 2)
