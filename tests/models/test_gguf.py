"""GGUF conversion: every value right, in Hugging Face's row order, and nothing left behind when it fails."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import gguf as package
import numpy as np
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from specdec_core.cache import cache_dir
from specdec_core.models import gguf, registry
from specdec_core.models.checkpoints import load_checkpoint
from specdec_core.models.errors import CorruptFile, UnsupportedModel

ROOT = Path(gguf.__file__).parents[2]
Q8_0, Q4_1 = package.GGMLQuantizationType.Q8_0, package.GGMLQuantizationType.Q4_1


@pytest.fixture
def folder(own_cache):
    return cache_dir("models") / "tiny"


class TestTinyModel:
    def test_every_tensor_comes_back(self, tiny, tiny_gguf, folder):
        gguf.convert(tiny_gguf, folder)
        found = load_checkpoint(folder)
        assert found.weights.keys() == tiny.weights.keys()
        for name, tensor in tiny.weights.items():
            assert torch.equal(found.weights[name], tensor), name

    def test_the_config(self, tiny, tiny_gguf, folder):
        gguf.convert(tiny_gguf, folder)
        config = load_checkpoint(folder).config
        assert config.norm_eps == 1e-5  # not 9.99999974e-06, which is how float32 metadata arrive
        assert config.eos_ids == (2, 0)
        assert (config.bos_id, config.pad_id, config.tied_head) == (1, 2, False)
        assert (config.heads, config.kv_heads, config.head_dim) == (4, 2, 16)
        assert (config.layers, config.context, config.rope_theta) == (3, 256, 10000.0)

    def test_a_tied_head(self, tiny, write_gguf, tmp_path, folder):
        gguf.convert(write_gguf(tmp_path / "tied.gguf", tensors={"output.weight": None}), folder)
        assert load_checkpoint(folder).config.tied_head
        assert "lm_head.weight" not in load_checkpoint(folder).weights

    @pytest.mark.parametrize("kind", [Q8_0, Q4_1])
    def test_quantized_values_are_the_packages_own(self, tiny, write_gguf, tmp_path, folder, kind):
        gguf.convert(write_gguf(tmp_path / "quantized.gguf", kind=kind), folder)
        found = load_checkpoint(folder).weights
        for name in ("model.embed_tokens.weight", "model.layers.2.mlp.down_proj.weight"):
            original = tiny.weights[name].numpy()
            expected = package.quants.dequantize(package.quants.quantize(original, kind), kind)
            assert np.array_equal(found[name].numpy(), expected)
        # Rows of 16 weights share no block across rows, so permuting rows commutes with quantizing them.
        name = "model.layers.0.self_attn.q_proj.weight"
        original = tiny.weights[name].numpy()
        assert np.array_equal(
            found[name].numpy(), package.quants.dequantize(package.quants.quantize(original, kind), kind)
        )

    def test_transformers_reads_the_folder(self, tiny, tiny_gguf, folder):
        gguf.convert(tiny_gguf, folder)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        assert model.dtype == torch.float32
        assert torch.equal(
            model.state_dict()["model.layers.1.self_attn.k_proj.weight"],
            tiny.weights["model.layers.1.self_attn.k_proj.weight"],
        )
        assert model.generation_config.eos_token_id == [2, 0]

    def test_the_manifest(self, tiny_gguf, folder):
        gguf.convert(tiny_gguf, folder)
        digest = gguf.file_digest(tiny_gguf)
        manifest = json.loads((folder / "manifest.json").read_text())
        assert manifest["source_sha256"] == digest
        assert manifest["weights_sha256"] == gguf.file_digest(folder / "model.safetensors")
        assert gguf.is_current(folder, digest)

    def test_torch_is_not_imported(self):
        code = "import sys, specdec_core.models.gguf; sys.exit('torch' in sys.modules)"
        assert subprocess.run([sys.executable, "-c", code], cwd=ROOT).returncode == 0


def test_unpermute_separates_the_halves():
    # Two heads of six rows; llama.cpp stores each as first, fourth, second, fifth, third, sixth.
    stored = np.array([0, 3, 1, 4, 2, 5, 6, 9, 7, 10, 8, 11])[:, None].repeat(2, axis=1)
    assert np.array_equal(gguf.unpermute(stored, 2)[:, 0], np.arange(12))


class TestCheck:
    @pytest.mark.parametrize("name", ["model.layers.0.self_attn.q_proj.weight", "model.norm.weight"])
    def test_a_single_changed_bit_is_found(self, tiny_gguf, folder, name):
        gguf.convert(tiny_gguf, folder)
        reader = gguf.open_gguf(tiny_gguf)
        config = load_checkpoint(folder).config
        tensors = gguf.match_tensors(reader, config, tiny_gguf)
        file = folder / "model.safetensors"
        gguf.check_weights(tensors, config, file)
        weights = {key: value.copy() for key, value in load_file(file).items()}
        weights[name].reshape(-1).view(np.uint32)[-1] ^= 1
        save_file(weights, file)
        with pytest.raises(CorruptFile, match=f"{name} differs"):
            gguf.check_weights(tensors, config, file)

    def test_a_wrong_row_order_is_found(self, tiny_gguf, folder, monkeypatch):
        monkeypatch.setattr(gguf, "unpermute", lambda rows, heads: rows)
        with pytest.raises(CorruptFile, match=r"q_proj\.weight differs"):
            gguf.convert(tiny_gguf, folder)
        assert os.listdir(folder.parent) == []


class TestBadFiles:
    def assert_refused(self, source, folder, error, message, **options):
        with pytest.raises(error, match=message):
            gguf.convert(source, folder, **options)
        assert os.listdir(folder.parent) == []

    @pytest.mark.parametrize("part", [0.0, 0.001, 0.01, 0.05, 0.5, 0.999])
    def test_truncated(self, tiny_gguf, tmp_path, folder, part):
        data = tiny_gguf.read_bytes()
        source = tmp_path / "cut.gguf"
        source.write_bytes(data[: int(len(data) * part)])
        self.assert_refused(source, folder, CorruptFile, r"cut\.gguf is no readable GGUF")

    def test_no_gguf(self, tmp_path, folder):
        source = tmp_path / "text.gguf"
        source.write_text("this is no model " * 100)
        self.assert_refused(source, folder, CorruptFile, "no readable GGUF.*magic")

    def test_another_digest(self, tiny_gguf, folder):
        self.assert_refused(tiny_gguf, folder, CorruptFile, "truncated or changed.*expected 00", sha256="00")

    def test_values_that_are_not_numbers(self, write_gguf, tmp_path, folder):
        weights = np.full(64, np.nan, np.float32)
        source = write_gguf(tmp_path / "nan.gguf", tensors={"output_norm.weight": weights})
        self.assert_refused(source, folder, CorruptFile, r"output_norm\.weight of the GGUF holds NaN")

    def test_a_missing_tensor(self, write_gguf, tmp_path, folder):
        source = write_gguf(tmp_path / "lacks.gguf", tensors={"blk.1.attn_k.weight": None})
        self.assert_refused(source, folder, CorruptFile, r"lacks a tensor for model\.layers\.1\.self_attn\.k_proj")

    def test_an_unknown_tensor(self, write_gguf, tmp_path, folder):
        source = write_gguf(tmp_path / "bias.gguf", tensors={"blk.1.attn_k.bias": np.ones(32, np.float32)})
        self.assert_refused(source, folder, UnsupportedModel, r"self_attn\.k_proj\.bias, which is not part")

    def test_a_wrong_shape(self, write_gguf, tmp_path, folder):
        source = write_gguf(tmp_path / "shape.gguf", tensors={"output_norm.weight": np.ones(32, np.float32)})
        self.assert_refused(source, folder, CorruptFile, r"model\.norm\.weight has shape \[32\], expected \[64\]")

    @pytest.mark.parametrize(
        ("changes", "error", "message"),
        [
            ({"general.architecture": "qwen3"}, UnsupportedModel, "architecture 'qwen3'"),
            ({"llama.rope.scaling.type": "linear"}, UnsupportedModel, "rotary positions .linear"),
            ({"llama.rope.dimension_count": 8}, UnsupportedModel, "only a part of each head"),
            ({"llama.block_count": None}, CorruptFile, r"lacks the metadata 'llama\.block_count'"),
            ({"tokenizer.ggml.pre": "llama-bpe"}, UnsupportedModel, "splits text like 'llama-bpe'"),
        ],
    )
    def test_metadata(self, write_gguf, tmp_path, folder, changes, error, message):
        self.assert_refused(write_gguf(tmp_path / "changed.gguf", changes), folder, error, message)

    @pytest.mark.skipif(sys.platform == "win32", reason="limits a file's size with setrlimit")
    def test_a_full_disk(self, tiny_gguf, folder):
        code = f"""
