"""Runs that should be alike though nobody knows what they should emit, and canaries: runs whose outcome is known.

A row's output, and what each of its rounds did, depend on nothing but its own request: not on its neighbours' content,
order, length or seeds, nor on how many rows run together or how prompts are chunked.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from specdec_core.decode import decode
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.forensics.detectors import Detector, Evidence, How, Suspect, Told, earliest, noisy, recording, told
from specdec_core.forensics.exact_grid import CONTEXT, DRAFTERS, TARGET, V
from specdec_core.forensics.oracles import LAW, first_wrong, reference
from specdec_core.forensics.suspects import SLOTS, TABLE, Requests, Subject, drafting_target, new_drafter
from specdec_core.forensics.suspects import V as TOKENS
from specdec_core.lengths.fixed import FixedLength
from specdec_core.protocol import Draft, Drafter, Round, RowView
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.table import TableTarget
from specdec_core.topology import chain

FAMILY, CANARY = "metamorphic", "canary"
CHANGED = 1
"""The row whose request is changed while the others are watched: a long one, there from the first round on."""
LONG, SHORT, CHUNK = 60, 2, 3
"""Prompt lengths of the changed row; tokens of a prefill pass."""

Rows = dict[int, list[Told]]


def by_row(rounds: Sequence[Round], requests: Requests) -> Rows:
    rows: Rows = defaultdict(list)
    for each in told(rounds, requests):
        rows[each.request].append(each)
    return rows


def _did(row: Told) -> tuple[Any, ...]:
    """What a round did to a row, without where and when."""
    report = row.report
    return report.drafted, report.accepted, report.ending, report.emitted, report.finished, len(row.text)


def first_difference(one: Rows, other: Rows, rows: Sequence[int], how: str) -> Evidence | None:
    """The first round of `one` in which one of these rows did something else than in `other`."""
    found = []
    for key in rows:
        for number, here in enumerate(one.get(key, [])):
            there = other.get(key, [])[number : number + 1]
            if not there or _did(there[0]) != _did(here):
                emitted = list(there[0].report.emitted) if there else "nothing"
                found.append(here.evidence(f"emits {list(here.report.emitted)}, but {emitted} {how}"))
                break
        else:
            if len(other.get(key, [])) > len(one.get(key, [])):
                extra = other[key][len(one.get(key, []))]
                found.append(Evidence(extra.round, key, extra.emitted, f"row {key}: goes on {how}"))
    return earliest(found)


def _base(suspect: Suspect) -> Rows:
    return by_row(recording(suspect).rounds, suspect.requests)


# --- Neighbours and shapes ----------------------------------------------------------------------------------------


def _isolated(prompt: Callable[[Request], np.ndarray], how: str) -> Callable[[Suspect], Evidence | None]:
    """The row CHANGED gets another prompt: the others stay as they were."""

    def look(suspect: Suspect) -> Evidence | None:
        requests = list(suspect.requests)
        requests[CHANGED] = replace(requests[CHANGED], prompt=tuple(prompt(requests[CHANGED]).tolist()))
        changed = by_row(suspect.rounds(How(tuple(requests))), tuple(requests))
        others = [key for key in range(len(requests)) if key != CHANGED]
        return first_difference(_base(suspect), changed, others, how)

    return look


def _other_prompt(length: int | None = None) -> Callable[[Request], np.ndarray]:
    """Random tokens, as many as the prompt has or `length`."""
    return lambda request: np.random.default_rng(77).integers(1, TOKENS, length or len(request.prompt))


def permutation(suspect: Suspect) -> Evidence | None:
    requests = suspect.requests[::-1]
    rows = by_row(suspect.rounds(How(requests)), requests)
    restored = {len(requests) - 1 - key: each for key, each in rows.items()}
    return first_difference(_base(suspect), restored, range(len(requests)), "in the opposite order")


def slots(suspect: Suspect) -> Evidence | None:
    """One row after another, two together, all together."""
    for count in (1, 2, len(suspect.requests)):
        rows = by_row(suspect.rounds(How(suspect.requests, slots=count)), suspect.requests)
        found = first_difference(_base(suspect), rows, range(len(suspect.requests)), f"in {count} slots")
        if found is not None:
            return found
    return None


def chunks(suspect: Suspect) -> Evidence | None:
    rows = by_row(suspect.rounds(How(suspect.requests, chunk=CHUNK)), suspect.requests)
    how = f"with prompts in chunks of {CHUNK}"
    return first_difference(_base(suspect), rows, range(len(suspect.requests)), how)


# --- Canaries -----------------------------------------------------------------------------------------------------


def itself(subject: Subject) -> Drafter:
    return new_drafter(subject, drafting_target(subject, times=0))


def _self_draft(together: bool) -> Callable[[Suspect], Evidence | None]:
    """A target that drafts for itself has everything accepted, and one token more."""

    def look(suspect: Suspect) -> Evidence | None:
        batches = [suspect.requests] if together else [(request,) for request in suspect.requests]
        found = []
        for number, requests in enumerate(batches):
            for row in told(suspect.rounds(How(requests, itself)), requests):
                depth, report = len(row.report.drafted), row.report
                if report.ending == "recovered" or (report.finished is None and len(report.emitted) != depth + 1):
                    where = f"{report.accepted} of its own {depth} drafted tokens accepted"
                    key = row.request if together else number
                    found.append(Evidence(row.round, key, row.emitted, f"row {key}: {where}"))
                    break
        return earliest(found)

    return look


class AlwaysWrong(NGramDrafter):
    """Drafts whatever the target would not say."""

    def __init__(self, subject: Subject):
        super().__init__()
        self._next = reference(subject).next_token

    def propose(self, views: Sequence[RowView], state: Any) -> list[Draft]:
        drafts = []
        for view in views:
            first = self._next(tuple(view.committed.tolist())) + 1
            drafts.append(Draft((first + np.arange(view.limit)) % TOKENS, chain(view.limit + 1)))
        return drafts


def adversary(suspect: Suspect) -> Evidence | None:
    """Drafts that are always wrong change nothing of the output."""
    return first_wrong(suspect.rounds(How(suspect.requests, AlwaysWrong)), suspect.requests, reference(suspect.subject))


def rounds_alone(suspect: Suspect) -> Evidence | None:
    """A row takes the same rounds alone and accepts as much in each: that is not its neighbours' affair."""
    alone = {}
    for key, request in enumerate(suspect.requests):
        alone[key] = by_row(suspect.rounds(How((request,), noisy)), (request,))[0]
    return first_difference(_base(suspect), alone, range(len(suspect.requests)), "alone")


