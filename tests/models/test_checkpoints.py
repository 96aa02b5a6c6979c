"""Safetensors folders: what is saved is loaded, what does not fit its config is refused by name."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from specdec_core.models import checkpoints
from specdec_core.models.checkpoints import Checkpoint, fingerprint, load_checkpoint, save_checkpoint, tiny_llama
from specdec_core.models.errors import CorruptFile, UnsupportedModel

ROOT = Path(checkpoints.__file__).parents[2]
WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path):
    return save_checkpoint(tiny_llama(0), tmp_path / "tiny")


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace (or with None remove) tensors; dots in their names are written as two underscores."""
    weights = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    weights = {name: tensor.clone() for name, tensor in weights.items()}
    save_file(weights, folder / WEIGHTS)


def shard(folder: Path) -> dict[str, str]:
    """Split the weights into two files with an index."""
    weights = load_file(folder / WEIGHTS)
    shards = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(sorted(weights))}
    for file in set(shards.values()):
        save_file({name: weights[name].clone() for name in weights if shards[name] == file}, folder / file)
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shards}))
    return shards


def assert_same(first: Checkpoint, second: Checkpoint) -> None:
    assert first.config == second.config
    assert first.weights.keys() == second.weights.keys()
    for name, tensor in first.weights.items():
        assert tensor.dtype == second.weights[name].dtype
        assert torch.equal(tensor, second.weights[name]), name
    assert first.fingerprint == second.fingerprint


class TestRoundTrip:
    @pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
    def test_in_every_dtype(self, tmp_path, dtype):
        made = tiny_llama(3, dtype=dtype, tied_head=True, eos_ids=(2, 0), bos_id=1)
        found = load_checkpoint(save_checkpoint(made, tmp_path / "model"))
        assert found.dtype == dtype
        assert found.name == "model"
        assert found.folder == tmp_path / "model"
        assert_same(found, made)

    def test_in_shards(self, folder):
        shard(folder)
        assert_same(load_checkpoint(folder), tiny_llama(0))

    def test_saved_over_a_loaded_one(self, folder):
        loaded = load_checkpoint(folder)
        save_checkpoint(loaded, folder)
        assert_same(load_checkpoint(folder), tiny_llama(0))
        assert float(loaded.weights["model.norm.weight"].sum()) == float(
            tiny_llama(0).weights["model.norm.weight"].sum()
        )

    def test_transformers_loads_the_same_weights(self, folder):
        theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
        for name, tensor in tiny_llama(0).weights.items():
            assert torch.equal(theirs.state_dict()[name], tensor), name

    def test_a_folder_that_transformers_saved(self, tmp_path, folder):
        transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(tmp_path / "theirs")
        found = load_checkpoint(tmp_path / "theirs")
        assert found.fingerprint == tiny_llama(0).fingerprint

    def test_the_tokenizer_comes_along(self, folder, tmp_path):
        (folder / "tokenizer.json").write_text("{}")
        copy = load_checkpoint(save_checkpoint(load_checkpoint(folder), tmp_path / "copy"))
        assert copy.tokenizer_path == tmp_path / "copy" / "tokenizer.json"
        assert tiny_llama(0).tokenizer_path is None

    def test_weights_cannot_be_exchanged(self, folder):
        with pytest.raises(TypeError):
            load_checkpoint(folder).weights["model.norm.weight"] = torch.ones(48)


class TestFingerprint:
    def test_it_tells_weights_apart(self):
        made = tiny_llama(0)
        others = [tiny_llama(1), tiny_llama(0, layers=2), tiny_llama(0, dtype=torch.bfloat16)]
        assert made.fingerprint not in {other.fingerprint for other in others}
        changed = dict(made.weights)
        changed["lm_head.weight"] = changed["lm_head.weight"].clone()
        changed["lm_head.weight"][-1, -1] += 1e-3
        assert fingerprint(changed) != made.fingerprint

    def test_order_does_not_matter(self):
        weights = tiny_llama(0).weights
        assert fingerprint(dict(reversed(list(weights.items())))) == fingerprint(weights)


