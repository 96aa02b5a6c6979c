"""Training a drafter on its target's text: the loop, its schedule, checks on held-out rows, and going on after a kill.

Everything that the loop needs to go on lies in one safetensors file (weights, the optimiser's moments, the curve so
far); batches depend on the seed and the step alone. So an interrupted run ends with the weights of one that was not.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from tqdm import tqdm

from specdec_core.cache import atomic_write
from specdec_core.evidence.training_records import best_check
from specdec_core.models.checkpoints import Checkpoint
from specdec_core.models.eagle_checkpoint import EagleCheckpoint, eagle_config
from specdec_core.models.errors import safetensors_as_os_error
from specdec_core.placement import physical_threads
from specdec_core.training.corpus import Corpus
from specdec_core.training.distilled_loss import Loss
from specdec_core.training.draft_vocabulary import draft_vocabulary
from specdec_core.training.eagle_batches import batch_of, training_order
from specdec_core.training.eagle_learner import EagleLearner, feature_scale
from specdec_core.training.held_out import Check, check_rows, judge

STATE = "state.safetensors"

PARTS = 4
"""Parts of a batch, worked on side by side by one thread each: faster than one part on all cores, whose threads would
wait for one another at every operation. The number is fixed, so that weights do not depend on the machine's cores."""


class TrainingError(ValueError):
    """A run that cannot go on as asked."""


@dataclass(frozen=True)
class DistillPlan:
    """How a drafter is trained.

    feature_layers  the target's layers whose outputs it reads.
    vocabulary      D, tokens that it can draft.
    learning_rate   the largest, of AdamW; weight_decay is that of matrices.
    held_out_rows   answers that a check looks at, half of them greedy.
    mixed           matrix products in bfloat16.
    unroll          drafting steps that are trained together, at most: batches take turns at 2, 3, … of them, since the
                    deeper a step is, the less depends on it, and each costs as much as the first.
    first_alone     share of the batches that train the first step alone: the others lean on it. The drafted layer
                    starts where the committed one is then.
    rows, steps     rows of a batch, and batches.
    warm_up         share of the steps in which the learning rate rises; it then falls as a cosine, to a hundredth.
    clip            largest norm of the gradient.
    check_every     steps between checks on held-out rows, each of which keeps a state to go on from.
    patience        checks in a row without a better τ after which training stops.
    """

    feature_layers: tuple[int, ...]
    vocabulary: int
    unroll: int
    rows: int
    steps: int
    learning_rate: float
    check_every: int
    patience: int
    held_out_rows: int
    first_alone: float = 0.0
    warm_up: float = 0.04
    weight_decay: float = 0.05
    clip: float = 1.0
    seed: int = 1
    mixed: bool = True
    loss: Loss = field(default_factory=Loss)


@dataclass(frozen=True)
class Trained:
    """What came of it: the drafter of the best check, and the curve (rows of evidence.training_records.TRAINING)."""

    drafter: EagleCheckpoint
    curve: list[dict[str, Any]]


Draft = Callable[[EagleCheckpoint], float]
"""τ of a drafter by decoding with it."""


def distill(
    plan: DistillPlan,
    target: Checkpoint,
    corpus: Corpus,
    features: np.ndarray,
    folder: Path,
    *,
    name: str = "eagle",
    draft: Draft | None = None,
    stop_at: int | None = None,
    progress: bool = False,
) -> Trained:
    """Train, or go on with the run that `folder` holds, to the end of the plan or to step `stop_at`.

    features  `[tokens, F + 1, H]` float16 of the plan's layers and, behind them, the target's last layer
              (feature_cache.corpus_features).
    draft     measures τ by real drafting at every check.

    Raises TrainingError for features of other layers, or for a folder that holds a run of another plan or corpus.
    """
    if features.shape[1] != len(plan.feature_layers) + 1:
        raise TrainingError(
            f"features of {features.shape[1]} layers for a plan that reads {len(plan.feature_layers)}: expected those "
            "and the target's last layer behind them"
        )
    run = _Run(plan, target, corpus, features, Path(folder), name, draft)
    run.restore()
    if not run.curve:
        run.check()
    last = min(plan.steps, stop_at if stop_at is not None else plan.steps)
    with tqdm(total=plan.steps, initial=run.step, desc=name, disable=not progress) as bar:
        for rows in run.batches():
            if run.step >= last or run.is_over:
                break
            run.learn(rows)
            bar.update()
            if run.step % plan.check_every == 0 or run.step == plan.steps:
                run.check()
                newest = run.curve[-1]
                bar.set_postfix_str(f"loss {newest['loss']:.3f}, held-out τ {newest['greedy_tau']:.2f}")
    return Trained(run.best(), run.curve)


