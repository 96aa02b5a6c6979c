"""A tokenizer from GGUF metadata."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from specdec_core.models.errors import CorruptFile, UnsupportedModel
from specdec_core.models.gguf_tokenizer import build_tokenizer, end_tokens, write_tokenizer

SOURCE = Path("tiny.gguf")


def test_merges_are_applied(tiny_metadata):
    values = tiny_metadata()
    tokenizer = build_tokenizer(values, SOURCE)
    assert tokenizer.encode("in the").tokens == ["in", "Ġthe"]
    assert tokenizer.get_vocab() == {token: index for index, token in enumerate(values["tokenizer.ggml.tokens"])}


def test_digits_stand_alone(tiny_metadata):
    tokenizer = build_tokenizer(tiny_metadata(), SOURCE)
    assert tokenizer.pre_tokenizer.pre_tokenize_str("in 2025x") == [
        ("in", (0, 2)), ("Ġ", (2, 3)), ("2", (3, 4)), ("0", (4, 5)), ("2", (5, 6)), ("5", (6, 7)), ("x", (7, 8)),
    ]  # fmt: skip


def test_control_tokens_are_special_and_defined_ones_are_text(tiny_metadata):
    tokenizer = build_tokenizer(tiny_metadata(), SOURCE)
    ids = tokenizer.encode("<|im_start|>a<tool>").ids
    assert [ids[0], ids[2]] == [1, 3]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "a<tool>"


def test_end_tokens(tiny_metadata):
    values = tiny_metadata()
    assert end_tokens(values) == (2, 0)
    values["tokenizer.ggml.eos_token_id"] = 3
    assert end_tokens(values) == (3, 2, 0)
    del values["tokenizer.ggml.eos_token_id"]
    values["tokenizer.ggml.token_type"] = [1] * len(values["tokenizer.ggml.tokens"])
    assert end_tokens(values) == ()


def test_the_files(tiny_metadata, tmp_path):
    values = tiny_metadata() | {"llama.context_length": 256}
    write_tokenizer(values, tmp_path, SOURCE)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert (settings["bos_token"], settings["eos_token"], settings["pad_token"]) == (
        "<|im_start|>", "<|im_end|>", "<|im_end|>",
    )  # fmt: skip
    assert "unk_token" not in settings
    assert settings["chat_template"] == values["tokenizer.chat_template"]
    assert settings["model_max_length"] == 256


@pytest.mark.parametrize("changes", [{"tokenizer.ggml.model": "llama"}, {"tokenizer.ggml.pre": "qwen2"}])
def test_other_kinds_are_refused(tiny_metadata, changes):
    with pytest.raises(UnsupportedModel, match=f"{next(iter(changes.values()))}.*implemented: 'gpt2'"):
        build_tokenizer(tiny_metadata() | changes, SOURCE)


@pytest.mark.parametrize(
    ("key", "change", "message"),
    [
        ("merges", lambda merges: [*merges, "zz yy"], "do not fit"),
        ("merges", lambda merges: [*merges, "a"], "not two tokens"),
        ("tokens", lambda tokens: [*tokens[:-1], tokens[-2]], "the same token twice"),
        ("token_type", lambda types: types[:-1], "every token a type"),
    ],
)
def test_damaged_metadata(tiny_metadata, key, change, message):
    values = tiny_metadata()
    values[f"tokenizer.ggml.{key}"] = change(values[f"tokenizer.ggml.{key}"])
    with pytest.raises(CorruptFile, match=message):
        build_tokenizer(values, SOURCE)
