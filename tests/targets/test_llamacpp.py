from __future__ import annotations

import gc
import weakref
from dataclasses import replace

import numpy as np
import pytest

from specdec_core.decode import generate
from specdec_core.drafters.model import ModelDrafter
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models import quantize
from specdec_core.models.errors import UnsupportedModel
from specdec_core.models.registry import load
from specdec_core.placement import Placement
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer
from specdec_core.topology import chain, forest, tree
from tests.conformance import Subject, TargetConformance
from tests.llama_reference import Reference
from tests.targets.greedy import after, assert_speculation_equals_autoregression
from tests.targets.llamacpp_states import PROMPT, held
from tests.tiny_gguf import gguf_model, write_gguf

pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: make setup builds it where there is a compiler")

from specdec_core.models.llama_library import library
from specdec_core.targets.llamacpp import LlamaCppOptions, LlamaCppTarget

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = gguf_model(context=128)
EXACT = LlamaCppOptions(threads=1, cache_type="float32")


class TestFloat32(TargetConformance):
    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def opened(cls, llamacpp, truth):
        cls.subject = Subject(llamacpp, truth, tolerance=1e-3)


class TestInPartsOfThree(TargetConformance):
    """Batches wider than one decode, trees among them, are fed in parts."""

    @pytest.fixture(autouse=True, scope="class")
    @classmethod
    def opened(cls, gguf_file, truth):
        options = LlamaCppOptions(threads=1, cache_type="float32", chunk=3)
        cls.subject = Subject(LlamaCppTarget(gguf_file, options), truth, tolerance=1e-3)


@pytest.fixture(scope="module")
def calm(gguf_folder):
    """A model whose attention is not sharp, so that rounding is not amplified from layer to layer."""
    gains = {"q_proj": 0.4, "k_proj": 0.4, "v_proj": 0.5, "o_proj": 0.5, "gate_proj": 0.5, "up_proj": 0.5}
    weights = {name: w * gains.get(name.split(".")[-2], 1.0) for name, w in MODEL.weights.items()}
    return write_gguf(replace(MODEL, weights=weights), gguf_folder / "calm.gguf")


@pytest.mark.parametrize("kind", quantize.VARIANTS)
@pytest.mark.parametrize("repack", [False, True])
def test_quantized_kernels_are_near_float64_at_the_same_values(calm, gguf_folder, monkeypatch, kind, repack):
    """What remains is their rounding of activations, to 8 bits (F16: to half precision): logits' spread is about 2.

    That is far below what the rounding of the weights does, so another file's values would not pass.
    """
    monkeypatch.setenv("SPECDEC_CACHE", str(gguf_folder / "cache"))
    made = quantize.variant(calm, kind, threads=1)
    expected = Reference(quantize.dequantised_checkpoint(made)).last
    original = Reference(quantize.dequantised_checkpoint(calm)).last
    target = LlamaCppTarget(made, LlamaCppOptions(threads=1, cache_type="float32", repack=repack))
    shape, nodes = tree((-1, 0, 0, 1, 2, 2)), np.array([41, 7, 8, 9, 10, 11])
    state = held(target, PROMPT)
    found = target.verify(state, np.array([0]), nodes, forest([shape]))
    prefixes = [[*PROMPT[:-1], *nodes[shape.path(node)]] for node in range(6)]
    target.commit(state, found, [shape.path(4)])
    prefixes.append([*prefixes[4], 6])
    again = target.verify(state, np.array([0]), np.array([6]), forest([chain(1)])).logits
    logits = np.concatenate([found.logits, again])
    error = distance(logits, map(expected, prefixes))
    assert error < {"F32": 1e-5, "F16": 0.01}.get(kind, 0.15)
    if kind.startswith("Q4"):
        assert error < 0.4 * distance(logits, map(original, prefixes))


def distance(logits, expected):
    """Root mean square difference."""
    return float(np.sqrt(np.mean((logits - np.array(list(expected))) ** 2)))


def test_the_shipped_file_is_near_our_engine_at_the_same_values():
    """The real model in Q4_1: rounding of activations only, by root mean square, of logits that spread by about 4."""
    prompt = np.array([1, 4093, 198, 504, 3575, 282, 4649, 314])
    target = LlamaCppTarget(quantize.gguf_source("smollm2-135m-instruct"), LlamaCppOptions(threads=1))
    engine = Transformer(load("smollm2-135m-instruct"), Placement())
    found, expected = (after(each, prompt) for each in (target, engine))
    assert expected.std() > 2
    assert distance(found[None], expected[None]) < 0.1 * expected.std()
    assert found.argmax() == expected.argmax()


