"""The ways of decoding a batch speculatively, each as a target and a context for the one decode loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from transformers import PreTrainedModel

from specdec_core.decode import decode
from specdec_core.protocol import Drafter, Round, Target
from specdec_core.published.acceptance import cut_to_the_batch_minimum, keeping_the_draft
from specdec_core.published.grouping import grouped
from specdec_core.published.kept_positions import KeptPositionsTarget
from specdec_core.published.rectangle import RealigningTarget
from specdec_core.rows import Request
from specdec_core.targets.huggingface import HuggingFaceTarget

Loop = Callable[[Target, Sequence[Request], Drafter | None, int], list[Round]]


@dataclass(frozen=True)
class Way:
    """How a batch is kept, accepted and scheduled.

    broken   it corrupts its output, and was published.
    target   the model with this way's state.
    accept   a context in which the loop accepts this way's way.
    rounds   decodes requests over so many slots.
    """

    name: str
    broken: bool
    target: Callable[[PreTrainedModel], HuggingFaceTarget] = HuggingFaceTarget
    accept: Callable[[], AbstractContextManager[None]] = nullcontext
    rounds: Loop = lambda target, requests, drafter, slots: list(decode(target, requests, drafter, slots=slots))

    def decode(self, target: Target, requests: Sequence[Request], drafter: Drafter | None, slots: int) -> list[Round]:
        """All rounds of these requests, decoded this way on a target that `target` made."""
        with self.accept():
            return self.rounds(target, requests, drafter, slots)


POOL = 3
"""Rows in the pool for each row of a batch, where rows are grouped by length."""


def _grouped(target: Target, requests: Sequence[Request], drafter: Drafter | None, slots: int) -> list[Round]:
    return list(grouped(target, requests, drafter, batch=slots, pool=POOL * slots))


WAYS = (
    Way("scatter (ours)", broken=False),
    Way("realign (EQSPEC)", broken=False, target=RealigningTarget),
    Way("group by length (EXSPEC)", broken=False, rounds=_grouped),
    Way("batch minimum", broken=False, accept=cut_to_the_batch_minimum),
    Way("positions kept (BSP-like)", broken=True, target=KeptPositionsTarget),
    Way("draft kept (DSD-like)", broken=True, accept=keeping_the_draft),
)
"""Ours first; those that are known to corrupt last."""
