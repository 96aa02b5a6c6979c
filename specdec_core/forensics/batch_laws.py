"""Exact joint laws of batches: rows that share passes, slots and rounds, each with options and a draft of its own.

The joint law of a batch has to be the product of its rows' laws: no row may know of another. Batches of two and three
rows, ragged in every way, over slots that they have to themselves or wait for; on tables, and on tiny transformers
whose keys and values lie in the ragged cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from specdec_core.forensics.enumeration import (
    distance,
    output_law,
    product_law,
    sequence_law,
    total_variation,
)
from specdec_core.forensics.exact_grid import DRAFTERS, Case, measure, request
from specdec_core.forensics.exact_models import PLACEMENTS, drafters, logits_function, tiny
from specdec_core.published.acceptance import cut_to_the_batch_minimum
from specdec_core.rows import Request
from specdec_core.targets.transformer import Transformer

# A draft is never longer than the room behind it: K = 2 needs three new tokens.
RAGGED = (
    request(1, max_new_tokens=2),
    request(2, prompt=(1,), max_new_tokens=3, temperature=0.7, eos=(2,)),
)
LOOKED_BACK_ON = (
    request(2, max_new_tokens=3, repetition_penalty=1.7),
    request(1, prompt=(2, 1), max_new_tokens=2, top_p=0.8, presence_penalty=0.5),
)
QUEUED = (
    request(1, max_new_tokens=1, top_k=2),
    request(2, prompt=(2,), max_new_tokens=3, eos=(0,)),
    request(None, prompt=(1, 1), max_new_tokens=1),
)
ALIKE = (request(1, max_new_tokens=2), request(1, max_new_tokens=2))


def cases(thorough: bool = True) -> Iterator[Case]:
    """Batches on tables; thorough: also those with thousands of branches."""
    kinds = ("soft q", "look-up tree", "fixed tree", *(("sampled tree",) if thorough else ()))
    for kind in kinds:
        yield Case("ragged", f"two rows, K = 1 and 2, {kind}", RAGGED, DRAFTERS[kind])
        yield Case("one slot", f"two rows one after the other, {kind}", RAGGED, DRAFTERS[kind], slots=1)
        yield Case("queue", f"three rows, two slots, {kind}", QUEUED, DRAFTERS[kind], slots=2)
    for kind in kinds[:2]:
        yield Case("penalties", f"two rows that look back, {kind}", LOOKED_BACK_ON, DRAFTERS[kind])
        yield Case("alike", f"the same request twice, {kind}", ALIKE, DRAFTERS[kind])
    yield Case("three", "three rows, three slots", QUEUED, DRAFTERS["soft q"])


def measure_batch_laws(thorough: bool = True) -> Iterator[dict[str, Any]]:
    """Records of EXACT_LAW.

    thorough  also batches with thousands of branches, the transformer on torch, and the published rule that cuts every
              row to the slowest one (it may not change the law).
    """
    for case in cases(thorough):
        yield measure(case)
    if thorough:
        with cut_to_the_batch_minimum():
            yield measure(Case("batch minimum", "two rows, K = 1 and 2, soft q", RAGGED, DRAFTERS["soft q"]))
    engines = PLACEMENTS.items() if thorough else [(name, p) for name, p in PLACEMENTS.items() if p.engine == "numba"]
    for level, placement in engines:
        target = Transformer(tiny(1), placement)
        yield from _on_a_transformer(level, target, "ragged", RAGGED, None)
        yield from _on_a_transformer(level, target, "queue", QUEUED, 2)


def _on_a_transformer(
    level: str, target: Transformer, axis: str, requests: tuple[Request, ...], slots: int | None
) -> Iterator[dict[str, Any]]:
    reference = target.float64_reference() if target.placement.dtype == "float64" else target
    logits_after = logits_function(reference)
    expected = product_law([sequence_law(logits_after, each, target.context) for each in requests])
    for kind, drafter in drafters(target).items():
        found, count = output_law(target, requests, drafter(), slots=slots)
        yield {
            "level": level,
            "axis": axis,
            "case": kind,
            "branches": count,
            "outcomes": len(expected),
            "error": distance(found, expected),
            "total_variation": total_variation(found, expected),
        }
