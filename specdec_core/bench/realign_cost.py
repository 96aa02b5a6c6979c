"""Notebook 04: what keeping the accepted tokens costs, by masked scatter and by realigning (claim R4).

One sample is a round of every row: verify n random tokens, then commit a path of random length, the two timed apart.
Realigning is compared on the same model of transformers; our engine is shown with chains, whose commit moves lengths
alone, and with trees, whose commit moves entries. What a sample committed is taken back untimed, so that every sample
finds the same ragged batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import numpy as np
from tqdm import tqdm

from specdec_core.bench.serial_backends import TorchThreads
from specdec_core.bench.sources import PASS, TIMING
from specdec_core.evidence.layout import Layout, known_profile
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.ragged_records import REALIGN
from specdec_core.evidence.records import RecordWriter
from specdec_core.forensics.huggingface_decoders import open_model
from specdec_core.measure.clock import once
from specdec_core.pairs import Opened
from specdec_core.protocol import Target
from specdec_core.published.rectangle import RealigningTarget
from specdec_core.targets.huggingface import HuggingFaceTarget
from specdec_core.topology import Topology, chain, forest, tree

CODE = (
    *PASS,
    *TIMING,
    "specdec_core/protocol.py",
    "specdec_core/targets/padded.py",
    "specdec_core/targets/huggingface.py",
    "specdec_core/targets/huggingface_cache.py",
    "specdec_core/published/rectangle.py",
    "specdec_core/forensics/huggingface_decoders.py",
    "specdec_core/bench/realign_cost.py",
)
"""What the records depend on."""

SCATTER, REALIGN_WAY, SCATTER_TREE = "scatter", "realign", "scatter, tree"
HUGGING = "transformers float32"
NODES = 5
CHAIN, BRANCHES = chain(NODES), tree((-1, 0, 0, 2, 3))
"""Of the tree, the longer branch is accepted: its entries lie behind those of the other one and have to be moved."""


@dataclass(frozen=True)
class RealignPlan:
    """How much to measure.

    context  cached tokens of a row, to which `ragged` adds 0…ragged − 1, another number from row to row.
    """

    batches: tuple[int, ...]
    repeats: int
    context: int = 128
    ragged: int = 16

    def lengths(self, batch: int) -> np.ndarray:
        """Cached tokens of each row, `[B]`."""
        return self.context + 7 * np.arange(batch) % self.ragged


PLANS = {"quick": RealignPlan((1, 8), repeats=3), "full": RealignPlan((1, 4, 8, 16, 32), repeats=15)}


def measure_realigning(
    plan: RealignPlan, opened: Opened, profile: str, layout: Layout | None = None, progress: bool = False
) -> list[dict[str, Any]]:
    """REALIGN rows of every way and batch, recorded as 04_realign; the ways of one batch are interleaved."""
    layout, placement = layout or Layout(), opened.target.placement
    provenance = fingerprint(known_profile(profile), threads=placement.workers, dtype=placement.dtype)
    kept = []
    with (
        TorchThreads(placement.workers),
        RecordWriter(layout.records(profile), "04_realign", REALIGN, provenance, code=CODE, layout=layout) as file,
    ):
        for row in _rows(plan, opened, progress):
            file.append(row)
            kept.append(REALIGN.validated(row))
    return kept


def _rows(plan: RealignPlan, opened: Opened, progress: bool) -> Iterator[dict[str, Any]]:
    model, ours = open_model(opened.checkpoint), opened.target
    engine = f"{ours.placement.engine} {ours.placement.dtype}"
    ways: dict[tuple[str, str], tuple[Target, Topology]] = {
        (SCATTER, HUGGING): (HuggingFaceTarget(model), CHAIN),
        (REALIGN_WAY, HUGGING): (RealigningTarget(model), CHAIN),
        (SCATTER, engine): (ours, CHAIN),
        (SCATTER_TREE, engine): (ours, BRANCHES),
    }
    for batch in tqdm(plan.batches, "realigning", disable=not progress):
        rounds = {name: RaggedRounds(*way, plan.lengths(batch)) for name, way in ways.items()}
        for (way, name), samples in sample_rounds(rounds, plan.repeats, seed=batch).items():
            common = {"way": way, "engine": name, "batch": batch, "n": NODES, "context": plan.context}
            yield {**common, "phase": "commit", "seconds": [commit for _, commit in samples]}
            yield {**common, "phase": "round", "seconds": [verify + commit for verify, commit in samples]}


class RaggedRounds:
    """Rows of these cached `lengths` `[B]`, of which round after round is verified, committed and taken back."""

    def __init__(self, target: Target, shape: Topology, lengths: np.ndarray, seed: int = 0):
        self.target, self.shape, self.lengths = target, shape, lengths
        self._slots = np.arange(len(lengths))
        self._forest = forest([shape] * len(lengths))
        self._deepest = {int(depth): node for node, depth in enumerate(shape.depths)}  # at a depth, the last one
        self.state = target.new_state(len(lengths), int(lengths.max()) + len(shape))
        random = np.random.default_rng(seed)
        target.prefill(self.state, self._slots, [random.integers(0, target.vocabulary, n + 1) for n in lengths])

    def sample(self, tokens: np.ndarray, kept: np.ndarray) -> tuple[float, float]:
        """Seconds of verifying tokens `[B, n]`, and of committing a path of `kept` `[B]` nodes a row.

        A tree that is not so deep keeps its deepest branch.
        """
        paths = [self.shape.path(self._deepest[min(int(k) - 1, max(self._deepest))]) for k in kept]
        flat, times = np.ascontiguousarray(tokens).ravel(), list[float]()

        def arm() -> None:
            times.append(perf_counter())
            verification = self.target.verify(self.state, self._slots, flat, self._forest)
            self.target.synchronise()
            times.append(perf_counter())
            self.target.commit(self.state, verification, paths)
            self.target.synchronise()
            times.append(perf_counter())

        once(arm)
        self.state.rewind(self._slots, self.lengths)
        start, verified, committed = times
        return verified - start, committed - verified


def sample_rounds(
    rounds: dict[tuple[str, str], RaggedRounds], repeats: int, seed: int = 0
) -> dict[tuple[str, str], list[tuple[float, float]]]:
    """(verify, commit) seconds of every arm, a pair a repeat, in random order; one repeat before is for warming up.

    All arms of a repeat are given the same tokens and path lengths, 1…n.
    """
    random, names = np.random.default_rng(seed), list(rounds)
    rows, vocabulary = len(rounds[names[0]].lengths), rounds[names[0]].target.vocabulary
    samples: dict[tuple[str, str], list[tuple[float, float]]] = {name: [] for name in names}
    for _ in range(repeats + 1):
        tokens, kept = random.integers(0, vocabulary, (rows, NODES)), random.integers(1, NODES + 1, rows)
        for index in random.permutation(len(names)):
            samples[names[index]].append(rounds[names[index]].sample(tokens, kept))
    return {name: pairs[1:] for name, pairs in samples.items()}
