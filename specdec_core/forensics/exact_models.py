"""Exact sequence laws of a real architecture: a tiny seeded transformer, with every kind of drafter, both engines.

The torch engine in float64 is held against the same weights read layer by layer by plain torch. The compiled engine
has no float64; it is held against its own autoregressive logits, to the last bit of which its verification must agree.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import numpy as np

from specdec_core.arrays import host
from specdec_core.drafters.layer_skip import LayerSkipDrafter
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.forensics.enumeration import (
    Tokens,
    distance,
    output_law,
    product_law,
    sequence_law,
    total_variation,
)
from specdec_core.forensics.exact_grid import V, request
from specdec_core.models.checkpoints import Checkpoint, tiny_llama
from specdec_core.placement import Placement
from specdec_core.protocol import Drafter
from specdec_core.rows import Request
from specdec_core.targets.transformer import Transformer
from specdec_core.topology import chain, forest

PLACEMENTS = {
    "transformer, torch float64": Placement("torch", dtype="float64"),
    "transformer, numba float32": Placement("numba", threads=1),
}

REQUESTS: dict[str, tuple[Request, ...]] = {
    "T=1, K=2": (request(2),),
    "T=1.6, top-p 0.95, EOS, K=3": (request(3, temperature=1.6, top_p=0.95, eos=(2,), max_new_tokens=4),),
    "two rows unlike": (
        request(1, max_new_tokens=2),
        request(2, prompt=(2,), temperature=0.7, max_new_tokens=2, presence_penalty=0.5),
    ),
}


def tiny(seed: int) -> Checkpoint:
    """Three layers of width 16, vocabulary V."""
    return tiny_llama(
        seed, vocabulary=V, hidden_size=16, intermediate_size=24, heads=2, kv_heads=1, head_dim=8, context=16
    )


def drafters(target: Transformer) -> dict[str, Callable[[], Drafter]]:
    """Every drafter of the project on this target."""
    return {
        "another model": lambda: ModelDrafter(Transformer(tiny(2), target.placement), V),
        "itself": lambda: ModelDrafter(target, V),
        "first layer": lambda: LayerSkipDrafter(target, 1),
        "look-up chain": lambda: NGramDrafter(),
        "look-up tree": lambda: NGramDrafter(candidates=3),
    }


def measure_models() -> Iterator[dict[str, Any]]:
    """Records of EXACT_LAW."""
    for level, placement in PLACEMENTS.items():
        target = Transformer(tiny(1), placement)
        reference = target.float64_reference() if placement.dtype == "float64" else target
        logits_after = logits_function(reference)
        for name, requests in REQUESTS.items():
            expected = product_law([sequence_law(logits_after, each, target.context) for each in requests])
            for kind, drafter in drafters(target).items():
                found, count = output_law(target, requests, drafter())
                yield {
                    "level": level,
                    "axis": name,
                    "case": kind,
                    "branches": count,
                    "outcomes": len(expected),
                    "error": distance(found, expected),
                    "total_variation": total_variation(found, expected),
                }


def logits_function(target: Transformer) -> Callable[[Tokens], np.ndarray]:
    """Logits `[V]` after a prefix, computed on a fresh cache by one pass over the newest token."""

    @lru_cache(maxsize=4096)
    def logits(prefix: Tokens) -> np.ndarray:
        state, slot = target.new_state(1, len(prefix)), np.array([0])
        target.prefill(state, slot, [np.array(prefix, np.int64)])
        found = target.verify(state, slot, np.array(prefix[-1:], np.int64), forest([chain(1)]))
        return np.asarray(host(found.logits[0]), np.float64)

    return logits
