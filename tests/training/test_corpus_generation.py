"""A corpus by a tiny model: the same text however it is made, joined without repetition, each source in its file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from specdec_core.decode import Output, generate
from specdec_core.pairs import Opened, open_target
from specdec_core.placement import Placement
from specdec_core.protocol import Round, RowRound
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.training import corpus as corpus_module
from specdec_core.training import corpus_generation as module
from specdec_core.training import questions as questions_module
from specdec_core.training.corpus import (
    CORPUS,
    IS_ENDED,
    IS_GREEDY,
    IS_HELD_OUT,
    LARGEST_FILE,
    OF_NEW_TEMPLATE,
    SHARD,
    Corpus,
    CorpusError,
    counts,
    load_corpus,
    read_corpus,
)
from specdec_core.training.corpus_generation import (
    PLANS,
    SAME_START,
    CorpusPlan,
    generate_corpus,
    join_corpus,
    throughput_by_batch,
    written,
)
from specdec_core.training.questions import SOURCES, Asked, Templates
from specdec_core.training.templates import HELD_OUT, is_held_out, sample, turn, version
from tests.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = CorpusPlan(prompts=20, max_new_tokens=8, batch=4, seed=3, chunk=8)
ASKED = replace(PLAN, source="asked")


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Opened:
    """Its weights and tokens are few, its context holds every prompt letter by letter."""
    folder = save_tiny(tmp_path_factory.mktemp("tiny"), context=1024, layers=2)
    return open_target(str(folder), Placement("numba", threads=1))


@pytest.fixture(scope="module")
def shards(opened, tmp_path_factory):
    """The plan's shards in a folder."""
    folder = tmp_path_factory.mktemp("shards")
    generate_corpus(PLAN, opened, folder)
    return folder


@pytest.fixture(scope="module")
def corpus(opened, shards, tmp_path_factory) -> Corpus:
    return join_corpus(PLAN, opened, shards, tmp_path_factory.mktemp("joined") / "tiny.safetensors")


@pytest.fixture
def answered(monkeypatch) -> Callable[[Sequence[Sequence[int]]], None]:
    """From now on the target answers like this, place by place."""

    def answer(continuations: Sequence[Sequence[int]]) -> None:
        def decode(target, requests, slots):
            assert requests, "a decoder refuses an empty batch"
            for number, request in enumerate(requests):
                emitted = tuple(continuations[request.key])
                yield Round(0, (RowRound(number, 0, 1, (), 0, "bonus", emitted, "eos"),), 1)

        monkeypatch.setattr(module, "decode", decode)

    return answer


@pytest.fixture
def asks(monkeypatch, opened) -> Callable[[Callable[[int], bool]], None]:
    """From now on the target asks something at those places, and nothing at others."""

    def ask(has_question: Callable[[int], bool]) -> None:
        def generate(target, requests, slots):
            texts = [f" number {request.key} of them?" if has_question(request.key) else "" for request in requests]
            return [Output(tuple(opened.tokenizer.encode(text)), "eos") for text in texts]

        monkeypatch.setattr(questions_module, "generate", generate)

    return ask


@pytest.fixture
def scripted(answered, opened):
    """Make a corpus of given continuations, one a prompt, as if the target had decoded them."""

    def make(folder, *continuations) -> Corpus:
        answered(continuations)
        plan = replace(PLAN, prompts=len(continuations))
        generate_corpus(plan, opened, folder)
        return join_corpus(plan, opened, folder, folder / "joined.safetensors")

    return make