def longest_match(suspect: Suspect) -> Evidence | None:
    """Accepted is the longest part of the draft that the reference would have emitted."""
    found, truth = recording(suspect), reference(suspect.subject)
    for row in told(found.rounds, suspect.requests):
        draft = found.drafts[row.round].get(row.report.slot)
        if draft is None:
            continue
        text, node, matched = row.text, 0, 0
        while True:
            token = truth.next_token(text)
            following = [child for child in draft.topology.children[node] if draft.tokens[child - 1] == token]
            if not following:
                break
            text, node, matched = (*text, token), following[0], matched + 1
        expected = min(matched, len(row.report.emitted)) if row.report.finished else matched
        if row.report.accepted != expected:
            return row.evidence(f"{row.report.accepted} draft tokens accepted, {expected} are the target's")
    return None


# --- Seeds --------------------------------------------------------------------------------------------------------


def stranger(subject: Subject) -> Drafter:
    """A drafter that is often rejected: every rejection asks chance for a recovered token."""
    return new_drafter(subject, drafting_target(subject, times=10))


def seeds(suspect: Suspect) -> Evidence | None:
    """A sampled row is the same beside neighbours with other seeds."""
    requests = tuple(_sampled(request) for request in suspect.requests[:SLOTS])
    changed = tuple(
        request if key % 2 else replace(request, options=replace(request.options, seed=99))
        for key, request in enumerate(requests)
    )
    unchanged = [key for key in range(len(requests)) if key % 2]
    one, other = (by_row(_sampled_rounds(suspect, each), each) for each in (requests, changed))
    return first_difference(one, other, unchanged, "beside other seeds")


def _sampled(request: Request) -> Request:
    """At T = 1, all with one seed and keys of their own, and none ended early: chance is to be asked often."""
    return replace(request, options=Options(temperature=1.0, seed=3, max_new_tokens=8))


def table_batch(rows: int = 4) -> Requests:
    """Requests for the table of laws."""
    return tuple(Request((key % V,), Options(max_new_tokens=4), FixedLength(1 + key % 2), key) for key in range(rows))


def _sampled_rounds(suspect: Suspect, requests: Requests) -> tuple[Round, ...]:
    if suspect.subject.state != TABLE:
        return suspect.rounds(How(requests, stranger))
    target = TableTarget(TARGET, V, CONTEXT)
    return suspect.once(requests, lambda: tuple(decode(target, requests, DRAFTERS["soft q"](), slots=SLOTS)))


METAMORPHIC = (
    Detector("row isolation", FAMILY, _isolated(_other_prompt(), "beside another prompt")),
    Detector("order of rows", FAMILY, permutation),
    Detector("more padding", FAMILY, _isolated(_other_prompt(LONG), "beside a longer prompt")),
    Detector("less padding", FAMILY, _isolated(_other_prompt(SHORT), "beside a shorter prompt")),
    Detector("number of slots", FAMILY, slots),
    Detector("prefill chunks", FAMILY, chunks),
)

CANARIES = (
    Detector("self-draft, alone", CANARY, _self_draft(together=False)),
    Detector("self-draft, batch", CANARY, _self_draft(together=True)),
    Detector("adversarial draft", CANARY, adversary),
    Detector("rounds alone", CANARY, rounds_alone),
    Detector("longest match", CANARY, longest_match),
)

SEEDED = (Detector("seeded rows", LAW, seeds, lambda subject: True),)
