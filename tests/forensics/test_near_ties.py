import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.decode import decode, outputs
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.forensics.near_ties import Divergence, census, examine, first_difference, replay, stand_in
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.table import TableTarget
from specdec_core.targets.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")

V, WINNER, RIVAL = 11, 9, 10  # at the tie; elsewhere the length of the prefix decides among 0…8
PROMPT = (1, 2, 3)


def tied(at: int, gap: float):
    """Logits with a clear winner after every prefix but one, where a rival is `gap` behind."""

    def logits(prefix):
        values = np.zeros(V)
        if len(prefix) == at:
            values[WINNER], values[RIVAL] = 3.0, 3.0 - gap
        else:
            values[len(prefix) * 2 % 9] = 3.0
        return values

    return logits


class Rounded(TableTarget):
    """Rounds in favour of the rival in passes of some widths, as a kernel that sums in another order may."""

    def __init__(self, logits, noise: float, widths=range(2, 99)):
        super().__init__(logits, V)
        self._noise, self._widths = noise, widths

    def verify(self, state, slots, tokens, forest):
        found = super().verify(state, slots, tokens, forest)
        if len(tokens) in self._widths:
            found.logits[:, RIVAL] += self._noise
        return found


def speculate(target, k=3, new=12, prompt=PROMPT, drafter=None):
    """Autoregressive tokens, speculative tokens, and the rounds of the latter."""
    options = Options(max_new_tokens=new)
    plain = outputs(decode(target, [Request(prompt, options)]), 1)[0].tokens
    rounds = list(decode(target, [Request(prompt, options, FixedLength(k))], drafter or exact_drafter(target)))
    return plain, outputs(rounds, 1)[0].tokens, [each.rows[0] for each in rounds]


def exact_drafter(target):
    return ModelDrafter(TableTarget(target._logits, V), V)


def examined(target, plain, emitted, rows, prompt=PROMPT):
    return examine(target, TableTarget(target._logits, V), prompt, plain, emitted, rows)


class TestNearTies:
    def test_rounding_that_decides_a_tie_is_certified(self):
        target = Rounded(tied(at=6, gap=1e-4), noise=3e-4)
        found = examined(target, *speculate(target))
        assert (found.index, found.expected, found.emitted, found.control) == (3, WINNER, RIVAL, RIVAL)
        assert found.gap == pytest.approx(1e-4) and found.epsilon == pytest.approx(3e-4)
        assert found.certified

    @given(st.integers(3, 12), st.integers(1, 6), st.floats(1e-6, 1e-2), st.floats(1.01, 5))
    def test_wherever_it_is(self, at, k, gap, excess):
        target = Rounded(tied(at, gap), noise=gap * excess)
        found = examined(target, *speculate(target, k, new=14))
        assert found.certified and found.index == at - len(PROMPT)

    def test_right_behind_a_prompt_of_one_token(self):
        target = Rounded(tied(at=1, gap=1e-4), noise=3e-4)
        found = examined(target, *speculate(target, prompt=(1,)), prompt=(1,))
        assert found.index == 0 and found.certified

    def test_at_the_end_of_the_context(self):
        target = Rounded(tied(at=14, gap=1e-4), noise=3e-4)
        target.context = 16
        whole = target._logits
        target._logits = lambda prefix: whole(prefix) if len(prefix) <= 16 else 1 / 0
        plain, emitted, rows = speculate(target, k=8, prompt=tuple(range(3)))
        assert len(emitted) == 12 and examined(target, plain, emitted, rows).certified

    def test_equal_outputs_do_not_diverge(self):
        target = Rounded(tied(at=6, gap=1e-4), noise=0.5e-4)
        assert examined(target, *speculate(target)) is None


