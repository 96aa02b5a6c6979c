"""The shape of a Gated DeltaNet model, pure or with some layers of attention: config.json as flash-linear-attention
writes it (model_type gated_deltanet)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_core.models.config import read_json, token_ids
from specdec_core.models.errors import CorruptFile, UnsupportedModel

_SIZES = (
    "hidden_size", "intermediate_size", "layers", "linear_heads", "linear_value_heads", "linear_key_dim",
    "linear_value_dim", "conv_width", "vocabulary", "context",
)  # fmt: skip
_ATTENTION_SIZES = ("heads", "kv_heads")


@dataclass(frozen=True)
class GdnConfig:
    """Decoder whose layers mix tokens by the gated delta rule, but for the layers of full attention among them.

    Names that LlamaConfig has mean what they mean there; heads, kv_heads and rope_theta are those of the attention
    layers (0 heads if there are none), whose head_dim is H / heads. Of a recurrent layer:

    linear_heads         of queries and keys, each of linear_key_dim K.
    linear_value_heads   of values, a multiple of linear_heads; each of linear_value_dim V, and each with a state K × V.
    conv_width           W, taps of the short convolution.
    negative_eigenvalues β reaches from 0 to 2 instead of 1.
    """

    hidden_size: int
    intermediate_size: int
    layers: int
    linear_heads: int
    linear_value_heads: int
    linear_key_dim: int
    linear_value_dim: int
    conv_width: int
    vocabulary: int
    context: int
    attention_layers: tuple[int, ...] = ()
    heads: int = 0
    kv_heads: int = 0
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    negative_eigenvalues: bool = False
    tied_head: bool = False
    eos_ids: tuple[int, ...] = ()
    bos_id: int | None = None
    pad_id: int | None = None

    def __post_init__(self) -> None:
        for name in (*_SIZES, *(_ATTENTION_SIZES if self.attention_layers else ())):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise UnsupportedModel(f"{name} is {value!r}; expected a positive integer")
        if self.linear_value_heads % self.linear_heads:
            raise UnsupportedModel(
                f"{self.linear_value_heads} value heads cannot share {self.linear_heads} heads of queries and keys: "
                "expected a multiple"
            )
        self._check_attention()
        for token in self.eos_ids:
            if not 0 <= token < self.vocabulary:
                raise UnsupportedModel(f"end token {token} is outside the vocabulary of {self.vocabulary}")

    def _check_attention(self) -> None:
        places = self.attention_layers
        if list(places) != sorted(set(places)) or any(not 0 <= each < self.layers for each in places):
            raise UnsupportedModel(f"attention layers {list(places)}: expected ascending ones of 0…{self.layers - 1}")
        if len(places) == self.layers:
            raise UnsupportedModel("every layer is one of attention: that is a Llama model; expected recurrent layers")
        if not places:
            return
        if self.hidden_size % (2 * self.heads):
            raise UnsupportedModel(
                f"{self.heads} attention heads share {self.hidden_size} hidden units: expected an even number for each"
            )
        if self.heads % self.kv_heads:
            raise UnsupportedModel(f"{self.heads} heads cannot share {self.kv_heads} KV heads: expected a multiple")

    @property
    def head_dim(self) -> int:
        """Units of an attention head; 0 if there are none."""
        return self.hidden_size // self.heads if self.heads else 0

    @property
    def conv_channels(self) -> int:
        """C, channels of the convolution: queries, keys and values."""
        return 2 * self.linear_heads * self.linear_key_dim + self.linear_value_heads * self.linear_value_dim


def expected_shapes(config: GdnConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor of such a model, by flash-linear-attention's names; matrices are `[out, in]`."""
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes: dict[str, tuple[int, ...]] = {"model.embeddings.weight": (config.vocabulary, hidden)}
    for layer in range(config.layers):
        prefix = f"model.layers.{layer}."
        mixer = _attention_shapes(config) if layer in config.attention_layers else _recurrent_shapes(config)
        shapes |= {f"{prefix}attn.{name}": shape for name, shape in mixer.items()}
        shapes |= {
            prefix + "attn_norm.weight": (hidden,),
            prefix + "mlp_norm.weight": (hidden,),
            prefix + "mlp.gate_proj.weight": (inner, hidden),
            prefix + "mlp.up_proj.weight": (inner, hidden),
            prefix + "mlp.down_proj.weight": (hidden, inner),
        }
    shapes["model.norm.weight"] = (hidden,)
    if not config.tied_head:
        shapes["lm_head.weight"] = (config.vocabulary, hidden)
    return shapes


