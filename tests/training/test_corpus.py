"""A corpus and its file: rows in and rows out, parts made one, refused if anything is not right."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save_file

from specdec_core.training import corpus as module
from specdec_core.training.corpus import (
    CORPUS,
    FLAGS,
    IS_ENDED,
    IS_GREEDY,
    IS_HELD_OUT,
    SHARD,
    Corpus,
    CorpusError,
    committed_corpus,
    corpus_path,
    counts,
    joined,
    load_corpus,
    only_rows,
    packed,
    read_corpus,
    save_corpus,
)
from specdec_core.training.questions import SOURCES

ORIGIN = {"format": CORPUS, "target": "tiny", "weights": "abc", "vocabulary": 259, "source": "templates"}


def random_rows(seed: int, rows: int = 12, **origin: Any) -> Corpus:
    """Rows of 1…9 tokens of prompt and 1…9 of continuation; the first tokens and flags are the largest there are."""
    random = np.random.default_rng(seed)
    entries = []
    for row in range(rows):
        prompt, new = random.integers(1, 10, 2)
        tokens = random.integers(0, 259, prompt + new)
        flags = int(random.integers(0, 16))
        if not row:
            tokens[0], flags = 258, sum(FLAGS)
        entries.append((tokens, int(prompt), flags, 2 * row))
    part = packed(entries, ORIGIN | origin)
    return replace(part, origin={**part.origin, "counts": counts(part)})


def saved(corpus: Corpus, path: Path) -> Corpus:
    save_corpus(corpus, path)
    return load_corpus(path)


@pytest.fixture
def corpus(tmp_path_factory) -> Corpus:
    return saved(random_rows(1), tmp_path_factory.mktemp("corpus") / "tiny.safetensors")


def assert_same_rows(ours: Corpus, theirs: Corpus) -> None:
    assert ours.fingerprint == theirs.fingerprint and np.array_equal(ours.prompts, theirs.prompts)


class TestRows:
    def test_each_is_what_was_put_in(self):
        entries = [(np.array([9, 8, 7]), 2, IS_GREEDY, 4), (np.array([65535, 0]), 1, IS_HELD_OUT | IS_ENDED, 6)]
        corpus = packed(entries, {})
        assert [[part.tolist() for part in row] for row in corpus.rows([1, 0])] == [[[65535], [0]], [[9, 8], [7]]]
        assert corpus.sequence(1).tolist() == [65535, 0] and corpus.sequence(1).dtype == np.int64
        assert corpus.prompts.tolist() == [4, 6] and corpus.training.tolist() == [0]
        assert corpus.held_out.tolist() == [1] and corpus.flagged(IS_ENDED).tolist() == [False, True]

    def test_those_to_train_on_and_those_held_out_are_all(self, corpus):
        assert sorted([*corpus.training, *corpus.held_out]) == list(range(len(corpus)))
        assert 0 < len(corpus.held_out) < len(corpus)
        assert (corpus.flags[corpus.held_out] & IS_HELD_OUT).all()

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


class TestTheFile:
    def test_it_gives_back_what_it_was_given(self, tmp_path):
        corpus = random_rows(2)
        loaded = saved(corpus, tmp_path / "it")
        assert_same_rows(loaded, corpus)
        assert loaded.origin == corpus.origin
        for name in ("tokens", "offsets", "prompt_lengths", "flags", "prompts"):
            assert getattr(loaded, name).dtype == getattr(corpus, name).dtype, name

    def test_equal_corpora_are_equal_files(self, corpus, tmp_path):
        save_corpus(corpus, tmp_path / "one")
        save_corpus(replace(corpus, origin=dict(reversed(corpus.origin.items()))), tmp_path / "two")
        assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()

    def test_a_shard_may_be_empty_and_a_corpus_may_not(self, tmp_path):
        save_corpus(packed([], ORIGIN | {"format": SHARD}), tmp_path / "shard")
        empty = read_corpus(tmp_path / "shard", {"format": SHARD})
        assert len(empty) == len(empty.tokens) == len(empty.prompts) == 0 and empty.offsets.tolist() == [0]
        assert counts(empty)["all"] == {"rows": 0, "new_tokens": 0}
        save_corpus(packed([], ORIGIN), tmp_path / "corpus")
        with pytest.raises(CorpusError, match="it has no rows: expected at least one; remove it"):
            load_corpus(tmp_path / "corpus")

    def test_an_empty_shard_has_no_tokens(self, tmp_path):
        save_corpus(replace(packed([], ORIGIN | {"format": SHARD}), tokens=np.zeros(1, np.uint16)), tmp_path / "it")
        with pytest.raises(CorpusError, match="do not lead from 0 to its 1 tokens"):
            read_corpus(tmp_path / "it", {"format": SHARD})
        save_corpus(replace(packed([], ORIGIN | {"format": SHARD}), offsets=np.zeros(0, np.int64)), tmp_path / "it")
        with pytest.raises(CorpusError, match="do not lead from 0 to its 0 tokens"):
            read_corpus(tmp_path / "it", {"format": SHARD})

    def test_its_place_is_named_after_target_and_source(self):
        named = SimpleNamespace(checkpoint=SimpleNamespace(name="hub:org/name"))
        assert corpus_path(named).parts[-3:] == ("data", "corpus", "hub-org-name-templates.safetensors")
        assert corpus_path(named, "asked") == corpus_path(named).with_name("hub-org-name-asked.safetensors")

    def test_one_that_is_too_large_to_commit_leaves_nothing(self, corpus, tmp_path, monkeypatch):
        monkeypatch.setattr(module, "LARGEST_FILE", 1000)
        with pytest.raises(CorpusError, match=r"would be \d+ bytes: expected 1000 at most; plan fewer prompts"):
            save_corpus(corpus, tmp_path / "it")
        assert not list(tmp_path.iterdir())
        monkeypatch.setattr(module, "LARGEST_FILE", 10_000)
        save_corpus(corpus, tmp_path / "it")

    def test_what_is_expected_of_it(self, corpus, tmp_path):
        save_corpus(corpus, tmp_path / "it")
        assert_same_rows(read_corpus(tmp_path / "it", {"target": "tiny", "vocabulary": 259}), corpus)
        for expected in ({"target": "other"}, {"target": "tiny", "seed": 1}):
            with pytest.raises(CorpusError, match=r"is of {'target': 'tiny'.*: expected {'target'.*; choose another"):
                read_corpus(tmp_path / "it", expected)
        with pytest.raises(CorpusError, match=f"{CORPUS}.*expected .*{SHARD}"):
            read_corpus(tmp_path / "it", {"format": SHARD})

    def test_counts_are_those_of_the_rows(self, corpus):
        new = [len(continuation) for _, continuation in corpus.rows(range(len(corpus)))]
        assert corpus.origin["counts"]["all"] == {"rows": len(corpus), "new_tokens": sum(new)}
        for name, flag in zip(("greedy", "held_out", "of_new_template", "ended"), FLAGS, strict=True):
            rows = np.flatnonzero(corpus.flags & flag)
            expected = {"rows": len(rows), "new_tokens": sum(new[row] for row in rows)}
            assert corpus.origin["counts"][name] == expected, name
        assert 0 < corpus.origin["counts"]["greedy"]["rows"] < len(corpus)


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


class TestJoined:
    @settings(max_examples=50)
    @given(st.lists(st.integers(0, 5), min_size=1, max_size=4), st.integers(0, 99))
    def test_the_rows_are_those_of_the_parts_in_their_order(self, lengths, seed):
        parts = [random_rows(seed + place, rows) for place, rows in enumerate(lengths)]
        whole = joined(parts)
        assert len(whole) == sum(lengths)
        row = 0
        for part in parts:
            for ours in range(len(part)):
                for one, other in zip(whole.row(row), part.row(ours), strict=True):
                    assert np.array_equal(one, other)
                assert whole.flags[row] == part.flags[ours] and whole.prompts[row] == part.prompts[ours]
                row += 1
        types = {name: getattr(whole, name).dtype for name in ("tokens", *module._ARRAYS)}
        assert types == {name: getattr(parts[0], name).dtype for name in types}

    def test_it_is_a_corpus_like_any_other(self, tmp_path):
        parts = [random_rows(1), random_rows(2)]
        whole = joined(parts)
        assert_same_rows(saved(whole, tmp_path / "it"), whole)
        assert whole.fingerprint != joined(parts[::-1]).fingerprint
        assert_same_rows(only_rows(whole, range(len(parts[0]))), parts[0])

    def test_counts_are_those_of_all_and_the_rest_is_the_firsts(self):
        parts = [random_rows(1), random_rows(2, source="asked")]
        origin = joined(parts).origin
        for name in origin["counts"]:
            for what in ("rows", "new_tokens"):
                assert origin["counts"][name][what] == sum(part.origin["counts"][name][what] for part in parts)
        assert {**origin, "counts": None} == {**parts[0].origin, "counts": None}

    def test_one_alone_is_as_it_was(self, corpus):
        assert_same_rows(joined([corpus]), corpus)
        assert joined([corpus]).origin == corpus.origin

    @pytest.mark.parametrize(("name", "other"), [("target", "other"), ("weights", "xyz"), ("vocabulary", 300)])
    @pytest.mark.parametrize("place", [1, 2])
    def test_parts_of_different_targets(self, name, other, place):
        parts = [random_rows(seed, **({name: other} if seed == place else {})) for seed in range(3)]
        message = f"corpora of {name} {ORIGIN[name]} and {other}: expected one target; make the second again"
        with pytest.raises(CorpusError, match=message):
            joined(parts)


class TestWhatIsCommitted:
    @pytest.fixture
    def opened(self, tmp_path, monkeypatch) -> Any:
        monkeypatch.setattr(module, "FOLDER", tmp_path)
        return SimpleNamespace(checkpoint=SimpleNamespace(name="tiny"))

    @pytest.fixture
    def commit(self, opened) -> Callable[..., Corpus]:
        return lambda source, seed, **origin: saved(random_rows(seed, **origin), corpus_path(opened, source))

    def test_the_answers_to_templates_come_first(self, opened, commit):
        asked, first = commit("asked", 2), commit("templates", 1)
        assert_same_rows(committed_corpus(opened), joined([first, asked]))

    def test_so_they_do_whatever_the_sources_order(self, opened, commit, monkeypatch):
        monkeypatch.setattr(module, "SOURCES", dict.fromkeys([*reversed(SOURCES), "more"]))
        asked, first, more = commit("asked", 2), commit("templates", 1), commit("more", 3)
        assert_same_rows(committed_corpus(opened), joined([first, asked, more]))

    def test_they_will_do_alone(self, opened, commit):
        first = commit("templates", 1)
        assert_same_rows(committed_corpus(opened), first)

    def test_files_of_others_are_left_alone(self, opened, commit):
        first = commit("templates", 1)
        for name in ("tiny-instruct-asked", "tiny-foreign", "tiny"):
            save_corpus(random_rows(2), corpus_path(opened).with_name(f"{name}.safetensors"))
        assert_same_rows(committed_corpus(opened), first)

    def test_without_them_there_is_no_corpus(self, opened, commit):
        commit("asked", 2)
        with pytest.raises(CorpusError, match=r"tiny-templates\.safetensors is absent: let generate_corpus"):
            committed_corpus(opened)

    def test_another_file_that_is_damaged_or_of_another_target(self, opened, commit):
        commit("templates", 1)
        commit("asked", 2, weights="xyz")
        with pytest.raises(CorpusError, match="corpora of weights abc and xyz"):
            committed_corpus(opened)
        corpus_path(opened, "asked").write_bytes(b"none")
        with pytest.raises(CorpusError, match=r"tiny-asked\.safetensors is truncated or damaged"):
            committed_corpus(opened)


class TestRefusals:
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
