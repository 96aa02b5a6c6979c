"""Weights of an EAGLE-style drafter: decoder layers that continue its target's hidden states (Li et al., 2024).

Two layers of one shape, of which a step runs one. The *committed* layer reads tokens that the target has committed,
with the target's features before them; the *drafted* one reads tokens drafted since, with the hidden state that the
step before returned. One layer for both kinds of input does either worse than a layer of its own.

One safetensors file. It does not hold what is the target's: the embedding, and the head, whose rows for the draft
vocabulary are taken from the target's. So it belongs to one target, whose fingerprint it carries.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specdec_core.cache import atomic_write
from specdec_core.models.checkpoints import Checkpoint, fingerprint
from specdec_core.models.errors import CorruptFile, ModelError, safetensors_as_os_error

FORMAT = "specdec eagle drafter, version 2"
LARGEST_FILE = 20_000_000

PARTS = ("committed", "drafted")
"""The two layers: names of their tensors begin so."""


@dataclass(frozen=True)
class EagleConfig:
    """Sizes of the drafter's layers; names as in LlamaConfig.

    features    hidden states of the target that are joined: F layers of H units each.
    vocabulary  D, tokens that it can draft.
    """

    hidden_size: int
    intermediate_size: int
    heads: int
    kv_heads: int
    head_dim: int
    features: int
    vocabulary: int
    context: int
    rope_theta: float
    norm_eps: float


@dataclass(frozen=True, eq=False)
class EagleCheckpoint:
    """A drafter's weights and what it was made for.

    weights         names of `expected_shapes` → tensors on the CPU; matrices `[out, in]`.
    tokens          `[D]` int64, ascending: the target's id of each draft token.
    target          name and fingerprint of the target that it was trained on.
    feature_layers  decoder layers of the target, ascending, whose outputs it reads.
    card            how it was trained: data, steps, seed, held-out figures.
    """

    config: EagleConfig
    weights: Mapping[str, torch.Tensor]
    tokens: torch.Tensor
    target: str
    target_fingerprint: str
    feature_layers: tuple[int, ...]
    card: Mapping[str, Any]

    def layer(self, part: str) -> dict[str, torch.Tensor]:
        """Tensors of one of PARTS by the names of `layer_shapes`, and fc."""
        names = layer_shapes(self.config)
        return {"fc.weight": self.weights["fc.weight"], **{name: self.weights[f"{part}.{name}"] for name in names}}

    def require_target(self, checkpoint: Checkpoint) -> None:
        """Raise ModelError for another target than the one it was trained on."""
        if checkpoint.fingerprint != self.target_fingerprint:
            raise ModelError(
                f"this drafter reads the hidden states of {self.target} ({self.target_fingerprint[:12]}), and the "
                f"target is {checkpoint.name} ({checkpoint.fingerprint[:12]}): give its own target, or train another"
            )


def expected_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor: fc, which joins the features, and both layers."""
    joined = {"fc.weight": (config.hidden_size, config.features * config.hidden_size)}
    return joined | {f"{part}.{name}": shape for part in PARTS for name, shape in layer_shapes(config).items()}


