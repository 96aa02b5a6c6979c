"""Folders in the layout of flash-linear-attention: what is there is loaded, what does not fit is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from specdec_core.arrays import host
from specdec_core.models.checkpoints import fingerprint
from specdec_core.models.errors import CorruptFile, UnsupportedModel
from specdec_core.models.gdn_checkpoint import PURE, TINY, load_gdn, save_gdn, tiny_gdn
from specdec_core.models.gdn_config import GdnConfig
from specdec_core.placement import Placement
from specdec_core.targets.gated_delta_net import GatedDeltaNet
from specdec_core.topology import chain, forest
from tests.gdn_reference import GdnReference

WEIGHTS = "model.safetensors"


def write_published_layout(folder: Path) -> None:
    """A tiny random model, name by name as the published checkpoints have them; written here a second time."""
    random = torch.Generator().manual_seed(3)
    sizes = {"q": 16, "k": 16, "v": 12}
    tensors = {"model.embeddings.weight": (31, 20), "model.norm.weight": (20,), "lm_head.weight": (31, 20)}
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        tensors |= {f"{prefix}attn_norm.weight": (20,), f"{prefix}mlp_norm.weight": (20,)}
        tensors |= {f"{prefix}attn.{which}_proj.weight": (size, 20) for which, size in sizes.items()}
        tensors |= {f"{prefix}attn.{which}_conv1d.weight": (size, 1, 4) for which, size in sizes.items()}
        tensors |= {f"{prefix}attn.a_proj.weight": (2, 20), f"{prefix}attn.b_proj.weight": (2, 20)}
        tensors |= {f"{prefix}attn.g_proj.weight": (12, 20), f"{prefix}attn.o_proj.weight": (20, 12)}
        tensors |= {f"{prefix}attn.o_norm.weight": (6,)}
        tensors |= {f"{prefix}attn.{name}": (2,) for name in ("A_log", "dt_bias", "D")}
        tensors |= {f"{prefix}mlp.{which}_proj.weight": (256, 20) for which in ("gate", "up")}
        tensors |= {f"{prefix}mlp.down_proj.weight": (20, 256)}
    save_file({name: torch.randn(shape, generator=random) for name, shape in tensors.items()}, folder / WEIGHTS)
    config = {
        "architectures": ["GatedDeltaNetForCausalLM"], "model_type": "gated_deltanet", "attn_mode": "chunk",
        "attn": None, "hidden_size": 20, "num_heads": 2, "head_dim": 8, "expand_v": 0.75, "num_hidden_layers": 2,
        "hidden_ratio": 4, "intermediate_size": None, "vocab_size": 31, "conv_size": 4, "norm_eps": 1e-6,
        "use_gate": True, "use_short_conv": True, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))


def change(folder: Path, **changes: torch.Tensor | None) -> None:
    """Replace (or with None remove) tensors; dots in their names are written as two underscores."""
    weights = load_file(folder / WEIGHTS)
    for name, tensor in changes.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file({name: tensor.clone() for name, tensor in weights.items()}, folder / WEIGHTS)


def change_config(folder: Path, **changes: object) -> None:
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


@pytest.fixture
def published(tmp_path) -> Path:
    write_published_layout(tmp_path)
    return tmp_path


@pytest.fixture
def folder(tmp_path) -> Path:
    return save_gdn(tiny_gdn(0), tmp_path / "tiny")


def test_the_published_layout_is_loaded_and_runs(published):
    found = load_gdn(published, "some model")
    assert found.config == GdnConfig(20, 256, 2, 2, 2, 8, 6, 4, 31, 2048, eos_ids=(2,), bos_id=1)
    assert (found.name, found.folder, found.dtype) == ("some model", published, torch.float32)
    stored = load_file(published / WEIGHTS)
    assert set(stored) - set(found.weights) == {f"model.layers.{layer}.attn.D" for layer in range(2)}
    assert all(torch.equal(tensor, stored[name]) for name, tensor in found.weights.items())
    target, prompt = GatedDeltaNet(found, Placement(dtype="float64")), np.array([3, 1, 4, 1, 5])
    state = target.new_state(1, 8)
    target.prefill(state, np.array([0]), [prompt])
    logits = target.verify(state, np.array([0]), prompt[-1:], forest([chain(1)])).logits
    np.testing.assert_allclose(host(logits[0]), GdnReference(found).last(prompt), rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("changes", [{}, PURE, {"tied_head": True}], ids=["hybrid", "pure", "tied"])
def test_what_is_saved_is_loaded(tmp_path, dtype, changes):
    made = tiny_gdn(3, dtype=dtype, eos_ids=(2, 0), bos_id=1, **changes)
    found = load_gdn(save_gdn(made, tmp_path / "model"))
    assert (found.dtype, found.name, found.config) == (dtype, "model", made.config)
    assert found.weights.keys() == made.weights.keys() and found.fingerprint == made.fingerprint
    assert all(torch.equal(tensor, made.weights[name]) for name, tensor in found.weights.items())
    with pytest.raises(TypeError):
        found.weights["model.norm.weight"] = torch.ones(48)


def test_in_shards(folder):
    weights = load_file(folder / WEIGHTS)
    shards = {name: f"model-0000{1 + index % 2}-of-00002.safetensors" for index, name in enumerate(sorted(weights))}
    for file in set(shards.values()):
        save_file({name: weights[name].clone() for name in weights if shards[name] == file}, folder / file)
    (folder / WEIGHTS).unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    assert load_gdn(folder).fingerprint == tiny_gdn(0).fingerprint


def test_stored_rotary_frequencies_are_passed_over(folder):
    change(folder, model__layers__3__attn__rotary__inv_freq=torch.ones(4))
    assert load_gdn(folder).fingerprint == tiny_gdn(0).fingerprint


def test_a_tied_head_that_is_stored_has_to_be_the_embedding(tmp_path):
    made = tiny_gdn(0, tied_head=True)
    folder = save_gdn(made, tmp_path / "tied")
    change(folder, lm_head__weight=made.weights["model.embeddings.weight"])
    assert load_gdn(folder).fingerprint == made.fingerprint
    change(folder, lm_head__weight=torch.ones(97, 48))
    with pytest.raises(CorruptFile, match=r"lm_head\.weight differs from model\.embeddings\.weight"):
        load_gdn(folder)


@pytest.mark.parametrize(
    "name",
    [
        "model__embeddings__weight",
        "lm_head__weight",
        "model__layers__1__attn__dt_bias",
        "model__layers__1__attn__q_conv1d__weight",
        "model__layers__3__attn__k_proj__weight",
        "model__layers__0__mlp__up_proj__weight",
    ],
)
def test_a_missing_tensor(folder, name):
    change(folder, **{name: None})
    dotted = name.replace("__", ".")
    with pytest.raises(CorruptFile, match=rf"tensor {dotted} is missing; config.json asks for it with shape \["):
        load_gdn(folder)


@pytest.mark.parametrize(
    ("name", "shape"),
    [
        ("model__layers__1__attn__A_log", (3,)),
        ("model__layers__1__attn__k_conv1d__weight", (12, 4)),
        ("model__layers__2__attn__v_conv1d__weight", (36, 1, 3)),
        ("model__layers__0__attn__o_proj__weight", (36, 48)),
        ("model__layers__0__mlp__gate_proj__weight", (192, 48)),
    ],
)
def test_a_misshapen_tensor(folder, name, shape):
    change(folder, **{name: torch.zeros(shape)})
    with pytest.raises(
        CorruptFile, match=rf"{name.replace('__', '.')} has shape \[{', '.join(map(str, shape))}\]; conf"
    ):
        load_gdn(folder)


@pytest.mark.parametrize("name", ["model__layers__0__attn__f_proj__weight", "model__layers__0__attn__q_proj__bias"])
def test_an_unexpected_tensor(folder, name):
    change(folder, **{name: torch.zeros(3)})
    with pytest.raises(CorruptFile, match=rf"{name.replace('__', '.')} is not part of a Gated DeltaNet"):
        load_gdn(folder)


def test_a_tensor_of_integers(folder):
    change(folder, model__layers__1__attn__A_log=torch.zeros(4, dtype=torch.int32))
    with pytest.raises(UnsupportedModel, match=r"A_log is torch\.int32; expected one of"):
        load_gdn(folder)


def test_an_unknown_option(folder):
    change_config(folder, use_mamba_gate=False)
    with pytest.raises(UnsupportedModel, match="unknown options use_mamba_gate = False"):
        load_gdn(folder)


def test_an_attention_layer_elsewhere_than_its_weights(folder):
    attention = json.loads((folder / "config.json").read_text())["attn"]
    change_config(folder, attn={**attention, "layers": [2]})
    with pytest.raises(CorruptFile, match=r"tensor model\.layers\.2\.attn\.q_proj\.weight has shape \[12, 48\]"):
        load_gdn(folder)


@pytest.mark.parametrize("file", ["config.json", WEIGHTS])
def test_an_absent_file(folder, file):
    (folder / file).unlink()
    with pytest.raises(CorruptFile, match=r"config\.json is absent|holds no \*\.safetensors"):
        load_gdn(folder)


def test_a_truncated_file(folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-5])
    with pytest.raises(CorruptFile, match="truncated or damaged"):
        load_gdn(folder)


def test_what_does_not_fit_is_not_saved(tmp_path):
    weights = {name: tensor for name, tensor in tiny_gdn(0).weights.items() if "A_log" not in name}
    with pytest.raises(CorruptFile, match="A_log is missing"):
        save_gdn(dataclasses.replace(tiny_gdn(0), weights=weights), tmp_path / "x")
    assert not (tmp_path / "x" / WEIGHTS).exists()


def test_tiny_models_are_made_from_their_seed():
    assert tiny_gdn(0).fingerprint == tiny_gdn(0).fingerprint != tiny_gdn(1).fingerprint
    assert tiny_gdn(0).config == TINY and tiny_gdn(0, layers=3, attention_layers=()).config.layers == 3
    shared = tiny_gdn(0, layers=2, **PURE).weights
    assert fingerprint({name: tiny_gdn(0).weights[name] for name in shared}) == fingerprint(shared)
