"""Captions and alternative texts of the figures of the trained drafter."""

from __future__ import annotations

import math
from collections.abc import Sequence

from specdec_core.evidence.plots_training import decided, widest
from specdec_core.evidence.training_records import (
    TESTED,
    TOGETHER,
    Rows,
    alpha_by_position,
    best_check,
    by_arm,
    prompts,
    report,
    taus,
    without_repetition,
)
from specdec_core.statistics.intervals import Interval


def training_caption(rows: Rows) -> str:
    if not rows:
        return "How a drafter learned: no check was recorded."
    last, best = max(rows, key=lambda row: row["step"]), best_check(rows)
    return (
        f"A drafter while it learns: {len(rows)} checks in {last['step']} optimiser steps ({last['epoch']:.2g} passes "
        "over the training answers); one run, no intervals. Left: cross-entropy of the first and the last of "
        f"{widest(rows)} unrolled steps. Filled: held-out answers at T = 1, against the target's law. Hollow, dashed: "
        "training answers, mean since the check before, against what training asks for, in which the target's most "
        "probable token has more weight than in its law; so the two are not on one scale. Middle: tokens a target pass "
        f"on held-out greedy answers, chains of {widest(rows)}, worked out in training's own pass and by real drafting "
        f"of held-out prompts; dotted: the best check, step {best['step']}, whose weights are kept; line: one token a "
        "pass. Right: conditional acceptance by draft position on the held-out greedy answers, up to the first "
        "position that accepted nothing; hollow, dashed: Σ min(p, q) on those at T = 1, best check."
    )


def training_alt(rows: Rows) -> str:
    if not rows:
        return "How a drafter learned: nothing was measured."
    ordered, best = sorted(rows, key=lambda row: row["step"]), best_check(rows)
    parts = []
    for number in sorted({1, widest(rows)}):
        found = [(r["held_out_losses"][number - 1], r["step"]) for r in ordered if len(r["held_out_losses"]) >= number]
        if found:
            told = " to ".join(f"{loss:.2f} at step {step}" for loss, step in dict.fromkeys((found[0], found[-1])))
            parts.append(f"held-out cross-entropy of unrolled step {number} from {told}")
    drafted = [f"{row['drafted_tau']:.2f} by real drafting" for row in (best,) if row["drafted_tau"] is not None]
    taus_of_best = ", ".join([f"{best['greedy_tau']:.2f} at the best check, step {best['step']}", *drafted])
    parts.append(f"τ from {ordered[0]['greedy_tau']:.2f} at step {ordered[0]['step']} to {taus_of_best}")
    parts.append(f"its α by position {_shares(decided(best['greedy_alpha']))}")
    if best["sampled_alpha"]:
        parts.append(f"its Σ min(p, q) at T = 1 {_shares(best['sampled_alpha'])}")
    return f"How a drafter learned: {'; '.join(parts)}."


def acceptance_caption(rows: Rows) -> str:
    own = report(rows)
    return (
        f"The trained drafter as it serves {prompts(own)} report prompts, {prompts(without_repetition(own))} of them "
        f"with greedy answers that do not repeat themselves ({'; '.join(by_arm(rows)) or 'no arm'}). Left: "
        "conditional acceptance of each draft position, accepted over tested, counts pooled over prompts without "
        f"repetitive answers, where it was tested at least {TESTED} times. Right: tokens a target pass by domain and "
        "together. Filled: prompts without repetitive answers; hollow: all. 95% intervals by bootstrap of the log "
        "ratio over prompts (of few prompts they may leave the frame, one prompt has none). Line: one token a pass, as "
        "without drafts."
    )


def acceptance_alt(rows: Rows) -> str:
    parts = []
    for name, own in by_arm(rows).items():
        clean = without_repetition(own)
        told = [f"τ {_tau(taus(own)[TOGETHER])} of all answers"]
        if clean:
            found = taus(clean)
            each = ", ".join(f"{domain} {one.estimate:.2f}" for domain, one in found.items() if domain != TOGETHER)
            told.insert(0, f"τ {_tau(found[TOGETHER])} without repetitive answers ({each})")
        alpha = [share for share in alpha_by_position(clean) if not math.isnan(share)]
        if alpha:
            told.append(f"α by position {_shares(alpha)}")
        parts.append(f"{name}: {', '.join(told)}")
    return f"Acceptance of the trained drafter. {'; '.join(parts) or 'No report prompt was served'}."


def _tau(interval: Interval) -> str:
    """An estimate with its ends, where they are known."""
    if interval.n == 1:
        return f"{interval.estimate:.2f}"
    return f"{interval.estimate:.2f} [{interval.low:.2f}, {interval.high:.2f}]"


def _shares(shares: Sequence[float]) -> str:
    return ", ".join(f"{share:.2f}" for share in shares)
