"""The prompts: enough of them, all different, split once and for all."""

from __future__ import annotations

import difflib
import itertools
import json
import subprocess
import sys

import pytest

from specdec_core import prompts
from specdec_core.prompts import DOMAINS, held_out, load_prompts, spread, tuning


@pytest.fixture
def files(tmp_path, monkeypatch):
    """A prompt folder of our own: call it with a domain and its lines."""
    monkeypatch.setattr(prompts, "FOLDER", tmp_path)

    def write(domain: str, *lines: dict | str) -> None:
        text = "\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines)
        (tmp_path / f"{domain}.jsonl").write_text(text + "\n", encoding="utf-8")

    return write


GOOD = {"id": "math-01", "text": "What is 1 + 1?", "length": "short"}


class TestTheData:
    @pytest.mark.parametrize("domain", DOMAINS)
    def test_every_domain_has_short_and_long_ones_in_both_splits(self, domain):
        found = load_prompts(domain)
        assert len(found) >= 44
        assert {prompt.domain for prompt in found} == {domain}
        for split, least in ((tuning(found), 3), (held_out(found), 10)):
            for length in ("short", "long"):
                assert sum(prompt.length == length for prompt in split) >= least

    def test_ids_name_the_domain_and_are_unique(self):
        found = load_prompts()
        assert [prompt.id for prompt in found] == [
            f"{domain}-{number:02d}" for domain in DOMAINS for number in range(1, len(load_prompts(domain)) + 1)
        ]

    def test_no_two_are_alike(self):
        for first, second in itertools.combinations(load_prompts(), 2):
            words = difflib.SequenceMatcher(None, first.text.split(), second.text.split(), autojunk=False)
            alike = words.real_quick_ratio() > 0.7 and words.quick_ratio() > 0.7 and words.ratio() > 0.7
            assert not alike, (first.id, second.id)

    def test_most_code_prompts_bring_code_to_repeat(self):
        assert sum("```" in prompt.text for prompt in load_prompts("code")) >= 20

    def test_messages(self):
        prompt = load_prompts("math")[0]
        assert prompt.messages == [{"role": "user", "content": prompt.text}]


class TestSplit:
    def test_it_covers_and_does_not_overlap(self):
        found = load_prompts()
        chosen, reported = tuning(found), held_out(found)
        assert sorted(chosen + reported, key=lambda prompt: prompt.id) == sorted(found, key=lambda prompt: prompt.id)
        assert not set(chosen) & set(reported)

    def test_every_fourth_of_a_file_is_for_tuning(self):
        for domain in DOMAINS:
            assert tuning(load_prompts(domain)) == load_prompts(domain)[3::4]

    def test_a_prompt_keeps_its_split_in_any_selection(self):
        assert tuning(load_prompts()[5:])[0] == load_prompts("math")[7]


class TestBadInput:
    def test_an_unknown_domain(self):
        with pytest.raises(ValueError, match=r"'maths'.*math, code, chat"):
            load_prompts("maths")

    def test_a_repeated_id(self, files):
        files("math", GOOD, GOOD)
        with pytest.raises(ValueError, match=r"'math-01' appears twice"):
            load_prompts("math")

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            ("{half", "prompt 2 is not valid JSON"),
            ({"id": "x", "text": "y"}, "prompt 2 needs the entries"),
            ({**GOOD, "id": "x", "extra": "y"}, "prompt 2 needs the entries"),
            ({**GOOD, "id": "x", "text": " "}, "prompt 2 has an entry that is empty"),
            ({**GOOD, "id": "x", "length": "medium"}, "prompt 2: length is 'medium'"),
        ],
    )
    def test_a_malformed_line(self, files, line, message):
        files("math", GOOD, line)
        with pytest.raises(ValueError, match=message):
            load_prompts("math")

    def test_no_data(self, files):
        with pytest.raises(FileNotFoundError, match=r"math\.jsonl is absent.*checkout"):
            load_prompts()


def test_a_system_message_goes_first(files):
    files("chat", {**GOOD, "system": "Be brief."})
    (prompt,) = load_prompts("chat")
    assert prompt.messages[0] == {"role": "system", "content": "Be brief."}
    assert prompt.messages[1]["role"] == "user"


def test_torch_is_not_imported():
    code = "import sys, specdec_core.prompts; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=prompts.FOLDER.parent.parent).returncode == 0


@pytest.mark.parametrize(
    ("count", "expected"),
    [(3, [0, 3, 6]), (4, [0, 2, 4, 6]), (10, list(range(10))), (99, list(range(10))), (1, [0]), (0, [])],
)
def test_spread_takes_some_of_all(count, expected):
    assert spread(list(range(10)), count) == expected
    assert spread([], count) == []
