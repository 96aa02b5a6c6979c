"""config.json in the forms that transformers writes, and refusals by name."""

from __future__ import annotations

import json

import pytest
import transformers

from specdec_core.models.config import (
    LlamaConfig,
    config_from_values,
    config_values,
    expected_shapes,
    read_config,
)
from specdec_core.models.errors import CorruptFile, UnsupportedModel

CONFIG = LlamaConfig(
    hidden_size=48, intermediate_size=96, layers=2, heads=6, kv_heads=2, head_dim=8, vocabulary=97, context=256,
    rope_theta=50000.0, norm_eps=1e-5, tied_head=True, eos_ids=(2, 0), bos_id=1, pad_id=2,
)  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    return write(tmp_path, config_values(CONFIG, "float32"))


def write(folder, values, name="config.json"):
    (folder / name).write_text(json.dumps(values))
    return folder


def test_what_is_written_is_read(folder):
    assert read_config(folder) == CONFIG


def test_transformers_reads_what_is_written(folder):
    found = transformers.AutoConfig.from_pretrained(folder)
    assert found.rope_parameters == {"rope_theta": 50000.0, "rope_type": "default"}
    assert (found.num_key_value_heads, found.head_dim, found.rms_norm_eps) == (2, 8, 1e-5)
    assert found.eos_token_id == [2, 0]
    assert found.tie_word_embeddings


def test_what_transformers_writes_is_read(tmp_path):
    theirs = transformers.LlamaConfig(
        hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        vocab_size=97, max_position_embeddings=256, rms_norm_eps=1e-5, tie_word_embeddings=True, eos_token_id=[2, 0],
        bos_token_id=1, pad_token_id=2, rope_parameters={"rope_theta": 50000.0, "rope_type": "default"},
        architectures=["LlamaForCausalLM"],
    )  # fmt: skip
    theirs.save_pretrained(tmp_path)
    assert read_config(tmp_path) == CONFIG


class TestRope:
    def values(self, **entries):
        values = config_values(CONFIG, "float32")
        del values["rope_parameters"], values["rope_theta"]
        return values | entries

    @pytest.mark.parametrize(
        ("entries", "theta"),
        [
            ({"rope_theta": 5e5, "rope_scaling": None}, 5e5),
            ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, 5e5),
            ({"rope_theta": 5e5, "rope_parameters": {"rope_type": "default"}}, 5e5),
            ({"rope_theta": 5e5, "rope_scaling": {"rope_type": "default"}}, 5e5),
            ({}, 1e4),
        ],
    )
    def test_both_forms(self, tmp_path, entries, theta):
        assert read_config(write(tmp_path, self.values(**entries))).rope_theta == theta

    @pytest.mark.parametrize(
        ("entries", "message"),
        [
            ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
            ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "rope_type 'llama3'"),
            ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "rope_type 'yarn'"),
            ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "differ by layer"),
            ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
        ],
    )
    def test_scaling_is_refused(self, tmp_path, entries, message):
        with pytest.raises(UnsupportedModel, match=message):
            read_config(write(tmp_path, self.values(**entries)))


class TestRefusals:
    @pytest.mark.parametrize(
        ("entries", "message"),
        [
            ({"model_type": "qwen3", "architectures": ["Qwen3"]}, "model_type is 'qwen3'.*Hugging Face target"),
            ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu'"),
            ({"attention_bias": True}, "attention_bias is True"),
            ({"mlp_bias": True}, "mlp_bias is True"),
            ({"quantization_config": {"bits": 4}}, "quantized weights"),
            ({"num_key_value_heads": 4}, "6 heads cannot share 4 KV heads"),
            ({"head_dim": 7}, "head_dim is 7"),
            ({"hidden_size": 0}, "hidden_size is 0"),
            ({"eos_token_id": 97}, "end token 97 is outside"),
        ],
    )
    def test_each_is_named(self, tmp_path, entries, message):
        with pytest.raises(UnsupportedModel, match=message) as caught:
            read_config(write(tmp_path, config_values(CONFIG, "float32") | entries))
        assert str(tmp_path) in str(caught.value)

    def test_an_architecture_is_enough(self, tmp_path):
        values = config_values(CONFIG, "float32")
        del values["model_type"]
        assert read_config(write(tmp_path, values)) == CONFIG

    def test_a_missing_entry(self, tmp_path):
        values = config_values(CONFIG, "float32")
        del values["intermediate_size"]
        with pytest.raises(CorruptFile, match="no entry 'intermediate_size'"):
            read_config(write(tmp_path, values))

    @pytest.mark.parametrize("entries", [{"hidden_size": "48", "head_dim": None}, {"num_attention_heads": 0}])
    def test_an_entry_of_another_type(self, tmp_path, entries):
        with pytest.raises(CorruptFile, match="no number where one is needed"):
            read_config(write(tmp_path, config_values(CONFIG, "float32") | entries))

    @pytest.mark.parametrize(("text", "message"), [("{half", "not valid JSON"), ("[1]", "holds a list")])
    def test_a_damaged_file(self, tmp_path, text, message):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(CorruptFile, match=message):
            read_config(tmp_path)

    def test_no_file(self, tmp_path):
        with pytest.raises(CorruptFile, match=r"config\.json is absent"):
            read_config(tmp_path)


def test_end_tokens_of_both_files(folder):
    write(folder, {"eos_token_id": [0, 5]}, "generation_config.json")
    assert read_config(folder).eos_ids == (2, 0, 5)


def test_defaults_follow_transformers():
    needed = {"model_type": "llama", "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2,
              "num_attention_heads": 6, "vocab_size": 97}  # fmt: skip
    ours = config_from_values(needed, "test", ())
    theirs = transformers.LlamaConfig(**needed)
    assert (ours.kv_heads, ours.head_dim) == (theirs.num_key_value_heads, theirs.head_dim)
    assert (ours.norm_eps, ours.context) == (theirs.rms_norm_eps, theirs.max_position_embeddings)
    assert ours.tied_head == theirs.tie_word_embeddings


@pytest.mark.parametrize("tied", [True, False])
def test_shapes_are_those_of_transformers(tied):
    config = LlamaConfig(48, 96, 2, 6, 2, 16, 97, 256, tied_head=tied)  # heads of 16: wider than the hidden size
    theirs = transformers.LlamaForCausalLM(transformers.LlamaConfig(**config_values(config, "float32")))
    shapes = {name: tuple(tensor.shape) for name, tensor in theirs.state_dict().items()}
    if tied:
        del shapes["lm_head.weight"]
    assert expected_shapes(config) == shapes
