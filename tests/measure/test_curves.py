import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.measure.curves import CurveSamples, TimeCurve, curve_arms, verification_arm
from specdec_core.targets.table import TableTarget, random_logits

CURVE = TimeCurve((1, 2, 6), (100, 300), np.array([[1.0, 2.0, 4.0], [3.0, 4.0, 8.0]]))


class Watched(TableTarget):
    """Remembers what each verification was asked."""

    def __init__(self):
        super().__init__(random_logits(7, seed=1), 7, context=40)
        self.seen = []

    def verify(self, state, slots, tokens, forest):
        self.seen.append((tuple(state.lengths[slots]), tuple(forest.counts), tuple(tokens)))
        return super().verify(state, slots, tokens, forest)


@pytest.mark.parametrize(
    ("n", "context", "expected"),
    [
        (1, 100, 1.0),
        (6, 300, 8.0),
        (2, 200, 3.0),  # half-way between contexts
        (4, 100, 3.0),  # half-way between widths
        (4, 200, 4.5),  # both
        (6, 50, 4.0),  # flat outside of the contexts
        (6, 999, 8.0),
        (8, 100, 5.0),  # the last slope, a half a token
        (10, 200, 9.0),  # and where the contexts' slopes differ, their mean: 6 + 4 · 0.75
    ],
)
def test_a_curve_is_bilinear_flat_outside_of_contexts_and_goes_on_with_the_last_slope(n, context, expected):
    assert CURVE.at(n, context) == pytest.approx(expected)


def test_a_curve_of_one_width_is_flat():
    assert TimeCurve((3,), (10,), np.array([[2.0]])).at(9, 10) == 2.0


@given(st.floats(0.1, 9), st.floats(0, 9), st.floats(0, 0.9), st.floats(1, 40), st.floats(10, 90))
def test_a_curve_that_is_a_plane_is_returned_as_it_is(base, slope, growth, n, context):
    def plane(width, at):
        return base + slope * width + growth * at

    curve = TimeCurve((1, 4, 9), (10, 90), np.array([[plane(w, c) for w in (1, 4, 9)] for c in (10, 90)]))
    assert curve.at(n, context) == pytest.approx(plane(n, context))


def test_samples_become_medians_in_ascending_order():
    samples = {(c, w): np.array([c + w, c + w, 100.0]) for c in (20, 10) for w in (4, 1, 2)}
    curve = CurveSamples(samples).curve()
    assert (curve.widths, curve.contexts) == ((1, 2, 4), (10, 20))
    assert curve.seconds.tolist() == [[11, 12, 14], [21, 22, 24]]


def test_an_arm_verifies_so_many_nodes_a_row_behind_so_many_entries():
    target = Watched()
    arms = curve_arms(target, (1, 5), (8, 20), rows=3)
    assert set(arms) == {(8, 1), (8, 5), (20, 1), (20, 5)}
    for (context, width), arm in arms.items():
        arm()
        lengths, counts, tokens = target.seen[-1]
        assert lengths == (context,) * 3 and counts == (width,) * 3 and len(tokens) == 3 * width


def test_an_arm_commits_nothing_and_repeats_the_same_pass():
    target = Watched()
    arms = curve_arms(target, (2, 3), (8,))
    for arm in [*arms.values()] * 2:
        arm()
    assert target.seen[:2] == target.seen[2:]
    assert target.seen[0][2] == target.seen[1][2][:2]  # all widths go on with the same text


def test_the_widest_pass_may_fill_the_context_and_no_more():
    curve_arms(Watched(), (8,), (32,))[32, 8]()
    with pytest.raises(ValueError, match="context 33 \\+ n = 8: the model's context holds 40"):
        curve_arms(Watched(), (2, 8), (5, 33))


def test_a_verification_arm_takes_all_rows_of_a_state():
    target = Watched()
    state = target.new_state(2, 30)
    target.prefill(state, np.arange(2), [np.array([1, 2, 3]), np.array([4, 5])])
    verification_arm(target, state, np.array([[3, 0], [5, 6]]))()
    assert target.seen == [((2, 1), (2, 2), (3, 0, 5, 6))]
    assert state.lengths.tolist() == [2, 1]
