"""Notebook 00: t(n) of both engines against the ceilings of this machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from specdec_core.bench.engine import ENGINE, floor_rows, lookup_rows, measure_engine
from specdec_core.bench.machine import WIDTHS, ceiling_row, curve_rows, measure_targets
from specdec_core.bench.sources import DECODING, TIMING
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter
from specdec_core.evidence.sweep_records import CEILING, COST_CURVE
from specdec_core.measure.sweep import Case
from specdec_core.pairs import Opened
from specdec_core.prompts import held_out, load_prompts
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer

if TYPE_CHECKING:
    import pandas as pd

CODE = (*DECODING, *TIMING, "specdec_core/bench/engine.py", "specdec_core/bench/setup.py")
"""What the records depend on."""


@dataclass(frozen=True)
class SetupPlan:
    """How much to measure: widths n, cached context lengths, repeats of each."""

    widths: tuple[int, ...] = WIDTHS
    contexts: tuple[int, ...] = (128,)
    repeats: int = 15
    prompts: int = 10  # code prompts for n-gram look-up
    max_new_tokens: int = 40


PLANS = {"quick": SetupPlan(), "full": SetupPlan(contexts=(128, 512), repeats=30, prompts=36, max_new_tokens=64)}


@dataclass(frozen=True)
class SetupRows:
    """Records of one run: 'cost_curve', 'ceiling' and 'engine' rows."""

    curves: list[dict[str, Any]]
    ceilings: list[dict[str, Any]]
    engine: list[dict[str, Any]]


def measure_setup(
    plan: SetupPlan,
    opened: Opened,
    targets: Mapping[str, Transformer],
    profile: str,
    layout: Layout | None = None,
) -> SetupRows:
    """Measure and record t(n), the ceilings, and what is demanded of the compiled engine (the first of `targets`)."""
    layout = layout or Layout()
    samples, best = measure_targets(targets, plan.widths, plan.contexts, plan.repeats)
    curves = [row for name, each in samples.items() for row in curve_rows(name, name, each)]
    ceilings = [ceiling_row(name, target, best) for name, target in targets.items()]
    (first, ours), (_, peer), *_ = targets.items()
    engine = floor_rows(samples[first].seconds, best["read"], ceilings[0])
    engine += measure_engine(opened.checkpoint, ours, peer, max(3, plan.repeats // 3))
    prompts = held_out(load_prompts("code"))[: plan.prompts]
    cases = [Case(p.id, p.domain, p.split, tuple(opened.tokenizer.chat(p.messages))) for p in prompts]
    options = Options(max_new_tokens=plan.max_new_tokens, eos=opened.tokenizer.eos_ids)
    engine += lookup_rows(ours, samples[first].curve(), cases, options)
    for name, schema, rows in (
        ("00_cost_curve", COST_CURVE, curves),
        ("00_ceiling", CEILING, ceilings),
        ("00_engine", ENGINE, engine),
    ):
        with RecordWriter(
            layout.records(profile), name, schema, fingerprint(profile), code=CODE, layout=layout
        ) as file:
            for row in rows:
                file.append(row)
    return SetupRows(curves, ceilings, engine)


def engine_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Demands on the engine, their thresholds, and what was measured."""
    import pandas as pd

    table = pd.DataFrame(rows).set_index("what")
    table["demanded"] = table["bound"] + " " + table["threshold"].map("{:g}".format)
    return table[["demanded", "ratio", "low", "high", "reached", "samples"]]


def curve_table(curves: Sequence[Mapping[str, Any]], ceilings: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """t(n) in memory floors (weight bytes ÷ read bandwidth), a row an engine and context, a column a width.

    The row 'limit' is max(memory, arithmetic) of the machine, in the same unit.
    """
    import pandas as pd

    floors = {row["configuration"]: row["weight_bytes"] / row["bytes_per_second"] for row in ceilings}
    table = pd.DataFrame(curves)
    table["floors"] = table["seconds_median"] / table["configuration"].map(floors)
    table = table.pivot_table(index=["configuration", "context"], columns="n", values="floors")
    for row in ceilings:
        name, floor = row["configuration"], floors[row["configuration"]]
        arithmetic = row["flops_per_token"] / row["flops_per_second"] / floor
        table.loc[(f"{name}, limit", 0), :] = [max(1.0, n * arithmetic) for n in table.columns]
    return table
