"""A drafter's file: what is saved is loaded, and what belongs to another target or is damaged is refused by name."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from specdec_core.models import eagle_checkpoint
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.models.eagle_checkpoint import (
    EagleCheckpoint,
    eagle_config,
    eagle_fingerprint,
    expected_shapes,
    load_eagle,
    save_eagle,
    tiny_eagle,
)
from specdec_core.models.errors import CorruptFile, ModelError

TARGET = tiny_llama(1)
LAYERS = (0, 2)
DRAFTER = dataclasses.replace(tiny_eagle(3, TARGET, LAYERS, vocabulary=31), card={"steps": 7, "α": [0.5, 0.25]})


@pytest.fixture
def file(tmp_path) -> Path:
    return save_eagle(DRAFTER, tmp_path / "eagle.safetensors")


def rewrite(file: Path, header: object = None, **changes: torch.Tensor | None) -> Path:
    """The file with other tensors (None removes one; `__` stands for a dot) or with changes to its header."""
    with safe_open(file, framework="pt") as stored:
        found = json.loads(stored.metadata()["eagle"])
    if isinstance(header, dict):
        found = {name: value for name, value in {**found, **header}.items() if value is not None}
    elif header is not None:
        found = header
    weights = load_file(file)
    for name, tensor in changes.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file({name: tensor.clone() for name, tensor in weights.items()}, file, metadata={"eagle": json.dumps(found)})
    return file


@pytest.mark.parametrize("dtype", [None, torch.float16, torch.float32])
def test_what_is_saved_is_loaded_rounded_to_the_dtype_of_the_file(tmp_path, dtype):
    how = {} if dtype is None else {"dtype": dtype}
    path = tmp_path / "new folder" / "eagle.safetensors"
    assert save_eagle(DRAFTER, path, **how) == path
    found = load_eagle(path)
    assert found.weights.keys() == DRAFTER.weights.keys()
    for name, tensor in DRAFTER.weights.items():
        assert found.weights[name].dtype == torch.float32
        assert torch.equal(found.weights[name], tensor.to(dtype or torch.float16).float()), name
        assert dtype == torch.float32 or len(tensor.shape) == 1 or not torch.equal(found.weights[name], tensor)
    assert found.tokens.dtype == torch.int64 and torch.equal(found.tokens, DRAFTER.tokens)
    for field in ("config", "target", "target_fingerprint", "feature_layers", "card"):
        assert getattr(found, field) == getattr(DRAFTER, field), field


def test_a_file_is_half_as_large_in_float16_and_holds_neither_embedding_nor_head(file):
    numbers = sum(tensor.numel() for tensor in DRAFTER.weights.values())
    assert 2 * numbers < file.stat().st_size < 2 * numbers + 4 * 31 + 4000
    assert set(load_file(file)) == {*expected_shapes(DRAFTER.config), "tokens"}


def test_a_file_that_would_be_too_large_is_refused_and_leaves_the_one_before(file, monkeypatch):
    before = file.read_bytes()
    monkeypatch.setattr(eagle_checkpoint, "LARGEST_FILE", len(before))
    save_eagle(tiny_eagle(4, TARGET, LAYERS, vocabulary=31), file)
    assert len(file.read_bytes()) <= len(before)
    before = file.read_bytes()
    with pytest.raises(ModelError, match=r"would be \d+ bytes: expected \d+ at most"):
        save_eagle(DRAFTER, file, torch.float32)
    assert file.read_bytes() == before and [each.name for each in file.parent.iterdir()] == [file.name]


def test_the_sizes_are_the_targets():
    config = eagle_config(TARGET, 2, 31)
    shared = dataclasses.asdict(config)
    assert (shared.pop("features"), shared.pop("vocabulary")) == (2, 31)
    assert shared == {name: getattr(TARGET.config, name) for name in shared}
    shapes = expected_shapes(config)
    assert shapes["fc.weight"] == (48, 96) and shapes["committed.self_attn.q_proj.weight"] == (48, 96)
    assert shapes["drafted.self_attn.k_proj.weight"] == shapes["committed.self_attn.v_proj.weight"] == (16, 96)
    assert {name: tuple(tensor.shape) for name, tensor in DRAFTER.weights.items()} == shapes


def test_it_belongs_to_one_target(file):
    load_eagle(file).require_target(TARGET)
    with pytest.raises(ModelError, match=r"hidden states of tiny-1 .*the target is tiny-2 .*give its own target"):
        load_eagle(file).require_target(tiny_llama(2))


# --- Refused ------------------------------------------------------------------------------------------------------


def test_an_absent_file_is_refused(tmp_path):
    with pytest.raises(CorruptFile, match=r"nothing\.safetensors is absent: .*train one"):
        load_eagle(tmp_path / "nothing.safetensors")


@pytest.mark.parametrize("kept", [0, 5, 400, -1])
def test_a_truncated_file_is_refused(file, kept):
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(CorruptFile, match="truncated or damaged"):
        load_eagle(file)


def test_a_file_of_no_tensors_at_all_is_refused(file):
    file.write_text("{}" * 99)
    with pytest.raises(CorruptFile, match="truncated or damaged"):
        load_eagle(file)


def test_a_header_that_is_no_json_is_refused(file):
    save_file(load_file(file), file, metadata={"eagle": "{"})
    with pytest.raises(CorruptFile, match="truncated or damaged"):
        load_eagle(file)


@pytest.mark.parametrize("metadata", [None, {"format": "pt"}])
def test_the_weights_of_something_else_are_refused(file, metadata):
    save_file(load_file(file), file, metadata=metadata)
    with pytest.raises(CorruptFile, match=r"says it is None: expected 'specdec eagle drafter, version 2'"):
        load_eagle(file)


@pytest.mark.parametrize(("header", "said"), [({"format": "version 9"}, "'version 9'"), ([1], r"\[1\]")])
def test_another_version_or_header_is_refused(file, header, said):
    with pytest.raises(CorruptFile, match=rf"says it is {said}: expected 'specdec eagle"):
        load_eagle(rewrite(file, header))


@pytest.mark.parametrize(
    "header", [{"config": None}, {"target": None}, {"feature_layers": None}, {"config": {"width": 3}}, {"config": 3}]
)
def test_an_incomplete_header_is_refused(file, header):
    with pytest.raises(CorruptFile, match="header lacks or misnames"):
        load_eagle(rewrite(file, header))


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("fc.weight", None),
        ("fc.weight", torch.zeros(48, 48)),
        ("drafted.norm.weight", torch.zeros(48, 1)),
        ("head.weight", torch.zeros(31, 48)),
        ("tokens", None),
        ("tokens", torch.arange(30)),
        ("tokens", torch.arange(31)[:, None]),
    ],
)
def test_an_absent_unexpected_or_misshapen_tensor_is_refused_by_name(file, name, tensor):
    with pytest.raises(CorruptFile, match=rf"safetensors: {name} absent, unexpected or of another shape"):
        load_eagle(rewrite(file, **{name.replace(".", "__"): tensor}))


@pytest.mark.parametrize("change", [{0: -1}, {4: 3}, {30: 2}])
def test_draft_tokens_that_are_not_ascending_ids_are_refused(file, change):
    tokens = torch.arange(31)
    for place, token in change.items():
        tokens[place] = token
    with pytest.raises(CorruptFile, match="draft tokens are not ascending"):
        load_eagle(rewrite(file, tokens=tokens))
    load_eagle(rewrite(file, tokens=torch.arange(31)))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused(file, value):
    values = torch.ones(48)
    values[3] = value
    with pytest.raises(CorruptFile, match=r"norm\.weight hold NaN or ∞"):
        load_eagle(rewrite(file, drafted__norm__weight=values))


def test_weights_that_the_dtype_cannot_hold_are_not_saved(tmp_path):
    wide = dataclasses.replace(DRAFTER, weights={**DRAFTER.weights, "drafted.norm.weight": torch.full((48,), 1e5)})
    with pytest.raises(ModelError, match=r"norm\.weight would hold NaN or ∞ in torch\.float16: save it in float32"):
        save_eagle(wide, tmp_path / "eagle.safetensors")
    assert (
        load_eagle(save_eagle(wide, tmp_path / "eagle.safetensors", torch.float32)).weights["drafted.norm.weight"][0]
        == 1e5
    )


# --- Random drafters for tests ------------------------------------------------------------------------------------


def same(one: EagleCheckpoint, other: EagleCheckpoint) -> bool:
    return eagle_fingerprint(one) == eagle_fingerprint(other)


def test_a_fingerprint_tells_weights_and_draft_tokens_apart():
    weights = {name: tensor.clone() for name, tensor in DRAFTER.weights.items()}
    assert same(DRAFTER, dataclasses.replace(DRAFTER, weights=weights, card={}))
    weights["drafted.norm.weight"][0] += 1
    assert not same(DRAFTER, dataclasses.replace(DRAFTER, weights=weights))
    assert not same(DRAFTER, dataclasses.replace(DRAFTER, tokens=DRAFTER.tokens + 1))


def test_a_tiny_drafter_is_made_from_its_seed():
    assert same(tiny_eagle(3, TARGET, LAYERS, vocabulary=31), DRAFTER)
    assert not same(tiny_eagle(4, TARGET, LAYERS, vocabulary=31), DRAFTER)
    assert len(DRAFTER.tokens.unique()) == 31 and (DRAFTER.tokens.diff() > 0).all()
    everything = tiny_eagle(3, TARGET, LAYERS)
    assert everything.tokens.tolist() == list(range(97)) and everything.feature_layers == LAYERS
    assert tiny_eagle(3, TARGET, LAYERS, intermediate_size=40).weights["drafted.mlp.down_proj.weight"].shape == (48, 40)
