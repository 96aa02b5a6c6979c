"""Invented records of notebook 06 with known truth."""

from __future__ import annotations

from typing import Any

import numpy as np

from specdec_core.evidence.linear_claims import (
    DELAYED,
    EAGER,
    FACTORS,
    FUSED,
    RELOAD,
    RESIDENT,
    SCHEMES,
    SNAPSHOTS,
)

Row = dict[str, Any]
CACHE = 30 << 20
BANDWIDTH, ARITHMETIC = 2e10, 8e10


def error_row(form: str = "torch float64", kind: str = "trees", **changes: Any) -> Row:
    """A row of LINEAR_ERROR within its tolerance."""
    double = form.endswith("float64")
    return {
        "form": form, "kind": kind, "trees": 40, "nodes": 300, "commits": 340, "resets": 90, "negative": 120,
        "changed": 0, "worst_output": 2e-16 if double else 4e-7, "worst_state": 3e-16 if double else 6e-7,
        "worst_seed": 7, "tolerance": 1e-12 if double else 1e-5,
    } | changes  # fmt: skip


ERRORS = [
    error_row(form, kind)
    for kind in ("chains", "trees", "forests", "rounds")
    for form in ("torch float64", "torch float32", "numba float32")
]

WINDOW: Row = {
    "parents": [-1, 0, 0, 1, 1, 2], "path": [0, 1, 4], "log_decay": [-0.1, -0.2, 0.0, -0.3, -0.05, -1.0],
    "beta": [0.5] * 6, "weights": [0.7788, 0.9512, 1.0], "left": 0.7047, "error": 2.5e-7,
}  # fmt: skip


def layer(scheme: str, n: int = 16, shape: str = "chain", size: str = "GDN-1.3B", batch: int = 32) -> Row:
    """What records of traffic and of speed share."""
    heads, keys, values = {"GDN-1.3B": (8, 256, 256), "8 × 64 × 64": (8, 64, 64)}[size]
    return {
        "scheme": scheme, "shape": shape, "size": size, "heads": heads, "keys": keys, "values": values,
        "batch": batch, "n": n, "accepted": batch * (n // 2 + 1), "state_bytes": 4 * batch * heads * keys * values,
    }  # fmt: skip


PASSES = {
    EAGER: lambda n, m: (3 * (n + m), 2 * (n + m)),
    FUSED: lambda n, m: (n + m, n + m),
    RESIDENT: lambda n, m: (2, 1),
    SNAPSHOTS: lambda n, m: (2, n + 1),
    RELOAD: lambda n, m: (n + 1, n + 1),
    FACTORS: lambda n, m: (2, 1),
    DELAYED: lambda n, m: (1, 1),
}
"""Passes over the states that a round of a chain reads and writes: n nodes verified, m committed."""


def traffic_row(scheme: str, n: int = 16, shape: str = "chain", batch: int = 1, **changes: Any) -> Row:
    """A row of LINEAR_TRAFFIC as the scheme's idea demands."""
    row = layer(scheme, n, shape, batch=batch)
    read, written = PASSES[scheme](n, n // 2 + 1)
    kept = n * row["state_bytes"] if scheme in (SNAPSHOTS, RELOAD) else n * batch * 8 * 4 * 513
    return row | {
        "read_bytes": read * row["state_bytes"], "written_bytes": written * row["state_bytes"], "kept_bytes": kept,
        "working_bytes": row["state_bytes"] if scheme in (EAGER, FUSED) else 0, "launches": n,
    } | changes  # fmt: skip


def traffic(widths: tuple[int, ...] = (1, 16, 64)) -> list[Row]:
    return [traffic_row(scheme, n, shape) for shape in ("chain", "tree") for n in widths for scheme in SCHEMES]


TIMES = {EAGER: 12.0, FUSED: 3.0, RESIDENT: 1.1, SNAPSHOTS: 2.0, RELOAD: 3.5, FACTORS: 1.0, DELAYED: 0.75}
"""Seconds of a round in those of compact factors."""


def speed_row(
    scheme: str, n: int = 16, shape: str = "chain", size: str = "GDN-1.3B", batch: int = 32, *, repeats: int = 12,
    noise: float = 0.01, times: dict[str, float] | None = None, seed: int = 0, **changes: Any,
) -> Row:  # fmt: skip
    """A row of LINEAR_SPEED. All schemes of a cell share a drift from repeat to repeat."""
    row = layer(scheme, n, shape, size, batch)
    drift = 1 + 0.5 * np.random.default_rng(seed).random(repeats)
    jitter = 1 + noise * np.random.default_rng((SCHEMES.index(scheme), seed, n, batch)).standard_normal(repeats)
    floor = max(2 * row["state_bytes"] / BANDWIDTH, n * row["state_bytes"] / ARITHMETIC)
    seconds = 1.2 * floor * (TIMES | (times or {}))[scheme] * drift * jitter
    return row | {
        "threads": 2, "seconds": seconds.tolist(), "left_out": "", "worst_error": 3e-7,
        "operations": float(n * row["state_bytes"]), "bytes_per_second": BANDWIDTH, "flops_per_second": ARITHMETIC,
        "cache_bytes": CACHE,
    } | changes  # fmt: skip


def not_timed(row: Row, why: str = "needs 9 bytes for states, the plan allows 8") -> Row:
    return row | {"seconds": [], "left_out": why, "worst_error": None}


def cell(shape: str = "chain", **changes: Any) -> list[Row]:
    """All schemes of one cell."""
    return [speed_row(scheme, shape=shape, **changes) for scheme in SCHEMES]


def speeds() -> list[Row]:
    """Two headline cells (a chain and a tree of 64 MiB of states), a sweep over n, one over the batch of small states;
    eager left out of the largest n."""
    rows = [row for n in (4, 16, 64) for shape in ("chain", "tree") for row in cell(shape, n=n)]
    rows = [not_timed(row) if (row["scheme"], row["n"]) == (EAGER, 64) else row for row in rows]
    return rows + [row for batch in (1, 8) for row in cell(size="8 × 64 × 64", batch=batch, times={FACTORS: 3.0})]
