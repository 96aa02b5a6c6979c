"""Tensors of a model's folder: found, read, checked against the shapes that its config asks for, and written.

Only safetensors are read: a pickled .bin file can run any code on loading. Tensors are mapped from disk, so reading
takes a moment and a page is read when it is first used.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file

from specdec_core.cache import atomic_write
from specdec_core.models.config import WEIGHTS, read_json
from specdec_core.models.errors import CorruptFile, UnsupportedModel, safetensors_as_os_error

INDEX = "model.safetensors.index.json"
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Dtypes that weights may be stored in."""


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a folder: those that its index names, model.safetensors, or all there are."""
    index = folder / INDEX
    if index.is_file():
        shards = read_json(index).get("weight_map")
        if not isinstance(shards, dict) or not shards:
            raise CorruptFile(
                f"{index} has no 'weight_map' of tensor names to files; restore it from the model's source"
            )
        files = [folder / str(shard) for shard in sorted(set(shards.values()))]
        if any(file.parent != folder for file in files):
            raise CorruptFile(f"{index} names a file outside its folder; expected file names such as {WEIGHTS}")
    elif (folder / WEIGHTS).is_file():
        files = [folder / WEIGHTS]
    else:
        files = sorted(folder.glob("*.safetensors"))
    absent = [file.name for file in files if not file.is_file()]
    if absent:
        raise CorruptFile(f"{folder} lacks {', '.join(absent)}, which its index names; complete the download")
    if files:
        return files
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in folder.glob(pattern))
    if pickled:
        raise UnsupportedModel(
            f"{folder} holds {pickled[0]} but no *.safetensors. Such files are pickles, which can run any code when "
            "loaded, so they are refused; convert them with transformers' save_pretrained"
        )
    raise CorruptFile(f"{folder} holds no *.safetensors; expected {WEIGHTS}, or shards with {INDEX}")


def read_tensors(files: list[Path]) -> dict[str, torch.Tensor]:
    """The tensors of all files, by name, mapped from disk."""
    weights: dict[str, torch.Tensor] = {}
    for file in files:
        try:
            with safe_open(file, framework="pt") as stored:
                for name in stored.keys():  # noqa: SIM118  (a safe_open handle is no mapping)
                    if name in weights:
                        raise CorruptFile(f"{file} repeats tensor {name}, which another shard already has")
                    weights[name] = stored.get_tensor(name)
        except (SafetensorError, OSError) as error:
            raise CorruptFile(f"{file} is truncated or damaged ({error}); fetch or make it again") from None
    return weights


def drop_tied_head(weights: dict[str, torch.Tensor], embedding: str, folder: Path) -> None:
    """Drop the head of a model that ties it to its embedding; CorruptFile if it is stored and differs."""
    if "lm_head.weight" in weights:
        given = weights.get(embedding)
        if given is None or not torch.equal(weights.pop("lm_head.weight"), given):
            raise CorruptFile(
                f"{folder}: config.json ties the head to the embedding, but lm_head.weight differs from {embedding}; "
                "set tie_word_embeddings to false or remove the tensor"
            )


def require_tensors(
    weights: Mapping[str, torch.Tensor], expected: Mapping[str, tuple[int, ...]], folder: Path, kind: str
) -> None:
    """Raise unless these are the expected tensors, of these shapes, in one of DTYPES; `kind` says of what model."""
    for name, shape in expected.items():
        if name not in weights:
            raise CorruptFile(f"{folder}: tensor {name} is missing; config.json asks for it with shape {list(shape)}")
        given = tuple(weights[name].shape)
        if given != shape:
            raise CorruptFile(f"{folder}: tensor {name} has shape {list(given)}; config.json asks for {list(shape)}")
        if weights[name].dtype not in DTYPES:
            raise UnsupportedModel(
                f"{folder}: tensor {name} is {weights[name].dtype}; expected one of {', '.join(map(str, DTYPES))}"
            )
    for name in weights:
        if name not in expected:
            raise CorruptFile(f"{folder}: tensor {name} is not part of {kind} with this config.json")


def save_tensors(weights: Mapping[str, torch.Tensor], folder: Path) -> None:
    """Write model.safetensors, which replaces its predecessor whole."""
    with atomic_write(folder / WEIGHTS) as temporary, safetensors_as_os_error():
        contiguous = {name: tensor.contiguous() for name, tensor in weights.items()}
        save_file(contiguous, temporary, metadata={"format": "pt"})
