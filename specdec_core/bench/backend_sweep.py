"""The sweep of notebook 02: draft/target configurations × K × temperature, standalone curves recorded before it."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from specdec_core.bench.machine import ceiling_row, curve_rows
from specdec_core.bench.serial_backends import CODE as BACKEND_CODE
from specdec_core.bench.serial_backends import BackendFactory, TorchThreads
from specdec_core.bench.sources import DECODING, EAGLE, INT8_PASS, TIMING
from specdec_core.bench.sweep_configurations import (
    BACKENDS,
    build_configurations,
    open_backends,
    sampled_configurations,
)
from specdec_core.bench.sweep_costs import Standalone, costs_of, measure_standalone
from specdec_core.evidence.claims import claim
from specdec_core.evidence.layout import Layout, known_profile
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter
from specdec_core.evidence.schemas import Schema
from specdec_core.evidence.serial_records import ABSENT
from specdec_core.evidence.sweep_claims import attribute_best, by_configuration
from specdec_core.evidence.sweep_records import CEILING, COST_CURVE, SWEEP, conditional_acceptance, pair_up
from specdec_core.measure.sweep import Case, Configuration, sweep
from specdec_core.models.eagle_checkpoint import EagleCheckpoint
from specdec_core.models.tokenizer import Tokenizer
from specdec_core.pairs import Opened
from specdec_core.placement import Placement
from specdec_core.prompts import DOMAINS, Prompt, load_prompts
from specdec_core.protocol import Target
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer

if TYPE_CHECKING:
    import pandas as pd

CODE = tuple(
    dict.fromkeys(
        (
            *DECODING,
            *TIMING,
            *INT8_PASS,
            *EAGLE,
            *BACKEND_CODE,
            "specdec_core/bench/prompt_cache.py",
            "specdec_core/bench/sweep_configurations.py",
            "specdec_core/bench/sweep_costs.py",
            "specdec_core/bench/backend_sweep.py",
        )
    )
)
"""What the records depend on: a verdict replayed from them fails when any of it has changed."""


@dataclass(frozen=True)
class SweepPlan:
    """How much to measure.

    ks        speculation lengths; some configurations have fewer of them.
    tuning    prompts of each domain that the best cell is chosen on; report: those that it is judged on.
    repeats   samples of every point of the cost curves, at these cached `contexts`.
    sampled   tuning and report prompts of each domain at T = 1, where only some configurations are measured, at
              `sampled_ks`.
    """

    ks: tuple[int, ...]
    tuning: int
    report: int
    max_new_tokens: int
    repeats: int
    contexts: tuple[int, ...] = (64, 256)
    backends: tuple[str, ...] = BACKENDS
    sampled: tuple[int, int] = (0, 0)
    sampled_ks: tuple[int, ...] = ()


PLANS = {
    "quick": SweepPlan(
        ks=(1, 4), tuning=1, report=1, max_new_tokens=12, repeats=5, contexts=(64,),
        backends=("numba float32", "numba int8", "llama.cpp Q4_1", "llama.cpp Q4_0"), sampled=(0, 1), sampled_ks=(4,),
    ),
    "full": SweepPlan(
        ks=(1, 2, 3, 4, 6, 8), tuning=1, report=5, max_new_tokens=40, repeats=10, sampled=(1, 4), sampled_ks=(2, 6),
    ),
}  # fmt: skip
"""Quick leaves out the slow backends. Full has as many report prompts as its claims ask for, also at T = 1."""


def planned(profile: str, ks: Sequence[int] = ()) -> SweepPlan:
    """The profile's plan; `ks`, if any, replaces its speculation lengths."""
    plan = PLANS[known_profile(profile)]
    if any(k < 1 for k in ks):
        raise ValueError(f"ks {list(ks)}: expected speculation lengths K ≥ 1, such as [1, 2, 4]")
    if not ks:
        return plan
    chosen = tuple(sorted(set(ks)))
    return replace(plan, ks=chosen, sampled_ks=tuple(k for k in plan.sampled_ks if k in chosen) or chosen[-1:])


def open_targets(target: Transformer) -> dict[str, Transformer]:
    """The same weights on both of our engines, by backend name."""
    return {"numba float32": target, "torch float32": target.placed(Placement("torch", "cpu", "float32"))}


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
    """Records of one run: cost curves of every backend, ceilings of our engines, the sweep itself, and backends that
    this machine lacks."""

    curves: list[dict[str, Any]]
    ceilings: list[dict[str, Any]]
    sweep: list[dict[str, Any]]
    absent: list[dict[str, Any]]


