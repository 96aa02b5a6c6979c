import numpy as np
import pytest

from specdec_core.targets.table import TableTarget, random_logits
from specdec_core.topology import chain, forest
from tests.conformance import Subject, TargetConformance

TABLE = random_logits(7, seed=3)


class TestTable(TargetConformance):
    subject = Subject(TableTarget(TABLE, 7), lambda tokens: TABLE(tuple(map(int, tokens))), tolerance=0.0)


def test_random_logits_depend_on_the_whole_prefix():
    assert (TABLE((1, 2)) == random_logits(7, seed=3)((1, 2))).all()
    others = [TABLE((2, 1)), TABLE((0, 1, 2)), TABLE((1, 2, 0)), TABLE(()), random_logits(7, seed=4)((1, 2))]
    assert all((TABLE((1, 2)) != other).any() for other in others)


def test_spread_scales_the_logits():
    np.testing.assert_allclose(random_logits(5, 0, spread=3.0)((1,)), 2 * random_logits(5, 0, spread=1.5)((1,)))


@pytest.mark.parametrize("kept", range(4))
def test_state_is_the_committed_tokens_but_the_newest(kept):
    target = TableTarget(TABLE, 7)
    state = target.new_state(2, 12)
    target.prefill(state, np.array([1]), [np.array([4, 5, 6])])
    found = target.verify(state, np.array([1]), np.array([6, 1, 2]), forest([chain(3)]))
    target.commit(state, found, [np.arange(kept)])
    assert state.entries == [[], [4, 5, *[6, 1, 2][:kept]]]
