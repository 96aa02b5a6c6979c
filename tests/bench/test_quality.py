"""What a cheaper engine loses: by hand on invented laws, then on a tiny model."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.bench import quality as bench
from specdec_core.bench.peer_own import FLOAT32, INT8
from specdec_core.bench.quality import (
    CODE,
    PLANS,
    Answer,
    QualityPlan,
    compare,
    comparisons,
    divergences,
    forced_logits,
    measure_quality,
    quality_table,
    write_answers,
)
from specdec_core.decode import generate
from specdec_core.evidence.layout import PROFILES
from specdec_core.evidence.quality_records import QUALITY, pooled_quality
from specdec_core.evidence.records import find_records, read_records
from specdec_core.measure.sweep import Case
from specdec_core.models.errors import MissingPackage
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.table import TableTarget, random_logits
from tests.bench.conftest import copy_checkout
from tests.bench.peer_factory import CASES, tiny_factory

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY = 5
TRUE, OTHER = random_logits(VOCABULARY, 1), random_logits(VOCABULARY, 6)
PROMPT, TOKENS = (1, 2, 3), (4, 0, 1, 2, 2, 3, 1)
ANSWER = Answer(Case("math-1", "math", "report", PROMPT), TOKENS)


def softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits) / np.exp(logits).sum()


class TestDivergences:
    def test_they_are_kullback_and_leiblers(self):
        p, q = np.array([[0.5, 0.5, 0.0], [0.2, 0.3, 0.5]]), np.array([[0.25, 0.25, 0.5], [0.5, 0.3, 0.2]])
        with np.errstate(divide="ignore"):
            truth = np.where(p > 0, np.log(p), -745.0)
        found = divergences(truth + 7.0, np.log(q) - 3.0)  # a constant changes no law
        assert found == pytest.approx([np.log(2), 0.2 * np.log(0.4) + 0.5 * np.log(2.5)])

    @given(st.integers(0, 10**6))
    def test_against_the_definition(self, seed):
        truth, other = np.random.default_rng(seed).normal(0, 4, (2, 3, 11))
        expected = [
            sum(a * np.log(a / b) for a, b in zip(softmax(t), softmax(o), strict=True))
            for t, o in zip(truth, other, strict=True)
        ]
        assert divergences(truth, other) == pytest.approx(expected, rel=1e-9)
        assert (divergences(truth, truth) == 0).all() and (divergences(truth, other) >= 0).all()

    def test_large_logits_do_not_overflow(self):
        assert divergences(np.array([[2000.0, 0.0]]), np.array([[1990.0, 0.0]])) == pytest.approx([0.0])
        assert np.isfinite(divergences(np.array([[2000.0, 0.0]]), np.array([[0.0, 2000.0]]))).all()


class TestForced:
    @pytest.mark.parametrize("width", [1, 3, 7, 32])
    def test_logits_are_those_before_each_token(self, width):
        parts = list(forced_logits(TableTarget(TRUE, VOCABULARY), PROMPT, TOKENS, width))
        assert [len(part) for part in parts[:-1]] == [width] * (len(parts) - 1) and len(parts) == -(-7 // width)
        expected = [TRUE((*PROMPT, *TOKENS[:n])) for n in range(7)]
        assert np.array_equal(np.concatenate(parts), expected)

    def test_an_answer_of_one_token(self):
        (only,) = forced_logits(TableTarget(TRUE, VOCABULARY), PROMPT, TOKENS[:1])
        assert np.array_equal(only, [TRUE(PROMPT)])

    def test_parts_are_float64_of_their_own(self):
        class Reused(TableTarget):
            shared = np.zeros((2, VOCABULARY), np.float32)

            def verify(self, *asked):
                found = super().verify(*asked)
                self.shared[: len(found.logits)] = found.logits
                return type(found)(self.shared, None, found.slots, found.forest, found.epoch, found.pending)

        first, second, *_ = list(forced_logits(Reused(TRUE, VOCABULARY), PROMPT, TOKENS, 2))
        assert first.dtype == np.float64 and not np.array_equal(first, second)


class TestCompare:
    def test_sums_over_the_answer(self):
        (row,) = compare(TableTarget(OTHER, VOCABULARY), TableTarget(TRUE, VOCABULARY), [ANSWER])
        prefixes = [(*PROMPT, *TOKENS[:n]) for n in range(7)]
        kl = divergences(np.array([TRUE(each) for each in prefixes]), np.array([OTHER(each) for each in prefixes]))
        agreed = sum(TRUE(each).argmax() == OTHER(each).argmax() for each in prefixes)
        assert row == {
            "prompt_id": "math-1", "domain": "math", "positions": 7, "kl": pytest.approx(kl.sum()),
            "kl_largest": pytest.approx(kl.max()), "agreed": agreed,
        }  # fmt: skip
        assert 0 < agreed < 7

    def test_the_reference_comes_first(self):
        (one,) = compare(TableTarget(OTHER, VOCABULARY), TableTarget(TRUE, VOCABULARY), [ANSWER])
        (two,) = compare(TableTarget(TRUE, VOCABULARY), TableTarget(OTHER, VOCABULARY), [ANSWER])
        assert abs(one["kl"] - two["kl"]) > 1e-3 and one["agreed"] == two["agreed"]

    def test_a_law_against_itself(self):
        (row,) = compare(TableTarget(TRUE, VOCABULARY), TableTarget(TRUE, VOCABULARY), [ANSWER])
        assert (row["kl"], row["kl_largest"], row["agreed"]) == (0.0, 0.0, 7)

    def test_other_vocabularies(self):
        with pytest.raises(ValueError, match="vocabularies of 6 and 5 tokens"):
            list(compare(TableTarget(random_logits(6, 1), 6), TableTarget(TRUE, VOCABULARY), [ANSWER]))


PLAN = QualityPlan(prompts=1, max_new_tokens=40, formats=("Q8_0", "Q4_0"), bits=(8, 4))


@pytest.fixture(scope="module")
def factory(tmp_path_factory):
    with tiny_factory(tmp_path_factory.mktemp("quality")) as made:
        yield made


@pytest.fixture(scope="module")
def answers(factory):
    return write_answers(factory.opened.target, CASES, 40, ())


def test_answers_are_the_targets_greedy_ones(factory, answers):
    for answer, case in zip(answers, CASES, strict=True):
        (expected,) = generate(factory.opened.target, [Request(case.tokens, Options(max_new_tokens=40))])
        assert answer == Answer(case, expected.tokens) and len(answer.tokens) == 40
    end = answers[0].tokens[4]
    assert write_answers(factory.opened.target, CASES[:1], 40, (end,))[0].tokens[-1] == end


def test_our_int8_engine_is_near_to_its_float32_and_the_floor_is_far_below(factory, answers):
    target = factory.opened.target
    int8 = list(compare(factory.open(INT8), target, answers))
    floor = list(compare(target, target.float64_reference(), answers))
    assert all(1e-6 < row["kl"] / row["positions"] < 0.1 for row in int8)
    assert all(row["kl"] / row["positions"] < 1e-9 and row["agreed"] == row["positions"] for row in floor)
    assert [row["positions"] for row in int8] == [40, 40]


def test_every_engine_has_the_float32_form_of_its_own_values_for_reference(factory):
    pairs = [(each.engine, each.reference) for each in comparisons(PLAN, factory)]
    assert pairs == [
        (FLOAT32, "torch float64"), ("llama.cpp F32", FLOAT32), (INT8, FLOAT32),
        ("llama.cpp Q8_0", "llama.cpp F32"), ("llama.cpp Q4_0", "llama.cpp F32"),
        ("MLX 8-bit", "MLX float32"), ("MLX 4-bit", "MLX float32"),
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(factory, tmp_path_factory, short_prompts):
    pytest.importorskip("llama_cpp", reason="llama.cpp is not installed")
    pytest.importorskip("mlx.core", reason="MLX is not installed")
    layout = copy_checkout(tmp_path_factory.mktemp("checkout"))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "load_prompts", lambda: short_prompts)
        yield measure_quality(PLAN, factory, "quick", layout=layout), layout


class TestRun:
    def test_all_of_it_is_recorded_and_knows_its_code(self, run):
        rows, layout = run
        assert read_records(layout.records("quick") / "03_quality.jsonl", QUALITY)[1] == rows.quality
        (file,) = find_records(QUALITY, folder=layout.build)
        assert file.header["code"]["paths"] == sorted(CODE) and not file.is_stale(layout)
        assert len(CODE) == len(set(CODE)) and not rows.absent

    def test_every_engine_is_seen_on_the_same_report_prompts(self, run):
        rows = run[0].quality
        assert len(rows) == 7 * 3 and all("report" in row["prompt_id"] for row in rows)
        assert len({(row["prompt_id"], row["positions"]) for row in rows}) == 3

    def test_the_table_says_what_was_pooled(self, run):
        rows = run[0].quality
        table, pooled = quality_table(rows), {each.engine: each for each in pooled_quality(rows)}
        assert list(table.index) == list(pooled) and len(pooled) == 7
        for name, line in table.iterrows():
            own = pooled[name]
            assert line["reference"] == own.reference and line["positions"] == own.positions
            assert line["same token, %"] == 100 * own.agreement.estimate
            assert line["largest KL"] == 1e3 * own.kl_largest
            assert line["KL, mnat"] == (1e3 * own.kl.estimate if own.kl else 0)
            low, high = map(float, line["same interval"].split(" to "))
            assert low <= line["same token, %"] + 0.05 and line["same token, %"] - 0.05 <= high
        coarse = table.loc["llama.cpp Q4_0"]
        low, high = map(float, coarse["KL interval"].split(" to "))
        assert 0 < low < coarse["KL, mnat"] < high

    def test_fewer_bits_lose_more(self, run):
        found = {each.engine: each.kl.estimate if each.kl else 0.0 for each in pooled_quality(run[0].quality)}
        assert found[FLOAT32] < 1e-9 < found["llama.cpp Q8_0"] < found["llama.cpp Q4_0"]
        assert 1e-9 < found["MLX 8-bit"] < found["MLX 4-bit"]
        assert found[INT8] < found["llama.cpp Q4_0"] and found["llama.cpp F32"] < 1e-6


def test_what_is_not_here_is_left_out_and_said_to_be(factory, layout, short_prompts, monkeypatch):
    def missing(name):
        if name.startswith("llama.cpp"):
            raise MissingPackage("llama.cpp is not here")
        return opens(name)

    opens = factory.open
    monkeypatch.setattr(factory, "open", missing)
    monkeypatch.setattr(bench, "load_prompts", lambda: short_prompts)
    rows = measure_quality(QualityPlan(1, 4, ("Q8_0",), ()), factory, "quick", layout=layout)
    assert {row["engine"] for row in rows.quality} == {FLOAT32, INT8}
    assert rows.absent == [
        {"backend": name, "reason": "llama.cpp is not here"} for name in ("llama.cpp F32", "llama.cpp Q8_0")
    ]


def test_every_profile_has_a_plan():
    assert set(PLANS) == set(PROFILES)
    full, quick = PLANS["full"], PLANS["quick"]
    assert 3 * full.prompts * full.max_new_tokens >= 2500 and 3 * quick.prompts * quick.max_new_tokens >= 140
    assert full.formats == ("Q8_0", "Q4_1", "Q4_0") and full.bits == (8, 4)
