"""What the decode loop knows of one row: its request, its tokens, its random streams, and when it ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from specdec_core.protocol import LengthPolicy, RowView
from specdec_core.randomness import DRAFT, VERIFY, Source
from specdec_core.sampling import History, Options

Detokenize = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it.

    prompt  token ids `[P]`, at least one.
    policy  speculation length; None decodes this row without drafting.
    key     names the row's random streams together with the seed; rows with equal seed and key draw alike.
    """

    prompt: tuple[int, ...]
    options: Options = field(default_factory=Options)
    policy: LengthPolicy | None = None
    key: int = 0


class Row:
    """A request while it is decoded, in one slot of the state."""

    def __init__(self, request: Request, slot: int, context: int, source: Source, detokenize: Detokenize | None):
        self.request, self.slot, self.options = request, slot, request.options
        self._context = context
        self._detokenize = detokenize
        self.prompt_length = len(request.prompt)
        self._tokens = np.empty(min(self.prompt_length + self.options.max_new_tokens, context), np.int64)
        self._tokens[: self.prompt_length] = request.prompt
        self.count = self.prompt_length
        self.finished: str | None = None
        self.decisions = source(self.options.seed, request.key, VERIFY)
        self._draft_decisions = source(self.options.seed, request.key, DRAFT)

    @property
    def committed(self) -> np.ndarray:
        """Prompt and emitted tokens, read-only `[c]`."""
        view = self._tokens[: self.count]
        view.flags.writeable = False
        return view

    @property
    def emitted(self) -> int:
        return self.count - self.prompt_length

    @property
    def history(self) -> History:
        tokens = self.committed
        return History(tokens[: self.prompt_length], tokens[self.prompt_length :])

    def view(self, policy: LengthPolicy) -> RowView:
        """What the drafter may see. The round emits at most one token more than the draft is deep."""
        room = min(self.options.max_new_tokens - self.emitted, self._context - self.count) - 1
        limit = max(0, min(policy.begin(room), room)) if room > 0 else 0
        return RowView(
            self.slot, self.committed, self.prompt_length, limit, policy, self.options, self._draft_decisions
        )

    def append(self, tokens: Sequence[int]) -> int:
        """Append tokens until the row ends; returns how many were taken and sets `finished`."""
        for taken, token in enumerate(tokens, start=1):
            self._tokens[self.count] = token
            self.count += 1
            self.finished = self._ending(token)
            if self.finished:
                return taken
        return len(tokens)

    def _ending(self, token: int) -> str | None:
        if self.emitted >= self.options.min_new_tokens:
            if token in self.options.eos:
                return "eos"
            if self.options.stop and self._stopped():
                return "stop"
        if self.emitted == self.options.max_new_tokens:
            return "length"
        return "context" if self.count == self._context else None

    def _stopped(self) -> bool:
        """Whether the newest token completes a stop string. A character takes at most four bytes and a token gives at
        least one, so the tail that is looked at is long enough; the prompt is never part of it."""
        assert self._detokenize is not None  # checked when the request was accepted
        reach = 4 * max(map(len, self.options.stop)) + 8
        tail = self._tokens[max(self.prompt_length, self.count - reach) : self.count]
        after, before = self._detokenize(tail.tolist()), self._detokenize(tail[:-1].tolist())
        pairs = zip(before, after, strict=False)
        same = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(before), len(after)))
        # One that ended before the newest token is over: it came before min_new_tokens and may come again.
        return any(after.find(stop, max(0, same - len(stop) + 1)) >= 0 for stop in self.options.stop)
