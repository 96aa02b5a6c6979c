"""What an EAGLE-style drafter remembers of its rows: a cache of its own, and the tokens that it has not read yet.

Pair i of a row is its token i + 1 with the target's features of token i; the pair's cache entry has number i. Pairs of
committed tokens are read once, made from the target's features. Drafted tokens are read into entries behind them, made
from the drafter's own hidden states; nothing undoes those: what is committed next is written over them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec_core.arrays import Array, host
from specdec_core.drafters.eagle_engine import build_steps
from specdec_core.kernels.plan import StepPlan, plan_step
from specdec_core.models.checkpoints import Checkpoint
from specdec_core.models.eagle_checkpoint import EagleCheckpoint
from specdec_core.placement import Placement
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.topology import chain, forest

CHUNK = 512
"""Most pairs that are read together when a prompt comes in: bounds memory."""


@dataclass(frozen=True)
class Continued:
    """What the drafter says after one node of each of M rows: logits `[M, D]`, hidden states `[M, H]`."""

    logits: Array
    hidden: Array


class EagleMemory:
    """Rows' caches, and the steps that write them. Entries behind the committed ones hold drafted tokens."""

    def __init__(self, checkpoint: EagleCheckpoint, target: Checkpoint, placement: Placement):
        checkpoint.require_target(target)
        self.config, self.placement = checkpoint.config, placement
        self.steps = build_steps(checkpoint, target, placement)
        self._embedding = target.weights["model.embed_tokens.weight"]
        # A view, where the weights are stored as the compiled engine wants them: looked up ten times as fast.
        wanted = placement.engine == "numba" and self._embedding.dtype is torch.float32
        self._rows = host(self._embedding) if wanted else None

    def start(self, slots: int, capacity: int) -> None:
        """Make room for so many rows of so many entries; forgets everything."""
        c, place = self.config, self.placement
        self.cache = RaggedKV(1, slots, c.kv_heads, capacity, c.head_dim, place.torch_dtype, place.torch_device)
        self._unread: dict[int, list[tuple[np.ndarray, Array]]] = {}

    def admit(self, slots: np.ndarray, prompts: Sequence[np.ndarray], features: Sequence[Array | None]) -> None:
        """Read new rows' prompts, but for the last pair: that one is read with the first draft."""
        self.release(slots)
        for slot, prompt, found in zip(slots, prompts, features, strict=True):
            if len(prompt) > 1:
                hidden = self.steps.committed.project(_present(found)[: len(prompt) - 1])
                for first in range(0, len(prompt) - 2, CHUNK):
                    last = min(first + CHUNK, len(prompt) - 2)
                    self._read([slot], [prompt[first + 1 : last + 1]], hidden[first:last], scored=False)
                self._unread[int(slot)] = [(prompt[-1:], hidden[-1:])]

    def observe(self, slots: np.ndarray, tokens: Sequence[np.ndarray], features: Sequence[Array | None]) -> None:
        """Newly committed tokens, to be read with the next draft."""
        counts = [len(each) for each in tokens]
        hidden = self.steps.committed.project(
            _joined([_present(each)[:n] for each, n in zip(features, counts, strict=True)])
        )
        ends = np.cumsum(counts)
        for slot, emitted, count, end in zip(slots, tokens, counts, ends, strict=True):
            self._unread.setdefault(int(slot), []).append((emitted, hidden[end - count : end]))

    def release(self, slots: np.ndarray) -> None:
        self.cache.release(slots)
        for slot in slots:
            self._unread.pop(int(slot), None)

    def can_draft(self, slot: int) -> bool:
        """Whether there is anything to continue: a prompt of one token has no features yet."""
        return slot in self._unread

    def read(self, slots: Sequence[int]) -> Continued:
        """Read what these rows have not read, and continue their newest tokens."""
        tokens = [np.concatenate([each for each, _ in self._unread[slot]]) for slot in slots]
        hidden = _joined([each for slot in slots for _, each in self._unread[slot]])
        logits, continued = self._read(slots, tokens, hidden, scored=True)
        for slot in slots:
            del self._unread[slot]
        return Continued(logits, continued[np.cumsum([len(each) for each in tokens]) - 1])

    def extend(
        self, slots: Sequence[int], tokens: Sequence[np.ndarray], hidden: Array, places: Sequence[Places]
    ) -> Continued:
        """Read drafted tokens, some of each row, into scratch entries; hidden `[N, H]` is the state before each."""
        counts = [len(each) for each in tokens]
        rows = np.repeat(np.asarray(slots, np.int64), counts)
        nodes, flat = np.concatenate([each.nodes for each in places]), np.concatenate(tokens)
        plan = StepPlan(
            tokens=flat,
            slots=rows,
            committed=self.cache.lengths[rows],
            depths=np.concatenate([each.depths for each in places]),
            nodes=nodes,
            paths=_of_one_width([each.paths for each in places]),
            offsets=np.concatenate([[0], np.cumsum(counts)]),
        )
        self.cache.begin()
        return Continued(*self.steps.drafted(plan, self.cache, self._embedded(flat), hidden, np.arange(len(flat))))

    def _read(
        self, slots: Sequence[int], tokens: Sequence[np.ndarray], hidden: Array, scored: bool
    ) -> tuple[Array, Array]:
        """Read committed pairs; logits after the last of each row if `scored`, hidden states of all."""
        where, flat = np.asarray(slots, np.int64), np.concatenate(tokens)
        shape = forest([chain(len(each)) for each in tokens])
        self.cache.require_room(where, shape.counts)
        epoch = self.cache.begin()
        plan = plan_step(flat, where, self.cache.lengths[where], shape)
        last = shape.offsets[1:] - 1 if scored else shape.offsets[:0]
        found = self.steps.committed(plan, self.cache, self._embedded(flat), hidden, last)
        self.cache.commit(where, [np.arange(len(each)) for each in tokens], epoch)
        return found

    def _embedded(self, tokens: np.ndarray) -> Array:
        if self._rows is not None:
            return self._rows[tokens]
        rows = self._embedding[torch.as_tensor(tokens)]
        return host(rows.float()) if self.placement.engine == "numba" else rows


