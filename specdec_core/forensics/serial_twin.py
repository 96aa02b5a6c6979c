"""The serial twin of a target: the same weights and the same kernels at n = 1, verified token by token.

Whatever a target saves by verifying n tokens in one pass, its twin does not: its t(n) is n single steps. So the twin is
the control of serialized verification. Its tokens are those of autoregressive decoding by construction; on an engine
whose bits do not depend on n they are those of the target too, and then nothing but time differs. Where kernels differ
by n, tokens may part at near-ties, which forensics.near_ties certifies.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from specdec_core.arrays import Array
from specdec_core.protocol import State, Target, Verification
from specdec_core.state.slots import CacheError
from specdec_core.topology import Forest, chain, forest


class TwinError(ValueError):
    """A target that can have no serial twin, or a draft that is none of chains."""


class TwinState:
    """A target's state, of which entries past the committed ones may hold the last draft until the next pass.

    inner    the target's own state; its lengths run ahead by the draft between a verification and its commit.
    lengths  `[S]` committed lengths, as every state counts them.
    epoch    counts passes and changes: an earlier verification can no longer be committed.
    """

    def __init__(self, inner: State, slots: int):
        self.inner = inner
        self.lengths = np.zeros(slots, np.int64)
        self.epoch = 0

    @property
    def capacity(self) -> int:
        return self.inner.capacity

    def settle(self) -> None:
        """Drop whatever is not committed."""
        ahead = np.flatnonzero(self.inner.lengths != self.lengths)
        if len(ahead):
            self.inner.rewind(ahead, self.lengths[ahead])

    def rewind(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        self.settle()
        self.epoch += 1
        self.inner.rewind(slots, lengths)
        self.lengths[slots] = lengths

    def release(self, slots: np.ndarray) -> None:
        self.inner.release(slots)
        self.lengths[slots] = 0
        self.epoch += 1


class SerialTwin:
    """`Target` over another one: a chain of n nodes takes n passes of one node.

    Raises TwinError if the target's states cannot be rewound: what a rejected draft did could not be taken back.
    """

    def __init__(self, target: Target):
        self.target = target
        self.name = f"{getattr(target, 'name', type(target).__name__)}, token by token"
        _require_rewind(target)

    @property
    def vocabulary(self) -> int:
        return self.target.vocabulary

    @property
    def context(self) -> int:
        return self.target.context

    def new_state(self, slots: int, capacity: int) -> TwinState:
        return TwinState(self.target.new_state(slots, capacity), slots)

    def prefill(self, state: TwinState, slots: np.ndarray, prompts: Sequence[np.ndarray]) -> list[Array | None]:
        state.settle()
        state.epoch += 1
        state.lengths[slots] = 0  # so that a prefill that fails leaves nothing that would count as committed
        features = self.target.prefill(state.inner, slots, prompts)
        state.lengths[slots] = state.inner.lengths[slots]
        return features

    def verify(self, state: TwinState, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> Verification:
        """As the target's, one depth of all rows at a time; TwinError for a tree, the target's own errors for the rest.

        The state is as before if a pass fails.
        """
        _require_chains(forest)
        state.settle()
        state.epoch += 1
        epoch, parts, flat = state.epoch, [], []
        try:
            for depth in range(int(forest.counts.max())):
                rows = np.flatnonzero(forest.counts > depth)
                nodes = forest.offsets[rows] + depth
                parts.append(self._step(state.inner, slots[rows], tokens[nodes]))
                flat.append(nodes)
        except BaseException:
            state.settle()
            raise
        order = np.argsort(np.concatenate(flat))
        logits = _joined([part.logits for part in parts], order)
        features = None if parts[0].features is None else _joined([part.features for part in parts], order)
        return Verification(logits, features, slots, forest, epoch)

    def commit(self, state: TwinState, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        if verification.epoch != state.epoch:
            raise CacheError(
                f"verification {verification.epoch} is stale: its state is at {state.epoch}, changed since; commit "
                "before anything else, or verify again"
            )
        for row, (count, path) in enumerate(zip(verification.forest.counts, paths, strict=True)):
            if len(path) > count or not np.array_equal(path, np.arange(len(path))):
                raise CacheError(f"row {row}: nodes {list(path)} are no path from the root of a chain of {count}")
        state.epoch += 1
        kept = state.lengths[verification.slots] + [len(path) for path in paths]
        excess = state.inner.lengths[verification.slots] != kept
        if excess.any():
            state.inner.rewind(verification.slots[excess], kept[excess])
        state.lengths[verification.slots] = kept

    def synchronise(self) -> None:
        self.target.synchronise()

    def _step(self, state: State, slots: np.ndarray, tokens: np.ndarray) -> Verification:
        """Score and commit one node of each row."""
        verification = self.target.verify(state, slots, tokens, forest([chain(1)] * len(slots)))
        self.target.commit(state, verification, [np.zeros(1, np.int64)] * len(slots))
        return verification


def _require_chains(forest: Forest) -> None:
    for row, shape in enumerate(forest.trees):
        if not shape.is_chain:
            raise TwinError(
                f"row {row} is a tree with parents {shape.parents}: a serial twin verifies chains only, since a second "
                "branch would have to be computed from the root again; use a drafter that drafts chains"
            )


def _require_rewind(target: Target) -> None:
    """Feed two tokens to a small state and take them back."""
    state, slot = target.new_state(1, 4), np.array([0])
    try:
        target.prefill(state, slot, [np.zeros(2, np.int64)])
        verification = target.verify(state, slot, np.zeros(1, np.int64), forest([chain(1)]))
        target.commit(state, verification, [np.zeros(1, np.int64)])
        state.rewind(slot, np.array([1]))
    except Exception as error:  # whatever a state raises that cannot be shortened
        reason = f"{type(error).__name__}: {error}"
        raise TwinError(
            f"{getattr(target, 'name', type(target).__name__)} cannot take back a token ({reason}), so it has no "
            "serial twin; choose a target whose state can be rewound"
        ) from error
    if state.lengths[0] != 1:
        raise TwinError(f"rewound to 1 entry, the state of {target} holds {state.lengths[0]}: it cannot be rewound")


def _joined(parts: Sequence[Any], order: np.ndarray) -> Array:
    """The parts' rows one after another, in this order."""
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)[order]
    import torch

    return torch.cat(list(parts))[torch.as_tensor(order, device=parts[0].device)]
