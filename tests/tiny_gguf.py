"""Tiny GGUF files made on the fly: any `tiny_llama`, a byte-level tokenizer, and whatever is to be wrong with them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import gguf
import numpy as np
from gguf.quants import quantize
from tokenizers import pre_tokenizers

from specdec_core.models.checkpoints import Checkpoint, tiny_llama

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<tool>"]
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MERGES = ["Ġ t", "h e", "Ġt he", "i n"]


def metadata() -> dict:
    """A byte-level vocabulary with a few merges, as GGUF metadata."""
    merged = [merge.replace(" ", "") for merge in MERGES]
    tokens = SPECIAL + sorted(pre_tokenizers.ByteLevel.alphabet()) + merged
    return {
        "general.architecture": "llama",
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [3] * 3 + [4] + [1] * (len(tokens) - 4),
        "tokenizer.ggml.merges": MERGES,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.padding_token_id": 2,
        "tokenizer.chat_template": TEMPLATE,
    }


def gguf_name(name: str) -> str:
    if not name.startswith("model.layers."):
        top = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
        return top[name.removesuffix(".weight")] + ".weight"
    _, _, layer, *part = name.removesuffix(".weight").split(".")
    parts = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "ffn_norm",
        "self_attn.q_proj": "attn_q",
        "self_attn.k_proj": "attn_k",
        "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output",
        "mlp.gate_proj": "ffn_gate",
        "mlp.up_proj": "ffn_up",
        "mlp.down_proj": "ffn_down",
    }
    return f"blk.{layer}.{parts['.'.join(part)]}.weight"


def gguf_rows(checkpoint: Checkpoint, name: str) -> np.ndarray:
    """A tensor with its rows in llama.cpp's order: the two halves of each rotated head, interleaved."""
    rows = checkpoint.weights[name].numpy()
    heads = {"q_proj": checkpoint.config.heads, "k_proj": checkpoint.config.kv_heads}.get(name.split(".")[-2])
    if heads is None:
        return rows
    return np.concatenate([np.stack(np.split(head, 2), axis=1).reshape(head.shape) for head in np.split(rows, heads)])


def gguf_model(seed: int = 7, **changes: int) -> Checkpoint:
    """A tiny model with the vocabulary of `metadata` and rows of 64 and 96, which the block formats need."""
    sizes = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 16} | changes
    return tiny_llama(seed, **sizes, vocabulary=len(metadata()["tokenizer.ggml.tokens"]))


def write_gguf(
    checkpoint: Checkpoint,
    path: Path,
    changes: Mapping[str, object] | None = None,
    tensors: Mapping[str, np.ndarray | None] | None = None,
    kind: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
) -> Path:
    """Write the model as a GGUF file, with changes to metadata and tensors (None leaves one out)."""
    config = checkpoint.config
    values = {
        **metadata(),
        "llama.block_count": config.layers,
        "llama.context_length": config.context,
        "llama.embedding_length": config.hidden_size,
        "llama.feed_forward_length": config.intermediate_size,
        "llama.attention.head_count": config.heads,
        "llama.attention.head_count_kv": config.kv_heads,
        "llama.rope.freq_base": config.rope_theta,
        "llama.rope.dimension_count": config.head_dim,
        "llama.attention.layer_norm_rms_epsilon": 1e-5,
        **(changes or {}),
    }
    writer = gguf.GGUFWriter(path, str(values.pop("general.architecture")))
    for key, value in values.items():
        if value is None:
            continue
        add = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, list: writer.add_array}
        add[type(value)](key, value)
    arrays = {gguf_name(name): gguf_rows(checkpoint, name) for name in checkpoint.weights} | dict(tensors or {})
    for name, array in arrays.items():
        if array is None:
            continue
        if array.ndim == 2 and kind != gguf.GGMLQuantizationType.F32:
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
        else:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
