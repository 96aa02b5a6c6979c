"""Near-ties in a batch: divergences of rows that were decoded together, where rounding depends on the whole pass.

As near_ties.py, row by row, but for two things. The control is the whole batch once more: the same slots, admissions
and shapes of every round, fed with the emitted texts and no drafter. And ε, the rounding error at that prefix, is the
largest over the row alone at its widths and the batch itself. The batch is replayed once; a row's logits are looked at
only where it diverges.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from specdec_core.arrays import host
from specdec_core.decode import generate, outputs
from specdec_core.forensics.near_ties import ROUNDING, Divergence, first_difference, logits_after, stand_in
from specdec_core.protocol import Round, RowRound, Target
from specdec_core.rows import Request
from specdec_core.topology import forest

Continued = Callable[[int, tuple[int, ...]], Sequence[int]]
"""continued(key, emitted so far): what autoregressive decoding of that request adds to it."""


def census_of_batch(
    target: Target,
    reference: Target,
    requests: Sequence[Request],
    rounds: Sequence[Round],
    expected: Sequence[Sequence[int]],
    continued: Continued,
    slots: int | None = None,
) -> list[list[Divergence]]:
    """Every divergence of each request's output from what autoregressive decoding would emit, in order.

    target     decoded `rounds` (all of them, greedily); reference: the same weights in float64.
    expected   the autoregressive output of each request; `continued` goes on after a certified near-tie, as
               near_ties.census does. The first divergence of a row that is no near-tie is its last.
    slots      of the decoding; default: as many as the rounds name.

    Raises ValueError for rounds that cannot be replayed (see BatchReplay).
    """
    emitted = [each.tokens for each in outputs(rounds, len(requests))]
    own: list[list[RowRound]] = [[] for _ in requests]
    for each in rounds:
        for row in each.rows:
            own[row.key].append(row)
    texts = [_Text(*pair) for pair in zip(expected, emitted, strict=True)]
    replay = BatchReplay(target, requests, rounds, slots)
    for each in rounds:
        if not any(text.differs_before(len(text.emitted)) for text in texts):
            break  # what is left differs in length at most
        done = {row.key: row.context - len(requests[row.key].prompt) for row in each.rows}
        differing = [row.key for row in each.rows if texts[row.key].differs_before(done[row.key] + len(row.emitted))]
        for key, logits in replay.step(each, differing).items():
            text, end = texts[key], done[key] + len(logits)
            while text.differs_before(end):
                found = _examine(target, reference, requests[key].prompt, text, own[key], logits, done[key])
                text.divergences.append(found)
                if found.certified:
                    shared = text.emitted[: found.index + 1]
                    text.expect((*shared, *continued(key, shared)))
    for text in texts:
        text.close()
    return [text.divergences for text in texts]


def continuation(target: Target, requests: Sequence[Request]) -> Continued:
    """Greedy autoregressive decoding, one row alone, from any place of a request's output up to its end."""

    def continued(key: int, shared: tuple[int, ...]) -> tuple[int, ...]:
        request, options = requests[key], requests[key].options
        left = min(options.max_new_tokens - len(shared), target.context - len(request.prompt) - len(shared))
        if left < 1 or (shared and shared[-1] in options.eos):
            return ()
        going_on = Request((*request.prompt, *shared), replace(options, max_new_tokens=left), None, request.key)
        return generate(target, [going_on])[0].tokens

    return continued


def differs_at(expected: Sequence[int], emitted: Sequence[int], divergences: Sequence[Divergence]) -> str:
    """A character a token: '=' the same token at the same place, '~' another one, but the text is what autoregressive
    decoding emits after a certified near-tie, 'x' any other. A text that a fault cut short has an 'x' a missing token.
    """
    certified = [each.index for each in divergences if each.certified]
    wrong = [each.index for each in divergences if not each.certified]
    follows = range(certified[0] if certified else len(emitted), wrong[0] if wrong else len(emitted))
    missing = max(0, len(expected) - len(emitted)) if wrong else 0
    marks = (
        "=" if index < len(expected) and token == expected[index] else "~" if index in follows else "x"
        for index, token in enumerate(emitted)
    )
    return "".join(marks) + "x" * missing


