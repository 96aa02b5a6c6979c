"""Records of notebook 01: exact laws, sampled tests, their curves, mutants, sizes, greedy agreement."""

from __future__ import annotations

from specdec_core.evidence.schemas import Schema

EXACT_LAW = Schema(
    "exact_law",
    1,
    {
        "level": str,  # 'table', or the engine of a tiny transformer
        "axis": str,
        "case": str,
        "branches": int,  # ways that chance can go
        "outcomes": int,
        "error": float,  # largest |found − defined| at any output
        "total_variation": float,
    },
)
"""One line a case whose output law was enumerated."""

LAW_TEST = Schema(
    "law_test",
    1,
    {
        "setting": str,
        "comparison": str,  # 'SD', 'SD against AR', 'AR against AR', …
        "test": str,
        "tokens": int,  # a method
        "statistic": float,
        "dof": int | None,
        "p": float,
        "adjusted": float | None,  # by Holm, None outside the confirmatory family
        "note": str,
        "live": bool,  # drawn in this run, not read from committed token records
    },
)
"""One line a test of real-model tokens."""

LAW_CURVE = Schema(
    "law_curve",
    1,
    {
        "kind": str,  # 'null' (permuted χ²), 'pit' (by offset), 'bias' (against n)
        "setting": str,
        "series": str,
        "x": list[float],
        "y": list[float],
        "low": list[float] | None,
        "high": list[float] | None,
    },
)
"""One line a curve of the figures: what the tests of LAW_TEST look like."""

KILL = Schema(
    "kill",
    1,
    {
        "mutant": str,
        "effect": str,  # law, acceptance, isolation, nothing
        "test": str,
        "seen": bool,
        "crashed": bool,
        "statistic": float,
        "tokens": int,  # to detection, −1 if not seen or not counted in tokens
        "budget": int,  # tokens that a sampled test was given
    },
)
"""One line a mutant and test."""

SIZE = Schema(
    "size",
    1,
    {
        "test": str,
        "family": bool,
        "rejections": int,
        "replicates": int,
        "tokens": int,  # a replicate
        "alpha": float,
        "live": bool,  # drawn in this run, not read from committed token records
    },
)
"""One line a test: how often it rejects where there is nothing to find."""

GREEDY = Schema(
    "greedy",
    2,
    {
        "backend": str,
        "drafter": str,
        "K": int,
        "slots": int,  # rows decoded together
        "prompt_id": str,
        "tokens": int,
        "identical": bool,
        "certified": bool,  # identical, or every divergence a certified near-tie
        "divergences": int,  # counted on after each certified one
        "index": int,  # of the first, −1 if none
        "gap": float,  # of reference logits there, 0 if none
        "epsilon": float,  # rounding error measured there
    },
)
"""One line per (backend, drafter, prompt): does greedy SD emit the AR token ids?"""
