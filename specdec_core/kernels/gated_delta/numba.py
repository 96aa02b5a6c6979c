"""The gated delta rule on trees, compiled for the CPU: float32, one read and one write of the state a round.

The closed form of torch.py, a tile of the state at a time (numba_step.py says how). Unlike there, a node's outputs and
factors have the same bits whatever is verified beside or after it, in any batch and on any number of threads, and a
commit has the same bits alone and fused into the next verify.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from specdec_core.kernels.gated_delta import DeltaInputs, Factors
from specdec_core.kernels.gated_delta.checks import (
    check_inputs,
    check_pending,
    require_tensor,
)
from specdec_core.kernels.gated_delta.numba_layout import AcceptedFactors, FlatWindow, Sizes, workspace
from specdec_core.kernels.gated_delta.numba_step import TILE_BYTES, gated_delta_round
from specdec_core.kernels.gated_delta.paths import path_nodes, upwards
from specdec_core.kernels.gated_delta.traffic import Traffic, size
from specdec_core.kernels.simd import LANES, padded
from specdec_core.kernels.threads import COUNTER, team
from specdec_core.placement import physical_threads
from specdec_core.topology import Forest

_scratch: dict[int, np.ndarray] = {}
"""Scratch of each team, whose runs wait for each other."""


def verify(
    state: torch.Tensor,
    inputs: DeltaInputs,
    forest: Forest,
    *,
    threads: int | None = None,
    traffic: Traffic | None = None,
) -> tuple[torch.Tensor, Factors]:
    """As `GatedDelta.verify`, for a float32 state on the CPU and one gate a head.

    q, k and v may also be 16-bit floats; sums are float32. `threads` workers (None: every core); what is moved is added
    to `traffic`. A number of value channels that is no multiple of 16 is padded to one, which copies the state.
    """
    check_compiled(state, inputs, forest)
    source = in_lanes(state)
    window = _window(inputs, forest, source.shape[3])
    _run(source, source, _nothing_accepted(len(state)), window, threads, traffic)
    return _found(window, inputs, forest, traffic)


def commit(
    state: torch.Tensor,
    pending: Factors,
    paths: Sequence[np.ndarray],
    *,
    into: torch.Tensor | None = None,
    threads: int | None = None,
    traffic: Traffic | None = None,
) -> torch.Tensor:
    """As `GatedDelta.commit`. `into`: memory for the committed state, which may be the state itself.

    New memory costs a third pass, since a processor reads what it is about to write, and the system's time to provide
    it. In place, rows with an empty path cost nothing.
    """
    return _commit(state, pending, paths, into, _no_window(len(state)), threads, traffic)


def commit_then_verify(
    state: torch.Tensor,
    pending: Factors,
    paths: Sequence[np.ndarray],
    inputs: DeltaInputs,
    forest: Forest,
    *,
    into: torch.Tensor | None = None,
    threads: int | None = None,
    traffic: Traffic | None = None,
) -> tuple[torch.Tensor, torch.Tensor, Factors]:
    """As `GatedDelta.commit_then_verify`, in one pass over the state; `into` as in `commit`."""
    check_compiled(state, inputs, forest)
    window = _window(inputs, forest, padded(state.shape[3]))
    kept = _commit(state, pending, paths, into, window, threads, traffic)
    return kept, *_found(window, inputs, forest, traffic)


def check_compiled(state: torch.Tensor, inputs: DeltaInputs, forest: Forest) -> None:
    """Raise unless the inputs fit the state and compiled code can take both."""
    require_compiled(state)
    check_inputs(state, inputs, forest)
    if inputs.log_decay.ndim != 2:
        raise ValueError(
            f"log_decay has shape {tuple(inputs.log_decay.shape)}, a gate a key channel: the compiled forms expect one "
            "a head, [N, H]; use the torch form"
        )
    _refuse_gradients(*vars(inputs).values())


def require_compiled(state: torch.Tensor) -> None:
    """Raise unless the state is one that compiled code can take."""
    require_tensor(state)
    if state.dtype != torch.float32 or state.device.type != "cpu":
        raise ValueError(
            f"state is {state.dtype} on {state.device}: the compiled forms expect float32 on the CPU; use the torch "
            "form"
        )
    _refuse_gradients(state)


def _refuse_gradients(*values: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(each.requires_grad for each in values):
        raise ValueError("state or inputs require gradients, which compiled forms do not give: use the torch form")


def goal_of(state: torch.Tensor, into: torch.Tensor | None) -> torch.Tensor:
    """Memory for a committed state: `into`, which has to be like the state, or new."""
    goal = torch.empty_like(state) if into is None else into
    if (
        goal.shape != state.shape
        or goal.dtype != state.dtype
        or not goal.is_contiguous()
        or goal.device != state.device
    ):
        raise ValueError(
            f"into is {goal.dtype} of shape {tuple(goal.shape)} on {goal.device}: expected memory like the state's, "
            f"{state.dtype} of shape {tuple(state.shape)} on {state.device}, contiguous"
        )
    apart = abs(goal.data_ptr() - state.data_ptr())
    if 0 < apart < state.numel() * state.element_size():
        raise ValueError(
            f"into begins {apart} bytes from the state and overlaps it: expected the state itself or memory beside it"
        )
    return goal


def in_lanes(values: torch.Tensor) -> torch.Tensor:
    """Float32, contiguous, the last axis padded with zeros to a multiple of 16; no copy where it is so already."""
    short = padded(values.shape[-1]) - values.shape[-1]
    values = values.detach().float()
    return F.pad(values, (0, short)) if short else values.contiguous()


def flat(values: torch.Tensor) -> np.ndarray:
    """Float32 and one-dimensional, for compiled code."""
    return values.detach().float().contiguous().numpy().reshape(-1)


def _window(inputs: DeltaInputs, forest: Forest, width: int) -> FlatWindow:
    nodes, heads = inputs.beta.shape
    return FlatWindow(
        q=flat(inputs.q),
        k=flat(inputs.k),
        v=flat(in_lanes(inputs.v)),
        log_decay=flat(inputs.log_decay),
        beta=flat(inputs.beta),
        offsets=forest.offsets,
        depths=forest.depths,
        paths=forest.paths.reshape(-1),
        columns=forest.paths.shape[1],
        outputs=flat(torch.empty(nodes * heads * width)),
        written=flat(torch.empty(nodes * heads * width)),
    )


def _no_window(rows: int) -> FlatWindow:
    none, no_index = np.zeros(0, np.float32), np.zeros(0, np.int64)
    return FlatWindow(
        none, none, none, none, none, np.zeros(rows + 1, np.int64), no_index, np.zeros(0, np.int32), 0, none, none
    )


def _found(
    window: FlatWindow, inputs: DeltaInputs, forest: Forest, traffic: Traffic | None
) -> tuple[torch.Tensor, Factors]:
    """Outputs and factors of a window that was verified."""
    nodes, heads, values = inputs.v.shape

    def shaped(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).reshape(nodes, heads, -1)[..., :values].contiguous()

    factors = Factors(inputs.k[:, :, None], shaped(window.written)[:, :, None], inputs.log_decay, forest)
    if traffic is not None:
        traffic.kept += size(factors.keys, factors.values, factors.log_decay)
    return shaped(window.outputs).to(inputs.v.dtype), factors


def _nothing_accepted(rows: int) -> AcceptedFactors:
    none = np.zeros(0, np.float32)
    return AcceptedFactors(none, none, none, np.zeros(0, np.int64), np.zeros(rows + 1, np.int64))


def _accepted(state: torch.Tensor, pending: Factors, paths: Sequence[np.ndarray]) -> AcceptedFactors:
    check_pending(state, pending, rank=1)
    nodes, starts = path_nodes(pending.forest, paths)
    return AcceptedFactors(
        keys=flat(pending.keys),
        values=flat(in_lanes(pending.values)),
        log_decay=flat(pending.log_decay),
        nodes=nodes[upwards(starts)],
        starts=starts,
    )


def _commit(
    state: torch.Tensor,
    pending: Factors,
    paths: Sequence[np.ndarray],
    into: torch.Tensor | None,
    window: FlatWindow,
    threads: int | None,
    traffic: Traffic | None,
) -> torch.Tensor:
    require_compiled(state)
    accepted = _accepted(state, pending, paths)
    goal = goal_of(state, into)
    source = in_lanes(state)
    if source.shape == state.shape:
        _run(source, goal, accepted, window, threads, traffic)
        return goal
    _run(source, source, accepted, window, threads, traffic)  # a copy already
    return goal.copy_(source[..., : state.shape[3]])


def _run(
    source: torch.Tensor,
    goal: torch.Tensor,
    accepted: AcceptedFactors,
    window: FlatWindow,
    threads: int | None,
    traffic: Traffic | None,
) -> None:
    workers = threads or physical_threads()
    rows, heads, keys, values = source.shape
    # So small that two fit the second-level cache; where there are few heads, so many that every worker has some.
    columns = values // LANES
    tiles = min(columns, max(-(-4 * keys * values // TILE_BYTES), -(-2 * workers // (rows * heads))))
    sizes = Sizes(rows, heads, keys, values, tiles)
    widest = -(-columns // tiles) * LANES
    room = workspace(int(np.diff(window.offsets).max()), int(np.diff(accepted.starts).max()), keys, widest)
    moved = np.zeros(workers * COUNTER, np.int64)
    team(workers).run(
        gated_delta_round, np.zeros(COUNTER, np.int64), sizes, widest, flat(source), flat(goal),
        source.data_ptr() != goal.data_ptr(), accepted, window, _room(workers, room), room, moved,
    )  # fmt: skip
    if traffic is not None:
        traffic.read += int(moved[0::COUNTER].sum())
        traffic.written += int(moved[1::COUNTER].sum())


def _room(workers: int, floats: int) -> np.ndarray:
    if workers not in _scratch or len(_scratch[workers]) < workers * floats:
        # torch aligns memory to whole vectors, numpy does not.
        _scratch[workers] = flat(torch.zeros(workers * floats))
    return _scratch[workers]
