"""`train eagle`: from the committed corpus to a drafter's checkpoint, its card, and records of how it learned.

The full profile trains what is shipped (on two CPU cores an hour and a quarter, after 40 minutes for the features of
the corpus); the quick one trains a toy on a small part of it by the same code. Either goes on where an interrupted run
of it ended.

How the shipped one serves can be measured again by itself (`train serve`).
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specdec_core.cache import cache_dir
from specdec_core.drafters.eagle import EagleDrafter
from specdec_core.drafters.eagle_tree import EagleTreeDrafter
from specdec_core.evidence.layout import Layout, known_profile
from specdec_core.evidence.provenance import code_hash, fingerprint
from specdec_core.evidence.records import RecordWriter, find_records, read_records
from specdec_core.evidence.schemas import Schema
from specdec_core.evidence.training_records import ACCEPTANCE, TRAINING
from specdec_core.models.config import LlamaConfig
from specdec_core.models.eagle_checkpoint import EagleCheckpoint, load_eagle, save_eagle
from specdec_core.models.registry import load
from specdec_core.pairs import Opened, eagle_path, open_target
from specdec_core.prompts import Prompt, load_prompts
from specdec_core.protocol import Drafter
from specdec_core.training.acceptance import Arm, acceptance_rows
from specdec_core.training.card import write_card
from specdec_core.training.corpus import Corpus, committed_corpus, only_rows
from specdec_core.training.distill import DistillPlan, Trained, distill
from specdec_core.training.feature_cache import corpus_features
from specdec_core.training.served import held_out_prompts, served_tau

NAME = "eagle"
LEARNING = (
    *(
        f"specdec_core/training/{name}.py"
        for name in ("corpus", "distill", "distilled_loss", "draft_vocabulary", "eagle_batches", "eagle_learner",
                     "feature_cache", "held_out", "served")
    ),
    "specdec_core/models/eagle_checkpoint.py",
)  # fmt: skip
"""What the weights and the record of how they were learned depend on."""

SERVING = (
    "specdec_core/training/acceptance.py",
    "specdec_core/drafters/eagle.py",
    "specdec_core/drafters/eagle_engine.py",
    "specdec_core/drafters/eagle_memory.py",
    "specdec_core/drafters/eagle_tree.py",
    "specdec_core/kernels/eagle_step/__init__.py",
    "specdec_core/kernels/eagle_step/numba.py",
    "specdec_core/kernels/eagle_step/numba_step.py",
    "specdec_core/models/eagle_checkpoint.py",
)
"""What the record of how it serves depends on: measured again, it needs no training again (`serve_eagle`)."""


@dataclass(frozen=True)
class EagleRun:
    """How much to train, and to look at afterwards.

    corpus_rows      of the corpus, all if None.
    prompts          of each domain that the trained drafter serves, all if None; new tokens for each.
    drafted_prompts  held-out prompts of the corpus that are decoded at every check.
    """

    distill: DistillPlan
    corpus_rows: int | None
    prompts: int | None
    max_new_tokens: int
    drafted_prompts: int = 8


PLANS = {
    "quick": EagleRun(
        DistillPlan((), 2048, unroll=3, rows=8, steps=12, learning_rate=5e-3, check_every=6, patience=9,
                    held_out_rows=16),
        corpus_rows=96, prompts=2, max_new_tokens=16, drafted_prompts=4,
    ),
    "full": EagleRun(
        DistillPlan((), 8192, unroll=5, rows=16, steps=2800, learning_rate=5e-3, check_every=200, patience=9,
                    held_out_rows=96, first_alone=0.3),
        corpus_rows=None, prompts=None, max_new_tokens=64,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Result:
    """The checkpoint's file, the curve, and the rows of how it serves."""

    path: Path
    trained: Trained
    served: list[dict[str, Any]]


def train_eagle(
    profile: str, model: str, *, layout: Layout | None = None, progress: bool = False, run: EagleRun | None = None
) -> Result:
    """Train by the profile's plan, save the drafter, and let it serve the prompts of data/prompts.

    The full profile writes the checkpoint and its card under data/checkpoints, the quick one under build/; records go
    where those of notebook 02 go. Raises CorpusError without the corpus of this target (see `train corpus`).
    """
    plan, layout = run or PLANS[known_profile(profile)], layout or Layout()
    plan = replace(plan, distill=fitted(plan.distill, load(model).config))
    layers = plan.distill.feature_layers
    opened = open_target(model, feature_layers=layers)
    reader = open_target(model, feature_layers=(*layers, opened.target.config.layers - 1))
    corpus = committed_corpus(opened)
    if plan.corpus_rows is not None:
        corpus = only_rows(corpus, range(min(plan.corpus_rows, len(corpus))))
    features = corpus_features(corpus, reader, progress)
    del reader
    # Other code, plan or text, other run: its half-done weights are not gone on with.
    run_of = json.dumps([code_hash(LEARNING), asdict(plan.distill), corpus.fingerprint])
    folder = cache_dir(
        f"training/{eagle_path(opened).stem}-{profile}-{hashlib.sha256(run_of.encode()).hexdigest()[:12]}"
    )
    held_out = held_out_prompts(corpus, plan.drafted_prompts)

    def draft(drafter: EagleCheckpoint) -> float:
        return served_tau(drafter, opened, held_out, plan.distill.unroll, plan.max_new_tokens)

    trained = distill(
        plan.distill, opened.checkpoint, corpus, features, folder, name=NAME, draft=draft, progress=progress
    )
    path = eagle_path(opened) if profile == "full" else layout.build / f"{NAME}-toy.safetensors"
    path.parent.mkdir(parents=True, exist_ok=True)
    save_eagle(trained.drafter, path)
    _record(profile, "training", TRAINING, trained.curve, LEARNING, layout)
    trained = replace(trained, drafter=load_eagle(path))  # what serves is what is shipped, in float16
    served = _serve(plan, opened, trained.drafter, progress)
    return _publish(profile, profile, Result(path, trained, served), corpus, layout)