def run_sweep(
    plan: SweepPlan,
    opened: Opened,
    profile: str = "quick",
    *,
    drafter: EagleCheckpoint | None = None,
    factory: BackendFactory | None = None,
    name: str = "02",
    layout: Layout | None = None,
    progress: Callable[[Sequence[Case]], Any] = iter,
) -> SweepRows:
    """Measure standalone costs, then every configuration at every K; all of it goes into records.

    drafter  a trained one, whose feature layers the target was opened with. factory: opens backends other than the
             compiled engine (default: over the opened model's own GGUF file).
    """
    layout, factory = layout or Layout(), factory or BackendFactory(opened)
    provenance = fingerprint(profile, threads=factory.threads)

    def record(what: str, schema: Schema, rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
        kept = []
        with RecordWriter(
            layout.records(profile), f"{name}_{what}", schema, provenance, code=CODE, layout=layout
        ) as file:
            for row in rows:
                file.append(row)
                kept.append(row)
        return kept

    with TorchThreads(factory.threads):
        backends = open_backends(plan.backends, opened, factory)
        targets = backends.targets
        absent = [{"backend": each, "reason": reason} for each, reason in backends.absent.items()]
        configurations = build_configurations(targets, opened, plan.ks, drafter)
        standalone = measure_standalone(targets, configurations, plan.ks, plan.contexts, plan.repeats)
        return SweepRows(
            record("curves", COST_CURVE, (r for b, each in standalone.curves.items() for r in curve_rows(b, b, each))),
            record("ceilings", CEILING, _ceilings(targets, standalone.ceilings)),
            record("sweep", SWEEP, _swept(plan, configurations, standalone, targets, opened.tokenizer, progress)),
            record("absent", ABSENT, absent),
        )


def _ceilings(targets: Mapping[str, Target], measured: Mapping[str, np.ndarray]) -> Iterable[dict[str, Any]]:
    return (ceiling_row(name, each, measured) for name, each in targets.items() if isinstance(each, Transformer))


def _swept(
    plan: SweepPlan,
    configurations: Sequence[Configuration],
    standalone: Standalone,
    targets: Mapping[str, Target],
    tokenizer: Tokenizer,
    progress: Callable[[Sequence[Case]], Any],
) -> Iterator[dict[str, Any]]:
    """Greedy, then at T = 1."""
    prompts = load_prompts()
    greedy = cases_of(prompts, tokenizer, plan.tuning, plan.report)
    at_one = cases_of(prompts, tokenizer, *plan.sampled)
    for temperature, cases, some in (
        (0.0, greedy, list(configurations)),
        (1.0, at_one, sampled_configurations(configurations, plan.sampled_ks)),
    ):
        if cases and some:
            costs = costs_of(some, standalone, targets, cases[0], temperature)
            options = Options(temperature=temperature, max_new_tokens=plan.max_new_tokens, eos=tokenizer.eos_ids)
            yield from sweep(some, costs, cases, plan.ks, options, progress=progress)


def quiet_progress(cases: Sequence[Case]) -> Iterable[Case]:
    """A progress bar that leaves nothing behind, neither on a terminal nor in a notebook's stored outputs."""
    return tqdm(cases, "sweep", leave=False, disable=not sys.stderr.isatty())


def summary_table(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """Each configuration at its best K: acceptance (a_K, and α_i by position), τ, costs in target steps, what a pass
    over a draft takes, speedup with interval, the prediction and whether it is on the right side of 1, and what share
    of the lost speed lies in the verification, in the draft and in the acceptance.

    The best K is chosen on tuning prompts and reported on the others; all prompts, loops included.
    """
    import pandas as pd

    pairs, alphas = pair_up(rows, split="report"), conditional_acceptance(r for r in rows if r["split"] == "report")
    signs = {True: "right", False: "wrong", None: "undecided"}
    table = []
    for one in attribute_best(rows):
        sd = pairs[one.cell].sd
        table.append(
            {
                "configuration": one.cell.configuration,
                "T": one.cell.temperature,
                "K": one.cell.K,
                "a_K": one.acceptance,
                "α_i": " ".join(f"{alpha:.2f}" for alpha in alphas[one.cell]),
                "τ": one.tau,
                "c": one.c,
                "s": one.s,
                "o": one.o,
                "t(draft + 1), ms": 1e3 * sd["verify_seconds"].sum() / sd["target_passes"].sum(),
                "speedup": one.speedup.estimate,
                "low": one.speedup.low,
                "high": one.speedup.high,
                "predicted": one.predicted,
                "sign": signs[one.sign_is_right],
                "slower because": one.cause if one.speedup.high < 1 else "",
                "verification": one.verification_share,
                "draft": one.draft_share,
                "acceptance": one.acceptance_share,
            }
        )
    return pd.DataFrame(table).set_index("configuration")


def compared_with_paper(rows: Sequence[dict[str, Any]]) -> pd.DataFrame:
    """The paper's figures beside ours; they are of other models on another machine."""
    import pandas as pd

    found = attribute_best(rows)
    best = max(found, key=lambda one: one.speedup.estimate)
    slower = [one for one in found if one.speedup.high < 1]
    name = best.cell.configuration
    cells = by_configuration(pair_up(rows, split="report"))[name, best.cell.temperature]
    falling = f"{cells[0].acceptance():.1%} → {cells[-1].acceptance():.1%}, K={cells[0].cell.K} to {cells[-1].cell.K}"
    causes = ", ".join(sorted({one.cause for one in slower})) or "no cause"
    lines = {
        "best speedup": (claim("B1").paper, f"{best.speedup.estimate:.2f}× at K={best.cell.K}, {name}"),
        "a_K from the least K to the greatest": (claim("B2").paper, f"{falling}, {name}"),
        "slower than AR, and why": (claim("B4").paper, f"{len(slower)} of {len(found)}; {causes}"),
    }
    return pd.DataFrame.from_dict(lines, orient="index", columns=["paper", "ours"])
