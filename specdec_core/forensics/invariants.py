"""Invariants of every round, looked at from outside, for the target and for the drafter apart.

What should be there follows from the emitted tokens alone, never from what a state says of itself. Where a state says
that a row's entries begin is believed, because what lies there is then compared with a fresh recompute.

Rotary models see differences of positions only: there a row's positions count from its first one, whatever that is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from specdec_core.forensics.detectors import (
    Detector,
    Evidence,
    Fed,
    Recording,
    Suspect,
    Told,
    Watched,
    recording,
    told,
)
from specdec_core.forensics.oracles import Reference, draft_reference, reference
from specdec_core.forensics.suspects import ROTARY, SLOTS, drafted_chain

FAMILY = "invariant"
TOLERANCE = 1e-9
"""Of keys and values, relative to the largest of their layer: float64 passes of other shapes differ far less."""
TARGET, DRAFTER = "target", "drafter"


@dataclass(frozen=True)
class Due:
    """What a model's cache should hold of one row: entries before and after a round, by what was emitted."""

    row: Told
    before: int
    after: int


def due(found: Recording, suspect: Suspect, whose: str) -> dict[tuple[int, int], Due]:
    """By round and slot. The target holds all but the newest token. A drafter has forgotten what was rejected, and
    lacks what it has not been fed: the newest token, and of a draft that was accepted whole the last one."""
    entries: dict[tuple[int, int], Due] = {}
    held: dict[int, int] = {}
    for row in told(found.rounds, suspect.requests):
        text, emitted = row.text, row.report.emitted
        if whose == TARGET:
            before, after = len(text) - 1, len(text) + len(emitted) - 1
        else:
            before = after = held.get(row.request, len(text) - 1)
            draft = found.drafts[row.round].get(row.report.slot)
            if draft is not None and len(draft.tokens):
                tokens = drafted_chain(draft)
                after = len(text) + min(_common(tokens.tolist(), emitted[:-1]), len(tokens) - 1)
            held[row.request] = after
        entries[row.round, row.report.slot] = Due(row, before, after)
    return entries


def _common(one: list[int], other: tuple[int, ...]) -> int:
    same = [a == b for a, b in zip(one, other, strict=False)]
    return same.index(False) if False in same else len(same)


@dataclass(frozen=True)
class Look:
    """One model of one recording. `origins`: the first position of each request."""

    whose: str
    seen: Watched
    truth: Reference
    suspect: Suspect
    due: dict[tuple[int, int], Due]
    texts: dict[int, tuple[int, ...]]
    origins: dict[int, int]

    def passes(self) -> Iterator[tuple[Fed, Told, int]]:
        """What was fed, the row that it belongs to, and how many entries should have been there before."""
        grown: dict[tuple[int, int], int] = {}
        for fed in self.seen.fed:
            where = fed.round, fed.slot
            if where not in self.due:
                continue  # the run ended in that round
            before = fed.offset if fed.offset >= 0 else grown.get(where, self.due[where].before)
            if fed.offset < 0 and self.whose == DRAFTER:
                grown[where] = before + len(fed.tokens)
            yield fed, self.due[where].row, before


@lru_cache(maxsize=2)  # one suspect at a time, both of its models
def _look(suspect: Suspect, whose: str) -> Look:
    found = recording(suspect)
    seen = found.target if whose == TARGET else found.drafter
    truth = (reference if whose == TARGET else draft_reference)(suspect.subject)
    entries = due(found, suspect, whose)
    texts = {each.row.request: each.row.text + each.row.report.emitted for each in entries.values()}
    look = Look(whose, seen, truth, suspect, entries, texts, {})
    for fed, row, before in look.passes():
        first = int(fed.positions[0]) - before if suspect.subject.positions == ROTARY else 0
        look.origins.setdefault(row.request, first)
    return look


# --- Caches and passes --------------------------------------------------------------------------------------------


def cache_length(look: Look) -> Evidence | None:
    """Cached are the committed tokens but the newest, and for a drafter what it should have been fed of them."""
    for (index, slot), each in look.due.items():
        length = int(look.seen.kept[index].lengths[slot])
        if each.row.report.finished is None and length != each.after:
            return each.row.evidence(f"{look.whose}'s slot {slot} holds {length} entries, expected {each.after}")
    return None


def positions(look: Look) -> Evidence | None:
    """Positions are the length before plus the depth, so that a row's run from 0 without gaps."""
    for fed, row, before in look.passes():
        expected = look.origins[row.request] + before + fed.shape.depths
        wrong = np.flatnonzero(fed.positions != expected)
        if len(wrong):
            node = int(wrong[0])
            return row.evidence(
                f"{look.whose}'s slot {fed.slot}, node {node} is at position {fed.positions[node]}, "
                f"expected {expected[node]}"
            )
    return None


def mask(look: Look) -> Evidence | None:
    """A node sees its row's committed entries and its own ancestors (within the window, if there is one)."""
    for fed, row, before in look.passes():
        nodes, end = len(fed.tokens), fed.start + before + len(fed.tokens)
        visible = np.zeros((nodes, max(end, fed.visible.shape[1])), bool)
        visible[:, : fed.visible.shape[1]] = fed.visible
        expected = np.zeros_like(visible)
        expected[:, fed.start : fed.start + before] = True
        expected[:, fed.start + before : end] = fed.shape.ancestors
        if look.suspect.subject.window:
            first = before + fed.shape.depths - look.suspect.subject.window + 1
            expected &= np.arange(expected.shape[1]) - fed.start >= first[:, None]
        wrong = np.argwhere(visible != expected)
        if len(wrong):
            node, column = wrong[0].tolist()
            sees = "sees" if visible[node, column] else "does not see"
            return row.evidence(f"{look.whose}'s slot {fed.slot}, node {node} {sees} entry {column - fed.start}")
    return None


