"""A dynamic tree from a trained drafter (EAGLE-2; Li et al. 2024): the nodes that most probably lie on the path.

At every depth the most probable of the newest candidates are read, and each gives its most probable followers. The tree
is the best of all candidates by the probability of their whole path. A path never becomes more probable by going on, so
a candidate that is not among the best of its time never will be, and nothing is read behind it: drafting ends early
where the drafter is unsure or everything is decided, at no change of the tree.

Candidates are deterministic (one-hot laws), at any temperature: the rejection rule tries siblings in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from specdec_core.arrays import Array, host
from specdec_core.drafters.eagle_memory import EagleBase, Places
from specdec_core.models.checkpoints import Checkpoint
from specdec_core.models.eagle_checkpoint import EagleCheckpoint
from specdec_core.placement import Placement
from specdec_core.protocol import NO_DRAFT, Draft, RowView
from specdec_core.topology import tree


class EagleTreeDrafter(EagleBase):
    """Drafts trees with a trained drafter; rows step together.

    nodes  most draft tokens of a tree. With the newest committed one, 15 are 16 rows, which the compiled engine takes
           through the weights at once.
    width  followers of a candidate, and candidates that are read at each depth.

    Penalties of a row's options are not looked at when candidates are chosen: they cost acceptance, not losslessness.
    """

    def __init__(
        self, checkpoint: EagleCheckpoint, target: Checkpoint, placement: Placement, nodes: int = 15, width: int = 4
    ):
        if not 1 <= width <= nodes or width > checkpoint.config.vocabulary:
            raise ValueError(
                f"a tree of {nodes} nodes, {width} a depth: expected 1 ≤ width ≤ nodes, and width at most the "
                f"{checkpoint.config.vocabulary} tokens that can be drafted"
            )
        super().__init__(checkpoint, target, placement)
        self.nodes, self.width = nodes, width
        self._tokens = checkpoint.tokens.numpy()

    def most_nodes(self, depth: int) -> int:
        """Room for the tree, and for what is read while it grows."""
        return max(self.nodes, self.width * depth)

    def propose(self, views: Sequence[RowView], state: Any) -> list[Draft]:
        trees = [_Tree(view, self.nodes, self.width) for view in views]
        growing = [each for each in trees if each.view.limit > 0 and self.memory.can_draft(each.view.slot)]
        if not growing:
            return [NO_DRAFT] * len(views)
        found = self.memory.read([each.view.slot for each in growing])
        heads = np.arange(len(growing))  # which row of `found` each growing tree begins at
        while True:
            tokens, shares = self._followers(growing, heads, found.logits)
            for each, start in zip(growing, heads, strict=True):
                last = start + max(1, len(each.newest))
                each.extend(self._tokens[tokens[start:last]], shares[start:last])
            going = [(each, start) for each, start in zip(growing, heads, strict=True) if each.grows]
            if not going:
                return [each.draft() for each in trees]
            growing = [each for each, _ in going]
            before = np.concatenate([start + each.parent_rows for each, start in going])
            places = [each.places() for each in growing]
            heads = np.cumsum([0, *(len(each.nodes) for each in places)])[:-1]
            found = self.memory.extend(
                [each.view.slot for each in growing],
                [each.newest_tokens for each in growing],
                found.hidden[before],
                places,
            )

    def _followers(self, growing: list[_Tree], heads: np.ndarray, logits: Array) -> tuple[np.ndarray, np.ndarray]:
        """Draft tokens `[M, width]` after each row of `logits`; their log-probabilities at the row's temperature."""
        temperatures = [each.view.options.temperature or 1.0 for each in growing]
        if any(temperature != 1 for temperature in temperatures):
            logits = _tempered(host(logits), np.repeat(temperatures, np.diff(np.append(heads, len(logits)))))
        tokens, shares = self.memory.steps.committed.best_tokens(logits, self.width)
        return host(tokens), host(shares)


def _tempered(logits: np.ndarray, temperatures: np.ndarray) -> np.ndarray:
    """Logits `[M, D]` over temperatures `[M]`. Rows at 1 keep their bits, so that no neighbour's temperature is felt;
    of the others the peak becomes 0, so that no temperature is low enough for it to overflow."""
    scales = temperatures[:, None]
    with np.errstate(over="ignore"):  # to −∞: probability zero
        lowered = ((logits - logits.max(axis=1, keepdims=True)) / scales).astype(logits.dtype)
    return np.where(scales == 1, logits, lowered)


