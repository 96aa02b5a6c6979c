"""GGUF → Hugging Face folder: float32 safetensors, config.json and tokenizer, checked tensor by tensor.

A GGUF file is llama.cpp's container: metadata, then tensors in quantized blocks. Dequantised values are exact in
float32 (a block's value is a small integer times a scale, plus an offset, as the gguf package computes it), so the
folder holds the very numbers that llama.cpp multiplies with, up to its own rounding of activations.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec_core.cache import atomic_folder
from specdec_core.models.config import WEIGHTS, LlamaConfig, config_values, expected_shapes, read_json
from specdec_core.models.errors import CorruptFile, MissingPackage, UnsupportedModel, safetensors_as_os_error
from specdec_core.models.gguf_tokenizer import end_tokens, write_tokenizer

if TYPE_CHECKING:
    from gguf import GGUFReader, ReaderTensor

MANIFEST = "manifest.json"
FORMAT = 1
"""Of the converted folder; raise it when the conversion changes, so that older folders are made again."""

_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def convert(source: Path, folder: Path, sha256: str | None = None) -> None:
    """Convert the GGUF file `source` into `folder`, whole or not at all. The caller holds the folder's lock.

    `sha256` is the digest that the file must have, if one is known. Raises CorruptFile if the file is truncated,
    damaged or not what the digest says, UnsupportedModel for another architecture, CacheError if the disk is full.
    """
    digest = file_digest(source)
    if sha256 is not None and digest != sha256:
        raise CorruptFile(
            f"{source} is truncated or changed: its SHA-256 is {digest}, expected {sha256}; install it again"
        )
    reader = open_gguf(source)
    metadata = read_metadata(reader)
    config = config_of(metadata, {tensor.name for tensor in reader.tensors}, source)
    tensors = match_tensors(reader, config, source)
    with atomic_folder(folder) as temporary:
        _write_weights(tensors, config, temporary / WEIGHTS)
        write_tokenizer(metadata, temporary, source)
        _write_json(temporary / "config.json", config_values(config, "float32"))
        ends = {"eos_token_id": list(config.eos_ids), "bos_token_id": config.bos_id, "pad_token_id": config.pad_id}
        _write_json(temporary / "generation_config.json", ends)
        check_weights(tensors, config, temporary / WEIGHTS)
        files = {file.name: file.stat().st_size for file in sorted(temporary.iterdir())}
        weights_digest = file_digest(temporary / WEIGHTS)
        manifest = {"format": FORMAT, "source_sha256": digest, "weights_sha256": weights_digest, "sizes": files}
        _write_json(temporary / MANIFEST, manifest)


def is_current(folder: Path, sha256: str) -> bool:
    """Whether `folder` was converted from the file with this digest, by this format, and its files have their sizes.

    Reads the manifest and the sizes only; the weights' header is checked as they are loaded.
    """
    try:
        manifest = read_json(folder / MANIFEST)
        sizes = manifest["sizes"]
        return (
            manifest["format"] == FORMAT
            and manifest["source_sha256"] == sha256
            and WEIGHTS in sizes
            and all((folder / name).stat().st_size == size for name, size in sizes.items())
        )
    except (CorruptFile, KeyError, TypeError, AttributeError, OSError):
        return False


def open_gguf(source: Path) -> GGUFReader:
    """The gguf package's reader, its tensors mapped from the file; CorruptFile if the file cannot be read."""
    try:
        from gguf import GGUFReader
    except ModuleNotFoundError:
        raise MissingPackage("reading a GGUF file needs the package gguf: pip install gguf") from None
    try:
        reader = GGUFReader(source)
    except FileNotFoundError:
        raise
    except Exception as error:  # it has no error of its own: a damaged file raises whatever numpy or Python raises
        reason = f"{type(error).__name__}: {error}"
        raise CorruptFile(f"{source} is no readable GGUF file ({reason}); install it again") from error
    if reader.byte_order == "S":
        raise UnsupportedModel(f"{source} is stored in the other byte order; convert it with llama.cpp's tools")
    return reader


def read_metadata(reader: GGUFReader) -> dict[str, Any]:
    """The file's metadata as plain Python values: numbers, booleans, strings and lists."""
    return {name: field.contents() for name, field in reader.fields.items()}


