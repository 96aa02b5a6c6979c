"""Benchmarks that notebooks and the command line share: each measures, and writes records that replay anywhere."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from specdec_core.placement import Placement


def _sd(model: str, placement: Placement, out: Path) -> None:
    from specdec_core.bench.sd import bench_sd

    bench_sd(model, placement, out)


def _greedy(model: str, placement: Placement, out: Path) -> None:
    from specdec_core.bench.greedy import bench_greedy

    bench_greedy(model, placement, out)


def _audit(model: str, placement: Placement, out: Path) -> None:
    from specdec_core.bench.audit import bench_audit

    bench_audit(model, placement, out)


def _gdn(model: str, placement: Placement, out: Path) -> None:
    from specdec_core.bench.gdn_device import bench_gdn

    bench_gdn(placement, out)


BENCHES: dict[str, Callable[[str, Placement, Path], None]] = {
    "sd": _sd,
    "greedy": _greedy,
    "audit": _audit,
    "gdn": _gdn,
}
"""Name → benchmark(model, placement, folder for the records); imported when one is run."""
