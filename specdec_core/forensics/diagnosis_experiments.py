"""What a diagnosis asks of a batched decoder: variations of one batch, and its answers, read whatever their form."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import numpy as np

from specdec_core.decode import outputs
from specdec_core.protocol import Round

Prompt = tuple[int, ...]

BatchDecoder = Callable[..., Any]
"""decoder(prompts): the new greedy tokens of each row, or an iterator of rounds. A round is a list with the newly
emitted tokens of every row (none for a row that has ended), or a protocol.Round whose keys count the prompts. One that
also takes `max_new_tokens=` is tried with smaller caps."""

WHOLE, AGAIN, ALONE = "whole batch", "whole batch again", "alone"
REPEATED, CUT, PERMUTED = "one prompt repeated", "cut to equal lengths", "rows permuted"
CONTENT, LONGER, SHORTER = "neighbours of other content", "longer neighbour", "shorter neighbour"
CAP, PLAIN, MARKED, RESTARTED = "smaller cap", "without special tokens", "with special tokens", "restarted"


@dataclass(frozen=True)
class Experiment:
    """One call of the decoder.

    prompts  the batch.
    rows     `[B]`: which of the user's prompts each of them is, or is a variation of; −1: not looked at.
    cap      most new tokens a row.
    """

    name: str
    prompts: tuple[Prompt, ...]
    rows: tuple[int, ...]
    cap: int

    @property
    def padding(self) -> list[int]:
        """Tokens that each prompt is shorter than the batch's longest, `[B]`."""
        longest = max(map(len, self.prompts))
        return [longest - len(prompt) for prompt in self.prompts]