def layer_shapes(config: EagleConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of a layer's tensors. The attention reads [embedding, hidden], each normed: 2H inputs."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    return {
        "embedding_norm.weight": (hidden,),
        "embedding_proj.weight": (hidden, hidden),
        "hidden_norm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, 2 * hidden),
        "self_attn.k_proj.weight": (keys, 2 * hidden),
        "self_attn.v_proj.weight": (keys, 2 * hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
        "norm.weight": (hidden,),
    }


def eagle_config(target: Checkpoint, features: int, vocabulary: int) -> EagleConfig:
    """Layers of the target's own shape."""
    c = target.config
    return EagleConfig(
        c.hidden_size, c.intermediate_size, c.heads, c.kv_heads, c.head_dim,
        features, vocabulary, c.context, c.rope_theta, c.norm_eps,
    )  # fmt: skip


def save_eagle(checkpoint: EagleCheckpoint, path: Path, dtype: torch.dtype = torch.float16) -> Path:
    """Write one file in `dtype`; raises ModelError if it would exceed LARGEST_FILE bytes, or a weight the dtype."""
    stored = {name: tensor.to(dtype).contiguous() for name, tensor in checkpoint.weights.items()}
    if infinite := _infinite(stored):
        raise ModelError(f"{path}: {', '.join(infinite)} would hold NaN or ∞ in {dtype}: save it in float32")
    stored["tokens"] = checkpoint.tokens.to(torch.int32)
    header = {
        "format": FORMAT,
        "config": asdict(checkpoint.config),
        "target": checkpoint.target,
        "target_fingerprint": checkpoint.target_fingerprint,
        "feature_layers": list(checkpoint.feature_layers),
        "card": dict(checkpoint.card),
    }
    with atomic_write(path) as temporary, safetensors_as_os_error():
        save_file(stored, temporary, metadata={"eagle": json.dumps(header, sort_keys=True)})
        if (size := temporary.stat().st_size) > LARGEST_FILE:
            raise ModelError(f"{path} would be {size} bytes: expected {LARGEST_FILE} at most; a smaller layer?")
    return path


def load_eagle(path: Path) -> EagleCheckpoint:
    """Read a file of `save_eagle`, in float32. Raises CorruptFile if it is absent, damaged or of another kind."""
    path = Path(path)
    if not path.is_file():
        raise CorruptFile(f"{path} is absent: expected a drafter's safetensors file; train one, or take it from git")
    try:
        with safe_open(path, framework="pt") as file:
            header = json.loads((file.metadata() or {}).get("eagle", "{}"))
            weights = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError) as error:
        raise CorruptFile(f"{path} is truncated or damaged ({error}): restore it, or train it again") from None
    if not isinstance(header, dict) or header.get("format") != FORMAT:
        said = header.get("format") if isinstance(header, dict) else header
        raise CorruptFile(f"{path} says it is {said!r}: expected {FORMAT!r}, a file of `train eagle`")
    tokens = weights.pop("tokens", torch.empty(0)).long()
    try:
        checkpoint = EagleCheckpoint(
            EagleConfig(**header["config"]),
            MappingProxyType({name: tensor.float() for name, tensor in weights.items()}),
            tokens,
            header["target"],
            header["target_fingerprint"],
            tuple(header["feature_layers"]),
            header["card"],
        )
    except (KeyError, TypeError) as error:
        raise CorruptFile(f"{path}: its header lacks or misnames something ({error}); train it again") from None
    _require_sound(checkpoint, path)
    return checkpoint


def _require_sound(checkpoint: EagleCheckpoint, path: Path) -> None:
    """Raise CorruptFile unless every tensor has its shape and finite values, and no token is named twice: a law over
    the draft tokens would otherwise lose mass on its way to the target's vocabulary."""
    config, tokens = checkpoint.config, checkpoint.tokens
    found = {name: tuple(tensor.shape) for name, tensor in checkpoint.weights.items()}
    if (expected := expected_shapes(config)) != found or tokens.shape != (config.vocabulary,):
        wrong = sorted(name for name in {*found, *expected} if found.get(name) != expected.get(name)) or ["tokens"]
        raise CorruptFile(f"{path}: {', '.join(wrong)} absent, unexpected or of another shape; train it again")
    if tokens[0] < 0 or (tokens.diff() <= 0).any():
        raise CorruptFile(f"{path}: its draft tokens are not ascending ids from 0 on; train it again")
    if infinite := _infinite(checkpoint.weights):
        raise CorruptFile(f"{path}: {', '.join(infinite)} hold NaN or ∞; train it again")


def _infinite(weights: Mapping[str, torch.Tensor]) -> list[str]:
    return [name for name, tensor in weights.items() if not tensor.isfinite().all()]


def tiny_eagle(
    seed: int, target: Checkpoint, feature_layers: Sequence[int], vocabulary: int | None = None, **changes: Any
) -> EagleCheckpoint:
    """A random drafter for tests: every token of the target, or `vocabulary` of them, and `changes` to the config."""
    drafted = vocabulary or target.config.vocabulary
    config = dataclasses.replace(eagle_config(target, len(feature_layers), drafted), **changes)
    random = torch.Generator().manual_seed(seed)
    weights = {}
    for name, shape in expected_shapes(config).items():
        values = torch.randn(shape, generator=random, dtype=torch.float64)
        weights[name] = (1 + 0.2 * values if len(shape) == 1 else 2 * values / shape[1] ** 0.5).float()
    tokens = torch.randperm(target.config.vocabulary, generator=random)[:drafted].sort().values
    return EagleCheckpoint(
        config, weights, tokens, target.name, target.fingerprint, tuple(feature_layers), {"seed": seed}
    )


def eagle_fingerprint(checkpoint: EagleCheckpoint) -> str:
    """Tells drafters apart, as models.checkpoints.fingerprint does for models."""
    return fingerprint({**checkpoint.weights, "tokens": checkpoint.tokens})