def _recurrent_shapes(config: GdnConfig) -> dict[str, tuple[int, ...]]:
    hidden, heads, width = config.hidden_size, config.linear_value_heads, config.conv_width
    keys, values = config.linear_heads * config.linear_key_dim, heads * config.linear_value_dim
    return {
        "q_proj.weight": (keys, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (values, hidden),
        "a_proj.weight": (heads, hidden),
        "b_proj.weight": (heads, hidden),
        "g_proj.weight": (values, hidden),
        "A_log": (heads,),
        "dt_bias": (heads,),
        "q_conv1d.weight": (keys, 1, width),
        "k_conv1d.weight": (keys, 1, width),
        "v_conv1d.weight": (values, 1, width),
        "o_norm.weight": (config.linear_value_dim,),
        "o_proj.weight": (hidden, values),
    }


def _attention_shapes(config: GdnConfig) -> dict[str, tuple[int, ...]]:
    hidden, keys = config.hidden_size, config.kv_heads * config.head_dim
    return {
        "q_proj.weight": (hidden, hidden),
        "k_proj.weight": (keys, hidden),
        "v_proj.weight": (keys, hidden),
        "o_proj.weight": (hidden, hidden),
    }


_IMPLEMENTED: dict[str, tuple[Any, ...]] = {
    "hidden_act": ("swish", "silu"),
    "use_gate": (True,),
    "use_short_conv": (True,),
    "conv_bias": (False,),
}
_READ = (
    "hidden_size", "intermediate_size", "hidden_ratio", "num_hidden_layers", "num_heads", "num_v_heads", "head_dim",
    "expand_v", "conv_size", "vocab_size", "max_position_embeddings", "norm_eps", "allow_neg_eigval", "attn",
    "tie_word_embeddings", "eos_token_id", "bos_token_id", "pad_token_id", "model_type", "architectures",
)  # fmt: skip
_WITHOUT_EFFECT = (  # on what a trained model computes
    "attn_mode", "fuse_norm", "fuse_swiglu", "fuse_cross_entropy", "fuse_linear_cross_entropy", "use_l2warp",
    "use_cache", "initializer_range", "auto_map", "dtype", "torch_dtype", "transformers_version",
)  # fmt: skip
_READ_OF_ATTENTION = ("layers", "num_heads", "num_kv_heads", "rope_theta", "qkv_bias", "window_size")


def read_gdn_config(folder: Path) -> GdnConfig:
    """The config of a folder: config.json, and the end tokens that generation_config.json adds.

    Raises CorruptFile if a file is absent or is no JSON object, UnsupportedModel naming what is not implemented.
    """
    values = read_json(folder / "config.json")
    generation = folder / "generation_config.json"
    more = read_json(generation).get("eos_token_id") if generation.is_file() else None
    ends = dict.fromkeys(token_ids(values.get("eos_token_id", 2)) + token_ids(more))
    return gdn_config_from_values(values, folder / "config.json", tuple(ends))


def gdn_config_from_values(values: Mapping[str, Any], source: Path, eos_ids: tuple[int, ...]) -> GdnConfig:
    """The config that the entries of a config.json describe.

    Sizes must be there: hidden_size, num_hidden_layers, num_heads, head_dim and vocab_size; of other absent entries
    flash-linear-attention's defaults are taken. An option that is not known here is refused, for it may change what the
    model computes.
    """
    _refuse_other_models(values, source)
    try:
        heads, key_dim = values["num_heads"], values["head_dim"]
        context = values.get("max_position_embeddings", 2048)
        return GdnConfig(
            hidden_size=values["hidden_size"],
            intermediate_size=_intermediate_size(values),
            layers=values["num_hidden_layers"],
            linear_heads=heads,
            linear_value_heads=_or_default(values.get("num_v_heads"), heads),
            linear_key_dim=key_dim,
            linear_value_dim=_whole(key_dim * _or_default(values.get("expand_v"), 2), "head_dim × expand_v"),
            conv_width=values.get("conv_size", 4),
            vocabulary=values["vocab_size"],
            context=context,
            norm_eps=float(values.get("norm_eps", 1e-6)),
            negative_eigenvalues=bool(values.get("allow_neg_eigval", False)),
            tied_head=bool(values.get("tie_word_embeddings", False)),
            eos_ids=eos_ids,
            bos_id=values.get("bos_token_id", 1),
            pad_id=values.get("pad_token_id"),
            **_attention(values.get("attn"), context),
        )
    except KeyError as error:
        raise CorruptFile(f"{source} has no entry {error}, which a Gated DeltaNet needs; check the folder") from None
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{source}: {error}") from None
    except (TypeError, ValueError, OverflowError) as error:
        raise CorruptFile(f"{source} has an entry that is no number where one is needed ({error})") from None


def gdn_config_values(config: GdnConfig, dtype: str) -> dict[str, Any]:
    """The entries of a config.json that describe this model; `dtype` such as 'float32'."""
    attention = None
    if config.attention_layers:
        attention = {
            "layers": list(config.attention_layers),
            "num_heads": config.heads,
            "num_kv_heads": config.kv_heads,
            "rope_theta": config.rope_theta,
            "qkv_bias": False,
            "window_size": None,
        }
    ends = list(config.eos_ids)
    return {
        "architectures": ["GatedDeltaNetForCausalLM"],
        "model_type": "gated_deltanet",
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.layers,
        "num_heads": config.linear_heads,
        "num_v_heads": config.linear_value_heads,
        "head_dim": config.linear_key_dim,
        "expand_v": config.linear_value_dim / config.linear_key_dim,
        "conv_size": config.conv_width,
        "vocab_size": config.vocabulary,
        "max_position_embeddings": config.context,
        "norm_eps": config.norm_eps,
        "allow_neg_eigval": config.negative_eigenvalues,
        "attn": attention,
        "tie_word_embeddings": config.tied_head,
        "hidden_act": "swish",
        "use_gate": True,
        "use_short_conv": True,
        "bos_token_id": config.bos_id,
        "eos_token_id": ends if len(ends) != 1 else ends[0],
        "pad_token_id": config.pad_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def is_gated_deltanet(values: Mapping[str, Any]) -> bool:
    """Whether the entries of a config.json are those of such a model."""
    architectures = values.get("architectures") or []
    return values.get("model_type") == "gated_deltanet" or "GatedDeltaNetForCausalLM" in architectures


def _refuse_other_models(values: Mapping[str, Any], source: Path) -> None:
    kind, architectures = values.get("model_type"), values.get("architectures") or []
    if not is_gated_deltanet(values):
        raise UnsupportedModel(
            f"{source}: model_type is {kind!r} and architectures {architectures}; expected 'gated_deltanet' "
            "(GatedDeltaNetForCausalLM)"
        )
    for name, implemented in _IMPLEMENTED.items():
        if values.get(name, implemented[0]) not in implemented:
            raise UnsupportedModel(f"{source}: {name} is {values[name]!r}; only {implemented[0]!r} is implemented")
    if values.get("quantization_config") is not None:
        raise UnsupportedModel(f"{source}: quantized weights (quantization_config); use the unquantized checkpoint")
    known = {*_READ, *_WITHOUT_EFFECT, *_IMPLEMENTED, "quantization_config"}
    unknown = sorted(name for name in values if name not in known and not name.startswith("_"))
    if unknown:
        raise UnsupportedModel(
            f"{source}: unknown options {', '.join(f'{name} = {values[name]!r}' for name in unknown)}. They may change "
            "what the model computes; remove those that do not from config.json"
        )


def _intermediate_size(values: Mapping[str, Any]) -> int:
    """As given; else two thirds of hidden_ratio · H, rounded up to a multiple of 256."""
    if values.get("intermediate_size") is not None:
        return values["intermediate_size"]
    wanted = int(values["hidden_size"] * _or_default(values.get("hidden_ratio"), 4) * 2 / 3)
    return (wanted + 255) // 256 * 256


def _attention(given: Any, context: int) -> dict[str, Any]:
    """The fields of GdnConfig that the entry `attn` gives."""
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise UnsupportedModel(f"attn is {given!r}; expected an object with layers and num_heads, or null")
    unknown = sorted(set(given) - set(_READ_OF_ATTENTION))
    if unknown:
        raise UnsupportedModel(f"attn has unknown options {', '.join(unknown)}, which may change what it computes")
    if given.get("qkv_bias"):
        raise UnsupportedModel("attn.qkv_bias is true; only projections without a bias are implemented")
    window = given.get("window_size")
    if window is not None and window < context:
        raise UnsupportedModel(
            f"attn.window_size is {window}, less than the context of {context}: attention to a window is not "
            "implemented, only full attention (null)"
        )
    return {
        "attention_layers": tuple(given["layers"]),
        "heads": given["num_heads"],
        "kv_heads": _or_default(given.get("num_kv_heads"), given["num_heads"]),
        "rope_theta": float(_or_default(given.get("rope_theta"), 10000.0)),
    }


def _whole(value: float, name: str) -> int:
    nearest = round(value)
    if abs(value - nearest) > 1e-5 * abs(value):  # a ratio such as 5 / 3 is rounded where it is written
        raise UnsupportedModel(f"{name} is {value}; expected a whole number")
    return nearest


def _or_default(value: Any, default: Any) -> Any:
    return default if value is None else value
