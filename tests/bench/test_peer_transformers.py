"""transformers' own loop on a tiny model: its text is ours, its passes and settings are what they are said to be."""

from __future__ import annotations

import pytest
import torch
from transformers import GenerationConfig

from specdec_core.bench import peer_transformers
from specdec_core.bench.peer_decoders import PLAIN, Setting
from specdec_core.bench.peer_transformers import (
    ASSISTED,
    CONSTANT,
    DEFAULT,
    HEURISTIC,
    LOOKUP,
    first_layers,
    transformers_peers,
)
from specdec_core.decode import generate
from specdec_core.rows import Request
from specdec_core.sampling import Options
from tests.bench.peer_factory import CASES, tiny_factory, up_to

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = Options(max_new_tokens=20)


@pytest.fixture(scope="module")
def factory(tmp_path_factory):
    with tiny_factory(tmp_path_factory.mktemp("transformers"), "torch") as made:
        yield made


@pytest.fixture(scope="module")
def model(factory):
    """The model that the peers share; all its passes' widths are counted."""
    loaded = peer_transformers.load_causal_lm(factory.opened.checkpoint.folder, torch.float32, "sdpa")
    loaded.generation_config = GenerationConfig(max_new_tokens=3, repetition_penalty=9.0)  # to be dropped
    loaded.widths = []
    loaded.register_forward_pre_hook(
        lambda module, args, kwargs: module.widths.append(kwargs["input_ids"].shape[1]), with_kwargs=True
    )
    return loaded


@pytest.fixture(scope="module")
def peers(model, factory):
    return {peer.method: peer for peer in peer_transformers.peers_of(model, factory, (1, 3), (2, 3))}


@pytest.fixture(scope="module")
def texts(factory):
    """Our own greedy text of every case."""
    return [generate(factory.opened.target, [Request(case.tokens, OPTIONS)])[0].tokens for case in CASES]


SETTINGS = [
    ("AR", PLAIN),
    (LOOKUP, Setting(3, 2)),
    (LOOKUP, Setting(10, 2)),
    (ASSISTED, Setting(3, schedule=CONSTANT)),
    (ASSISTED, Setting(5, schedule=HEURISTIC)),
    (ASSISTED, Setting(20, schedule=DEFAULT)),
]


@pytest.mark.parametrize(("method", "setting"), SETTINGS, ids=str)
def test_greedy_text_is_the_models_own_and_passes_are_counted(peers, model, texts, method, setting):
    for case, text in zip(CASES, texts, strict=True):
        model.widths.clear()
        run = peers[method].run(case.tokens, OPTIONS, setting)
        assert run.tokens == text
        assert run.passes == len(model.widths) - 1  # the first one is the prefill
        first = model.widths[0] - len(case.tokens) + 1
        assert 20 - first <= run.counted < 20 and run.seconds > 0
        assert max(model.widths[1:]) <= setting.draft + 1 or setting.schedule == HEURISTIC


def test_a_constant_schedule_drafts_so_many_and_no_more(peers, model):
    for draft in (1, 3):
        model.widths.clear()
        peers[ASSISTED].run(CASES[0].tokens, OPTIONS, Setting(draft, schedule=CONSTANT))
        assert set(model.widths[1 : -draft - 1]) == {draft + 1}  # the last ones are cut to what may still come


def test_the_heuristic_moves_and_begins_anew_in_every_run(peers, model):
    seen = []
    for _ in range(2):
        model.widths.clear()
        peers[ASSISTED].run(CASES[0].tokens, OPTIONS, Setting(5, schedule=HEURISTIC))
        seen.append(list(model.widths))
    assert seen[0] == seen[1] and len(set(seen[0][1:])) > 1


