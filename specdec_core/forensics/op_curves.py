"""The operations of our own engines, each timed alone at n tokens, beside the whole model in the same run.

Every kind of weight matrix is run over the weights of all layers, one after another, so that they stream from memory as
they do in a pass: one layer's alone would stay in the cache and flatter the kernel. What is not a product with a
weight (attention over the cache, norms, the handing out of work) is timed as a *skeleton*: a model with the same
layers, heads and cache, whose matrices are shrunk to next to nothing. No number of the model enters the sum, so the sum
can be held against the model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec_core.kernels.skinny_linear.numba import PackedLinear
from specdec_core.kernels.skinny_linear.torch import TorchLinear
from specdec_core.measure.clock import Arm, interleaved
from specdec_core.measure.curves import curve_arms
from specdec_core.models.checkpoints import Checkpoint, tiny_llama
from specdec_core.placement import INT8, Placement, PlacementError, synchronise
from specdec_core.targets.transformer import Transformer

MODEL, SKELETON = "model", "attention and the rest"
PRODUCTS = {
    "q, k, v": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "o": ("self_attn.o_proj",),
    "gate, up": ("mlp.gate_proj", "mlp.up_proj"),
    "down": ("mlp.down_proj",),
}
"""The products of a layer, as both engines run them: matrices with the same input are one."""
HEAD = "head"
OPERATIONS = (*PRODUCTS, HEAD, SKELETON)
_SHRUNK = 16


@dataclass(frozen=True)
class Operation:
    """An operation at any n: `arm(n)` runs it `count` times, once for every layer that has one, over all `weights`."""

    name: str
    count: int
    weights: int
    arm: Callable[[int], Arm]


def operations(checkpoint: Checkpoint, placement: Placement) -> list[Operation]:
    """The products of a checkpoint on an engine (without the skeleton); holds a copy of all weights in its dtype.

    PlacementError for int8, whose products are part of steps that quantize their inputs on the way.
    """
    if placement.dtype == INT8:
        raise PlacementError("dtype int8: operations are timed in the engines' float dtypes; expected float32")
    make = {"numba": _packed, "torch": _torch}[placement.engine]
    layers = range(checkpoint.config.layers)
    found = []
    for name, parts in PRODUCTS.items():
        names = [[f"model.layers.{layer}.{part}.weight" for part in parts] for layer in layers]
        found.append(make(name, checkpoint, names, placement))
    head = "model.embed_tokens.weight" if checkpoint.config.tied_head else "lm_head.weight"
    return [*found, make(HEAD, checkpoint, [[head]], placement)]


def skeleton(checkpoint: Checkpoint) -> Checkpoint:
    """A random model with the checkpoint's layers, heads, head size and context, and matrices of a few columns."""
    c = checkpoint.config
    return tiny_llama(
        0,
        hidden_size=_SHRUNK,
        intermediate_size=_SHRUNK,
        vocabulary=_SHRUNK,
        layers=c.layers,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        context=c.context,
        rope_theta=c.rope_theta,
        tied_head=True,
        eos_ids=(),
    )


def op_samples(
    checkpoint: Checkpoint, target: Transformer, widths: Sequence[int], context: int, repeats: int, seed: int = 0
) -> dict[tuple[str, int], np.ndarray]:
    """Seconds of every operation, all its layers together, and of MODEL, at each width: `[repeats]`, interleaved.

    `target` runs this checkpoint; operations run on its engine. Behind `context` cached entries.
    """
    placement = target.placement
    arms: dict[str, Arm] = {}
    for operation in operations(checkpoint, placement):
        arms |= {f"{operation.name}/{n}": operation.arm(n) for n in widths}
    bare = Transformer(skeleton(checkpoint), placement)
    for name, each in ((SKELETON, bare), (MODEL, target)):
        arms |= {f"{name}/{n}": arm for (_, n), arm in curve_arms(each, widths, (context,), seed=seed).items()}
    seconds = interleaved(arms, repeats, warmup=2, seed=seed)
    return {(name, n): seconds[f"{name}/{n}"] for name in (*OPERATIONS, MODEL) for n in widths}


def counts(checkpoint: Checkpoint) -> dict[str, int]:
    """How often each operation, and the model, happens in one pass."""
    layers = checkpoint.config.layers
    return dict.fromkeys((*PRODUCTS, SKELETON), layers) | {HEAD: 1, MODEL: 1}


def _packed(name: str, checkpoint: Checkpoint, names: Sequence[Sequence[str]], placement: Placement) -> Operation:
    """All layers' matrices on top of one another are one tall matrix: streamed once, without a word of Python between.

    What the layers wait for one another is the skeleton's, which has as many barriers.
    """
    tall = torch.cat([checkpoint.weights[each].float() for layer in names for each in layer]).numpy()
    linear = PackedLinear(np.ascontiguousarray(tall), placement.workers)

    def arm(n: int) -> Arm:
        x = np.random.default_rng(n).standard_normal((n, linear.inputs)).astype(np.float32)
        return lambda: linear(x)

    return Operation(name, len(names), tall.size, arm)


def _torch(name: str, checkpoint: Checkpoint, names: Sequence[Sequence[str]], placement: Placement) -> Operation:
    """A call a layer, as the engine makes them."""
    dtype, device = placement.torch_dtype, placement.torch_device
    linears = [
        TorchLinear(torch.cat([checkpoint.weights[each] for each in layer]).to(device, dtype)) for layer in names
    ]

    def arm(n: int) -> Arm:
        x = torch.randn(n, linears[0].weight.shape[1], generator=torch.Generator().manual_seed(n)).to(device, dtype)

        @torch.no_grad()
        def run() -> None:
            for linear in linears:
                linear(x)
            synchronise(device)

        return run

    return Operation(name, len(names), sum(linear.weight.numel() for linear in linears), arm)
