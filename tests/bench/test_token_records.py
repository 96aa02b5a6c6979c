"""Token records of a tiny model: the design, its reproducibility, and going on after an interruption."""

from __future__ import annotations

import zlib
from collections import Counter
from dataclasses import replace

import pytest

from specdec_core.bench import token_records
from specdec_core.bench.token_records import AR, AR_AGAIN, LOOKUP, MAIN, METHODS, SD, SETTINGS, TokenSource
from specdec_core.decode import generate
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.records import is_current, read_records
from specdec_core.evidence.token_records import TOKENS
from specdec_core.forensics.scoring import Scorer
from specdec_core.models.rounding import rounded
from specdec_core.pairs import open_target
from specdec_core.placement import Placement
from specdec_core.prompts import load_prompts
from specdec_core.rows import Request
from tests.bench.conftest import small_design

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTH, DRAWN_AGAIN = 8, 24


@pytest.fixture
def small(monkeypatch, short_prompts):
    small_design(monkeypatch, short_prompts, LENGTH)


@pytest.fixture
def source(small, tiny_opened) -> TokenSource:
    return TokenSource(tiny_opened)


def drawn(source, method, repeat=0, setting=MAIN, scored=True):
    return list(source.draw(setting, method, repeat, scored))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_method_draws_whole_sequences_of_every_prompt(source, tiny_opened, method, setting):
    rows = [TOKENS.validated(row) for row in drawn(source, method, setting=setting)]
    assert len(rows) == len({row["prompt_id"] for row in rows}) == 5
    for row in rows:
        assert len(row["tokens"]) == LENGTH and not set(row["tokens"]) & set(tiny_opened.tokenizer.eos_ids)
        assert (row["temperature"], row["top_p"]) == (setting.temperature, setting.top_p)
        assert all(0 <= value <= 1 for value in row["pit"])
        for place, ending in enumerate(row["endings"]):
            assert place == 0 or (row["offsets"][place] == "0") == (row["endings"][place - 1] != "a")
            assert ending in ("b" if method in (AR, AR_AGAIN) else "abr")


def test_drafts_are_accepted_and_rejected(source):
    endings = Counter("".join(row["endings"] for repeat in range(3) for row in drawn(source, SD, repeat)))
    assert endings["a"] > 5 and endings["r"] > 5


def test_a_seed_gives_the_same_tokens_and_repeats_and_methods_give_others(source):
    def tokens(*what):
        return [row["tokens"] for row in drawn(source, *what, scored=False)]

    assert tokens(SD, 0) == tokens(SD, 0)
    others = [tokens(AR, 0), tokens(AR, 1), tokens(AR_AGAIN, 0), tokens(SD, 0), tokens(LOOKUP, 0)]
    assert len({str(one) for one in others}) == 5


def test_scores_are_those_of_the_pair(source, tiny_opened):
    coarse = tiny_opened.target.placed(tiny_opened.target.placement)
    coarse = type(coarse)(rounded(tiny_opened.checkpoint, token_records.BITS, 16), coarse.placement)
    row = drawn(source, SD)[0]
    prompt = tuple(source._prompts[row["prompt_id"]])
    options = MAIN.options(tiny_opened.tokenizer.eos_ids)
    found = Scorer(tiny_opened.target, coarse).score(prompt, row["tokens"], options, 0)
    assert found.mass == pytest.approx(row["mass"], abs=1e-5) and found.ratio == pytest.approx(row["ratio"], rel=1e-3)
    assert "".join("01"[int(value)] for value in found.in_set) == row["in_set"]
    assert drawn(source, AR, scored=False)[0]["pit"] is None


def test_files_that_are_there_are_left_and_the_rest_is_drawn(small, tiny_opened, layout, monkeypatch):
    token_records.record_tokens(tiny_opened, "full", layout, progress=False)
    folder = layout.records("full")
    names = [f"01_tokens_{setting.name}.jsonl" for setting in SETTINGS]
    assert sorted(path.name for path in folder.iterdir()) == sorted(names)
    rows = read_records(folder / names[0], TOKENS)[1]
    counts = Counter(row["method"] for row in rows)
    assert counts == {AR: 30, AR_AGAIN: 30, SD: 30, LOOKUP: 5}
    assert all(row["pit"] is not None for row in rows)  # the main setting's AR tokens are scored too
    assert {row["method"] for row in read_records(folder / names[1], TOKENS)[1] if row["pit"] is None} == {AR, AR_AGAIN}

    before = {name: (folder / name).read_bytes() for name in names}
    (folder / names[2]).unlink()
    seen = []
    draw = TokenSource.draw
    monkeypatch.setattr(
        TokenSource, "draw", lambda self, setting, *rest: seen.append(setting) or draw(self, setting, *rest)
    )
    token_records.record_tokens(tiny_opened, "full", layout, progress=False)
    assert set(seen) == {SETTINGS[2]}
    assert {name: (folder / name).read_bytes() == before[name] for name in names if name != names[2]}
    again = read_records(folder / names[2], TOKENS)[1]
    assert [row["tokens"] for row in again][:3]


def test_a_file_of_other_code_is_drawn_again(small, tiny_opened, layout):
    token_records.record_tokens(tiny_opened, "full", layout, progress=False)
    path = layout.records("full") / "01_tokens_t1.jsonl"
    assert is_current(path, TOKENS, layout)
    source = layout.package / "forensics" / "scoring.py"
    source.write_text(source.read_text() + "\nX = 1\n")
    assert not is_current(path, TOKENS, layout)
    assert not is_current(path.with_name("absent.jsonl"), TOKENS, layout)


def test_committed_sequences_are_drawn_again_on_any_cpu():
    """No width of vectors changes a bit, so the first and the last prompt's tokens come out as they were recorded."""
    paths = sorted(Layout().kept_records.glob(f"*/{token_records.file_name(MAIN)}.jsonl"))
    opened = open_target("smollm2-135m-instruct", Placement("numba"))
    prompts = {prompt.id: tuple(opened.tokenizer.chat(prompt.messages)) for prompt in load_prompts()}
    options = replace(MAIN.options(opened.tokenizer.eos_ids, DRAWN_AGAIN), seed=zlib.crc32(f"{AR} 0".encode()))
    assert paths
    for path in paths:
        rows = [row for row in read_records(path, TOKENS)[1] if (row["method"], row["repeat"]) == (AR, 0)]
        keys = (0, len(rows) - 1)
        found = generate(opened.target, [Request(prompts[rows[key]["prompt_id"]], options, None, key) for key in keys])
        assert [list(each.tokens) for each in found] == [rows[key]["tokens"][:DRAWN_AGAIN] for key in keys]
