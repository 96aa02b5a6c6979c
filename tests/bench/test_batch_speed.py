"""Notebook 04's speed of batches on a tiny model: what is timed, counted, predicted and recorded."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specdec_core.bench import batch_speed
from specdec_core.bench.batch_speed import (
    CODE,
    COPY,
    LOOKUP,
    NONE,
    PLANS,
    BatchPlan,
    PassTimes,
    PromptCache,
    measure_batches,
    predict,
    summary,
)
from specdec_core.evidence.claims import claim
from specdec_core.evidence.layout import PROFILES
from specdec_core.evidence.ragged_claims import GROUPED, SCATTER, batch_pays, pair_up
from specdec_core.evidence.ragged_records import BATCH_CURVE, BATCH_RUN
from specdec_core.evidence.records import find_records, read_records
from specdec_core.measure import clock
from specdec_core.models.rounding import rounded
from specdec_core.prompts import DOMAINS, Prompt
from specdec_core.protocol import Phases, Round, RowRound
from specdec_core.targets.transformer import Transformer
from tests.bench.conftest import copy_checkout

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = BatchPlan(
    (1, 4), (2, 3), (4,), (2,), (4,), repeats=2, max_new_tokens=6, least_rows=3, most_queued=6, prompts=2, samples=2
)  # fmt: skip
ENGINE = "numba float32"


def shrink(patch: pytest.MonkeyPatch, prompts) -> None:
    patch.setattr(batch_speed, "load_prompts", lambda: prompts)
    patch.setattr(batch_speed, "rounded", lambda checkpoint, bits: rounded(checkpoint, bits, 16))
    patch.setattr(clock, "SETTLE", 0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory, tiny_opened, short_prompts):
    """All of it, the layout that its records lie in, and for each run its requests and whether drafts were priced."""
    layout, asked, priced = copy_checkout(tmp_path_factory.mktemp("checkout")), [], []
    timed, predicted = batch_speed.timed_rounds, batch_speed.predict
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch, short_prompts)
        patch.setattr(
            batch_speed, "timed_rounds", lambda w, t, requests, *a: asked.append(requests) or timed(w, t, requests, *a)
        )
        patch.setattr(batch_speed, "predict", lambda r, t, drafts: priced.append(drafts) or predicted(r, t, drafts))
        rows = measure_batches(PLAN, tiny_opened, "quick", layout)
    return rows, layout, list(zip(rows.runs, asked, priced, strict=True))


class TestRun:
    def test_all_of_it_is_recorded_and_knows_its_code(self, run):
        rows, layout, _ = run
        for name, schema, kept in (
            ("04_batch_curve", BATCH_CURVE, rows.curves),
            ("04_batch_runs", BATCH_RUN, rows.runs),
        ):
            assert read_records(layout.records("quick") / f"{name}.jsonl", schema)[1] == kept
            (file,) = find_records(schema, folder=layout.build)
            assert file.header["code"]["paths"] == sorted(CODE) and not file.is_stale(layout)

    def test_every_arm_is_run_in_every_repeat(self, run):
        found = sorted((row["repeat"], row["way"], row["batch"], row["drafter"], row["K"]) for row in run[0].runs)
        arms = [(SCATTER, b, *arm) for b in (1, 4) for arm in (NONE, (LOOKUP, 2), (LOOKUP, 3))]
        arms += [(SCATTER, 4, COPY, 2), (GROUPED, 4, LOOKUP, 3)]
        assert found == sorted((repeat, *arm) for repeat in (0, 1) for arm in arms)
        orders = [
            [(r["way"], r["batch"], (r["drafter"], r["K"])) for r in run[0].runs if r["repeat"] == n] for n in (0, 1)
        ]
        assert orders[0] != orders[1] and PLAN.arms not in orders

    def test_runs_of_a_repeat_share_their_prompts_and_repeats_do_not(self, run):
        for row, requests, _ in run[2]:
            assert {each.policy.k if each.policy else 0 for each in requests} == {row["K"]}
            assert len(requests) == row["rows"]
        prompts = [{tuple(r.prompt for r in requests[:3]) for row, requests, _ in run[2] if row["repeat"] == n}
                   for n in (0, 1)]  # fmt: skip
        assert [len(each) for each in prompts] == [1, 1] and prompts[0] != prompts[1]

    def test_all_arms_of_a_batch_emit_the_same_tokens(self, run):
        for row in run[0].runs:
            rows = {1: 3, 4: 6}[row["batch"]]
            assert row["identical"] and row["rows"] == rows == len(row["completions"])
            assert row["tokens"] == rows * PLAN.max_new_tokens == sum(row["latency_tokens"])
            assert row["engine"] == ENGINE

    def test_without_speculation_a_pass_emits_a_token_a_row(self, run):
        for row in (row for row in run[0].runs if not row["K"]):
            passes = PLAN.max_new_tokens * {1: 3, 4: 2}[row["batch"]]
            assert row["target_passes"] == passes and row["row_rounds"] == row["tokens"]
            assert row["drafted"] == row["accepted"] == row["least_accepted"] == 0

    def test_a_copy_is_accepted(self, run):
        (copy, _) = [row for row in run[0].runs if row["drafter"] == COPY]
        assert 0 < copy["accepted"] <= copy["drafted"] <= 2 * copy["row_rounds"]
        assert copy["row_rounds"] < copy["tokens"]

    def test_time_adds_up(self, run):
        for row in run[0].runs:
            assert len(row["seconds"]) == 1 and max(row["completions"]) == pytest.approx(row["seconds"][0], rel=1e-3)
            # With one slot every token's time is spent on it alone.
            if row["batch"] == 1:
                spent = np.dot(row["latencies"], row["latency_tokens"])
                assert spent == pytest.approx(row["seconds"][0], rel=1e-2)

    def test_curves_of_before_are_what_predicts(self, run):
        curves = {(row["engine"], row["batch"], row["n"]): row["seconds"] for row in run[0].curves}
        assert set(curves) == {(ENGINE, b, n) for b in (1, 4) for n in (1, 3, 4)} | {(f"{ENGINE}, {COPY}", 4, 1)}
        assert all(len(seconds) == PLAN.samples for seconds in curves.values())
        for row in run[0].runs:
            if not row["K"] and row["batch"] == 1:
                expected = row["target_passes"] * np.median(curves[ENGINE, 1, 1])
                assert row["predicted_seconds"] == pytest.approx(expected)
        assert all((drafts is not None) == (row["drafter"] == COPY) for row, _, drafts in run[2])
        step = np.median(curves[f"{ENGINE}, {COPY}", 4, 1])
        assert {drafts.at(4, 4) for _, _, drafts in run[2] if drafts} == {step}

    def test_rows_are_judged(self, run):
        assert "2 repeats of 10" in batch_pays(claim("R5"), run[0].runs).note
        assert len(pair_up(run[0].runs, 4)) == 3

    def test_held_out_prompts_of_all_domains_are_drawn(self, tiny_opened, monkeypatch):
        splits = ("tuning", "report", "report", "tuning", "report")
        made = [
            Prompt(f"{d}{n}", d, f"{d} {n}", "short", None, split) for d in DOMAINS for n, split in enumerate(splits)
        ]
        monkeypatch.setattr(batch_speed, "load_prompts", lambda: made)
        prompts = batch_speed._prompts(tiny_opened, 2)
        asked = {d: [tuple(tiny_opened.tokenizer.chat(p.messages)) for p in made if p.domain == d] for d in DOMAINS}
        assert prompts == {domain: [each[1], each[2]] for domain, each in asked.items()}
        first, second = (batch_speed._draw(prompts, 5, np.random.default_rng(seed)) for seed in (0, 3))
        assert len(set(first)) == 5 and first != second
        where = {prompt: domain for domain, each in prompts.items() for prompt in each}
        assert [where[prompt] for prompt in first] == [*DOMAINS, *DOMAINS[:2]]


def test_a_run_that_emits_other_tokens_is_seen(tiny_opened, short_prompts, layout, monkeypatch):
    shrink(monkeypatch, short_prompts)
    plan = replace(PLAN, ks=(2,), copy_ks=(), copy_batches=(), repeats=1)
    other = Transformer(rounded(tiny_opened.checkpoint, 2, 16), tiny_opened.target.placement)
    monkeypatch.setattr(batch_speed, "PromptCache", lambda model: PromptCache(other))
    rows = measure_batches(plan, tiny_opened, "quick", layout)
    assert not any(row["identical"] for row in rows.runs)


class TestPromptCache:
    def test_what_is_copied_is_what_prefill_leaves(self, tiny_opened):
        target, prompts = tiny_opened.target, [np.arange(3, 12), np.array([7]), np.arange(20, 25)]
        cache, slots = PromptCache(target), np.array([2, 0, 3])
        copied, own = cache.new_state(4, 20), target.new_state(4, 20)
        for _ in range(2):
            cache.prefill(copied, slots, prompts)
        target.prefill(own, slots, prompts)
        assert copied.lengths.tolist() == own.lengths.tolist() == [0, 0, 8, 4]
        for slot, length in enumerate(own.lengths):
            assert (copied.keys[:, slot, :, :length] == own.keys[:, slot, :, :length]).all()
            assert (copied.values[:, slot, :, :length] == own.values[:, slot, :, :length]).all()

    def test_features_are_kept_too(self, tiny_opened):
        target = Transformer(tiny_opened.checkpoint, tiny_opened.target.placement, (0, 1))
        cache, slots, prompts = PromptCache(target), np.array([1, 0]), [np.arange(3, 12), np.arange(20, 25)]
        own = target.prefill(target.new_state(2, 20), slots, prompts)
        for _ in range(2):
            copied = cache.prefill(cache.new_state(2, 20), slots, prompts)
            assert all((one == other).all() for one, other in zip(copied, own, strict=True))
        plain = PromptCache(tiny_opened.target)
        assert plain.prefill(plain.new_state(2, 20), slots, prompts) == [None, None]

    def test_a_prompt_is_prefilled_once(self, tiny_opened, monkeypatch):
        calls, real = [], tiny_opened.target.prefill
        monkeypatch.setattr(tiny_opened.target, "prefill", lambda *given: calls.append(given) or real(*given))
        cache = PromptCache(tiny_opened.target)
        state = cache.new_state(2, 20)
        cache.prefill(state, np.array([0, 1]), [np.arange(3, 9), np.arange(3, 9)])
        cache.prefill(state, np.array([1]), [np.arange(3, 10)])
        assert len(calls) == 2 and state.lengths.tolist() == [5, 6]


def row(key, emitted, accepted, drafted=2, finished=None):
    drafts = (1,) * drafted
    return RowRound(key, key, 5, drafts, accepted, "recovered", tuple(range(emitted)), finished)


ROUNDS = [
    Round(0, (row(0, 3, 2), row(1, 1, 0)), 6, Phases(admit=9.0, draft=0.5, verify=2.0, accept=0.25, commit=0.25)),
    Round(1, (row(0, 2, 1, finished="length"), row(1, 1, 1, 1)), 5, Phases(verify=1.0)),
    Round(2, (row(1, 2, 1, finished="length"), row(2, 1, 1)), 6, Phases(admit=5.0, verify=4.0)),
    Round(3, (row(2, 1, 0, 0, finished="length"),), 1, Phases(verify=0.5)),
]


class TestSummary:
    def test_rounds_are_counted_and_timed_without_admissions(self):
        found = summary(ROUNDS)
        assert found["seconds"] == [8.5] and found["completions"] == [4.0, 8.0, 8.5]
        counts = ("rows", "tokens", "target_passes", "row_rounds", "drafted", "accepted")
        assert [found[name] for name in counts] == [3, 11, 4, 7, 11, 6]

    def test_a_token_took_its_rows_round_shared_among_those_of_the_round(self):
        found = summary(ROUNDS)
        waits = dict(zip(found["latencies"], found["latency_tokens"], strict=True))
        assert waits == {1.0: 4, 3.0: 1, 0.5: 3, 2.0: 2, 4.0: 1}

    def test_a_row_that_sits_out_waits_on(self):
        """Rows that are grouped by length do not take part in every round."""
        found = summary([
            Round(0, (row(0, 1, 0),), 3, Phases(verify=1.0)),
            Round(1, (row(1, 1, 0),), 3, Phases(verify=2.0)),
            Round(2, (row(0, 1, 0),), 3, Phases(verify=4.0)),
        ])  # fmt: skip
        assert dict(zip(found["latencies"], found["latency_tokens"], strict=True)) == {1.0: 1, 2.0: 1, 6.0: 1}

    def test_the_slowest_row_of_a_pass_counts_for_all(self):
        assert summary(ROUNDS)["least_accepted"] == 0 + 2 * 1 + 2 * 1 + 0


def curve(batch, n, *seconds):
    return {"engine": ENGINE, "batch": batch, "n": n, "context": 64, "seconds": list(seconds)}


class TestPrediction:
    times = PassTimes.of([curve(1, 1, 1.0, 9.0, 2.0), curve(4, 1, 4.0), curve(1, 4, 6.0), curve(4, 4, 16.0)])

    def test_a_batch_that_was_timed_takes_what_it_took(self):
        assert self.times.at(1, 1) == 2.0 and self.times.at(4, 4) == 4.0 and self.times.at(1, 4) == 6.0

    def test_others_go_by_their_nodes(self):
        assert self.times.at(2, 4) == 5.0  # between the four rows and the one row of as many nodes
        assert self.times.at(3, 10) == pytest.approx(5 + 6 / 12 * 11)
        assert self.times.at(4, 28) == pytest.approx(16 + 11)

    def test_rounds_are_summed_and_drafts_of_a_model_added(self):
        steps = PassTimes.of([curve(1, 1, 0.25), curve(2, 1, 0.5)])
        passes = self.times.at(2, 6) + self.times.at(2, 5) + self.times.at(2, 6) + self.times.at(1, 1)
        assert predict(ROUNDS, self.times, None) == pytest.approx(passes)
        # Two steps of two rows; one of two and one of one; two of two; nothing.
        assert predict(ROUNDS, self.times, steps) == pytest.approx(passes + 1.0 + 0.75 + 1.0)


class TestPlans:
    @pytest.mark.parametrize("profile", PROFILES)
    def test_prompts_suffice_for_the_largest_batch(self, profile):
        plan = PLANS[profile]
        assert plan.prompts * len(DOMAINS) >= max(map(plan.rows, plan.batches))
        assert all(plan.rows(batch) > batch for batch in plan.grouped)
        assert set(plan.copy_batches) <= set(plan.batches) and plan.widths[0] == 1

    def test_the_full_one_has_what_r5_asks_for(self):
        plan = PLANS["full"]
        assert plan.batches == (1, 2, 4, 8, 16, 32) and plan.repeats >= claim("R5").minimum_n
        assert set(plan.widths) >= {1, 2, 3, 5, 8} and {(LOOKUP, 7), (COPY, 4)} <= {arm for _, _, arm in plan.arms}
