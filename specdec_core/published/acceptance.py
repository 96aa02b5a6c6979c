"""Published rules of acceptance that are not the rejection rule: contexts in which the decode loop follows them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

from specdec_core import decode
from specdec_core.protocol import Draft, Verification
from specdec_core.rejection import Outcome
from specdec_core.rows import Row


@contextmanager
def keeping_the_draft() -> Iterator[None]:
    """On a mismatch the draft token stays (DSD-like): what should be recovered from the target is the drafter's."""
    right = decode.follow

    def follow(draft: Draft, greedy_at: Callable[[int], int]) -> Outcome:
        found = right(draft, greedy_at)
        children = draft.topology.children[found.path[-1]]
        return replace(found, token=int(draft.tokens[children[0] - 1])) if children else found

    with patch.object(decode, "follow", follow):
        yield


@contextmanager
def cut_to_the_batch_minimum() -> Iterator[None]:
    """Every row keeps as many draft tokens as the row that accepted least, so that the rectangle stays aligned.

    The output is right: a row that is cut emits the next token that it had accepted, as its last.
    """
    right = decode._accept

    def accept(rows: list[Row], drafts: list[Draft], verification: Verification) -> list[Outcome]:
        outcomes = right(rows, drafts, verification)
        least = min(len(outcome.path) for outcome in outcomes)
        return [_cut(draft, outcome, least) for draft, outcome in zip(drafts, outcomes, strict=True)]

    with patch.object(decode, "_accept", accept):
        yield


def _cut(draft: Draft, outcome: Outcome, nodes: int) -> Outcome:
    if len(outcome.path) == nodes:
        return outcome
    return Outcome(outcome.path[:nodes], int(draft.tokens[outcome.path[nodes] - 1]), "recovered")
