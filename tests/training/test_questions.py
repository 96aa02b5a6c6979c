"""Questions for a corpus: the same at every place however they are asked for, the target's own being those of a user.

A tiny random target asks nonsense, so most of what it says is scripted.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.decode import Output, generate
from specdec_core.models.registry import load
from specdec_core.models.tokenizer import Tokenizer
from specdec_core.pairs import Opened, open_target
from specdec_core.placement import Placement
from specdec_core.prompts import DOMAINS, load_prompts
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.training import questions as module
from specdec_core.training.openers import OPENERS
from specdec_core.training.questions import FEWEST_WORDS, LONGEST_QUESTION, SOURCES, TOP_P, Asked, Templates, opener
from specdec_core.training.templates import (
    HELD_OUT,
    HELD_OUT_EVERY,
    RUN,
    TemplateError,
    is_held_out,
    sample,
    templates,
    turn,
    version,
)
from tests.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = 3
LONG = HELD_OUT_EVERY * len(DOMAINS) * 4
"""So many places that every domain has four held-out questions."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Opened:
    return open_target(str(save_tiny(tmp_path_factory.mktemp("tiny"), context=1024)), Placement("numba", threads=1))


@pytest.fixture
def scripted(monkeypatch, opened) -> Callable[..., Asked]:
    """`Asked` whose target goes on with what is said for each place: its text, and how that ended."""

    def make(say: Callable[[int], tuple[str, str]], seed: int = SEED) -> Asked:
        def generate(target, requests: Sequence[Request], slots: int) -> list[Output]:
            assert target is opened.target and 1 <= slots <= 32
            said = [say(request.key) for request in requests]
            return [Output(tuple(opened.tokenizer.encode(text)), ended) for text, ended in said]

        monkeypatch.setattr(module, "generate", generate)
        return Asked(opened, LONG, seed)

    return make


def content(opened: Opened, tokens: Sequence[int]) -> str:
    """What the user says in a prompt of the tiny template."""
    inside = re.fullmatch(r"u(.*)a", opened.tokenizer.decode(tokens), re.DOTALL)
    assert inside is not None
    return inside[1]


class TestEverySource:
    def test_their_order_is_that_of_the_parts(self):
        assert list(SOURCES.items()) == [("templates", Templates), ("asked", Asked)]

    def test_they_say_what_is_held_out(self):
        assert str(HELD_OUT_EVERY) in Asked.split and str(HELD_OUT_EVERY) in Templates.split
        assert all(name in Templates.split for name in HELD_OUT)

    def test_their_versions_are_short_digests_that_differ(self):
        versions = {source.version() for source in SOURCES.values()}
        assert len(versions) == 2 and all(re.fullmatch(r"[0-9a-f]{12}", each) for each in versions)
        assert Templates.version() == version()

    @pytest.mark.parametrize("name", ["HELD_OUT_EVERY", "LONGEST_QUESTION", "FEWEST_WORDS", "TOP_P"])
    def test_a_changed_rule_is_another_version(self, monkeypatch, name):
        before = Asked.version()
        monkeypatch.setattr(module, name, getattr(module, name) + 2)
        assert Asked.version() != before

    def test_so_is_a_changed_opener_or_end_of_a_sentence(self, monkeypatch):
        versions = {Asked.version()}
        with monkeypatch.context() as patch:
            patch.setattr(module, "OPENERS", {**OPENERS, "chat": (*OPENERS["chat"], "Hello")})
            versions.add(Asked.version())
        with monkeypatch.context() as patch:
            patch.setattr(module, "_SENTENCE", re.compile(".*[.]"))
            versions.add(Asked.version())
        assert len(versions) == 3


