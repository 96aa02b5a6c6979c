"""What a detector is: it runs a suspect in its own way, and gives the first evidence that something is wrong, or none.

The families: oracles (oracles.py) compare with what should be emitted, invariants (invariants.py) look inside every
round, metamorphic tests and canaries (metamorphic.py) compare runs that should be alike. The list is in
fault_matrix.py. One run is watched from outside: hooks on the target's and on the drafter's model note what they are
really handed, and after each round what the states hold is copied, so that a fault cannot hide behind its bookkeeping.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from specdec_core.arrays import Array, host
from specdec_core.decode import decode
from specdec_core.forensics.suspects import (
    SLOTS,
    TABLE,
    Requests,
    Subject,
    drafting_target,
    new_drafter,
    new_target,
)
from specdec_core.protocol import Draft, Drafter, Round, RowRound, RowView, Verification
from specdec_core.targets.huggingface import HuggingFaceTarget
from specdec_core.targets.huggingface_cache import HoledCache
from specdec_core.topology import Forest, Topology, chain


@dataclass(frozen=True)
class Evidence:
    """The first thing that a detector finds wrong.

    round, row  where: −1 if what was looked at has none.
    tokens      that the row had emitted before it, −1 if unknown: the delay of the detection.
    where       row, event, layer, slot, position in words.
    """

    round: int
    row: int
    tokens: int
    where: str


def earliest(found: Sequence[Evidence]) -> Evidence | None:
    """By round, then by row."""
    return min(found, key=lambda each: (each.round, each.row), default=None)


@dataclass(frozen=True)
class Told:
    """One row of one round, with what it had been before by what was emitted: nobody's bookkeeping but the observer's.

    text  prompt and emitted tokens before the round.
    """

    round: int
    report: RowRound
    request: int
    text: tuple[int, ...]
    emitted: int

    def evidence(self, where: str, after: int = 0) -> Evidence:
        """Against this row, `after` tokens of this round's."""
        return Evidence(self.round, self.request, self.emitted + after, f"row {self.request}: {where}")


def told(rounds: Sequence[Round], requests: Requests) -> Iterator[Told]:
    """All rows of all rounds, in order."""
    texts = [request.prompt for request in requests]
    for each in rounds:
        for report in each.rows:
            text = texts[report.key]
            yield Told(each.index, report, report.key, text, len(text) - len(requests[report.key].prompt))
            texts[report.key] = (*text, *report.emitted)


def noisy(subject: Subject) -> Drafter:
    return new_drafter(subject)


@dataclass(frozen=True)
class How:
    """How to run a decoder. `drafter` makes a fresh one; None decodes without."""

    requests: Requests
    drafter: Callable[[Subject], Drafter] | None = noisy
    slots: int = SLOTS
    chunk: int = 512


class Crashed(RuntimeError):
    """A run ended in an error: whatever is wrong was not silent, but no detector saw it either."""


Result = TypeVar("Result")


class Suspect:
    """A decoder of which nobody knows whether it is right: a subject with a fault in place, or none.

    Detectors only run it. What they all run is run once.
    """

    def __init__(self, subject: Subject, requests: Requests, inject: Callable[[], AbstractContextManager[Any]]):
        self.subject, self.requests, self.inject = subject, requests, inject
        self._done: dict[Hashable, Any] = {}

    def once(self, name: Hashable, run: Callable[[], Result]) -> Result:
        """What `run` returns with the fault in place; Crashed, every time, if it raised."""
        if name not in self._done:
            try:
                with self.inject():
                    self._done[name] = run()
            except Exception as error:  # whatever a broken decoder raises
                self._done[name] = Crashed(f"{type(error).__name__}: {error}")
        found = self._done[name]
        if isinstance(found, Crashed):
            raise found
        return found

    def rounds(self, how: How) -> tuple[Round, ...]:
        def run() -> tuple[Round, ...]:
            drafter = how.drafter(self.subject) if how.drafter else None
            requests = how.requests if drafter else [replace(each, policy=None) for each in how.requests]
            return tuple(decode(new_target(self.subject, how.chunk), requests, drafter, slots=how.slots))

        return self.once(how, run)


@dataclass(frozen=True)
class Detector:
    """Looks for one thing, which correct code never shows. `sees`: the subjects that it can look at."""

    name: str
    family: str
    look: Callable[[Suspect], Evidence | None]
    sees: Callable[[Subject], bool] = lambda subject: subject.state != TABLE


# --- Watching -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Fed:
    """What one row of one pass was handed, without padding: `tokens` and `positions` `[n]`, `visible` `[n, R]`.

    offset  in the prompt, of a pass over a prompt; −1 of others.
    start   column at which the state says that the slot's entries begin.
    """

    round: int
    slot: int
    offset: int
    start: int
    shape: Topology
    tokens: np.ndarray
    positions: np.ndarray
    visible: np.ndarray


