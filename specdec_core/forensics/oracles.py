"""Oracles: what a batch should emit, by definition, with no cache, no batch, no mask and no loop of ours.

The reference is one plain pass of the same model over a whole prefix. The suspect is run in four modes, each with one
thing more that can be wrong; the first mode that differs from the reference says where to look. Sampled rows have a law
to be compared with instead of tokens: on a table of laws it is enumerated.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache, MistralConfig, MistralForCausalLM, PreTrainedModel

from specdec_core.arrays import host
from specdec_core.forensics.detectors import Detector, Evidence, How, Suspect, earliest, noisy, told
from specdec_core.forensics.enumeration import Tokens, distance
from specdec_core.forensics.exact_grid import Case, defined_law, enumerate_case, grid
from specdec_core.forensics.suspects import SHARED, SIZES, TABLE, Requests, Subject, make_draft_model, make_model
from specdec_core.protocol import Round
from specdec_core.rows import Request

FAMILY, LAW = "oracle", "law"
TOLERANCE = 1e-12
"""Of enumerated laws, at any output."""


class Reference:
    """Plain passes of one model: no cache, no mask, positions from 0 unless said otherwise."""

    def __init__(self, model: PreTrainedModel):
        self._model = model
        # transformers renames this argument from version 5 on, model by model.
        self._cache = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.next_token = lru_cache(maxsize=50_000)(self._next_token)
        self.entries = lru_cache(maxsize=500)(self._entries)
        self.continuation = lru_cache(maxsize=500)(self._continuation)

    @torch.no_grad()
    def _next_token(self, text: tuple[int, ...]) -> int:
        """The greedy token after a text."""
        return int(host(self._model(input_ids=torch.tensor([text])).logits[0, -1]).argmax())

    @torch.no_grad()
    def _entries(self, text: tuple[int, ...], origin: int) -> list[tuple[np.ndarray, np.ndarray]]:
        """Keys and values `[kv_heads, n, head_dim]` of each layer for a text whose first token is at `origin`."""
        positions = torch.arange(origin, origin + len(text))[None]
        kept = DynamicCache()
        self._model(input_ids=torch.tensor([text]), position_ids=positions, use_cache=True, **{self._cache: kept})
        layers: Any = kept.layers
        return [(host(layer.keys[0]), host(layer.values[0])) for layer in layers]

    def _continuation(self, request: Request) -> tuple[tuple[int, ...], str]:
        """What a greedy request should become: its tokens and how it ends."""
        emitted: tuple[int, ...] = ()
        while True:
            emitted = (*emitted, self.next_token((*request.prompt, *emitted)))
            if emitted[-1] in request.options.eos:
                return emitted, "eos"
            if len(emitted) == request.options.max_new_tokens:
                return emitted, "length"


@lru_cache(maxsize=16)
def reference(subject: Subject) -> Reference:
    """Of the subject's target."""
    return Reference(_windowed(make_model(subject.positions), subject.window))


@lru_cache(maxsize=16)
def draft_reference(subject: Subject) -> Reference:
    """Of the subject's noisy drafter."""
    return Reference(_windowed(make_draft_model(subject.positions), subject.window))


def _windowed(model: PreTrainedModel, window: int) -> PreTrainedModel:
    """The same weights under a window of transformers' own, if there is to be one."""
    if not window:
        return model
    found = MistralForCausalLM(MistralConfig(**SIZES, **SHARED, sliding_window=window)).double().eval()
    found.load_state_dict(model.state_dict())
    return found


# --- Greedy tokens ------------------------------------------------------------------------------------------------


def first_wrong(rounds: Sequence[Round], requests: Requests, truth: Reference) -> Evidence | None:
    """The first token that is not the reference's, or a row that ends elsewhere than there."""
    done = dict.fromkeys(range(len(requests)), 0)
    for each in told(rounds, requests):
        tokens, ending = truth.continuation(requests[each.request])
        rest = tokens[each.emitted :]
        for place, token in enumerate(each.report.emitted):
            if place >= len(rest):
                return each.evidence(f"token {token} after the end ({ending})", place)
            if token != rest[place]:
                return each.evidence(f"token {each.emitted + place} is {token}, expected {rest[place]}", place)
        done[each.request] += len(each.report.emitted)
        over = done[each.request] == len(tokens)
        if (each.report.finished or "") != (ending if over else ""):
            ended, expected = each.report.finished or "goes on", ending if over else "to go on"
            return each.evidence(
                f"{ended} after {done[each.request]} tokens, expected {expected}", len(each.report.emitted)
            )
    missing = [key for key, request in enumerate(requests) if done[key] < len(truth.continuation(request)[0])]
    if missing:
        return Evidence(len(rounds), missing[0], done[missing[0]], f"row {missing[0]}: was not decoded to its end")
    return None


def _alone(speculative: bool) -> Callable[[Suspect], Evidence | None]:
    def look(suspect: Suspect) -> Evidence | None:
        found = []
        for key, request in enumerate(suspect.requests):
            rounds = suspect.rounds(How((request,), noisy if speculative else None))
            wrong = first_wrong(rounds, (request,), reference(suspect.subject))
            if wrong is not None:
                found.append(Evidence(wrong.round, key, wrong.tokens, wrong.where.replace("row 0", f"row {key}", 1)))
        return earliest(found)

    return look


def _together(speculative: bool) -> Callable[[Suspect], Evidence | None]:
    def look(suspect: Suspect) -> Evidence | None:
        rounds = suspect.rounds(How(suspect.requests, noisy if speculative else None))
        return first_wrong(rounds, suspect.requests, reference(suspect.subject))

    return look


# --- Laws of sampled rows -----------------------------------------------------------------------------------------

CASES = (
    "cap 2, soft q",
    "EOS, soft q",
    "a drafted row beside a plain one",
    "a greedy row beside a sampled one",
    "three rows unlike, two slots",
    "two rows unlike, soft q, 2 slots",
    "two rows unlike, soft q, 1 slots",
)
"""Of the exact grid: the endings, and batches; the smallest first."""


@lru_cache(maxsize=1)
def _cases() -> list[tuple[Case, dict[tuple[Tokens, ...], float]]]:
    found = {case.name: case for case in grid()}
    return [(found[name], defined_law(found[name])) for name in CASES]


def exact_law(suspect: Suspect) -> Evidence | None:
    """Every way that a batch can go, enumerated, against the product of its rows' laws by definition."""
    for case, expected in _cases():
        found, _ = suspect.once(("law", case.name), partial(enumerate_case, case))
        error = distance(found, expected)
        if error > TOLERANCE:
            return Evidence(-1, -1, -1, f"{case.name}: a probability is off by {error:.2g}")
    return None


ORACLES = (
    Detector("AR, alone", FAMILY, _alone(speculative=False)),
    Detector("AR, batch", FAMILY, _together(speculative=False)),
    Detector("SD, alone", FAMILY, _alone(speculative=True)),
    Detector("SD, batch", FAMILY, _together(speculative=True)),
)
"""In order: each runs one thing more than the one before it."""

LAWS = (Detector("exact joint law", LAW, exact_law, lambda subject: subject.state == TABLE),)
