"""Near-ties: greedy decoders that differ although both are right, because rounding depends on the shape of a pass.

A divergence is certified as a near-tie only if (1) in a float64 reference both tokens, the emitted and the expected
one, lie within 2ε of the maximum, ε being the rounding error measured *at that prefix* over the widths that were used,
and (2) a control without any drafter, its cache built in the same chunks, emits the same token. Everything else is a
bug; so is an ε that no rounding explains, or a kernel that is wrong at some width would excuse itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from specdec_core.arrays import host
from specdec_core.protocol import RowRound, Target
from specdec_core.topology import Topology, chain, forest, tree

ROUNDING = 0.06
"""Largest error, relative to the largest absolute logit, that is taken for rounding: what bfloat16 may do."""


@dataclass(frozen=True)
class Divergence:
    """The first place where two greedy outputs differ.

    index      emitted tokens in common before it.
    gap        logit of the reference's maximum minus the lower one of the two tokens' (float64).
    epsilon    largest rounding error of these logits over the widths used; at most ROUNDING × the largest logit.
    control    token that the drafter-free control emits there.
    """

    index: int
    expected: int
    emitted: int
    gap: float
    epsilon: float
    control: int

    @property
    def certified(self) -> bool:
        return self.gap <= 2 * self.epsilon and self.control == self.emitted


def first_difference(expected: Sequence[int], emitted: Sequence[int]) -> int | None:
    """Index of the first differing token (a missing one differs), or None if the outputs are equal."""
    for index, (one, other) in enumerate(zip(expected, emitted, strict=False)):
        if one != other:
            return index
    return None if len(expected) == len(emitted) else min(len(expected), len(emitted))


def examine(
    target: Target,
    reference: Target,
    prompt: Sequence[int],
    expected: Sequence[int],
    emitted: Sequence[int],
    rounds: Sequence[RowRound],
) -> Divergence | None:
    """Examine `emitted` (greedy, decoded in `rounds`) against `expected` (autoregressive, same target).

    `reference` holds the same weights in float64. None if the outputs are equal.
    """
    index = first_difference(expected, emitted)
    if index is None:
        return None
    if index >= min(len(expected), len(emitted)):
        # One output is a prefix of the other: a length fault, which no rounding explains.
        return Divergence(index, -1, -1, float("inf"), 0.0, -1)
    prefix = np.array([*prompt, *emitted[:index]], np.int64)
    truth = logits_after(reference, prefix, width=1)[-1]
    token = emitted[index]
    widths = sorted({1} | {1 + sum(row.drafted) for row in rounds})
    tokens = [int(np.argmax(truth)), token, expected[index]]
    errors = [np.abs(logits_after(target, prefix, width)[:, tokens] - truth[tokens]).max() for width in widths]
    epsilon = min(float(max(errors)), ROUNDING * float(np.abs(truth).max()))
    control = replay(target, prompt, emitted, rounds, index)
    gap = float(truth.max() - truth[tokens].min())
    return Divergence(index, expected[index], token, gap, epsilon, control)


def census(
    target: Target,
    reference: Target,
    prompt: Sequence[int],
    expected: Sequence[int],
    emitted: Sequence[int],
    rounds: Sequence[RowRound],
    continued: Callable[[tuple[int, ...]], Sequence[int]],
) -> list[Divergence]:
    """Every divergence of `emitted` from what autoregressive decoding would emit, in order.

    After a certified near-tie the text is followed: `continued(emitted so far)` gives what autoregressive decoding
    adds to it, and the comparison goes on. The first one that is no near-tie ends it.
    """
    found: list[Divergence] = []
    while True:
        divergence = examine(target, reference, prompt, expected, emitted, rounds)
        if divergence is None:
            return found
        found.append(divergence)
        if not divergence.certified:
            return found
        shared = tuple(emitted[: divergence.index + 1])
        expected = (*shared, *continued(shared))


def replay(
    target: Target, prompt: Sequence[int], emitted: Sequence[int], rounds: Sequence[RowRound], index: int
) -> int:
    """The token that the target emits at `index` when it is fed the emitted text in the shapes of `rounds`.

    No drafter is involved: the text's own continuation stands in for the draft's first branch, and for the other
    branches its last token does.
    """
    tokens = np.array([*prompt, *emitted], np.int64)
    prompt_length = len(prompt)
    capacity = len(tokens) + max(1 + sum(row.drafted) for row in rounds)
    padded = np.concatenate([tokens, np.full(capacity - len(tokens), tokens[-1])])
    state, slots = target.new_state(1, capacity), np.array([0])
    target.prefill(state, slots, [tokens[:prompt_length]])
    done = prompt_length
    for row in rounds:
        shape, branch = stand_in(row.drafted)
        nodes = np.full(len(shape), tokens[-1])
        nodes[branch] = padded[done - 1 : done - 1 + len(branch)]
        verification = target.verify(state, slots, nodes, forest([shape]))
        if done - prompt_length <= index < done - prompt_length + len(row.emitted):
            logits = host(verification.logits[branch[index - (done - prompt_length)]])
            return int(np.argmax(logits))
        target.commit(state, verification, [branch[: len(row.emitted)]])
        done += len(row.emitted)
    raise ValueError(f"token {index} was not emitted in these {len(rounds)} rounds")


def stand_in(drafted: Sequence[int]) -> tuple[Topology, np.ndarray]:
    """A tree with these many nodes at each depth, and its first branch, root included: `[depth + 1]` node indices.

    All nodes of a depth hang on the first of the depth before; the nodes of a pass and their depths are those of the
    round, whichever branches they belonged to.
    """
    parents, branch = [-1], [0]
    for count in drafted:
        first = len(parents)
        parents += [branch[-1]] * count
        branch.append(first)
    return tree(tuple(parents)), np.array(branch)


def logits_after(target: Target, prefix: np.ndarray, width: int) -> np.ndarray:
    """Logits after `prefix`, computed as each node of a chain of `width` nodes in turn: `[nodes, V]` float64.

    All `width` nodes, but where the prefix is shorter or the chain would leave the context.
    """
    found = []
    for node in range(min(width, len(prefix))):
        cached = len(prefix) - 1 - node
        if cached + width > target.context:
            continue
        state, slots = target.new_state(1, cached + width), np.array([0])
        target.prefill(state, slots, [prefix[: cached + 1]])
        tokens = np.concatenate([prefix[cached:], np.full(width - node - 1, prefix[-1])])
        logits = target.verify(state, slots, tokens, forest([chain(width)])).logits[node]
        found.append(np.asarray(host(logits), np.float64))
    return np.array(found)