def experiments(prompts: Sequence[Prompt], cap: int, context: int, special: Sequence[int]) -> list[Experiment]:
    """The variations of a batch of at least two prompts, without those that these prompts do not allow.

    Equal lengths come in two ways. Copies of one prompt also accept alike, so that nothing is ever ragged; prompts cut
    to the shortest begin equal, and become ragged only by what their drafts make of them. Neighbours change in every
    second row at a time, so that each row is once looked at with all its next neighbours changed.
    """
    count, everyone = len(prompts), tuple(range(len(prompts)))
    whole = tuple(prompts)
    lengths = [len(prompt) for prompt in prompts]
    shortest, longest = int(np.argmin(lengths)), int(np.argmax(lengths))
    others = tuple(-1 if row == longest else row for row in everyone)
    order = (*everyone[1:], 0)  # every row at another place
    made = [Experiment(WHOLE, whole, everyone, cap), Experiment(AGAIN, whole, everyone, cap)]
    made += [Experiment(ALONE, (prompt,), (row,), cap) for row, prompt in enumerate(prompts)]
    made += [
        Experiment(REPEATED, (prompts[row],) * count, (row,) * count, cap) for row in dict.fromkeys((shortest, longest))
    ]
    made += [Experiment(CUT, tuple(prompt[: min(lengths)] for prompt in prompts), everyone, cap)]
    made += [Experiment(PERMUTED, tuple(prompts[row] for row in order), order, cap)]
    pool = _ordinary(prompts, special)
    for parity in (0, 1):
        seen = tuple(row if row % 2 == parity else -1 for row in everyone)
        changed = tuple(
            prompt if row >= 0 else _other(prompt, pool, index)
            for index, (row, prompt) in enumerate(zip(seen, prompts, strict=True))
        )
        made.append(Experiment(CONTENT, changed, seen, cap))
    # With room for a draft as long as the cap: a decoder may refuse a prompt without.
    much = min(3 * max(lengths), context - 2 * cap)
    if much > max(lengths):
        grown = tuple(np.resize(prompts[longest], much).tolist())
        made.append(Experiment(LONGER, _replaced(whole, longest, grown), others, cap))
    if lengths[longest] > 1:
        made.append(Experiment(SHORTER, _replaced(whole, longest, prompts[longest][-1:]), others, cap))
    made += [Experiment(CAP, whole, everyone, less) for less in dict.fromkeys((1, cap // 2)) if 0 < less < cap]
    return made + _about_special(prompts, cap, special, pool)


@dataclass(frozen=True)
class Step:
    """What one round did to one row. What is not known is None.

    rejected  a draft token was (told by lists only: fewer tokens came than in the fullest round so far).
    whole     a draft was accepted to its end.
    accepted  draft tokens emitted.
    """

    emitted: int
    rejected: bool
    whole: bool | None = None
    accepted: int | None = None


@dataclass(frozen=True)
class Run:
    """A decoder's answer to one batch of B prompts.

    tokens  of each row, uncut.
    steps   a round each: what happened to the rows in it, by place in the batch; None if rounds were not told.
    rounds  those of decode(), where the decoder told such.
    error   what it raised, or what of its answer could not be read.
    """

    tokens: tuple[tuple[int, ...], ...]
    steps: tuple[dict[int, Step], ...] | None = None
    rounds: tuple[Round, ...] | None = None
    error: str = ""

    @property
    def counts(self) -> tuple[tuple[int, ...], ...] | None:
        """Tokens of each row in each round, `[rounds][B]`, −1 for a row that had no part in it."""
        if self.steps is None:
            return None
        return tuple(tuple(s[p].emitted if p in s else -1 for p in range(len(self.tokens))) for s in self.steps)


class Caller:
    """A decoder, with what it takes and every failure of it caught."""

    def __init__(self, decoder: BatchDecoder) -> None:
        self._decoder, self._fullest = decoder, 0
        try:
            self.takes_cap = "max_new_tokens" in inspect.signature(decoder).parameters
        except (TypeError, ValueError):  # a built-in without a signature
            self.takes_cap = False

    def run(self, prompts: Sequence[Prompt], cap: int) -> Run:
        """Its answer; whatever a foreign decoder raises is a finding, and no end of the diagnosis."""
        try:
            how = {"max_new_tokens": cap} if self.takes_cap else {}
            found = read(self._decoder(list(prompts), **how), len(prompts), cap, self._fullest)
            self._fullest = max(
                self._fullest, *(step.emitted for each in found.steps or () for step in each.values()), 0
            )
            return found
        except Exception as error:
            return Run(((),) * len(prompts), error=f"{type(error).__name__}: {error}")

    def first(self, prompts: Sequence[Prompt], cap: int) -> Run:
        """The first new token of each row. Asked for with the usual cap, so that drafts are as long as usual."""
        found = self.run(prompts, cap)
        return Run(tuple(row[:1] for row in found.tokens), error=found.error)


def read(returned: Any, rows: int, cap: int, fullest: int = 0) -> Run:
    """What a decoder returned for so many rows; `fullest`: most tokens that it has been seen to emit in a round.

    ValueError if it is of no known form, or rounds do not end.
    """
    if not isinstance(returned, Iterator):
        found = list(returned)
        if not (found and isinstance(found[0], Round)):
            return Run(_rows(found, rows, "an answer"))
        returned = iter(found)
    most = cap * rows + 8  # even a decoder of one row after another is done
    rounds = list(islice(returned, most + 1))
    if len(rounds) > most:
        raise ValueError(f"more than {most} rounds for {rows} rows of at most {cap} tokens: expected an end")
    if all(isinstance(each, Round) for each in rounds):
        return _of_rounds(tuple(rounds), rows)
    lists = [_rows(each, rows, f"round {number}") for number, each in enumerate(rounds)]
    fullest = max(fullest, *(len(row) for each in lists for row in each), 0)
    steps = tuple(
        {place: Step(len(row), len(row) < fullest) for place, row in enumerate(each) if row} for each in lists
    )
    joined = tuple(tuple(token for each in lists for token in each[place]) for place in range(rows))
    return Run(joined, steps)


def _of_rounds(rounds: tuple[Round, ...], rows: int) -> Run:
    steps = tuple(
        {
            row.key: Step(
                len(row.emitted),
                row.accepted < len(row.drafted),
                0 < len(row.drafted) == row.accepted,
                row.accepted,
            )
            for row in each.rows
        }
        for each in rounds
    )
    return Run(tuple(each.tokens for each in outputs(rounds, rows)), steps, rounds)


def _rows(found: Any, rows: int, what: str) -> tuple[tuple[int, ...], ...]:
    lists = [list(row) for row in found]
    if len(lists) != rows:
        raise ValueError(f"{what} of {len(lists)} lists of tokens: expected one for each of the {rows} rows")
    wrong = [token for row in lists for token in row if int(token) != token]
    if wrong:
        raise ValueError(f"{what} holds {wrong[0]!r}: expected token ids")
    return tuple(tuple(int(token) for token in row) for row in lists)


def _about_special(prompts: Sequence[Prompt], cap: int, special: Sequence[int], pool: np.ndarray) -> list[Experiment]:
    """The batch without the special tokens that it has, and with those that it has not in every fourth place."""
    rows, held = tuple(range(len(prompts))), {token for prompt in prompts for token in prompt}
    made = []
    if held & set(special) and len(pool):
        plain = tuple(
            tuple(int(pool[index % len(pool)]) if token in special else token for index, token in enumerate(prompt))
            for prompt in prompts
        )
        made.append(Experiment(PLAIN, plain, rows, cap))
    absent = [token for token in special if token not in held]
    if absent:
        marks = [absent[row % len(absent)] for row in rows]
        # In many places: one token hidden from a long prompt changes little.
        marked = tuple(
            tuple(mark if index % 4 == 1 else token for index, token in enumerate(prompt))
            for prompt, mark in zip(prompts, marks, strict=True)
        )
        made.append(Experiment(MARKED, marked, rows, cap))
    return made


def _ordinary(prompts: Sequence[Prompt], special: Sequence[int]) -> np.ndarray:
    """Distinct tokens of all prompts but the special ones, ascending."""
    return np.array(sorted({token for prompt in prompts for token in prompt} - set(special)), np.int64)


def _other(prompt: Prompt, pool: np.ndarray, seed: int) -> Prompt:
    """As many ordinary tokens, drawn at random; the prompt backwards if there are none to draw from."""
    if len(pool) < 2:
        return prompt[::-1]
    return tuple(np.random.default_rng(seed).choice(pool, len(prompt)).tolist())


def _replaced(prompts: tuple[Prompt, ...], row: int, by: Prompt) -> tuple[Prompt, ...]:
    return (*prompts[:row], by, *prompts[row + 1 :])
