import dataclasses
import json
from math import prod
from pathlib import Path

import pytest

from specdec_core.models.errors import CorruptFile, UnsupportedModel
from specdec_core.models.gdn_checkpoint import PURE, TINY
from specdec_core.models.gdn_config import (
    GdnConfig,
    expected_shapes,
    gdn_config_from_values,
    gdn_config_values,
    read_gdn_config,
)

# m-a-p/1.3B-100B-GatedDeltaNet-pure
PUBLISHED = {
    "architectures": ["GatedDeltaNetForCausalLM"],
    "attn": None,
    "attn_mode": "chunk",
    "bos_token_id": 1,
    "conv_size": 4,
    "eos_token_id": 2,
    "expand_v": 1,
    "fuse_cross_entropy": True,
    "fuse_norm": True,
    "fuse_swiglu": True,
    "head_dim": 256,
    "hidden_act": "swish",
    "hidden_ratio": 4,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": None,
    "max_position_embeddings": 2048,
    "model_type": "gated_deltanet",
    "norm_eps": 1e-06,
    "num_heads": 8,
    "num_hidden_layers": 24,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.46.3",
    "use_cache": True,
    "use_gate": True,
    "use_short_conv": True,
    "vocab_size": 32000,
}
ATTENTION = {"layers": [3, 7], "num_heads": 16}
SOURCE = Path("config.json")


def config(**changes) -> GdnConfig:
    """The published config with changes; `...` leaves an entry out."""
    values = {name: value for name, value in {**PUBLISHED, **changes}.items() if value is not ...}
    return gdn_config_from_values(values, SOURCE, (2,))


def test_the_published_model():
    found = config()
    assert found == GdnConfig(2048, 5632, 24, 8, 8, 256, 256, 4, 32000, 2048, eos_ids=(2,), bos_id=1)
    assert found.conv_channels == 3 * 2048 and found.head_dim == 0
    shapes = expected_shapes(found)
    # As counted in its files, without the 24 tensors that nothing uses.
    assert len(shapes) == 459 - 24 and sum(map(prod, shapes.values())) == 1_466_343_808
    assert shapes["model.layers.23.attn.v_conv1d.weight"] == (2048, 1, 4)
    assert shapes["model.layers.0.attn.A_log"] == (8,) and shapes["model.layers.0.attn.o_norm.weight"] == (256,)


def test_layers_of_attention_among_them():
    found = config(attn=ATTENTION)
    assert (found.attention_layers, found.heads, found.kv_heads, found.head_dim) == ((3, 7), 16, 16, 128)
    assert found.rope_theta == 10000.0
    found = config(attn={**ATTENTION, "num_kv_heads": 4, "rope_theta": 500.0, "qkv_bias": False, "window_size": None})
    assert (found.kv_heads, found.rope_theta) == (4, 500.0)
    shapes = expected_shapes(found)
    assert shapes["model.layers.3.attn.k_proj.weight"] == (512, 2048)
    assert shapes["model.layers.7.attn.q_proj.weight"] == shapes["model.layers.7.attn.o_proj.weight"] == (2048, 2048)
    of_attention = [name for name in shapes if name.startswith("model.layers.3.")]
    assert len(of_attention) == 4 + 5 and "model.layers.2.attn.A_log" in shapes


def test_heads_of_several_sizes():
    found = config(num_v_heads=16, head_dim=128, expand_v=1.5, num_heads=4)
    assert (found.linear_heads, found.linear_value_heads) == (4, 16)
    assert (found.linear_key_dim, found.linear_value_dim) == (128, 192)
    shapes = expected_shapes(found)
    assert shapes["model.layers.0.attn.k_proj.weight"] == (512, 2048)
    assert shapes["model.layers.0.attn.g_proj.weight"] == (3072, 2048)
    assert shapes["model.layers.0.attn.o_proj.weight"] == (2048, 3072)
    assert shapes["model.layers.0.attn.b_proj.weight"] == (16, 2048)
    assert found.conv_channels == 2 * 512 + 3072


def test_defaults_are_those_of_the_library():
    found = config(expand_v=..., conv_size=..., norm_eps=..., bos_token_id=..., max_position_embeddings=..., attn=...)
    assert (found.linear_value_dim, found.conv_width, found.norm_eps, found.bos_id) == (512, 4, 1e-6, 1)
    assert (found.context, found.negative_eigenvalues, found.tied_head) == (2048, False, False)
    assert config(hidden_ratio=..., allow_neg_eigval=True).negative_eigenvalues
    assert config(hidden_ratio=3).intermediate_size == 4096 and config(intermediate_size=100).intermediate_size == 100
    assert config(tie_word_embeddings=True).tied_head
    assert "lm_head.weight" not in expected_shapes(config(tie_word_embeddings=True))


def test_options_without_effect_are_passed_over():
    changes = {"attn_mode": "fused_recurrent", "use_l2warp": True, "_name_or_path": "x", "conv_bias": False}
    assert config(**changes, hidden_act="silu", attn={**ATTENTION, "window_size": 2048}) == config(attn=ATTENTION)