def test_cache_types_and_flash_attention(gguf_file, truth):
    for options in (
        LlamaCppOptions(threads=1),
        LlamaCppOptions(threads=1, flash=True),
        LlamaCppOptions(threads=2, cache_type="float32", flash=True),
    ):
        target = LlamaCppTarget(gguf_file, options)
        found = target.verify(held(target, PROMPT), np.array([0]), PROMPT[-1:], forest([chain(1)]))
        np.testing.assert_allclose(found.logits[0], truth(PROMPT), rtol=0, atol=0.05)


def test_one_thread_count_serves_one_token_and_many(gguf_file):
    llama = library()
    state = LlamaCppTarget(gguf_file, LlamaCppOptions(threads=3)).new_state(1, 8)
    assert llama.llama_n_threads(state.handle) == llama.llama_n_threads_batch(state.handle) == 3


@pytest.mark.parametrize("repack", [False, True])
def test_repacking_is_asked_for_or_not(gguf_file, monkeypatch, repack):
    load_file, asked = library().llama_model_load_from_file, []

    def spy(name, params):
        asked.append(params.use_extra_bufts)
        return load_file(name, params)

    monkeypatch.setattr(library(), "llama_model_load_from_file", spy)
    LlamaCppTarget(gguf_file, LlamaCppOptions(repack=repack))
    assert asked == [repack]


@pytest.mark.parametrize("kept", [None, 0, 1, 2, 4])
def test_no_branch_holds_an_entry_after_a_commit(llamacpp, kept):
    """Entries that no slot holds would fill the cache up."""
    state, shape = held(llamacpp, PROMPT), tree((-1, 0, 0, 1, 2, 2))
    for _ in range(2):
        found = llamacpp.verify(state, np.array([0]), np.array([41, 7, 8, 9, 10, 11]), forest([shape]))
    llamacpp.commit(state, found, [np.empty(0, np.int64) if kept is None else shape.path(kept)])
    memory = library().llama_get_memory(state.handle)
    held_to = [library().llama_memory_seq_pos_max(memory, sequence) for sequence in range(1 + state.branches)]
    assert held_to == [state.lengths[0] - 1] + [-1] * state.branches


@pytest.mark.parametrize("candidates", [1, 3])
def test_greedy_speculation_is_autoregression(llamacpp, candidates):
    assert_speculation_equals_autoregression(llamacpp, tolerance=1e-3, candidates=candidates)


def test_it_drafts_for_another_engine(gguf_file):
    checkpoint = quantize.dequantised_checkpoint(gguf_file)
    engine = Transformer(checkpoint, Placement(dtype="float64"))
    prompt, options = (5, 17, 3), Options(max_new_tokens=16)
    alone = generate(engine, [Request(prompt, options)])[0]
    drafter = ModelDrafter(LlamaCppTarget(gguf_file, EXACT), engine.vocabulary)
    assert generate(engine, [Request(prompt, options, FixedLength(4))], drafter)[0].tokens == alone.tokens


def test_logits_are_copied_out_before_the_next_decode(llamacpp):
    state = held(llamacpp, PROMPT)
    first = llamacpp.verify(state, np.array([0]), PROMPT[-1:], forest([chain(1)])).logits
    before = first.copy()
    llamacpp.verify(state, np.array([0]), np.array([9]), forest([chain(1)]))
    assert np.array_equal(first, before)


def test_sizes_are_the_files(llamacpp):
    assert (llamacpp.vocabulary, llamacpp.context, llamacpp.name, llamacpp.threads) == (264, 128, "tiny", 1)
    assert llamacpp.bytes == sum(4 * tensor.numel() for tensor in MODEL.weights.values())


def test_nothing_is_printed(gguf_file, gguf_folder, capfd):
    target = LlamaCppTarget(gguf_file, EXACT)
    held(target, PROMPT)
    with pytest.raises(UnsupportedModel):
        LlamaCppTarget(write_gguf(MODEL, gguf_folder / "loud.gguf", {"general.architecture": "no-such"}))
    assert capfd.readouterr() == ("", "")


def test_a_context_is_freed_before_its_model(gguf_file):
    target = LlamaCppTarget(gguf_file, EXACT)
    state = target.new_state(1, 8)
    gone = weakref.ref(target._model)
    del target
    gc.collect()
    assert gone() is not None
    state.close()
    del state
    gc.collect()
    assert gone() is None
