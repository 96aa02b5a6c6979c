"""Audits of transformers' assisted sampling, its plain sampling (the null) and our decoder, on the same pairs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import numpy as np
import torch
from tqdm import tqdm

from specdec_core.bench.sources import DECODING
from specdec_core.drafters.model import ModelDrafter
from specdec_core.evidence.audit_records import ASSISTED, AUDIT, DECODERS, FINDINGS, OURS, PLAIN, SINGLE
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.provenance import Provenance, fingerprint
from specdec_core.evidence.records import RecordWriter
from specdec_core.forensics.audit import Decoder, audit, ours
from specdec_core.forensics.audit_report import Report
from specdec_core.forensics.huggingface_decoders import assisted, open_model, plain, single_position
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.checkpoints import Checkpoint, tiny_llama
from specdec_core.models.rounding import rounded
from specdec_core.pairs import Opened, open_target
from specdec_core.placement import DTYPES, INT8, Placement, PlacementError
from specdec_core.prompts import held_out, load_prompts
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer

CODE = (
    *DECODING,
    "specdec_core/statistics",
    "specdec_core/models/rounding.py",
    "specdec_core/models/checkpoints.py",
    "specdec_core/models/tensors.py",
    "specdec_core/forensics/scoring.py",
    "specdec_core/forensics/audit.py",
    "specdec_core/forensics/audit_report.py",
    "specdec_core/forensics/huggingface_decoders.py",
    "specdec_core/bench/audit.py",
)
"""What the records depend on."""

NAME = "01_audit"
K, ALPHA = 3, 0.05
"""Draft tokens a round; and the level at which all audits of a run together may call a right decoder wrong."""


@dataclass(frozen=True)
class Setting:
    """One way of sampling, with `repeats` sequences a prompt; and which decoders are audited in it."""

    name: str
    options: Options
    repeats: int
    decoders: tuple[str, ...] = (ASSISTED, PLAIN, OURS)


@dataclass(frozen=True)
class Pair:
    """A target, a coarser copy of it that drafts, the dtype both run in, and what is decoded with them."""

    name: str
    checkpoint: Checkpoint
    drafting: Checkpoint
    placement: Placement
    prompts: Sequence[tuple[int, ...]]
    settings: Sequence[Setting]


def tiny_pair(prompts: int = 46, length: int = 100, repeats: int = 2) -> Pair:
    """A random model of two layers and 48 tokens in float64, and its copy in 4 bits: 9,200 tokens a setting."""
    checkpoint = tiny_llama(
        5, dtype=torch.float64, vocabulary=48, hidden_size=32, intermediate_size=64, layers=2, heads=4, context=256
    )
    random = np.random.default_rng(0)
    texts = [tuple(random.integers(0, 48, 6).tolist()) for _ in range(prompts)]
    whole: dict[str, Any] = {"max_new_tokens": length, "min_new_tokens": length}
    settings = (
        Setting("T=1", Options(temperature=1.0, **whole), repeats, DECODERS),
        Setting("T=0.7", Options(temperature=0.7, **whole), repeats),
        Setting("T=1, top-p 0.8", Options(temperature=1.0, top_p=0.8, **whole), repeats),
        Setting("T=0.7, top-k 8", Options(temperature=0.7, top_k=8, **whole), repeats),
        # About 25 tokens each: rows end inside blocks.
        Setting("T=1, end tokens", Options(temperature=1.0, max_new_tokens=length, min_new_tokens=4, eos=(3, 7)),
                4 * repeats),
    )  # fmt: skip
    return Pair("tiny, 4 bits", checkpoint, rounded(checkpoint, 4), Placement(dtype="float64"), texts, settings)


def real_pair(opened: Opened, prompts: int = 20, length: int = 75, repeats: int = 2) -> Pair:
    """A real model and its copy in 4 bits: 3,000 tokens a setting. End tokens are banned, so that rows are as long."""
    texts = [tuple(opened.tokenizer.chat(prompt.messages)) for prompt in held_out(load_prompts())]
    chosen = texts[:: max(1, len(texts) // prompts)][:prompts]  # of every domain
    whole: dict[str, Any] = {"max_new_tokens": length, "min_new_tokens": length, "eos": opened.tokenizer.eos_ids}
    settings = (
        Setting("T=1", Options(temperature=1.0, **whole), repeats),
        Setting("T=0.7, top-p 0.9", Options(temperature=0.7, top_p=0.9, **whole), repeats),
    )
    drafting = rounded(opened.checkpoint, 4)
    return Pair(f"{opened.checkpoint.name}, 4 bits", opened.checkpoint, drafting, opened.target.placement, chosen,
                settings)  # fmt: skip


def measure_audit(pair: Pair, alpha: float = ALPHA) -> Iterator[tuple[str, Setting, Report, float]]:
    """(decoder, setting, report, seconds) of every audit of a pair; each at alpha divided by their number."""
    target = Transformer(pair.checkpoint, pair.placement)
    draft = Transformer(pair.drafting, pair.placement)
    model, assistant = (open_model(each, pair.placement.dtype) for each in (pair.checkpoint, pair.drafting))

    def decoder(name: str, options: Options) -> Decoder:
        if name == ASSISTED:
            return assisted(model, assistant, options, K)
        if name == SINGLE:
            return single_position(pair.checkpoint, options, K, pair.placement.dtype)
        if name == PLAIN:
            return plain(model, options)
        return ours(target, ModelDrafter(draft, target.vocabulary), FixedLength(K), options)

    level = alpha / sum(len(setting.decoders) for setting in pair.settings)
    for setting in pair.settings:
        for name in setting.decoders:
            start = perf_counter()
            report = audit(
                decoder(name, setting.options),
                target,
                pair.prompts,
                setting.options,
                alternative=None if name == SINGLE else draft,  # it drafts with something else
                repeats=setting.repeats,
                alpha=level,
                seed=DECODERS.index(name),  # or decoders would all be compared with the same sequences
            )
            yield name, setting, report, perf_counter() - start


def rows_of(decoder: str, pair: str, setting: str, report: Report) -> Iterator[dict[str, Any]]:
    """Records of AUDIT: a row a test, and one for the exact findings."""
    bias = report.bias
    common = {
        "decoder": decoder,
        "pair": pair,
        "setting": setting,
        "bias": bias and bias.bias,
        "low": bias and bias.low,
        "high": bias and bias.high,
        "tv_lower": bias and bias.tv_lower,
        "tokens": report.tokens,
        "rounds": report.rounds,
        "verdict": report.verdict,
    }
    for name, result in report.results.items():
        statistic = float(np.clip(result.statistic, -1e300, 1e300))  # a z without variance is infinite
        adjusted = report.adjusted.get(name)
        yield common | {"test": name, "statistic": statistic, "p": result.p, "adjusted": adjusted, "note": result.note}
    found = [*report.violations, *report.failures]
    yield (
        common
        | {
            "test": FINDINGS,
            "statistic": len(found),
            "p": 0.0 if report.violations else 1.0,  # exact: a violation cannot happen by chance
            "adjusted": None,
            "note": "; ".join(map(str, found[:3])),
        }
    )


def record_audit(
    folder: Path,
    pairs: Sequence[Pair],
    provenance: Provenance | dict[str, Any],
    layout: Layout | None = None,
    progress: bool = True,
) -> Path:
    """Audit all pairs and write the records of AUDIT into `folder`; a line is printed for every audit."""
    with RecordWriter(folder, NAME, AUDIT, provenance, code=CODE, layout=layout) as file:
        for pair in pairs:
            audits = sum(len(setting.decoders) for setting in pair.settings)
            bar = tqdm(measure_audit(pair, ALPHA / len(pairs)), pair.name, audits, disable=not progress)
            for decoder, setting, report, seconds in bar:
                for row in rows_of(decoder, pair.name, setting.name, report):
                    file.append(row)
                tqdm.write(f"{pair.name}; {setting.name}; {decoder} ({seconds:.0f} s): {summary(report)}")
    return file.path


def summary(report: Report) -> str:
    """One line: verdict, tokens, the smallest adjusted p, bias and its bounds."""
    parts = [f"{report.verdict}, {report.tokens} tokens"]
    if report.rounds:
        parts.append(f"τ {report.tokens / report.rounds:.2f}")
    if report.bias:
        least = min(report.adjusted, key=report.adjusted.__getitem__)
        b = report.bias
        parts.append(f"smallest adjusted p {report.adjusted[least]:.2g} ({least})")
        parts.append(f"bias {b.bias:+.4f} [{b.low:+.4f}, {b.high:+.4f}], TV ≥ {b.tv_lower:.4f}")
    if report.violations or report.failures:
        parts.append(f"{len(report.violations)} violations, {len(report.failures)} failures")
    return "; ".join(parts)


def bench_audit(model: str, placement: Placement, out: Path) -> None:
    """The tiny pair, then `model` with its copy in 4 bits; records of AUDIT into `out`. PlacementError for int8."""
    if placement.dtype == INT8:
        raise PlacementError(
            "bench audit runs the same weights in transformers, which would take int8 for something else: expected "
            f"one of {', '.join(DTYPES)}"
        )
    opened = open_target(model, placement)
    provenance = fingerprint("full", threads=placement.workers, dtype=placement.dtype)
    record_audit(out, [tiny_pair(), real_pair(opened)], provenance)