class TestTheText:
    def test_a_row_is_what_the_target_answers_to_that_prompt_alone(self, opened, corpus):
        prompts = sample(PLAN.prompts, PLAN.seed)
        for row in range(len(corpus)):
            place = int(corpus.prompts[row])
            ids = tuple(opened.tokenizer.chat(prompts[place].messages))
            options = Options(
                temperature=0.0 if corpus.flagged(IS_GREEDY)[row] else 1.0,
                max_new_tokens=PLAN.max_new_tokens,
                eos=opened.tokenizer.eos_ids,
                seed=PLAN.seed,
            )
            [alone] = generate(opened.target, [Request(ids, options, key=place)])
            prompt, continuation = corpus.row(row)
            assert tuple(prompt) == ids
            assert tuple(continuation) == alone.tokens
            assert corpus.flagged(IS_ENDED)[row] == (alone.finished == "eos")

    @pytest.mark.parametrize("changes", [{"batch": 1}, {"batch": 9, "chunk": 20}, {"chunk": 3}])
    def test_neither_batch_nor_chunk_changes_it(self, opened, corpus, tmp_path, changes):
        plan = replace(PLAN, **changes)
        generate_corpus(plan, opened, tmp_path)
        other = join_corpus(plan, opened, tmp_path, tmp_path / "joined")
        assert other.fingerprint == corpus.fingerprint
        assert np.array_equal(other.prompts, corpus.prompts)

    def test_the_seed_changes_what_is_asked_and_drawn(self, opened, corpus, tmp_path):
        plan = replace(PLAN, seed=4)
        generate_corpus(plan, opened, tmp_path)
        assert join_corpus(plan, opened, tmp_path, tmp_path / "joined").fingerprint != corpus.fingerprint

    def test_an_interrupted_run_goes_on_and_leaves_the_same_files(self, opened, shards, tmp_path, monkeypatch):
        decoded = []

        def interrupted(target, requests, slots):
            if len(decoded) == 1:
                raise KeyboardInterrupt
            decoded.append(len(requests))
            return original(target, requests, slots=slots)

        original = module.decode
        monkeypatch.setattr(module, "decode", interrupted)
        with pytest.raises(KeyboardInterrupt):
            generate_corpus(PLAN, opened, tmp_path)
        assert [file.name for file in tmp_path.iterdir()] == ["000000-000008.safetensors"]
        decoded.clear()
        monkeypatch.setattr(module, "decode", self.counting(original, decoded))
        paths = generate_corpus(PLAN, opened, tmp_path)
        assert decoded == [8, 4]
        assert [path.read_bytes() for path in paths] == [(shards / path.name).read_bytes() for path in paths]

    def test_a_longer_plan_goes_on(self, opened, shards, tmp_path, monkeypatch):
        decoded = []
        monkeypatch.setattr(module, "decode", self.counting(module.decode, decoded))
        generate_corpus(replace(PLAN, prompts=8), opened, tmp_path)
        paths = generate_corpus(PLAN, opened, tmp_path)
        assert decoded == [8, 8, 4]
        assert [path.read_bytes() for path in paths] == [(shards / path.name).read_bytes() for path in paths]

    @staticmethod
    def counting(decode, decoded: list[int]):
        """`decode` that notes how many rows it is given."""

        def counted(target, requests, slots):
            decoded.append(len(requests))
            return decode(target, requests, slots=slots)

        return counted

    def test_progress_counts_new_tokens_and_those_of_an_earlier_run(self, opened, tmp_path, capsys):
        plan = replace(PLAN, prompts=3, max_new_tokens=2)
        generate_corpus(plan, opened, tmp_path, progress=True)
        first = capsys.readouterr().err
        generate_corpus(plan, opened, tmp_path, progress=True)
        again = capsys.readouterr().err
        new = join_corpus(plan, opened, tmp_path, tmp_path / "joined").origin["counts"]["all"]["new_tokens"]
        assert f"{new} tokens" in first.split("\r")[-1] and "shard 1 of 1" in first
        assert f"{new} tokens" in again.split("\r")[-1]


