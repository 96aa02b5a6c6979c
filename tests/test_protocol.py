import numpy as np
import pytest

from specdec_core.protocol import NO_DRAFT, Draft, Phases, State
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.targets.table import TableState
from specdec_core.topology import chain, tree


def test_no_draft_is_an_autoregressive_step():
    assert len(NO_DRAFT.tokens) == 0 and len(NO_DRAFT.topology) == 1


@pytest.mark.parametrize("tokens", [0, 2])
def test_a_draft_has_one_token_a_node_behind_the_root(tokens):
    with pytest.raises(ValueError, match=f"draft of {tokens} tokens on a topology of 2 nodes"):
        Draft(np.zeros(tokens, np.int64), chain(2))


def test_a_draft_has_one_law_a_token():
    with pytest.raises(ValueError, match="2 laws for 3 draft tokens"):
        Draft(np.zeros(3, np.int64), tree((-1, 0, 0, 1)), np.ones((2, 3)) / 3)


def test_phases_add_up():
    assert Phases(1, 2, 4, 8, 16).total == 31


@pytest.mark.parametrize("state", [RaggedKV(1, 2, 1, 4, 2), TableState(2, 4)])
def test_states_are_states(state):
    assert isinstance(state, State)
    assert state.lengths.tolist() == [0, 0] and state.capacity == 4