def config_of(metadata: dict[str, Any], tensors: set[str], source: Path) -> LlamaConfig:
    """The model's shape; the head is tied if the file has no tensor `output.weight`."""
    architecture = metadata.get("general.architecture")
    if architecture != "llama":
        raise UnsupportedModel(f"{source} has architecture {architecture!r}; only 'llama' is implemented")
    scaling = metadata.get("llama.rope.scaling.type", "none")
    if scaling != "none" or "rope_freqs.weight" in tensors:
        raise UnsupportedModel(f"{source} scales its rotary positions ({scaling}); only unscaled ones are implemented")
    try:
        hidden, heads = metadata["llama.embedding_length"], metadata["llama.attention.head_count"]
        head_dim = metadata.get("llama.attention.key_length", hidden // heads)
        if metadata.get("llama.rope.dimension_count", head_dim) != head_dim:
            raise UnsupportedModel(f"{source} rotates only a part of each head; only the whole is implemented")
        return LlamaConfig(
            hidden_size=hidden,
            intermediate_size=metadata["llama.feed_forward_length"],
            layers=metadata["llama.block_count"],
            heads=heads,
            kv_heads=metadata.get("llama.attention.head_count_kv", heads),
            head_dim=head_dim,
            vocabulary=len(metadata["tokenizer.ggml.tokens"]),
            context=metadata["llama.context_length"],
            rope_theta=_decimal(metadata.get("llama.rope.freq_base", 10000.0)),
            norm_eps=_decimal(metadata["llama.attention.layer_norm_rms_epsilon"]),
            tied_head="output.weight" not in tensors,
            eos_ids=end_tokens(metadata),
            bos_id=metadata.get("tokenizer.ggml.bos_token_id"),
            pad_id=metadata.get("tokenizer.ggml.padding_token_id"),
        )
    except KeyError as error:
        raise CorruptFile(f"{source} lacks the metadata {error}, which a llama model needs") from None


def match_tensors(reader: GGUFReader, config: LlamaConfig, source: Path) -> dict[str, ReaderTensor]:
    """Hugging Face name → GGUF tensor, exactly those that the config asks for, with their shapes."""
    tensors = {hugging_face_name(tensor.name): tensor for tensor in reader.tensors}
    expected = expected_shapes(config)
    for name in tensors:
        if name not in expected:
            raise UnsupportedModel(f"{source} has a tensor {name}, which is not part of a Llama model of its shape")
    for name, shape in expected.items():
        if name not in tensors:
            raise CorruptFile(f"{source} lacks a tensor for {name}")
        given = tuple(int(size) for size in reversed(tensors[name].shape))
        if given != shape:
            raise CorruptFile(f"{source}: tensor for {name} has shape {list(given)}, expected {list(shape)}")
    return {name: tensors[name] for name in expected}


def hugging_face_name(name: str) -> str:
    """`blk.3.attn_q.weight` → `model.layers.3.self_attn.q_proj.weight`; an unknown name stays as it is."""
    stem, _, kind = name.rpartition(".")
    if stem in _TOP:
        return f"{_TOP[stem]}.{kind}"
    block, _, part = stem.partition(".")[2].partition(".")
    if stem.startswith("blk.") and part in _IN_BLOCK:
        return f"model.layers.{block}.{_IN_BLOCK[part]}.{kind}"
    return name


def unpermute(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's order of a query or key matrix's rows, `[heads · head_dim, H]`.

    llama.cpp rotates neighbouring pairs (2i, 2i + 1) of a head, Hugging Face pairs half a head apart
    (i, i + head_dim / 2), so its converter interleaves the two halves of each head; here they are separated again.
    """
    pairs = rows.reshape(heads, -1, 2, rows.shape[1])
    return pairs.swapaxes(1, 2).reshape(rows.shape)


def check_weights(tensors: dict[str, ReaderTensor], config: LlamaConfig, written: Path) -> None:
    """Compare every written tensor, bit for bit, with a fresh dequantisation; CorruptFile names one that differs.

    The row order is an index map here, written independently of `unpermute`: row r of a head is GGUF row
    2 (r mod half) + (r div half).
    """
    from safetensors import safe_open

    with safe_open(written, framework="np") as stored:
        if set(stored.keys()) != set(tensors):
            raise CorruptFile(f"{written} does not hold the tensors that were written to it; check the disk")
        for name, tensor in tensors.items():
            expected = dequantised(tensor)
            if heads := _rotated_heads(name, config):
                row = np.arange(heads * config.head_dim)
                head, inside, half = row // config.head_dim, row % config.head_dim, config.head_dim // 2
                expected = expected[head * config.head_dim + 2 * (inside % half) + inside // half]
            found = stored.get_tensor(name)
            same = found.shape == expected.shape and np.array_equal(found.view(np.uint32), expected.view(np.uint32))
            if not same:
                raise CorruptFile(f"{written}: tensor {name} differs from the GGUF's dequantised values")


def dequantised(tensor: ReaderTensor) -> np.ndarray:
    """A GGUF tensor as float32, C-contiguous, in its own row order."""
    from gguf.quants import dequantize

    return np.ascontiguousarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32)


def file_digest(file: Path) -> str:
    """SHA-256 of a file's bytes, in hex."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def weights_of(tensors: dict[str, ReaderTensor], config: LlamaConfig) -> dict[str, np.ndarray]:
    """Dequantised float32 values of the matched tensors, in Hugging Face's row order."""
    weights = {}
    for name, tensor in tensors.items():
        values = dequantised(tensor)
        if not np.isfinite(values).all():
            raise CorruptFile(f"tensor {tensor.name} of the GGUF holds NaN or infinite values; install the file again")
        heads = _rotated_heads(name, config)
        weights[name] = np.ascontiguousarray(unpermute(values, heads)) if heads else values
    return weights


def _write_weights(tensors: dict[str, ReaderTensor], config: LlamaConfig, file: Path) -> None:
    from safetensors.numpy import save_file

    with safetensors_as_os_error():
        save_file(weights_of(tensors, config), file, metadata={"format": "pt"})


def _rotated_heads(name: str, config: LlamaConfig) -> int:
    if name.endswith("q_proj.weight"):
        return config.heads
    return config.kv_heads if name.endswith("k_proj.weight") else 0


def _decimal(value: float) -> float:
    # Metadata are float32: 1e-5 arrives as 9.99999974e-06. The shortest decimal that rounds to it is what was meant.
    return float(str(np.float32(value)))


def _write_json(file: Path, values: dict[str, Any]) -> None:
    file.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
