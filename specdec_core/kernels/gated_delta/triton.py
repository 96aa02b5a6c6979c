"""The gated delta rule on trees in Triton, for CUDA devices: float32 state, one read and one write of it a round.

The closed form of torch.py in two launches a layer (triton_step.py says how): what nodes have to do with each other,
then one pass over the state, tile by tile, which can take the commit of the window before along. With the environment
variable TRITON_INTERPRET=1, set before Triton is first imported, the same kernels run on CPU tensors, slowly: that is
how they are tested where there is no GPU.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import numpy as np
import torch

from specdec_core.kernels.gated_delta import DeltaInputs, Factors
from specdec_core.kernels.gated_delta.checks import check_inputs, check_pending, require_tensor
from specdec_core.kernels.gated_delta.paths import path_nodes
from specdec_core.placement import PlacementError
from specdec_core.topology import Forest, Topology

MOST_NODES = 64
"""Nodes of a row: a node's ancestors are the bits of one int64."""

PRECISIONS = ("ieee", "tf32x3")
KEY_BLOCK, VALUE_BLOCKS = 32, (64, 32, 16)
PROGRAMS = 256
"""Tiles of the state become smaller until there are so many: fewer leave processors of a large GPU idle."""


@cache
def library() -> Any:
    """The module `triton`. Raises PlacementError if it is not installed or does not load here."""
    try:
        import triton
    except (ImportError, OSError) as error:
        raise PlacementError(
            f"Triton is not here ({error}): it comes with torch's CUDA builds for Linux; beside others on Linux, pip "
            "install the triton of requirements.txt; on other systems use the torch form"
        ) from error
    return triton


@cache
def _kernels() -> Any:
    """The module of kernels, imported when one is first needed."""
    library()
    from specdec_core.kernels.gated_delta import triton_step

    return triton_step


def interpreted() -> bool:
    """Whether kernels run in Triton's interpreter: TRITON_INTERPRET as it was when they were first needed."""
    return type(_kernels().relate_nodes).__name__ == "InterpretedFunction"


@dataclass(frozen=True)
class _Tables:
    """A forest on a device: where each row's nodes begin `[B + 1]`, and each node's path as bits `[N]`, both int64."""

    offsets: torch.Tensor
    ancestors: torch.Tensor


