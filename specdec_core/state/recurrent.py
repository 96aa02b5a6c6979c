"""The state of a model with recurrent layers: one matrix a head instead of a cache, committed by compact factors.

A pass leaves each layer's factors in its `Window`; nothing committed changes. Committing a path applies the factors of
its nodes, and the last inputs of the short convolution with them. A *delayed* commit only takes note of the path: the
factors are applied when the next pass comes to the layer, so that a round reads and writes the state once. Attention
layers among the recurrent ones keep keys and values beside it, ragged, and are committed by the same call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch

from specdec_core.kernels.gated_delta import DeltaInputs, GatedDelta, short_convolution
from specdec_core.kernels.gated_delta.ancestry import index
from specdec_core.kernels.gated_delta.checks import check_paths
from specdec_core.kernels.gdn_step import GdnShape
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.state.slots import CacheError
from specdec_core.topology import Forest

_Function = TypeVar("_Function", bound=Callable[..., Any])


def _in_normal_mode(function: _Function) -> _Function:
    """Run outside inference mode, which a step may be in: index tables are remembered for every shape, and one that
    was made in inference mode could not be used by training later."""
    return cast(_Function, torch.inference_mode(False)(torch.no_grad()(function)))


class RecurrentState(RaggedKV):
    """Per slot: state, last inputs of the convolution, keys and values of the attention layers (if any), a length.

    memory       a tensor `[slots, H, K, V]` a recurrent layer: float64 if that is the dtype, else float32.
    convolution  a tensor `[slots, C, W − 1]` a recurrent layer, in `dtype`: inputs before the convolution, newest last.
    kernel       the form of the gated delta rule: a module of kernels.gated_delta, or anything with its functions.
    delayed      whether a commit waits for the next pass. Logits are the same but for rounding.

    A state that is overwritten cannot go back: `rewind` reaches 0, the present length, and whatever lies on a path that
    still waits; anything else raises.
    """

    def __init__(
        self,
        shape: GdnShape,
        slots: int,
        capacity: int,
        kernel: GatedDelta,
        dtype: torch.dtype = torch.float32,
        device: torch.device | str = "cpu",
        *,
        delayed: bool = True,
    ):
        attention = len(shape.attention_layers)
        super().__init__(attention, slots, shape.kv_heads, capacity, shape.head_dim, dtype, device)
        self.kernel, self.delayed = kernel, delayed
        sizes = (slots, shape.linear_value_heads, shape.linear_key_dim, shape.linear_value_dim)
        wide, layers = torch.promote_types(dtype, torch.float32), range(shape.layers - attention)
        self.memory = [torch.zeros(sizes, dtype=wide, device=device) for _ in layers]
        taps = (slots, shape.conv_channels, shape.conv_width - 1)
        self.convolution = [torch.zeros(taps, dtype=dtype, device=device) for _ in layers]
        self._window: Window | None = None
        self._waiting: _Waiting | None = None

    def open(self, slots: np.ndarray, forest: Forest) -> Window:
        """A new pass over these slots, one tree each. Earlier verifications can no longer be committed."""
        self.require_room(slots, forest.counts)
        if self._waiting is not None and not np.array_equal(self._waiting.window.slots, slots):
            self.flush()
        self._window = Window(self, slots, forest, self.begin())
        return self._window

    def commit(self, slots: np.ndarray, paths: Sequence[np.ndarray], epoch: int) -> None:
        """Keep the nodes on each row's path (node indices from the root; empty: none) of the last pass."""
        window = self._window
        if epoch == self.epoch:
            self._require_committable(window, slots, paths)
        super().commit(slots, paths, epoch)
        self._window = None
        if window is not None and any(map(len, paths)):
            self._waiting = _Waiting(window, [np.array(path, np.int64) for path in paths])
            if not self.delayed:
                self.flush()

    def _require_committable(self, window: Window | None, slots: np.ndarray, paths: Sequence[np.ndarray]) -> None:
        if window is None or window.epoch != self.epoch or not np.array_equal(window.slots, slots):
            given = None if window is None else window.slots.tolist()
            raise CacheError(f"commit of slots {slots.tolist()} after a pass over {given}: expected those of the pass")
        if not window.complete:
            raise CacheError("commit of a pass that did not run every recurrent layer: run all layers, then commit")
        try:
            check_paths(window.forest, paths)
        except ValueError as error:
            raise CacheError(str(error)) from None

    @_in_normal_mode
    def flush(self) -> None:
        """Apply a commit that waits for the next pass now."""
        if self._waiting is not None:
            for layer in range(len(self.memory)):
                self._waiting.convolve(self, layer)
                self._waiting.apply(self, layer)
            self._waiting = None

    def rewind(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Shorten slots to earlier lengths, `[B]`; CacheError, and nothing is changed, where the state is gone."""
        for slot, length in zip(slots, lengths, strict=True):
            least = self.lengths[slot] - self._undone(slot)
            if 0 < length < least:
                raise CacheError(
                    f"slot {slot} of length {self.lengths[slot]} cannot be rewound to {length}: a recurrent state is "
                    f"overwritten as it advances, so expected 0 or {least}…{self.lengths[slot]}. Prefill the shorter "
                    "text, or verify as one draft what may be refused and commit the accepted path"
                )
        before = self.lengths[slots]
        super().rewind(slots, lengths)
        self._window = None
        for slot, length, back in zip(slots, lengths, before - lengths, strict=True):
            if back and not length:
                self._forget(np.array([slot]))
            elif back and self._waiting is not None:
                self._waiting.shorten(slot, int(back))

    def release(self, slots: np.ndarray) -> None:
        """Empty slots for other rows."""
        super().release(slots)
        self._window = None
        self._forget(slots)

    def scratch_view(self) -> RaggedKV:
        """Refused: there are no entries past the committed ones that a drafter could borrow."""
        raise CacheError(
            "a recurrent state has no scratch entries: its layers cannot be borrowed for drafting; use a drafter with "
            "weights of its own, or look-up"
        )

    def _undone(self, slot: int) -> int:
        """Newest tokens of a slot that no layer has taken in yet."""
        return self._waiting.length(slot) if self._waiting is not None else 0

    def _forget(self, slots: np.ndarray) -> None:
        if self._waiting is not None:
            for slot in slots:
                self._waiting.shorten(slot, None)
        where = torch.as_tensor(np.asarray(slots, np.int64), device=self.keys.device)
        for stored in (*self.memory, *self.convolution):
            stored[where] = 0


class Window:
    """One pass over some slots, `GdnCache` to the step: their rows of the state, and the factors that it leaves.

    inputs, factors  what a commit of each recurrent layer needs, of the convolution and of the rule; None before the
                     layer ran, and again once it is committed.
    """

    def __init__(self, state: RecurrentState, slots: np.ndarray, forest: Forest, epoch: int):
        self.slots, self.forest, self.epoch = np.array(slots, np.int64), forest, epoch
        self.rows = index(self.slots, state.keys.device)
        self.whole = np.array_equal(self.slots, np.arange(state.slots))
        self.inputs: list[short_convolution.ConvolutionFactors | None] = [None] * len(state.memory)
        self.factors: list[Any] = [None] * len(state.memory)
        self.keys, self.values = state.keys, state.values
        self._state = state

    @property
    def complete(self) -> bool:
        """Whether every layer has run, and none is committed."""
        return all(each is not None for each in (*self.inputs, *self.factors))

    @_in_normal_mode
    def convolve(self, layer: int, inputs: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """As `GdnCache.convolve`, after the commit that waits."""
        if self._state._waiting is not None:
            self._state._waiting.convolve(self._state, layer)
        cache = self._state.convolution[layer][self.rows]
        outputs, self.inputs[layer] = short_convolution.convolve(cache, inputs, weights, self.forest)
        return outputs

    @_in_normal_mode
    def recur(self, layer: int, inputs: DeltaInputs) -> torch.Tensor:
        """As `GdnCache.recur`; with the commit that waits, in one."""
        waiting, memory = self._state._waiting, self._state.memory
        if waiting is None or waiting.window.factors[layer] is None:
            outputs, self.factors[layer] = self._state.kernel.verify(memory[layer][self.rows], inputs, self.forest)
            return outputs
        kept, outputs, self.factors[layer] = self._state.kernel.commit_then_verify(
            memory[layer][self.rows], waiting.window.factors[layer], waiting.paths, inputs, self.forest
        )
        self.write(memory, layer, kept)
        waiting.window.factors[layer] = None
        return outputs

    def write(self, stores: list[torch.Tensor], layer: int, kept: torch.Tensor) -> None:
        """Put rows back; where they are all there are, without a copy."""
        if self.whole:
            stores[layer] = kept
        else:
            stores[layer][self.rows] = kept


@dataclass
class _Waiting:
    """Accepted paths of a window that no later pass has applied, or not to every layer."""

    window: Window
    paths: list[np.ndarray]

    def length(self, slot: int) -> int:
        """Nodes of a slot's path, if they can still be left out: no layer has applied any."""
        if not self.window.complete:
            return 0
        return sum(len(self.paths[row]) for row in np.flatnonzero(self.window.slots == slot))

    def shorten(self, slot: int, back: int | None) -> None:
        """Leave the last `back` nodes of a slot's path out, or all (None)."""
        for row in np.flatnonzero(self.window.slots == slot):
            path = self.paths[row]
            self.paths[row] = path[: 0 if back is None else len(path) - back]

    def convolve(self, state: RecurrentState, layer: int) -> None:
        """Commit a layer's convolution, once."""
        pending = self.window.inputs[layer]
        if pending is not None:
            kept = short_convolution.commit(state.convolution[layer][self.window.rows], pending, self.paths)
            self.window.write(state.convolution, layer, kept)
            self.window.inputs[layer] = None

    def apply(self, state: RecurrentState, layer: int) -> None:
        """Commit a layer's state, once."""
        pending = self.window.factors[layer]
        if pending is not None:
            kept = state.kernel.commit(state.memory[layer][self.window.rows], pending, self.paths)
            self.window.write(state.memory, layer, kept)
            self.window.factors[layer] = None
