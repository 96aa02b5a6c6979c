"""The contracts between targets, drafters, length policies and the decode loop: verify, then commit.

A target scores a draft without changing its committed state; then the accepted path is committed. Autoregressive
decoding is the same loop without a drafter, a single stream is a batch of one, a chain is a tree with one branch.

Invariant of every target's state: *cached length = committed tokens − 1*. The newest committed token has no cache entry
yet; it is fed with the draft, as node 0 of the topology. A drafter's own state may lack more, after a draft that was
accepted whole; it feeds what it lacks with the next draft.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import numpy as np

from specdec_core.arrays import Array
from specdec_core.randomness import Decisions
from specdec_core.topology import Forest, Topology, chain


@dataclass(frozen=True)
class Draft:
    """What a drafter proposes for one row: the tokens of nodes 1…k of `topology`.

    tokens      `[k]` int64; tokens[i - 1] belongs to node i.
    topology    k + 1 nodes; node 0 is the newest committed token.
    law         `[k, V]` float64: the law that each token was drawn from, or None if the tokens are deterministic
                (the law is one-hot: an argmax, a lookup).
    confidence  `[k]`: the drafter's own estimate that a token survives, known before the token was sampled.
    """

    tokens: np.ndarray
    topology: Topology
    law: np.ndarray | None = None
    confidence: np.ndarray | None = None

    def __post_init__(self) -> None:
        if len(self.tokens) != len(self.topology) - 1:
            raise ValueError(
                f"draft of {len(self.tokens)} tokens on a topology of {len(self.topology)} nodes: "
                "expected one node more than tokens (node 0 is the newest committed token)"
            )
        if self.law is not None and len(self.law) != len(self.tokens):
            raise ValueError(f"{len(self.law)} laws for {len(self.tokens)} draft tokens: expected one each, or None")


NO_DRAFT = Draft(np.empty(0, np.int64), chain(1))
"""Nothing drafted: the round is one autoregressive step."""


@dataclass(frozen=True)
class Verification:
    """A target's scores of one draft a row. Commits nothing; a second `verify` on the state invalidates it.

    logits    `[N, V]` in the engine's dtype, N the nodes of all rows; node i of row b is at `offsets[b] + i` and
              predicts the token after that node.
    features  `[N, F, H]`: hidden states after the target's feature layers, or None if it has none.
    slots     `[B]`: the state's slot of each row.
    pending   whatever the state needs to commit.
    """

    logits: Array
    features: Array | None
    slots: np.ndarray
    forest: Forest
    epoch: int
    pending: Any = None


@runtime_checkable
class State(Protocol):
    """What a target remembers: one slot a row."""

    @property
    def lengths(self) -> np.ndarray:
        """Cached length of each slot, `[S]` int64: committed tokens − 1 between rounds."""

    @property
    def capacity(self) -> int:
        """Cache entries that a slot can hold, those of a draft included."""

    def rewind(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Shorten slots to earlier lengths, `[B]`; raises if this state cannot (never keeps silently)."""

    def release(self, slots: np.ndarray) -> None:
        """Empty slots for other rows."""


class Target(Protocol):
    """A model that can score drafts. Drafters that are models obey the same contract.

    The states that it is given are those that its `new_state` made.
    """

    @property
    def vocabulary(self) -> int: ...

    @property
    def context(self) -> int:
        """Longest sequence of tokens that the model accepts."""

    def new_state(self, slots: int, capacity: int) -> State: ...

    def prefill(self, state: Any, slots: np.ndarray, prompts: Sequence[np.ndarray]) -> list[Array | None]:
        """Cache every prompt but its last token; features `[len(prompt) − 1, F, H]` of each, or None."""

    def verify(self, state: Any, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> Verification:
        """Score `tokens` `[N]` (flat, rows one after another, node 0 first) without committing anything."""

    def commit(self, state: Any, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        """Keep, for each row, the entries of the nodes on its path (node indices from the root; empty: none)."""

    def synchronise(self) -> None:
        """Wait until the device has done what it was given, so that phases can be timed."""


class LengthPolicy(Protocol):
    """How far to speculate. Never informed by a sampled token's own value or anything downstream of it."""

    @property
    def largest(self) -> int:
        """Most tokens in depth that it ever asks for: sizes caches, and is checked against the context."""

    @property
    def uses_confidence(self) -> bool:
        """Whether drafters should work out confidences for it."""

    def begin(self, limit: int) -> int:
        """Most tokens to draft this round, given the room left; 0 means do not draft at all."""

    def proceed(self, confidences: Sequence[float]) -> bool:
        """Whether a sequential drafter takes another step after these confidences."""


@dataclass(frozen=True)
class RowView:
    """What a drafter may see of one row: read-only, and nothing beyond the committed tokens.

    committed  `[c]` int64: the prompt and every emitted token, the newest last.
    prompt     number of prompt tokens among them.
    limit      most draft tokens in depth this round: the policy's wish within the room that is left (0: none).
    options    the row's sampling options (sampling.Options).
    decisions  the row's stream for drafting.
    """

    slot: int
    committed: np.ndarray
    prompt: int
    limit: int
    policy: LengthPolicy
    options: Any
    decisions: Decisions


class Drafter(Protocol):
    """Proposes drafts and keeps itself in step with what was committed."""

    def most_nodes(self, depth: int) -> int:
        """Most draft nodes that it proposes at this depth limit (a chain: the depth)."""

    def start(self, slots: int, capacity: int) -> None:
        """Make room for this many rows; forgets everything."""

    def admit(self, slots: np.ndarray, prompts: Sequence[np.ndarray], features: Sequence[Array | None]) -> None:
        """New rows; features as the target's prefill gave them."""

    def propose(self, views: Sequence[RowView], state: Any) -> list[Draft]:
        """One draft a row. `state` is the target's: read-only, but for scratch entries past the committed ones."""

    def observe(self, slots: np.ndarray, tokens: Sequence[np.ndarray], features: Sequence[Array | None]) -> None:
        """Newly committed tokens of each row, `[m]`, each with the features `[m, F, H]` of the position before it."""

    def release(self, slots: np.ndarray) -> None:
        """Rows that ended."""


@dataclass(frozen=True)
class RowRound:
    """What a round did to one row.

    drafted   tokens drafted, by depth: entry d − 1 counts the nodes of depth d (a chain: all ones).
    accepted  draft tokens accepted and emitted (cut where the row ended).
    ending    'bonus' (whole branch accepted), 'recovered' (from the residual) or 'cut' (the row ended inside the path).
    emitted   tokens appended to the row this round.
    context   committed tokens before the round.
    logprobs  log-probability of each emitted token under the raw target law, if asked for.
    finished  'eos', 'stop', 'length', 'context' or None.
    """

    key: int
    slot: int
    context: int
    drafted: tuple[int, ...]
    accepted: int
    ending: str
    emitted: tuple[int, ...]
    finished: str | None = None
    logprobs: tuple[float, ...] | None = None


@dataclass(frozen=True)
class Phases:
    """Seconds of one round, by phase."""

    admit: float = 0.0
    draft: float = 0.0
    verify: float = 0.0
    accept: float = 0.0
    commit: float = 0.0

    @property
    def total(self) -> float:
        return self.admit + self.draft + self.verify + self.accept + self.commit


@dataclass(frozen=True)
class Round:
    """One pass of the decode loop over the rows that were active. Everything measured is derived from rounds.

    nodes  tokens that the target scored, all rows together (0: nothing but admissions).
    """

    index: int
    rows: tuple[RowRound, ...]
    nodes: int
    seconds: Phases = field(default_factory=Phases)