class _Tree:
    """One row's candidates while its tree grows. Candidates are numbered as they come; a parent comes first."""

    def __init__(self, view: RowView, nodes: int, width: int):
        self.view, self._most, self._width = view, nodes, width
        self._tokens = np.empty(0, np.int64)
        self._parents = np.empty(0, np.int64)
        self._paths = np.empty(0)  # log-probability of the path to each candidate
        self._own = np.empty(0)  # … and of the candidate after its parent
        self._masses: list[float] = []
        self._read = 0
        self._lines = np.empty((0, 0), np.int32)  # reading numbers on the path to each of the nodes read last
        self.newest = np.empty(0, np.int64)  # candidates read last, or about to be read
        self.parent_rows = np.zeros(1, np.int64)

    def extend(self, tokens: np.ndarray, shares: np.ndarray) -> None:
        """Take the followers `[m, width]` of the candidates read last (at first: of the newest committed token), and
        choose which of them to read."""
        first = len(self._tokens)
        parents = self.newest if first else np.array([-1])
        paths = shares + (self._paths[parents][:, None] if first else 0.0)
        self._tokens = np.concatenate([self._tokens, tokens.ravel()])
        self._parents = np.concatenate([self._parents, np.repeat(parents, tokens.shape[1])])
        self._paths = np.concatenate([self._paths, paths.ravel()])
        self._own = np.concatenate([self._own, shares.ravel()])
        best = self._best()
        chosen = best[best >= first][: self._width]
        self._masses.append(float(np.exp(self._paths[chosen]).sum()))
        self.parent_rows = (chosen - first) // tokens.shape[1]
        self.newest = chosen

    @property
    def grows(self) -> bool:
        depth = len(self._masses)
        return bool(len(self.newest)) and depth < self.view.limit and self.view.policy.proceed(self._confidences())

    @property
    def newest_tokens(self) -> np.ndarray:
        return self._tokens[self.newest]

    def places(self) -> Places:
        """Where the newest candidates are read; call once a depth."""
        numbers = np.arange(self._read, self._read + len(self.newest))
        before = self._lines[self.parent_rows] if self._read else np.empty((len(numbers), 0), np.int32)
        self._lines = np.concatenate([before, numbers[:, None].astype(np.int32)], axis=1)
        self._read += len(numbers)
        depths = np.full(len(numbers), len(self._masses) - 1)
        return Places(numbers, depths, self._lines)

    def draft(self) -> Draft:
        if not len(self._tokens):
            return NO_DRAFT
        kept = self._in_lines(self._best())
        numbers = np.full(len(self._tokens) + 1, 0)
        numbers[kept] = np.arange(1, len(kept) + 1)
        parents = (-1, *numbers[self._parents[kept]].tolist())  # a root's parent −1 is the last entry, the number 0
        confidence = np.exp(self._own[kept]) if self.view.policy.uses_confidence else None
        return Draft(self._tokens[kept], tree(parents), None, confidence)

    def _in_lines(self, best: np.ndarray) -> np.ndarray:
        """The tree's candidates, each with all that follows it behind it, siblings by probability.

        The likeliest path then lies in front, as a chain would: if it is accepted, no entry of a cache has to move.
        """
        followers: dict[int, list[int]] = {}
        for candidate in best.tolist():
            followers.setdefault(int(self._parents[candidate]), []).append(candidate)
        found, waiting = [], followers[-1][::-1]
        while waiting:
            found.append(waiting.pop())
            waiting += reversed(followers.get(found[-1], ()))
        return np.array(found, np.int64)

    def _best(self) -> np.ndarray:
        """Candidates of the tree by the probability of their path: ties to the lower depth, which has the parents."""
        return np.argsort(-self._paths, kind="stable")[: self._most]

    def _confidences(self) -> list[float]:
        """Of each depth: what share of the paths' probability is left, given the depth before."""
        masses = [1.0, *self._masses]
        return [after / before if before > 0 else 0.0 for before, after in pairwise(masses)]
