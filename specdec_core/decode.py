"""The decode loop. There is one: autoregressive, speculative, chain, tree, one row or many, all are this loop.

Each round: admit waiting rows into free slots, draft, verify all rows in one target pass, accept by the rejection
rule, commit the accepted paths. Rows finish alone and free their slot at once.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from specdec_core.arrays import Array, host
from specdec_core.protocol import (
    NO_DRAFT,
    Draft,
    Drafter,
    Phases,
    Round,
    RowRound,
    RowView,
    State,
    Target,
    Verification,
)
from specdec_core.randomness import Source, streams
from specdec_core.rejection import Outcome, follow, walk
from specdec_core.rows import Detokenize, Request, Row
from specdec_core.sampling import greedy_tokens, has_processors, law, log_probability, processed
from specdec_core.topology import forest


class RequestError(ValueError):
    """A request that cannot be decoded; found before anything runs."""


@dataclass(frozen=True)
class Output:
    """What one request became: emitted tokens, how it ended, and log-probabilities if they were asked for."""

    tokens: tuple[int, ...]
    finished: str
    logprobs: tuple[float, ...] | None = None


def decode(
    target: Target,
    requests: Sequence[Request],
    drafter: Drafter | None = None,
    *,
    slots: int | None = None,
    source: Source = streams,
    detokenize: Detokenize | None = None,
) -> Iterator[Round]:
    """Decode all requests, in order, over `slots` slots (default: one each); yields what every round did.

    `RowRound.key` is the index of the request. A row's output depends on the weights and on its own prompt, options,
    seed and key only: not on the number of slots or its neighbours. A drafter changes no greedy token and no law; the
    tokens of a sampled row are others with another drafter. `detokenize` is needed for stop strings. Errors:
    RequestError before anything runs.
    """
    _check(target, requests, drafter, slots, detokenize)
    return _rounds(target, requests, drafter, min(slots or len(requests), len(requests)), source, detokenize)


def generate(target: Target, requests: Sequence[Request], drafter: Drafter | None = None, **how) -> list[Output]:
    """Decode all requests to the end: their outputs, in order. Arguments as `decode`."""
    return outputs(decode(target, requests, drafter, **how), len(requests))


def outputs(rounds: Iterator[Round] | Sequence[Round], requests: int) -> list[Output]:
    """Collect the outputs of all requests from the rounds that decoded them."""
    collected = [Output((), "", None) for _ in range(requests)]
    for each in rounds:
        for row in each.rows:
            so_far = collected[row.key]
            logprobs = None if row.logprobs is None else (so_far.logprobs or ()) + row.logprobs
            collected[row.key] = Output(so_far.tokens + row.emitted, row.finished or "", logprobs)
    return collected


def _rounds(
    target: Target,
    requests: Sequence[Request],
    drafter: Drafter | None,
    slots: int,
    source: Source,
    detokenize: Detokenize | None,
) -> Iterator[Round]:
    capacity = needed_capacity(target, requests, drafter)
    state = target.new_state(slots, capacity)
    if drafter is not None:
        drafter.start(slots, capacity)
    waiting = deque(enumerate(requests))
    free, active = list(range(slots - 1, -1, -1)), dict[int, tuple[int, Row]]()
    index = 0
    while waiting or active:
        clock = _PhaseClock()
        admitted = []
        while waiting and free:
            key, request = waiting.popleft()
            row = Row(request, free.pop(), target.context, source, detokenize)
            active[row.slot] = key, row
            admitted.append(row)
        if admitted:
            _admit(target, state, drafter, admitted)
        clock.lap("admit")
        rows = [active[slot][1] for slot in sorted(active)]
        keys = [active[slot][0] for slot in sorted(active)]
        contexts = [row.count for row in rows]

        drafts = _propose(drafter, rows, state)
        clock.lap("draft")

        where = np.array([row.slot for row in rows])
        shape = forest([draft.topology for draft in drafts])
        verification = target.verify(state, where, _nodes(rows, drafts), shape)
        target.synchronise()
        clock.lap("verify")

        outcomes = _accept(rows, drafts, verification)
        clock.lap("accept")

        taken = [row.append(_emitted(draft, o)) for row, draft, o in zip(rows, drafts, outcomes, strict=True)]
        reports = [
            _report(key, row, context, draft, outcome, took, verification, start)
            for key, row, context, draft, outcome, took, start in zip(
                keys, rows, contexts, drafts, outcomes, taken, shape.offsets[:-1], strict=True
            )
        ]
        paths = [np.array(() if row.finished else o.path, np.int64) for row, o in zip(rows, outcomes, strict=True)]
        target.commit(state, verification, paths)
        if drafter is not None:
            _observe(drafter, rows, verification, outcomes)
        for row in rows:
            if row.finished:
                ended = np.array([row.slot])
                state.release(ended)
                if drafter is not None:
                    drafter.release(ended)
                free.append(row.slot)
                del active[row.slot]
        clock.lap("commit")
        yield Round(index, tuple(reports), len(shape.rows), clock.phases())
        index += 1


def _admit(target: Target, state: State, drafter: Drafter | None, rows: list[Row]) -> None:
    where = np.array([row.slot for row in rows])
    prompts = [row.committed for row in rows]
    features = target.prefill(state, where, prompts)
    if drafter is not None:
        drafter.admit(where, prompts, features)
    target.synchronise()


def _propose(drafter: Drafter | None, rows: list[Row], state: State) -> list[Draft]:
    """One draft a row; rows without a policy or without room are not shown to the drafter."""
    drafts = [NO_DRAFT] * len(rows)
    if drafter is None:
        return drafts
    views: list[tuple[int, RowView]] = []
    for number, row in enumerate(rows):
        if row.request.policy is not None:
            view = row.view(row.request.policy)
            if view.limit > 0:
                views.append((number, view))
    if views:
        proposed = drafter.propose([view for _, view in views], state)
        for (number, _), draft in zip(views, proposed, strict=True):
            drafts[number] = draft
    return drafts


def _nodes(rows: list[Row], drafts: list[Draft]) -> np.ndarray:
    """Flat nodes `[N]`: the newest committed token of each row, then its draft."""
    parts = []
    for row, draft in zip(rows, drafts, strict=True):
        parts += [row.committed[-1:], draft.tokens]
    return np.concatenate(parts)


def _accept(rows: list[Row], drafts: list[Draft], verification: Verification) -> list[Outcome]:
    """The rejection rule, row by row. Logits are looked at only where a walk arrives, but for the plain argmax."""
    plain = [row.options.greedy and not has_processors(row.options, row.emitted) for row in rows]
    greedy = greedy_tokens(verification.logits) if any(plain) else None
    outcomes = []
    for row, draft, start, is_plain in zip(rows, drafts, verification.forest.offsets, plain, strict=False):
        if is_plain:
            assert greedy is not None
            outcomes.append(follow(draft, greedy[start : start + len(draft.topology)].item))
        elif row.options.greedy:
            outcomes.append(follow(draft, _Laws(row, draft, verification.logits, start).greedy_at))
        else:
            outcomes.append(walk(draft, _Laws(row, draft, verification.logits, start).at, row.decisions))
    return outcomes


class _Laws:
    """The target's law after each node of one row's draft: processors see the drafted tokens on the path."""

    def __init__(self, row: Row, draft: Draft, logits: Array, start: int):
        self._options, self._history = row.options, row.history
        self._draft, self._logits, self._start = draft, logits, start

    def _inputs(self, node: int):
        path = self._draft.topology.path(node)[1:]
        logits = host(self._logits[self._start + node])
        return logits, self._options, self._history.extended(self._draft.tokens[path - 1])

    def at(self, node: int) -> np.ndarray:
        return law(*self._inputs(node))

    def greedy_at(self, node: int) -> int:
        logits = processed(*self._inputs(node))
        return int(greedy_tokens(logits[None])[0])


def _emitted(draft: Draft, outcome: Outcome) -> list[int]:
    return [int(draft.tokens[node - 1]) for node in outcome.path[1:]] + [outcome.token]


def _report(
    key: int,
    row: Row,
    context: int,
    draft: Draft,
    outcome: Outcome,
    taken: int,
    verification: Verification,
    start: int,
) -> RowRound:
    depths = np.bincount(draft.topology.depths)[1:]
    whole = taken == len(outcome.path)
    emitted = tuple(row.committed[context:].tolist())
    logprobs = None
    if row.options.logprobs:
        nodes = start + np.array(outcome.path[:taken])
        logits = host(verification.logits[nodes])
        logprobs = tuple(log_probability(values, token) for values, token in zip(logits, emitted, strict=True))
    return RowRound(
        key=key,
        slot=row.slot,
        context=context,
        drafted=tuple(depths.tolist()),
        accepted=min(taken, len(outcome.path) - 1),
        ending=outcome.ending if whole else "cut",
        emitted=emitted,
        finished=row.finished,
        logprobs=logprobs,
    )


def _observe(drafter: Drafter, rows: list[Row], verification: Verification, outcomes: list[Outcome]) -> None:
    """Tell the drafter what was committed, each token with the target's features of the position before it."""
    slots, tokens, features = [], [], []
    for number, (row, outcome) in enumerate(zip(rows, outcomes, strict=True)):
        if row.finished:
            continue
        slots.append(row.slot)
        tokens.append(row.committed[-len(outcome.path) :])
        nodes = verification.forest.offsets[number] + np.array(outcome.path)
        features.append(None if verification.features is None else verification.features[nodes])
    if slots:
        drafter.observe(np.array(slots), tokens, features)