@pytest.mark.parametrize(
    "changes",
    [{}, PURE, {"tied_head": True, "eos_ids": (1, 5), "bos_id": None}, {"linear_key_dim": 3, "linear_value_dim": 5}],
)
def test_what_is_written_is_read(tmp_path, changes):
    written = dataclasses.replace(TINY, **{"eos_ids": (3,), **changes})
    (tmp_path / "config.json").write_text(json.dumps(gdn_config_values(written, "float32")))
    assert read_gdn_config(tmp_path) == written


def test_more_end_tokens_come_from_the_generation_config(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED))
    assert read_gdn_config(tmp_path).eos_ids == (2,)
    without = {name: value for name, value in PUBLISHED.items() if name != "eos_token_id"}
    (tmp_path / "config.json").write_text(json.dumps(without))
    assert read_gdn_config(tmp_path).eos_ids == (2,)  # the library's default
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, 9]}))
    assert read_gdn_config(tmp_path).eos_ids == (2, 9)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model_type": "gla", "architectures": ["GLAForCausalLM"]}, "model_type is 'gla'.*expected 'gated_deltanet'"),
        ({"use_gate": False}, "use_gate is False; only True is implemented"),
        ({"use_short_conv": False}, "use_short_conv is False; only True"),
        ({"conv_bias": True}, "conv_bias is True; only False"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'swish'"),
        ({"quantization_config": {"bits": 4}}, "quantized weights"),
        ({"qk_norm": "l2", "share_conv": True}, r"unknown options qk_norm = 'l2', share_conv = True\. They may change"),
        ({"expand_v": 0.3}, r"head_dim × expand_v is 76\.8; expected a whole number"),
        ({"num_v_heads": 12}, "12 value heads cannot share 8 heads"),
        ({"num_heads": 0}, "linear_heads is 0; expected a positive integer"),
        ({"num_hidden_layers": 1.5}, r"layers is 1\.5; expected a positive integer"),
        ({"attn": [3]}, r"attn is \[3\]; expected an object"),
        ({"attn": {**ATTENTION, "qkv_bias": True}}, r"attn\.qkv_bias is true"),
        ({"attn": {**ATTENTION, "window_size": 2047}}, r"attn\.window_size is 2047, less than the context of 2048"),
        ({"attn": {**ATTENTION, "qk_norm": True}}, "attn has unknown options qk_norm"),
        ({"attn": {**ATTENTION, "layers": [7, 3]}}, r"attention layers \[7, 3\]: expected ascending"),
        ({"attn": {**ATTENTION, "layers": [3, 3]}}, r"attention layers \[3, 3\]: expected ascending"),
        ({"attn": {**ATTENTION, "layers": [24]}}, r"attention layers \[24\]: expected ascending ones of 0…23"),
        ({"attn": {**ATTENTION, "layers": [-1]}}, r"attention layers \[-1\]"),
        ({"attn": {**ATTENTION, "layers": list(range(24))}}, "every layer is one of attention"),
        ({"attn": {**ATTENTION, "num_heads": 3}}, "3 attention heads share 2048 hidden units: expected an even number"),
        ({"attn": {**ATTENTION, "num_heads": 2048}}, "2048 attention heads share 2048 hidden units"),
        ({"attn": {**ATTENTION, "num_kv_heads": 3}}, "16 heads cannot share 3 KV heads"),
        ({"attn": {**ATTENTION, "num_heads": 0}}, "heads is 0; expected a positive integer"),
    ],
    ids=lambda each: "-".join(each) if isinstance(each, dict) else "",
)
def test_what_is_not_implemented_is_refused_by_name(changes, said):
    with pytest.raises(UnsupportedModel, match=f"config.json: {said}"):
        config(**changes)


def test_an_end_token_outside_the_vocabulary_is_refused():
    with pytest.raises(UnsupportedModel, match="end token 32000 is outside the vocabulary of 32000"):
        gdn_config_from_values(PUBLISHED, SOURCE, (32000,))


@pytest.mark.parametrize("name", ["hidden_size", "num_hidden_layers", "num_heads", "head_dim", "vocab_size"])
def test_an_absent_size_is_named(name):
    with pytest.raises(CorruptFile, match=f"config.json has no entry '{name}', which a Gated DeltaNet needs"):
        config(**{name: ...})


def test_absent_and_senseless_entries_of_attention_are_named():
    with pytest.raises(CorruptFile, match="no entry 'num_heads'"):
        config(attn={"layers": [3]})
    with pytest.raises(CorruptFile, match="an entry that is no number"):
        config(expand_v=[1])


@pytest.mark.parametrize(("name", "value"), [("norm_eps", "small"), ("expand_v", float("inf")), ("expand_v", "two")])
def test_what_is_no_number_is_named_with_its_file(name, value):
    with pytest.raises(CorruptFile, match=r"config\.json has an entry that is no number where one is needed"):
        config(**{name: value})


def test_true_is_no_size():
    with pytest.raises(UnsupportedModel, match="conv_width is True; expected a positive integer"):
        config(conv_size=True)