def entries(look: Look) -> Evidence | None:
    """Keys and values are those of a plain pass over the committed text."""
    for (index, slot), each in look.due.items():
        if each.row.report.finished is not None:
            continue
        kept, request = look.seen.kept[index], each.row.request
        start = int(kept.starts[slot])
        fresh = look.truth.entries(look.texts[request], look.origins[request])
        for layer, (found, expected) in enumerate(zip(kept.layers, fresh, strict=True)):
            entry = _first_bad(found, expected, slot, start, each.after)
            if entry is not None:
                return each.row.evidence(f"{look.whose}'s layer {layer}, slot {slot}, entry {entry} of {each.after}")
    return None


def _first_bad(found: tuple, expected: tuple, slot: int, start: int, count: int) -> int | None:
    """First entry whose key or value is not the expected one."""
    bad = np.zeros(count, bool)
    for store, fresh in zip(found, expected, strict=True):
        held = store[slot][:, start : start + count]
        if held.shape[1] < count:
            return int(held.shape[1])
        scale = np.abs(fresh).max()
        # NaN is no number that is near enough.
        bad |= ~(np.abs(held - fresh[:, :count]) <= TOLERANCE * scale).all(axis=(0, 2))
    return int(np.flatnonzero(bad)[0]) if bad.any() else None


# --- The loop -----------------------------------------------------------------------------------------------------


def emitted_counts(suspect: Suspect) -> Evidence | None:
    """One to K + 1 tokens; all that was accepted and one, unless the row ended before."""
    for row in told(recording(suspect).rounds, suspect.requests):
        report, policy = row.report, suspect.requests[row.request].policy
        depth, count = len(report.drafted), len(report.emitted)
        most = policy.largest if policy else 0
        whole = count == report.accepted + 1 if report.ending != "cut" else bool(report.finished)
        named = (
            report.ending == "cut" or suspect.subject.trees or (report.ending == "bonus") == (report.accepted == depth)
        )
        if not (depth <= most and 1 <= count <= depth + 1 and whole and named):
            return row.evidence(
                f"{report.ending}: {count} tokens emitted, {report.accepted} of {depth} accepted, K = {most}"
            )
    return None


def append_only(suspect: Suspect) -> Evidence | None:
    """A round starts from the text as emitted so far: its newest token is fed first, then the draft."""
    found = recording(suspect)
    fed = {(each.round, each.slot): each.tokens.tolist() for each in found.target.fed if each.offset < 0}
    for row in told(found.rounds, suspect.requests):
        draft = found.drafts[row.round].get(row.report.slot)
        expected = [row.text[-1], *(draft.tokens.tolist() if draft is not None else [])]
        tokens = fed.get((row.round, row.report.slot), [])
        if row.report.context != len(row.text) or tokens != expected:
            return row.evidence(f"{row.report.context} tokens and {tokens}, expected {len(row.text)} and {expected}")
    return None


def endings(suspect: Suspect) -> Evidence | None:
    """A row ends with its first end token or at its cap, at that very token, and nowhere else."""
    for row in told(recording(suspect).rounds, suspect.requests):
        options, last = suspect.requests[row.request].options, len(row.report.emitted) - 1
        for place, token in enumerate(row.report.emitted):
            ending = "eos" if token in options.eos else None
            if ending is None and row.emitted + place + 1 >= options.max_new_tokens:
                ending = "length"
            ended = row.report.finished if place == last else None
            if ended != ending:
                return row.evidence(f"{ended or 'goes on'} at token {token}, expected {ending or 'to go on'}", place)
    return None


def nobody_starves(suspect: Suspect) -> Evidence | None:
    """Rows are admitted in order as slots come free, and every one that is active emits in every round."""
    waiting, active = list(range(len(suspect.requests))), set[int]()
    rounds, done = recording(suspect).rounds, dict.fromkeys(range(len(suspect.requests)), 0)
    for each in rounds:
        while waiting and len(active) < SLOTS:
            active.add(waiting.pop(0))
        emitting = {row.key for row in each.rows if row.emitted}
        if emitting != active:
            key = min(emitting ^ active)
            return Evidence(
                each.index, key, done[key], f"row {key} should{' not' * (key in emitting)} be in this round"
            )
        for row in each.rows:
            done[row.key] += len(row.emitted)
            if row.finished:
                active.discard(row.key)
    left = sorted({*waiting, *active})
    return Evidence(len(rounds), left[0], done[left[0]], f"row {left[0]} was left behind") if left else None


def _of(whose: str, check: Callable[[Look], Evidence | None]) -> Callable[[Suspect], Evidence | None]:
    return lambda suspect: check(_look(suspect, whose))


_CACHES = {"cache length": cache_length, "positions": positions, "mask": mask, "keys and values": entries}
INVARIANTS = (
    *(Detector(f"{whose}'s {name}", FAMILY, _of(whose, check))
      for whose in (TARGET, DRAFTER) for name, check in _CACHES.items()),
    Detector("emitted counts", FAMILY, emitted_counts),
    Detector("append only", FAMILY, append_only),
    Detector("stop and cap", FAMILY, endings),
    Detector("no row starved", FAMILY, nobody_starves),
)  # fmt: skip
