"""Variants by llama.cpp's quantizer: every format, made once, whole or not at all, and their exact values."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from specdec_core.models import quantize
from specdec_core.models.checkpoints import load_checkpoint
from specdec_core.models.errors import CorruptFile, ModelError, UnknownModel, UnsupportedModel
from specdec_core.models.gguf import convert
from specdec_core.models.gguf_tokenizer import build_tokenizer

pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: make setup builds it where there is a compiler")


def norms(checkpoint):
    return {name: tensor for name, tensor in checkpoint.weights.items() if tensor.ndim == 1}


@pytest.mark.parametrize("kind", quantize.VARIANTS)
def test_every_format_can_be_made_and_read(tiny, tiny_gguf, own_cache, kind):
    made = quantize.variant(tiny_gguf, kind, threads=1)
    types = quantize.tensor_types(made)
    assert types.keys() == tiny.weights.keys() and types["model.norm.weight"] == "F32"
    if kind != "Q4_K_M":  # rows of 64 and 96 hold no block of 256, so it puts others in its place
        assert types["model.layers.1.mlp.up_proj.weight"] == kind
    found = quantize.dequantised_checkpoint(made)
    assert found.config == quantize.dequantised_checkpoint(tiny_gguf).config
    error = {"F32": 0.0, "F16": 1e-3, "Q8_0": 0.01}.get(kind, 0.2)  # of the largest weight of a matrix
    for name, tensor in tiny.weights.items():
        assert found.weights[name].dtype == torch.float32
        largest = tensor.abs().max()
        assert (found.weights[name] - tensor).abs().max() <= error * largest, name
        if kind.startswith("Q") and tensor.ndim == 2:
            assert not torch.equal(found.weights[name], tensor)


@pytest.mark.parametrize("kind", [GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0, GGMLQuantizationType.F16])
def test_float32_of_any_file_has_its_very_values(write_gguf, tmp_path, own_cache, kind):
    """So that a kernel of another format can be swapped in at equal weights."""
    source = write_gguf(tmp_path / "source.gguf", kind=kind)
    made = quantize.variant(source, "F32", threads=1)
    assert set(quantize.tensor_types(made).values()) == {"F32"}
    expected, found = (quantize.dequantised_checkpoint(file).weights for file in (source, made))
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_the_shipped_file_is_found_by_name():
    assert quantize.gguf_source("smollm2-135m-instruct").name == "SmolLM2-135M-Instruct.Q4_1.gguf"


def test_values_are_those_of_the_converted_folder(tiny_gguf, tmp_path, own_cache):
    made = quantize.variant(tiny_gguf, "Q4_0", threads=1)
    convert(made, tmp_path / "folder")
    folder, memory = load_checkpoint(tmp_path / "folder"), quantize.dequantised_checkpoint(made)
    assert (folder.config, folder.fingerprint) == (memory.config, memory.fingerprint)
    assert memory.tokenizer_path is None and memory.name == "Q4_0"


def test_values_do_not_depend_on_the_file_once_read(write_gguf, tmp_path):
    file = write_gguf(tmp_path / "gone.gguf")
    found = quantize.dequantised_checkpoint(file)
    before = {name: tensor.clone() for name, tensor in found.weights.items()}
    with file.open("r+b") as stream:  # in place, as a mapping would see it
        stream.write(bytes(file.stat().st_size))
    assert all(torch.equal(found.weights[name], tensor) for name, tensor in before.items())


def test_a_variant_is_made_once(tiny_gguf, own_cache, monkeypatch):
    first = quantize.variant(tiny_gguf, "Q8_0", threads=1)
    when = first.stat().st_mtime_ns
    monkeypatch.setattr(quantize, "_quantize", lambda *given: pytest.fail("made again"))
    assert quantize.variant(str(tiny_gguf), "Q8_0") == first and first.stat().st_mtime_ns == when
    assert first.is_relative_to(own_cache)


def test_a_changed_file_gets_its_own_variants(write_gguf, tmp_path, own_cache):
    file = write_gguf(tmp_path / "model.gguf")
    before = quantize.variant(file, "F16", threads=1)
    write_gguf(file, tensors={"output_norm.weight": np.full(64, 2, np.float32)})
    after = quantize.variant(file, "F16", threads=1)
    assert before != after
    assert (quantize.dequantised_checkpoint(after).weights["model.norm.weight"] == 2).all()


def test_a_failure_leaves_nothing_and_says_what_failed(write_gguf, tmp_path, own_cache):
    broken = write_gguf(tmp_path / "broken.gguf")
    broken.write_bytes(broken.read_bytes()[:-50_000])
    with pytest.raises(ModelError, match=r"could not make Q4_0 of .*broken\.gguf \(code 1\): .+"):
        quantize.variant(broken, "Q4_0", threads=1)
    assert [entry for folder, _, files in os.walk(own_cache / "gguf") for entry in files] == []


def test_a_failure_half_way_leaves_nothing(tiny_gguf, own_cache, monkeypatch):
    def half(source, goal, kind, threads):
        goal.write_bytes(b"GGUF")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(quantize, "_quantize", half)
    with pytest.raises(OSError, match="No space left"):
        quantize.variant(tiny_gguf, "Q4_0")
    assert [entry for folder, _, files in os.walk(own_cache / "gguf") for entry in files] == []


def test_what_cannot_be_named(tmp_path, own_cache):
    with pytest.raises(UnsupportedModel, match="format 'Q3_X': expected one of F32, F16, Q8_0, Q4_0, Q4_1, Q4_K_M"):
        quantize.variant("smollm2-135m-instruct", "Q3_X")
    with pytest.raises(UnknownModel, match=r"no GGUF file .*absent\.gguf"):
        quantize.variant(tmp_path / "absent.gguf", "F16")


def test_no_gguf(tmp_path, own_cache):
    (tmp_path / "text.gguf").write_text("hello")
    with pytest.raises(ModelError, match="could not make F16"):
        quantize.variant(tmp_path / "text.gguf", "F16", threads=1)
    with pytest.raises(CorruptFile, match="no readable GGUF"):
        quantize.dequantised_checkpoint(tmp_path / "text.gguf")


def test_an_unknown_architecture_is_named(write_gguf, tmp_path):
    with pytest.raises(UnsupportedModel, match="architecture 'no-such'"):
        quantize.dequantised_checkpoint(write_gguf(tmp_path / "other.gguf", {"general.architecture": "no-such"}))


def test_a_file_without_a_tokenizer_has_none(tiny_metadata, tmp_path):
    values = {key: value for key, value in tiny_metadata().items() if not key.startswith("tokenizer.ggml")}
    with pytest.raises(UnsupportedModel, match=r"tokenizer of kind None .*Give a Hugging Face folder"):
        build_tokenizer(values, tmp_path / "mute.gguf")