class TestTemplates:
    @settings(max_examples=25)
    @given(st.data())
    def test_a_question_depends_on_seed_and_place_alone(self, opened, data):
        count = 40
        whole = Templates(opened, count, SEED).questions(range(count))
        first = data.draw(st.integers(0, count))
        last = data.draw(st.integers(first, count))
        other = Templates(opened, data.draw(st.integers(last, count)), SEED)
        assert other.questions(range(first, last)) == whole[first:last]

    def test_they_are_the_prompts_of_the_sample(self, opened):
        prompts = sample(200, SEED)
        questions = Templates(opened, 200, SEED).questions(range(200))
        assert [each.place for each in questions] == list(range(200))
        for prompt, each in zip(prompts, questions, strict=True):
            assert content(opened, each.tokens) == prompt.text
            assert each.is_short == (prompt.length == "short")
        assert 0 < sum(each.is_short for each in questions) < 200

    def test_another_seed_asks_others(self, opened):
        ours, theirs = (Templates(opened, 30, seed).questions(range(30)) for seed in (1, 2))
        assert sum(one.tokens == other.tokens for one, other in zip(ours, theirs, strict=True)) < 10

    def test_who_is_held_out(self, opened):
        questions = Templates(opened, 500, SEED).questions(range(500))
        assert [each.place for each in questions if each.held_out] == [p for p in range(500) if is_held_out(p)]
        new = [each.place for each in questions if each.of_new_template]
        assert new == [place for place in range(500) if turn(place)[0].name in HELD_OUT]
        assert len(new) < sum(each.held_out for each in questions)

    def test_half_is_greedy_in_every_domain_and_of_every_template(self, opened):
        # Each template twice, whatever a domain's number of them.
        count = 2 * len(DOMAINS) * max(map(len, templates().values()))
        questions = Templates(opened, count, SEED).questions(range(count))
        for domain, name in enumerate(DOMAINS):
            assert 0.45 < sum(each.greedy for each in questions[domain :: len(DOMAINS)]) / count * 3 < 0.55, name
        ways = defaultdict(list)
        for each in questions:
            ways[turn(each.place)[0].name].append(each.greedy)
        assert all(one != other for each in ways.values() for one, other in pairwise(each))
        assert sum(map(len, ways.values())) > len(ways)


class TestWhatATargetAsks:
    COUNT = 33

    @pytest.fixture
    def any_length(self, monkeypatch):
        """Random bytes have few spaces, and questions of few words will do."""
        monkeypatch.setattr(module, "FEWEST_WORDS", 1)

    @pytest.fixture
    def questions(self, opened, any_length):
        return Asked(opened, self.COUNT, SEED).questions(range(self.COUNT))

    def test_it_is_what_the_target_says_to_that_opener_alone(self, opened, questions):
        """Worked out anew from the template's text: tests.tiny.TEMPLATE."""
        asked = {each.place: each for each in questions}
        for place in range(self.COUNT):
            prompt = opened.tokenizer.encode(f"<|im_start|>u{opener(place)}")
            options = Options(1.0, top_p=0.9, max_new_tokens=64, eos=opened.tokenizer.eos_ids, seed=SEED + 1)
            [alone] = generate(opened.target, [Request(tuple(prompt), options, key=place)])
            text = (opener(place) + opened.tokenizer.decode(alone.tokens)).strip()
            if alone.finished != "eos":
                ends = [match.end() for match in re.finditer(r"[.?!:](?=\s|$)", text)]
                text = text[: max(ends, default=0)]
            if len(text) > len(opener(place)):
                whole = opened.tokenizer.encode(f"<|im_start|>u{text}<|im_end|><|im_start|>a")
                assert asked.pop(place).tokens == tuple(whole), place
        assert not asked
        assert 2 < len(questions) < self.COUNT

    @pytest.mark.parametrize("chunk", [1, 5, 32])
    def test_it_depends_on_seed_and_place_alone(self, opened, questions, chunk):
        source = Asked(opened, self.COUNT, SEED)
        ranges = [range(first, min(first + chunk, self.COUNT)) for first in range(0, self.COUNT, chunk)]
        # From the last to the first: nor does it matter what was asked for before.
        found = [each for places in reversed(ranges) for each in reversed(source.questions(places))]
        assert found[::-1] == questions
        assert all(
            Asked(opened, 10**6, SEED).questions(range(place, place + 1)) == [each]
            for place, each in [(each.place, each) for each in questions][:2]
        )

    def test_another_seed_asks_others(self, opened, questions):
        theirs = Asked(opened, self.COUNT, SEED + 1).questions(range(self.COUNT))
        assert not {each.tokens for each in questions} & {each.tokens for each in theirs}

    def test_its_stream_is_not_that_of_the_answers(self, opened, monkeypatch):
        """Answers draw from the streams of (seed, place): a question that did too would share its luck."""
        seen: list[Request] = []

        def generate(target, requests, slots):
            seen.extend(requests)
            return [Output((), "eos")] * len(requests)

        monkeypatch.setattr(module, "generate", generate)
        Asked(opened, 6, SEED).questions(range(6))
        assert [request.key for request in seen] == list(range(6))
        assert SEED not in {request.options.seed for request in seen}
        for request in seen:
            options = request.options
            assert (options.temperature, options.top_p, options.max_new_tokens) == (1.0, TOP_P, LONGEST_QUESTION)
            assert options.eos == opened.tokenizer.eos_ids


