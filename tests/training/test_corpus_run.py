"""`train corpus`: a file a source, written where it belongs, and what is done stays as it is."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from specdec_core import training
from specdec_core.decode import Output
from specdec_core.evidence.layout import Layout
from specdec_core.kernels.compiled import code_folder
from specdec_core.pairs import Opened, open_target
from specdec_core.placement import Placement
from specdec_core.protocol import Round, RowRound
from specdec_core.training import corpus as corpus_module
from specdec_core.training import corpus_generation, questions
from specdec_core.training import corpus_run as module
from specdec_core.training.corpus import committed_corpus, joined, load_corpus
from specdec_core.training.corpus_generation import CorpusPlan
from tests.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = CorpusPlan(prompts=10, max_new_tokens=8, batch=4, seed=3, chunk=4)
PARTS = (PLAN, replace(PLAN, prompts=7, source="asked"))
REPEATED = 3
"""The answer at this place is the same in both parts."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Opened:
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), context=1024, layers=2)
    return open_target(str(folder), Placement("numba", threads=1))


@pytest.fixture
def decoded(monkeypatch, opened) -> list[tuple[int, ...]]:
    """A scripted target: it has a question at every place, and another answer to each. Which places it answered."""
    calls: list[tuple[int, ...]] = []

    def decode(target, requests, slots):
        calls.append(tuple(sorted(request.key for request in requests)))
        for number, request in enumerate(requests):
            emitted = (request.key, *([] if request.key == REPEATED else request.prompt[-30:]))
            yield Round(0, (RowRound(number, 0, 1, (), 0, "bonus", emitted, "eos"),), 1)

    def generate(target, requests, slots):
        return [Output(tuple(opened.tokenizer.encode(f" is {each.key} of them?")), "eos") for each in requests]

    monkeypatch.setattr(corpus_generation, "decode", decode)
    monkeypatch.setattr(questions, "generate", generate)
    return calls


@pytest.fixture
def write(monkeypatch, tmp_path, opened, decoded) -> Callable[..., list[Path]]:
    """Write the corpus of a profile, by its small plans, where nothing else lies."""
    code_folder()  # compiled code stays in the cache that everyone shares
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(corpus_module, "FOLDER", tmp_path / "committed")
    monkeypatch.setattr(module, "open_target", lambda name: opened)

    def run(profile: str, parts: Sequence[CorpusPlan] = PARTS) -> list[Path]:
        small = tuple(replace(part, prompts=5) for part in parts)
        monkeypatch.setattr(module, "PLANS", {"quick": small, "full": tuple(parts)})
        return module.write_corpus(profile, opened.name, layout=Layout(tmp_path))

    return run


def state(paths: Sequence[Path]) -> list[tuple[int, bytes]]:
    return [(path.stat().st_mtime_ns, path.read_bytes()) for path in paths]


def test_the_full_profile_writes_what_is_committed(write, tmp_path, opened):
    paths = write("full")
    names = [f"{opened.checkpoint.name}-{source}.safetensors" for source in ("templates", "asked")]
    assert paths == [tmp_path / "committed" / name for name in names]
    parts = [load_corpus(path) for path in paths]
    assert [part.origin["source"] for part in parts] == ["templates", "asked"]
    assert committed_corpus(opened).fingerprint == joined(parts).fingerprint


def test_the_quick_one_a_small_corpus_under_build(write, tmp_path, opened):
    paths = write("quick")
    names = [f"corpus-{opened.checkpoint.name}-{source}.safetensors" for source in ("templates", "asked")]
    assert paths == [tmp_path / "build" / name for name in names]
    assert all(load_corpus(path).origin["plan"]["prompts"] == 5 for path in paths)
    assert not (tmp_path / "committed").exists()


def test_profiles_and_sources_do_not_share_shards(write, tmp_path, decoded):
    write("quick")
    write("full")
    folders = {path.name: len(list(path.iterdir())) for path in (tmp_path / "cache" / "corpus").iterdir()}
    assert folders == {"quick-templates": 2, "quick-asked": 2, "full-templates": 3, "full-asked": 2}


def test_a_row_that_repeats_the_part_before_is_left_out(write):
    first, second = (load_corpus(path) for path in write("full"))
    assert first.prompts.tolist() == list(range(10))
    assert second.prompts.tolist() == [0, 1, 2, 4, 5, 6] and second.origin["dropped"]["equal"] == 1


def test_also_one_that_was_there_already(write):
    paths = write("full")
    before = state(paths)
    paths[1].unlink()
    write("full")
    assert state(paths)[1][1] == before[1][1]


@pytest.mark.parametrize("profile", ["quick", "full"])
def test_a_finished_file_is_left_as_it_is(write, decoded, profile):
    paths = write(profile)
    before = state(paths)
    decoded.clear()
    assert write(profile) == paths
    assert state(paths) == before and not decoded


def test_nor_needs_it_the_shards(write, decoded, tmp_path, monkeypatch):
    paths = write("full")
    before = state(paths)
    decoded.clear()
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "another"))
    assert write("full") == paths
    assert state(paths) == before and not decoded


def test_one_that_is_not_there_is_made_and_the_other_stays(write, decoded):
    first, second = write("full")
    before = state([first])
    second.unlink()
    decoded.clear()
    write("full")
    assert second.is_file() and state([first]) == before
    assert not decoded  # its shards are kept


def test_one_of_another_plan_is_made_again_from_what_is_new(write, decoded):
    paths = write("full", (PLAN, replace(PARTS[1], prompts=4)))
    before = state(paths)
    decoded.clear()
    assert write("full") == paths
    assert state(paths)[0] == before[0]
    assert decoded == [(4, 5, 6)]
    assert load_corpus(paths[1]).prompts.tolist() == [0, 1, 2, 4, 5, 6]


def test_an_interrupted_run_goes_on(write, decoded, monkeypatch):
    whole, stop = corpus_generation.decode, []

    def interrupted(target, requests, slots):
        if len(decoded) == 4:
            stop.append(len(decoded))
            raise KeyboardInterrupt
        return (yield from whole(target, requests, slots))

    monkeypatch.setattr(corpus_generation, "decode", interrupted)
    with pytest.raises(KeyboardInterrupt):
        write("full")
    assert stop and decoded == [(0, 1, 2, 3), (4, 5, 6, 7), (8, 9), (0, 1, 2, 3)]
    decoded.clear()
    monkeypatch.setattr(corpus_generation, "decode", whole)
    write("full")
    assert decoded == [(4, 5, 6)]


def test_the_command_gives_all_files(monkeypatch):
    def write(profile: str, model: str, progress: bool) -> list[Path]:
        return [Path(f"{profile}-{model}-{number}-{progress}") for number in range(2)]

    monkeypatch.setattr(module, "write_corpus", write)
    assert training.TRAININGS["corpus"]("quick", "tiny") == [Path("quick-tiny-0-True"), Path("quick-tiny-1-True")]


def test_an_unknown_profile(write):
    with pytest.raises(ValueError, match="unknown profile 'fast': expected one of quick, full"):
        write("fast")
