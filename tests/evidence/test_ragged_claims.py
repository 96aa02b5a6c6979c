"""Verdicts on batched speed, from rows made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_core.evidence.claims import claim
from specdec_core.evidence.ragged_claims import (
    GROUPED,
    REALIGN,
    SCATTER,
    Keeping,
    batch_pays,
    best_pairs,
    growth,
    pair_up,
    predicted_crossover,
    realign_share,
    shares,
)
from specdec_core.evidence.ragged_records import BATCH_RUN
from specdec_core.evidence.ragged_records import REALIGN as REALIGN_SCHEMA
from specdec_core.evidence.schemas import RecordError
from specdec_core.evidence.verdicts import Outcome

R4, R5 = claim("R4"), claim("R5")
OURS, HUGGING = "numba float32", "transformers float32"
REPEATS, BATCHES = 12, (1, 2, 4, 8, 16, 32)
TAU = {("n-gram", 1): 1.25, ("n-gram", 2): 1.4, ("n-gram", 4): 1.5, ("4-bit copy", 2): 2.3}


def keeping(way, share, engine=HUGGING, batches=(1, 8, 32), repeats=15, noise=0.02):
    """A way whose commit takes `share(batch)` of the round; rounds drift from repeat to repeat."""
    random, rows = np.random.default_rng(len(way)), []
    for batch in batches:
        rounds = 0.02 * batch * (1 + 0.5 * random.random(repeats))
        commits = rounds * share(batch) * (1 + noise * random.standard_normal(repeats))
        for phase, seconds in (("commit", commits), ("round", rounds)):
            rows.append({"way": way, "engine": engine, "batch": batch, "n": 5, "context": 128, "phase": phase,
                         "seconds": seconds.tolist()})  # fmt: skip
    return rows


def kept(scatter=0.001, realigned=0.3, **how):
    return [
        *keeping(SCATTER, lambda batch: scatter, **how),
        *keeping(REALIGN, lambda batch: realigned * batch / 32, **how),
        *keeping(SCATTER, lambda batch: scatter / 2, OURS, **how),
        *keeping("scatter, tree", lambda batch: 10 * scatter, OURS, **how),
    ]


def node_seconds(nodes):
    """A pass is bound by memory up to 8 nodes, by arithmetic beyond."""
    return 0.013 + 0.0013 * max(nodes - 8, 0)


def run(batch, repeat, speculation=("", 0), way=SCATTER, stretch=1.0, tokens=240, **changes):
    drafter, k = speculation
    tau = TAU.get(speculation, 1.0)
    passes, row_rounds = round(tokens / tau / batch), round(tokens / tau)
    predicted = passes * (node_seconds(batch * (k + 1)) + (0.013 * k if drafter == "4-bit copy" else 0.0))
    seconds = predicted * stretch
    accepted = tokens - row_rounds
    return {
        "engine": OURS, "way": way, "drafter": drafter, "K": k, "batch": batch, "repeat": repeat,
        "rows": max(batch, 8), "tokens": tokens, "target_passes": passes, "row_rounds": row_rounds,
        "drafted": row_rounds * k, "accepted": accepted, "seconds": [seconds],
        "latencies": [seconds / passes, seconds / passes / (k + 1)], "latency_tokens": [tokens - 40, 40],
        "completions": [seconds / 2, seconds], "least_accepted": accepted // batch, "predicted_seconds": predicted,
        "identical": True,
    } | changes  # fmt: skip


def runs(batches=BATCHES, repeats=REPEATS, noise=0.03, speculations=tuple(TAU), gain=lambda batch: 1.0):
    """Runs of every batch, repeat and speculation; `gain`: how much faster speculation is than predicted."""
    random, rows = np.random.default_rng(1), []
    for repeat in range(repeats):
        drift = 1 + 0.4 * random.random()
        for batch in batches:
            for speculation in (("", 0), *speculations):
                stretch = drift * (1 + noise * random.standard_normal())
                stretch /= gain(batch) if speculation[1] else 1.0
                rows.append(run(batch, repeat, speculation, stretch=stretch))
    return rows


RIGHT = runs()


def test_rows_are_records():
    assert all(BATCH_RUN.validated(row) for row in RIGHT)
    assert all(REALIGN_SCHEMA.validated(row) for row in kept())


@pytest.mark.parametrize("changes", [{"latency_tokens": [1, 2]}, {"latencies": [0.1]}, {"least_accepted": 10_000},
                                     {"drafter": ""}, {"batch": 0}])  # fmt: skip
def test_contradictions_are_refused(changes):
    with pytest.raises(RecordError):
        BATCH_RUN.validated(run(4, 0, ("n-gram", 2)) | changes)


class TestRealigning:
    def test_shares_are_of_sums_and_drift_cancels(self):
        found = shares(kept())
        assert set(found) == {Keeping(e, w, b) for e, w in [(HUGGING, SCATTER), (HUGGING, REALIGN), (OURS, SCATTER),
                                                            (OURS, "scatter, tree")] for b in (1, 8, 32)}  # fmt: skip
        share = found[Keeping(HUGGING, REALIGN, 32)]
        assert share.estimate == pytest.approx(0.3, rel=0.02) and share.high - share.low < 0.02 and share.n == 15
        assert "repeats" in share.method and "prompt" not in share.method
        rows = [row | {"seconds": [1.0, 3.0] if row["phase"] == "commit" else [10.0, 10.0]} for row in kept()[:2]]
        assert shares(rows)[Keeping(HUGGING, SCATTER, 1)].estimate == pytest.approx(4 / 20)

    def test_a_small_share_is_supported_with_realigning_beside_it(self):
        found = realign_share(R4, kept())
        assert found.outcome is Outcome.SUPPORTED and found.value == pytest.approx(0.001, rel=0.05)
        assert HUGGING in found.note and "realign 0.9" in found.note and "at batch 32" in found.note
        assert "scatter, tree 1.0" in found.note  # a tree's entries move, which R4 does not forbid

    @pytest.mark.parametrize(
        ("rows", "outcome"),
        [
            (kept(scatter=0.02), Outcome.REFUTED),
            (kept(scatter=0.0093, noise=0.15), Outcome.INCONCLUSIVE),
            (kept() + keeping(SCATTER, lambda b: 0.05 if b == 8 else 0.001, "slow engine"), Outcome.REFUTED),
            (kept(repeats=9), Outcome.INCONCLUSIVE),
            (kept(scatter=0.02, repeats=9), Outcome.INCONCLUSIVE),
            ([row for row in kept() if row["way"] != REALIGN], Outcome.INCONCLUSIVE),
            ([row for row in kept() if row["way"] == REALIGN], Outcome.INCONCLUSIVE),
            ([], Outcome.INCONCLUSIVE),
        ],
    )
    def test_other_outcomes(self, rows, outcome):
        assert realign_share(R4, rows).outcome is outcome

    def test_the_worst_batch_decides_and_is_named(self):
        rows = kept() + keeping(SCATTER, lambda b: 0.05 if b == 8 else 0.001, "slow engine")
        found = realign_share(R4, rows)
        assert found.value == pytest.approx(0.05, rel=0.05) and "slow engine, batch 8" in found.note


class TestPairs:
    def test_speedups_pair_by_repeat(self):
        pairs = pair_up(RIGHT, 1)["n-gram", 4]
        assert [row["repeat"] for row in pairs.sd] == [row["repeat"] for row in pairs.ar] == list(range(REPEATS))
        found = pairs.speedup()
        assert found.estimate == pytest.approx(1.5, rel=0.02) and found.high - found.low < 0.1
        assert pairs.predicted() == pytest.approx(1.5)
        assert pair_up(RIGHT, 32)["n-gram", 4].predicted() == pytest.approx(1.5 * 44.2 / 210.6, rel=0.1)

    def test_a_run_without_its_partner_is_refused(self):
        rows = [row for row in RIGHT if row["K"] or row["repeat"] != 3]
        with pytest.raises(RecordError, match=r"no autoregressive run of repeats \[3\] at batch 4"):
            pair_up(rows, 4)

    def test_each_half_is_judged_at_the_choice_of_the_other(self):
        """K = 1 wins the first half by chance alone, K = 2 the second: neither half may profit from its own chance."""
        rows = [run(1, repeat) for repeat in range(4)]
        rows += [run(1, repeat, ("n-gram", 1), stretch=0.5 if repeat < 2 else 2.0) for repeat in range(4)]
        rows += [run(1, repeat, ("n-gram", 2), stretch=2.0 if repeat < 2 else 0.5) for repeat in range(4)]
        best = best_pairs(rows, 1)
        assert [(row["repeat"], row["K"]) for row in best.sd] == [(0, 2), (1, 2), (2, 1), (3, 1)]
        assert [row["repeat"] for row in best.ar] == [0, 1, 2, 3] and best.speedup().estimate < 1
        assert best.speculations == [("n-gram", 2), ("n-gram", 1)]

    def test_one_repeat_chooses_for_itself(self):
        assert best_pairs(runs(repeats=1, noise=0), 1).speculations == [("n-gram", 4)]
        assert best_pairs([run(1, 0)], 1) is None

    def test_growth(self):
        few, many = ([row for row in RIGHT if row["batch"] == batch and not row["K"]] for batch in (1, 8))
        assert growth(few, many).estimate == pytest.approx(8, rel=0.03)
        doubled = [row | {"tokens": 2 * row["tokens"]} for row in many]
        assert growth(few, doubled).estimate == pytest.approx(16, rel=0.03)
        assert growth(few, []) is None


class TestBatches:
    def test_the_crossover_is_found_and_predicted(self):
        found = batch_pays(R5, RIGHT)
        assert found.outcome is Outcome.SUPPORTED
        assert found.note.startswith("SD stops paying at 8; predicted at 8; batch 1 n-gram K=4 1.49 [")
        assert found.value == found.interval.estimate < 1 and found.interval.high < 1 and found.interval.n == REPEATS
        assert "AR at 8 over 1 8" in found.note and "batch 32 4-bit copy K=2" in found.note
        assert predicted_crossover(RIGHT) == 8 and predicted_crossover([row for row in RIGHT if not row["K"]]) is None

    def test_intervals_hold_over_all_batches_at_once(self):
        assert batch_pays(R5, RIGHT).interval.level == pytest.approx(0.95 ** (1 / 6))

    def test_a_batch_that_may_still_pay_is_no_crossover(self):
        """At 4 rows the best one is a little slower than AR, within noise."""
        rows = runs(gain=lambda batch: 0.79 if batch == 4 else 1.0)
        assert best_pairs(rows, 4).speedup().estimate < 1 < best_pairs(rows, 4).speedup().high
        assert batch_pays(R5, rows).note.startswith("SD stops paying at 8")

    def test_a_plateau_is_found_where_speculation_always_pays(self):
        found = batch_pays(R5, runs(gain=lambda batch: 4.0))
        assert found.outcome is Outcome.SUPPORTED and found.note.startswith("not reached within 32; predicted at 8")
        assert found.value > 1 and "SD at 32 over 16" in found.note

    def test_neither_crossover_nor_plateau_refutes(self):
        found = batch_pays(R5, runs(gain=lambda batch: 20.0 if batch == 32 else 4.0))
        assert found.outcome is Outcome.REFUTED

    @pytest.mark.parametrize(
        ("rows", "why"),
        [
            (runs(repeats=9), "9 repeats of 10"),
            (runs(batches=(1, 4, 16)), "1 and 32 must be among them"),
            ([*RIGHT[1:], RIGHT[0] | {"identical": False}], "1 runs emitted other tokens"),
            ([row for row in RIGHT if not row["K"]], "nothing was decoded with speculation"),
            ([row | {"way": GROUPED} for row in RIGHT], "nothing was decoded with speculation"),
            ([], "nothing"),
        ],
    )
    def test_what_is_lacking_is_said(self, rows, why):
        found = batch_pays(R5, rows)
        assert found.outcome is Outcome.INCONCLUSIVE and why in found.note

    def test_rows_grouped_by_length_are_another_matter(self):
        grouped = [row | {"way": GROUPED, "seconds": [1e-6]} for row in RIGHT]
        assert batch_pays(R5, [*RIGHT, *grouped]) == batch_pays(R5, RIGHT)
