"""Where a corpus's questions come from: templates of our own words, or the target itself.

A template's prompts are many, but of few kinds. A chat model that is given the beginning of a *user's* turn goes on as
one of the users that it was trained on: sampled, that is a question of a new kind every time, and of those that it
knows (Magpie, Xu et al. 2024, arXiv:2406.08464).
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Protocol

from specdec_core.decode import Output, generate
from specdec_core.pairs import Opened
from specdec_core.prompts import DOMAINS, load_prompts
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.training.openers import OPENERS
from specdec_core.training.templates import (
    HELD_OUT,
    HELD_OUT_EVERY,
    Measured,
    TemplateError,
    is_held_out,
    sample,
    turn,
    version,
)

LONGEST_QUESTION, FEWEST_WORDS, TOP_P = 64, 4, 0.9
_SENTENCE = re.compile(r".*[.?!:](?=\s|$)", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """A prompt to be answered.

    place            in its source.
    tokens           chat template included.
    greedy           to be answered greedily, else at temperature 1.
    held_out         training must not see it; of_new_template: nor any prompt of its template.
    is_short         its answer will probably be.
    """

    place: int
    tokens: tuple[int, ...]
    greedy: bool
    held_out: bool
    of_new_template: bool = False
    is_short: bool = False


class Source(Protocol):
    """`count` questions of one seed, by their places. `split` says in words what is held out."""

    split: str

    def __init__(self, opened: Opened, count: int, seed: int) -> None: ...

    @staticmethod
    def version() -> str:
        """A digest of all that questions depend on, besides target, seed and place."""
        ...

    def questions(self, places: range) -> list[Question]:
        """Those of these places, fewer if the source has nothing to ask at some."""
        ...


class Templates:
    """Prompts of templates.py: a template's are answered greedily and sampled in turn."""

    split = (
        f"held out: all prompts of the templates {', '.join(HELD_OUT)}; of each other one prompt in {HELD_OUT_EVERY} "
        "(templates.is_held_out)"
    )

    @staticmethod
    def version() -> str:
        return version()

    def __init__(self, opened: Opened, count: int, seed: int):
        self._chat, self._prompts = opened.tokenizer.chat, sample(count, seed)

    def questions(self, places: range) -> list[Question]:
        found = []
        for place in places:
            template, *rest = turn(place)
            prompt = self._prompts[place]
            found.append(
                Question(
                    place,
                    tuple(self._chat(prompt.messages)),
                    greedy=sum(rest) % 2 == 0,
                    held_out=is_held_out(place),
                    of_new_template=template.name in HELD_OUT,
                    is_short=prompt.length == "short",
                )
            )
        return found


class Asked:
    """Questions that the target asks itself: it goes on, sampled from the likeliest TOP_P of its law, with a user's
    turn that begins with one of OPENERS.

    Cut at the limit, a question ends with its last whole sentence. Without one, with fewer than FEWEST_WORDS, or if it
    resembles one of data/prompts, it is not asked.
    """

    split = f"held out: one question in {HELD_OUT_EVERY}, by its place"

    def __init__(self, opened: Opened, count: int, seed: int):
        self._opened, self._seed = opened, seed
        self._measured = Measured(load_prompts())

    @staticmethod
    def version() -> str:
        content = [dict(OPENERS), HELD_OUT_EVERY, LONGEST_QUESTION, FEWEST_WORDS, TOP_P, _SENTENCE.pattern]
        return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:12]

    def questions(self, places: range) -> list[Question]:
        found = []
        for place, text in zip(places, self._texts(places), strict=True):
            if text is not None:
                tokens = tuple(self._opened.tokenizer.chat([{"role": "user", "content": text}]))
                # HELD_OUT_EVERY is odd: held-out questions are answered both ways too.
                greedy, held_out = place // len(DOMAINS) % 2 == 0, place % HELD_OUT_EVERY == 0
                found.append(Question(place, tokens, greedy, held_out))
        return found

    def _texts(self, places: range) -> Iterable[str | None]:
        """What is asked at each place; None where that makes no question."""
        openers = [opener(place) for place in places]
        # Another seed than the answers', whose keys are the same.
        options = Options(
            1.0, top_p=TOP_P, max_new_tokens=LONGEST_QUESTION, eos=self._opened.tokenizer.eos_ids, seed=self._seed + 1
        )
        requests = [
            Request(self._beginning(text), options, key=place) for place, text in zip(places, openers, strict=True)
        ]
        written = generate(self._opened.target, requests, slots=min(32, len(requests)))
        return map(self._text, openers, written)

    def _beginning(self, text: str) -> tuple[int, ...]:
        """The chat template up to the end of a user's unfinished text."""
        tokenizer = self._opened.tokenizer
        one, other = (tokenizer.chat([{"role": "user", "content": content}]) for content in ("a", "b"))
        start = next(place for place, pair in enumerate(zip(one, other, strict=True)) if pair[0] != pair[1])
        return tuple(one[:start]) + tuple(tokenizer.encode(text))

    def _text(self, beginning: str, output: Output) -> str | None:
        text = (beginning + self._opened.tokenizer.decode(output.tokens)).strip()
        if output.finished != "eos":
            whole = _SENTENCE.match(text)
            text = whole[0].strip() if whole else ""
        if len(text) <= len(beginning) or len(text.split()) < FEWEST_WORDS:
            return None
        try:
            self._measured.refuse(text, "a question")
        except TemplateError:
            return None
        return text


def opener(place: int) -> str:
    """What the question of this place begins with: domains take turns, and openers within a domain."""
    domain = DOMAINS[place % len(DOMAINS)]
    return OPENERS[domain][place // len(DOMAINS) % len(OPENERS[domain])]


SOURCES: MappingProxyType[str, type[Source]] = MappingProxyType({"templates": Templates, "asked": Asked})
"""In the order in which their parts make a corpus."""
