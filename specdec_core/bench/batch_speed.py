"""Notebook 04: how fast a batch is decoded, with speculation and without, against its size (claim R5).

A repeat draws prompts and decodes them in every arm (batch size × drafter × K), in random order: arms pair by repeat.
Seconds are those of drafting, verifying, accepting and committing. Admissions are left out, being the same in all arms;
that allows a prompt to be prefilled once and copied in. Everything that is predicted is predicted from
standalone curves that were recorded before the first run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from tqdm import tqdm

from specdec_core.bench.prompt_cache import PromptCache
from specdec_core.bench.sources import DECODING, TIMING
from specdec_core.decode import decode, generate, outputs
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.evidence.layout import Layout, known_profile
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.ragged_claims import GROUPED, SCATTER
from specdec_core.evidence.ragged_records import BATCH_CURVE, BATCH_RUN
from specdec_core.evidence.records import RecordWriter
from specdec_core.lengths.fixed import FixedLength
from specdec_core.measure.clock import Arm, interleaved, once
from specdec_core.measure.curves import TimeCurve, curve_arms
from specdec_core.models.rounding import rounded
from specdec_core.pairs import Opened
from specdec_core.prompts import DOMAINS, held_out, load_prompts
from specdec_core.protocol import Drafter, Round, Target
from specdec_core.published.grouping import grouped
from specdec_core.published.ways import POOL
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer

CODE = (
    *DECODING,
    *TIMING,
    "specdec_core/models/rounding.py",
    "specdec_core/published/grouping.py",
    "specdec_core/bench/prompt_cache.py",
    "specdec_core/bench/batch_speed.py",
)
"""What the records depend on."""

TARGET, LOOKUP, COPY, BITS = "target", "n-gram", "4-bit copy", 4
Prompt = tuple[int, ...]
Speculation = tuple[str, int]
"""Drafter and K; NONE is autoregressive decoding."""
NONE: Speculation = ("", 0)


@dataclass(frozen=True)
class BatchPlan:
    """How much to measure.

    batches    rows that are decoded together; a run decodes at least `least_rows` prompts, and a queue behind the batch
               while all together are at most `most_queued`.
    ks         speculation lengths of n-gram look-up.
    copy_ks    those of the target's 4-bit copy, at `copy_batches` only: it runs in float32, where one step of it costs
               as much as the target's, so that it shows how unevenly rows accept, and cannot pay.
    prompts    of each domain that repeats draw from.
    grouped    batches at which rows are also grouped by length (published/grouping.py), at the longest of these ks
               below 5, from a pool as large as the run.
    samples    of every point of the standalone curves.
    """

    batches: tuple[int, ...]
    ks: tuple[int, ...]
    copy_batches: tuple[int, ...]
    copy_ks: tuple[int, ...]
    grouped: tuple[int, ...]
    repeats: int
    max_new_tokens: int
    least_rows: int
    most_queued: int
    prompts: int
    samples: int

    @property
    def arms(self) -> list[tuple[str, int, Speculation]]:
        """(way, batch, how it speculates)."""
        arms = [(SCATTER, batch, one) for batch in self.batches for one in (NONE, *((LOOKUP, k) for k in self.ks))]
        arms += [(SCATTER, batch, (COPY, k)) for batch in self.copy_batches for k in self.copy_ks]
        return arms + [(GROUPED, batch, (LOOKUP, max(k for k in self.ks if k < 5))) for batch in self.grouped]

    def rows(self, batch: int) -> int:
        """Prompts of a run: a queue behind the batch, as far as that does not take too long."""
        return max(batch, self.least_rows, min(POOL * batch, self.most_queued))

    @property
    def widths(self) -> list[int]:
        """Nodes a row that the arms verify: 1 and every K + 1."""
        return sorted({k + 1 for _, _, (_, k) in self.arms})


PLANS = {
    "quick": BatchPlan((1, 4, 16), (4,), (), (), (4,), repeats=3, max_new_tokens=12, least_rows=4, most_queued=8,
                       prompts=6, samples=3),
    "full": BatchPlan((1, 2, 4, 8, 16, 32), (1, 2, 4, 7), (1, 4, 16), (4,), (4, 8), repeats=10, max_new_tokens=24,
                      least_rows=8, most_queued=24, prompts=36, samples=9),
}  # fmt: skip


@dataclass(frozen=True)
class BatchRows:
    """Records of BATCH_CURVE and BATCH_RUN."""

    curves: list[dict[str, Any]]
    runs: list[dict[str, Any]]


def measure_batches(
    plan: BatchPlan, opened: Opened, profile: str, layout: Layout | None = None, progress: bool = False
) -> BatchRows:
    """Measure what the plan names, greedy, on the opened target; recorded as 04_batch_curve and 04_batch_runs."""
    layout, placement = layout or Layout(), opened.target.placement
    provenance = fingerprint(known_profile(profile), threads=placement.workers, dtype=placement.dtype)
    models = {TARGET: opened.target}
    if plan.copy_ks:
        models[COPY] = Transformer(rounded(opened.checkpoint, BITS), placement)
    prompts = _prompts(opened, plan.prompts)
    context = int(np.median([len(p) for each in prompts.values() for p in each])) + plan.max_new_tokens // 2
    rows = BatchRows([], [])
    for name, schema, kept, found in (
        ("04_batch_curve", BATCH_CURVE, rows.curves, _curve_rows(plan, models, context)),
        ("04_batch_runs", BATCH_RUN, rows.runs, _run_rows(plan, models, prompts, rows.curves, progress)),
    ):
        with RecordWriter(layout.records(profile), name, schema, provenance, code=CODE, layout=layout) as file:
            for row in found:
                file.append(row)
                kept.append(schema.validated(row))
    return rows


def _curve_rows(plan: BatchPlan, models: Mapping[str, Transformer], context: int) -> Iterator[dict[str, Any]]:
    """Records of BATCH_CURVE, all interleaved: the target's batches at 1 and K + 1 nodes a row, the copy's at 1."""
    arms: dict[tuple[str, int, int], Arm] = {}
    for name, batches, widths in ((TARGET, plan.batches, plan.widths), (COPY, plan.copy_batches, [1])):
        for batch in batches if name in models else ():
            found = curve_arms(models[name], widths, (context,), rows=batch)
            arms |= {(name, batch, n): arm for (_, n), arm in found.items()}
    seconds = interleaved({str(key): arm for key, arm in arms.items()}, plan.samples)
    for name, batch, n in arms:
        common = {"engine": _engine(models, name), "batch": batch, "n": n, "context": context}
        yield {**common, "seconds": seconds[str((name, batch, n))]}


def _run_rows(
    plan: BatchPlan,
    models: Mapping[str, Transformer],
    prompts: Mapping[str, Sequence[Prompt]],
    curves: Sequence[Mapping[str, Any]],
    progress: bool,
) -> Iterator[dict[str, Any]]:
    """Records of BATCH_RUN. `curves` are those of the same process."""
    cached = {name: PromptCache(model) for name, model in models.items()}
    times = {n: PassTimes.of([row for row in curves if row["engine"] == _engine(models, n)]) for n in models}
    drafters: dict[str, Drafter] = {LOOKUP: NGramDrafter()}
    if COPY in models:
        drafters[COPY] = ModelDrafter(cached[COPY], models[TARGET].vocabulary)
    options = Options(max_new_tokens=plan.max_new_tokens)  # no end tokens: all arms emit as many tokens
    alone: dict[Prompt, tuple[int, ...]] = {}
    for repeat in tqdm(range(plan.repeats), "batches", disable=not progress):
        random = np.random.default_rng(repeat)
        chosen = _draw(prompts, max(map(plan.rows, plan.batches)), random)
        for prompt in chosen:
            if prompt not in alone:
                alone[prompt] = generate(models[TARGET], [Request(prompt, options)])[0].tokens
        for index in random.permutation(len(plan.arms)):
            way, batch, (drafter, k) = plan.arms[index]
            some = chosen[: plan.rows(batch)]
            requests = [Request(prompt, options, FixedLength(k) if k else None) for prompt in some]
            rounds = timed_rounds(way, cached[TARGET], requests, drafters.get(drafter), batch)
            emitted = [output.tokens for output in outputs(rounds, len(requests))]
            yield {
                "engine": _engine(models, TARGET),
                "way": way,
                "drafter": drafter,
                "K": k,
                "batch": batch,
                "repeat": repeat,
                "predicted_seconds": predict(rounds, times[TARGET], times.get(drafter)),
                "identical": emitted == [alone[prompt] for prompt in some],
                **summary(rounds),
            }


def _engine(models: Mapping[str, Transformer], name: str) -> str:
    placement = models[TARGET].placement
    return f"{placement.engine} {placement.dtype}" + (f", {name}" if name != TARGET else "")


def timed_rounds(
    way: str, target: Target, requests: Sequence[Request], drafter: Drafter | None, batch: int
) -> list[Round]:
    """Rounds of these requests, `batch` rows each, decoded after a rest and without the garbage collector."""
    rounds: list[Round] = []
    if way == GROUPED:
        once(lambda: rounds.extend(grouped(target, requests, drafter, batch=batch, pool=len(requests))))
    else:
        once(lambda: rounds.extend(decode(target, requests, drafter, slots=batch)))
    return rounds


def summary(rounds: Sequence[Round]) -> dict[str, Any]:
    """What the rounds of one run did and took: the fields of BATCH_RUN that follow from them.

    A row's time runs from the end of its round before (at first: from the start of the round that it joined), and is
    shared among the tokens that it emits.
    """
    rows = [row for each in rounds for row in each.rows]
    now, ends, waits, completions = 0.0, dict[int, float](), Counter[float](), list[float]()
    for each in rounds:
        start, now = now, now + each.seconds.total - each.seconds.admit
        for row in each.rows:
            waits[_rounded((now - ends.get(row.key, start)) / len(row.emitted))] += len(row.emitted)
            ends[row.key] = now
            if row.finished:
                completions.append(_rounded(now))
    return {
        "rows": len(ends),
        "tokens": sum(len(row.emitted) for row in rows),
        "target_passes": len(rounds),
        "row_rounds": len(rows),
        "drafted": sum(sum(row.drafted) for row in rows),
        "accepted": sum(row.accepted for row in rows),
        "least_accepted": sum(len(each.rows) * min(row.accepted for row in each.rows) for each in rounds),
        "seconds": [now],
        "latencies": list(waits),
        "latency_tokens": list(waits.values()),
        "completions": completions,
    }


@dataclass(frozen=True)
class PassTimes:
    """Seconds of a pass over a batch: as measured where that batch was, else by its number of nodes alone.

    exact  (rows, nodes of all rows) → median seconds.
    pooled  medians by the number of nodes, however many rows they belong to.
    """

    exact: Mapping[tuple[int, int], float]
    pooled: TimeCurve

    @classmethod
    def of(cls, curves: Sequence[Mapping[str, Any]]) -> PassTimes:
        """From records of BATCH_CURVE at one context."""
        by_nodes: dict[int, list[float]] = {}
        for row in curves:
            by_nodes.setdefault(row["batch"] * row["n"], []).extend(row["seconds"])
        nodes = tuple(sorted(by_nodes))
        medians = np.array([[np.median(by_nodes[n]) for n in nodes]])
        exact = {(row["batch"], row["batch"] * row["n"]): float(np.median(row["seconds"])) for row in curves}
        return cls(exact, TimeCurve(nodes, (curves[0]["context"],), medians))

    def at(self, rows: int, nodes: int) -> float:
        return self.exact.get((rows, nodes), self.pooled.at(nodes, self.pooled.contexts[0]))


def predict(rounds: Sequence[Round], times: PassTimes, drafts: PassTimes | None) -> float:
    """Seconds of these rounds' passes by standalone curves: the target's, and the drafter's where it is a model.

    A draft step is a pass over a node of each row that still drafts. Look-ups, accepting, committing count nothing.
    """
    total = sum(times.at(len(each.rows), each.nodes) for each in rounds)
    if drafts is not None:
        for each in rounds:
            depths = np.array([len(row.drafted) for row in each.rows])
            drafting = (int((depths >= step).sum()) for step in range(1, depths.max() + 1))
            total += sum(drafts.at(rows, rows) for rows in drafting)
    return total


def _prompts(opened: Opened, count: int) -> dict[str, list[Prompt]]:
    """The first so many held-out prompts of each domain as token ids."""
    prompts, chat = held_out(load_prompts()), opened.tokenizer.chat
    return {d: [tuple(chat(p.messages)) for p in prompts if p.domain == d][:count] for d in DOMAINS}


def _draw(prompts: Mapping[str, Sequence[Prompt]], count: int, random: np.random.Generator) -> list[Prompt]:
    """So many prompts, the domains in turn, so that the first few are as mixed as all."""
    decks = [[each[index] for index in random.permutation(len(each))] for each in prompts.values()]
    return [deck[place] for place in range(max(map(len, decks))) for deck in decks if place < len(deck)][:count]


def _rounded(seconds: float) -> float:
    """To four digits: lists of times are most of a record."""
    return float(f"{seconds:.4g}")
