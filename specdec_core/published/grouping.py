"""Grouping by length (EXSPEC, arXiv 2510.22876): a pool of rows, of which a round takes rows of equal length together.

Rows of equal length need no padding, so nothing is realigned; what it costs is waiting. The production loop decodes one
round of the chosen rows at a time: it is handed rows whose cache is in the pool already. Where no two rows are of equal
length the round falls back to rows of any length (here over masked scatter: what is measured is grouping alone).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import Any

import numpy as np

from specdec_core.arrays import Array
from specdec_core.decode import RequestError, decode, needed_capacity
from specdec_core.protocol import Draft, Drafter, Round, RowView, State, Target, Verification
from specdec_core.randomness import Decisions, streams
from specdec_core.rows import Request
from specdec_core.topology import Forest


def grouped(
    target: Target, requests: Sequence[Request], drafter: Drafter | None, *, batch: int, pool: int
) -> Iterator[Round]:
    """Decode all requests; a round takes at most `batch` of the up to `pool` rows that are in the cache.

    Chosen is the largest group of equally long rows, of several the one that has waited longest. Errors: RequestError
    for options that look back at where the prompt ended (penalties, min_new_tokens, stop strings): the loop is entered
    anew every round and would count from there.
    """
    if not 1 <= batch <= pool:
        raise RequestError(f"batches of {batch} from a pool of {pool} rows: expected 1 ≤ batch ≤ pool")
    decode(target, requests, drafter)  # checks the requests; nothing is decoded before the first round is asked for
    for index, request in enumerate(requests):
        how = request.options
        most = len(request.prompt) + how.max_new_tokens + (request.policy.largest if request.policy else 0)
        if most > target.context:
            raise RequestError(
                f"request {index} may need {most} tokens with its draft, over the context of {target.context}: "
                "grouping does not shorten drafts at its end; ask for fewer new tokens"
            )
        if how.penalised or how.min_new_tokens or how.stop:
            raise RequestError(
                f"request {index} has penalties, min_new_tokens or stop strings: grouping has none of them; "
                "decode it with decode()"
            )
    return _rounds(target, requests, drafter, batch, pool)


def _rounds(
    target: Target, requests: Sequence[Request], drafter: Drafter | None, batch: int, pool: int
) -> Iterator[Round]:
    capacity = needed_capacity(target, requests, drafter)
    state = target.new_state(pool, capacity)
    pooled = None if drafter is None else _PooledDrafter(drafter, pool, capacity)
    waiting, free, rows = list(range(len(requests))), list(range(pool)), list[_Waiting]()
    remembered: dict[tuple[int, int], Decisions] = {}

    def source(seed: int, key: int, purpose: int) -> Decisions:
        """The streams of request `key`, which go on from round to round."""
        return remembered.setdefault((key, purpose), streams(seed, requests[key].key, purpose))

    for index in count():
        while waiting and free:
            key = waiting.pop(0)
            rows.append(_Waiting(key, free.pop(0), np.array(requests[key].prompt, np.int64), index))
            slot, prompt = np.array([rows[-1].slot]), [rows[-1].committed]
            features = target.prefill(state, slot, prompt)
            if drafter is not None:
                drafter.admit(slot, prompt, features)
        if not rows:
            return
        group = _choose(rows, batch)
        where = np.array([row.slot for row in group])
        if pooled is not None:
            pooled.where = where
        rest = [_rest(requests[row.key], row) for row in group]
        found = next(decode(_Pooled(target, state, where), rest, pooled, source=source))
        reports = []
        for row, report in zip(group, sorted(found.rows, key=lambda each: each.key), strict=True):
            reports.append(replace(report, key=row.key, slot=row.slot))
            row.committed = np.concatenate([row.committed, report.emitted]).astype(np.int64)
            row.since = index + 1
            if report.finished:
                rows.remove(row)
                free.append(row.slot)
        yield Round(index, tuple(reports), found.nodes, found.seconds)


@dataclass(eq=False)
class _Waiting:
    """A row of the pool: its request's key, its slot, its tokens, and since which round it waits."""

    key: int
    slot: int
    committed: np.ndarray
    since: int


def _choose(rows: Sequence[_Waiting], batch: int) -> list[_Waiting]:
    """The next rows: of equal length if two are."""
    by_length: dict[int, list[_Waiting]] = {}
    for row in sorted(rows, key=lambda each: each.since):
        by_length.setdefault(len(row.committed), []).append(row)
    best = max(by_length.values(), key=lambda group: (min(len(group), batch), -group[0].since))
    if len(best) == 1:
        best = sorted(rows, key=lambda each: each.since)
    return best[:batch]


def _rest(request: Request, row: _Waiting) -> Request:
    """What is left of a request; its key is the request's index here, for `source`."""
    left = request.options.max_new_tokens - (len(row.committed) - len(request.prompt))
    options = replace(request.options, max_new_tokens=left)
    return replace(request, prompt=tuple(row.committed.tolist()), options=options, key=row.key)


class _PooledState:
    """The chosen rows of a state, as the loop sees them: slots 0, 1, …"""

    def __init__(self, state: State, where: np.ndarray):
        self._state, self._where = state, where

    @property
    def lengths(self) -> np.ndarray:
        return self._state.lengths[self._where]

    @property
    def capacity(self) -> int:
        return self._state.capacity

    def rewind(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        self._state.rewind(self._where[slots], lengths)

    def release(self, slots: np.ndarray) -> None:
        self._state.release(self._where[slots])


class _Pooled:
    """A target whose rows are cached already, in slots `where` of `state`."""

    def __init__(self, target: Target, state: State, where: np.ndarray):
        self._target, self._state, self._where = target, state, where
        self.vocabulary, self.context = target.vocabulary, target.context
        self.synchronise: Callable[[], None] = target.synchronise

    def new_state(self, slots: int, capacity: int) -> _PooledState:
        return _PooledState(self._state, self._where)

    def prefill(self, state: Any, slots: np.ndarray, prompts: Sequence[np.ndarray]) -> list[Array | None]:
        return [None] * len(prompts)

    def verify(self, state: Any, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> Verification:
        return self._target.verify(self._state, self._where[slots], tokens, forest)

    def commit(self, state: Any, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        self._target.commit(self._state, verification, paths)


class _PooledDrafter:
    """A drafter over all slots of the pool, as the loop sees it for the rows in `where`."""

    def __init__(self, drafter: Drafter, pool: int, capacity: int):
        self._drafter = drafter
        self.most_nodes = drafter.most_nodes
        self.where = np.arange(pool)
        drafter.start(pool, capacity)

    def start(self, slots: int, capacity: int) -> None:
        """The pool was made room for once."""

    def admit(self, slots: np.ndarray, prompts: Sequence[np.ndarray], features: Sequence[Array | None]) -> None:
        """Rows were admitted when they entered the pool."""

    def propose(self, views: Sequence[RowView], state: Any) -> list[Draft]:
        return self._drafter.propose([replace(view, slot=int(self.where[view.slot])) for view in views], state)

    def observe(self, slots: np.ndarray, tokens: Sequence[np.ndarray], features: Sequence[Array | None]) -> None:
        self._drafter.observe(self.where[slots], tokens, features)

    def release(self, slots: np.ndarray) -> None:
        self._drafter.release(self.where[slots])
