"""Records of linear-attention verification on an accelerator: exactness there, times of a layer, times of a model."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_core.evidence.schemas import RecordError, Schema

PHASES = ("verify", "commit", "round")
CLOCKS = ("stream", "graph", "host")
SHAPES = ("chain", "tree")


def _check_sizes(row: Mapping[str, Any], *names: str) -> None:
    if min(row[name] for name in names) < 1:
        told = ", ".join(f"{name} {row[name]}" for name in names)
        raise RecordError(f"{told}: expected at least 1 of each")


def _check_exactness(row: Mapping[str, Any]) -> None:
    _check_sizes(row, "rows", "most_nodes", "heads", "keys", "values", "commits")
    errors = {name: row[f"{name}_error"] for name in ("output", "state")}
    within = all(error is not None and 0 <= error <= row[f"{name}_tolerance"] for name, error in errors.items())
    if row["passed"] != within:
        raise RecordError(
            f"passed {row['passed']} with errors {errors}, tolerances {row['output_tolerance']} and "
            f"{row['state_tolerance']}: expected to have passed if, and only if, both are within (None: not finite)"
        )


def _check_seconds(row: Mapping[str, Any]) -> None:
    if not row["seconds"] or min(row["seconds"]) <= 0:
        raise RecordError(f"seconds {row['seconds'][:3]}…: expected at least one sample, all above 0")
    if row["clock"] not in CLOCKS or row["shape"] not in SHAPES:
        raise RecordError(
            f"clock {row['clock']!r}, shape {row['shape']!r}: expected one of {', '.join(CLOCKS)} and of "
            f"{', '.join(SHAPES)}"
        )


def _check_path(row: Mapping[str, Any]) -> None:
    if not 1 <= row["path"] <= row["n"]:
        raise RecordError(f"path of {row['path']} of {row['n']} nodes: expected a path of 1…n")


def _check_layer(row: Mapping[str, Any]) -> None:
    _check_sizes(row, "batch", "heads", "keys", "values", "n", "copies")
    _check_seconds(row)
    _check_path(row)
    if row["phase"] not in PHASES:
        raise RecordError(f"phase {row['phase']!r}: expected one of {', '.join(PHASES)}")


def _check_model(row: Mapping[str, Any]) -> None:
    _check_sizes(row, "layers", "batch", "n")
    _check_seconds(row)
    _check_path(row)


GDN_DEVICE_CHECK = Schema(
    "gdn_device_check",
    1,
    {
        "form": str,  # 'triton ieee', 'triton tf32x3', 'closed form'
        "dtype": str,  # of q, k and v; the state is float32
        "rows": int,  # of the forest: chains, trees and no drafts together
        "most_nodes": int,  # in a row
        "heads": int,
        "keys": int,
        "values": int,
        "seed": int,
        "commits": int,  # states that were compared, each row to a node of its own
        "output_error": float | None,  # largest, over the largest number expected; None if not finite. Of the outputs
        # and states of a delayed commit too
        "state_error": float | None,
        "output_tolerance": float,
        "state_tolerance": float,
        "passed": bool,
    },
    _check_exactness,
)
"""One line a random forest and form, against the sequential float64 reference."""

GDN_DEVICE_TIME = Schema(
    "gdn_device_time",
    1,
    {
        "way": str,  # as form above, or 'eager sequential', 'eager snapshots'
        "phase": str,  # 'round': commit of the last window and verify of the next, in one where a way can
        "clock": str,  # 'stream': from the first launch to the end of the last; 'graph': replayed, so without launching
        "shape": str,
        "batch": int,
        "heads": int,
        "keys": int,
        "values": int,
        "n": int,
        "path": int,  # nodes that are committed
        "copies": int,  # states that take turns within a sample, so that none is found in the cache
        "seconds": list[float],  # of one call, a sample a repeat; ways of one cell are interleaved
    },
    _check_layer,
)
"""One line a (cell, way, phase, clock): one layer."""

GDN_DEVICE_STEP = Schema(
    "gdn_device_step",
    1,
    {
        "model": str,  # says that its weights are random: times are real, text and acceptance are none
        "kernel": str,  # as form above
        "dtype": str,
        "layers": int,
        "clock": str,
        "shape": str,
        "batch": int,
        "n": int,  # 1: an autoregressive step
        "path": int,
        "seconds": list[float],  # of a round: verify, then a commit that the next verify takes along
    },
    _check_model,
)
"""One line a (kernel, batch, n): whole decoder steps."""

GDN_DEVICE_SKIPPED = Schema("gdn_device_skipped", 1, {"what": str, "reason": str})
"""One line a cell or arm of the plan that was not measured."""