def serve_eagle(
    profile: str, model: str, *, layout: Layout | None = None, progress: bool = False, run: EagleRun | None = None
) -> Result:
    """Let the drafter that is committed for this target serve the prompts again, and write record and card anew.

    For when the engine has changed and the weights have not. Raises CheckpointError without such a drafter, ValueError
    without the record of how it learned.
    """
    plan, layout = run or PLANS[known_profile(profile)], layout or Layout()
    path = eagle_path(open_target(model))
    drafter = load_eagle(path)
    opened = open_target(model, feature_layers=drafter.feature_layers)
    corpus, learned = committed_corpus(opened), drafter.card["corpus"]
    if not corpus.fingerprint.startswith(learned):
        raise ValueError(
            f"{path.name} learned from the corpus {learned}…, and the committed one is {corpus.fingerprint[:16]}…: the "
            "card would tell of another; train it again"
        )
    trained = Trained(drafter, _curve_of(drafter, layout))
    plan = replace(plan, distill=replace(plan.distill, unroll=drafter.card["plan"]["unroll"]))
    served = _serve(plan, opened, drafter, progress)
    beside = path if profile == "full" else layout.build / path.name  # a small part of the prompts is no card
    return _publish(profile, "full", Result(beside, trained, served), corpus, layout)


def _curve_of(drafter: EagleCheckpoint, layout: Layout) -> list[dict[str, Any]]:
    """The recorded curve that the drafter's own check lies on."""
    for place in (layout.records("full"), layout.kept_records):
        for file in find_records(TRAINING, number="02", folder=place, layout=layout):
            curve = read_records(file.path, TRAINING)[1]
            if drafter.card["check"] in curve:
                return curve
    raise ValueError(
        f"no record of how the drafter for {drafter.target} learned under {layout.kept_records}: expected a curve with "
        f"its check at step {drafter.card['check']['step']}; `train eagle` writes it"
    )


def _publish(profile: str, learned_by: str, result: Result, corpus: Corpus, layout: Layout) -> Result:
    """Write the card, beside the result's path, and the record of how the drafter serves; `learned_by` is the profile
    that it was trained with."""
    card = result.path.with_suffix(".md")
    card.parent.mkdir(parents=True, exist_ok=True)
    command = f"python -m specdec_core train eagle --profile {learned_by}"
    write_card(card, result.trained, result.served, corpus, command)
    _record(profile, "acceptance", ACCEPTANCE, result.served, SERVING, layout)
    return result


def _record(
    profile: str, name: str, schema: Schema, rows: list[dict[str, Any]], code: tuple[str, ...], layout: Layout
) -> None:
    with RecordWriter(
        layout.records(profile), f"02_{name}", schema, fingerprint(profile), code=code, layout=layout
    ) as file:
        for row in rows:
            file.append(row)


def fitted(plan: DistillPlan, target: LlamaConfig) -> DistillPlan:
    """The plan for this target: no more draft tokens than it has, and if the plan names no feature layers, one near its
    beginning, its middle and its end (of 30: 1, 14 and 27)."""
    spread = {min(1, target.layers - 1), max(0, target.layers // 2 - 1), max(0, target.layers - 3)}
    layers = plan.feature_layers or tuple(sorted(spread))
    return replace(plan, feature_layers=layers, vocabulary=min(plan.vocabulary, target.vocabulary))


def _serve(plan: EagleRun, opened: Opened, drafter: EagleCheckpoint, progress: bool) -> list[dict[str, Any]]:
    prompts: list[Prompt] = []
    for domain in ("math", "code", "chat"):
        prompts += load_prompts(domain)[: plan.prompts]
    place, weights, k = opened.target.placement, opened.checkpoint, plan.distill.unroll
    forms: dict[str, Drafter] = {
        "chain": EagleDrafter(drafter, weights, place),
        "tree": EagleTreeDrafter(drafter, weights, place),
    }
    arms = [Arm(name, form, k, temperature) for temperature in (0.0, 1.0) for name, form in forms.items()]
    rows = acceptance_rows(opened, arms, prompts, plan.max_new_tokens)
    return list(tqdm(rows, "serving", total=len(arms) * len(prompts), disable=not progress))
