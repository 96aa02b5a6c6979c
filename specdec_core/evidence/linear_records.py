"""Records of notebook 06, first half: exactness of linear-attention verification, what it moves, how long it takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_core.evidence.schemas import RecordError, Schema


def _check_error(row: Mapping[str, Any]) -> None:
    if min(row["trees"], row["nodes"], row["commits"]) < 1 or min(row["worst_output"], row["worst_state"]) < 0:
        raise RecordError(
            f"{row['trees']} trees, {row['nodes']} nodes, {row['commits']} commits, worst errors "
            f"{row['worst_output']} and {row['worst_state']}: expected at least one of each, no error < 0"
        )
    if max(row["resets"], row["negative"]) > row["nodes"] or not 0 <= row["changed"] <= row["trees"]:
        raise RecordError(
            f"{row['resets']} resets and {row['negative']} negative eigenvalues of {row['nodes']} nodes, "
            f"{row['changed']} changed states of {row['trees']} trees: expected no more than there are"
        )


def _check_window(row: Mapping[str, Any]) -> None:
    nodes, parents, path = len(row["parents"]), row["parents"], row["path"]
    if any(len(row[name]) != nodes for name in ("log_decay", "beta")) or len(row["weights"]) != len(path):
        raise RecordError(
            f"{nodes} parents, {len(row['log_decay'])} gates, {len(row['beta'])} rates, a path of {len(path)} nodes, "
            f"{len(row['weights'])} weights: expected a gate and a rate a node, a weight a node of the path"
        )
    if not path or [parents[node] for node in path] != [-1, *path[:-1]]:
        raise RecordError(
            f"path {path} in a tree with parents {parents}: expected nodes from the root, one after another"
        )


def _check_layer(row: Mapping[str, Any]) -> None:
    if min(row[name] for name in ("heads", "keys", "values", "batch", "n")) < 1 or row["shape"] not in SHAPES:
        raise RecordError(
            f"{row['heads']} heads of {row['keys']} × {row['values']}, batch {row['batch']}, n = {row['n']}, shape "
            f"{row['shape']!r}: expected at least one of each, and one of {', '.join(SHAPES)}"
        )
    if not 0 <= row["accepted"] <= row["batch"] * row["n"]:
        raise RecordError(f"{row['accepted']} nodes accepted of {row['batch']} × {row['n']}: expected 0 to all of them")
    if row["state_bytes"] != 4 * row["batch"] * row["heads"] * row["keys"] * row["values"]:
        raise RecordError(
            f"a state of {row['state_bytes']} bytes: expected 4 × batch × heads × keys × values (float32)"
        )


def _check_traffic(row: Mapping[str, Any]) -> None:
    _check_layer(row)
    counted = [row[f"{name}_bytes"] for name in ("read", "written", "kept", "working")]
    if min(counted) < 0 or row["launches"] < 1:
        raise RecordError(f"bytes {counted}, {row['launches']} launches: expected none below 0 and at least one launch")


def _check_speed(row: Mapping[str, Any]) -> None:
    _check_layer(row)
    if bool(row["seconds"]) == bool(row["left_out"]) or any(value <= 0 for value in row["seconds"]):
        raise RecordError(
            f"seconds {row['seconds'][:3]}…, left out {row['left_out']!r}: expected either times above 0 or a reason"
        )
    if min(row["bytes_per_second"], row["flops_per_second"], row["operations"]) <= 0:
        raise RecordError(
            f"{row['bytes_per_second']} bytes and {row['flops_per_second']} operations a second, {row['operations']} "
            "operations a round: expected ceilings and work above 0"
        )


SHAPES = ("chain", "tree")

LINEAR_ERROR = Schema(
    "linear_error",
    1,
    {
        "form": str,  # 'torch float64', 'torch float32', 'numba float32'
        "kind": str,  # 'chains', 'trees', 'forests' (rows of any shape), 'rounds' (many windows, rows changing places)
        "trees": int,  # rows of all windows
        "nodes": int,
        "commits": int,  # states compared: every node of every tree and none, of rounds one a row at the end
        "resets": int,  # nodes with a head that forgets all (log decay ≤ −90)
        "negative": int,  # nodes with a head whose rate exceeds 1: a negative eigenvalue
        "changed": int,  # rows whose state was not the same bits after committing nothing
        "worst_output": float,  # largest deviation from the sequential float64 reference over its largest number
        "worst_state": float,
        "worst_seed": int,  # of the window with the largest of both
        "tolerance": float,
    },
    _check_error,
)
"""One line a (form, kind)."""

LINEAR_WINDOW = Schema(
    "linear_window",
    1,
    {
        "parents": list[int],  # −1: the root
        "path": list[int],  # accepted nodes, root first
        "log_decay": list[float],  # g of each node
        "beta": list[float],
        "weights": list[float],  # e^{G_j − G_i}: how much of each outer product of the path is left at its end
        "left": float,  # e^{G_j}: how much of the state before the window is left
        "error": float,  # of the committed state, in float32
    },
    _check_window,
)
"""One window of one head, to be drawn."""

_LAYER = {
    "scheme": str,
    "shape": str,  # 'chain' or 'tree'
    "size": str,  # name of the layer
    "heads": int,
    "keys": int,  # key channels of a head
    "values": int,
    "batch": int,
    "n": int,  # nodes a row
    "accepted": int,  # nodes of all rows that were committed
    "state_bytes": int,  # of the whole batch
}

LINEAR_TRAFFIC = Schema(
    "linear_traffic",
    1,
    _LAYER
    | {
        "read_bytes": int,  # of states, in memory, by verify and commit
        "written_bytes": int,
        "kept_bytes": int,  # what verify leaves for the commit: factors, inputs or states
        "working_bytes": int,  # states beside the committed one while verify runs
        "launches": int,  # compiled parallel regions, and torch operations on states
    },
    _check_traffic,
)
"""One line a (scheme, shape, n): a round, counted in the loops that do it."""

LINEAR_SPEED = Schema(
    "linear_speed",
    1,
    _LAYER
    | {
        "threads": int,
        "seconds": list[float],  # a round (verify, then commit), a sample a repeat; schemes of one cell pair by repeat
        "left_out": str,  # why it was not timed, '' if it was
        "worst_error": float | None,  # against the closed form in float64, of a round before the timing
        "operations": float,  # floating-point operations that a round of the closed form needs
        "bytes_per_second": float,  # what this machine reads at best, in the same run
        "flops_per_second": float,  # a plain product of matrices at best, in the same run
        "cache_bytes": int | None,  # of the last-level cache; None where the system does not say
    },
    _check_speed,
)
"""One line a (scheme, shape, size, batch, n)."""
