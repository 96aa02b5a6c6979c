"""What recurrences and convolutions on trees refuse: one wording for all forms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from specdec_core.arrays import Array, host
from specdec_core.kernels.gated_delta import GATES, Factors, Inputs
from specdec_core.topology import Forest

STATE_DTYPES = ("float32", "float64")
HALVES = ("bfloat16", "float16")


def dtype_name(values: Array) -> str:
    """Name of a numpy or torch dtype, such as float32."""
    return str(values.dtype).removeprefix("torch.")


def require_shape(name: str, values: Array, layouts: Sequence[str], sizes: Mapping[str, int]) -> None:
    """Raise unless the shape is that of one of the layouts (`NHK`: a size a letter)."""
    expected = [tuple(sizes[axis] for axis in layout) for layout in layouts]
    if tuple(values.shape) not in expected:
        wanted = " or ".join(
            f"[{', '.join(layout)}] = {list(shape)}" for layout, shape in zip(layouts, expected, strict=True)
        )
        raise ValueError(
            f"{name} has shape {tuple(values.shape)}: expected {wanted}. The state gives rows and heads, the forest "
            "gives the nodes of all rows, flat"
        )


def require_alike(name: str, values: Array, state: Array, dtypes: Sequence[str]) -> None:
    """Raise unless the array is of one of these dtypes and lives where the state does."""
    if dtype_name(values) not in dtypes:
        raise ValueError(f"{name} is {dtype_name(values)}: expected {' or '.join(dtypes)} beside this state")
    if isinstance(values, torch.Tensor) != isinstance(state, torch.Tensor) or str(values.device) != str(state.device):
        raise ValueError(
            f"{name} is a {type(values).__name__} on {values.device}, the state a {type(state).__name__} on "
            f"{state.device}: expected both of one kind on one device; move one"
        )


def require_tensor(values: Array, name: str = "state") -> None:
    """Raise for a numpy array, which only the reference takes."""
    if not isinstance(values, torch.Tensor):
        raise ValueError(f"{name} is a {type(values).__name__}: expected a torch tensor; use torch.from_numpy")


def check_state(state: Array, rows: int, axes: str, name: str = "state") -> dict[str, int]:
    """Raise unless the state `[B, …]` is one of so many rows, contiguous, float32 or float64; returns its sizes."""
    if len(state.shape) != len(axes) or 0 in state.shape:
        raise ValueError(f"{name} has shape {tuple(state.shape)}: expected [{', '.join(axes)}], none of them 0")
    if len(state) != rows:
        raise ValueError(f"{name} of {len(state)} rows for a forest of {rows} trees: expected one tree a row")
    if dtype_name(state) not in STATE_DTYPES:
        raise ValueError(
            f"{name} is {dtype_name(state)}: expected {' or '.join(STATE_DTYPES)} (rounding it every round adds up)"
        )
    contiguous = state.is_contiguous() if isinstance(state, torch.Tensor) else state.flags.c_contiguous
    if not contiguous:
        raise ValueError(f"{name} of shape {tuple(state.shape)} is not contiguous: call contiguous() on it")
    return dict(zip(axes, state.shape, strict=True))


def check_pending(state: torch.Tensor, pending: Factors, rank: int | None = None) -> None:
    """Raise unless factors and state belong together. `rank`: of a node's factors, with one gate a head; None: any."""
    sizes = check_state(state, len(pending.forest.trees), "BHKV") | {"N": int(pending.forest.counts.sum())}
    sizes["r"] = rank or (pending.keys.shape[2] if pending.keys.ndim == 4 else 1)
    require_shape("pending keys", pending.keys, ("NHrK",), sizes)
    require_shape("pending values", pending.values, ("NHrV",), sizes)
    require_shape("pending log_decay", pending.log_decay, ("NH",) if rank else ("NH", "NHK"), sizes)
    if pending.values.dtype != state.dtype:
        raise ValueError(f"pending values are {pending.values.dtype}, the state {state.dtype}: expected one dtype")


def check_inputs(state: Array, inputs: Inputs, forest: Forest) -> None:
    """Raise unless inputs, state `[B, H, K, V]` and forest belong together and no gate makes the state grow."""
    sizes = check_state(state, len(forest.trees), "BHKV") | {"N": int(forest.counts.sum())}
    arrays = {name: getattr(inputs, name) for name in inputs.LAYOUT}
    kind = dtype_name(state)
    others = (kind, *HALVES) if kind == "float32" else (kind,)
    for name, values in arrays.items():
        require_shape(name, values, inputs.LAYOUT[name], sizes)
        require_alike(name, values, state, (kind,) if name in GATES else others)
    found = {name: dtype_name(values) for name, values in arrays.items() if name not in GATES}
    if len(set(found.values())) > 1:
        told = ", ".join(f"{name} is {kind}" for name, kind in found.items())
        raise ValueError(f"{told}: expected one dtype for all of them; convert the others")
    check_log_decay(arrays["log_decay"])


def check_log_decay(log_decay: Array) -> None:
    """Raise unless every log decay is −inf…0."""
    fine = log_decay <= 0  # false for NaN as well
    if not bool(fine.all()):
        index = tuple(int(i) for i in np.argwhere(~host(fine))[0])
        raise ValueError(
            f"log_decay at {index} is {float(log_decay[index])}: expected −inf…0, the logarithm of a factor of at most "
            "1. A NaN often is exp(A_log) = inf times softplus = 0; a positive one a missing minus sign"
        )


def check_paths(forest: Forest, paths: Sequence[np.ndarray]) -> tuple[int, ...]:
    """The node that each row's path leads to (−1: an empty path), or ValueError unless it leads there from the root."""
    if len(paths) != len(forest.trees):
        raise ValueError(f"{len(paths)} paths for {len(forest.trees)} rows: expected one a row, empty if none is kept")
    ends = []
    for row, (tree, path) in enumerate(zip(forest.trees, paths, strict=True)):
        given = np.asarray(path).tolist()
        if not given:
            ends.append(-1)
            continue
        end = given[-1]
        if not isinstance(end, int) or not 0 <= end < len(tree) or given != tree.path(end).tolist():
            raise ValueError(
                f"row {row}: path {given} in a tree with parents {tree.parents}: expected the indices of all nodes "
                "from the root (node 0) to the last accepted one, each the parent of the next"
            )
        ends.append(end)
    return tuple(ends)
