"""Weights of Gated DeltaNet models, in the layout of flash-linear-attention, checked against their config.

The published m-a-p/1.3B-100B-GatedDeltaNet-pure is one: 24 layers of 8 heads, each with a state of 256 × 256. Its files
hold one tensor a layer, `attn.D`, that no version of the model has ever used; it is passed over.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from specdec_core.cache import atomic_write
from specdec_core.models.checkpoints import fingerprint
from specdec_core.models.gdn_config import GdnConfig, expected_shapes, gdn_config_values, read_gdn_config
from specdec_core.models.tensors import drop_tied_head, read_tensors, require_tensors, save_tensors, weight_files

KIND = "a Gated DeltaNet"
_UNUSED = re.compile(r"model\.layers\.\d+\.attn\.(D|rotary\.inv_freq)")


@dataclass(frozen=True, eq=False)
class GdnCheckpoint:
    """A model's weights and shape: as models.checkpoints.Checkpoint, by the names of `gdn_config.expected_shapes`."""

    name: str
    config: GdnConfig
    weights: Mapping[str, torch.Tensor]
    folder: Path | None
    fingerprint: str

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding; gates may be stored wider."""
        return self.weights["model.embeddings.weight"].dtype


def load_gdn(folder: str | Path, name: str | None = None) -> GdnCheckpoint:
    """Load a folder with config.json and safetensors, single or sharded.

    Raises CorruptFile for an absent, truncated or unreadable file and for a missing, unexpected or misshapen tensor,
    naming it; UnsupportedModel for another architecture, for an option that is not implemented or not known, and for
    weights that are not safetensors.
    """
    folder = Path(folder)
    config = read_gdn_config(folder)
    weights = read_tensors(weight_files(folder))
    for unused in [each for each in weights if _UNUSED.fullmatch(each)]:
        del weights[unused]
    if config.tied_head:
        drop_tied_head(weights, "model.embeddings.weight", folder)
    require_tensors(weights, expected_shapes(config), folder, KIND)
    return GdnCheckpoint(name or folder.resolve().name, config, MappingProxyType(weights), folder, fingerprint(weights))


def save_gdn(checkpoint: GdnCheckpoint, folder: str | Path) -> Path:
    """Write config.json and model.safetensors in the same layout; each replaces its predecessor whole."""
    folder = Path(folder)
    require_tensors(checkpoint.weights, expected_shapes(checkpoint.config), folder, KIND)
    save_tensors(checkpoint.weights, folder)
    values = gdn_config_values(checkpoint.config, str(checkpoint.dtype).removeprefix("torch."))
    with atomic_write(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return folder


TINY = GdnConfig(
    hidden_size=48, intermediate_size=96, layers=4, linear_heads=2, linear_value_heads=4, linear_key_dim=6,
    linear_value_dim=9, conv_width=4, vocabulary=97, context=256, attention_layers=(3,), heads=6, kv_heads=2,
)  # fmt: skip
"""Every fourth layer is one of attention; key and value sizes differ, so that a state that is turned round shows."""
PURE = {"attention_layers": (), "heads": 0, "kv_heads": 0}
"""Changes to `TINY` that leave no attention."""


def tiny_gdn(seed: int, *, dtype: torch.dtype = torch.float32, **changes: Any) -> GdnCheckpoint:
    """A random model for tests, made in memory: `TINY` with `changes`; weights depend on seed, name and shape only."""
    config = dataclasses.replace(TINY, **changes)
    weights = {name: _random(seed, name, shape).to(dtype) for name, shape in expected_shapes(config).items()}
    return GdnCheckpoint(f"tiny-gdn-{seed}", config, MappingProxyType(weights), None, fingerprint(weights))


def _random(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    stream = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "little")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(stream), dtype=torch.float64)
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * values
    if name.endswith("A_log"):
        return values
    if name.endswith("dt_bias"):
        return values - 2.0  # a state outlives some ten tokens, so that old ones still count and none count alike
    if name == "model.embeddings.weight":
        return 0.3 * values
    return values * 2.0 / shape[-1] ** 0.5
