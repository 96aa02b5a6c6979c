"""The sweep of notebook 02: draft/target configurations × K, with standalone curves recorded before SD runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from specdec_core.bench.machine import ceiling_row, curve_rows, measure_targets
from specdec_core.bench.sources import DECODING
from specdec_core.drafters.layer_skip import LayerSkipDrafter
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.evidence.layout import Layout, known_profile
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter
from specdec_core.evidence.sweep_claims import attribute_best
from specdec_core.evidence.sweep_records import CEILING, COST_CURVE, SWEEP, pair_up
from specdec_core.measure.sweep import Case, Configuration, Costs, measure_draft, measure_overhead, sweep
from specdec_core.models.tokenizer import Tokenizer
from specdec_core.placement import Placement
from specdec_core.prompts import DOMAINS, Prompt, load_prompts
from specdec_core.protocol import Drafter
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer

if TYPE_CHECKING:
    import pandas as pd

CODE = (*DECODING, "specdec_core/bench/backend_sweep.py")
"""What the records depend on: a verdict replayed from them fails when any of it has changed."""


@dataclass(frozen=True)
class SweepPlan:
    """How much to measure.

    ks        speculation lengths.
    tuning    prompts of each domain that the best cell is chosen on; report: those that it is judged on.
    repeats   samples of every point of the cost curves, at these cached `contexts`.
    """

    ks: tuple[int, ...]
    tuning: int
    report: int
    max_new_tokens: int
    repeats: int
    contexts: tuple[int, ...] = (64, 256)
    temperature: float = 0.0


PLANS = {
    "quick": SweepPlan(ks=(1, 2, 4, 8), tuning=1, report=1, max_new_tokens=16, repeats=7),
    "full": SweepPlan(ks=(1, 2, 3, 4, 5, 6, 7, 8), tuning=1, report=5, max_new_tokens=32, repeats=25),
}


def planned(profile: str, ks: Sequence[int] = ()) -> SweepPlan:
    """The profile's plan; `ks`, if any, replaces its speculation lengths."""
    plan = PLANS[known_profile(profile)]
    if any(k < 1 for k in ks):
        raise ValueError(f"ks {list(ks)}: expected speculation lengths K ≥ 1, such as [1, 2, 4]")
    return replace(plan, ks=tuple(sorted(set(ks)))) if ks else plan


def open_targets(target: Transformer) -> dict[str, Transformer]:
    """The same weights on every engine that this machine runs, by backend name."""
    return {"numba float32": target, "torch float32": target.placed(Placement("torch", "cpu", "float32"))}


def build_configurations(targets: dict[str, Transformer]) -> list[Configuration]:
    """Draft/target configurations, the losing ones among them.

    The compiled engine with look-up as chain and tree, with the target's own first third as drafter (cheap, unreliable)
    and with the whole target as its own drafter (always right, as dear as what it saves); plain torch with look-up.
    """
    found = []

    def add(backend: str, drafter_name: str, drafter: Drafter, step_model: Transformer | None = None) -> None:
        name, target = f"{backend.split()[0]} · {drafter_name}", targets[backend]
        found.append(Configuration(name, backend, target.name, drafter_name, target, drafter, step_model))

    compiled, plain = "numba float32", "torch float32"
    target = targets[compiled]
    third = max(1, target.config.layers // 3)
    add(compiled, "n-gram", NGramDrafter())
    add(compiled, "n-gram tree", NGramDrafter(candidates=2))
    add(compiled, f"first {third} layers", LayerSkipDrafter(target, third), target.early_exit(third))
    add(compiled, "itself", ModelDrafter(target, target.vocabulary), target)
    add(plain, "n-gram", NGramDrafter())
    return found


def cases_of(prompts: Sequence[Prompt], tokenizer: Tokenizer, tuning: int, report: int) -> list[Case]:
    """The first so many prompts of each domain and split, as token ids."""
    chosen = []
    for domain in DOMAINS:
        for split, number in (("tuning", tuning), ("report", report)):
            some = [p for p in prompts if p.domain == domain and p.split == split][:number]
            chosen += [Case(p.id, domain, split, tuple(tokenizer.chat(p.messages))) for p in some]
    return chosen


@dataclass(frozen=True)
class SweepRows:
    """Records of one run: cost curves of every configuration, ceilings, and the sweep itself."""

    curves: list[dict[str, Any]]
    ceilings: list[dict[str, Any]]
    sweep: list[dict[str, Any]]


def run_sweep(
    plan: SweepPlan,
    target: Transformer,
    tokenizer: Tokenizer,
    profile: str = "quick",
    *,
    name: str = "02",
    layout: Layout | None = None,
    progress: Callable[[Sequence[Case]], Any] = iter,
) -> SweepRows:
    """Measure curves, ceilings and draft costs, then every configuration at every K; all of it goes into records."""
    layout = layout or Layout()
    targets = open_targets(target)
    configurations = build_configurations(targets)
    cases = cases_of(load_prompts(), tokenizer, plan.tuning, plan.report)
    provenance = fingerprint(profile)

    def writer(what: str, schema) -> RecordWriter:
        return RecordWriter(layout.records(profile), f"{name}_{what}", schema, provenance, code=CODE, layout=layout)

    widths = tuple(sorted({1, *(k + 1 for k in plan.ks), 2 * max(plan.ks) + 1}))
    samples, best = measure_targets(targets, widths, plan.contexts, plan.repeats)
    curves = [row for backend, each in samples.items() for row in curve_rows(backend, backend, each)]
    ceilings = [ceiling_row(backend, each, best) for backend, each in targets.items()]
    with writer("curves", COST_CURVE) as curve_file, writer("ceilings", CEILING) as ceiling_file:
        for row in curves:
            curve_file.append(row)
        for row in ceilings:
            ceiling_file.append(row)

    overheads = {backend: measure_overhead(each, cases[0]) for backend, each in targets.items()}
    costs = {
        c.name: Costs(samples[c.backend].curve(), measure_draft(c, plan.contexts[0]), overheads[c.backend])
        for c in configurations
    }
    rows = []
    options = Options(temperature=plan.temperature, max_new_tokens=plan.max_new_tokens, eos=tokenizer.eos_ids)
    with writer("sweep", SWEEP) as sweep_file:
        for row in sweep(configurations, costs, cases, plan.ks, options, progress=progress):
            sweep_file.append(row)
            rows.append(row)
    return SweepRows(curves, ceilings, rows)


def quiet_progress(cases: Sequence[Case]) -> Iterable[Case]:
    """A progress bar that leaves nothing behind, neither on a terminal nor in a notebook's stored outputs."""
    return tqdm(cases, "sweep", leave=False, disable=not sys.stderr.isatty())


def summary_table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Each configuration at its best K: acceptance, costs in target steps, speedup with interval, cause of a loss.

    The best K is chosen on tuning prompts and reported on the others; all prompts, loops included.
    """
    import pandas as pd

    pairs = pair_up(rows, split="report")
    table = []
    for one in attribute_best(rows):
        cell = pairs[one.cell]
        table.append(
            {
                "configuration": one.cell.configuration,
                "K": one.cell.K,
                "a_K": one.acceptance,
                "τ": cell.sd["tokens"].sum() / cell.sd["target_passes"].sum(),
                "c": one.c,
                "s": one.s,
                "o": one.o,
                "speedup": one.speedup.estimate,
                "low": one.speedup.low,
                "high": one.speedup.high,
                "predicted": cell.predicted_speedup(),
                "slower because": one.cause if one.speedup.high < 1 else "",
            }
        )
    return pd.DataFrame(table).set_index("configuration")
