"""The step of an EAGLE-style drafter on the engine of a placement."""

from __future__ import annotations

from specdec_core.kernels.eagle_step import EagleStep
from specdec_core.models.checkpoints import Checkpoint
from specdec_core.models.eagle_checkpoint import EagleCheckpoint
from specdec_core.placement import Placement


def build_step(checkpoint: EagleCheckpoint, target: Checkpoint, placement: Placement) -> EagleStep:
    """The drafter's step, with the target's head for the tokens that it drafts."""
    name = "model.embed_tokens.weight" if target.config.tied_head else "lm_head.weight"
    weights = {**checkpoint.weights, "head.weight": target.weights[name][checkpoint.tokens]}
    if placement.engine == "numba":
        from specdec_core.kernels.eagle_step.numba import NumbaEagle

        return NumbaEagle(checkpoint.config, weights, placement)
    from specdec_core.kernels.eagle_step.torch import TorchEagle

    return TorchEagle(checkpoint.config, weights, placement)
