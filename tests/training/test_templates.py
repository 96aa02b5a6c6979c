"""Templates: enough prompts, all different, balanced, reproducible, and none like those that are measured on."""

from __future__ import annotations

import re
from collections import Counter

import numpy as np
import pytest

from specdec_core.prompts import DOMAINS, Prompt, load_prompts
from specdec_core.training import templates as module
from specdec_core.training.templates import (
    HELD_OUT,
    RUN,
    Measured,
    Template,
    TemplateError,
    is_held_out,
    sample,
    templates,
    turn,
    version,
)

WORDS = {"colour": ("red", "blue", "green"), "town": ("Ulm",)}
ALL = [template for each in templates().values() for template in each]


def template(text: str) -> Template:
    return Template("math-x", "math", text, WORDS)


@pytest.fixture(scope="module")
def prompts() -> list[Prompt]:
    return sample(4000, seed=1)


class TestASlot:
    def test_the_same_word_for_the_same_slot_another_for_a_numbered_one(self):
        filled = {template("«colour» «colour» «colour.2»").fill(np.random.default_rng(seed)) for seed in range(200)}
        words = {tuple(each.split()) for each in filled}
        assert words == {(a, a, b) for a in WORDS["colour"] for b in WORDS["colour"] if a != b}

    def test_a_number_is_new_each_time_unless_it_has_a_name(self):
        seen = {template("«3..5» «3..5» «a=7..8» «a»").fill(np.random.default_rng(seed)) for seed in range(400)}
        assert seen == {f"{x} {y} {a} {a}" for x in (3, 4, 5) for y in (3, 4, 5) for a in (7, 8)}

    def test_variants_count_what_filling_can_give(self):
        assert template("«colour» «colour.2» «colour.3» «1..4»").variants == 3 * 2 * 1 * 4
        assert template("«1..4» «1..4» «town» «town»").variants == 16

    @pytest.mark.parametrize("text", ["«flavour»", "«a» «a=1..3»", "«5..3»", "«a=1..2» «a=1..3»"])
    def test_one_that_cannot_be_filled_is_named(self, text):
        with pytest.raises(TemplateError, match="math-x: «"):
            template(text).fill(np.random.default_rng(0))


class TestTheTemplates:
    @pytest.mark.parametrize("domain", DOMAINS)
    def test_each_domain_has_many_short_ones_and_many_with_a_text_to_go_by(self, domain):
        found = templates()[domain]
        assert len(found) >= 30
        assert sum(each.length == "short" for each in found) >= 12
        assert sum("\n\n" in each.text for each in found) >= {"math": 6, "code": 15, "chat": 10}[domain]

    @pytest.mark.parametrize("each", ALL, ids=lambda each: each.name)
    def test_it_can_be_filled_in_many_ways(self, each):
        assert len(each.slots) >= 2
        assert each.variants >= 400
        assert "«" not in each.fill(np.random.default_rng(0))

    def test_no_two_templates_are_alike(self):
        bare = [frozenset(re.findall(r"\w+", re.sub("«.*?»", "", each.text))) for each in ALL]
        pairs = ((i, j) for i in range(len(ALL)) for j in range(i))
        close = [(ALL[i].name, ALL[j].name) for i, j in pairs if len(bare[i] & bare[j]) > 0.7 * len(bare[i] | bare[j])]
        assert not close

    def test_every_kind_of_word_is_used(self):
        for each in templates().values():
            assert {slot.kind for t in each for slot in t.slots.values()} >= set(each[0].words)

    def test_no_article_is_wrong(self, prompts):
        wrong = {found for p in prompts for found in re.findall(r"\b[Aa] [aeioAEIO]\w+", p.text)}
        assert wrong <= {"A on", "a is", "a one"}

    def test_the_version_tells_changed_words_apart(self, monkeypatch):
        before = version()
        version.cache_clear()
        monkeypatch.setitem(module.templates_math.WORDS, "place", "three decimal places")
        assert version() != before
        version.cache_clear()


