"""Captions and alternative texts of the figures of the backend sweep and of the cost curves."""

from __future__ import annotations

from collections.abc import Sequence

from specdec_core.evidence.plots_pay_off import peer_speedups
from specdec_core.evidence.plots_sweep import at_shortest_context, series_names
from specdec_core.evidence.sweep_claims import Attribution, attribute_best, by_configuration
from specdec_core.evidence.sweep_records import Row, pair_up

Rows = Sequence[Row]
BOOTSTRAP = "95% interval by bootstrap of the log ratio over prompts"
BEST = "the K that is best on its tuning prompts"


def curve_caption(rows: Rows, ceilings: Rows = ()) -> str:
    contexts = sorted({row["context"] for row in rows})
    samples = min(row["samples"] for row in rows)
    return (
        "Time t(n) of one target pass over n new tokens, and v(n) = t(n)/t(1); both scales logarithmic, so that serial "
        f"verification has slope 1. Medians of at least {samples} interleaved samples with their intervals, context "
        f"{', '.join(map(str, contexts))}."
        + (" Dotted: the least time that memory and arithmetic of this machine allow." if ceilings else "")
    )


def shortest_curve_caption(rows: Rows, ceilings: Rows = ()) -> str:
    return curve_caption(at_shortest_context(rows), ceilings)


def curve_alt(rows: Rows, ceilings: Rows = ()) -> str:
    parts = []
    for name in sorted({row["configuration"] for row in rows}):
        points = sorted((row["n"], row["seconds_median"]) for row in rows if row["configuration"] == name)
        (first, start), (last, end) = points[0], points[-1]
        parts.append(f"{name}: {start * 1e3:.1f} ms at n={first}, {end * 1e3:.1f} ms at n={last}")
    return "Time of a target pass against the number of new tokens. " + "; ".join(parts) + "."


def shortest_curve_alt(rows: Rows, ceilings: Rows = ()) -> str:
    return curve_alt(at_shortest_context(rows), ceilings)


def acceptance_caption(rows: Rows) -> str:
    return (
        "Acceptance of each drafter (a panel) on each backend (a colour). Filled: accepted over drafted tokens at "
        "speculation length K. Hollow, dashed: conditional acceptance of each draft position at the greatest K, where "
        f"it was tested at least 10 times. {_prompts(rows)} prompts, counts pooled."
    )


def acceptance_alt(rows: Rows) -> str:
    grouped = by_configuration(pair_up(rows))
    parts = [
        f"{name}: {cells[0].acceptance():.0%} at K={cells[0].cell.K}, {cells[-1].acceptance():.0%} at "
        f"K={cells[-1].cell.K}"
        for name, cells in zip(series_names(grouped), grouped.values(), strict=True)
    ]
    return "Acceptance against speculation length. " + "; ".join(parts) + "."


def heat_map_caption(rows: Rows) -> str:
    return (
        "Speedup over autoregressive decoding of the same backend, every configuration at every K that it was measured "
        f"at: pooled over {_reported(rows, repetitive=False)} report prompts without repetition. Bold: the {BOOTSTRAP} "
        "excludes 1. Framed: the best K of a configuration."
    )


def heat_map_alt(rows: Rows) -> str:
    grouped = by_configuration(pair_up(rows, split="report", repetitive=False))
    parts = []
    for name, cells in zip(series_names(grouped), grouped.values(), strict=True):
        speedup, K = max((pairs.speedup().estimate, pairs.cell.K) for pairs in cells)
        parts.append(f"{name}: best {speedup:.2f} at K={K}")
    return "Speedup by configuration and speculation length. " + "; ".join(parts) + "."


def pay_off_caption(rows: Rows) -> str:
    return (
        "Left: accepted over drafted tokens against what a draft position costs in target steps, each configuration at "
        f"{BEST}. The line is S = 1 without overhead; the tick that a point is joined to is its own S = 1, at "
        "c + s + o/K: above it a configuration pays. Right: measured against predicted speedup of every cell, "
        f"{BOOTSTRAP}; predicted from curves measured before the runs; grey: measured/predicted between 0.8 and 1.25. "
        f"{_reported(rows)} report prompts."
    )


def pay_off_alt(rows: Rows) -> str:
    found = attribute_best(rows)
    above = sum(one.acceptance > one.needed for one in found)
    return f"{above} of {len(found)} configurations accept more than c + s + o/K. {prediction_alt(rows)}"


def round_caption(rows: Rows) -> str:
    return (
        "Time of a round in target steps t(1): one step, what verifying the draft takes more than that, drafting, and "
        f"the rest; each configuration at {BEST}. Diamond: what autoregressive decoding takes for as many tokens; "
        f"speculation is faster where it lies beyond the bar. Means over {_reported(rows)} report prompts."
    )


def round_alt(rows: Rows) -> str:
    found = attribute_best(rows)
    parts = [
        f"{name} K={one.cell.K}: {one.seconds:.2f} steps, of which verifying {one.drafted * one.s:.2f} more than one "
        f"and drafting {one.drafted * one.c:.2f}, for {one.tau:.2f} tokens"
        for name, one in zip(_names(found), found, strict=True)
    ]
    return "Where a round's time goes. " + "; ".join(parts) + "."


def forest_caption(rows: Rows, peer_rows: Rows = ()) -> str:
    others = " Squares: decoders of other packages over their own autoregressive decoding." if peer_rows else ""
    return (
        f"Speedup over autoregressive decoding of the same backend, each configuration at {BEST}, {BOOTSTRAP}, "
        f"{_reported(rows)} report prompts, loops included. Hollow: predicted from curves measured before the runs."
        + others
    )


def forest_alt(rows: Rows, peer_rows: Rows = ()) -> str:
    found = sorted(attribute_best(rows), key=lambda one: -one.speedup.estimate)
    ours = zip(_names(found), (one.speedup for one in found), strict=True)
    parts = [f"{name} {speedup}" for name, speedup in (*ours, *peer_speedups(peer_rows))]
    return "Speedups with intervals. " + "; ".join(parts) + "."


def prediction_caption(rows: Rows) -> str:
    return (
        "Measured against predicted speedup, one point a configuration and K, 95% interval by bootstrap of the log "
        f"ratio over {_reported(rows)} report prompts. Grey: measured/predicted between 0.8 and 1.25."
    )


def prediction_alt(rows: Rows) -> str:
    ratios = [pairs.measured_over_predicted().estimate for pairs in pair_up(rows, split="report").values()]
    span = f"{min(ratios):.2f} to {max(ratios):.2f}" if ratios else "not measured"
    return f"Measured against predicted speedup of {len(ratios)} points; their ratios are {span}."


def _reported(rows: Rows, repetitive: bool | None = None) -> int:
    pairs = pair_up(rows, split="report", repetitive=repetitive).values()
    return max((len(one) for one in pairs), default=0)


def _prompts(rows: Rows) -> int:
    return len({row["prompt_id"] for row in rows})


def _names(found: Sequence[Attribution]) -> list[str]:
    return series_names((one.cell.configuration, one.cell.temperature) for one in found)
