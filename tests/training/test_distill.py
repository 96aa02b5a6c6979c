"""Training: it learns, it goes on after an interruption as if there had been none, and it refuses what does not fit."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from specdec_core.evidence.training_records import TRAINING
from specdec_core.training import distill as module
from specdec_core.training.distill import DistillPlan, Trained, TrainingError, distill, learning_rate, unrolled
from specdec_core.training.distilled_loss import Loss
from specdec_core.training.draft_vocabulary import draft_vocabulary
from specdec_core.training.eagle_learner import EagleLearner
from specdec_core.training.held_out import judge
from tests.training.test_served_as_trained import CHECKPOINT, LAYERS, UNROLL, VOCABULARY, learned, written

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = DistillPlan(
    LAYERS, 5, UNROLL, rows=6, steps=8, learning_rate=5e-3, check_every=3, patience=9, held_out_rows=8, seed=4
)


def train(folder: Path, plan: DistillPlan = PLAN, **how: Any) -> Trained:
    return distill(plan, CHECKPOINT, written().corpus, written().features, folder, **how)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("whole")


@pytest.fixture(scope="module")
def whole(folder) -> Trained:
    """A run of the plan without interruption; `folder` holds its state."""
    return train(folder)


def without_clock(curve: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name != "seconds"} for row in curve]


def same(one: Trained, other: Trained) -> bool:
    """To the last bit, but for how long it took."""
    weights = all(torch.equal(values, other.drafter.weights[name]) for name, values in one.drafter.weights.items())
    return weights and without_clock(one.curve) == without_clock(other.curve)


def newest(folder: Path) -> dict[str, torch.Tensor]:
    """The tensors of a state."""
    from safetensors.torch import load_file

    return load_file(folder / module.STATE)


class TestLearning:
    def test_the_loss_falls_and_drafts_become_longer(self):
        curve = learned().curve
        assert curve[-1]["held_out_losses"][0] < 0.9 * curve[0]["held_out_losses"][0]
        assert sum(curve[-1]["held_out_losses"]) < 0.9 * sum(curve[0]["held_out_losses"])
        assert curve[-1]["greedy_tau"] > curve[0]["greedy_tau"] + 0.3
        assert np.mean(curve[-1]["sampled_alpha"]) > np.mean(curve[0]["sampled_alpha"]) + 0.05

    def test_the_curve_has_a_row_a_check(self, whole):
        assert [row["step"] for row in whole.curve] == [0, 3, 6, 8]
        assert [row["epoch"] for row in whole.curve] == [0, 3 / 8, 6 / 8, 1]  # 48 rows, six a batch
        assert whole.curve[0]["loss"] is None and whole.curve[0]["losses"] == []
        # Batches take turns at 2, 3, … steps.
        assert [len(row["losses"]) for row in whole.curve[1:]] == [UNROLL, UNROLL, UNROLL - 1]
        assert all(row["loss"] > 0 for row in whole.curve[1:])
        assert [row["learning_rate"] for row in whole.curve] == [
            learning_rate(PLAN, step) for step in (0, 2, 5, 7)
        ]  # fmt: skip
        assert all(TRAINING.validated(row) == row for row in whole.curve)
        assert all(row["drafted_tau"] is None and row["drafter"] == "eagle" for row in whole.curve)

    def test_a_loss_of_the_curve_is_the_mean_since_the_check_before(self, tmp_path, whole):
        each = train(tmp_path, replace(PLAN, check_every=1)).curve
        for row, steps in zip(whole.curve[1:], ((1, 2, 3), (4, 5, 6), (7, 8)), strict=True):
            assert row["loss"] == pytest.approx(np.mean([each[step]["loss"] for step in steps]))
            for place, mean in enumerate(row["losses"]):
                losses = [each[step]["losses"] for step in steps]
                assert mean == pytest.approx(np.mean([of[place] for of in losses if len(of) > place]))

    def test_the_loss_of_a_batch_in_parts_is_that_of_the_whole(self, monkeypatch, tmp_path, whole):
        # Steps with less anchors weigh more in a part: equal in the first step, near in all of them together.
        monkeypatch.setattr(module, "PARTS", 1)
        plan = replace(PLAN, mixed=False, steps=1, check_every=1)
        alone = train(tmp_path / "alone", plan).curve[1]
        monkeypatch.setattr(module, "PARTS", 4)
        parts = train(tmp_path / "parts", plan).curve[1]
        assert parts["losses"][0] == pytest.approx(alone["losses"][0], rel=1e-5)
        assert parts["loss"] == pytest.approx(alone["loss"], rel=0.01)
        assert parts["held_out_losses"] == pytest.approx(alone["held_out_losses"], rel=0.02)

    def test_decay_is_of_matrices_alone_and_gradients_are_clipped(self, monkeypatch, tmp_path):
        groups, largest = [], []
        original, clip = torch.optim.AdamW, torch.nn.utils.clip_grad_norm_
        monkeypatch.setattr(torch.optim, "AdamW", lambda given, **how: groups.append(given) or original(given, **how))
        monkeypatch.setattr(
            torch.nn.utils, "clip_grad_norm_", lambda given, most: largest.append(most) or clip(given, most)
        )
        train(tmp_path, replace(PLAN, steps=2, weight_decay=0.3, clip=0.7))
        [matrices, vectors] = groups[0]
        assert matrices["weight_decay"] == 0.3 and {p.ndim for p in matrices["params"]} == {2}
        assert vectors["weight_decay"] == 0 and {p.ndim for p in vectors["params"]} == {1}
        assert largest == [0.7, 0.7]

    def test_what_the_plan_says_of_loss_and_precision_reaches_the_learner(self, monkeypatch, tmp_path):
        seen = []
        original = EagleLearner.forward

        def noting(self, batch, unroll, loss, mixed):
            seen.append((unroll, loss, mixed))
            return original(self, batch, unroll, loss, mixed)

        monkeypatch.setattr(EagleLearner, "forward", noting)
        loss = Loss(0.5, 0.1)
        train(tmp_path, replace(PLAN, steps=1, unroll=2, loss=loss, mixed=False))
        assert set(seen) == {(2, loss, False)} and len(seen) == module.PARTS

    def test_the_first_step_can_be_trained_alone_for_a_while(self, monkeypatch, tmp_path):
        seen, original = [], EagleLearner.forward

        def noting(self, batch, unroll, *given):
            seen.append(unroll)
            return original(self, batch, unroll, *given)

        monkeypatch.setattr(EagleLearner, "forward", noting)
        plan = replace(PLAN, first_alone=0.5)
        run = train(tmp_path / "whole", plan)
        turns = [1, 1, 1, 1, 2, 3, 4, 2]
        assert seen == [turn for turn in turns for _ in range(module.PARTS)]
        assert [len(row["losses"]) for row in run.curve] == [0, 1, 3, 4]
        train(tmp_path / "stopped", plan, stop_at=3)
        assert same(train(tmp_path / "stopped", plan), run)

    def test_the_drafted_layer_begins_where_the_committed_one_is_then(self, monkeypatch, tmp_path):
        seen, original = [], module._Run._part

        def noting(self, rows):
            parameters = self.learner.weights
            seen.append(
                [
                    all(torch.equal(parameters[name], parameters[name.replace("drafted/", "committed/")]) and
                        same_moments(self.optimiser.state.get(parameters[name]),
                                     self.optimiser.state.get(parameters[name.replace("drafted/", "committed/")]))
                        for name in parameters if name.startswith("drafted/")),
                    self.step,
                ]
            )  # fmt: skip
            return original(self, rows)

        monkeypatch.setattr(module._Run, "_part", noting)
        train(tmp_path, replace(PLAN, first_alone=0.5))
        alike = {step for same, step in seen if same}
        assert alike == {0, 4}  # as they start, and after the first step was alone for four batches

    def test_the_deepest_step_is_reached_in_turns(self):
        plan = replace(PLAN, steps=10, first_alone=0.25, unroll=4)
        assert [unrolled(plan, step) for step in range(10)] == [1, 1, 1, 2, 3, 4, 2, 3, 4, 2]
        assert {unrolled(replace(plan, unroll=1), step) for step in range(10)} == {1}

    def test_the_losses_of_a_check_are_means_over_the_batches_that_reached_each_step(self):
        batches = [np.array([4.0, 1.0]), np.array([6.0, 2.0, 7.0]), np.array([5.0, 3.0])]
        assert module._means(batches) == (5.0, [2.0, 7.0])
        assert module._means([]) == (None, [])

    def test_the_seed_decides_it(self, tmp_path, whole):
        assert same(train(tmp_path / "again"), whole)
        assert not same(train(tmp_path / "other", replace(PLAN, seed=5)), whole)

    @pytest.mark.parametrize("threads", [1, 4])
    def test_the_number_of_threads_changes_nothing(self, monkeypatch, tmp_path, whole, threads):
        made = []
        original = module.ThreadPoolExecutor
        monkeypatch.setattr(module, "physical_threads", lambda: threads)
        monkeypatch.setattr(module, "ThreadPoolExecutor", lambda count: made.append(count) or original(count))
        assert same(train(tmp_path), whole) and made == [threads]


def same_moments(one: dict | None, other: dict | None) -> bool:
    if not one or not other:
        return not one and not other
    return all(torch.equal(one[key], other[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


class TestTheDrafter:
    def test_it_is_that_of_the_best_check_the_last_of_equals(self, monkeypatch, tmp_path):
        taus = [1.0, 3.0, 3.0, 2.5]
        checked: list[dict[str, torch.Tensor]] = []

        def judged(learner, *given):
            checked.append({name: values.clone() for name, values in learner.named_weights().items()})
            return replace(judge(learner, *given), greedy_tau=taus[len(checked) - 1])

        monkeypatch.setattr(module, "judge", judged)
        drafter = train(tmp_path).drafter
        assert all(torch.equal(drafter.weights[name], values) for name, values in checked[2].items())
        assert not any(torch.equal(drafter.weights["fc.weight"], checked[other]["fc.weight"]) for other in (1, 3))

    def test_it_says_whose_it_is_and_what_it_drafts(self, whole):
        drafter = whole.drafter
        drafter.require_target(CHECKPOINT)
        assert drafter.feature_layers == LAYERS and drafter.config.features == len(LAYERS)
        assert drafter.tokens.tolist() == draft_vocabulary(written().corpus, 5).tolist()
        assert drafter.card["plan"]["seed"] == 4 and written().corpus.fingerprint.startswith(drafter.card["corpus"])

    def test_it_can_be_measured_at_every_check(self, tmp_path):
        seen = []

        def draft(drafter):
            seen.append({name: values.clone() for name, values in drafter.weights.items()})
            return float(len(seen))

        curve = train(tmp_path, replace(PLAN, steps=6), draft=draft).curve
        assert [row["drafted_tau"] for row in curve] == [1, 2, 3]
        assert len({float(weights["fc.weight"].sum()) for weights in seen}) == 3


class TestGoingOn:
    @pytest.mark.parametrize("stops", [[0], [3], [6], [3, 6], [8]])
    def test_a_run_that_stopped_at_a_check_ends_as_one_that_did_not(self, tmp_path, folder, whole, stops):
        for stop in stops:
            assert train(tmp_path, stop_at=stop).curve[-1]["step"] == stop
        assert same(train(tmp_path), whole)
        ours, theirs = newest(tmp_path), newest(folder)
        assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)

    def test_one_that_was_killed_between_checks_repeats_what_it_lost(self, monkeypatch, tmp_path, whole):
        original, done = module._Run.learn, []

        def killed(self, rows):
            if self.step == 5 and not done:
                done.append(True)
                raise KeyboardInterrupt
            original(self, rows)

        monkeypatch.setattr(module._Run, "learn", killed)
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path)
        assert same(train(tmp_path), whole)

    def test_a_run_that_is_done_does_nothing_more(self, monkeypatch, folder, whole):
        monkeypatch.setattr(module._Run, "learn", None)
        monkeypatch.setattr(module._Run, "check", None)
        again = train(folder)
        assert same(again, whole) and again.curve == whole.curve

    def test_without_a_better_check_it_stops(self, monkeypatch, tmp_path):
        taus = iter([1.0, 2.0, 1.5, 2.0, 1.9, 3.0])
        monkeypatch.setattr(module, "judge", lambda *given: replace(judge(*given), greedy_tau=next(taus)))
        curve = train(tmp_path, replace(PLAN, steps=20, check_every=1, patience=3)).curve
        assert [row["greedy_tau"] for row in curve] == [1.0, 2.0, 1.5, 2.0, 1.9]
        assert len(train(tmp_path, replace(PLAN, steps=20, check_every=1, patience=3)).curve) == 5

    def test_a_loss_that_is_no_number_raises_and_keeps_the_state_before(self, monkeypatch, tmp_path, whole):
        original, calls = module._Run._part, []

        def broken(self, rows):
            calls.append(self.step)
            gradients, losses, anchors = original(self, rows)
            return gradients, losses * (np.nan if self.step == 4 else 1), anchors

        with monkeypatch.context() as patch:
            patch.setattr(module._Run, "_part", broken)
            with pytest.raises(TrainingError, match=r"losses \[nan.*\] at step 4: lower the learning rate"):
                train(tmp_path)
        assert max(calls) == 4
        assert train(tmp_path, stop_at=0).curve[-1]["step"] == 3
        assert same(train(tmp_path), whole)


class TestRefusals:
    @pytest.fixture
    def copied(self, tmp_path, folder, whole) -> Path:
        return Path(shutil.copytree(folder, tmp_path / "copy"))

    def test_a_damaged_state(self, copied):
        state = copied / module.STATE
        state.write_bytes(state.read_bytes()[:-50])
        with pytest.raises(TrainingError, match=r"state\.safetensors is damaged .*: remove it to train from the begi"):
            train(copied)

    @pytest.mark.parametrize(
        "changes",
        [{"seed": 9}, {"steps": 9}, {"loss": Loss(0.1)}, {"learning_rate": 1e-3}, {"rows": 5}, {"mixed": False}],
        ids=str,
    )
    def test_the_state_of_another_plan(self, copied, changes):
        before = (copied / module.STATE).read_bytes()
        with pytest.raises(TrainingError, match=r"is of another run \(plan differ\): give another folder, or remove"):
            train(copied, replace(PLAN, **changes))
        assert (copied / module.STATE).read_bytes() == before

    def test_of_another_corpus(self, copied):
        text = written()
        other = replace(text.corpus, tokens=(text.corpus.tokens + 1) % VOCABULARY)
        with pytest.raises(TrainingError, match=r"is of another run \(corpus differ\)"):
            distill(PLAN, CHECKPOINT, other, text.features, copied)

    def test_of_another_target(self, copied):
        other = replace(CHECKPOINT, fingerprint="0")
        with pytest.raises(TrainingError, match=r"is of another run \(target differ\)"):
            distill(PLAN, other, written().corpus, written().features, copied)

    def test_features_of_other_layers(self, tmp_path):
        features = written().features[:, :-1]
        with pytest.raises(TrainingError, match="features of 2 layers for a plan that reads 2: expected those and the"):
            distill(PLAN, CHECKPOINT, written().corpus, features, tmp_path)
        assert not list(tmp_path.iterdir())


class TestTheLearningRate:
    PLAN = replace(PLAN, steps=200, warm_up=0.1, learning_rate=2.0)

    def test_it_rises_evenly_and_falls_as_a_cosine_to_a_hundredth(self):
        rates = np.array([learning_rate(self.PLAN, step) for step in range(201)])
        assert rates[:20] == pytest.approx(0.1 * np.arange(1, 21))
        assert rates.max() == rates[19] == rates[20] == 2.0
        assert (np.diff(rates[20:]) < 0).all()
        assert rates[110] == pytest.approx(2.0 * (0.01 + 0.99 / 2))  # half way
        assert rates[65] == pytest.approx(2.0 * (0.01 + 0.99 * (1 + np.sqrt(0.5)) / 2))
        assert rates[200] == pytest.approx(0.02)

    def test_a_run_of_one_step_has_one(self):
        assert learning_rate(replace(self.PLAN, steps=1), 0) == 2.0

    def test_it_is_what_the_optimiser_uses(self, monkeypatch, tmp_path):
        used = []
        original = torch.optim.AdamW.step
        monkeypatch.setattr(
            torch.optim.AdamW,
            "step",
            lambda self, *given: used.append([group["lr"] for group in self.param_groups]) or original(self, *given),
        )
        plan = replace(PLAN, steps=5, warm_up=0.4)
        train(tmp_path, plan)
        assert used == [[learning_rate(plan, step)] * 2 for step in range(5)]
