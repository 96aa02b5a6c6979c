"""A llama.cpp context as a state: a slot is a sequence, a tree's branches are sequences that share its cells.

All sequences share one buffer (`kv_unified`), whose cells each belong to a set of sequences, and a token sees the
cells of its first sequence at earlier positions. So a draft's leaves each get a sequence, a node belongs to those of
the leaves below it, and giving a branch the committed entries, keeping its path or dropping it moves nothing: only
the cells' sets change. Entries of a draft stay until the next pass or commit drops them, and llama.cpp is asked
whether it did: a memory that cannot drop a part of a sequence says so, and nothing is committed then.
"""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec_core.models.llama_library import complaint, forget_complaints, library
from specdec_core.protocol import Verification
from specdec_core.state.slots import CacheError, Slots
from specdec_core.topology import Forest, Topology

MOST_SEQUENCES = 256
"""llama.cpp's own limit (LLAMA_MAX_SEQ)."""

_REASONS = {1: "it found no room in its cache", 2: "it was interrupted", -1: "it calls the batch invalid"}


class RollbackRefused(CacheError):
    """llama.cpp did not drop entries that it was told to drop; the committed lengths are what they were."""


class DecodeFailed(CacheError):
    """llama.cpp could not evaluate a batch; the committed lengths are what they were."""


@dataclass(frozen=True)
class Scratch:
    """Entries of a row's draft that are in the cache and not committed: the sequence of each leaf."""

    slot: int
    leaves: tuple[int, ...]
    sequences: tuple[int, ...]


@dataclass(frozen=True)
class Batch:
    """What one decode is given.

    tokens, positions  `[N]` int32.
    sequences          of each token, the first one decides what it sees.
    scored             whether logits are wanted.
    """

    tokens: np.ndarray
    positions: np.ndarray
    sequences: Sequence[tuple[int, ...]]
    scored: bool = True

    def part(self, start: int, end: int) -> Batch:
        return Batch(self.tokens[start:end], self.positions[start:end], self.sequences[start:end], self.scored)