@dataclass(frozen=True)
class Kept:
    """A state after a round: lengths and starts `[S]`, keys and values `[S, kv_heads, capacity, head_dim]` by layer."""

    lengths: np.ndarray
    starts: np.ndarray
    layers: list[tuple[np.ndarray, np.ndarray]]


class Watched:
    """A target that notes what its model is handed and what its state keeps."""

    def __init__(self, target: HuggingFaceTarget):
        self._target = target
        self.vocabulary, self.context, self.synchronise = target.vocabulary, target.context, target.synchronise
        self.fed: list[Fed] = []
        self.kept: list[Kept] = []
        self._passes: list[tuple[np.ndarray, ...]] = []

    def new_state(self, slots: int, capacity: int) -> HoledCache:
        self._state = self._target.new_state(slots, capacity)
        return self._state

    def prefill(self, state: HoledCache, slots: np.ndarray, prompts: Sequence[np.ndarray]) -> list[Array | None]:
        with self._hooked():
            found = self._target.prefill(state, slots, prompts)
        passes = iter(self._passes)
        for slot, prompt in zip(slots.tolist(), prompts, strict=True):
            done = 0
            while done < len(prompt) - 1:
                tokens, positions, visible = (each[0] for each in next(passes))
                shape = chain(len(tokens))
                self.fed.append(Fed(len(self.kept), slot, done, 0, shape, tokens, positions, visible))
                done += len(tokens)
        return found

    def verify(self, state: HoledCache, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> Verification:
        starts = _starts(state)[slots]
        with self._hooked():
            found = self._target.verify(state, slots, tokens, forest)
        (batch,) = self._passes
        for row, shape in enumerate(forest.trees):
            seen = (each[row, : len(shape)] for each in batch)
            self.fed.append(Fed(len(self.kept), int(slots[row]), -1, int(starts[row]), shape, *seen))
        return found

    def commit(self, state: HoledCache, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        self._target.commit(state, verification, paths)

    def end_round(self) -> None:
        state = self._state
        layers = [(host(keys).copy(), host(values).copy()) for _, (keys, values) in sorted(state.layers.items())]
        self.kept.append(Kept(state.lengths.copy(), _starts(state), layers))

    @contextmanager
    def _hooked(self) -> Iterator[None]:
        """Notes tokens, positions `[B, n]` and visible entries `[B, n, R]` of each pass of the model."""
        self._passes = []

        def note(model: Any, args: Any, given: dict[str, Any]) -> None:
            visible = given["attention_mask"][:, 0] == 0
            seen = (given["input_ids"], given["position_ids"], visible)
            self._passes.append(tuple(host(each).copy() for each in seen))

        hook = self._target._model.register_forward_pre_hook(note, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()


def _starts(state: HoledCache) -> np.ndarray:
    """First column of each slot's entries: 0, but where rows are aligned at their ends."""
    return np.array(getattr(state, "starts", np.zeros(len(state.lengths), np.int64)))


class WatchedDrafter:
    """A drafter whose drafts are noted, by round and slot."""

    def __init__(self, drafter: Drafter):
        self._drafter = drafter
        self.drafts: list[dict[int, Draft]] = [{}]
        self.most_nodes, self.start, self.admit = drafter.most_nodes, drafter.start, drafter.admit
        self.observe, self.release = drafter.observe, drafter.release

    def propose(self, views: Sequence[RowView], state: Any) -> list[Draft]:
        found = self._drafter.propose(views, state)
        self.drafts[-1] |= {view.slot: draft for view, draft in zip(views, found, strict=True)}
        return found


@dataclass(frozen=True)
class Recording:
    """One watched run."""

    rounds: tuple[Round, ...]
    target: Watched
    drafter: Watched
    drafts: list[dict[int, Draft]]


def recording(suspect: Suspect) -> Recording:
    """The suspect's run of its whole batch, watched."""

    def run() -> Recording:
        target, model = Watched(new_target(suspect.subject)), Watched(drafting_target(suspect.subject))
        drafter = WatchedDrafter(new_drafter(suspect.subject, model))
        rounds = []
        for each in decode(target, suspect.requests, drafter, slots=SLOTS):
            rounds.append(each)
            target.end_round()
            model.end_round()
            drafter.drafts.append({})
        return Recording(tuple(rounds), target, model, drafter.drafts)

    found = suspect.once("recording", run)
    suspect.once(How(suspect.requests), lambda: found.rounds)  # the same run: nobody has to make it again
    return found
