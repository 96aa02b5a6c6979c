"""A corpus by a tiny model: the same text however it is made, joined without repetition, refused if it is not right."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file

from specdec_core.decode import generate
from specdec_core.evidence.layout import Layout
from specdec_core.kernels.compiled import code_folder
from specdec_core.pairs import Opened, open_target
from specdec_core.placement import Placement
from specdec_core.prompts import DOMAINS
from specdec_core.protocol import Round, RowRound
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.training import corpus as module
from specdec_core.training import corpus_run
from specdec_core.training.corpus import (
    CORPUS,
    FLAGS,
    IS_ENDED,
    IS_GREEDY,
    IS_HELD_OUT,
    LARGEST_FILE,
    OF_NEW_TEMPLATE,
    PLANS,
    SAME_START,
    SHARD,
    Corpus,
    CorpusError,
    CorpusPlan,
    corpus_path,
    generate_corpus,
    join_corpus,
    load_corpus,
    only_rows,
    throughput_by_batch,
)
from specdec_core.training.templates import HELD_OUT, is_held_out, sample, turn, version
from tests.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = CorpusPlan(prompts=20, max_new_tokens=8, batch=4, seed=3, chunk=8)


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
def scripted(monkeypatch, opened):
    """Make a corpus of given continuations, one a prompt, as if the target had decoded them."""

    def make(folder, *continuations) -> Corpus:
        plan = replace(PLAN, prompts=len(continuations))

        def decode(target, requests, slots):
            for number, request in enumerate(requests):
                emitted = tuple(continuations[request.key])
                yield Round(0, (RowRound(number, 0, 1, (), 0, "bonus", emitted, "eos"),), 1)

        monkeypatch.setattr(module, "decode", decode)
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
    def test_half_is_greedy_in_every_domain_and_template(self, opened):
        plan = replace(PLAN, prompts=2 * 123)
        prompts = [SimpleNamespace(messages=[{"role": "user", "content": "x"}])] * plan.prompts
        requests = module._requests(plan, opened, prompts, 0)
        assert {request.options.temperature for request in requests} == {0.0, 1.0}
        for domain, name in enumerate(DOMAINS):
            greedy = [request.options.greedy for request in requests[domain :: len(DOMAINS)]]
            assert 0.45 < np.mean(greedy) < 0.55, name
        both = Counter((turn(i)[0].name, requests[i].options.greedy) for i in range(2 * 120))
        assert set(both.values()) <= {1, 2} and len(both) >= 2 * 120 - 2

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
        assert origin["plan"] == {"prompts": 20, "max_new_tokens": 8, "batch": 4, "seed": 3, "chunk": 8}
        assert origin["templates"] == version() and origin["engine"] == "numba cpu float32"
        assert all(name in origin["split"] for name in HELD_OUT)

    def test_counts_are_those_of_the_rows(self, corpus):
        new = [len(continuation) for _, continuation in corpus.rows(range(len(corpus)))]
        assert corpus.origin["counts"]["all"] == {"rows": len(corpus), "new_tokens": sum(new)}
        for name, flag in zip(("greedy", "held_out", "of_new_template", "ended"), FLAGS, strict=True):
            rows = np.flatnonzero(corpus.flags & flag)
            expected = {"rows": len(rows), "new_tokens": sum(new[row] for row in rows)}
            assert corpus.origin["counts"][name] == expected, name
        assert 0 < corpus.origin["counts"]["greedy"]["rows"] < len(corpus)

    def test_joining_again_gives_the_same_bytes(self, opened, shards, corpus, tmp_path):
        for name in ("one", "two"):
            join_corpus(PLAN, opened, shards, tmp_path / name)
        assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
        assert load_corpus(tmp_path / "one").fingerprint == corpus.fingerprint

    def test_rows_that_are_not_there_are_refused(self, corpus):
        for row in (-1, len(corpus)):
            with pytest.raises(IndexError, match=f"row {row}: expected 0…"):
                corpus.row(row)

    def test_the_fingerprint_sees_tokens_borders_and_flags(self, corpus):
        changed = [
            replace(corpus, tokens=np.roll(corpus.tokens, 1)),
            replace(corpus, prompt_lengths=corpus.prompt_lengths + 1),
            replace(corpus, offsets=corpus.offsets + 1),
            replace(corpus, flags=corpus.flags ^ IS_HELD_OUT),
        ]
        assert len({each.fingerprint for each in [corpus, *changed]}) == 5

    def test_its_place_is_named_after_the_target(self, opened):
        named = replace(opened, checkpoint=replace(opened.checkpoint, name="hub:org/name"))
        assert corpus_path(named).parts[-3:] == ("data", "corpus", "hub-org-name.safetensors")


class TestSomeRows:
    def test_they_are_those_of_the_whole_in_the_order_asked_for(self, corpus):
        rows = np.array([5, 0, 7])
        part = only_rows(corpus, rows)
        assert len(part) == 3 and part.offsets[-1] == len(part.tokens)
        for place, row in enumerate(rows):
            for ours, theirs in zip(part.row(place), corpus.row(row), strict=True):
                assert np.array_equal(ours, theirs)
            assert part.flags[place] == corpus.flags[row] and part.prompts[place] == corpus.prompts[row]
        types = {name: getattr(part, name).dtype.name for name in module._ARRAYS}
        assert types == module._ARRAYS | {"tokens": "uint16"} and module._fault(part) is None

    def test_counts_are_their_own_and_everything_else_is_the_wholes(self, corpus):
        part = only_rows(corpus, range(4))
        written = sum(len(continuation) for _, continuation in part.rows(range(4)))
        assert part.origin["counts"]["all"] == {"rows": 4, "new_tokens": written}
        assert part.origin["counts"]["greedy"]["rows"] == part.flagged(IS_GREEDY).sum()
        assert {**part.origin, "counts": None} == {**corpus.origin, "counts": None}
        assert corpus.origin["counts"]["all"]["rows"] == len(corpus)

    def test_all_of_them_are_the_same_text(self, corpus):
        assert only_rows(corpus, range(len(corpus))).fingerprint == corpus.fingerprint
        assert only_rows(corpus, range(len(corpus) - 1)).fingerprint != corpus.fingerprint

    def test_one_that_is_not_there(self, corpus):
        with pytest.raises(IndexError, match=f"row {len(corpus)}: expected"):
            only_rows(corpus, [0, len(corpus)])


class TestTheRun:
    @pytest.fixture
    def written(self, monkeypatch, tmp_path, opened):
        """Write the corpus of a profile, by its small plan, where nothing else lies."""
        code_folder()  # compiled code stays in the cache that everyone shares
        monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
        monkeypatch.setattr(module, "FOLDER", tmp_path / "committed")
        monkeypatch.setattr(corpus_run, "PLANS", {"quick": replace(PLAN, prompts=10), "full": PLAN})
        monkeypatch.setattr(corpus_run, "open_target", lambda name: opened)
        return lambda profile: corpus_run.write_corpus(profile, opened.name, layout=Layout(tmp_path))

    def test_the_full_profile_writes_what_is_committed(self, written, tmp_path, opened, corpus):
        path = written("full")
        assert path == tmp_path / "committed" / f"{opened.checkpoint.name}.safetensors"
        assert load_corpus(path).fingerprint == corpus.fingerprint

    def test_the_quick_one_a_small_corpus_under_build(self, written, tmp_path, opened):
        path = written("quick")
        assert path == tmp_path / "build" / f"corpus-{opened.checkpoint.name}.safetensors"
        assert load_corpus(path).origin["plan"]["prompts"] == 10
        assert not (tmp_path / "committed").exists()

    def test_a_second_run_decodes_nothing(self, written, monkeypatch):
        before = written("quick").read_bytes()
        monkeypatch.setattr(module, "decode", None)
        assert written("quick").read_bytes() == before

    def test_an_unknown_profile(self, written):
        with pytest.raises(ValueError, match="unknown profile 'fast': expected one of quick, full"):
            written("fast")


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
        monkeypatch.setattr(module, "LARGEST_FILE", 1000)
        with pytest.raises(CorpusError, match=r"would be \d+ bytes: expected 1000 at most; plan fewer prompts"):
            join_corpus(PLAN, opened, shards, tmp_path / "joined.safetensors")
        assert not list(tmp_path.iterdir())

    def test_a_shard_is_no_corpus(self, shards):
        with pytest.raises(CorpusError, match=f"{SHARD}.*expected .*{CORPUS}"):
            load_corpus(shards / "000000-000008.safetensors")

    def test_a_file_that_is_absent_damaged_or_of_another_kind(self, tmp_path, corpus):
        with pytest.raises(CorpusError, match="is absent"):
            load_corpus(tmp_path / "none.safetensors")
        (tmp_path / "damaged").write_bytes(b"\x10\0\0\0\0\0\0\0{")
        with pytest.raises(CorpusError, match="damaged"):
            load_corpus(tmp_path / "damaged")
        save_file({"tokens": corpus.tokens}, tmp_path / "foreign")
        with pytest.raises(CorpusError, match=r"is of {'format': None}"):
            load_corpus(tmp_path / "foreign")

    @pytest.mark.parametrize(
        ("name", "change", "message"),
        [
            ("tokens", lambda a: a[:-1], "do not lead from 0 to its"),
            ("flags", lambda a: a.astype(np.int32), "'flags': 'int32'"),
            ("tokens", lambda a: a + np.uint16(259), "outside the target's vocabulary of 259"),
            ("offsets", lambda a: a[:-1], "disagree on the number of rows"),
            ("offsets", lambda a: np.where(np.arange(len(a)) == 0, 1, a), "do not lead from 0"),
            ("offsets", lambda a: np.where(np.arange(len(a)) == 2, a[1] - 1, a), "lacks a prompt or a continuation"),
            ("prompt_lengths", lambda a: a * 0, "lacks a prompt or a continuation"),
            ("prompt_lengths", lambda a: a + np.int32(8), "lacks a prompt or a continuation"),
            ("prompts", lambda a: a[:-1], "disagree on the number of rows"),
            ("flags", lambda a: a + np.uint8(16), "expected the sum of some of"),
        ],
    )
    def test_arrays_that_do_not_fit_together(self, corpus, tmp_path, name, change, message):
        arrays = {each: getattr(corpus, each) for each in module._ARRAYS}

        def save(values, path):
            stored = values | {"tokens": module._compressed(values["tokens"])}
            save_file(stored, path, metadata={"corpus": json.dumps(dict(corpus.origin))})

        save(arrays, tmp_path / "whole")
        assert load_corpus(tmp_path / "whole").fingerprint == corpus.fingerprint
        save(arrays | {name: np.ascontiguousarray(change(arrays[name]))}, tmp_path / "changed")
        with pytest.raises(CorpusError, match=message):
            load_corpus(tmp_path / "changed")

    @pytest.mark.parametrize("change", [lambda a: a[:-9], lambda a: a[::-1], lambda a: a[:0]])
    def test_tokens_that_cannot_be_unpacked(self, corpus, tmp_path, change):
        arrays = {each: getattr(corpus, each) for each in module._ARRAYS}
        arrays["tokens"] = np.ascontiguousarray(change(module._compressed(corpus.tokens)))
        save_file(arrays, tmp_path / "cut", metadata={"corpus": json.dumps(dict(corpus.origin))})
        with pytest.raises(CorpusError, match=r"is damaged in its tokens \(.*\); remove it and make it again"):
            load_corpus(tmp_path / "cut")

    def test_tokens_are_packed(self, corpus, tmp_path):
        assert module._compressed(np.tile(corpus.tokens, 50)).nbytes < 10 * corpus.tokens.nbytes


class TestThroughput:
    def test_every_batch_decodes_all_prompts_and_the_seconds_are_those_of_its_rounds(self, opened):
        plan = replace(PLAN, prompts=6)
        rows = throughput_by_batch(opened, (1, 3, 6), plan)
        assert [batch for batch, _, _ in rows] == [1, 3, 6]
        requests = module._requests(plan, opened, sample(6, plan.seed), 0)
        new = sum(len(output.tokens) for output in generate(opened.target, requests))
        assert {tokens for _, tokens, _ in rows} == {new}
        assert all(seconds > 0 for _, _, seconds in rows)


def test_the_full_plan_fits_its_file_and_the_quick_one_is_a_toy():
    full, quick = PLANS["full"], PLANS["quick"]
    assert full.prompts * 110 > 330_000  # so many new tokens a prompt came out
    # 70 tokens of prompt a row and every continuation at its longest; packed to a third, to be safe to two fifths.
    assert full.prompts * (0.4 * 2 * (70 + full.max_new_tokens) + 17) < LARGEST_FILE
    assert quick.prompts * quick.max_new_tokens < 1000