class BatchReplay:
    """A batch decoded once more, round by round, without a drafter: the control of every row.

    Each row feeds its own emitted text: the text's continuation stands in for its draft's first branch, its last token
    for the other branches (near_ties.stand_in). Rows are admitted together where they first appear in a round.

    Raises ValueError for rounds that no pass of a target can have made: gaps, or more tokens than nodes on a branch.
    """

    def __init__(
        self, target: Target, requests: Sequence[Request], rounds: Sequence[Round], slots: int | None = None
    ) -> None:
        rows = [row for each in rounds for row in each.rows]
        emitted = [each.tokens for each in outputs(rounds, len(requests))]
        self._target = target
        self._prompts = [np.array(request.prompt, np.int64) for request in requests]
        self._texts = [np.array([*r.prompt, *tokens], np.int64) for r, tokens in zip(requests, emitted, strict=True)]
        self._done = [len(request.prompt) for request in requests]
        _require_replayable(rows, self._done)
        # As decode() makes it: strides may choose a kernel.
        longest = max(len(r.prompt) + r.options.max_new_tokens for r in requests)
        longest = max(min(target.context, longest), *map(len, self._texts))
        self._capacity = longest + max(sum(row.drafted) for row in rows)
        self._state = target.new_state(slots or 1 + max(row.slot for row in rows), self._capacity)
        self._admitted: set[int] = set()

    def step(self, each: Round, keys: Sequence[int]) -> dict[int, np.ndarray]:
        """Replay the next round; the logits `[m, V]` float64 that the m tokens of the rows `keys` are the argmax of."""
        if not each.rows:
            return {}
        self._admit([row for row in each.rows if row.key not in self._admitted])
        shapes, branches = zip(*(stand_in(row.drafted) for row in each.rows), strict=True)
        nodes = [
            self._nodes(row.key, len(s), branch) for row, s, branch in zip(each.rows, shapes, branches, strict=True)
        ]
        where, shape = np.array([row.slot for row in each.rows]), forest(shapes)
        verification = self._target.verify(self._state, where, np.concatenate(nodes), shape)
        found = {}
        for row, branch, start in zip(each.rows, branches, shape.offsets[:-1], strict=True):
            if row.key in keys:
                flat = start + branch[: len(row.emitted)]
                found[row.key] = np.array([host(verification.logits[node]) for node in flat], np.float64)
        paths = [branch[: 0 if r.finished else len(r.emitted)] for r, branch in zip(each.rows, branches, strict=True)]
        self._target.commit(self._state, verification, paths)
        for row in each.rows:
            self._done[row.key] += len(row.emitted)
            if row.finished:
                self._state.release(np.array([row.slot]))
        return found

    def _admit(self, rows: Sequence[RowRound]) -> None:
        if rows:
            ordered = sorted(rows, key=lambda row: row.key)  # as they wait
            where = np.array([row.slot for row in ordered])
            self._target.prefill(self._state, where, [self._prompts[row.key] for row in ordered])
            self._admitted.update(row.key for row in ordered)

    def _nodes(self, key: int, count: int, branch: np.ndarray) -> np.ndarray:
        text, start = self._texts[key], self._done[key] - 1
        nodes = np.full(count, text[-1])
        fed = text[start : start + len(branch)]
        nodes[branch[: len(fed)]] = fed
        return nodes


class _Text:
    """One row's output, and what it is compared with: replaced after every certified near-tie."""

    def __init__(self, expected: Sequence[int], emitted: Sequence[int]) -> None:
        self.emitted = tuple(emitted)
        self.divergences: list[Divergence] = []
        self.expect(expected)

    def expect(self, tokens: Sequence[int]) -> None:
        self.expected = tuple(tokens)
        self._index = first_difference(self.expected, self.emitted)

    @property
    def open(self) -> bool:
        return all(each.certified for each in self.divergences)

    @property
    def index(self) -> int:
        assert self._index is not None
        return self._index

    def differs_before(self, end: int) -> bool:
        """Whether another token stands at a place before `end` that is not examined yet."""
        index = self._index
        return self.open and index is not None and index < min(end, len(self.expected), len(self.emitted))

    def close(self) -> None:
        """After the last round. One output that is a prefix of the other is a length fault: no rounding explains it."""
        if self.open and self._index is not None:
            self.divergences.append(Divergence(self._index, -1, -1, float("inf"), 0.0, -1))


def _examine(
    target: Target,
    reference: Target,
    prompt: Sequence[int],
    text: _Text,
    rounds: Sequence[RowRound],
    logits: np.ndarray,
    done: int,
) -> Divergence:
    """The divergence at `text.index`; `logits` `[m, V]` are those of the replayed batch from place `done` on."""
    index = text.index
    expected, emitted = text.expected[index], text.emitted[index]
    prefix = np.array([*prompt, *text.emitted[:index]], np.int64)
    truth = logits_after(reference, prefix, width=1)[-1]
    tokens = [int(np.argmax(truth)), emitted, expected]
    gap, most = float(truth.max() - truth[tokens].min()), ROUNDING * float(np.abs(truth).max())
    # A gap that the largest ε allowed does not excuse needs none of the passes that measure it.
    widths = sorted({1} | {1 + sum(row.drafted) for row in rounds}) if gap <= 2 * most else ()
    found = [logits[[index - done]], *(logits_after(target, prefix, width) for width in widths)]
    error = max(float(np.abs(each[:, tokens] - truth[tokens]).max()) for each in found)
    epsilon = min(error, most)
    return Divergence(index, expected, emitted, gap, epsilon, int(np.argmax(logits[index - done])))


def _require_replayable(rows: Sequence[RowRound], prompts: Sequence[int]) -> None:
    if not rows:
        raise ValueError("no rounds with rows: expected all rounds of a decoding, as decode() yields them")
    reached = list(prompts)
    for row in rows:
        if row.context != reached[row.key]:
            raise ValueError(
                f"request {row.key}: a round begins at {row.context} tokens, and {reached[row.key]} are known of: pass "
                "all rounds of one decoding, in order"
            )
        if len(row.emitted) > 1 + len(row.drafted):
            raise ValueError(
                f"request {row.key}: a round emitted {len(row.emitted)} tokens after a draft {len(row.drafted)} deep: "
                "expected at most one more than that"
            )
        reached[row.key] += len(row.emitted)