class TestTheSample:
    def test_all_are_different_prompts_with_ids_of_their_own(self, prompts):
        assert len({prompt.text for prompt in prompts}) == len({prompt.id for prompt in prompts}) == 4000

    def test_domains_and_templates_are_balanced(self, prompts):
        domains = Counter(prompt.domain for prompt in prompts)
        assert set(domains) == set(DOMAINS) and max(domains.values()) - min(domains.values()) <= 1
        for domain in DOMAINS:
            families = Counter(p.id.rpartition("-")[0] for p in prompts if p.domain == domain)
            assert set(families) == {each.name for each in templates()[domain]}
            assert max(families.values()) - min(families.values()) <= 1

    def test_every_stretch_has_short_and_long_answers(self, prompts):
        for start in range(0, 4000 - 32, 32):
            assert 8 <= sum(prompt.length == "short" for prompt in prompts[start : start + 32]) <= 17

    def test_it_depends_on_the_seed_and_begins_like_a_shorter_one(self, prompts):
        assert sample(150, seed=1) == prompts[:150]
        assert not {p.text for p in sample(150, seed=2)} & {p.text for p in prompts[:150]}

    def test_a_tenth_is_held_out_half_of_it_by_template(self, prompts):
        held = [index for index, prompt in enumerate(prompts) if prompt.split == "report"]
        assert held == [index for index in range(4000) if is_held_out(index)]
        assert 0.095 < len(held) / 4000 < 0.105
        by_template = sum(turn(index)[0].name in HELD_OUT for index in held)
        assert 0.45 < by_template / len(held) < 0.55

    def test_nothing_of_a_template_that_is_held_out_is_trained_on(self, prompts):
        assert {name.partition("-")[0] for name in HELD_OUT} == set(DOMAINS)
        families = {p.id.rpartition("-")[0] for p in prompts if p.split == "tuning"}
        assert families == {each.name for each in ALL} - set(HELD_OUT)

    def test_a_template_that_is_used_up_is_named(self, monkeypatch):
        monkeypatch.setattr(module, "templates", lambda: {d: (template("«colour» in «town»"),) for d in DOMAINS})
        assert len(sample(3, seed=0)) == 3
        with pytest.raises(TemplateError, match="math-x gave no new text in 1000 draws from 3 variants"):
            sample(4, seed=0)


class TestDisjointFromWhatIsMeasured:
    def test_no_prompt_equals_one_or_shares_a_run_of_words(self, prompts):
        def words(text: str) -> list[str]:
            return re.sub(r"[\W]+", " ", text.lower()).split()

        def runs(text: str) -> set[str]:
            each = words(text)
            return {" ".join(each[start : start + 8]) for start in range(len(each) - 7)}

        measured = load_prompts()
        texts, known = {tuple(words(p.text)) for p in measured}, {run for p in measured for run in runs(p.text)}
        for prompt in prompts:
            assert tuple(words(prompt.text)) not in texts, prompt
            assert not runs(prompt.text) & known, prompt

    MEASURED = Measured([Prompt("chat-99", "chat", "One two, three four five six seven eight nine.", "short")])

    def test_an_equal_text_is_refused_whatever_its_case_and_signs(self):
        short = Measured([Prompt("chat-98", "chat", "What do bees make?", "short")])
        with pytest.raises(TemplateError, match="it, equals chat-98"):
            short.refuse("what  do\nbees make", "it")
        short.refuse("What do bees make of it?", "it")

    def test_a_shared_run_is_refused(self):
        assert RUN == 8
        with pytest.raises(TemplateError, match="'two three four five six seven eight nine' with chat-99"):
            self.MEASURED.refuse("Zero: TWO three four\nfive six seven eight nine - ten", "it")
        self.MEASURED.refuse("zero two three four five six seven eight, and nine", "it")

    def test_the_sampler_refuses(self, monkeypatch):
        text = sample(4, seed=7)[3].text
        monkeypatch.setattr(module, "load_prompts", lambda: (Prompt("math-99", "math", text, "short"),))
        with pytest.raises(TemplateError, match=f"{turn(3)[0].name}, filled in for seed 7, equals math-99"):
            sample(4, seed=7)