import resource, signal
from pathlib import Path
from specdec_core.cache import CacheError
from specdec_core.models import gguf
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    gguf.convert(Path({str(tiny_gguf)!r}), Path({str(folder)!r}))
except CacheError as error:
    print(error)
"""
        ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
        assert f"cannot write {folder}" in ended.stdout, ended.stderr
        assert "free some space" in ended.stdout
        assert os.listdir(folder.parent) == []


class TestIsCurrent:
    @pytest.fixture
    def digest(self, tiny_gguf, folder):
        gguf.convert(tiny_gguf, folder)
        return gguf.file_digest(tiny_gguf)

    def test_another_source(self, folder, digest):
        assert not gguf.is_current(folder, "00")

    def test_another_format(self, folder, digest, monkeypatch):
        monkeypatch.setattr(gguf, "FORMAT", gguf.FORMAT + 1)
        assert not gguf.is_current(folder, digest)

    @pytest.mark.parametrize("name", ["model.safetensors", "config.json", "tokenizer.json", "manifest.json"])
    def test_a_missing_or_shorter_file(self, folder, digest, name):
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: len(data) // 2])
        assert not gguf.is_current(folder, digest)
        (folder / name).unlink()
        assert not gguf.is_current(folder, digest)

    def test_a_manifest_of_another_kind(self, folder, digest):
        (folder / "manifest.json").write_text(json.dumps({"format": gguf.FORMAT, "source_sha256": digest, "sizes": []}))
        assert not gguf.is_current(folder, digest)


class TestRealModel:
    def test_hand_decoded_blocks(self, smollm):
        """Q4_1 and Q8_0 decoded here from the file's bytes, and Hugging Face's row order from its definition."""
        reader = gguf.open_gguf(registry.source_file(registry.MODELS["smollm2-135m-instruct"]))
        tensors = {tensor.name: tensor for tensor in reader.tensors}
        down = q4_1(tensors["blk.29.ffn_down.weight"].data)
        assert np.array_equal(smollm.weights["model.layers.29.mlp.down_proj.weight"].numpy(), down)
        queries = q4_1(tensors["blk.4.attn_q.weight"].data).reshape(9, 32, 2, 576)
        expected = np.concatenate([queries[:, :, 0], queries[:, :, 1]], axis=1).reshape(576, 576)
        assert np.array_equal(smollm.weights["model.layers.4.self_attn.q_proj.weight"].numpy(), expected)
        embedding = q8_0(tensors["token_embd.weight"].data[:1000])
        assert np.array_equal(smollm.weights["model.embed_tokens.weight"][:1000].numpy(), embedding)

    def test_it_is_the_model_we_think(self, smollm):
        config = smollm.config
        assert (config.layers, config.hidden_size, config.heads, config.kv_heads, config.head_dim) == (
            30,
            576,
            9,
            3,
            64,
        )
        assert (config.vocabulary, config.context, config.tied_head) == (49152, 8192, True)
        assert (config.rope_theta, config.norm_eps) == (100000.0, 1e-5)
        assert config.eos_ids == (2, 0)
        assert len(smollm.weights) == 272
        assert sum(tensor.numel() for tensor in smollm.weights.values()) == 134_515_008

    def test_transformers_answers_a_question_with_it(self, smollm, smollm_tokenizer):
        model = transformers.AutoModelForCausalLM.from_pretrained(smollm.folder)
        prompt = smollm_tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
        text = model.generate(torch.tensor([prompt]), do_sample=False, max_new_tokens=24)[0, len(prompt) :].tolist()
        assert "Paris" in smollm_tokenizer.decode(text)
        assert text[-1] in smollm.config.eos_ids

    def test_the_stored_header(self, smollm):
        with safe_open(smollm.folder / "model.safetensors", framework="np") as stored:
            assert stored.metadata() == {"format": "pt"}


def q4_1(rows: np.ndarray) -> np.ndarray:
    """`[N, blocks · 20]` bytes → `[N, blocks · 32]`: scale, offset, and 16 bytes with two 4-bit numbers each."""
    blocks = np.ascontiguousarray(rows).reshape(-1, 20)
    scale, offset = (blocks[:, at : at + 2].copy().view(np.float16).astype(np.float32) for at in (0, 2))
    numbers = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1).astype(np.float32)
    return (scale * numbers + offset).reshape(len(rows), -1)


def q8_0(rows: np.ndarray) -> np.ndarray:
    """`[N, blocks · 34]` bytes → `[N, blocks · 32]`: scale and 32 signed bytes."""
    blocks = np.ascontiguousarray(rows).reshape(-1, 34)
    scale = blocks[:, :2].copy().view(np.float16).astype(np.float32)
    return (scale * blocks[:, 2:].copy().view(np.int8).astype(np.float32)).reshape(len(rows), -1)
