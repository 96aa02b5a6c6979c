"""Targets by backend name and the draft/target configurations of notebook 02, the losing ones among them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from specdec_core.bench.prompt_cache import PromptCache
from specdec_core.bench.serial_backends import NOT_HERE, BackendFactory
from specdec_core.drafters.eagle import EagleDrafter
from specdec_core.drafters.eagle_tree import EagleTreeDrafter
from specdec_core.drafters.layer_skip import LayerSkipDrafter
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.measure.sweep import Configuration
from specdec_core.models.eagle_checkpoint import EagleCheckpoint
from specdec_core.pairs import Opened
from specdec_core.placement import INT8, Placement
from specdec_core.protocol import Drafter, Target
from specdec_core.targets.transformer import Transformer

FLOAT, SMALL = "numba float32", "numba int8"
COMPILED = (FLOAT, SMALL)
"""The compiled engine with both its kinds of weights."""
LOOKED_UP = ("torch float32", "llama.cpp Q4_1", "llama.cpp Q4_0", "MLX 4-bit")
"""Other backends, which decode with n-gram look-up."""
CURVES_ONLY = ("llama.cpp Q8_0",)
"""… and one that is only timed pass by pass: the compiled engine's int8 weights are held against it."""
BACKENDS = (*COMPILED, *LOOKED_UP, *CURVES_ONLY)

TREES = (5, 11, 15)
"""Nodes of the trained drafter's trees: with the newest token 6, 12 and 16 rows. Six are one step of the kernels where
they have sixteen registers, twelve where they have thirty-two; sixteen are more than one on either."""
DRAFTER_DTYPE = INT8
"""Weights of the trained drafter on either target; the target's own dtype does not bind it."""

SOME_KS, FEW_KS = (1, 2, 4, 8), (1, 4)
"""Speculation lengths of configurations that lose, and of those that are slow besides."""


@dataclass(frozen=True)
class Backends:
    """Targets by backend name, in the order of BACKENDS, and why others could not be opened."""

    targets: Mapping[str, Target]
    absent: Mapping[str, str]


def open_backends(names: Sequence[str], opened: Opened, factory: BackendFactory) -> Backends:
    """The opened model on each of these backends. One that this machine lacks is left out and its reason is kept.

    ValueError for a name that is not in BACKENDS.
    """
    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise ValueError(f"unknown backends {unknown}: expected some of {', '.join(BACKENDS)}")
    targets: dict[str, Target] = {}
    absent: dict[str, str] = {}
    for name in sorted(names, key=BACKENDS.index):
        try:
            targets[name] = _compiled(name, opened.target) if name in COMPILED else factory.open(name)
        except NOT_HERE as error:
            absent[name] = str(error)
    return Backends(targets, absent)


def build_configurations(
    targets: Mapping[str, Target], opened: Opened, ks: Sequence[int], drafter: EagleCheckpoint | None = None
) -> list[Configuration]:
    """Draft/target configurations over those of the targets that are there.

    On the compiled engine: look-up as chain and tree; the trained `drafter`, if there is one, as chain and trees; the
    target's own first third (cheap, unreliable), the whole target (always right, as dear as what it saves) and its int8
    weights (nearly always right, half as dear). On every other backend look-up.

    Prompts are prefilled once on our engines, and copied in ever after: no time of a prefill is in any record.
    """
    found: list[Configuration] = []
    cached = {name: PromptCache(each) if isinstance(each, Transformer) else each for name, each in targets.items()}

    def add(
        backend: str, name: str, made: Drafter, step_model: Target | None = None, own: Sequence[int] = tuple(ks)
    ) -> None:
        few = tuple(k for k in ks if k in own)
        label = f"{backend} · {name}"
        found.append(
            Configuration(label, backend, opened.checkpoint.name, name, cached[backend], made, step_model, few)
        )

    trained = trained_drafters(opened, drafter) if drafter is not None else {}
    for backend in COMPILED:
        if backend in targets:
            add(backend, "n-gram", NGramDrafter())
            if backend == FLOAT:
                add(backend, "n-gram tree", NGramDrafter(candidates=2))
            for name, made in trained.items():
                add(backend, name, made)
    full = targets.get(FLOAT)
    if isinstance(full, Transformer):
        third = max(1, full.config.layers // 3)
        skip = LayerSkipDrafter(full, third)
        add(FLOAT, f"first {third} layers", skip, full.early_exit(third), FEW_KS)
        add(FLOAT, "itself", ModelDrafter(cached[FLOAT], full.vocabulary), full, SOME_KS)
        if SMALL in targets:
            small = ModelDrafter(cached[SMALL], full.vocabulary)
            add(FLOAT, "itself in int8", small, targets[SMALL])
    for backend in LOOKED_UP:
        if backend in targets:
            add(backend, "n-gram", NGramDrafter(), None, SOME_KS if backend.startswith("llama.cpp") else FEW_KS)
    return found


def sampled_configurations(configurations: Sequence[Configuration], ks: Sequence[int]) -> list[Configuration]:
    """Those that are measured at T = 1 too, at these K: look-up and the trained drafter on the compiled engine."""
    return [
        replace(one, ks=tuple(ks))
        for one in configurations
        if one.backend in COMPILED and (one.drafter_name == "n-gram" or is_trained(one.drafter))
    ]


def is_trained(drafter: Drafter) -> bool:
    """Whether it continues the target's features, so that its cost is measured along a text."""
    return isinstance(drafter, EagleDrafter | EagleTreeDrafter)


def _compiled(name: str, target: Transformer) -> Transformer:
    dtype = INT8 if name == SMALL else "float32"
    if (target.placement.engine, target.placement.dtype) == ("numba", dtype):
        return target
    return target.placed(Placement("numba", dtype=dtype, threads=target.placement.threads))


def trained_drafters(opened: Opened, checkpoint: EagleCheckpoint) -> dict[str, Drafter]:
    """The drafter's forms, each shared by all targets: whatever it remembers is forgotten when a decoding starts."""
    placement = Placement("numba", dtype=DRAFTER_DTYPE, threads=opened.target.placement.threads)
    weights = checkpoint, opened.checkpoint, placement
    forms: dict[str, Drafter] = {"EAGLE chain": EagleDrafter(*weights)}
    return forms | {f"EAGLE tree {nodes}": EagleTreeDrafter(*weights, nodes=nodes) for nodes in TREES}
