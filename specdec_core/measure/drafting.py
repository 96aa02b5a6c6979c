"""Standalone cost of a drafter that continues its target's features, along a text that the target wrote before."""

from __future__ import annotations

from collections.abc import Sequence
from time import perf_counter

import numpy as np

from specdec_core.lengths.fixed import FixedLength
from specdec_core.measure.cost_model import DraftCost
from specdec_core.protocol import Drafter, RowView, Target
from specdec_core.randomness import DRAFT, streams
from specdec_core.sampling import Options

TAKEN = 2
"""Tokens that the text goes on by between drafts, about as many as a round of speculation emits."""


def measure_drafting(
    drafter: Drafter,
    target: Target,
    text: Sequence[int],
    prompt: int,
    depths: tuple[int, int] = (2, 6),
    options: Options | None = None,
) -> DraftCost:
    """Cost of reading TAKEN committed tokens and drafting behind them, as a line through two depths: seconds a round,
    and seconds a step (a depth that the draft reached).

    text    the prompt and what the target wrote after it: so long that each depth is drafted several times.
    prompt  tokens of it that are the prompt.
    options of the row that is drafted for (default: greedy): at T > 0 a drafter may work out laws and draw from them.

    Raises ValueError for a text that is too short, or if no draft ever reached two depths.
    """
    tokens, options = np.asarray(text, np.int64), options or Options()
    rounds = (len(tokens) - prompt) // TAKEN - 2
    if rounds < 4 * len(depths):
        least = TAKEN * (4 * len(depths) + 2)
        raise ValueError(f"{len(tokens) - prompt} tokens after the prompt: expected at least {least}")
    slot, state = np.array([0]), target.new_state(1, len(tokens) + 1)
    [features] = target.prefill(state, slot, [tokens])
    if features is None:
        raise ValueError("the target returns no features: open it with the feature layers that the drafter reads")
    drafter.start(1, len(tokens) + max(depths) + drafter.most_nodes(max(depths)))
    drafter.admit(slot, [tokens[:prompt]], [features[: prompt - 1]])
    seconds: dict[int, list[float]] = {depth: [] for depth in depths}
    reached: dict[int, list[int]] = {depth: [] for depth in depths}
    decisions = streams(0, 0, DRAFT)
    for number in range(rounds):
        depth, first = depths[number % len(depths)], prompt + number * TAKEN
        last = first + TAKEN
        view = RowView(0, tokens[:last], prompt, depth, FixedLength(depth), options, decisions)
        start = perf_counter()
        drafter.observe(slot, [tokens[first:last]], [features[first - 1 : last - 1]])
        [draft] = drafter.propose([view], state)
        elapsed = perf_counter() - start
        if number >= len(depths):  # the first of each warms up
            seconds[depth].append(elapsed)
            reached[depth].append(int(draft.topology.depths.max()))
    low, high = (float(np.mean(reached[depth])) for depth in depths)
    if not high > low:
        raise ValueError(f"drafts of at most {depths} tokens in depth all reached {low}: expected two different depths")
    near, far = (float(np.median(seconds[depth])) for depth in depths)
    step = max(0.0, (far - near) / (high - low))
    return DraftCost(step=step, round=max(0.0, near - step * low))
