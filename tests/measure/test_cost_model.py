import math

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from specdec_core.decode import decode
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.lengths.fixed import FixedLength
from specdec_core.measure.cost_model import DraftCost, count, predict_seconds, serialization_index, speedup
from specdec_core.measure.curves import TimeCurve
from specdec_core.protocol import Round, RowRound
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.table import TableTarget, random_logits


def row(drafted, accepted, ending, *, emitted=None, context=10) -> RowRound:
    return RowRound(
        0, 0, context, tuple(drafted), accepted, ending, (7,) * (accepted + 1 if emitted is None else emitted)
    )


def rounds(*rows: RowRound) -> list[Round]:
    return [Round(index, (each,), 1 + sum(each.drafted)) for index, each in enumerate(rows)]


class TestIdentity:
    ks = st.integers(1, 16)
    shares, costs = st.floats(0, 1), st.floats(0, 3)

    @given(ks, shares, costs, costs, st.floats(0, 10))
    def test_it_pays_exactly_where_acceptance_exceeds_the_costs(self, k, a_k, c, s, o):
        assume(abs(a_k - (c + s + o / k)) > 1e-9)
        assert (speedup(k, a_k, c, s, o) > 1) == (a_k > c + s + o / k)

    @given(ks, shares, costs, costs)
    def test_serial_verification_loses_even_if_all_is_accepted(self, k, a_k, c, o):
        assert speedup(k, a_k, c, 1.0, o) <= 1

    @given(ks, shares)
    def test_free_drafts_and_free_verification_give_tau(self, k, a_k):
        assert speedup(k, a_k, 0, 0) == 1 + k * a_k

    def test_the_abstracts_number(self):
        assert speedup(6, 0.378, 0.172, 0) == pytest.approx(1.61, abs=0.005)

    @given(st.floats(1e-4, 1), st.floats(0, 2), st.integers(2, 64))
    def test_the_index_is_the_share_that_is_serialized(self, t_1, share, n):
        assert serialization_index(t_1 * (1 + share * (n - 1)), t_1, n) == pytest.approx(share)

    def test_one_token_has_no_index(self):
        with pytest.raises(ValueError, match="n = 1: expected n ≥ 2"):
            serialization_index(1.0, 1.0, 1)


class TestCount:
    def test_a_chain_by_hand(self):
        found = count(rounds(row([1, 1, 1], 3, "bonus"), row([1, 1, 1], 1, "recovered"), row([1], 0, "recovered")))
        assert (found.rounds, found.tokens) == (3, 4 + 2 + 1)
        assert found.drafted.tolist() == [3, 2, 2]
        assert found.tested.tolist() == [3, 2, 1]
        assert found.accepted.tolist() == [2, 1, 1]
        assert found.tau == pytest.approx(7 / 3) and found.a_k == pytest.approx(4 / 7)
        assert found.alpha == pytest.approx([2 / 3, 1 / 2, 1])

    def test_positions_behind_a_cut_say_nothing(self):
        found = count(rounds(row([1, 1, 1, 1], 2, "cut", emitted=2)))
        assert found.drafted.tolist() == found.tested.tolist() == found.accepted.tolist() == [1, 1]
        assert (found.a_k, found.tau) == (1.0, 2.0)

    def test_a_row_cut_at_its_first_token_counts_as_a_pass_only(self):
        found = count(rounds(row([1, 1], 1, "cut", emitted=1), row([1, 1], 0, "recovered")))
        assert (found.rounds, found.tokens, found.drafted.tolist()) == (2, 2, [2, 1])

    def test_a_tree_counts_a_depth_once(self):
        found = count(rounds(row([2, 3, 1], 2, "recovered"), row([2, 2, 2], 0, "recovered")))
        assert found.drafted.tolist() == [2, 2, 2]
        assert found.tested.tolist() == [2, 1, 1]
        assert found.accepted.tolist() == [1, 1, 0]

    def test_autoregressive_rounds_draft_nothing(self):
        found = count(rounds(*[row([], 0, "bonus")] * 5))
        assert (found.rounds, found.tokens, found.tau, len(found.drafted)) == (5, 5, 1.0, 0)
        assert math.isnan(found.a_k)

    def test_no_rounds(self):
        found = count([])
        assert (found.rounds, found.tokens) == (0, 0) and math.isnan(found.tau)

    def test_a_position_that_was_never_tested_has_no_alpha(self):
        alpha = count(rounds(row([1, 1], 0, "recovered"))).alpha
        assert alpha[0] == 0 and math.isnan(alpha[1])

    def test_rows_of_a_batch_count_each(self):
        together = Round(0, (row([1], 1, "bonus"), row([1, 1], 0, "recovered")), 5)
        found = count([together, Round(1, (), 0)])
        assert (found.rounds, found.tokens, found.drafted.tolist()) == (2, 3, [2, 1])

    @given(st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6), st.booleans()), max_size=12))
    def test_what_was_accepted_was_tested_and_what_was_tested_was_drafted(self, made):
        rows = [
            row([1] * depth, min(depth, accepted), "cut" if cut else "bonus" if accepted >= depth else "recovered")
            for depth, accepted, cut in made
        ]
        found = count(rounds(*rows))
        assert (found.accepted <= found.tested).all() and (found.tested <= found.drafted).all()
        assert found.accepted.sum() == sum(each.accepted for each in rows)
        assert (np.diff(found.drafted) <= 0).all() and (np.diff(found.accepted) <= 0).all()

    @pytest.mark.parametrize("candidates", [1, 2])
    def test_of_real_rounds_every_token_is_accepted_recovered_or_bonus(self, candidates):
        target = TableTarget(random_logits(3, seed=4, spread=1), 3)
        requests = [Request((1, 2, 1), Options(max_new_tokens=n), FixedLength(3)) for n in (20, 21, 22)]
        done = list(decode(target, requests, NGramDrafter(candidates=candidates)))
        found, rows = count(done), [each for one in done for each in one.rows]
        uncut = [each for each in rows if each.ending != "cut"]
        assert found.tokens == 63 == found.accepted.sum() + len(uncut)
        assert found.rounds == len(rows) and found.a_k < 1


