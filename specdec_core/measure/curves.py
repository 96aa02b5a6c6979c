"""t(n): seconds of one target pass over n new tokens on a warm cache, with logits at all n."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from specdec_core.measure.clock import Arm
from specdec_core.protocol import State, Target
from specdec_core.topology import chain, forest


@dataclass(frozen=True)
class TimeCurve:
    """Medians of t(n) at some widths n and warm context lengths, bilinear in between, flat outside of the contexts.

    widths `[W]` ascending, contexts `[C]` ascending, seconds `[C, W]`.
    """

    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: np.ndarray

    def at(self, n: int, context: float) -> float:
        """Seconds of a pass over n tokens at this context; widths beyond the last grow with the last slope."""
        columns = [np.interp(context, self.contexts, self.seconds[:, column]) for column in range(len(self.widths))]
        if n > self.widths[-1] and len(self.widths) > 1:
            slope = (columns[-1] - columns[-2]) / (self.widths[-1] - self.widths[-2])
            return float(columns[-1] + slope * (n - self.widths[-1]))
        return float(np.interp(n, self.widths, columns))


@dataclass(frozen=True)
class CurveSamples:
    """Raw seconds of every (context, width), `[repeats]` each, from one interleaved run."""

    seconds: dict[tuple[int, int], np.ndarray]

    def curve(self) -> TimeCurve:
        contexts = tuple(sorted({context for context, _ in self.seconds}))
        widths = tuple(sorted({width for _, width in self.seconds}))
        medians = np.array([[np.median(self.seconds[c, w]) for w in widths] for c in contexts])
        return TimeCurve(widths, contexts, medians)


def curve_arms(
    target: Target, widths: Sequence[int], contexts: Sequence[int], *, rows: int = 1, seed: int = 0
) -> dict[tuple[int, int], Arm]:
    """One arm a (context, width): a verification of `rows` rows × width nodes behind so many cached entries.

    Tokens are random; nothing is committed, so every pass sees the same warm cache.
    """
    arms: dict[tuple[int, int], Arm] = {}
    for context in contexts:
        if context + max(widths) > target.context:
            raise ValueError(f"context {context} + n = {max(widths)}: the model's context holds {target.context}")
        state = target.new_state(rows, context + max(widths))
        tokens = np.random.default_rng(seed).integers(0, target.vocabulary, (rows, context + max(widths)))
        target.prefill(state, np.arange(rows), list(tokens[:, : context + 1]))
        for width in widths:
            arms[context, width] = verification_arm(target, state, tokens[:, context : context + width])
    return arms


def verification_arm(target: Target, state: State, tokens: np.ndarray) -> Arm:
    """One verification of a chain a row, tokens `[B, n]`; committed entries stay as they are."""
    rows, width = tokens.shape
    shape, slots, flat = forest([chain(width)] * rows), np.arange(rows), np.ascontiguousarray(tokens).ravel()

    def arm() -> None:
        target.verify(state, slots, flat, shape)
        target.synchronise()

    return arm
