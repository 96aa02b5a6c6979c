"""The faults of batched decoders: each a correct decoder with one seam replaced, and the signature it should leave.

Most were found in published decoders or are what their ways of keeping ragged rows invite (notes: ragged.md). The
signatures are hypotheses: what each fault does leave is measured in fault_matrix.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

from specdec_core import decode, randomness, rows
from specdec_core.drafters.model import ModelDrafter
from specdec_core.forensics import loop_faults as loop
from specdec_core.forensics import mutations_parts, mutations_rule, suspects
from specdec_core.forensics import state_faults as state
from specdec_core.forensics.suspects import (
    CLASSES,
    RECTANGLE,
    ROTARY,
    SCATTER,
    TABLE,
    Realigned,
    Scatter,
    ScatterState,
    Subject,
    WindowedScatter,
)
from specdec_core.published.acceptance import cut_to_the_batch_minimum, keeping_the_draft
from specdec_core.published.kept_positions import KeptPositionsTarget

TARGET_STATE, LOOP, DRAFTER_STATE = "the target's state", "the loop", "the drafter's state"

Inject = Callable[[], AbstractContextManager[Any]]


@dataclass(frozen=True)
class Fault:
    """One wrong decoder.

    seam     what is replaced: TARGET_STATE, LOOP or DRAFTER_STATE.
    expected the signature that it should leave: a hypothesis.
    inject   gives a context in which the fault is in place.
    applies  the subjects that it can be put into.
    control  where, of these, nothing that anybody can observe may change.
    """

    name: str
    seam: str
    expected: str
    inject: Inject
    applies: Callable[[Subject], bool]
    control: Callable[[Subject], bool] = lambda subject: False


def _put(*seams: tuple[Any, str, Callable[[Any], Any]]) -> Inject:
    """`make(right)` stands in for each `owner.attribute`."""

    @contextmanager
    def inject() -> Iterator[None]:
        with ExitStack() as stack:
            for owner, attribute, make in seams:
                stack.enter_context(patch.object(owner, attribute, make(getattr(owner, attribute))))
            yield

    return inject


def _instead(wrong: Any) -> Callable[[Any], Any]:
    return lambda right: wrong


def _chains(subject: Subject, *states: str) -> bool:
    return subject.state in states and not subject.trees and not subject.window


def on_rectangle(subject: Subject) -> bool:
    return _chains(subject, RECTANGLE)


def on_scatter(subject: Subject) -> bool:
    return _chains(subject, SCATTER)


def on_both(subject: Subject) -> bool:
    return _chains(subject, RECTANGLE, SCATTER)


def on_all(subject: Subject) -> bool:
    """Also on sampled rows of a table: what changes their law or their independence."""
    return _chains(subject, RECTANGLE, SCATTER, TABLE)


FAULTS = (
    # The rectangle
    Fault("padding not masked", TARGET_STATE, "divergence at token 0, padded rows only",
          _put((Realigned, "_padded", state.padding_shown)), on_rectangle),
    Fault("shared position ids", TARGET_STATE, "short rows wrong from token 0",
          _put((Realigned, "_padded", state.columns_as_positions)), on_rectangle),
    Fault("keys and values not moved", TARGET_STATE, "starts at the first unequal round",
          _put((Realigned, "commit", state.entries_not_moved)), on_rectangle),
    Fault("mask not moved", TARGET_STATE, "starts at the first unequal round",
          _put((Realigned, "commit", state.remembering_starts), (Realigned, "_padded", state.mask_not_moved)),
          on_rectangle),
    Fault("mask from token ids", TARGET_STATE, "rows with the padding (end) token in their prompt, from token 0",
          _put((Realigned, "_padded", state.mask_from_ids)), on_rectangle),
    # Masked scatter
    Fault("rejected slots advance positions", TARGET_STATE, "first divergence after the first rejection",
          lambda: patch.dict(CLASSES, {SCATTER: KeptPositionsTarget}), on_scatter),
    Fault("constant position shift", TARGET_STATE, "invisible under rotary positions, loud under learned ones",
          _put((Scatter, "_padded", state.shifted)), on_scatter,
          control=lambda subject: subject.positions == ROTARY),
    Fault("rejected entries left visible", TARGET_STATE, "divergence after the first rejection",
          _put((Scatter, "commit", state.keeping_the_rejected), (Scatter, "_padded", state.positions_of_the_accepted)),
          on_scatter),
    Fault("last accepted entry missing", TARGET_STATE, "output, after a draft that was accepted whole",
          _put((Scatter, "commit", state.without_the_last_entry)), on_scatter),
    Fault("cache one short", TARGET_STATE, "divergence after the first accepted token",
          _put((Scatter, "commit", mutations_parts.losing_the_last)), on_scatter),
    Fault("cache one long", TARGET_STATE, "divergence after the first rejection",
          _put((Scatter, "commit", mutations_parts.keeping_a_rejected_one)), on_scatter),
    Fault("accepted path not moved", TARGET_STATE, "divergence after the first accepted token of a tree",
          _put((ScatterState, "keep", _instead(lambda *anything: None))),
          lambda subject: subject.state == SCATTER and subject.trees),
    Fault("neighbour's entry overwritten", TARGET_STATE, "fails row isolation, passes batch 1",
          _put((Scatter, "commit", state.overwriting_the_neighbour)), on_scatter),
    Fault("freed slot not emptied", TARGET_STATE, "rows admitted later, from token 0; passes batch 1",
          _put((ScatterState, "release", _instead(lambda *anything: None))), on_scatter),
    Fault("logits read by the widest row", TARGET_STATE, "rows after a narrower one, from token 0; passes batch 1",
          _put((Scatter, "verify", state.gathered_by_the_widest)), on_scatter),
    Fault("prompt chunks from position 0", TARGET_STATE, "prompts longer than a chunk, from token 0",
          _put((Scatter, "_prefill_row", state.every_chunk_from_zero)), on_scatter),
    Fault("window moves one entry a round", TARGET_STATE, "silent until past the window",
          _put((WindowedScatter, "commit", state.counting_rounds),
               (WindowedScatter, "_first", state.evicted_by_rounds)),
          lambda subject: bool(subject.window)),
    # The loop
    Fault("one row's end ends the batch", LOOP, "perfect prefix, wrong length",
          _put((decode, "_rounds", loop.ending_together)), on_all),
    Fault("end token inside a block ignored", LOOP, "perfect prefix, junk after",
          _put((rows.Row, "append", mutations_parts.ending_at_the_last_token_only)), on_all),
    Fault("cap inside a block ignored", LOOP, "perfect prefix, junk after",
          _put((decode, "Row", _instead(loop.CapBetweenBlocks))), on_all),
    Fault("end token looked for in the prompt", LOOP, "one token and out, where the prompt has it",
          _put((rows.Row, "_ending", mutations_parts.ending_in_the_prompt)), on_all),
    Fault("newest token not fed", LOOP, "wrong from token 1, alone too",
          _put((decode, "_nodes", loop.feeding_the_one_before)), on_both),
    Fault("all rows cut to the batch's minimum", LOOP, "output right, too few tokens a round",
          cut_to_the_batch_minimum, on_both),
    Fault("draft kept on a mismatch", LOOP, "wrong from the first rejection, drafter's text",
          keeping_the_draft, on_all),
    Fault("last logit dropped", LOOP, "output right, K tokens from a draft accepted whole",
          _put((decode, "follow", loop.greedily(mutations_rule.without_bonus)),
               (decode, "walk", mutations_rule.without_bonus)),
          on_both),
    Fault("drafts as long as the least budget", LOOP, "output right, too few tokens a round near a row's end",
          _put((decode, "_propose", loop.drafting_the_least)), on_both),
    Fault("last token of another row", LOOP, "wrong from token 0; passes batch 1",
          _put((decode, "_accept", loop.token_of_the_next_row)), on_all),
    Fault("one generator for all rows", LOOP, "a seeded row changes when its neighbours change",
          _put((randomness, "StreamDecisions", lambda right: mutations_rule.one_for_all())), on_all),
    Fault("residual of another row", LOOP, "distribution only, in sampled runs",
          _put((decode, "_accept", loop.residual_of_the_next_row)), on_all),
    # The drafter's state
    Fault("draft cache: last entry never fed", DRAFTER_STATE, "acceptance only, after drafts accepted whole",
          _put((ModelDrafter, "observe", state.never_fed_the_last)), on_both),
    Fault("draft cache: trimmed one too many", DRAFTER_STATE, "acceptance decays with rounds; output unchanged",
          _put((suspects, "ModelDrafter", _instead(type("TrimmedTooMuch", (state.Mistrimmed,), {"EXTRA": -1})))),
          on_both),
    Fault("draft cache: trimmed one too few", DRAFTER_STATE, "acceptance decays with rounds; output unchanged",
          _put((suspects, "ModelDrafter", _instead(type("TrimmedTooLittle", (state.Mistrimmed,), {"EXTRA": 1})))),
          on_both),
    Fault("draft cache: rows swapped", DRAFTER_STATE, "acceptance only; passes batch 1",
          _put((ModelDrafter, "observe", state.swapping_rows)), on_both),
)  # fmt: skip