CURVE = TimeCurve((1, 3, 5), (10, 20), np.array([[1.0, 1.2, 2.0], [2.0, 2.2, 3.0]]))


class TestPrediction:
    def test_autoregressive_passes_by_hand(self):
        passes = rounds(row([], 0, "bonus", context=11), row([], 0, "bonus", context=16))
        assert predict_seconds(passes, CURVE, DraftCost(), 0.1) == pytest.approx((1 + 0.1) + (1.5 + 0.1))

    def test_a_stepping_drafter_pays_a_step_a_depth(self):
        one = rounds(row([1, 1], 1, "recovered", context=11))
        assert predict_seconds(one, CURVE, DraftCost(step=0.25), 0.1) == pytest.approx(1.2 + 0.1 + 2 * 0.25)

    def test_a_tree_is_verified_by_nodes_and_drafted_by_depth(self):
        one = rounds(row([2, 2], 1, "recovered", context=21))
        assert predict_seconds(one, CURVE, DraftCost(step=0.25), 0) == pytest.approx(3.0 + 2 * 0.25)

    def test_a_look_up_pays_a_round(self):
        two = rounds(row([1, 1], 2, "bonus", context=11), row([], 0, "bonus", context=11))
        assert predict_seconds(two, CURVE, DraftCost(round=0.5), 0) == pytest.approx(1.2 + 0.5 + 1 + 0.5)

    def test_a_round_pays_for_every_token_behind_its_first(self):
        passes = rounds(row([1, 1], 2, "bonus", context=11), row([], 0, "bonus", context=11))
        assert predict_seconds(passes, CURVE, DraftCost(), 0.1, 0.03) == pytest.approx(1.2 + 0.1 + 2 * 0.03 + 1 + 0.1)

    def test_a_speedup_predicted_from_a_curve_is_the_identity(self):
        k, passes = 4, 8
        speculative = rounds(*[row([1] * k, 2, "recovered", context=11)] * passes)
        plain = rounds(*[row([], 0, "bonus", context=11)] * passes)
        draft, overhead = DraftCost(step=0.1), 0.05
        seconds = predict_seconds(speculative, CURVE, draft, overhead) / (3 * passes)
        s = serialization_index(CURVE.at(5, 10), CURVE.at(1, 10), 5)
        expected = speedup(k, 0.5, 0.1, s, overhead)
        assert predict_seconds(plain, CURVE, DraftCost(), 0) / passes / seconds == pytest.approx(expected)
