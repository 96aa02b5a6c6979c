"""The wrong pieces of the decode loop that faults (faults.py) put in place of right ones (more: mutations_rule.py)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from unittest.mock import patch

import numpy as np

from specdec_core import decode, rejection
from specdec_core.protocol import Draft, LengthPolicy, Round, RowView, Verification
from specdec_core.rejection import Outcome
from specdec_core.rows import Request, Row

# --- Endings ------------------------------------------------------------------------------------------------------


def ending_together(rounds):
    """The first row that meets its end token ends all of them, those that wait included."""

    def mutated(*given) -> Iterator[Round]:
        for each in rounds(*given):
            over = any(row.finished == "eos" for row in each.rows)
            ended = tuple(replace(row, finished=row.finished or "eos") if over else row for row in each.rows)
            yield replace(each, rows=ended)
            if over:
                return

    return mutated


class CapBetweenBlocks(Row):
    """The cap is looked at after a block only, and no draft is shortened for it."""

    def __init__(self, request: Request, *rest):
        options = request.options
        room = options.max_new_tokens + (request.policy.largest if request.policy else 0)
        super().__init__(replace(request, options=replace(options, max_new_tokens=room)), *rest)
        self.request, self.options, self._capped = request, options, True

    def view(self, policy: LengthPolicy) -> RowView:
        return replace(super().view(policy), limit=policy.largest)

    def append(self, tokens: Sequence[int]) -> int:
        self._capped = False
        taken = super().append(tokens[:-1]) if len(tokens) > 1 else 0
        if self.finished:
            return taken
        self._capped = True
        return taken + super().append(tokens[-1:])

    def _ending(self, token: int) -> str | None:
        found = super()._ending(token)
        over = self._capped and self.emitted >= self.options.max_new_tokens
        return ("length" if over else None) if found in (None, "length") else found


# --- What is fed --------------------------------------------------------------------------------------------------


def feeding_the_one_before(nodes):
    """Where a row has emitted something, the token before its newest is fed once more in its place."""

    def mutated(rows: list[Row], drafts: list[Draft]) -> np.ndarray:
        fed, start = nodes(rows, drafts).copy(), 0
        for row, draft in zip(rows, drafts, strict=True):
            if row.emitted:
                fed[start] = row.committed[-2]
            start += len(draft.topology)
        return fed

    return mutated


# --- Acceptance and what comes after it ---------------------------------------------------------------------------


def greedily(make):
    """A wrong walk (mutations_rule.py), as a wrong `follow` for greedy rows."""

    def made(follow):
        walk = make(lambda draft, greedy_at, decisions: follow(draft, greedy_at))
        return lambda draft, greedy_at: walk(draft, greedy_at, None)

    return made


def token_of_the_next_row(accept):
    """The recovered or bonus token is the one of the row after."""

    def mutated(rows: list[Row], drafts: list[Draft], verification: Verification) -> list[Outcome]:
        found = accept(rows, drafts, verification)
        return [replace(one, token=other.token) for one, other in zip(found, [*found[1:], found[0]], strict=True)]

    return mutated


def residual_of_the_next_row(accept):
    """What a rejection leaves is taken from the law of the row after, at its newest token."""

    def mutated(rows: list[Row], drafts: list[Draft], verification: Verification) -> list[Outcome]:
        starts = verification.forest.offsets
        laws = [
            decode._Laws(row, draft, verification.logits, start)
            for row, draft, start in zip(rows, drafts, starts, strict=False)
        ]
        sampled = iter([number for number, row in enumerate(rows) if not row.options.greedy])
        right, residual = decode.walk, rejection.residual

        def walk(draft: Draft, law_at, decisions) -> Outcome:
            other = laws[(next(sampled) + 1) % len(rows)]
            with patch.object(rejection, "residual", lambda p, q: residual(other.at(0), q)):
                return right(draft, law_at, decisions)

        with patch.object(decode, "walk", walk):
            return accept(rows, drafts, verification)

    return mutated


# --- Drafting -----------------------------------------------------------------------------------------------------


def drafting_the_least(propose):
    """No row drafts more than the row with the least left of its cap may."""

    def mutated(drafter, rows: list[Row], state) -> list[Draft]:
        least = min(row.options.max_new_tokens - row.emitted for row in rows) - 1
        view = Row.view

        def shortened(self: Row, policy: LengthPolicy) -> RowView:
            found = view(self, policy)
            return replace(found, limit=min(found.limit, least))

        with patch.object(Row, "view", shortened):
            return propose(drafter, rows, state)

    return mutated
