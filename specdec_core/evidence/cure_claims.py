"""Verdict on S6: with our int8 kernels quantized weights verify in parallel, and speculation on them pays.

Pure functions from records: pass times of notebook 03, peers of notebook 02.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from specdec_core.evidence.peer_records import Among, over_fastest, speedup, work
from specdec_core.evidence.serial_claims import samples
from specdec_core.evidence.verdicts import Claim, Finding, Outcome
from specdec_core.statistics.intervals import Interval, median_interval, simultaneous

Rows = Sequence[Mapping[str, Any]]

CURE, SERIAL = "numba int8", "llama.cpp Q8_0"
N = 6
AMONG = Among(repetitive=False)
"""Report prompts whose text does not repeat itself."""
PARTS = 4


def verifies_in_parallel(claim: Claim, curves: Rows, tuning: Rows, peers: Rows) -> Finding:
    """S6: t(1) below llama.cpp Q8_0's, t(6) at most half of its; speculation faster than our own autoregressive
    decoding and than the fastest of any peer's. Simultaneous intervals; value: speculation over the fastest peer.

    The drafter is the fastest on tuning prompts.
    """
    level = simultaneous(0.95, PARTS)
    step, verify = (time_ratio(curves, n, level) for n in (1, N))
    if step is None or verify is None:
        return Finding(Outcome.NOT_TESTABLE, note=f"{CURE} and {SERIAL} were not both measured here")
    best = best_drafting(tuning)
    if best is None:
        return Finding(Outcome.NOT_TESTABLE, note=f"no speculation on {CURE} was tuned here")
    own = speedup(peers, best, AMONG, level)
    ours = work(AMONG.rows(peers, peer=best, arm="sd"))
    lead = over_fastest(ours, peers, AMONG, level=level)
    note = (
        f"t(1) {step} and t({N}) {verify} of {SERIAL}'s; {best}: {own} × its own AR, {lead.ratio} × {lead.peer}, the "
        f"fastest peer; {own.n} prompts"
    )
    gains = claim.thresholds["speedup"]
    right = (
        step.high < claim.thresholds["step"],
        verify.high <= claim.thresholds["verify_6"],
        own.low > gains,
        lead.ratio.low > gains,
    )
    wrong = (
        step.low >= claim.thresholds["step"],
        verify.low > claim.thresholds["verify_6"],
        own.high <= gains,
        lead.ratio.high <= gains,
    )
    if min(step.n, own.n, lead.ratio.n) < claim.minimum_n:
        return Finding(Outcome.INCONCLUSIVE, lead.ratio.estimate, lead.ratio, note)
    outcome = Outcome.REFUTED if any(wrong) else Outcome.SUPPORTED if all(right) else Outcome.INCONCLUSIVE
    return Finding(outcome, lead.ratio.estimate, lead.ratio, note)


def time_ratio(curves: Rows, n: int, level: float = 0.95) -> Interval | None:
    """Interval of our t(n) over llama.cpp's, paired by repeat, at the shortest context; None if one is not there."""
    ours, theirs = samples(curves, CURE, n), samples(curves, SERIAL, n)
    if not ours.size or not theirs.size:
        return None
    found = median_interval(ours / theirs, level=level)
    return replace(found, method=f"{found.method}, paired by repeat")


def best_drafting(tuning: Rows) -> str | None:
    """The peer on our int8 engine that drafts fastest greedily, on tuning prompts."""
    chosen = [
        row for row in tuning if row["peer"].startswith(f"{CURE} ·") and row["chosen"] and row["temperature"] == 0
    ]
    return max(chosen, key=lambda row: row["counted"] / row["seconds"])["peer"] if chosen else None
