"""Captions and alternative texts of the figures of batched speed."""

from __future__ import annotations

from specdec_core.evidence.ragged_claims import (
    Rows,
    batches_of,
    best_pairs,
    name_of,
    percent,
    scattered_runs,
    shares,
    total,
)
from specdec_core.evidence.ragged_speed import (
    AR,
    completion,
    decoders,
    pairs_by_speculation,
    tau,
    tau_of_slowest,
    token_latency,
)


def throughput_caption(rows: Rows) -> str:
    return (
        "Left: tokens a second against the number of rows decoded together, autoregressive and with the best drafter "
        "and K at each batch (each half of the repeats under the one that was best on the other half). Right: speedup "
        f"of each over AR at the same batch. Filled: measured, {_repeats(rows)} repeats of the same prompts in all "
        "arms, admissions left out, 95% intervals by bootstrap over repeats. Hollow, dashed: what the passes of these "
        "runs should take by standalone times recorded before; look-ups, accepting and committing count nothing there."
    )


def throughput_alt(rows: Rows) -> str:
    runs, parts = scattered_runs(rows), []
    for batch in batches_of(runs):
        ar = decoders(rows)[AR][batch]
        best = best_pairs(runs, batch)
        told = f"batch {batch}: AR {total(ar, 'tokens').sum() / total(ar, 'seconds').sum():.0f} tokens a second"
        parts.append(told + (f", best speedup {best.speedup().estimate:.2f}" if best else ""))
    return f"Throughput and speedup against the batch. {'; '.join(parts)}."


def latency_caption(rows: Rows) -> str:
    return (
        "Left: time of a token, which is the time since its row's pass before, divided by the tokens that the row "
        "emitted. Right: time from the start of the run until a row is complete, waiting for a free slot included. "
        "Filled: medians; hollow, dashed: 99th percentiles, over all tokens or rows of "
        f"{_repeats(rows)} repeats. Admissions are left out."
    )


def latency_alt(rows: Rows) -> str:
    parts = []
    for name, found in decoders(rows).items():
        for batch in dict.fromkeys((min(found), max(found))) if found else ():
            times = (1e3 * token_latency(found[batch], quantile) for quantile in (0.5, 0.99))
            median, most = (f"{one:.0f} ms" for one in times)
            parts.append(
                f"{name} at batch {batch}: {median} a token, 99th percentile {most}; half of the rows complete after "
                f"{completion(found[batch], 0.5):.2g} s"
            )
    return f"Time of a token and of a row against the batch. {'; '.join(parts)}."


def realign_caption(rows: Rows) -> str:
    n, context = (", ".join(map(str, sorted({row[name] for row in rows}))) for name in ("n", "context"))
    repeats = min(len(row["seconds"]) for row in rows)
    return (
        "Share of a round (verification and commit) that the commit takes, against the number of rows, for masked "
        f"scatter and for realigning a rectangle. {n} nodes a row behind about {context} cached tokens; paths of "
        f"random length, the same in all ways (of a tree, up to its depth); {repeats} repeats, simultaneous 95% "
        "intervals by bootstrap of the pooled ratio. Line: the threshold of R4."
    )


def realign_alt(rows: Rows) -> str:
    found = shares(rows)
    parts = []
    for way, engine in dict.fromkeys((cell.way, cell.engine) for cell in found):
        own = {cell.batch: share for cell, share in found.items() if (cell.way, cell.engine) == (way, engine)}
        told = ", ".join(f"{percent(share)} at batch {batch}" for batch, share in own.items())
        parts.append(f"{way} on {engine}: {told}")
    return f"Share of a round spent on committing. {'; '.join(parts)}."


def heterogeneity_caption(rows: Rows) -> str:
    return (
        "Tokens that a row emits a pass, τ, against the number of rows decoded together, by drafter and K. Filled: "
        f"measured, every row keeps what it accepted; {_repeats(rows)} repeats, 95% intervals by bootstrap over "
        "repeats. Hollow, dashed: the same passes, had every row been cut to the slowest of its batch, as "
        "batch-minimum acceptance does."
    )


def heterogeneity_alt(rows: Rows) -> str:
    parts = []
    for speculation, pairs in pairs_by_speculation(rows).items():
        ends = dict.fromkeys((min(pairs), max(pairs)))
        told = (f"{tau(pairs[b].sd).estimate:.2f} against {tau_of_slowest(pairs[b].sd):.2f} at batch {b}" for b in ends)
        parts.append(f"{name_of(speculation)} {', '.join(told)}")
    return f"Tokens a row and pass, as measured against cut to the slowest row. {'; '.join(parts)}."


def _repeats(rows: Rows) -> int:
    return len({row["repeat"] for row in rows})