class TestTheBeginning:
    def test_it_is_a_users_unfinished_turn(self, opened):
        source = Asked(opened, 1, SEED)
        assert source._beginning("How") == tuple(opened.tokenizer.encode("<|im_start|>uHow"))
        assert source._beginning("") == tuple(opened.tokenizer.encode("<|im_start|>u"))

    def test_so_it_is_of_the_shipped_target_for_every_opener(self, opened):
        """What follows it and the template's end make the prompt of a chat with the whole text, token by token."""
        tokenizer = Tokenizer.from_folder(load("smollm2-135m-instruct").folder)
        source = Asked(Opened("", opened.target, tokenizer, opened.checkpoint), 1, SEED)

        def chat(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.chat([{"role": "user", "content": text}]))

        end = chat("x")[len(source._beginning("x")) :]
        assert tokenizer.token(end[0]) == "<|im_end|>" and source._beginning("") == chat("x")[: -len(end) - 1]
        for each in {text for texts in OPENERS.values() for text in texts}:
            more = tuple(tokenizer.encode(" more of it?"))
            assert source._beginning(each) + more + end == chat(f"{each} more of it?"), each

    def test_domains_take_turns_and_openers_within_them(self):
        assert list(DOMAINS) == list(OPENERS)
        for number, domain in enumerate(DOMAINS):
            texts = OPENERS[domain]
            places = range(number, len(DOMAINS) * (len(texts) + 2), len(DOMAINS))
            assert [opener(place) for place in places] == [*texts, *texts[:2]]

    def test_openers_are_begun_texts(self):
        for texts in OPENERS.values():
            assert all(text == text.strip() and "\n" not in text for text in texts)
        assert Counter(OPENERS["chat"])[""] > 1 and "" not in OPENERS["math"] + OPENERS["code"]
        assert all(len(set(OPENERS[domain])) == len(OPENERS[domain]) for domain in ("math", "code"))


MATH = DOMAINS.index("math") + len(DOMAINS) * OPENERS["math"].index("Find")
CODE = DOMAINS.index("code") + len(DOMAINS) * OPENERS["code"].index("Fix this code:")
CHAT = DOMAINS.index("chat") + len(DOMAINS) * OPENERS["chat"].index("")


