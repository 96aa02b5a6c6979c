"""Features in a file: those of the target at every token, resumed, read-only, never another corpus' or target's."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from specdec_core.arrays import host
from specdec_core.cache import CacheError
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.targets.transformer import Transformer
from specdec_core.topology import chain, forest
from specdec_core.training import feature_cache as module
from specdec_core.training.corpus import IS_GREEDY, Corpus
from specdec_core.training.feature_cache import FeatureError, FeatureOverflow, corpus_features

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKPOINT = tiny_llama(1)
LAYERS = (2, 0)


def open_with(layers=LAYERS, placement: Placement | None = None, checkpoint=CHECKPOINT, **changes):
    target = Transformer(checkpoint, placement or Placement("numba", threads=1), layers, **changes)
    return SimpleNamespace(target=target, checkpoint=checkpoint)


def make_corpus(lengths=(2, 9, 5, 7, 3, 12, 4), seed=0) -> Corpus:
    random = np.random.default_rng(seed)
    return Corpus(
        random.integers(0, 97, sum(lengths)).astype(np.uint16),
        np.cumsum([0, *lengths]),
        np.ones(len(lengths), np.int32),
        np.full(len(lengths), IS_GREEDY, np.uint8),
        np.arange(len(lengths), dtype=np.int32),
        {"vocabulary": 97},
    )


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache, and blocks of two rows."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path))
    monkeypatch.setattr(module, "ROWS_PER_BLOCK", 2)
    return tmp_path / "features"


@pytest.fixture
def prefilled(monkeypatch) -> list[int]:
    """Lengths of the rows that are prefilled from now on."""
    lengths: list[int] = []
    original = Transformer.prefill

    def noting(self, state, slots, prompts):
        lengths.extend(len(prompt) - 1 for prompt in prompts)
        return original(self, state, slots, prompts)

    monkeypatch.setattr(Transformer, "prefill", noting)
    return lengths


@pytest.fixture(params=[Placement("numba", threads=1), Placement("torch", dtype="float64")], ids=lambda p: p.engine)
def opened(request):
    return open_with(placement=request.param)


class TestTheFeatures:
    def test_every_token_has_what_verifying_the_row_gives_there_the_last_one_too(self, opened):
        corpus = make_corpus()
        found = corpus_features(corpus, opened)
        assert found.shape == (len(corpus.tokens), 2, 48) and found.dtype == np.float16
        for row in range(len(corpus)):
            tokens = corpus.sequence(row)
            state = opened.target.new_state(1, len(tokens))
            opened.target.prefill(state, np.array([0]), [tokens[:1]])
            shape = forest([chain(len(tokens))])
            expected = host(opened.target.verify(state, np.array([0]), tokens, shape).features)
            ours = found[corpus.offsets[row] : corpus.offsets[row + 1]]
            if opened.target.placement.engine == "numba":
                assert np.array_equal(ours, expected.astype(np.float16))
            else:
                assert np.allclose(ours, expected, rtol=2**-10, atol=1e-6)

    def test_layers_ascend_whatever_order_they_were_asked_in(self):
        corpus = make_corpus()
        both, first = corpus_features(corpus, open_with()), corpus_features(corpus, open_with((0,)))
        last = corpus_features(corpus, open_with((2,)))
        assert np.array_equal(both, np.concatenate([first, last], axis=1))
        assert not np.array_equal(first, last)

    def test_neither_blocks_nor_prefill_chunks_change_them(self, monkeypatch, cache):
        corpus = make_corpus()
        before = np.array(corpus_features(corpus, open_with()))
        next(cache.glob("*.f16")).unlink()
        monkeypatch.setattr(module, "ROWS_PER_BLOCK", 100)
        assert np.array_equal(corpus_features(corpus, open_with(chunk=3)), before)

    def test_they_are_read_only_and_mapped(self):
        found = corpus_features(make_corpus(), open_with())
        assert isinstance(found, np.memmap)
        with pytest.raises(ValueError, match="read-only"):
            found[0] = 0


class TestTheFile:
    def test_a_second_call_computes_nothing(self, prefilled, cache):
        corpus = make_corpus()
        before = np.array(corpus_features(corpus, open_with()))
        assert prefilled == np.diff(corpus.offsets).tolist()
        assert np.array_equal(corpus_features(corpus, open_with()), before)
        assert len(prefilled) == len(corpus)
        assert [file.suffix for file in cache.iterdir()] == [".f16"]

    def test_all_that_it_depends_on_makes_another_file(self, cache):
        corpus = make_corpus()
        for number, (text, opened) in enumerate(
            [
                (corpus, open_with()),
                (replace(corpus, flags=corpus.flags * 0), open_with()),
                (make_corpus(seed=1), open_with()),
                (corpus, open_with((0, 1))),
                (corpus, open_with(checkpoint=tiny_llama(2))),
                (corpus, open_with(placement=Placement("torch"))),
                (corpus, open_with(placement=Placement("torch", dtype="float64"))),
            ],
            start=1,
        ):
            corpus_features(text, opened)
            assert len(list(cache.glob("*.f16"))) == number

    @pytest.mark.parametrize(("failing", "kept"), [(0, 0), (2, 0), (4, 2), (5, 2), (6, 4)])
    def test_an_interrupted_run_keeps_all_blocks_but_the_newest(self, monkeypatch, cache, prefilled, failing, kept):
        corpus = make_corpus()
        whole = np.array(corpus_features(corpus, open_with()))
        next(cache.glob("*.f16")).unlink()
        original, calls = module._row_features, []

        def interrupted(*given):
            if len(calls) == failing:
                raise KeyboardInterrupt
            calls.append(given)
            return original(*given)

        with monkeypatch.context() as patch:
            patch.setattr(module, "_row_features", interrupted)
            with pytest.raises(KeyboardInterrupt):
                corpus_features(corpus, open_with())
        assert not list(cache.glob("*.f16"))
        prefilled.clear()
        assert np.array_equal(corpus_features(corpus, open_with()), whole)
        assert prefilled == np.diff(corpus.offsets).tolist()[kept:]

    def test_a_block_that_was_torn_or_never_reached_the_disk_is_made_again(self, cache):
        corpus = make_corpus()
        whole = np.array(corpus_features(corpus, open_with()))
        [file] = cache.glob("*.f16")
        token = whole[0].nbytes
        for tokens, extra in ((corpus.offsets[4], 0), (corpus.offsets[4], 5), (corpus.offsets[3], -1)):
            content = bytearray(file.read_bytes()[: int(tokens) * token + extra])
            content[int(corpus.offsets[2]) * token :] = bytes(len(content) - int(corpus.offsets[2]) * token)
            file.unlink()
            file.with_suffix(".partial").write_bytes(content)
            assert np.array_equal(corpus_features(corpus, open_with()), whole)

    def test_a_file_of_the_wrong_size_is_made_again(self, cache):
        corpus = make_corpus()
        whole = np.array(corpus_features(corpus, open_with()))
        [file] = cache.glob("*.f16")
        file.write_bytes(file.read_bytes()[:-2])
        assert np.array_equal(corpus_features(corpus, open_with()), whole)


class TestRefusals:
    def test_a_target_without_feature_layers(self):
        with pytest.raises(FeatureError, match=r"tiny-1 has no feature layers: open it with open_target"):
            corpus_features(make_corpus(), open_with(()))

    def test_a_target_of_another_vocabulary(self):
        corpus = make_corpus()
        corpus.tokens[3] = 97
        with pytest.raises(FeatureError, match=r"token 97 is outside the vocabulary 0…96 of tiny-1"):
            corpus_features(corpus, open_with())

    def test_a_row_past_the_context_but_not_one_that_fills_it(self):
        small = open_with(checkpoint=tiny_llama(1, context=12))
        assert len(corpus_features(make_corpus((3, 12)), small)) == 15
        with pytest.raises(FeatureError, match="a row of 13 tokens, and the context of tiny-1 holds 12"):
            corpus_features(make_corpus((3, 13)), small)

    @pytest.mark.parametrize("value", [7e4, np.nan])
    def test_what_float16_cannot_hold_names_the_layer(self, monkeypatch, cache, value):
        original = Transformer.prefill

        def overflowing(self, state, slots, prompts):
            [found] = original(self, state, slots, prompts)
            found[min(1, len(found) - 1), 1, 7] = value
            return [found]

        monkeypatch.setattr(Transformer, "prefill", overflowing)
        with pytest.raises(FeatureOverflow, match=r"layer 2 gives (7e\+04|nan) at token 1 of a row: .* 6.55e\+04"):
            corpus_features(make_corpus(), open_with())
        assert not list(cache.glob("*.f16"))

    def test_a_disk_without_room_is_told_before_anything_runs(self, monkeypatch, prefilled):
        corpus = make_corpus()
        size = len(corpus.tokens) * 2 * 48 * 2
        monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=size - 1))
        with pytest.raises(CacheError, match=f"no room for {size} bytes of features"):
            corpus_features(corpus, open_with())
        assert not prefilled
        monkeypatch.setattr(module.shutil, "disk_usage", lambda path: SimpleNamespace(free=size))
        assert len(corpus_features(corpus, open_with())) == len(corpus.tokens)