def needed_capacity(target: Target, requests: Sequence[Request], drafter: Drafter | None) -> int:
    """Cache entries a slot: committed tokens plus the widest draft (whose newest token is committed already)."""
    longest = min(target.context, max(len(r.prompt) + r.options.max_new_tokens for r in requests))
    depth = max((r.policy.largest for r in requests if r.policy is not None), default=0)
    return longest + (drafter.most_nodes(depth) if drafter is not None and depth else 0)


def _check(
    target: Target,
    requests: Sequence[Request],
    drafter: Drafter | None,
    slots: int | None,
    detokenize: Detokenize | None,
) -> None:
    if not requests:
        raise RequestError("empty batch: expected at least one request")
    if slots is not None and slots < 1:
        raise RequestError(f"slots {slots}: expected at least 1")
    for index, request in enumerate(requests):
        left = target.context - len(request.prompt)
        foreign = [token for token in request.prompt if not 0 <= token < target.vocabulary]
        if not len(request.prompt):
            raise RequestError(f"request {index} has an empty prompt: expected at least one token")
        if foreign:
            raise RequestError(
                f"request {index} has token ids {foreign[:5]}: expected 0…{target.vocabulary - 1}; another tokenizer?"
            )
        if left < 1:
            raise RequestError(
                f"request {index} has a prompt of {len(request.prompt)} tokens, and the context holds {target.context} "
                "with room for at least one new token: shorten the prompt"
            )
        if request.policy is not None:
            if drafter is None:
                raise RequestError(f"request {index} has a length policy, but there is no drafter: give one, or None")
            if request.policy.largest + 1 > left:
                raise RequestError(
                    f"request {index} drafts up to K = {request.policy.largest} tokens, but only {left} fit into the "
                    f"context of {target.context}: lower K or shorten the prompt"
                )
        if request.key < 0:
            raise RequestError(f"request {index} has key {request.key}: expected an integer ≥ 0")
        outside = [token for token in request.options.eos if not 0 <= token < target.vocabulary]
        if outside:
            raise RequestError(f"request {index} ends at tokens {outside}: expected ids in 0…{target.vocabulary - 1}")
        if request.options.stop and detokenize is None:
            raise RequestError(f"request {index} has stop strings: pass detokenize, so that text can be compared")


class _PhaseClock:
    """Seconds of each phase of one round."""

    def __init__(self) -> None:
        self._laps = Phases()
        self._last = perf_counter()

    def lap(self, phase: str) -> None:
        now = perf_counter()
        self._laps = replace(self._laps, **{phase: now - self._last})
        self._last = now

    def phases(self) -> Phases:
        return self._laps
