from __future__ import annotations

from functools import lru_cache

import numpy as np
import pytest
import torch
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MambaConfig,
    MambaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    T5Config,
    T5ForConditionalGeneration,
)

from specdec_core.arrays import host
from specdec_core.models.checkpoints import save_checkpoint, tiny_llama
from specdec_core.models.errors import CorruptFile, ModelError, UnknownModel, UnsupportedModel
from specdec_core.placement import PlacementError
from specdec_core.state.slots import CacheError
from specdec_core.targets.huggingface import HuggingFaceTarget
from specdec_core.topology import chain, forest, tree
from tests.conformance import Subject, TargetConformance
from tests.llama_reference import Reference
from tests.targets.greedy import assert_speculation_equals_autoregression

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKPOINT = tiny_llama(1)
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"vocab_size": 61, "max_position_embeddings": 128}


def llama(attention: str = "sdpa", **changes) -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**(SIZES | changes), num_key_value_heads=2, attn_implementation=attention))


def gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(1)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 128}
    model = GPT2LMHeadModel(GPT2Config(**sizes, initializer_range=0.3, attn_implementation="sdpa"))
    return model.double().eval()


def qwen2() -> Qwen2ForCausalLM:
    torch.manual_seed(2)
    return Qwen2ForCausalLM(
        Qwen2Config(**SIZES, num_key_value_heads=2, initializer_range=0.2, attn_implementation="eager")
    ).eval()


def plain(model):
    """Logits `[V]` after a whole prefix, by one pass without cache, mask or positions."""

    @lru_cache(maxsize=4096)
    def last(prefix):
        with torch.no_grad():
            return host(model(input_ids=torch.tensor([prefix])).logits[0, -1])

    return lambda tokens: last(tuple(map(int, tokens)))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(CHECKPOINT, tmp_path_factory.mktemp("huggingface") / "tiny")


