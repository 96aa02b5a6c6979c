"""The shape of a Llama-family model, read from and written to Hugging Face's config.json."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_core.models.errors import CorruptFile, UnsupportedModel

WEIGHTS = "model.safetensors"
"""The file of a folder that holds its weights, unless they lie in shards."""


@dataclass(frozen=True)
class LlamaConfig:
    """Decoder-only transformer: RMS norms, rotary positions (no scaling), grouped-query attention, SiLU-gated MLP.

    hidden_size H, intermediate_size F, layers, heads, kv_heads (heads is a multiple of it), head_dim (even; not always
    H / heads), vocabulary V, context (most positions), rope_theta (base wavelength), norm_eps (added to the mean
    square), tied_head (the output head is the embedding), eos_ids (any of them ends a row), bos_id, pad_id.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    tied_head: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None

    def __post_init__(self) -> None:
        sizes = ("hidden_size", "intermediate_size", "layers", "heads", "kv_heads", "head_dim", "vocabulary", "context")
        for name in sizes:
            value = getattr(self, name)
            if not isinstance(value, int) or value < 1:
                raise UnsupportedModel(f"{name} is {value!r}; expected a positive integer")
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"{self.heads} heads cannot share {self.kv_heads} KV heads: expected a multiple")
        if self.head_dim % 2:
            raise UnsupportedModel(f"head_dim is {self.head_dim}; rotary positions need an even number")
        for token in self.eos_ids:
            if not 0 <= token < self.vocabulary:
                raise UnsupportedModel(f"end token {token} is outside the vocabulary of {self.vocabulary}")


def expected_shapes(config: LlamaConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of such a model, by Hugging Face's names; matrices are `[out, in]`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocabulary, hidden)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (queries, hidden),
            prefix + "self_attn.k_proj.weight": (keys, hidden),
            prefix + "self_attn.v_proj.weight": (keys, hidden),
            prefix + "self_attn.o_proj.weight": (hidden, queries),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocabulary, hidden)
    return shapes


def read_config(folder: Path) -> LlamaConfig:
    """The config of a Hugging Face folder: config.json, and the end tokens that generation_config.json adds.

    Raises CorruptFile if a file is absent or is no JSON object, UnsupportedModel naming what is not implemented.
    """
    values = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    more = read_json(generation).get("eos_token_id") if generation.is_file() else None
    ends = dict.fromkeys(token_ids(values.get("eos_token_id")) + token_ids(more))
    return config_from_values(values, folder / "config.json", tuple(ends))


def config_from_values(values: Mapping[str, Any], source: Path, eos_ids: tuple[int, ...]) -> LlamaConfig:
    """The config that the entries of a config.json describe; absent entries have transformers' defaults."""
    _refuse_other_architectures(values, source)
    try:
        heads = values["num_attention_heads"]
        return LlamaConfig(
            hidden_size=values["hidden_size"],
            intermediate_size=values["intermediate_size"],
            layers=values["num_hidden_layers"],
            heads=heads,
            kv_heads=_or_default(values.get("num_key_value_heads"), heads),
            head_dim=_or_default(values.get("head_dim"), values["hidden_size"] // heads),
            vocabulary=values["vocab_size"],
            context=values.get("max_position_embeddings", 2048),
            rope_theta=_rope_theta(values, source),
            norm_eps=float(values.get("rms_norm_eps", 1e-6)),
            tied_head=bool(values.get("tie_word_embeddings", False)),
            eos_ids=eos_ids,
            bos_id=values.get("bos_token_id"),
            pad_id=values.get("pad_token_id"),
        )
    except KeyError as error:
        raise CorruptFile(f"{source} has no entry {error}, which a Llama model needs; check the folder") from None
    except (TypeError, ZeroDivisionError) as error:
        raise CorruptFile(f"{source} has an entry that is no number where one is needed ({error})") from None
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{source}: {error}") from None


def config_values(config: LlamaConfig, dtype: str) -> dict[str, Any]:
    """The entries of a config.json that transformers 4 and 5 read as this model; `dtype` such as 'float32'."""
    eos: int | list[int] | None = list(config.eos_ids) if len(config.eos_ids) > 1 else next(iter(config.eos_ids), None)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.kv_heads,
        "head_dim": config.head_dim,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "rope_theta": config.rope_theta,  # transformers 4 reads this, 5 the entry below
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "rms_norm_eps": config.norm_eps,
        "tie_word_embeddings": config.tied_head,
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "bos_token_id": config.bos_id,
        "eos_token_id": eos,
        "pad_token_id": config.pad_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def read_json(file: Path) -> dict[str, Any]:
    """The JSON object in a file; CorruptFile naming the file if it is absent or holds anything else."""
    try:
        values = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CorruptFile(f"{file} is absent; a model folder holds config.json and *.safetensors") from None
    except ValueError as error:
        raise CorruptFile(f"{file} is not valid JSON ({error}); restore it from where the model came from") from None
    if not isinstance(values, dict):
        raise CorruptFile(f"{file} holds a {type(values).__name__}; expected a JSON object")
    return values


def _refuse_other_architectures(values: Mapping[str, Any], source: Path) -> None:
    kind, architectures = values.get("model_type"), values.get("architectures") or []
    if kind != "llama" and "LlamaForCausalLM" not in architectures:
        raise UnsupportedModel(
            f"{source}: model_type is {kind!r} and architectures {architectures}; this engine implements 'llama' "
            "(LlamaForCausalLM). Other models run through the Hugging Face target"
        )
    required = {"hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "partial_rotary_factor": 1.0}
    for name, implemented in required.items():
        if values.get(name, implemented) != implemented:
            raise UnsupportedModel(f"{source}: {name} is {values[name]!r}; only {implemented!r} is implemented")
    if values.get("quantization_config") is not None:
        raise UnsupportedModel(f"{source}: quantized weights (quantization_config); use the unquantized checkpoint")


def _rope_theta(values: Mapping[str, Any], source: Path) -> float:
    # transformers 4 writes rope_theta and rope_scaling (null, or {"type" or "rope_type": ...}); transformers 5 writes
    # rope_parameters {"rope_theta", "rope_type"}.
    parameters = values.get("rope_parameters") or {}
    for rope in (parameters, values.get("rope_scaling") or {}):
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind != "default":
            raise UnsupportedModel(
                f"{source}: rotary positions are scaled (rope_type {kind!r}); only 'default', unscaled, is implemented"
            )
        if any(isinstance(value, dict) for value in rope.values()):
            raise UnsupportedModel(f"{source}: rotary parameters differ by layer; only one set for all is implemented")
        if rope.get("partial_rotary_factor", 1.0) != 1.0:
            raise UnsupportedModel(f"{source}: partial_rotary_factor is {rope['partial_rotary_factor']!r}, not 1")
    return float(_or_default(parameters.get("rope_theta"), _or_default(values.get("rope_theta"), 10000.0)))


def token_ids(entry: int | list[int] | None) -> list[int]:
    if entry is None:
        return []
    return [entry] if isinstance(entry, int) else list(entry)


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value
