"""Prompts without end, from templates of our own words: what a target is asked when it writes a corpus for training.

A template is a text with slots, filled in at random. `«kind»` takes a word of the domain's list of that name,
`«kind.2»` another word of it, and the same slot again the same word. `«3..60»` takes a whole number from 3 to 60, a new
one each time; `«a=3..60»` gives it a name, so that `«a»` repeats it.

No prompt may resemble those that everything is measured on (data/prompts): a drafter that had trained on them would
look better than it is. The sampler refuses a prompt that equals one or shares a run of eight words with one.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from math import prod
from typing import Literal

import numpy as np

from specdec_core.prompts import DOMAINS, Prompt, load_prompts
from specdec_core.training import templates_chat, templates_code, templates_math

HELD_OUT = ("math-solid", "math-by_example", "code-tool", "code-type_hints", "chat-tips", "chat-tense")
"""Templates that training never sees: of each domain one that is answered freely and one with a text to go by."""

HELD_OUT_EVERY = 19
"""Of the other templates' prompts, one in so many is held out too: with HELD_OUT that makes a tenth of all. An odd
number, since a template's prompts may alternate between two ways of decoding."""

RUN = 8
"""Words in a row that no prompt shares with one of data/prompts."""

_SLOT = re.compile(r"«(?:(?:([a-z])=)?(\d+)\.\.(\d+)|(\w+)(?:\.(\d))?)»")
_SOURCES = {"math": templates_math, "code": templates_code, "chat": templates_chat}


class TemplateError(ValueError):
    """A template that cannot be filled in, or a prompt that must not be asked."""


@dataclass(frozen=True)
class Slot:
    """What can be put in: `choices` are words or numbers; slots of one `kind` take different ones of them."""

    kind: str
    choices: Sequence[str | int]


@dataclass(frozen=True)
class Template:
    """A text with slots.

    name    `domain-family`; prompts are named after it.
    words   kind → its words.
    length  of the answer: 'short' or 'long' (prompts.py).
    """

    name: str
    domain: str
    text: str
    words: Mapping[str, Sequence[str]] = field(repr=False)
    length: Literal["short", "long"] = "long"

    @cached_property
    def slots(self) -> dict[str, Slot]:
        """By what tells them apart, in the order in which they are filled. Raises TemplateError for an unknown one."""
        found: dict[str, Slot] = {}
        for match in _SLOT.finditer(self.text):
            _, low, high, kind, _ = match.groups()
            name = _name(match)
            if low is not None:
                if name in found or int(low) >= int(high):
                    raise TemplateError(f"{self.name}: {match[0]}: expected a new name and a range that ascends")
                found[name] = Slot(name, range(int(low), int(high) + 1))
            elif kind in self.words:
                found[name] = Slot(kind, self.words[kind])
            elif name not in found:
                raise TemplateError(
                    f"{self.name}: {match[0]} is no number that was named before it and no kind of word; the kinds are "
                    + ", ".join(sorted(self.words))
                )
        return found

    @property
    def variants(self) -> int:
        """Different ways to fill it in."""
        kinds = [slot.kind for slot in self.slots.values()]
        return prod(
            len(slot.choices) - kinds[:place].count(slot.kind) for place, slot in enumerate(self.slots.values())
        )

    def fill(self, random: np.random.Generator) -> str:
        """The text with every slot filled, uniformly."""
        chosen: dict[str, str] = {}
        taken: set[tuple[str, str | int]] = set()
        for name, slot in self.slots.items():
            # A range is not copied into a list: nothing else takes of it.
            free = slot.choices
            if any(kind == slot.kind for kind, _ in taken):
                free = [choice for choice in free if (slot.kind, choice) not in taken]
            choice = free[int(random.integers(len(free)))]
            taken.add((slot.kind, choice))
            chosen[name] = str(choice)
        return _SLOT.sub(lambda match: chosen[_name(match)], self.text)


@lru_cache(maxsize=1)
def templates() -> dict[str, tuple[Template, ...]]:
    """Domain → its templates, in a fixed order."""
    return {domain: _read(domain) for domain in DOMAINS}


@lru_cache(maxsize=1)
def version() -> str:
    """A digest of all texts, words and rules of the split: equal versions give equal prompts for equal seeds."""
    everything = {domain: [source.WORDS, source.SHORT, source.LONG] for domain, source in _SOURCES.items()}
    content = json.dumps([everything, HELD_OUT, HELD_OUT_EVERY], sort_keys=False, ensure_ascii=False)
    return hashlib.sha256(content.encode()).hexdigest()[:12]