class EagleBase:
    """What drafters on such a memory share: they are told of rows in the same way, and differ in what they propose.

    The target that they draft for must return the features of `checkpoint.feature_layers`.
    """

    def __init__(self, checkpoint: EagleCheckpoint, target: Checkpoint, placement: Placement):
        self.checkpoint = checkpoint
        self.memory = EagleMemory(checkpoint, target, placement)

    def start(self, slots: int, capacity: int) -> None:
        self.memory.start(slots, capacity)

    def admit(self, slots: np.ndarray, prompts: Sequence[np.ndarray], features: Sequence[Array | None]) -> None:
        self.memory.admit(slots, prompts, features)

    def observe(self, slots: np.ndarray, tokens: Sequence[np.ndarray], features: Sequence[Array | None]) -> None:
        self.memory.observe(slots, tokens, features)

    def release(self, slots: np.ndarray) -> None:
        self.memory.release(slots)


@dataclass(frozen=True)
class Places:
    """Where drafted tokens of one row stand: n nodes of its draft, counted without the newest committed token.

    nodes   `[n]` numbers, in the order in which nodes are read: node i goes to entry (committed pairs) + i.
    depths  `[n]` 0 for the first drafted token.
    paths   `[n, deepest + 1]` int32: nodes from the first drafted token to each node, padded with −1.
    """

    nodes: np.ndarray
    depths: np.ndarray
    paths: np.ndarray


def _present(features: Array | None) -> Array:
    if features is None:
        raise ValueError(
            "the target returns no features, which this drafter continues: make it with the feature_layers of the "
            "drafter's checkpoint"
        )
    return features


def _of_one_width(paths: list[np.ndarray]) -> np.ndarray:
    """Paths under one another, padded with −1 where rows are at different depths."""
    width = max(each.shape[1] for each in paths)
    if all(each.shape[1] == width for each in paths):
        return np.concatenate(paths)
    return np.concatenate([np.pad(p, ((0, 0), (0, width - p.shape[1])), constant_values=-1) for p in paths])


def _joined(parts: list[Array]) -> Array:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if isinstance(parts[0], np.ndarray) else torch.cat(parts)