class TritonGatedDelta:
    """`GatedDelta` in Triton, for one gate a head and rows of at most 64 nodes.

    precision  of products: 'ieee' (float32 throughout) or 'tf32x3' (three products of tensor cores in place of one,
               nearly float32). Interpreted kernels are float32 either way.
    """

    def __init__(self, precision: str = "ieee"):
        if precision not in PRECISIONS:
            raise ValueError(f"precision {precision!r}: expected one of {', '.join(PRECISIONS)}")
        self.precision = precision
        _kernels()
        self._last: tuple[Forest, torch.device, _Tables] | None = None

    def verify(self, state: torch.Tensor, inputs: DeltaInputs, forest: Forest) -> tuple[torch.Tensor, Factors]:
        """As `GatedDelta.verify`. q, k and v may also be 16-bit floats; sums are float32."""
        self._check(state, inputs, forest)
        return self._run(state, None, None, inputs, forest)

    def commit(self, state: torch.Tensor, pending: Factors, paths: Sequence[np.ndarray]) -> torch.Tensor:
        """As `GatedDelta.commit`."""
        path, kept = self._accepted(state, pending, paths), torch.empty_like(state)
        self._pass(state, kept, path, None)
        return kept

    def commit_then_verify(
        self, state: torch.Tensor, pending: Factors, paths: Sequence[np.ndarray], inputs: DeltaInputs, forest: Forest
    ) -> tuple[torch.Tensor, torch.Tensor, Factors]:
        """As `GatedDelta.commit_then_verify`, in one pass over the state."""
        self._check(state, inputs, forest)
        path, kept = self._accepted(state, pending, paths), torch.empty_like(state)
        return kept, *self._run(state, kept, path, inputs, forest)

    def _check(self, state: torch.Tensor, inputs: DeltaInputs, forest: Forest) -> None:
        require_runnable(state)
        check_inputs(state, inputs, forest)
        _require_gate_a_head(inputs.log_decay)
        _require_no_gradients(*vars(inputs).values())
        _require_narrow(int(forest.counts.max()), "a tree")

    def _accepted(self, state: torch.Tensor, pending: Factors, paths: Sequence[np.ndarray]) -> _Path:
        require_runnable(state)
        check_pending(state, pending, rank=1)
        nodes, starts = path_nodes(pending.forest, paths)
        longest = int(np.diff(starts).max())
        _require_narrow(longest, "a path")
        return _Path(pending, *_uploaded(nodes.tobytes(), starts.tobytes(), state.device), longest)

    def _tables(self, forest: Forest, device: torch.device) -> _Tables:
        """Tables of a forest; every layer of a step asks for the same, and hashing a large one takes long."""
        if self._last is None or self._last[0] is not forest or self._last[1] != device:
            self._last = (forest, device, _tables(forest, device))
        return self._last[2]

    def _run(
        self, state: torch.Tensor, kept: torch.Tensor | None, path: _Path | None, inputs: DeltaInputs, forest: Forest
    ) -> tuple[torch.Tensor, Factors]:
        heads, keys = state.shape[1:3]
        nodes = len(inputs.beta)
        tables, width = self._tables(forest, state.device), _power_of_two(int(forest.counts.max()))
        shared = torch.empty((2, nodes, heads, width), device=state.device)
        window = _Window(
            q=inputs.q.detach().contiguous(),
            k=inputs.k.detach().contiguous(),
            v=inputs.v.detach().contiguous(),
            beta=inputs.beta.detach().contiguous(),
            since=torch.empty((nodes, heads), device=state.device),
            lower=shared[0],
            scores=shared[1],
            offsets=tables.offsets,
            outputs=torch.empty(inputs.v.shape, dtype=inputs.v.dtype, device=state.device),
            written=torch.empty(inputs.v.shape, device=state.device),
        )
        with _current(state.device):
            _kernels().relate_nodes[(heads, len(state))](
                window.q, window.k, inputs.log_decay.detach().contiguous(), window.beta, tables.ancestors,
                tables.offsets, window.since, window.lower, window.scores,
                HEADS=heads, KEYS=keys, NODES=width, KEY_BLOCK=_key_block(keys), PRECISION=self.precision,
                num_warps=_warps(width),
            )  # fmt: skip
        self._pass(state, kept, path, window)
        return window.outputs, Factors(inputs.k[:, :, None], window.written[:, :, None], inputs.log_decay, forest)

    def _pass(self, state: torch.Tensor, kept: torch.Tensor | None, path: _Path | None, window: _Window | None) -> None:
        rows, heads, keys, values = state.shape
        state = state.detach()
        # Of the half that is switched off nothing is read: any address will do.
        accepted = [state] * 5 if path is None else path.arrays()
        verified = [state] * 10 if window is None else list(vars(window).values())
        block = _value_block(values, rows * heads)
        width = 0 if window is None else window.lower.shape[-1]
        steps = 0 if path is None else _power_of_two(path.longest)
        with _current(state.device):
            _kernels().pass_over_state[(-(-values // block), heads, rows)](
                state, state if kept is None else kept, *accepted, *verified,
                HEADS=heads, KEYS=keys, VALUES=values, NODES=width, PATH=steps, KEY_BLOCK=_key_block(keys),
                VALUE_BLOCK=block, PRECISION=self.precision, num_warps=_warps(max(width, steps)),
            )  # fmt: skip


@dataclass(frozen=True)
class _Path:
    """What is to be committed: factors, the flat nodes of all rows' paths, where each row's begin, and the longest."""

    pending: Factors
    nodes: torch.Tensor
    starts: torch.Tensor
    longest: int

    def arrays(self) -> list[torch.Tensor]:
        """In the order of the kernel's arguments."""
        factors = (self.pending.keys, self.pending.values, self.pending.log_decay)
        return [*(each.detach().contiguous() for each in factors), self.nodes, self.starts]


@dataclass(frozen=True)
class _Window:
    """What is verified, in the order of the kernel's arguments."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    beta: torch.Tensor
    since: torch.Tensor
    lower: torch.Tensor
    scores: torch.Tensor
    offsets: torch.Tensor
    outputs: torch.Tensor
    written: torch.Tensor


def require_runnable(state: torch.Tensor) -> None:
    """Raise unless the state is one that the kernels, as they were loaded, can take."""
    require_tensor(state)
    places = ("cuda", "cpu") if interpreted() else ("cuda",)
    if state.dtype != torch.float32 or state.device.type not in places:
        raise ValueError(
            f"state is {state.dtype} on {state.device}: the Triton form expects float32 on {' or '.join(places)}; use "
            "the torch form, or set TRITON_INTERPRET=1 before Triton is imported to run it on the CPU"
        )
    _require_no_gradients(state)


def _require_gate_a_head(log_decay: torch.Tensor) -> None:
    if log_decay.ndim != 2:
        raise ValueError(
            f"log_decay has shape {tuple(log_decay.shape)}, a gate a key channel: the Triton form expects one a head, "
            "[N, H]; use the torch form"
        )


def _require_no_gradients(*values: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(each.requires_grad for each in values):
        raise ValueError("state or inputs require gradients, which the Triton form does not give: use the torch form")


def _require_narrow(nodes: int, what: str) -> None:
    if nodes > MOST_NODES:
        raise ValueError(
            f"{what} of {nodes} nodes: the Triton form expects at most {MOST_NODES} in a row, whose ancestors are the "
            "bits of one integer; cut a longer prompt into chunks, or use the torch form"
        )


def _current(device: torch.device) -> AbstractContextManager:
    """Within it this device is the one that kernels are launched on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def _power_of_two(size: int) -> int:
    """The least that holds so many and that a product of tiles can have: 16, 32, 64."""
    return max(16, 1 << (size - 1).bit_length())


def _key_block(keys: int) -> int:
    return min(KEY_BLOCK, _power_of_two(keys))


def _warps(nodes: int) -> int:
    """Of a program: with 64 nodes, four would not hold their tiles in registers."""
    return 8 if nodes > 32 else 4


def _value_block(values: int, heads: int) -> int:
    """Value channels of a tile: as many as leave PROGRAMS tiles over all `heads` of all rows, if any do."""
    if interpreted():
        return min(VALUE_BLOCKS[0], _power_of_two(values))
    fitting = [block for block in VALUE_BLOCKS if block <= _power_of_two(values)]
    return next((block for block in fitting if heads * -(-values // block) >= PROGRAMS), fitting[-1])


@lru_cache(maxsize=64)
def _tables(forest: Forest, device: torch.device) -> _Tables:
    bits = [_bits(tree) for tree in forest.trees]
    return _Tables(torch.from_numpy(forest.offsets).to(device), torch.from_numpy(np.concatenate(bits)).to(device))


@lru_cache(maxsize=4096)
def _bits(shape: Topology) -> np.ndarray:
    """The ancestors of each node, itself included, as bits of an int64, `[n]`."""
    places = np.left_shift(np.uint64(1), np.arange(len(shape), dtype=np.uint64))
    return np.where(shape.ancestors, places, np.uint64(0)).sum(1, dtype=np.uint64).view(np.int64)


@lru_cache(maxsize=64)
def _uploaded(nodes: bytes, starts: bytes, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Both int64 arrays on the device: once a commit, not once a layer."""
    arrays = [np.frombuffer(each, np.int64).copy() for each in (nodes, starts)]
    if not len(arrays[0]):
        arrays[0] = np.zeros(1, np.int64)  # nothing is read of it, but it has an address
    nodes_on, starts_on = (torch.from_numpy(each).to(device) for each in arrays)
    return nodes_on, starts_on
