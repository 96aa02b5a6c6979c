import numpy as np
import pytest

from specdec_core.decode import decode, outputs
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.forensics.serial_twin import SerialTwin, TwinError
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.state.slots import CacheError
from specdec_core.targets.table import TableState, TableTarget, random_logits
from specdec_core.targets.transformer import Transformer
from specdec_core.topology import chain, forest, tree
from tests.tiny_gguf import gguf_model, write_gguf

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL = tiny_llama(5, context=96)
PROMPTS = [np.array([3, 1, 4, 1, 5]), np.array([9, 2])]
REPEATING = (3, 1, 4, 3, 1, 4, 3, 1)
SLOT = np.array([0])


@pytest.fixture(scope="module")
def target():
    return Transformer(MODEL, Placement("numba", threads=1), feature_layers=(0,))


class Counting:
    """A target that writes down how many nodes each pass has."""

    def __init__(self, target):
        self._target, self.widths = target, []

    def __getattr__(self, name):
        return getattr(self._target, name)

    def verify(self, state, slots, tokens, forest):
        self.widths.append(len(tokens))
        return self._target.verify(state, slots, tokens, forest)


def held(target, prompts=PROMPTS, capacity=24):
    state = target.new_state(len(prompts), capacity)
    target.prefill(state, np.arange(len(prompts)), prompts)
    return state


def speculate(target, prompt=REPEATING, k=6, new=24):
    rounds = list(decode(target, [Request(prompt, Options(max_new_tokens=new), FixedLength(k))], NGramDrafter()))
    return outputs(rounds, 1)[0].tokens, [row.emitted for each in rounds for row in each.rows]


class TestPasses:
    def test_a_chain_takes_as_many_passes_as_nodes(self, target):
        counting = Counting(target)
        twin = SerialTwin(counting)
        state = held(twin, PROMPTS[:1])
        counting.widths.clear()
        twin.verify(state, SLOT, np.arange(7), forest([chain(7)]))
        assert counting.widths == [1] * 7

    def test_rows_go_a_depth_at_a_time(self, target):
        counting = Counting(target)
        twin = SerialTwin(counting)
        state = held(twin)
        counting.widths.clear()
        twin.verify(state, np.array([1, 0]), np.arange(7), forest([chain(2), chain(5)]))
        assert counting.widths == [2, 2, 1, 1, 1]

    def test_scores_are_those_of_one_pass_bit_for_bit(self, target):
        shape, slots, tokens = forest([chain(2), chain(5)]), np.array([1, 0]), np.array([5, 6, 7, 8, 9, 10, 11])
        twin = SerialTwin(target)
        one, other = (each.verify(held(each), slots, tokens, shape) for each in (target, twin))
        np.testing.assert_array_equal(other.logits, one.logits)
        np.testing.assert_array_equal(other.features, one.features)

    def test_a_verification_commits_nothing_and_a_commit_keeps_its_path(self, target):
        twin = SerialTwin(target)
        state, tokens = held(twin, PROMPTS[:1]), np.array([5, 6, 7, 8])
        for kept in (0, 1, 3, 4):
            before = state.lengths[0]
            verification = twin.verify(state, SLOT, tokens, forest([chain(4)]))
            assert state.lengths[0] == before
            twin.commit(state, verification, [np.arange(kept)])
            assert state.lengths[0] == state.inner.lengths[0] == before + kept
        committed = [*PROMPTS[0][:-1], 5, 5, 6, 7, *tokens]
        again = twin.verify(state, SLOT, np.array([2]), forest([chain(1)])).logits
        fresh = held(target, [np.array([*committed, 2])])
        expected = target.verify(fresh, SLOT, np.array([2]), forest([chain(1)])).logits
        np.testing.assert_array_equal(again, expected)

    def test_a_second_verification_begins_where_the_first_did(self, target):
        twin = SerialTwin(target)
        state = held(twin, PROMPTS[:1])
        first, second = (twin.verify(state, SLOT, np.array([5, 6]), forest([chain(2)])) for _ in range(2))
        np.testing.assert_array_equal(first.logits, second.logits)
        with pytest.raises(CacheError, match="is stale"):
            twin.commit(state, first, [np.arange(1)])

    def test_rewinding_and_releasing_drop_the_draft(self, target):
        twin = SerialTwin(target)
        state = held(twin)
        verification = twin.verify(state, np.array([0, 1]), np.arange(6), forest([chain(3)] * 2))
        state.rewind(SLOT, np.array([2]))
        state.release(np.array([1]))
        assert state.lengths.tolist() == state.inner.lengths.tolist() == [2, 0]
        with pytest.raises(CacheError, match="is stale"):
            twin.commit(state, verification, [np.arange(1)] * 2)


