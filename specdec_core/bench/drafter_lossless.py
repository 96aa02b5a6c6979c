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
from specdec_core.prompts import Prompt, held_out, load_prompts
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
class LosslessPlan:
    """prompts × tokens that are decoded greedily, at each number of rows together; and audited at T = 1, so many times
    (no audit with 0 repeats)."""

    prompts: int
    tokens: int
    slots: tuple[int, ...]
    audited_prompts: int
    audited_tokens: int
    repeats: int


PLANS = {
    "quick": LosslessPlan(6, 20, (1, 8), audited_prompts=0, audited_tokens=0, repeats=0),
    "full": LosslessPlan(144, 48, (1, 8), audited_prompts=46, audited_tokens=100, repeats=2),
}


def shipped_drafters(checkpoint: EagleCheckpoint, opened: Opened) -> dict[str, Drafter]:
    """The trained drafter in both its forms."""
    weights = checkpoint, opened.checkpoint, opened.target.placement
    return {"EAGLE chain": EagleDrafter(*weights), "EAGLE tree": EagleTreeDrafter(*weights)}


def agree_with_drafter(
    plan: LosslessPlan, opened: Opened, checkpoint: EagleCheckpoint, profile: str, layout: Layout | None = None
) -> list[dict[str, Any]]:
    """GREEDY rows: speculative against autoregressive tokens, for every number of rows together."""
    options = Options(max_new_tokens=plan.tokens, eos=opened.tokenizer.eos_ids)
    chosen = _spread(load_prompts(), plan.prompts)
    cases = [Case(p.id, p.domain, p.split, tuple(opened.tokenizer.chat(p.messages))) for p in chosen]
    target, layout = opened.target, layout or Layout()
    backend = f"{target.placement.engine} {target.placement.dtype}"
    reference, kept = target.float64_reference(), []
    folder, provenance = layout.records(profile), fingerprint(profile)
    with RecordWriter(folder, "02_drafter_greedy", GREEDY, provenance, code=GREEDY_CODE, layout=layout) as file:
        for slots in plan.slots:
            drafters = shipped_drafters(checkpoint, opened)
            for row in greedy_agreement(backend, target, reference, drafters, cases, options, k=K, slots=slots):
                kept.append(row)
                file.append(row)
    return kept


def audit_drafter(
    plan: LosslessPlan, opened: Opened, checkpoint: EagleCheckpoint, profile: str, layout: Layout | None = None
) -> list[dict[str, Any]]:
    """AUDIT rows: text sampled at T = 1 with the drafter, held against the target by the battery of notebook 01."""
    whole: dict[str, Any] = {"max_new_tokens": plan.audited_tokens, "min_new_tokens": plan.audited_tokens}
    options = Options(temperature=1.0, eos=opened.tokenizer.eos_ids, **whole)
    chosen = _spread(held_out(load_prompts()), plan.audited_prompts)
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
    chosen = _spread(load_prompts(), prompts)
    requests = [
        Request(tuple(opened.tokenizer.chat(prompt.messages)), options, FixedLength(1 + key % K), key)
        for key, prompt in enumerate(chosen)
    ]
    for name, drafter in shipped_drafters(checkpoint, opened).items():
        together = generate(opened.target, requests, drafter, slots=slots)
        for prompt, request, output in zip(chosen, requests, together, strict=True):
            [alone] = generate(opened.target, [request], drafter)
            yield f"{name}, {prompt.id}", alone == output


def _spread(prompts: tuple[Prompt, ...], count: int) -> tuple[Prompt, ...]:
    """So many prompts, of every domain."""
    return prompts[:: max(1, len(prompts) // max(1, count))][:count]
