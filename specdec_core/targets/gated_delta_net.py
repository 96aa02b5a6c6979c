"""A Gated DeltaNet decoder as a target, from scratch: recurrent layers, and layers of attention among them if any."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch

from specdec_core.arrays import Array
from specdec_core.kernels.gated_delta import GatedDelta
from specdec_core.kernels.gated_delta import torch as closed_form
from specdec_core.kernels.gdn_step import GdnStep
from specdec_core.kernels.plan import plan_step
from specdec_core.models.gdn_checkpoint import GdnCheckpoint
from specdec_core.placement import Placement, PlacementError, synchronise
from specdec_core.protocol import Verification
from specdec_core.state.recurrent import RecurrentState
from specdec_core.state.slots import require_context, require_tokens
from specdec_core.topology import Forest, chain, forest


def build_engine(checkpoint: GdnCheckpoint, placement: Placement) -> GdnStep:
    """The decoder step of the placement's engine with these weights."""
    if placement.engine != "torch":
        raise PlacementError(f"engine {placement.engine!r} has no Gated DeltaNet step: use the torch engine")
    from specdec_core.kernels.gdn_step.torch import TorchGdn

    return TorchGdn(checkpoint.config, checkpoint.weights, placement)


def build_kernel(placement: Placement) -> GatedDelta:
    """The form of the gated delta rule for the placement: the one place where it is chosen."""
    return cast(GatedDelta, closed_form)


class GatedDeltaNet:
    """`Target` over a Gated DeltaNet checkpoint.

    feature_layers  decoder layers of either kind whose outputs every pass returns (for drafters trained on them).
    chunk           most tokens of one prefill pass. The closed form works n² numbers out for n nodes, so that longer
                    chunks do not pay; shapes of up to 64 nodes are remembered. Changes nothing but rounding.
    delayed         whether a commit waits for the next pass, which then reads and writes each state once.
    step            the decoder step, if not the one that the placement's engine makes of these weights.
    kernel          the form of the gated delta rule, if not the placement's.
    """

    def __init__(
        self,
        checkpoint: GdnCheckpoint,
        placement: Placement | None = None,
        feature_layers: tuple[int, ...] = (),
        chunk: int = 64,
        *,
        delayed: bool = True,
        step: GdnStep | None = None,
        kernel: GatedDelta | None = None,
    ):
        self.placement = placement or Placement()
        self.config = checkpoint.config
        self.name = checkpoint.name
        self._checkpoint = checkpoint
        bad = [layer for layer in feature_layers if not 0 <= layer < self.config.layers]
        if bad:
            raise ValueError(f"feature layers {bad}: expected layers in 0…{self.config.layers - 1}")
        if chunk < 1:
            raise ValueError(f"chunk of {chunk} tokens: expected at least 1")
        self.feature_layers = tuple(sorted(feature_layers))
        self.layers = self.config.layers
        self._chunk, self._delayed = chunk, delayed
        self._step = step or build_engine(checkpoint, self.placement)
        self._given, self._kernel = kernel, kernel or build_kernel(self.placement)

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary

    @property
    def context(self) -> int:
        return self.config.context

    def placed(self, placement: Placement) -> GatedDeltaNet:
        """The same weights on another engine, device or dtype; a form of the rule that was given stays."""
        return GatedDeltaNet(
            self._checkpoint, placement, self.feature_layers, self._chunk, delayed=self._delayed, kernel=self._given
        )

    def float64_reference(self) -> GatedDeltaNet:
        """The same weights in float64 on the CPU, by the closed form."""
        return GatedDeltaNet(
            self._checkpoint, Placement("torch", "cpu", "float64"), self.feature_layers, self._chunk,
            delayed=self._delayed, kernel=cast(GatedDelta, closed_form),
        )  # fmt: skip

    def new_state(self, slots: int, capacity: int) -> RecurrentState:
        dtype, device = self.placement.torch_dtype, self.placement.torch_device
        return RecurrentState(self.config, slots, capacity, self._kernel, dtype, device, delayed=self._delayed)

    def prefill(self, state: RecurrentState, slots: np.ndarray, prompts: Sequence[np.ndarray]) -> list[Array | None]:
        state.release(slots)  # whatever they held: a prompt starts from an empty state
        return [self._prefill_row(state, slot, prompt) for slot, prompt in zip(slots, prompts, strict=True)]

    def verify(self, state: RecurrentState, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> Verification:
        logits, features, epoch = self._pass(state, slots, tokens, forest, scored=np.arange(len(tokens)))
        return Verification(logits, features, slots, forest, epoch)

    def commit(self, state: RecurrentState, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        state.commit(verification.slots, paths, verification.epoch)

    def synchronise(self) -> None:
        synchronise(self.placement.torch_device)

    def _pass(
        self, state: RecurrentState, slots: np.ndarray, tokens: np.ndarray, shape: Forest, scored: np.ndarray | None
    ) -> tuple[Array | None, Array | None, int]:
        """Logits, features and epoch of one pass over these slots."""
        require_tokens(tokens, self.vocabulary)
        require_context(state.lengths[slots][shape.rows], shape.depths, self.context)
        window = state.open(slots, shape)
        plan = plan_step(tokens, slots, state.lengths[slots], shape)
        logits, features = self._step(
            plan, window, layers=self.layers, scored=scored, feature_layers=self.feature_layers
        )
        return logits, features, window.epoch

    def _prefill_row(self, state: RecurrentState, slot: int, prompt: np.ndarray) -> Array | None:
        """One row at a time: a prompt's rows of a product already fill the machine."""
        slots = np.array([slot])
        features: list[torch.Tensor] = []
        for start in range(0, len(prompt) - 1, self._chunk):
            tokens = prompt[start : min(start + self._chunk, len(prompt) - 1)]
            _, found, epoch = self._pass(state, slots, tokens, forest([chain(len(tokens))]), scored=None)
            state.commit(slots, [np.arange(len(tokens))], epoch)
            if found is not None:
                features.append(found)
        state.flush()  # the factors of a whole chunk are not kept until the row's next pass
        return torch.cat(features) if features else None