class TestLlamaFromAFolder(TargetConformance):
    """Against our own float64 decoder; transformers computes norms and rotary tables in float32 whatever the dtype."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def opened(cls, folder):
        cls.subject = Subject(HuggingFaceTarget.open(folder), Reference(CHECKPOINT).last, tolerance=2e-3)


class TestGPT2(TargetConformance):
    """Learned positions, in float64, against plain passes of the same model."""

    subject = Subject(HuggingFaceTarget(gpt2(), chunk=3), plain(gpt2()), tolerance=1e-9)


class TestQwen2(TargetConformance):
    subject = Subject(HuggingFaceTarget(qwen2()), plain(qwen2()), tolerance=1e-4)


@pytest.mark.parametrize("make", [gpt2, qwen2, llama])
def test_greedy_speculation_is_autoregression(make):
    assert_speculation_equals_autoregression(HuggingFaceTarget(make()), tolerance=1e-4)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
def test_a_folder_opens_in_any_dtype_and_attention(folder, dtype, attention):
    target = HuggingFaceTarget.open(folder, dtype, attention=attention)
    assert (target.vocabulary, target.context, str(target.device)) == (97, 256, "cpu")
    state = target.new_state(1, 8)
    target.prefill(state, np.array([0]), [np.array([5, 17, 3])])
    logits = target.verify(state, np.array([0]), np.array([3]), forest([chain(1)])).logits
    assert logits.dtype == target.dtype and str(target.dtype) == f"torch.{dtype}"
    tolerance = 0.5 if dtype == "bfloat16" else 2e-3
    np.testing.assert_allclose(host(logits[0]), Reference(CHECKPOINT).last([5, 17, 3]), rtol=0, atol=tolerance)


def test_rows_in_slots_that_are_apart():
    target = HuggingFaceTarget(gpt2())
    state = target.new_state(4, 16)
    target.prefill(state, np.array([3, 0]), [np.array([1, 2, 3]), np.array([4, 5, 6, 7])])
    found = target.verify(state, np.array([3, 0]), np.array([3, 8, 7]), forest([chain(2), chain(1)]))
    for row, prefix in enumerate([[1, 2, 3], [1, 2, 3, 8], [4, 5, 6, 7]]):
        np.testing.assert_allclose(host(found.logits[row]), plain(gpt2())(prefix), atol=1e-9)
    assert state.lengths.tolist() == [3, 0, 0, 2]


def mistral(window: int | None) -> MistralForCausalLM:
    return MistralForCausalLM(
        MistralConfig(**SIZES, num_key_value_heads=2, sliding_window=window, attn_implementation="sdpa")
    )


def bloom() -> BloomForCausalLM:
    sizes = {"hidden_size": 32, "n_layer": 1, "n_head": 4, "vocab_size": 61, "attn_implementation": "eager"}
    return BloomForCausalLM(BloomConfig(**sizes))


def mamba() -> MambaForCausalLM:
    return MambaForCausalLM(MambaConfig(hidden_size=16, num_hidden_layers=1, vocab_size=61, state_size=4))


def t5() -> T5ForConditionalGeneration:
    return T5ForConditionalGeneration(T5Config(d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, vocab_size=61))


def alternating() -> Qwen2ForCausalLM:
    layers = ["full_attention", "sliding_attention"]
    window = {"use_sliding_window": True, "sliding_window": 4, "layer_types": layers}
    return Qwen2ForCausalLM(Qwen2Config(**SIZES, num_key_value_heads=2, **window, attn_implementation="sdpa"))


def blind() -> GPT2LMHeadModel:
    """Ignores the mask and the positions it is given."""
    model = gpt2()
    inner = model.transformer.forward
    model.transformer.forward = lambda *given, **named: inner(
        *given, **(named | {"attention_mask": None, "position_ids": None})
    )
    return model


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (mamba, "layers of type linear_attention: what a rejected draft did"),
        (t5, "encoder or cross-attention"),
        (lambda: mistral(16), r"window \(16 entries\)"),
        (alternating, r"window \(4 entries\)"),
        (bloom, "context="),
        (lambda: llama("flex_attention"), "'flex_attention', which takes no 4-d mask"),
        (blind, "4-d mask"),
    ],
)
def test_what_cannot_be_rolled_back_or_masked_is_refused(make, why):
    with pytest.raises(UnsupportedModel, match=why):
        HuggingFaceTarget(make())


def test_a_model_that_works_out_positions_from_its_mask_is_refused_by_the_probe():
    with pytest.raises(UnsupportedModel, match="4-d mask"):
        HuggingFaceTarget(bloom(), context=64)


def test_a_layer_type_that_keeps_a_state_is_named():
    model = qwen2()
    model.config.layer_types = ["full_attention", "linear_attention"]
    with pytest.raises(UnsupportedModel, match="layers of type linear_attention"):
        HuggingFaceTarget(model)


@pytest.mark.parametrize("window", [None, 128, 4096])
def test_a_window_as_long_as_the_context_is_none(window):
    assert HuggingFaceTarget(mistral(window)).context == 128


def test_an_attention_without_mask_is_refused_before_loading():
    with pytest.raises(UnsupportedModel, match="expected one of sdpa, eager"):
        HuggingFaceTarget.open("anything", attention="flash_attention_2")


def test_names_that_do_not_exist():
    with pytest.raises(UnknownModel, match="neither registered"):
        HuggingFaceTarget.open("no-such-model")
    with pytest.raises(UnknownModel, match="no hub model"):
        HuggingFaceTarget.open("hub:bad")
    with pytest.raises(PlacementError, match="dtype 'int3'"):
        HuggingFaceTarget.open("no-such-model", dtype="int3")


def test_a_hub_name_is_downloaded_and_opened(monkeypatch, folder):
    monkeypatch.setattr("specdec_core.models.hub.download", lambda name: {"hub:org/tiny": folder}[name])
    assert HuggingFaceTarget.open("hub:org/tiny").name == "hub:org/tiny"


def test_broken_folders_are_named(tmp_path, folder):
    with pytest.raises(CorruptFile, match=r"config\.json is absent"):
        HuggingFaceTarget.open(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "no-such-architecture"}')
    with pytest.raises(UnsupportedModel, match="'no-such-architecture'"):
        HuggingFaceTarget.open(tmp_path)
    (tmp_path / "config.json").write_text((folder / "config.json").read_text())
    with pytest.raises(CorruptFile, match="absent or damaged"):
        HuggingFaceTarget.open(tmp_path)
    (tmp_path / "model.safetensors").write_bytes((folder / "model.safetensors").read_bytes()[:1000])
    with pytest.raises(CorruptFile, match="absent or damaged"):
        HuggingFaceTarget.open(tmp_path)


def test_a_model_without_a_tokenizer_decodes_ids_and_says_what_text_needs(folder):
    from specdec_core.models.tokenizer import Tokenizer

    assert HuggingFaceTarget.open(folder).vocabulary == 97
    with pytest.raises(ModelError, match="no tokenizer"):
        Tokenizer.from_folder(folder)


class TestBadInput:
    target = HuggingFaceTarget(gpt2())

    def held(self):
        state = self.target.new_state(2, 200)
        self.target.prefill(state, np.array([0]), [np.array([1, 2, 3])])
        return state

    def unharmed(self, state):
        assert state.lengths.tolist() == [2, 0]
        found = self.target.verify(state, np.array([0]), np.array([3]), forest([chain(1)]))
        np.testing.assert_allclose(host(found.logits[0]), plain(gpt2())([1, 2, 3]), atol=1e-9)

    @pytest.mark.parametrize("token", [-1, 61])
    def test_a_token_of_another_vocabulary(self, token):
        state = self.held()
        with pytest.raises(ValueError, match=f"token {token} is outside the target's vocabulary 0…60"):
            self.target.verify(state, np.array([0]), np.array([3, token]), forest([chain(2)]))
        self.unharmed(state)

    def test_context_overflow(self):
        state = self.held()
        with pytest.raises(CacheError, match="position 128 is past the model's context of 128"):
            self.target.verify(state, np.array([0]), np.full(127, 3), forest([chain(127)]))
        self.unharmed(state)

    def test_a_path_that_is_none(self):
        state = self.held()
        found = self.target.verify(state, np.array([0]), np.array([3, 4, 5]), forest([tree((-1, 0, 0))]))
        with pytest.raises(CacheError, match=r"nodes \[0, 1, 2\] are no path"):
            self.target.commit(state, found, [np.arange(3)])
        self.unharmed(state)

    def test_a_slot_named_twice(self):
        state = self.held()
        with pytest.raises(CacheError, match="name one twice"):
            self.target.verify(state, np.array([0, 0]), np.array([3, 3]), forest([chain(1), chain(1)]))
        self.unharmed(state)

    def test_no_slots(self):
        with pytest.raises(CacheError, match="at least one of each"):
            self.target.new_state(0, 5)
