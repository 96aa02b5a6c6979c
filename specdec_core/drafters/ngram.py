"""N-gram lookup: what followed the last time that the text ended like this (prompt lookup decoding).

The longest suffix of the committed tokens that occurred before wins, the latest occurrence first. Several candidates
become a tree. The continuation of a match may run into the end of the text; it then goes on over its own tokens, as
LZ77 does, so that a loop is drafted whole.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from itertools import islice
from typing import Any

import numpy as np

from specdec_core.arrays import Array
from specdec_core.protocol import NO_DRAFT, Draft, RowView
from specdec_core.topology import chain, tree


class NGramDrafter:
    """Deterministic drafts (one-hot laws) from the row's own tokens.

    longest, shortest  suffix lengths tried, longest first.
    candidates         distinct continuations: 1 drafts a chain, more a tree of at most candidates × depth nodes.
    """

    def __init__(self, longest: int = 4, shortest: int = 1, candidates: int = 1):
        if not 1 <= shortest <= longest:
            raise ValueError(f"suffix lengths {shortest}…{longest}: expected 1 ≤ shortest ≤ longest")
        if candidates < 1:
            raise ValueError(f"candidates {candidates}: expected at least 1")
        self.longest, self.shortest, self.candidates = longest, shortest, candidates

    def most_nodes(self, depth: int) -> int:
        return depth * self.candidates

    def start(self, slots: int, capacity: int) -> None:
        self._indices: dict[int, _SuffixIndex] = {}

    def admit(self, slots: np.ndarray, prompts: Sequence[np.ndarray], features: Sequence[Array | None]) -> None:
        for slot, prompt in zip(slots, prompts, strict=True):
            self._indices[int(slot)] = _SuffixIndex(self.shortest, self.longest)
            self._indices[int(slot)].extend(prompt)

    def observe(self, slots: np.ndarray, tokens: Sequence[np.ndarray], features: Sequence[Array | None]) -> None:
        for slot, emitted in zip(slots, tokens, strict=True):
            self._indices[int(slot)].extend(emitted)

    def release(self, slots: np.ndarray) -> None:
        for slot in slots:
            self._indices.pop(int(slot), None)

    def propose(self, views: Sequence[RowView], state: Any) -> list[Draft]:
        return [self._draft(self._indices[view.slot], view.limit) for view in views]

    def _draft(self, index: _SuffixIndex, depth: int) -> Draft:
        found: list[list[int]] = []
        for start in islice(index.matches(), 16 * self.candidates):  # a looping text matches everywhere
            continuation = index.continuation(start, depth)
            if continuation not in found:
                found.append(continuation)
                if len(found) == self.candidates:
                    break
        if not found:
            return NO_DRAFT
        if len(found) == 1:
            return Draft(np.array(found[0], np.int64), chain(depth + 1))
        return _merge(found)


class _SuffixIndex:
    """Where each n-gram was followed by something: a table a length, positions of the following token, latest last."""

    def __init__(self, shortest: int, longest: int):
        self._tokens: list[int] = []
        self._followers = {n: defaultdict[tuple[int, ...], list[int]](list) for n in range(longest, shortest - 1, -1)}

    def extend(self, tokens: np.ndarray) -> None:
        for token in tokens.tolist():
            end = len(self._tokens)
            for n, table in self._followers.items():
                if end >= n:
                    table[tuple(self._tokens[end - n :])].append(end)
            self._tokens.append(token)

    def matches(self):
        """Positions that follow an earlier occurrence of the suffix: longest suffix first, latest first."""
        for n, table in self._followers.items():
            if len(self._tokens) >= n:
                yield from reversed(table.get(tuple(self._tokens[-n:]), ()))

    def continuation(self, start: int, length: int) -> list[int]:
        taken = self._tokens[start : start + length]
        while len(taken) < length:
            taken.append(taken[len(taken) + start - len(self._tokens)])
        return taken


def _merge(continuations: list[list[int]]) -> Draft:
    """Continuations as a trie, earlier candidates first among siblings."""
    parents, tokens = [-1], list[int]()
    children: dict[tuple[int, int], int] = {}
    for continuation in continuations:
        node = 0
        for token in continuation:
            if (node, token) not in children:
                children[node, token] = len(parents)
                parents.append(node)
                tokens.append(token)
            node = children[node, token]
    return Draft(np.array(tokens, np.int64), tree(tuple(parents)))
