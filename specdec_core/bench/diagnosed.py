"""Notebook 04: `diagnose` at work: on transformers' own batched `generate`, on our loop, and on faults put into it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from specdec_core.decode import decode
from specdec_core.forensics.batch_generate import (
    left_padded,
    left_padded_mask_from_ids,
    left_padded_without_mask,
    right_padded,
)
from specdec_core.forensics.diagnose import diagnose
from specdec_core.forensics.diagnosis import Diagnosis
from specdec_core.forensics.faults import FAULTS, on_scatter
from specdec_core.forensics.suspects import END, SCATTER, SLOTS, Subject, make_model, new_batch, new_drafter, new_target
from specdec_core.lengths.fixed import FixedLength
from specdec_core.protocol import Round
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.huggingface import HuggingFaceTarget

SHOWN = (
    "rejected entries left visible",
    "neighbour's entry overwritten",
    "logits read by the widest row",
    "one row's end ends the batch",
    "end token inside a block ignored",
    "draft kept on a mismatch",
)
"""Faults of the zoo that a quick run diagnoses."""


def diagnose_decoders(thorough: bool, positions: str = "rotary", tokens: int = 12) -> Iterator[dict[str, Any]]:
    """A line a decoder: what it is, the signature that was named, and the experiments in which every row was right.

    On a tiny model in float64, so that no rounding excuses anything. thorough: every fault that scatter can have.
    """
    subject = Subject(SCATTER, positions)
    requests = new_batch(subject, tokens)
    prompts = [request.prompt for request in requests]
    options = Options(max_new_tokens=tokens, eos=(END,))
    model = make_model(positions)
    target = HuggingFaceTarget(model)
    for name, make in (
        ("transformers, padded left, mask given", left_padded),
        ("transformers, padded left, no mask", left_padded_without_mask),
        ("transformers, padded left, mask from ids", left_padded_mask_from_ids),
        ("transformers, padded right", right_padded),
    ):
        found = diagnose(make(model, options, END), target, prompts, options, special=(END,))
        yield _line(name, found)
    ours: list[tuple[str, Callable[[], AbstractContextManager[Any]]]] = [("ours, masked scatter", nullcontext)]
    ours += [
        (f"ours, with a fault: {fault.name}", fault.inject)
        for fault in FAULTS
        if on_scatter(subject) and fault.applies(subject) and (thorough or fault.name in SHOWN)
    ]
    new_target(subject)  # made before anything is broken: a target tries itself out
    for name, inject in ours:
        yield _line(name, diagnose(_decoder(subject, inject, options), target, prompts, options, special=(END,)))


def _decoder(
    subject: Subject, inject: Callable[[], AbstractContextManager[Any]], options: Options
) -> Callable[..., list[Round]]:
    def decoder(prompts: Sequence[tuple[int, ...]], max_new_tokens: int = options.max_new_tokens) -> list[Round]:
        capped = replace(options, max_new_tokens=max_new_tokens)
        requests = [Request(prompt, capped, FixedLength(1 + key % 4), key) for key, prompt in enumerate(prompts)]
        with inject():
            return list(decode(new_target(subject), requests, new_drafter(subject), slots=SLOTS))

    return decoder


def _line(name: str, found: Diagnosis) -> dict[str, Any]:
    everywhere = "all" if found.correct else "none"
    right = ", ".join(found.agreeing) if found.agreeing and found.disagreeing else everywhere
    return {"decoder": name, "diagnosis": found.verdict, "right in": right}