class LlamaContext(Slots):
    """The state of a `LlamaCppTarget`: slot s is sequence s, sequences from `slots` on are lent to branches.

    handle    the `llama_context *`; freed with this object.
    branches  leaves, beyond the first of each row, that one verification may have.
    widest    most tokens of one decode; longer batches are fed in parts.
    """

    def __init__(self, model: Any, params: Any, slots: int, capacity: int, branches: int, vocabulary: int):
        super().__init__(slots, capacity)
        if slots + branches > MOST_SEQUENCES:
            raise CacheError(
                f"{slots} slots and {branches} branches: llama.cpp has {MOST_SEQUENCES} sequences; make fewer"
            )
        self._llama = library()
        self.branches, self.widest = branches, int(params.n_batch)
        params.n_seq_max, params.kv_unified = slots + branches, True
        # A batch of one output a sequence has to fit, or llama.cpp aborts the process; a batch is no longer than the
        # cache.
        params.n_ctx = max(slots * capacity, params.n_seq_max)
        params.n_batch = max(params.n_batch, params.n_seq_max)
        forget_complaints()
        handle = self._llama.llama_init_from_model(model.pointer, params)
        if not handle:
            raise CacheError(
                f"llama.cpp made no context of {slots} slots × {capacity} entries: {complaint()}; ask for less, or "
                "another cache type"
            )
        self.handle = handle
        # The model is an argument so that it outlives the context in any order of collection.
        self._close = weakref.finalize(self, _free, handle, model)
        self._memory = self._llama.llama_get_memory(handle)
        self._vocabulary = vocabulary
        self._scratch: list[Scratch] = []

    def close(self) -> None:
        """Free the context now instead of with the object."""
        self._close()

    def settle(self) -> None:
        """Drop whatever is not committed, as every pass does first. Raises RollbackRefused if llama.cpp does not."""
        for scratch in self._scratch:
            for branch in scratch.sequences[1:]:
                self._clear(branch)
            self._drop(scratch.slot, int(self.lengths[scratch.slot]))
        self._scratch = []

    def require_branches(self, forest: Forest) -> None:
        """Raise CacheError if the trees have more leaves than there are sequences for."""
        needed = sum(len(_leaves(shape)) - 1 for shape in forest.trees)
        if needed > self.branches:
            raise CacheError(
                f"trees with {needed} branches beyond the first of each row, and sequences for {self.branches}: "
                "verify narrower trees, or make the target with more branches"
            )

    def score(self, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> np.ndarray:
        """Logits `[N, V]` float32; the nodes' entries are scratch until `keep` or `settle`."""
        self.settle()
        leaves = [_leaves(shape) for shape in forest.trees]
        spare = iter(range(len(self.lengths), len(self.lengths) + self.branches))
        sequences: list[tuple[int, ...]] = []
        for slot, shape, ends in zip(slots.tolist(), forest.trees, leaves, strict=True):
            own = (slot, *(next(spare) for _ in ends[1:]))
            self._scratch.append(Scratch(slot, ends, own))
            for branch in own[1:]:
                self._llama.llama_memory_seq_cp(self._memory, slot, branch, -1, -1)
            reaching = shape.ancestors[list(ends)]  # [leaves, n]: does the leaf see the node
            sequences += [tuple(own[leaf] for leaf in np.flatnonzero(column)) for column in reaching.T]
        positions = self.lengths[slots][forest.rows] + forest.depths
        return self._decode(Batch(tokens.astype(np.int32), positions.astype(np.int32), sequences))

    def append(self, slot: int, tokens: np.ndarray) -> None:
        """Commit tokens to a slot without scoring them."""
        self.settle()
        length = int(self.lengths[slot])
        self._scratch = [Scratch(slot, (0,), (slot,))]
        positions = np.arange(length, length + len(tokens), dtype=np.int32)
        self._decode(Batch(tokens.astype(np.int32), positions, [(slot,)] * len(tokens), scored=False))
        self._scratch = []
        self.advance(np.array([slot]), [len(tokens)])

    def keep(self, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        """Keep the paths and drop the rest of the drafts."""
        self.require_paths(verification.epoch, verification.forest, paths)
        self.begin()  # even if it is refused half-way: what is gone by then cannot be committed by trying again
        for scratch, shape, path in zip(self._scratch, verification.forest.trees, paths, strict=True):
            start, end = int(self.lengths[scratch.slot]), int(self.lengths[scratch.slot]) + len(path)
            chosen = 0
            if len(path):
                chosen = next(i for i, leaf in enumerate(scratch.leaves) if shape.ancestors[leaf, path[-1]])
            # Every call that may be refused comes before the lengths change, so a refusal commits nothing.
            self._drop(scratch.slot, start if chosen else end)
            if chosen:
                self._llama.llama_memory_seq_cp(self._memory, scratch.sequences[chosen], scratch.slot, start, end)
            for branch in scratch.sequences[1:]:
                self._clear(branch)
        self._scratch = []
        self.advance(verification.slots, [len(path) for path in paths])

    def rewind(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        self.require_shorter(slots, lengths)
        self.begin()
        for slot, length in zip(slots.tolist(), np.asarray(lengths).tolist(), strict=True):
            self._drop(slot, length)
            self.lengths[slot] = length

    def release(self, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            self._clear(slot)
        super().release(slots)

    def _drop(self, sequence: int, length: int) -> None:
        """Entries of a sequence from `length` on."""
        if not self._llama.llama_memory_seq_rm(self._memory, sequence, length, -1):
            raise RollbackRefused(
                f"llama.cpp does not take back the entries of sequence {sequence} from {length} on: this model's state "
                "cannot be rolled back, so it is no target for speculation; decode it without drafts elsewhere"
            )

    def _clear(self, sequence: int) -> None:
        """All entries of a sequence, which never fails."""
        self._llama.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def _decode(self, batch: Batch) -> np.ndarray:
        total, width = len(batch.tokens), self._vocabulary
        logits = np.empty((total if batch.scored else 0, width), np.float32)
        for start in range(0, total, self.widest):
            part = batch.part(start, min(start + self.widest, total))
            buffers = _Buffers(self._llama, part)
            forget_complaints()
            code = self._llama.llama_decode(self.handle, buffers.struct)
            if code:
                # What it may have evaluated is scratch, and dropped before the next pass.
                raise DecodeFailed(
                    f"llama.cpp could not evaluate {total} tokens: {_REASONS.get(code, 'it failed')} (code {code}; "
                    f"{complaint()}); nothing was committed, and the state can be used on"
                )
            if batch.scored:
                # The buffer is llama.cpp's own and is overwritten by the next decode, so it is copied out here.
                found = self._llama.llama_get_logits(self.handle)
                logits[start : start + len(part.tokens)] = np.ctypeslib.as_array(found, (len(part.tokens), width))
        return logits


@dataclass
class _Buffers:
    """A `llama_batch` over numpy arrays that live as long as this object."""

    llama: Any
    batch: Batch
    kept: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        counts = np.array([len(each) for each in self.batch.sequences], np.int32)
        flat = np.array([sequence for each in self.batch.sequences for sequence in each], np.int32)
        starts = np.concatenate([[0], np.cumsum(counts[:-1])]).astype(np.uintp)
        pointers = flat.ctypes.data + starts * np.uintp(flat.itemsize)
        scored = np.full(len(counts), self.batch.scored, np.int8)
        tokens, positions = (np.ascontiguousarray(a, np.int32) for a in (self.batch.tokens, self.batch.positions))
        self.kept = [counts, flat, pointers, scored, tokens, positions]
        struct = self.llama.llama_batch
        fields = dict(struct._fields_)
        values = {"token": tokens, "pos": positions, "n_seq_id": counts, "seq_id": pointers, "logits": scored}
        cast = {name: ctypes.cast(array.ctypes.data, fields[name]) for name, array in values.items()}
        self.struct = struct(n_tokens=len(counts), embd=None, **cast)


def _free(handle: Any, model: Any) -> None:
    library().llama_free(handle)


def _leaves(shape: Topology) -> tuple[int, ...]:
    """Nodes without children, in order."""
    return tuple(node for node, children in enumerate(shape.children) if not children)