def test_what_is_looked_up_is_the_settings(peers, monkeypatch):
    from transformers.generation import candidate_generator, utils

    made = []

    class Seen(candidate_generator.PromptLookupCandidateGenerator):
        def __init__(self, **how):
            made.append((how["num_output_tokens"], how["max_matching_ngram_size"]))
            super().__init__(**how)

    monkeypatch.setattr(utils, "PromptLookupCandidateGenerator", Seen)
    peers[LOOKUP].run(CASES[0].tokens, OPTIONS, Setting(6, 3))
    assert made == [(6, 3)]


def test_every_setting_is_offered(peers):
    assert peers["AR"].settings == (PLAIN,)
    assert set(peers[LOOKUP].settings) == {Setting(k, n) for k in (1, 3) for n in (2, 3)} | {Setting(10, 2)}
    schedules = [(each.draft, each.schedule) for each in peers[ASSISTED].settings]
    assert schedules == [(1, CONSTANT), (3, CONSTANT), (5, HEURISTIC), (20, DEFAULT)]


def test_an_end_token_ends_the_text(peers, texts):
    for method, setting in SETTINGS[:4]:
        options = Options(max_new_tokens=20, eos=(5, texts[0][7]))
        assert peers[method].run(CASES[0].tokens, options, setting).tokens == up_to(texts[0], options.eos)


def test_seeds_decide_what_is_sampled_and_the_callers_stream_stays(peers):
    warm = [Options(1.0, max_new_tokens=12, seed=seed) for seed in (1, 1, 2)]
    before = torch.random.get_rng_state()
    for method, setting in SETTINGS[:4]:
        first, again, other = (peers[method].run(CASES[0].tokens, each, setting).tokens for each in warm)
        assert first == again != other
    assert torch.equal(torch.random.get_rng_state(), before)


def test_temperature_reaches_the_law(peers, texts):
    cold = Options(1e-6, max_new_tokens=10, seed=1)
    for method, setting in SETTINGS[:2]:
        assert peers[method].run(CASES[0].tokens, cold, setting).tokens == texts[0][:10]


def test_the_assistant_is_the_models_first_layers_and_no_copy(model, factory):
    part = first_layers(model, 1)
    own, whole = dict(part.named_parameters()), dict(model.named_parameters())
    assert all(own[name] is whole[name] for name in own)
    layers = {name.split(".")[2] for name in own if ".layers." in name}
    assert layers == {"0"} and part.config.num_hidden_layers == 1 and model.config.num_hidden_layers == 3
    ours = factory.opened.target.early_exit(1)
    text = generate(ours, [Request(CASES[0].tokens, OPTIONS)])[0].tokens
    assert part.generate(torch.tensor([CASES[0].tokens]), max_new_tokens=20)[0, 10:].tolist() == list(text)


def test_peers_say_what_they_are(factory):
    for peer in transformers_peers(factory, (1,), (2,)):
        assert (peer.backend, peer.engine, peer.format) == ("transformers float32", "transformers", "float32")
        assert (peer.threads, peer.file, peer.exact) == (1, None, False)
    target, reference = peer.judged()
    assert target.vocabulary == reference.vocabulary == factory.opened.target.vocabulary
    assert peer.judged()[0] is target  # opened once


def test_it_works_with_the_threads_that_it_is_told(factory, peers, monkeypatch):
    told = []

    class Threads(peer_transformers.TorchThreads):
        def __enter__(self):
            told.append(self._threads)

        def __exit__(self, *error):
            pass

    monkeypatch.setattr(peer_transformers, "TorchThreads", Threads)
    peers["AR"].run(CASES[0].tokens, Options(max_new_tokens=1))
    assert told == [factory.threads]


def test_a_streamer_that_misses_a_token_is_noticed(peers, monkeypatch):
    monkeypatch.setattr(peer_transformers._Listener, "put", lambda self, tokens: self.watch.emit([1]))
    with pytest.raises(RuntimeError, match="transformers streamed 21 new tokens and returned 20"):
        peers["AR"].run(CASES[0].tokens, OPTIONS)