class TestBugs:
    def test_a_wrong_token_is_none(self):
        target = Rounded(tied(at=99, gap=0), noise=1e-4)
        plain, emitted, rows = speculate(target)
        wrong = (*emitted[:4], 8, *emitted[5:])
        found = examined(target, plain, wrong, rows)
        assert found.index == 4 and found.gap == 3.0 and not found.certified

    def test_a_damaged_cache_is_none_even_though_the_control_repeats_it(self):
        class Damaged(TableTarget):
            """Loses the last of several entries that it commits at once."""

            def commit(self, state, verification, paths):
                super().commit(state, verification, paths)
                for slot, path in zip(verification.slots, paths, strict=True):
                    if len(path) > 1:
                        state.entries[slot].pop()

        target = Damaged(tied(at=99, gap=0), V)
        found = examined(target, *speculate(target))
        assert found.control == found.emitted and found.gap > 2 * found.epsilon == 0 and not found.certified

    def test_a_kernel_that_is_wrong_at_some_width_does_not_excuse_itself(self):
        target = Rounded(tied(at=99, gap=0), noise=4.0)  # the rival wins every wide pass, in the control too
        found = examined(target, *speculate(target))
        assert found.control == found.emitted == RIVAL and found.gap == 3.0 and not found.certified

    def test_a_wrong_autoregressive_token_is_none(self):
        target = Rounded(tied(at=99, gap=0), noise=0.0)
        plain, emitted, rows = speculate(target)
        found = examined(target, (*plain[:4], 8, *plain[5:]), emitted, rows)
        assert found.control == found.emitted == emitted[4] and found.gap == 3.0 and not found.certified

    def test_a_tie_that_the_control_does_not_repeat_is_none(self):
        # Only passes of the last round's width round towards the rival; the tie was decided in a wider one.
        target = Rounded(tied(at=6, gap=1e-4), noise=3e-4, widths=(2,))
        plain, emitted, rows = speculate(target, new=10)
        assert sorted({1 + sum(row.drafted) for row in rows}) == [2, 4] and plain == emitted
        found = examined(target, plain, (*emitted[:3], RIVAL, *emitted[4:]), rows)
        assert found.gap <= 2 * found.epsilon and found.control == WINNER and not found.certified

    def test_rounding_of_widths_that_were_not_used_excuses_nothing(self):
        target = Rounded(tied(at=6, gap=1e-4), noise=3e-4, widths=(7,))
        plain, emitted, rows = speculate(target)
        found = examined(target, plain, (*emitted[:3], RIVAL, *emitted[4:]), rows)
        assert found.epsilon == 0 and not found.certified

    @pytest.mark.parametrize("change", [lambda tokens: tokens[:-1], lambda tokens: (*tokens, 0)], ids=["short", "long"])
    def test_a_wrong_length_is_none(self, change):
        target = Rounded(tied(at=99, gap=0), noise=1.0)
        plain, emitted, rows = speculate(target)
        found = examined(target, plain, change(emitted), rows)
        assert found.index == min(len(plain), len(change(emitted))) and not found.certified

    @pytest.mark.parametrize(
        ("gap", "control", "certified"),
        [(2e-4, 5, True), (2.1e-4, 5, False), (0.0, 4, False), (float("nan"), 5, False), (float("inf"), 5, False)],
    )
    def test_both_criteria_are_needed(self, gap, control, certified):
        one = Divergence(index=0, expected=4, emitted=5, gap=gap, epsilon=1e-4, control=control)
        assert one.certified is certified


