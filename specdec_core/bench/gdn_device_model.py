"""A whole Gated DeltaNet decoder on a device, of a published model's sizes and with random weights: what a step costs.

Times of a step do not depend on the numbers in it, so they are those of the trained model; text and acceptance would
mean nothing and are not measured.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from specdec_core.bench.gdn_device_clock import Budget, Stopwatch, sample
from specdec_core.bench.gdn_device_speed import room
from specdec_core.bench.linear_windows import balanced_tree, batch_of
from specdec_core.kernels.gated_delta import GatedDelta
from specdec_core.measure.clock import Arm
from specdec_core.models.gdn_checkpoint import GdnCheckpoint
from specdec_core.models.gdn_config import GdnConfig, expected_shapes
from specdec_core.placement import Placement
from specdec_core.targets.gated_delta_net import GatedDeltaNet
from specdec_core.topology import Topology, chain

GDN_1B3 = GdnConfig(
    hidden_size=2048, intermediate_size=5632, layers=24, linear_heads=8, linear_value_heads=8, linear_key_dim=256,
    linear_value_dim=256, conv_width=4, vocabulary=32000, context=4096,
)  # fmt: skip
"""Sizes of m-a-p/1.3B-100B-GatedDeltaNet-pure."""


@dataclass(frozen=True)
class ModelPlan:
    """Which steps: `widths` (nodes of a row) beside the autoregressive step, in these batches.

    path  nodes committed a round, or as many as there are.
    """

    name: str
    config: GdnConfig
    batches: tuple[int, ...]
    widths: tuple[int, ...]
    repeats: int
    path: int = 4


def random_checkpoint(config: GdnConfig, device: torch.device, dtype: torch.dtype, seed: int = 0) -> GdnCheckpoint:
    """Weights made on the device, of a size that keeps activations near 1."""
    generator = torch.Generator(device).manual_seed(seed)

    def made(name: str, shape: tuple[int, ...]) -> torch.Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(shape, device=device, dtype=dtype)
        scale = 1.0 if len(shape) == 1 else shape[-1] ** -0.5
        return (scale * torch.randn(shape, generator=generator, device=device)).to(dtype)

    weights = {name: made(name, shape) for name, shape in expected_shapes(config).items()}
    return GdnCheckpoint(f"random-{seed}", config, weights, None, f"random-{seed}")


def time_steps(
    plan: ModelPlan, placement: Placement, kernels: Mapping[str, GatedDelta], clock: tuple[str, Stopwatch],
    budget: Budget, skipped: Callable[[str, str], None],
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """GDN_DEVICE_STEP rows: rounds of every kernel and width of one batch, interleaved."""
    checkpoint = random_checkpoint(plan.config, placement.torch_device, placement.torch_dtype)
    targets = {name: GatedDeltaNet(checkpoint, placement, kernel=kernel) for name, kernel in kernels.items()}
    shapes: list[tuple[str, Topology]] = [("chain", chain(1))]
    for n in plan.widths:
        shapes += [("chain", chain(n)), ("tree", balanced_tree(n))]
    longest = 0.0
    for batch in plan.batches:
        before, needed = budget.left, 2 * len(targets) * len(shapes) * batch * state_bytes(plan.config)
        if longest > before or before <= 0:
            skipped(f"{plan.name}, batch {batch}", f"{max(before, 0):.0f} s left, about {longest:.0f} needed")
            continue
        if needed > room(placement.torch_device):
            skipped(f"{plan.name}, batch {batch}", f"{needed / 2**30:.1f} GiB of states needed, and not free")
            continue
        arms = {
            (kernel, *key): round_arm(target, shape, batch, plan)
            for kernel, target in targets.items()
            for key, shape in [((kind, len(shape)), shape) for kind, shape in shapes]
        }
        for arm in arms.values():
            arm()
            arm()  # the second takes the commit of the first along
        for (kernel, kind, n), seconds in sample(arms, plan.repeats, clock[1]).items():
            yield {
                "model": plan.name, "kernel": kernel, "dtype": placement.dtype, "layers": plan.config.layers,
                "clock": clock[0], "shape": kind, "batch": batch, "n": n, "path": min(plan.path, _depth(kind, n)),
                "seconds": seconds,
            }  # fmt: skip
        longest = before - budget.left


def state_bytes(config: GdnConfig) -> int:
    """Of one row, all layers, float32."""
    return 4 * config.layers * config.linear_value_heads * config.linear_key_dim * config.linear_value_dim


def round_arm(target: GatedDeltaNet, shape: Topology, batch: int, plan: ModelPlan) -> Arm:
    """A round of every row on a state of its own, which goes on from round to round and begins anew when it is full."""
    slots, shapes = np.arange(batch), batch_of(shape, batch)
    deepest = shape.path(int(shape.depths.argmax()))
    paths = [deepest[: plan.path]] * batch
    state = target.new_state(batch, plan.config.context)
    tokens = np.random.default_rng(0).integers(0, target.vocabulary, batch * len(shape))

    def arm() -> None:
        if state.lengths[0] + len(shape) > plan.config.context:
            state.release(slots)
        target.commit(state, target.verify(state, slots, tokens, shapes), paths)

    return arm


def _depth(kind: str, n: int) -> int:
    return n if kind == "chain" else int(balanced_tree(n).depths.max()) + 1
