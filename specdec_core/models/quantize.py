"""Variants of a GGUF file in other number formats, made by llama.cpp's own quantizer, and the values of any of them.

Changing the format changes the kernel that llama.cpp runs, and, between some, nothing else: F32 holds the very values
of the file it is made from. Formats in blocks of 256 weights (Q4_K_M) do not divide every row; the quantizer then puts
another format in place of the wanted one, tensor by tensor, so a variant's name says what was asked for and
`tensor_types` what is there.
"""

from __future__ import annotations

from pathlib import Path
from types import MappingProxyType

import torch

from specdec_core.cache import atomic_write, exclusive
from specdec_core.models import gguf
from specdec_core.models.checkpoints import Checkpoint, fingerprint
from specdec_core.models.errors import ModelError, UnknownModel, UnsupportedModel
from specdec_core.models.llama_library import complaint, forget_complaints, library
from specdec_core.models.registry import MODELS, source_file
from specdec_core.placement import physical_threads

VARIANTS = MappingProxyType({"F32": 0, "F16": 1, "Q8_0": 7, "Q4_0": 2, "Q4_1": 3, "Q4_K_M": 15})
"""Formats by llama.cpp's names, and its numbers for them (llama_ftype)."""


def variant(model: str | Path, kind: str, threads: int | None = None) -> Path:
    """The file of a registered model, or of the GGUF file `model`, in the format `kind`; made once, into the cache.

    A file's variants are kept under its digest, so a changed file gets new ones. Raises UnsupportedModel for a format
    that is not in VARIANTS or a file that llama.cpp cannot read, UnknownModel if there is no such file,
    MissingPackage without llama.cpp, CacheError if the disk is full.
    """
    if kind not in VARIANTS:
        raise UnsupportedModel(f"format {kind!r}: expected one of {', '.join(VARIANTS)}")
    source = gguf_source(model)
    with exclusive(f"gguf/{gguf.file_digest(source)[:16]}/{kind}.gguf") as made:
        if not made.is_file():  # it is there whole or not at all
            with atomic_write(made) as temporary:
                _quantize(source, temporary, kind, threads or physical_threads())
        return made


def gguf_source(model: str | Path) -> Path:
    """The GGUF file that a registered model ships in, or `model` itself if it is a file."""
    if str(model) in MODELS:
        return source_file(MODELS[str(model)])
    file = Path(model).expanduser()
    if not file.is_file():
        raise UnknownModel(f"no GGUF file {str(model)!r}: name one, or a registered model ({', '.join(MODELS)})")
    return file


def tensor_types(file: str | Path) -> dict[str, str]:
    """Format of every tensor of a GGUF file, by its Hugging Face name."""
    reader = gguf.open_gguf(Path(file))
    return {gguf.hugging_face_name(tensor.name): tensor.tensor_type.name for tensor in reader.tensors}


def dequantised_checkpoint(file: str | Path) -> Checkpoint:
    """The values that a GGUF file's weights stand for, exactly, in float32: what its kernels approximate.

    In memory, and without a tokenizer. Errors as of the conversion in models.gguf.
    """
    file = Path(file)
    reader = gguf.open_gguf(file)
    config = gguf.config_of(gguf.read_metadata(reader), {tensor.name for tensor in reader.tensors}, file)
    arrays = gguf.weights_of(gguf.match_tensors(reader, config, file), config)
    # Unquantized tensors are views of the mapped file, which the checkpoint must not depend on.
    owned = {name: array if array.flags.writeable else array.copy() for name, array in arrays.items()}
    weights = MappingProxyType({name: torch.from_numpy(array) for name, array in owned.items()})
    return Checkpoint(file.stem, config, weights, None, fingerprint(weights))


def _quantize(source: Path, goal: Path, kind: str, threads: int) -> None:
    llama = library()
    params = llama.llama_model_quantize_default_params()
    params.ftype, params.allow_requantize, params.nthread = VARIANTS[kind], True, threads
    forget_complaints()
    code = llama.llama_model_quantize(str(source).encode(), str(goal).encode(), params)
    if code:
        raise ModelError(f"llama.cpp's quantizer could not make {kind} of {source} (code {code}): {complaint()}")
