"""What runs of batches say beside their verdict (ragged_claims.py): τ, latencies, and which decoders to show."""

from __future__ import annotations

import numpy as np

from specdec_core.evidence.ragged_claims import (
    GROUPED,
    Pairs,
    Row,
    Rows,
    Speculation,
    batches_of,
    best_pairs,
    pair_up,
    pooled_ratio,
    scattered_runs,
    total,
)
from specdec_core.statistics.intervals import Interval

AR, BEST = "AR", "best SD"


def speculations(rows: Rows) -> list[Speculation]:
    return list(pairs_by_speculation(rows))


def tau(runs: Rows) -> Interval:
    """τ with its interval over repeats: Σtokens/Σ rounds of rows."""
    return pooled_ratio(total(runs, "tokens"), total(runs, "row_rounds"))


def tau_of_slowest(runs: Rows) -> float:
    """τ of the same rounds, had every row kept only as many draft tokens as the slowest row of its pass."""
    kept = total(runs, "tokens") - total(runs, "accepted") + total(runs, "least_accepted")
    return float(kept.sum() / total(runs, "row_rounds").sum())


def token_latency(runs: Rows, quantile: float) -> float:
    """Seconds a token took, every token of all runs counted once."""
    seconds, tokens = (np.concatenate([row[name] for row in runs]) for name in ("latencies", "latency_tokens"))
    return float(np.quantile(seconds, quantile, weights=tokens, method="inverted_cdf"))


def completion(runs: Rows, quantile: float) -> float:
    """Seconds until a row was complete, every row of all runs counted once."""
    return float(np.quantile(np.concatenate([row["completions"] for row in runs]), quantile, method="inverted_cdf"))


def pairs_by_speculation(rows: Rows) -> dict[Speculation, dict[int, Pairs]]:
    """Speculation → batch → its runs."""
    runs = scattered_runs(rows)
    found: dict[Speculation, dict[int, Pairs]] = {}
    for batch in batches_of(runs):
        for speculation, pairs in pair_up(runs, batch).items():
            found.setdefault(speculation, {})[batch] = pairs
    return dict(sorted(found.items()))


def decoders(rows: Rows) -> dict[str, dict[int, Rows]]:
    """AR, the best SD, and the best with rows grouped by length → batch → its runs."""
    runs = scattered_runs(rows)
    found: dict[str, dict[int, Rows]] = {AR: {}, BEST: {}}
    for batch in batches_of(runs):
        found[AR][batch] = [row for row in runs if row["batch"] == batch and not row["K"]]
        best = best_pairs(runs, batch)
        if best is not None:
            found[BEST][batch] = best.sd
    grouped = [row for row in rows if row["way"] == GROUPED and row["K"]]
    if grouped:
        found[f"SD, {GROUPED}"] = {batch: _fastest(grouped, batch) for batch in batches_of(grouped)}
    return found


def _fastest(rows: Rows, batch: int) -> Rows:
    """Runs of the speculation that emits most tokens a second."""
    runs: dict[Speculation, list[Row]] = {}
    for row in rows:
        if row["batch"] == batch:
            runs.setdefault((row["drafter"], row["K"]), []).append(row)
    return max(runs.values(), key=lambda own: total(own, "tokens").sum() / total(own, "seconds").sum())