def turn(index: int) -> tuple[Template, int, int]:
    """The template of prompt `index` of any sample, its place among those of its domain, and how often it came before.

    Domains take turns, and templates within a domain.
    """
    domain = DOMAINS[index % len(DOMAINS)]
    round_, place = divmod(index // len(DOMAINS), len(templates()[domain]))
    return templates()[domain][place], place, round_


def is_held_out(index: int) -> bool:
    """Whether training must not see prompt `index` of a sample: by its template, or as one of HELD_OUT_EVERY."""
    template, place, round_ = turn(index)
    return template.name in HELD_OUT or (round_ + 5 * place) % HELD_OUT_EVERY == 0


def sample(count: int, seed: int) -> list[Prompt]:
    """`count` different prompts; a longer sample of this seed begins with a shorter one.

    Domains are balanced, and templates within each. `split` is 'report' for those that are held out, 'tuning' for those
    to train on. Raises TemplateError if a template has no more variants, or a prompt resembles one of data/prompts.
    """
    measured, seen, prompts = Measured(load_prompts()), set[str](), []
    for index in range(count):
        template, _, round_ = turn(index)
        random = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(index,)))
        text = _new_text(template, random, seen)
        measured.refuse(text, f"{template.name}, filled in for seed {seed}")
        seen.add(text)
        split: Literal["tuning", "report"] = "report" if is_held_out(index) else "tuning"
        prompts.append(Prompt(f"{template.name}-{round_:04d}", template.domain, text, template.length, split=split))
    return prompts


class Measured:
    """The prompts that everything is measured on, to compare others with."""

    def __init__(self, prompts: Iterable[Prompt]):
        self._texts, self._runs = dict[tuple[str, ...], str](), dict[tuple[str, ...], str]()
        for prompt in prompts:
            words = _words(prompt.text)
            self._texts[words] = prompt.id
            self._runs |= dict.fromkeys(_runs(words), prompt.id)

    def refuse(self, text: str, what: str) -> None:
        """Raise TemplateError if `text` shares RUN words in a row with one, or equals one but for case and signs."""
        words = _words(text)
        if words in self._texts:
            raise TemplateError(f"{what}, equals {self._texts[words]} of data/prompts: change the template. {text!r}")
        for run in _runs(words):
            if run in self._runs:
                raise TemplateError(
                    f"{what}, shares the words {' '.join(run)!r} with {self._runs[run]} of data/prompts: expected no "
                    f"{RUN} words in a row; change the template"
                )


def _read(domain: str) -> tuple[Template, ...]:
    source = _SOURCES[domain]
    words = {kind: tuple(each.split("|")) for kind, each in source.WORDS.items()}
    short = [Template(f"{domain}-{family}", domain, text, words, "short") for family, text in source.SHORT.items()]
    long = [Template(f"{domain}-{family}", domain, text, words, "long") for family, text in source.LONG.items()]
    # Spread, so that every stretch of a sample has its share of short and of long answers.
    places = [(place / len(group), each) for group in (short, long) for place, each in enumerate(group)]
    return tuple(each for _, each in sorted(places, key=lambda pair: pair[0]))


def _new_text(template: Template, random: np.random.Generator, seen: set[str]) -> str:
    # A template with room left gives a new text soon; one that is nearly used up would be drawn from for ever.
    for _ in range(1000):
        if (text := template.fill(random)) not in seen:
            return text
    raise TemplateError(
        f"{template.name} gave no new text in 1000 draws from {template.variants} variants: ask for fewer prompts, or "
        "give it more words"
    )


def _name(match: re.Match[str]) -> str:
    """What tells a slot from the others of its template: its place, for a number without a name."""
    named, low, _, kind, copy = match.groups()
    if low is not None:
        return named or f"number at {match.start()}"
    return f"{kind}.{copy}" if copy else kind


def _words(text: str) -> tuple[str, ...]:
    return tuple(re.findall(r"\w+", text.casefold()))


def _runs(words: Sequence[str]) -> Iterator[tuple[str, ...]]:
    return (tuple(words[start : start + RUN]) for start in range(len(words) - RUN + 1))
