"""Greedy speculation against autoregression on one target, whose numbers may depend on how many tokens it is fed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec_core.arrays import host
from specdec_core.decode import generate
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.lengths.fixed import FixedLength
from specdec_core.protocol import Drafter, Target
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.topology import chain, forest


def assert_speculation_equals_autoregression(
    target: Target, tolerance: float, candidates: int = 2, new_tokens: int = 24
) -> None:
    """Two rows with look-up drafts (a tree if `candidates` > 1), one row without; equal to decoding each row alone.

    Where a token differs, the two tokens' logits are within `tolerance` of each other: a near-tie.
    """
    prompts = [(5, 17, 3, 5, 17, 3, 5, 17), (9, 9, 9, 9, 2, 9, 9), (1, 2)]
    options = Options(max_new_tokens=new_tokens)
    alone = [generate(target, [Request(prompt, options)])[0].tokens for prompt in prompts]
    policies = (FixedLength(4), FixedLength(3), None)
    requests = [Request(prompt, options, policy) for prompt, policy in zip(prompts, policies, strict=True)]
    drafter: Drafter = NGramDrafter(candidates=candidates)
    together = [each.tokens for each in generate(target, requests, drafter, slots=2)]
    for prompt, expected, found in zip(prompts, alone, together, strict=True):
        assert len(found) == len(expected) == new_tokens
        differing = np.flatnonzero(np.array(expected) != np.array(found))
        if len(differing):
            first = int(differing[0])
            logits = after(target, [*prompt, *expected[:first]])
            assert abs(logits[expected[first]] - logits[found[first]]) <= tolerance


def after(target: Target, prefix: Sequence[int]) -> np.ndarray:
    """Logits `[V]` after a prefix, on a fresh state."""
    state, slots = target.new_state(1, len(prefix)), np.array([0])
    tokens = np.array(prefix, np.int64)
    target.prefill(state, slots, [tokens])
    return host(target.verify(state, slots, tokens[-1:], forest([chain(1)])).logits[0])