class TestTheSplit:
    def test_flags_say_who_is_held_out_and_why(self, scripted, tmp_path):
        count = 130
        corpus = scripted(tmp_path, *([n % 251, n // 251, 7] for n in range(count)))
        assert corpus.prompts.tolist() == list(range(count))
        assert corpus.held_out.tolist() == [index for index in range(count) if is_held_out(index)]
        assert sorted([*corpus.training, *corpus.held_out]) == list(range(count))
        new = [index for index in range(count) if turn(index)[0].name in HELD_OUT]
        assert np.flatnonzero(corpus.flagged(OF_NEW_TEMPLATE)).tolist() == new
        assert set(new) < set(corpus.held_out)
        assert corpus.flagged(IS_ENDED).all()
        asked = {tuple(prompt) for prompt, _ in corpus.rows(corpus.training)}
        assert len(asked) == len(corpus.training)
        assert not asked & {tuple(prompt) for prompt, _ in corpus.rows(corpus.held_out)}


class TestWhatTheTargetAsked:
    """Its questions at 20 places, two of three places in use."""

    PLACES = tuple(place for place in range(PLAN.prompts) if place % 3)
    ANSWERS = tuple((place, 200) for place in range(PLAN.prompts))

    @pytest.fixture(autouse=True)
    def scripted_questions(self, asks):
        asks(lambda place: place in self.PLACES)

    def test_rows_are_answers_to_its_questions_at_their_places(self, opened, tmp_path):
        generate_corpus(ASKED, opened, tmp_path)
        corpus = join_corpus(ASKED, opened, tmp_path, tmp_path / "joined")
        questions = {each.place: each for each in Asked(opened, PLAN.prompts, PLAN.seed).questions(range(PLAN.prompts))}
        assert tuple(questions) == self.PLACES
        assert len(corpus) + sum(corpus.origin["dropped"].values()) == len(self.PLACES)
        for row, place in enumerate(corpus.prompts.tolist()):
            question = questions[place]
            options = Options(
                0.0 if question.greedy else 1.0, max_new_tokens=8, eos=opened.tokenizer.eos_ids, seed=PLAN.seed
            )
            [alone] = generate(opened.target, [Request(question.tokens, options, key=place)])
            prompt, continuation = corpus.row(row)
            assert (tuple(prompt), tuple(continuation)) == (question.tokens, alone.tokens)
            expected = IS_GREEDY * question.greedy | IS_HELD_OUT * question.held_out
            assert corpus.flags[row] == expected | IS_ENDED * (alone.finished == "eos")
        assert 0 < corpus.flagged(IS_GREEDY).sum() < len(corpus)

    @pytest.mark.parametrize("changes", [{"batch": 1}, {"chunk": 3}, {"chunk": 20}])
    def test_neither_batch_nor_chunk_changes_it(self, opened, tmp_path, changes):
        files = []
        for name, plan in (("one", ASKED), ("two", replace(ASKED, **changes))):
            generate_corpus(plan, opened, tmp_path / name)
            files.append(join_corpus(plan, opened, tmp_path / name, tmp_path / f"{name}-joined"))
        assert files[0].fingerprint == files[1].fingerprint
        assert np.array_equal(files[0].prompts, files[1].prompts)

    def test_a_shard_without_a_question_is_empty(self, opened, tmp_path, asks, answered):
        asks(lambda place: place >= 16)
        answered(self.ANSWERS)
        paths = generate_corpus(ASKED, opened, tmp_path)
        assert [len(read_corpus(path, {"format": SHARD})) for path in paths] == [0, 0, 4]
        before = [path.stat().st_mtime_ns for path in paths]
        # It is done too: what is there is not made again.
        assert generate_corpus(ASKED, opened, tmp_path) == paths
        assert [path.stat().st_mtime_ns for path in paths] == before
        corpus = join_corpus(ASKED, opened, tmp_path, tmp_path / "joined")
        assert corpus.prompts.tolist() == [16, 17, 18, 19]

    def test_without_any_question_there_is_no_corpus(self, opened, tmp_path, asks):
        asks(lambda place: False)
        generate_corpus(ASKED, opened, tmp_path)
        with pytest.raises(
            CorpusError, match="joined: nothing was asked, or all answers repeat earlier ones; plan more"
        ):
            join_corpus(ASKED, opened, tmp_path, tmp_path / "joined")
        assert not (tmp_path / "joined").exists()

    def test_shards_of_another_source(self, opened, shards):
        with pytest.raises(CorpusError, match=r"expected .*'source': 'asked'.*choose another, or an empty folder"):
            generate_corpus(ASKED, opened, shards)

    def test_the_header_says_so(self, opened, tmp_path, answered):
        answered(self.ANSWERS)
        generate_corpus(ASKED, opened, tmp_path)
        origin = join_corpus(ASKED, opened, tmp_path, tmp_path / "joined").origin
        assert origin["source"] == origin["plan"]["source"] == "asked"
        assert origin["questions"] == Asked.version() and origin["split"].startswith(Asked.split)


class TestParts:
    """A later part repeats nothing of an earlier one."""

    START = tuple(range(10, 10 + SAME_START))

    def test_what_repeats_an_earlier_part_is_left_out(self, opened, scripted, tmp_path):
        first = scripted(tmp_path / "first", (1, 2), (*self.START, 3), (7,))
        second = scripted(tmp_path / "second", (8,), (5, 5))
        rows = [(9,), (1, 2), (*self.START, 4), (1,), (8,), (*self.START, 3), (9,), (7, 7)]
        alone = scripted(tmp_path / "third", *rows)
        assert alone.prompts.tolist() == [0, 1, 2, 3, 4, 7]
        assert alone.origin["dropped"] == {"equal": 1, "same_start": 1}
        plan, path = replace(PLAN, prompts=len(rows)), tmp_path / "again"
        part = join_corpus(plan, opened, tmp_path / "third", path, [first, second])
        assert part.prompts.tolist() == [0, 3, 7] and load_corpus(path).fingerprint == part.fingerprint
        assert [tuple(each) for _, each in part.rows(range(3))] == [(9,), (1,), (7, 7)]
        assert part.origin["dropped"] == {"equal": 4, "same_start": 1}
        assert part.origin["counts"] == counts(part)

    def test_one_without_anything_new_is_none(self, opened, scripted, tmp_path):
        first = scripted(tmp_path, (1, 2), (3,))
        with pytest.raises(CorpusError, match=r"no row is left for .*again"):
            join_corpus(replace(PLAN, prompts=2), opened, tmp_path, tmp_path / "again", [first])
        assert not (tmp_path / "again").exists()


class TestRepetition:
    START = tuple(range(10, 10 + SAME_START))

    def test_equal_continuations_and_equal_starts_are_kept_once(self, scripted, tmp_path):
        rows = [(1, 2), (*self.START, 3), (1, 2), (*self.START, 4), (*self.START, 3), (1,), (1, 2, 3), (9,)]
        corpus = scripted(tmp_path, *rows)
        assert [tuple(each) for _, each in corpus.rows(range(len(corpus)))] == [rows[i] for i in (0, 1, 5, 6, 7)]
        assert corpus.prompts.tolist() == [0, 1, 5, 6, 7]
        assert corpus.origin["dropped"] == {"equal": 2, "same_start": 1}

    def test_one_token_less_in_common_is_no_repetition(self, scripted, tmp_path):
        corpus = scripted(tmp_path, self.START, (*self.START[:-1], 1, 2))
        assert len(corpus) == 2 and corpus.origin["dropped"] == {"equal": 0, "same_start": 0}

    def test_rows_of_other_shards_count_too(self, scripted, tmp_path):
        corpus = scripted(tmp_path, *([5 + n] for n in range(PLAN.chunk)), [5], [99])
        assert corpus.prompts.tolist() == [*range(PLAN.chunk), PLAN.chunk + 1]


class TestTheFile:
    def test_the_header_says_where_it_comes_from(self, opened, corpus):
        origin = corpus.origin
        assert origin["format"] == CORPUS
        assert origin["target"] == opened.checkpoint.name and origin["weights"] == opened.checkpoint.fingerprint
        plan = {"prompts": 20, "max_new_tokens": 8, "batch": 4, "seed": 3, "chunk": 8, "source": "templates"}
        assert origin["plan"] == plan and origin["source"] == "templates"
        assert origin["questions"] == version() and origin["engine"] == "numba cpu float32"
        assert origin["counts"] == counts(corpus)
        assert all(name in origin["split"] for name in HELD_OUT)

    def test_joining_again_gives_the_same_bytes(self, opened, shards, corpus, tmp_path):
        for name in ("one", "two"):
            join_corpus(PLAN, opened, shards, tmp_path / name)
        assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
        assert load_corpus(tmp_path / "one").fingerprint == corpus.fingerprint

    def test_it_is_known_as_its_plans(self, opened, shards, corpus, tmp_path):
        path = tmp_path / "it"
        assert written(PLAN, opened, path) is None
        join_corpus(PLAN, opened, shards, path)
        for plan in (PLAN, replace(PLAN, batch=1, chunk=5)):
            found = written(plan, opened, path)
            assert found is not None and found.fingerprint == corpus.fingerprint

    @pytest.mark.parametrize(
        "changes", [{"seed": 4}, {"max_new_tokens": 9}, {"prompts": 19}, {"prompts": 21}, {"source": "asked"}]
    )
    def test_of_another_plan_it_is_not(self, opened, shards, tmp_path, changes):
        join_corpus(PLAN, opened, shards, tmp_path / "it")
        assert written(replace(PLAN, **changes), opened, tmp_path / "it") is None

    def test_nor_of_another_target(self, opened, shards, tmp_path):
        join_corpus(PLAN, opened, shards, tmp_path / "it")
        for name in ("name", "fingerprint"):
            other = replace(opened, checkpoint=replace(opened.checkpoint, **{name: "0"}))
            assert written(PLAN, other, tmp_path / "it") is None
        elsewhere = SimpleNamespace(vocabulary=259, placement=Placement("torch"))
        assert written(PLAN, replace(opened, target=elsewhere), tmp_path / "it") is None

    def test_nor_of_other_questions(self, opened, shards, tmp_path, monkeypatch):
        join_corpus(PLAN, opened, shards, tmp_path / "it")
        monkeypatch.setattr(Templates, "version", staticmethod(lambda: "other"))
        assert written(PLAN, opened, tmp_path / "it") is None

    def test_one_that_cannot_be_read_is_no_reason_to_overwrite_it(self, opened, shards, tmp_path):
        with pytest.raises(CorpusError, match=f"{SHARD}.*expected .*{CORPUS}"):
            written(PLAN, opened, shards / "000000-000008.safetensors")
        (tmp_path / "it").write_bytes(b"none")
        with pytest.raises(CorpusError, match="truncated or damaged"):
            written(PLAN, opened, tmp_path / "it")


class TestRefusals:
    def test_a_vocabulary_past_16_bits(self, tmp_path):
        large = SimpleNamespace(target=SimpleNamespace(vocabulary=65537, placement=Placement()))
        with pytest.raises(CorpusError, match="65537 tokens: expected 65536 at most"):
            generate_corpus(PLAN, large, tmp_path)

    @pytest.mark.parametrize("changes", [{"seed": 4}, {"max_new_tokens": 9}])
    def test_shards_of_another_plan(self, opened, shards, tmp_path, changes):
        other = replace(PLAN, **changes)
        for make in (generate_corpus, lambda *given: join_corpus(*given, tmp_path / "joined")):
            with pytest.raises(CorpusError, match=r"000008\.safetensors is of .* choose another, or an empty fold"):
                make(other, opened, shards)

    def test_shards_of_other_weights(self, opened, shards):
        other = replace(opened, checkpoint=replace(opened.checkpoint, fingerprint="0"))
        with pytest.raises(CorpusError, match=r"expected .*'weights': '0'"):
            generate_corpus(PLAN, other, shards)

    def test_a_missing_shard(self, opened, shards, tmp_path):
        with pytest.raises(CorpusError, match=r"000016-000024\.safetensors is absent: let generate_corpus"):
            join_corpus(replace(PLAN, prompts=24), opened, shards, tmp_path / "x")

    def test_a_file_that_is_too_large_to_commit(self, opened, shards, tmp_path, monkeypatch):
        monkeypatch.setattr(corpus_module, "LARGEST_FILE", 1000)
        with pytest.raises(CorpusError, match=r"would be \d+ bytes: expected 1000 at most; plan fewer prompts"):
            join_corpus(PLAN, opened, shards, tmp_path / "joined.safetensors")
        assert not list(tmp_path.iterdir())

    def test_a_shard_is_no_corpus(self, shards):
        with pytest.raises(CorpusError, match=f"{SHARD}.*expected .*{CORPUS}"):
            load_corpus(shards / "000000-000008.safetensors")


class TestThroughput:
    @pytest.mark.parametrize("source", SOURCES)
    def test_every_batch_decodes_all_prompts_and_the_seconds_are_those_of_its_rounds(self, opened, asks, source):
        asks(lambda place: place != 2)
        plan = replace(PLAN, prompts=6, source=source)
        rows = throughput_by_batch(opened, (1, 3, 6), plan)
        assert [batch for batch, _, _ in rows] == [1, 3, 6]
        questions = SOURCES[source](opened, 6, plan.seed).questions(range(6))
        eos = opened.tokenizer.eos_ids
        requests = [
            Request(
                each.tokens, Options(0.0 if each.greedy else 1.0, max_new_tokens=8, seed=3, eos=eos), key=each.place
            )
            for each in questions
        ]
        new = sum(len(output.tokens) for output in generate(opened.target, requests))
        assert {tokens for _, tokens, _ in rows} == {new}
        assert all(seconds > 0 for _, _, seconds in rows)


class TestThePlans:
    def test_a_part_a_source_in_their_order(self):
        for parts in PLANS.values():
            assert [plan.source for plan in parts] == list(SOURCES)

    def test_the_full_ones_fit_their_files(self):
        assert sum(plan.prompts * 110 for plan in PLANS["full"]) > 900_000  # so many new tokens a prompt came out
        for plan in PLANS["full"]:
            # 70 tokens of prompt a row and every continuation at its longest; packed to a third, to be safe to two
            # fifths.
            assert plan.prompts * (0.4 * 2 * (70 + plan.max_new_tokens) + 17) < LARGEST_FILE

    def test_the_quick_ones_are_toys(self):
        assert sum(plan.prompts * plan.max_new_tokens for plan in PLANS["quick"]) < 1000


def test_an_unknown_source_is_refused_when_the_plan_is_made():
    with pytest.raises(CorpusError, match="source 'books' of questions: expected one of templates, asked"):
        CorpusPlan(4, 8, batch=2, seed=1, source="books")
