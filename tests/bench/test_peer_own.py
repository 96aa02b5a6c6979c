"""Our own engine as one of the peers: the same text, the same stopwatch."""

from __future__ import annotations

import pytest

from specdec_core.bench.peer_decoders import PLAIN, Setting
from specdec_core.bench.peer_own import FLOAT32, INT8, own_decoder, own_peers
from specdec_core.decode import decode, generate, outputs
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.kernels.llama_step.int8 import Int8Llama
from specdec_core.lengths.fixed import FixedLength
from specdec_core.rows import Request
from specdec_core.sampling import Options
from tests.bench.peer_factory import CASES, tiny_factory

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = Options(max_new_tokens=20)


@pytest.fixture(scope="module")
def factory(tmp_path_factory):
    with tiny_factory(tmp_path_factory.mktemp("own")) as made:
        yield made


@pytest.fixture(scope="module")
def int8(factory):
    return factory.open(INT8)


def test_the_int8_target_has_int8_weights_and_the_threads_it_is_given(int8, factory):
    assert isinstance(int8._step, Int8Llama) and int8._step.workers == 1 and int8.placement.workers == 1
    assert int8.placement.dtype == "int8" and factory.open(FLOAT32) is factory.opened.target
    assert int8.vocabulary == factory.opened.target.vocabulary


@pytest.mark.parametrize("backend", [FLOAT32, INT8])
def test_every_method_emits_the_backends_own_text(factory, int8, backend):
    target = {FLOAT32: factory.opened.target, INT8: int8}[backend]
    peers = own_peers(factory, backend, (1, 3))
    assert [peer.method for peer in peers] == ["AR", "n-gram", "its first layers"]
    for case in CASES:
        text = generate(target, [Request(case.tokens, OPTIONS)])[0].tokens
        for peer in peers:
            for setting in peer.settings:
                assert peer.run(case.tokens, OPTIONS, setting).tokens == text
    assert (peers[0].settings, peers[1].settings) == ((PLAIN,), (Setting(1), Setting(3)))
    assert all((p.backend, p.engine, p.exact, p.threads) == (backend, "numba", True, 1) for p in peers)
    assert {peer.format for peer in peers} == {backend.split()[1]}


@pytest.mark.parametrize("draft", [0, 3])
def test_the_first_round_is_not_counted(factory, draft):
    target, drafter = factory.opened.target, NGramDrafter()
    policy = FixedLength(draft) if draft else None
    rounds = list(decode(target, [Request(CASES[0].tokens, OPTIONS, policy)], drafter))
    run = own_decoder(target, drafter)(CASES[0].tokens, OPTIONS, Setting(draft))
    assert run.tokens == outputs(rounds, 1)[0].tokens
    assert run.passes == len(rounds) - 1 and run.counted == 20 - len(rounds[0].rows[0].emitted)


def test_options_reach_the_loop(factory):
    decoder = own_decoder(factory.opened.target, None)
    texts = [decoder(CASES[0].tokens, Options(1.0, max_new_tokens=9, seed=s), PLAIN).tokens for s in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2] and len(texts[0]) == 9


def test_a_backend_that_is_not_ours(factory):
    with pytest.raises(ValueError, match=r"backend 'llama\.cpp F32': expected 'numba float32' or 'numba int8'"):
        own_peers(factory, "llama.cpp F32", (1,))
