from __future__ import annotations

import numpy as np
import pytest

from specdec_core.decode import RequestError, generate
from specdec_core.drafters.model import ModelDrafter
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.models.errors import CorruptFile, MissingPackage, UnknownModel, UnsupportedModel
from specdec_core.placement import Placement, PlacementError
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.state.slots import CacheError
from specdec_core.targets.transformer import Transformer
from specdec_core.topology import chain, forest, tree
from tests.targets.llamacpp_states import PROMPT, assert_holds, held
from tests.tiny_gguf import gguf_model, write_gguf

pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: make setup builds it where there is a compiler")

from specdec_core.models.llama_library import library
from specdec_core.targets.llamacpp import LlamaCppOptions, LlamaCppTarget
from specdec_core.targets.llamacpp_context import DecodeFailed, RollbackRefused

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = gguf_model(context=128)
EXACT = LlamaCppOptions(threads=1, cache_type="float32")


class TestFiles:
    def test_no_file(self, gguf_folder):
        with pytest.raises(UnknownModel, match="no file"):
            LlamaCppTarget(gguf_folder / "absent.gguf")

    def test_no_gguf(self, gguf_folder):
        (gguf_folder / "text.gguf").write_text("hello")
        with pytest.raises(CorruptFile, match="starts with b'hell' instead of b'GGUF'"):
            LlamaCppTarget(gguf_folder / "text.gguf")

    def test_a_truncated_file(self, gguf_file, gguf_folder):
        (gguf_folder / "short.gguf").write_bytes(gguf_file.read_bytes()[:-5000])
        with pytest.raises(UnsupportedModel, match=r"cannot load .*short\.gguf: .+"):
            LlamaCppTarget(gguf_folder / "short.gguf")

    def test_an_unknown_architecture(self, gguf_folder):
        other = write_gguf(MODEL, gguf_folder / "other.gguf", {"general.architecture": "no-such"})
        with pytest.raises(UnsupportedModel, match="unknown model architecture: 'no-such'"):
            LlamaCppTarget(other)

    def test_a_missing_tensor(self, gguf_folder):
        other = write_gguf(MODEL, gguf_folder / "hole.gguf", tensors={"blk.1.ffn_up.weight": None})
        with pytest.raises(UnsupportedModel, match=r"blk\.1\.ffn_up\.weight"):
            LlamaCppTarget(other)

    def test_a_model_without_a_tokenizer_decodes_ids(self, gguf_folder, truth):
        gone = [key for key in ("pre", "tokens", "token_type", "merges", "bos_token_id", "eos_token_id")]
        changes = {f"tokenizer.ggml.{key}": None for key in [*gone, "padding_token_id"]}
        changes |= {"tokenizer.ggml.model": "none", "tokenizer.chat_template": None, "llama.vocab_size": 264}
        target = LlamaCppTarget(write_gguf(MODEL, gguf_folder / "mute.gguf", changes), EXACT)
        assert target.vocabulary == 264
        assert_holds(target, truth, held(target, PROMPT))

    @pytest.mark.parametrize(
        ("name", "why"),
        [
            ("llama_model_is_recurrent", "a recurrent state"),
            ("llama_model_is_hybrid", "a recurrent state in some layers"),
            ("llama_model_has_encoder", "an encoder"),
            ("llama_model_n_swa", "a sliding window"),
        ],
    )
    def test_a_state_that_cannot_be_rolled_back(self, gguf_file, monkeypatch, name, why):
        monkeypatch.setattr(library(), name, lambda pointer: 1)
        with pytest.raises(UnsupportedModel, match=f"has {why}: .*full attention"):
            LlamaCppTarget(gguf_file)


class TestOptions:
    @pytest.mark.parametrize(
        ("changes", "why"),
        [
            ({"cache_type": "int8"}, "cache type 'int8': expected one of float32, float16"),
            ({"threads": 0}, "threads 0"),
            ({"branches": -1}, "branches -1: expected at least 0"),
            ({"chunk": 0}, "chunk 0: expected at least 1"),
            ({"gpu_layers": -2}, "gpu_layers -2"),
        ],
    )
    def test_bad_ones(self, changes, why):
        with pytest.raises(PlacementError, match=why):
            LlamaCppOptions(**changes)

    def test_layers_on_a_gpu_that_is_not_there(self, gguf_file, monkeypatch):
        monkeypatch.setattr(library(), "llama_supports_gpu_offload", lambda: False)
        with pytest.raises(PlacementError, match=r"gpu_layers 4: this build of llama\.cpp has no GPU"):
            LlamaCppTarget(gguf_file, LlamaCppOptions(gpu_layers=4))


