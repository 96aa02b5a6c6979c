"""A trained drafter is no way around the law: greedy agreement, batches, and audits of sampled text, with its own pair.

Losslessness is the loop's, whatever drafts; this looks at the very drafter that is shipped, on the real model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from specdec_core.bench import greedy
from specdec_core.bench.audit import rows_of
from specdec_core.bench.greedy import greedy_agreement
from specdec_core.bench.sources import DECODING, EAGLE
from specdec_core.decode import generate
from specdec_core.drafters.eagle import EagleDrafter
from specdec_core.drafters.eagle_tree import EagleTreeDrafter
from specdec_core.evidence.audit_records import AUDIT
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.lossless_records import GREEDY
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter
from specdec_core.forensics.audit import audit, ours
from specdec_core.lengths.fixed import FixedLength
from specdec_core.measure.sweep import Case
from specdec_core.models.eagle_checkpoint import EagleCheckpoint
from specdec_core.pairs import Opened
from specdec_core.prompts import held_out, load_prompts, spread
from specdec_core.protocol import Drafter
from specdec_core.rows import Request
from specdec_core.sampling import Options

K = 5
GREEDY_CODE = (*greedy.CODE, *EAGLE, "specdec_core/bench/drafter_lossless.py")
AUDIT_CODE = (
    *DECODING,
    *EAGLE,
    "specdec_core/statistics",
    "specdec_core/forensics/scoring.py",
    "specdec_core/forensics/audit.py",
    "specdec_core/forensics/audit_report.py",
    "specdec_core/bench/audit.py",
    "specdec_core/bench/drafter_lossless.py",
)


@dataclass(frozen=True)
class GreedyPlan:
    """prompts × tokens that are decoded greedily, at each number of rows together."""

    prompts: int
    tokens: int
    slots: tuple[int, ...]


@dataclass(frozen=True)
class AuditPlan:
    """prompts × tokens × repeats that are sampled at T = 1 with each form of the drafter."""

    prompts: int
    tokens: int
    repeats: int


PLANS = {"quick": GreedyPlan(6, 20, (1, 8)), "full": GreedyPlan(144, 48, (1, 8))}
AUDITED = AuditPlan(46, 100, 2)
"""9,200 tokens of each form; too long for a quick run."""


def shipped_drafters(checkpoint: EagleCheckpoint, opened: Opened) -> dict[str, Drafter]:
    """The trained drafter in both its forms."""
    weights = checkpoint, opened.checkpoint, opened.target.placement
    return {"EAGLE chain": EagleDrafter(*weights), "EAGLE tree": EagleTreeDrafter(*weights)}


def agree_with_drafter(
    plan: GreedyPlan, opened: Opened, checkpoint: EagleCheckpoint, profile: str, layout: Layout | None = None
) -> list[dict[str, Any]]:
    """GREEDY rows: speculative against autoregressive tokens, for every number of rows together."""
    options = Options(max_new_tokens=plan.tokens, eos=opened.tokenizer.eos_ids)
    chosen = spread(load_prompts(), plan.prompts)
    cases = [Case(p.id, p.domain, p.split, tuple(opened.tokenizer.chat(p.messages))) for p in chosen]
    target, layout = opened.target, layout or Layout()
    backend = f"{target.placement.engine} {target.placement.dtype}"
    drafters, reference, kept = shipped_drafters(checkpoint, opened), target.float64_reference(), []
    folder, provenance = layout.records(profile), fingerprint(profile)
    with RecordWriter(folder, "02_drafter_greedy", GREEDY, provenance, code=GREEDY_CODE, layout=layout) as file:
        for slots in plan.slots:
            for row in greedy_agreement(backend, target, reference, drafters, cases, options, k=K, slots=slots):
                kept.append(row)
                file.append(row)
    return kept


def audit_drafter(
    plan: AuditPlan, opened: Opened, checkpoint: EagleCheckpoint, profile: str, layout: Layout | None = None
) -> list[dict[str, Any]]:
    """AUDIT rows: text sampled at T = 1 with the drafter, held against the target by the battery of notebook 01."""
    whole: dict[str, Any] = {"max_new_tokens": plan.tokens, "min_new_tokens": plan.tokens}
    options = Options(temperature=1.0, eos=opened.tokenizer.eos_ids, **whole)
    chosen = spread(held_out(load_prompts()), plan.prompts)
    prompts = [tuple(opened.tokenizer.chat(prompt.messages)) for prompt in chosen]
    layout, kept = layout or Layout(), []
    folder, provenance = layout.records(profile), fingerprint(profile)
    with RecordWriter(folder, "02_drafter_audit", AUDIT, provenance, code=AUDIT_CODE, layout=layout) as file:
        for number, (name, drafter) in enumerate(shipped_drafters(checkpoint, opened).items()):
            decoder = ours(opened.target, drafter, FixedLength(K), options)
            report = audit(decoder, opened.target, prompts, options, repeats=plan.repeats, alpha=0.05 / 2, seed=number)
            for row in rows_of(name, opened.checkpoint.name, f"T=1, K={K}", report):
                kept.append(row)
                file.append(row)
    return kept


def rows_beside_others(
    opened: Opened, checkpoint: EagleCheckpoint, prompts: int, tokens: int, slots: int = 8
) -> Iterator[tuple[str, bool]]:
    """(drafter and prompt, whether a row sampled at T = 1 beside others has the tokens that it has alone)."""
    options = Options(temperature=1.0, max_new_tokens=tokens, eos=opened.tokenizer.eos_ids, seed=3)
    chosen = spread(load_prompts(), prompts)
    requests = [
        Request(tuple(opened.tokenizer.chat(prompt.messages)), options, FixedLength(1 + key % K), key)
        for key, prompt in enumerate(chosen)
    ]
    for name, drafter in shipped_drafters(checkpoint, opened).items():
        together = generate(opened.target, requests, drafter, slots=slots)
        for prompt, request, output in zip(chosen, requests, together, strict=True):
            [alone] = generate(opened.target, [request], drafter)
            yield f"{name}, {prompt.id}", alone == output