class TestTokens:
    def test_nothing_but_time_differs_on_our_engine(self, target):
        assert speculate(SerialTwin(target)) == speculate(target)
        assert any(len(emitted) > 1 for emitted in speculate(target)[1])  # drafts are accepted, or it says nothing

    @pytest.mark.parametrize("name", ["llama.cpp", "MLX", "transformers", "torch"])
    def test_a_twin_emits_what_autoregressive_decoding_does_on_any_backend(self, name, tmp_path):
        other = backend(name, tmp_path)
        plain = outputs(decode(other, [Request(REPEATING, Options(max_new_tokens=24))]), 1)[0].tokens
        assert speculate(SerialTwin(other))[0] == plain


def backend(name, folder):
    model = gguf_model(context=128)
    if name == "torch":
        return Transformer(model, Placement("torch", "cpu", "float32"))
    if name == "MLX":
        pytest.importorskip("mlx.core", reason="MLX is not installed")
        from specdec_core.targets.mlx import MlxOptions, MlxTarget

        return MlxTarget(model, MlxOptions(bits=4, group=32))
    if name == "transformers":
        from specdec_core.models.checkpoints import save_checkpoint
        from specdec_core.targets.huggingface import HuggingFaceTarget

        save_checkpoint(model, folder)
        return HuggingFaceTarget.open(folder)
    pytest.importorskip("llama_cpp", reason="llama.cpp is not installed")
    from specdec_core.targets.llamacpp import LlamaCppOptions, LlamaCppTarget

    return LlamaCppTarget(write_gguf(model, folder / "tiny.gguf"), LlamaCppOptions(threads=1, branches=0))


class TestRefusals:
    def test_trees(self, target):
        twin = SerialTwin(target)
        with pytest.raises(
            TwinError, match=r"row 1 is a tree with parents \(-1, 0, 0\): a serial twin verifies chains"
        ):
            twin.verify(held(twin), np.array([0, 1]), np.arange(4), forest([chain(1), tree((-1, 0, 0))]))

    def test_a_path_that_is_none(self, target):
        twin = SerialTwin(target)
        state = held(twin, PROMPTS[:1])
        verification = twin.verify(state, SLOT, np.arange(3), forest([chain(3)]))
        for path in ([1, 2], [0, 1, 2, 3]):
            with pytest.raises(CacheError, match=r"row 0: nodes \[.*\] are no path from the root of a chain of 3"):
                twin.commit(state, verification, [np.array(path)])
        assert state.lengths[0] == len(PROMPTS[0]) - 1

    @pytest.mark.parametrize("silent", [False, True])
    def test_a_state_that_cannot_rewind(self, silent):
        class Stubborn(TableState):
            def rewind(self, slots, lengths):
                if not silent:
                    raise CacheError("a recurrent state keeps no history")

        class OneWay(TableTarget):
            def new_state(self, slots, capacity):
                return Stubborn(slots, capacity)

        with pytest.raises(TwinError, match=r"cannot be rewound|cannot take back a token \(CacheError: a recurrent"):
            SerialTwin(OneWay(random_logits(5, 0), 5))

    def test_a_pass_that_fails_half_way_leaves_the_state(self, target):
        twin = SerialTwin(target)
        state = held(twin, PROMPTS[:1], capacity=6)
        with pytest.raises(CacheError):
            twin.verify(state, SLOT, np.arange(5), forest([chain(5)]))
        assert state.lengths[0] == state.inner.lengths[0] == 4
        twin.commit(state, twin.verify(state, SLOT, np.arange(2), forest([chain(2)])), [np.arange(2)])
        assert state.lengths[0] == 6

    def test_a_prefill_that_fails_leaves_an_empty_row(self, target):
        twin = SerialTwin(target)
        state = held(twin)
        with pytest.raises(ValueError):
            twin.prefill(state, SLOT, [np.array([1, MODEL.config.vocabulary, 2])])
        twin.prefill(state, SLOT, [PROMPTS[0]])
        assert state.lengths.tolist() == [4, 1]
        logits = twin.verify(state, np.array([1]), np.array([2]), forest([chain(1)])).logits
        expected = target.verify(held(target), np.array([1]), np.array([2]), forest([chain(1)])).logits
        np.testing.assert_array_equal(logits, expected)


def test_a_twin_is_named_after_its_target(target):
    assert SerialTwin(target).name == f"{MODEL.name}, token by token"
    assert (SerialTwin(target).vocabulary, SerialTwin(target).context) == (target.vocabulary, target.context)