class TestBadInput:
    @pytest.mark.parametrize("token", [-1, 264])
    def test_a_token_of_another_vocabulary(self, llamacpp, truth, token):
        state = held(llamacpp, PROMPT)
        with pytest.raises(ValueError, match=f"token {token} is outside the target's vocabulary 0…263"):
            llamacpp.verify(state, np.array([0]), np.array([41, token]), forest([chain(2)]))
        with pytest.raises(ValueError, match=f"token {token} is outside"):
            llamacpp.prefill(held(llamacpp), np.array([0]), [np.array([token, 1])])
        assert_holds(llamacpp, truth, state)

    def test_a_drafter_with_another_vocabulary_drafts_only_what_both_have(self, llamacpp):
        larger = Transformer(tiny_llama(3, vocabulary=300), Placement())
        prompt, options = (5, 17, 3), Options(max_new_tokens=8)
        alone = generate(llamacpp, [Request(prompt, options)])[0]
        drafter = ModelDrafter(larger, llamacpp.vocabulary)
        assert len(generate(llamacpp, [Request(prompt, options, FixedLength(3))], drafter)[0].tokens) == len(
            alone.tokens
        )
        with pytest.raises(RequestError, match=r"token ids \[264\]"):
            generate(llamacpp, [Request((5, 264), options)])

    def test_context_overflow(self, llamacpp, truth):
        state = held(llamacpp, PROMPT)
        with pytest.raises(CacheError, match="position 128 is past the model's context of 128"):
            llamacpp.verify(state, np.array([0]), np.full(125, 41), forest([chain(125)]))
        with pytest.raises(CacheError, match="past the model's context"):
            llamacpp.prefill(held(llamacpp), np.array([0]), [np.full(130, 3)])
        assert_holds(llamacpp, truth, state)

    def test_more_branches_than_sequences(self, gguf_file, truth):
        target = LlamaCppTarget(gguf_file, LlamaCppOptions(threads=1, cache_type="float32", branches=1))
        state = held(target, PROMPT)
        with pytest.raises(CacheError, match="2 branches beyond the first of each row, and sequences for 1"):
            target.verify(state, np.array([0]), np.array([41, 1, 2, 3]), forest([tree((-1, 0, 0, 0))]))
        assert_holds(target, truth, state)

    def test_more_slots_than_sequences(self, llamacpp):
        with pytest.raises(CacheError, match="has 256 sequences"):
            llamacpp.new_state(250, 4)

    def test_a_context_that_cannot_be_made(self, llamacpp, monkeypatch):
        monkeypatch.setattr(library(), "llama_init_from_model", lambda model, params: None)
        with pytest.raises(CacheError, match="made no context of 1 slots × 8 entries: it gives no reason"):
            llamacpp.new_state(1, 8)

    @pytest.mark.parametrize(("code", "why"), [(1, "no room"), (2, "interrupted"), (-1, "invalid"), (-3, "it failed")])
    def test_a_failed_decode_leaves_the_state_as_it_was(self, llamacpp, truth, monkeypatch, code, why):
        state, other = held(llamacpp, PROMPT, PROMPT[:3]), forest([tree((-1, 0, 0)), chain(2)])
        real = library().llama_decode

        def fails_afterwards(handle, batch):
            real(handle, batch)  # a part may have been evaluated, and its entries are there
            return code

        with monkeypatch.context() as patch:
            patch.setattr(library(), "llama_decode", fails_afterwards)
            with pytest.raises(DecodeFailed, match=f"evaluate 5 tokens: .*{why}.*code {code}"):
                llamacpp.verify(state, np.array([0, 1]), np.array([41, 7, 8, 3, 9]), other)
            with pytest.raises(DecodeFailed):
                llamacpp.prefill(state, np.array([1]), [np.array([1, 2, 3, 4])])
        assert_holds(llamacpp, truth, state)
        assert state.lengths.tolist() == [4, 0]  # slot 1 was emptied for the prompt that failed
        llamacpp.prefill(state, np.array([1]), [PROMPT[:3]])
        assert_holds(llamacpp, truth, state, PROMPT[:3], slot=1)

    def test_a_batch_that_llama_cpp_itself_refuses(self, llamacpp, truth):
        """Entries that the state does not know of: positions are then not consecutive."""
        state = held(llamacpp, PROMPT)
        state.lengths[0] -= 1
        with pytest.raises(DecodeFailed, match=r"calls the batch invalid .*inconsistent sequence positions"):
            llamacpp.verify(state, np.array([0]), PROMPT[-1:], forest([chain(1)]))

    @pytest.mark.parametrize("shape", [chain(3), tree((-1, 0, 0))])
    def test_a_refused_rollback_commits_nothing(self, llamacpp, truth, monkeypatch, shape):
        state = held(llamacpp, PROMPT, PROMPT[:3])
        rows = forest([shape, chain(2)])
        found = llamacpp.verify(state, np.array([0, 1]), np.array([41, 7, 8, 3, 9]), rows)
        real = library().llama_memory_seq_rm

        def refuses(memory, sequence, start, end):
            return False if sequence == 1 and start >= 0 else real(memory, sequence, start, end)

        with monkeypatch.context() as patch:
            patch.setattr(library(), "llama_memory_seq_rm", refuses)
            with pytest.raises(RollbackRefused, match="does not take back the entries of sequence 1 from 3 on"):
                llamacpp.commit(state, found, [shape.path(2), np.arange(1)])
            assert state.lengths.tolist() == [4, 2]
            with pytest.raises(RollbackRefused):
                state.rewind(np.array([1]), np.array([1]))
            assert state.lengths.tolist() == [4, 2]
        with pytest.raises(CacheError, match="stale"):
            llamacpp.commit(state, found, [shape.path(2), np.arange(1)])
        assert_holds(llamacpp, truth, state)
        assert_holds(llamacpp, truth, state, PROMPT[:3], slot=1)


def test_a_missing_library_says_what_to_do(gguf_file, monkeypatch):
    import sys

    library.cache_clear()
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "llama_cpp", None)
        with pytest.raises(MissingPackage, match="make setup"):
            LlamaCppTarget(gguf_file)
    assert library()
