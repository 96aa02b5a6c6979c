"""llama-cpp-python's own loop on a tiny file: its text is the file's own, under our settings and no others."""

from __future__ import annotations

import pytest

from specdec_core.bench import peer_llamacpp
from specdec_core.bench.peer_decoders import PLAIN, Setting
from specdec_core.bench.peer_llamacpp import LOOKUP, llamacpp_peers
from specdec_core.decode import generate
from specdec_core.models.errors import MissingPackage, UnsupportedModel
from specdec_core.rows import Request
from specdec_core.sampling import Options
from tests.bench.peer_factory import CASES, tiny_factory, up_to

pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: make setup builds it where there is a compiler")

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = Options(max_new_tokens=20)


@pytest.fixture(scope="module")
def factory(tmp_path_factory):
    with tiny_factory(tmp_path_factory.mktemp("llamacpp"), "torch") as made:
        yield made


@pytest.fixture(scope="module")
def peers(factory):
    return {peer.method: peer for peer in llamacpp_peers(factory, "F32", (1, 4), (2, 3), context=128)}


@pytest.fixture(scope="module")
def texts(factory):
    """The greedy text of every case, by our engine, whose weights are the file's."""
    return [generate(factory.opened.target, [Request(case.tokens, OPTIONS)])[0].tokens for case in CASES]


@pytest.mark.parametrize(("method", "setting"), [("AR", PLAIN), (LOOKUP, Setting(4, 2)), (LOOKUP, Setting(1, 3))])
def test_greedy_text_is_the_files_own(peers, texts, method, setting):
    for case, text in zip(CASES, texts, strict=True):
        run = peers[method].run(case.tokens, OPTIONS, setting)
        assert run.tokens == text and run.counted == 19 and run.seconds > 0
        assert run.passes == 19 if method == "AR" else -(-19 // (setting.draft + 1)) <= run.passes <= 19


def test_passes_of_a_lookup_are_those_that_llama_cpp_makes(peers, monkeypatch):
    from llama_cpp import Llama

    widths, real = [], Llama.eval
    monkeypatch.setattr(Llama, "eval", lambda self, tokens: widths.append(len(tokens)) or real(self, tokens))
    for case in CASES:
        widths.clear()
        run = peers[LOOKUP].run(case.tokens, OPTIONS, Setting(4, 2))
        assert widths[0] == len(case.tokens) and run.passes == len(widths) - 1 and max(widths[1:]) <= 5
    again = list(widths)
    widths.clear()
    peers[LOOKUP].run(case.tokens, OPTIONS, Setting(4, 2))
    assert widths == again  # the same prompt is prefilled again, in the same passes


def test_what_is_looked_up_is_the_settings(monkeypatch):
    from llama_cpp import llama_speculative

    made = []
    monkeypatch.setattr(llama_speculative, "LlamaPromptLookupDecoding", lambda **how: made.append(how))
    peer_llamacpp._CountedLookup(Setting(6, 3))
    assert made == [{"max_ngram_size": 3, "num_pred_tokens": 6}]


def test_it_is_opened_with_our_threads_and_room(factory, monkeypatch):
    import llama_cpp

    opened = []
    monkeypatch.setattr(llama_cpp, "Llama", lambda file, **how: opened.append((file, how)))
    plain, lookup = llamacpp_peers(factory, "Q8_0", (1,), (2,), context=99)
    assert [file for file, _ in opened] == [str(factory.file("Q8_0"))] * 2
    for _, how in opened:
        assert (how["n_threads"], how["n_threads_batch"], how["n_ctx"]) == (1, 1, 99)
    assert [how["logits_all"] for _, how in opened] == [False, True]
    assert opened[0][1]["draft_model"] is None and opened[1][1]["draft_model"] is not None
    assert plain.settings == (PLAIN,) and lookup.settings == (Setting(1, 2), Setting(10, 2))


def test_an_end_token_ends_the_text(peers, texts):
    options = Options(max_new_tokens=20, eos=(5, texts[0][6]))
    for method, setting in (("AR", PLAIN), (LOOKUP, Setting(4, 2))):
        assert peers[method].run(CASES[0].tokens, options, setting).tokens == up_to(texts[0], options.eos)
    options = Options(max_new_tokens=20, eos=(texts[0][0],))
    run = peers[LOOKUP].run(CASES[0].tokens, options, Setting(4, 2))
    assert (run.tokens, run.counted, run.passes) == (texts[0][:1], 0, 0)


def test_seeds_decide_what_is_sampled(peers):
    for method, setting in (("AR", PLAIN), (LOOKUP, Setting(4, 2))):
        first, again, other = (
            peers[method].run(CASES[0].tokens, Options(1.0, max_new_tokens=12, seed=seed), setting).tokens
            for seed in (1, 1, 2)
        )
        assert first == again != other


def test_nothing_is_cut_off_the_law(peers, monkeypatch):
    """Sampled flat: of the package's own 40 most probable tokens, no more than 40 could come."""
    from llama_cpp import Llama

    run = peers["AR"].run(CASES[0].tokens, Options(1e4, max_new_tokens=100, seed=3), PLAIN)
    assert len(set(run.tokens)) > 60
    told = {}
    monkeypatch.setattr(Llama, "generate", lambda self, tokens, **how: told.update(how) or iter([1] * 9))
    peers["AR"].run(CASES[0].tokens, Options(0.7, max_new_tokens=5), PLAIN)
    assert told == {"temp": 0.7, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "repeat_penalty": 1.0}


def test_a_text_that_does_not_fit(peers):
    with pytest.raises(ValueError, match=r"10 prompt tokens and 500 new ones: this peer was opened for \d+; open it"):
        peers["AR"].run(CASES[0].tokens, Options(max_new_tokens=500))


def test_peers_say_what_they_are(peers, factory):
    for method, peer in peers.items():
        assert (peer.backend, peer.engine, peer.format, peer.method) == ("llama.cpp F32", "llama.cpp", "F32", method)
        assert (peer.file, peer.threads, peer.exact) == (factory.file("F32").name, 1, False)
    target, reference = peer.judged()
    assert target.options.cache_type == "float16" and target.threads == 1 and target.file == factory.file("F32")
    assert reference.placement.dtype == "float64" and reference.vocabulary == target.vocabulary


def test_without_the_package(factory, monkeypatch):
    def missing():
        raise MissingPackage("llama.cpp is not here")

    monkeypatch.setattr(peer_llamacpp, "library", missing)
    with pytest.raises(MissingPackage, match=r"llama\.cpp is not here"):
        llamacpp_peers(factory, "F32", (1,), (2,))


def test_a_file_that_is_no_model(tmp_path):
    file = tmp_path / "broken.gguf"
    file.write_bytes(b"GGUF" + b"\0" * 64)
    with pytest.raises(UnsupportedModel, match=r"llama\.cpp cannot load .*broken\.gguf"):
        peer_llamacpp._open(file, 1, 64)