class TestRefusals:
    def test_a_missing_tensor(self, folder):
        change(folder, model__layers__1__mlp__up_proj__weight=None)
        with pytest.raises(CorruptFile, match=r"model\.layers\.1\.mlp\.up_proj\.weight is missing.*\[96, 48\]"):
            load_checkpoint(folder)

    def test_an_unexpected_tensor(self, folder):
        change(folder, model__layers__3__mlp__up_proj__weight=torch.ones(2))
        with pytest.raises(CorruptFile, match=r"model\.layers\.3\.mlp\.up_proj\.weight is not part"):
            load_checkpoint(folder)

    def test_a_wrong_shape(self, folder):
        change(folder, model__norm__weight=torch.ones(47))
        with pytest.raises(CorruptFile, match=r"model\.norm\.weight has shape \[47\].*asks for \[48\]"):
            load_checkpoint(folder)

    def test_an_integer_tensor(self, folder):
        change(folder, model__norm__weight=torch.ones(48, dtype=torch.int8))
        with pytest.raises(UnsupportedModel, match=r"model\.norm\.weight is torch\.int8"):
            load_checkpoint(folder)

    @pytest.mark.parametrize("keep", [0, 4, 100, 5000, -1])
    def test_a_truncated_file(self, folder, keep):
        data = (folder / WEIGHTS).read_bytes()
        (folder / WEIGHTS).write_bytes(data[:keep])
        with pytest.raises(CorruptFile, match=r"model\.safetensors is truncated or damaged"):
            load_checkpoint(folder)

    def test_a_damaged_header(self, folder):
        data = bytearray((folder / WEIGHTS).read_bytes())
        data[20:40] = bytes(20)
        (folder / WEIGHTS).write_bytes(data)
        with pytest.raises(CorruptFile, match="truncated or damaged"):
            load_checkpoint(folder)

    def test_a_missing_shard(self, folder):
        shards = shard(folder)
        lost = sorted(set(shards.values()))[0]
        (folder / lost).unlink()
        with pytest.raises(CorruptFile, match=f"lacks {lost}"):
            load_checkpoint(folder)

    def test_a_tensor_in_two_shards(self, folder):
        shards = shard(folder)
        first, second = sorted(set(shards.values()))
        weights = load_file(folder / second) | load_file(folder / first)
        save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / second)
        with pytest.raises(CorruptFile, match="which another shard already has"):
            load_checkpoint(folder)

    @pytest.mark.parametrize("shards", [{}, {"weight_map": {"a": "../elsewhere.safetensors"}}])
    def test_a_bad_index(self, folder, shards):
        (folder / "model.safetensors.index.json").write_text(json.dumps(shards))
        with pytest.raises(CorruptFile, match=r"index\.json"):
            load_checkpoint(folder)

    def test_pickles(self, folder):
        (folder / WEIGHTS).rename(folder / "pytorch_model.bin")
        with pytest.raises(UnsupportedModel, match=r"pytorch_model\.bin.*can run any code"):
            load_checkpoint(folder)

    def test_no_weights(self, folder):
        (folder / WEIGHTS).unlink()
        with pytest.raises(CorruptFile, match=r"no \*\.safetensors"):
            load_checkpoint(folder)

    def test_saving_what_does_not_fit(self, tmp_path):
        made = tiny_llama(0)
        wrong = dataclasses.replace(made, config=dataclasses.replace(made.config, layers=4))
        with pytest.raises(CorruptFile, match=r"model\.layers\.3\.input_layernorm\.weight is missing"):
            save_checkpoint(wrong, tmp_path / "wrong")
        assert not (tmp_path / "wrong").exists()


class TestTiedHead:
    def test_a_stored_copy_is_dropped(self, tmp_path):
        folder = save_checkpoint(tiny_llama(0, tied_head=True), tmp_path)
        change(folder, lm_head__weight=tiny_llama(0).weights["model.embed_tokens.weight"])
        assert_same(load_checkpoint(folder), tiny_llama(0, tied_head=True))

    def test_a_different_one_is_refused(self, tmp_path):
        folder = save_checkpoint(tiny_llama(0, tied_head=True), tmp_path)
        change(folder, lm_head__weight=tiny_llama(0).weights["lm_head.weight"])
        with pytest.raises(CorruptFile, match=r"lm_head\.weight differs"):
            load_checkpoint(folder)


def test_rotary_buffers_of_old_checkpoints_are_ignored(folder):
    change(folder, model__layers__0__self_attn__rotary_emb__inv_freq=torch.ones(4))
    found = load_checkpoint(folder)
    assert_same(found, tiny_llama(0))
    assert (found.name, load_checkpoint(folder, "some model").name) == (folder.name, "some model")


@pytest.mark.skipif(sys.platform == "win32", reason="limits a file's size with setrlimit")
def test_a_full_disk(tmp_path):
    code = f"""
import resource, signal
from specdec_core.cache import CacheError
from specdec_core.models.checkpoints import save_checkpoint, tiny_llama
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))
try:
    save_checkpoint(tiny_llama(0), {str(tmp_path)!r})
except CacheError as error:
    print(error)
"""
    ended = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert f"cannot write {tmp_path / WEIGHTS}" in ended.stdout, ended.stderr
    assert list(tmp_path.iterdir()) == []


class TestTinyLlama:
    def test_it_depends_on_the_seed_alone(self):
        assert_same(tiny_llama(5), tiny_llama(5))
        assert tiny_llama(5).folder is None

    def test_layers_are_shared_between_depths(self):
        deep, shallow = tiny_llama(5), tiny_llama(5, layers=1)
        assert len(shallow.weights) == 12
        for name, tensor in shallow.weights.items():
            assert torch.equal(tensor, deep.weights[name])

    def test_an_unknown_field(self):
        with pytest.raises(TypeError, match="hidden"):
            tiny_llama(0, hidden=48)

    @pytest.mark.parametrize("tied", [True, False])
    def test_greedy_text_varies(self, tmp_path, tied):
        for seed in range(3):
            folder = save_checkpoint(tiny_llama(seed, tied_head=tied), tmp_path / str(seed))
            model = transformers.AutoModelForCausalLM.from_pretrained(folder)
            prompt = torch.tensor([[1, 2, 3, 4]])
            text = model.generate(prompt, do_sample=False, max_new_tokens=40, eos_token_id=None)[0, 4:]
            assert len(set(text.tolist())) >= 10
            logits = model(prompt).logits
            assert 1.0 < float(logits.detach().std()) < 4.0
