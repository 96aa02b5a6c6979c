"""A Llama-family decoder as a target, from scratch, on either engine, over the ragged cache."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec_core.arrays import Array
from specdec_core.kernels.llama_step import LlamaStep
from specdec_core.kernels.plan import plan_step
from specdec_core.models.checkpoints import Checkpoint
from specdec_core.placement import INT8, Placement, synchronise
from specdec_core.protocol import Verification
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.topology import Forest, chain, forest


def build_engine(checkpoint: Checkpoint, placement: Placement) -> LlamaStep:
    """The decoder step of the placement's engine with these weights."""
    if placement.dtype == INT8:
        from specdec_core.kernels.llama_step.int8 import Int8Llama

        return Int8Llama(checkpoint.config, checkpoint.weights, placement)
    if placement.engine == "numba":
        from specdec_core.kernels.llama_step.numba import NumbaLlama

        return NumbaLlama(checkpoint.config, checkpoint.weights, placement)
    from specdec_core.kernels.llama_step.torch import TorchLlama

    return TorchLlama(checkpoint.config, checkpoint.weights, placement)


class Transformer:
    """`Target` over a Llama-family checkpoint.

    feature_layers  decoder layers whose outputs every pass returns (for drafters trained on them).
    chunk           most tokens of one prefill pass: bounds memory, changes nothing else.
    step            the decoder step, if not the one that the placement's engine makes of these weights.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        placement: Placement | None = None,
        feature_layers: tuple[int, ...] = (),
        chunk: int = 512,
        step: LlamaStep | None = None,
    ):
        self.placement = placement or Placement()
        self.config = checkpoint.config
        self.name = checkpoint.name
        self._checkpoint = checkpoint
        bad = [layer for layer in feature_layers if not 0 <= layer < self.config.layers]
        if bad:
            raise ValueError(f"feature layers {bad}: expected layers in 0…{self.config.layers - 1}")
        self.feature_layers = tuple(sorted(feature_layers))
        self.layers = self.config.layers
        self._chunk = chunk
        self._step = step or build_engine(checkpoint, self.placement)

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary

    @property
    def context(self) -> int:
        return self.config.context

    def placed(self, placement: Placement) -> Transformer:
        """The same weights on another engine, device or dtype."""
        return Transformer(self._checkpoint, placement, self.feature_layers, self._chunk)

    def float64_reference(self) -> Transformer:
        """The same weights in float64 on the CPU by plain torch, read layer by layer: slow, exact, small in memory."""
        from specdec_core.kernels.llama_step.torch import StreamedTorchLlama

        placement = Placement("torch", "cpu", "float64")
        step = StreamedTorchLlama(self.config, self._checkpoint.weights, placement)
        return Transformer(self._checkpoint, placement, self.feature_layers, self._chunk, step)

    def early_exit(self, layers: int) -> Transformer:
        """The first `layers` layers with the final norm and head: the same weights, usable on the same state."""
        if not 1 <= layers < self.config.layers:
            raise ValueError(f"early exit after {layers} layers: expected 1…{self.config.layers - 1}")
        view = object.__new__(Transformer)
        view.__dict__.update(self.__dict__)
        view.layers, view.feature_layers = layers, ()
        view.name = f"{self.name}[:{layers}]"
        return view

    def new_state(self, slots: int, capacity: int) -> RaggedKV:
        c = self.config
        dtype, device = self.placement.torch_dtype, self.placement.torch_device
        return RaggedKV(c.layers, slots, c.kv_heads, capacity, c.head_dim, dtype, device)

    def prefill(self, state: RaggedKV, slots: np.ndarray, prompts: Sequence[np.ndarray]) -> list[Array | None]:
        state.release(slots)  # whatever they held: a prompt starts at entry 0
        return [self._prefill_row(state, slot, prompt) for slot, prompt in zip(slots, prompts, strict=True)]

    def verify(self, state: RaggedKV, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> Verification:
        state.require_room(slots, forest.counts)
        epoch = state.begin()
        plan = plan_step(tokens, slots, state.lengths[slots], forest)
        everything = np.arange(len(tokens))
        logits, features = self._step(
            plan, state, layers=self.layers, scored=everything, feature_layers=self.feature_layers
        )
        return Verification(logits, features, slots, forest, epoch)

    def commit(self, state: RaggedKV, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        state.commit(verification.slots, paths, verification.epoch)

    def synchronise(self) -> None:
        synchronise(self.placement.torch_device)

    def _prefill_row(self, state: RaggedKV, slot: int, prompt: np.ndarray) -> Array | None:
        """One row at a time: a prompt's rows of a product already fill the machine."""
        slots, features = np.array([slot]), []
        for start in range(0, len(prompt) - 1, self._chunk):
            tokens = prompt[start : min(start + self._chunk, len(prompt) - 1)]
            shape = forest([chain(len(tokens))])
            state.require_room(slots, shape.counts)
            epoch = state.begin()
            plan = plan_step(tokens, slots, state.lengths[slots], shape)
            _, found = self._step(plan, state, layers=self.layers, scored=None, feature_layers=self.feature_layers)
            state.commit(slots, [np.arange(len(tokens))], epoch)
            features.append(found)
        if not self.feature_layers or not features:
            return None
        return features[0] if len(features) == 1 else _concatenate(features)


def _concatenate(parts: list[Array]) -> Array:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    import torch

    return torch.cat(parts)
