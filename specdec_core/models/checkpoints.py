"""Checkpoints: weights checked against their config, loaded from and saved to safetensors folders (see tensors.py)."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from specdec_core.cache import atomic_write
from specdec_core.models.config import LlamaConfig, config_values, expected_shapes, read_config
from specdec_core.models.tensors import drop_tied_head, read_tensors, require_tensors, save_tensors, weight_files

__all__ = ["Checkpoint", "LlamaConfig", "fingerprint", "load_checkpoint", "save_checkpoint", "tiny_llama"]

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja")
KIND = "a Llama model"
_SAMPLE = 4096  # bytes at either end of a tensor that enter the fingerprint


@dataclass(frozen=True, eq=False)
class Checkpoint:
    """A model's weights and shape.

    name         what the user called it, for records and messages.
    weights      Hugging Face's Llama names → tensors on the CPU in the dtype they are stored in, matrices `[out, in]`;
                 `lm_head.weight` is absent if the head is tied. Read-only by contract: they are mapped from the file.
    folder       where it was loaded from; None for one made in memory.
    fingerprint  see `fingerprint`: equal for equal weights, whichever files they come from.
    """

    name: str
    config: LlamaConfig
    weights: Mapping[str, torch.Tensor]
    folder: Path | None
    fingerprint: str

    @property
    def tokenizer_path(self) -> Path | None:
        """The folder's tokenizer.json, or None if there is none."""
        path = self.folder / "tokenizer.json" if self.folder else None
        return path if path and path.is_file() else None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding, which is that of the whole checkpoint."""
        return self.weights["model.embed_tokens.weight"].dtype


def load_checkpoint(folder: str | Path, name: str | None = None) -> Checkpoint:
    """Load a folder with config.json and safetensors, single (model.safetensors) or sharded (with an index).

    Raises CorruptFile for an absent, truncated or unreadable file and for a missing, unexpected or misshapen tensor,
    naming it; UnsupportedModel for another architecture or for weights that are not safetensors.
    """
    folder = Path(folder)
    config = read_config(folder)
    weights = read_tensors(weight_files(folder))
    for unused in [each for each in weights if each.endswith("rotary_emb.inv_freq")]:
        del weights[unused]  # old checkpoints store the rotary frequencies, which follow from rope_theta
    if config.tied_head:
        drop_tied_head(weights, "model.embed_tokens.weight", folder)
    require_tensors(weights, expected_shapes(config), folder, KIND)
    return Checkpoint(name or folder.resolve().name, config, MappingProxyType(weights), folder, fingerprint(weights))


def save_checkpoint(checkpoint: Checkpoint, folder: str | Path) -> Path:
    """Write config.json and model.safetensors so that this module and transformers' from_pretrained read them.

    The tokenizer's files come along if the checkpoint has them. Each file replaces its predecessor whole; raises
    CacheError naming the file if the disk is full. Returns the folder.
    """
    folder = Path(folder)
    require_tensors(checkpoint.weights, expected_shapes(checkpoint.config), folder, KIND)
    save_tensors(checkpoint.weights, folder)
    if checkpoint.tokenizer_path and checkpoint.folder and checkpoint.folder.resolve() != folder.resolve():
        for file in TOKENIZER_FILES:
            if (checkpoint.folder / file).is_file():
                shutil.copyfile(checkpoint.folder / file, folder / file)
    values = config_values(checkpoint.config, str(checkpoint.dtype).removeprefix("torch."))
    with atomic_write(folder / "config.json") as temporary:
        temporary.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
    return folder


TINY = LlamaConfig(
    hidden_size=48, intermediate_size=96, layers=3, heads=6, kv_heads=2, head_dim=8, vocabulary=97, context=256
)
"""Small enough for a test to run hundreds of passes, odd enough (97, 6 over 2) to catch a wrong stride."""


def tiny_llama(seed: int, *, dtype: torch.dtype = torch.float32, **changes: Any) -> Checkpoint:
    """A random model for tests, made in memory: `TINY` with `changes` to any of LlamaConfig's fields.

    Weights depend only on the seed, the tensor's name and its shape, so that models that differ in `layers` share
    the layers they have in common, and are the same in every dtype up to rounding. Gains are large enough that
    attention and MLP outweigh the embedding: greedy text varies with the context instead of repeating one token.
    """
    config = dataclasses.replace(TINY, **changes)
    weights = {name: _random(seed, name, shape).to(dtype) for name, shape in expected_shapes(config).items()}
    return Checkpoint(f"tiny-{seed}", config, MappingProxyType(weights), None, fingerprint(weights))


def fingerprint(weights: Mapping[str, torch.Tensor]) -> str:
    """A hex digest that tells checkpoints apart without reading them whole.

    It is the SHA-256 of every tensor's name, dtype, shape and first and last 4 KiB, so it is the same in memory, in
    one file and in shards, and a fine-tuned or otherwise changed model differs; a change confined to the inside of a
    large tensor is not seen.
    """
    digest = hashlib.sha256()
    for name in sorted(weights):
        tensor = weights[name].detach()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        flat = tensor.reshape(-1).cpu()
        items = max(1, _SAMPLE // flat.element_size())
        for part in (flat[:items], flat[-items:]):
            digest.update(part.contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def _random(seed: int, name: str, shape: tuple[int, ...]) -> torch.Tensor:
    stream = int.from_bytes(hashlib.sha256(f"{seed} {name}".encode()).digest()[:7], "little")
    values = torch.randn(shape, generator=torch.Generator().manual_seed(stream), dtype=torch.float64)
    if name.endswith("norm.weight"):
        return 1.0 + 0.1 * values
    if name == "model.embed_tokens.weight":
        return 0.3 * values  # the same logits' spread, about 2, whether or not it is the head too
    # Unit output for unit input is 1 / sqrt(fan in); queries and keys are sharper, so that attention looks somewhere.
    gain = 3.0 if "q_proj" in name or "k_proj" in name else 2.0
    return values * gain / shape[1] ** 0.5