class TestWhereItEnds:
    @pytest.fixture
    def asked(self, scripted, opened):
        """The text that is asked at a place if the target goes on like this; None if none is."""

        def ask(place: int, more: str, finished: str = "eos") -> str | None:
            found = scripted(lambda _: (more, finished)).questions(range(place, place + 1))
            assert len(found) <= 1
            return content(opened, found[0].tokens) if found else None

        return ask

    @pytest.mark.parametrize("more", [" the area of a square.", " x in terms of", " a. Then b? And (c)"])
    def test_where_the_target_ended_it(self, asked, more):
        assert asked(MATH, f"{more}<|im_end|>") == f"Find{more}"

    @pytest.mark.parametrize(
        ("more", "kept"),
        [
            (" it in two steps. Then sa", " it in two steps."),
            (" it. Then say why! And wh", " it. Then say why!"),
            (" it in two steps? So\nthat one", " it in two steps?"),
            (" it in\ntwo steps:\n1. one, 2", " it in\ntwo steps:\n1."),
            (" the sum of these: 3.5 and 1.25", " the sum of these:"),
            (" it in two steps.", " it in two steps."),
            (" it in two steps.\n\n", " it in two steps."),
            (" it at x.y. in two steps", " it at x.y."),
        ],
    )
    @pytest.mark.parametrize("finished", ["length", "context"])
    def test_else_with_its_last_whole_sentence(self, asked, more, kept, finished):
        assert asked(MATH, more, finished) == f"Find{kept}"

    def test_else_it_is_not_asked(self, asked):
        assert asked(MATH, " the largest number that is", "length") is None
        assert asked(MATH, " the value of 3.14159 times", "length") is None
        assert asked(CHAT, "", "length") is None

    def test_an_opener_alone_is_no_question(self, asked):
        long = CODE + len(DOMAINS) * (OPENERS["code"].index("What is the difference between") - 4)
        assert opener(long) == "What is the difference between"
        assert asked(long, "") is None and asked(long, " \n") is None
        assert asked(long, " a, b?") == "What is the difference between a, b?"
        # Its own colon is no sentence that was said.
        assert asked(CODE, " for x in range(3", "length") is None
        assert asked(CODE, " a = 1. What", "length") == "Fix this code: a = 1."

    def test_nor_are_a_few_words(self, asked):
        assert FEWEST_WORDS == 4
        assert asked(CHAT, "Who are you?") is None and asked(CHAT, "Who are you, then?") == "Who are you, then?"
        assert asked(MATH, " 1 + 2", "eos") == "Find 1 + 2" and asked(MATH, " x here", "eos") is None
        assert asked(CHAT, "Is it? I do not kno", "length") is None

    def test_space_around_it_goes(self, asked):
        assert asked(CHAT, "\n Who are you, then? \n") == "Who are you, then?"

    def test_one_that_is_measured_on_is_not_asked(self, asked):
        for prompt in load_prompts():
            if len(prompt.text) < 900:  # the tiny target's context
                assert asked(CHAT, prompt.text) is None, prompt.id
                assert asked(CHAT, prompt.text.upper()) is None, prompt.id

    def test_nor_is_one_with_a_part_of_it(self, asked):
        words = max((prompt.text for prompt in load_prompts()), key=len).split()
        assert not any(re.search(r"\w\W+\w", word) for word in words[:RUN])
        assert asked(CHAT, f"Well, {' '.join(words[:RUN])} and so on?") is None
        assert asked(CHAT, f"Well, {' '.join(words[: RUN - 1])} and so on?") is not None

    def test_other_troubles_are_not_hidden(self, asked, monkeypatch):
        def refuse(self, text, what):
            raise KeyError(text)

        monkeypatch.setattr(module.Measured, "refuse", refuse)
        with pytest.raises(KeyError):
            asked(CHAT, "Who are you, then?")
        assert issubclass(TemplateError, ValueError)


class TestTheSplitOfWhatIsAsked:
    @pytest.fixture
    def questions(self, scripted):
        return scripted(lambda place: (f" number {place} of them all?", "eos")).questions(range(LONG))

    def test_every_one_begins_with_its_opener_and_is_at_its_place(self, opened, questions):
        assert [each.place for each in questions] == list(range(LONG))
        for each in questions:
            assert content(opened, each.tokens) == f"{opener(each.place)} number {each.place} of them all?".strip()

    def test_one_in_so_many_is_held_out(self, questions):
        held_out = [each.place for each in questions if each.held_out]
        assert held_out == list(range(0, LONG, HELD_OUT_EVERY))
        assert not any(each.of_new_template or each.is_short for each in questions)

    def test_greedy_and_sampled_take_turns_in_every_domain_also_among_those_held_out(self, questions):
        for number in range(len(DOMAINS)):
            ways = [each.greedy for each in questions[number :: len(DOMAINS)]]
            assert ways == [place % 2 == 0 for place in range(len(ways))]
            held_out = [each.greedy for each in questions[number :: len(DOMAINS)] if each.held_out]
            assert len(held_out) == 4 and all(one != other for one, other in pairwise(held_out))

    def test_one_that_is_not_asked_moves_no_other(self, scripted, questions):
        some = scripted(lambda place: (f" number {place} of them all?" if place % 3 else "", "eos"))
        assert some.questions(range(LONG)) == [each for each in questions if each.place % 3]
        assert scripted(lambda place: ("", "eos")).questions(range(50)) == []
