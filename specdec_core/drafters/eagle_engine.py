"""The steps of an EAGLE-style drafter on the engine of a placement."""

from __future__ import annotations

from dataclasses import dataclass

from specdec_core.kernels.eagle_step import EagleStep
from specdec_core.models.checkpoints import Checkpoint
from specdec_core.models.eagle_checkpoint import EagleCheckpoint
from specdec_core.placement import INT8, Placement


@dataclass(frozen=True)
class Steps:
    """The step that reads committed tokens with the target's features (it alone projects those), and the step that
    reads drafted tokens with hidden states of earlier steps. Both may write one cache."""

    committed: EagleStep
    drafted: EagleStep


def build_steps(checkpoint: EagleCheckpoint, target: Checkpoint, placement: Placement) -> Steps:
    """The drafter's steps, with the target's head for the tokens that it drafts.

    In int8 it drafts a little otherwise, and nothing else changes: whatever drafts, the target decides.
    """
    name = "model.embed_tokens.weight" if target.config.tied_head else "lm_head.weight"
    head = {"head.weight": target.weights[name][checkpoint.tokens]}

    def build(part: str) -> EagleStep:
        weights = {**checkpoint.layer(part), **head}
        if placement.dtype == INT8:
            from specdec_core.kernels.eagle_step.int8 import Int8Eagle

            return Int8Eagle(checkpoint.config, weights, placement)
        if placement.engine == "numba":
            from specdec_core.kernels.eagle_step.numba import NumbaEagle

            return NumbaEagle(checkpoint.config, weights, placement)
        from specdec_core.kernels.eagle_step.torch import TorchEagle

        return TorchEagle(checkpoint.config, weights, placement)

    return Steps(build("committed"), build("drafted"))
