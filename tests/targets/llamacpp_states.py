"""States for the tests of llama.cpp."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from specdec_core.protocol import State, Target
from specdec_core.topology import chain, forest

PROMPT = np.array([5, 17, 3, 88, 41])


def held(target: Target, *prompts: np.ndarray, capacity: int = 200) -> State:
    """A state whose slots 0, 1, … hold these prompts; one empty slot without any."""
    state = target.new_state(max(1, len(prompts)), capacity)
    target.prefill(state, np.arange(len(prompts)), list(prompts))
    return state


def assert_holds(
    target: Target,
    truth: Callable[[Sequence[int]], np.ndarray],
    state: State,
    prompt: np.ndarray = PROMPT,
    slot: int = 0,
) -> None:
    """The slot holds the prompt but its newest token, and the next logits show it."""
    assert state.lengths[slot] == len(prompt) - 1
    found = target.verify(state, np.array([slot]), prompt[-1:], forest([chain(1)]))
    np.testing.assert_allclose(found.logits[0], truth(prompt), rtol=0, atol=1e-3)