class _Run:
    """Weights, optimiser and curve of one run."""

    def __init__(
        self, plan: DistillPlan, target: Checkpoint, corpus: Corpus, features: np.ndarray, folder: Path, name: str,
        draft: Draft | None,
    ):  # fmt: skip
        self.plan, self.target, self.corpus, self.features, self.folder = plan, target, corpus, features, folder
        self.name, self.draft = name, draft
        self.step, self.seconds, self.curve = 0, 0.0, list[dict[str, Any]]()
        tokens = torch.from_numpy(draft_vocabulary(corpus, plan.vocabulary))
        config = eagle_config(target, len(plan.feature_layers), plan.vocabulary)
        self.learner = EagleLearner(config, target, tokens, feature_scale(features), plan.seed)
        matrices = [p for p in self.learner.parameters() if p.ndim > 1]
        vectors = [p for p in self.learner.parameters() if p.ndim == 1]
        groups = [{"params": matrices, "weight_decay": plan.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self.optimiser = torch.optim.AdamW(groups, lr=plan.learning_rate, betas=(0.9, 0.95))
        self.held_out = check_rows(corpus, plan.held_out_rows)
        self._kept = self.learner.named_weights()
        self._losses: list[np.ndarray] = []
        self._workers = ThreadPoolExecutor(min(PARTS, physical_threads()))

    def batches(self):
        """Rows of the batches that are left."""
        return training_order(self.corpus, self.corpus.training, self.plan.rows, self.plan.seed, self.step)

    @property
    def is_over(self) -> bool:
        """Whether the newest checks brought nothing better, since all steps are trained."""
        taus = [row["greedy_tau"] for row in self.curve if row["step"] >= first_unrolled(self.plan)]
        if not taus:
            return False
        return len(taus) - 1 - int(np.argmax(taus)) >= self.plan.patience

    def learn(self, rows: np.ndarray) -> None:
        start = perf_counter()
        if self.step == first_unrolled(self.plan):
            self._begin_drafting()
        for group in self.optimiser.param_groups:
            group["lr"] = learning_rate(self.plan, self.step)
        parts = [part for place in range(PARTS) if len(part := rows[place::PARTS])]
        found = list(self._workers.map(self._part, parts))
        weights = np.array([anchors for *_, anchors in found], np.float64)
        weights /= weights.sum()
        losses = sum(weight * each for weight, (_, each, _) in zip(weights, found, strict=True))
        if not np.isfinite(losses).all():
            raise TrainingError(f"losses {losses} at step {self.step}: lower the learning rate")
        for place, parameter in enumerate(self.learner.parameters()):
            parts_of = [
                weight * of_part
                for weight, (gradients, *_) in zip(weights, found, strict=True)
                if (of_part := gradients[place]) is not None  # the drafted layer's, while the first step is alone
            ]
            parameter.grad = torch.stack(parts_of).sum(0) if parts_of else None
        torch.nn.utils.clip_grad_norm_(self.learner.parameters(), self.plan.clip)
        self.optimiser.step()
        self._losses.append(losses)
        self.step += 1
        self.seconds += perf_counter() - start

    def _begin_drafting(self) -> None:
        """The drafted layer goes on from the committed one's weights and moments."""
        self.learner.begin_drafting()
        for name, parameter in self.learner.weights.items():
            known = self.optimiser.state.get(self.learner.weights[name.replace("drafted/", "committed/")])
            if name.startswith("drafted/") and known:
                self.optimiser.state[parameter] = {key: values.clone() for key, values in known.items()}

    def _part(self, rows: np.ndarray) -> tuple[tuple[Tensor | None, ...], np.ndarray, int]:
        """Gradients, losses (the weighted mean, then each step's) and anchors of a part of a batch."""
        torch.set_num_threads(1)
        unroll = unrolled(self.plan, self.step)
        batch = batch_of(self.corpus, self.features, rows, unroll)
        loss, losses = self.learner(batch, unroll, self.plan.loss, self.plan.mixed)
        gradients = torch.autograd.grad(loss, list(self.learner.parameters()), allow_unused=True)
        return gradients, np.array([float(loss.detach()), *losses.tolist()]), int(batch.real.sum())

    def check(self) -> None:
        """Look at held-out rows, write the curve's next row, and keep a state to go on from."""
        found: Check = judge(self.learner, self.corpus, self.features, self.held_out, self.plan)
        mean, losses = _means(self._losses)
        batches = max(1, len(self.corpus.training) // self.plan.rows)
        self.curve.append(
            {
                "drafter": self.name,
                "step": self.step,
                "epoch": self.step / batches,
                "seconds": round(self.seconds, 1),
                "learning_rate": learning_rate(self.plan, max(0, self.step - 1)),
                "loss": mean,
                "losses": losses,
                "held_out_losses": found.losses,
                "greedy_alpha": found.greedy_alpha,
                "greedy_tau": found.greedy_tau,
                "sampled_alpha": found.sampled_alpha,
                "drafted_tau": self.draft(self.as_drafter(self.learner.named_weights())) if self.draft else None,
            }
        )
        self._losses = []
        if found.greedy_tau >= max(row["greedy_tau"] for row in self.curve):
            self._kept = {name: tensor.clone() for name, tensor in self.learner.named_weights().items()}
        self.save()

    def as_drafter(self, weights: dict[str, Tensor], check: dict[str, Any] | None = None) -> EagleCheckpoint:
        """These weights as a drafter; `check`: the row of the curve that belongs to them."""
        card = {"plan": asdict(self.plan), "corpus": self.corpus.fingerprint[:16], "check": check}
        return EagleCheckpoint(
            self.learner.config, weights, self.learner.tokens, self.target.name, self.target.fingerprint,
            self.plan.feature_layers, card,
        )  # fmt: skip

    def best(self) -> EagleCheckpoint:
        """The drafter of the check with the largest τ on held-out rows, the last of equal ones."""
        return self.as_drafter(self._kept, dict(best_check(self.curve)))

    def _identity(self) -> dict[str, Any]:
        plan = json.loads(json.dumps(asdict(self.plan)))
        return {"plan": plan, "corpus": self.corpus.fingerprint, "target": self.target.fingerprint}

    def save(self) -> None:
        stored = {}
        for name, parameter in self.learner.weights.items():
            stored[f"weights.{name}"] = parameter.detach()
            stored[f"best.{name}"] = self._kept[name.replace("/", ".")]
            for key, values in self.optimiser.state.get(parameter, {}).items():
                stored[f"{key}.{name}"] = values.detach().clone()
        header = {**self._identity(), "step": self.step, "seconds": self.seconds, "curve": self.curve}
        self.folder.mkdir(parents=True, exist_ok=True)
        with atomic_write(self.folder / STATE) as temporary, safetensors_as_os_error():
            save_file({k: v.contiguous() for k, v in stored.items()}, temporary, metadata={"run": json.dumps(header)})

    def restore(self) -> None:
        path = self.folder / STATE
        if not path.is_file():
            return
        try:
            with safe_open(path, framework="pt") as file:
                header = json.loads((file.metadata() or {}).get("run", "{}"))
                stored = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        except (SafetensorError, OSError, ValueError) as error:
            raise TrainingError(f"{path} is damaged ({error}): remove it to train from the beginning") from None
        if (given := {key: header.get(key) for key in self._identity()}) != self._identity():
            changed = [key for key, value in self._identity().items() if given[key] != value]
            raise TrainingError(
                f"{path} is of another run ({', '.join(changed)} differ): give another folder, or remove it"
            )
        self.step, self.seconds, self.curve = header["step"], header["seconds"], header["curve"]
        with torch.no_grad():
            for name, parameter in self.learner.weights.items():
                parameter.copy_(stored[f"weights.{name}"])
                self._kept[name.replace("/", ".")] = stored[f"best.{name}"]
                keys = [key for key in ("step", "exp_avg", "exp_avg_sq") if f"{key}.{name}" in stored]
                if keys:  # none before a parameter's first gradient
                    self.optimiser.state[parameter] = {key: stored[f"{key}.{name}"] for key in keys}


def first_unrolled(plan: DistillPlan) -> int:
    """The first step (from 0) whose batch is unrolled."""
    return math.ceil(plan.first_alone * plan.steps)


def unrolled(plan: DistillPlan, step: int) -> int:
    """Drafting steps that the batch of step `step` (from 0) trains: 1 at first, then 2, 3, …, U, 2, 3, …"""
    since = step - first_unrolled(plan)
    return 1 if since < 0 or plan.unroll == 1 else 2 + since % (plan.unroll - 1)


def _means(batches: list[np.ndarray]) -> tuple[float | None, list[float]]:
    """Of batches' losses (the weighted mean, then each step's): the mean of the former, and of each step over the
    batches that unrolled it."""
    if not batches:
        return None, []
    deepest = max(len(each) for each in batches)
    steps = [float(np.mean([each[place] for each in batches if len(each) > place])) for place in range(deepest)]
    return steps[0], steps[1:]


def learning_rate(plan: DistillPlan, step: int) -> float:
    """Of step `step` (from 0): a rise over the warm-up, then a cosine down to a hundredth."""
    warm = max(1, round(plan.warm_up * plan.steps))
    if step < warm:
        return plan.learning_rate * (step + 1) / warm
    share = (step - warm) / max(1, plan.steps - warm)
    return plan.learning_rate * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * share)))