class TestReplay:
    @pytest.mark.parametrize("drafter", [NGramDrafter(), NGramDrafter(candidates=2)], ids=["chain", "tree"])
    def test_it_emits_every_token_again(self, drafter):
        target = Transformer(tiny_llama(1), Placement(dtype="float64"))
        prompt = (7, 7, 8, 7, 7)
        _, emitted, rows = speculate(target, k=4, new=30, prompt=prompt, drafter=drafter)
        assert max(sum(row.drafted) for row in rows) > 3
        again = [replay(target, prompt, emitted, rows, index) for index in range(30)]
        assert again == list(emitted)

    def test_the_cache_is_built_in_the_same_chunks(self):
        target = Rounded(tied(at=99, gap=0), noise=0.0)
        _, emitted, rows = speculate(target, k=2, new=9)
        widths, verify = [], target.verify

        def watched(state, slots, tokens, forest):
            widths.append((state.lengths[0], len(tokens)))
            return verify(state, slots, tokens, forest)

        target.verify = watched
        replay(target, PROMPT, emitted, rows, 8)
        assert widths == [(row.context - 1, 1 + sum(row.drafted)) for row in rows]

    def test_a_token_that_no_round_emitted(self):
        target = Rounded(tied(at=99, gap=0), noise=0.0)
        _, emitted, rows = speculate(target)
        with pytest.raises(ValueError, match=f"token 12 was not emitted in these {len(rows)} rounds"):
            replay(target, PROMPT, emitted, rows, 12)


class TestCensus:
    def counted(self, target, emitted, plain, rows):
        def continued(shared):
            options = Options(max_new_tokens=12 - len(shared))
            return (
                outputs(decode(target, [Request((*PROMPT, *shared), options)]), 1)[0].tokens if len(shared) < 12 else ()
            )

        return census(target, TableTarget(target._logits, V), PROMPT, plain, emitted, rows, continued)

    def test_after_a_near_tie_the_text_is_followed_to_the_next(self):
        def twice(prefix):
            return tied(at=6, gap=1e-4)(prefix) if len(prefix) != 10 else tied(at=10, gap=1e-4)(prefix)

        target = Rounded(twice, noise=3e-4)
        plain, emitted, rows = speculate(target)
        found = self.counted(target, emitted, plain, rows)
        assert [(each.index, each.certified) for each in found] == [(3, True), (7, True)]

    def test_a_bug_behind_a_near_tie_is_found_and_ends_it(self):
        target = Rounded(tied(at=6, gap=1e-4), noise=3e-4)
        plain, emitted, rows = speculate(target)
        found = self.counted(target, (*emitted[:5], 8, *emitted[6:9], 8, *emitted[10:]), plain, rows)
        assert [(each.index, each.certified) for each in found] == [(3, True), (5, False)]

    def test_equal_outputs_have_none(self):
        target = Rounded(tied(at=6, gap=1e-4), noise=0.5e-4)
        plain, emitted, rows = speculate(target)
        assert self.counted(target, emitted, plain, rows) == []


class TestStandIn:
    @given(st.lists(st.integers(1, 4), max_size=4))
    def test_it_has_the_nodes_of_each_depth_and_a_branch_to_the_deepest(self, drafted):
        shape, branch = stand_in(drafted)
        assert np.bincount(shape.depths).tolist() == [1, *drafted]
        assert branch.tolist() == shape.path(int(branch[-1])).tolist() and len(branch) == len(drafted) + 1

    def test_a_tree_is_replayed_as_one(self):
        target = Rounded(tied(at=99, gap=0), noise=0.0)
        prompt = (1, 2, 1, 3, 1)
        _, emitted, rows = speculate(target, k=3, prompt=prompt, drafter=NGramDrafter(1, 1, candidates=2))
        shapes, verify = [], target.verify

        def watched(state, slots, tokens, forest):
            shapes.append(np.bincount(forest.trees[0].depths).tolist())
            return verify(state, slots, tokens, forest)

        target.verify = watched
        assert replay(target, prompt, emitted, rows, 11) == emitted[11]
        assert shapes == [[1, *row.drafted] for row in rows] and max(map(max, shapes)) > 1


class TestFirstDifference:
    texts = st.lists(st.integers(0, 3), max_size=8)

    @given(texts, texts, texts)
    def test_it_is_where_the_common_prefix_ends(self, common, one, other):
        index = first_difference(common + one, common + other)
        if one == other:
            assert index is None
        else:
            assert index >= len(common) and (common + one)[:index] == (common + other)[:index]
            assert (common + one)[index : index + 1] != (common + other)[index : index + 1]
