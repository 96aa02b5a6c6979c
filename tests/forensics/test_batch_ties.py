from dataclasses import replace

import numpy as np
import pytest

from specdec_core.decode import decode, outputs
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.forensics.batch_ties import BatchReplay, census_of_batch, continuation, differs_at
from specdec_core.forensics.near_ties import Divergence
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.table import TableTarget
from specdec_core.targets.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")

V, WINNER, RIVAL = 11, 9, 10  # at a tie; elsewhere the length of the prefix decides among 0…8
GAP, NOISE = 1e-4, 3e-4
PROMPTS = [(1, 2, 3), (4, 5), (6, 7, 8, 1, 2)]


def tied(*places, gap=GAP):
    """Logits with a clear winner but after prefixes of these (first token, length), where a rival is `gap` behind."""

    def logits(prefix):
        values = np.zeros(V)
        if (prefix[0], len(prefix)) in places:
            values[WINNER], values[RIVAL] = 3.0, 3.0 - gap
        else:
            values[(len(prefix) * 2 + prefix[0]) % 9] = 3.0
        return values

    return logits


class Crowded(TableTarget):
    """Rounds in favour of the rival where so many rows share a pass, and never for one row alone."""

    def __init__(self, logits, noise=NOISE, rows=(3,)):
        super().__init__(logits, V)
        self._noise, self._rows = noise, rows

    def verify(self, state, slots, tokens, forest):
        found = super().verify(state, slots, tokens, forest)
        if len(slots) in self._rows:
            found.logits[:, RIVAL] += self._noise
        return found


def requests(new=(12, 12, 12)):
    pairs = zip(PROMPTS, new, strict=True)
    return [Request(p, Options(max_new_tokens=n), FixedLength(3), key) for key, (p, n) in enumerate(pairs)]


class Batch:
    """Speculative rounds of the three prompts together, and their autoregressive outputs alone."""

    def __init__(self, target, slots=None, new=(12, 12, 12)):
        self.target, self.reference, self.slots = target, TableTarget(target._logits, V), slots
        self.requests = requests(new)
        self.rounds = list(decode(target, self.requests, ModelDrafter(self.reference, V), slots=slots))
        self.emitted = [each.tokens for each in outputs(self.rounds, 3)]
        plain = [replace(each, policy=None) for each in self.requests]
        self.expected = [outputs(decode(target, [each]), 1)[0].tokens for each in plain]

    def census(self, **changes):
        given = {
            "rounds": self.rounds,
            "expected": self.expected,
            "continued": continuation(self.target, self.requests),
        }
        return census_of_batch(self.target, self.reference, self.requests, **given | changes, slots=self.slots)

    def forged(self, key, index, token):
        """The rounds, had the row emitted this token at that place."""

        def change(row):
            at = index - (row.context - len(PROMPTS[key]))
            if row.key != key or not 0 <= at < len(row.emitted):
                return row
            return replace(row, emitted=(*row.emitted[:at], token, *row.emitted[at + 1 :]))

        return [replace(each, rows=tuple(map(change, each.rows))) for each in self.rounds]


class TestNearTies:
    def test_rounding_that_only_a_batch_shows_is_certified(self):
        batch = Batch(Crowded(tied((4, 6))))
        assert batch.emitted[1] != batch.expected[1]
        found = batch.census()
        assert [len(each) for each in found] == [0, 1, 0]
        one = found[1][0]
        assert (one.index, one.expected, one.emitted, one.control) == (4, WINNER, RIVAL, RIVAL) and one.certified
        assert one.gap == pytest.approx(GAP) and one.epsilon == pytest.approx(NOISE)  # alone it is exact

    def test_the_text_is_followed_to_the_next_tie_in_the_same_round_and_later(self):
        batch = Batch(Crowded(tied((4, 6), (4, 7), (4, 10), (1, 8)), rows=(2, 3)))
        found = batch.census()
        assert [[each.index for each in row] for row in found] == [[5], [4, 5, 8], []]
        assert all(each.certified for row in found for each in row)

    def test_a_row_that_was_admitted_later_into_a_freed_slot(self):
        batch = Batch(Crowded(tied((6, 8)), rows=(2,)), slots=2, new=(4, 12, 12))
        assert [[(row.key, row.slot) for row in each.rows] for each in batch.rounds[:2]] == [
            [(0, 0), (1, 1)],
            [(2, 0), (1, 1)],
        ]
        found = batch.census()
        assert [[(each.index, each.certified) for each in row] for row in found] == [[], [], [(3, True)]]


class TestBugs:
    def test_a_wrong_token_is_none_and_ends_the_row(self):
        batch = Batch(Crowded(tied((4, 6))))
        rounds = batch.forged(0, 4, 8)
        found = batch.census(rounds=rounds)
        assert [(each.index, each.emitted, each.gap, each.certified) for each in found[0]] == [(4, 8, 3.0, False)]
        assert [each.certified for each in found[1]] == [True]

    def test_a_tie_that_the_batch_does_not_repeat_is_none(self):
        batch = Batch(Crowded(tied((4, 6)), noise=0.9 * GAP))  # ε allows it, but the batch emits the winner
        assert batch.emitted == batch.expected
        found = batch.census(rounds=batch.forged(1, 4, RIVAL))[1][0]
        assert found.gap <= 2 * found.epsilon and found.control == WINNER and not found.certified

    def test_rounding_of_other_batches_excuses_nothing(self):
        batch = Batch(Crowded(tied((4, 6)), rows=(7,)))
        found = batch.census(rounds=batch.forged(1, 4, RIVAL))[1][0]
        assert found.epsilon == 0 and not found.certified

    def test_a_kernel_that_is_wrong_in_batches_does_not_excuse_itself(self):
        batch = Batch(Crowded(tied((4, 6)), noise=4.0))
        found = batch.census()
        assert all(row[0].control == row[0].emitted == RIVAL and not row[0].certified for row in found)

    @pytest.mark.parametrize("change", [lambda tokens: tokens[:-1], lambda tokens: (*tokens, 0)], ids=["short", "long"])
    def test_a_wrong_length_is_none(self, change):
        batch = Batch(Crowded(tied((4, 6))))
        expected = [change(batch.expected[0]), *batch.expected[1:]]
        found = batch.census(expected=expected)
        assert [(each.index, each.certified) for each in found[0]] == [(min(12, len(expected[0])), False)]

    def test_equal_outputs_cost_no_pass(self):
        batch = Batch(TableTarget(tied(), V))
        batch.target.verify = None
        assert batch.census() == [[], [], []]


class TestReplay:
    @pytest.mark.parametrize("drafter", [NGramDrafter(), NGramDrafter(candidates=2)], ids=["chain", "tree"])
    @pytest.mark.parametrize("slots", [2, 3])
    def test_every_token_is_emitted_again_in_the_same_shapes(self, drafter, slots):
        target = Transformer(tiny_llama(1), Placement(dtype="float64"))
        prompts = [(7, 7, 8, 7, 7), (3, 4), (5, 6, 5, 6, 5, 6, 5)]
        pairs = zip(prompts, (9, 20, 25), strict=True)
        asked = [Request(prompt, Options(max_new_tokens=n), FixedLength(4)) for prompt, n in pairs]
        seen, verify, prefill = [], target.verify, target.prefill

        def watched(state, slots, tokens, forest):
            seen.append((slots.tolist(), state.lengths[slots].tolist(), [np.bincount(t.depths) for t in forest.trees]))
            return verify(state, slots, tokens, forest)

        def watched_prefill(state, slots, prompts):
            seen.append((slots.tolist(), [each.tolist() for each in prompts]))
            return prefill(state, slots, prompts)

        target.verify, target.prefill = watched, watched_prefill
        rounds = list(decode(target, asked, drafter, slots=slots))
        decoded, seen[:] = list(seen), []
        replay = BatchReplay(target, asked, rounds, slots)
        for each in rounds:
            found = replay.step(each, [row.key for row in each.rows])
            for row in each.rows:
                assert found[row.key].argmax(axis=1).tolist() == list(row.emitted)
        assert str(seen) == str(decoded) and any(row.accepted for each in rounds for row in each.rows)

    def test_rows_that_are_admitted_together_keep_their_order(self):
        target, options = TableTarget(tied(), V), Options(max_new_tokens=4)
        asked = [Request(prompt, options, FixedLength(3)) for prompt in (*PROMPTS, (3, 3))]
        prefilled, prefill = [], target.prefill

        def watched(state, slots, prompts):
            prefilled.append((slots.tolist(), [each.tolist() for each in prompts]))
            return prefill(state, slots, prompts)

        target.prefill = watched
        rounds = list(decode(target, asked, ModelDrafter(TableTarget(tied(), V), V), slots=2))
        decoded, prefilled[:] = list(prefilled), []
        assert decoded[1][0] == [1, 0]  # the slot that was freed last is taken first
        replay = BatchReplay(target, asked, rounds)
        for each in rounds:
            replay.step(each, [])
        assert prefilled == decoded

    def test_real_rounding_is_certified(self):
        """Which models diverge depends on how a CPU multiplies 16-bit floats: of several, the first that does."""
        prompts = [(7, 7, 8, 7, 7), (3, 4), (5, 6, 5, 6, 5, 6, 5), (9,) * 4]
        asked = [Request(prompt, Options(max_new_tokens=40), FixedLength(4)) for prompt in prompts]

        def census(seed):
            checkpoint = tiny_llama(seed)
            target, reference = (Transformer(checkpoint, Placement(dtype=dtype)) for dtype in ("bfloat16", "float64"))
            expected = [outputs(decode(target, [replace(each, policy=None)]), 1)[0].tokens for each in asked]
            rounds = list(decode(target, asked, NGramDrafter()))
            return census_of_batch(target, reference, asked, rounds, expected, continuation(target, asked))

        found = next((rows for rows in map(census, (4, 5, 3, 0, 1, 2)) if any(rows)), [])
        assert sum(map(len, found)) >= 1 and all(each.certified for row in found for each in row)

    def test_rounds_with_gaps_are_refused(self):
        batch = Batch(Crowded(tied((4, 6))))
        with pytest.raises(ValueError, match=r"request 0: a round begins at \d+ tokens, and 3 are known of"):
            batch.census(rounds=batch.rounds[1:])

    def test_more_tokens_than_a_pass_can_give_are_refused(self):
        batch = Batch(TableTarget(tied(), V))
        first = batch.rounds[0]
        row = replace(first.rows[0], drafted=(1,))
        rounds = [replace(first, rows=(row, *first.rows[1:])), *batch.rounds[1:]]
        with pytest.raises(ValueError, match="emitted 4 tokens after a draft 1 deep"):
            batch.census(rounds=rounds)

    def test_no_rounds(self):
        with pytest.raises(ValueError, match="expected all rounds of a decoding"):
            BatchReplay(TableTarget(tied(), V), requests(), [])


class TestContinuation:
    def test_it_goes_on_to_the_cap_and_not_behind_an_end_token(self):
        target = TableTarget(tied(), V)
        asked = [Request((1, 2, 3), Options(max_new_tokens=6, eos=(WINNER,)))]
        whole = outputs(decode(target, asked), 1)[0].tokens
        continued = continuation(target, asked)
        assert continued(0, ()) == whole and continued(0, whole[:2]) == whole[2:] and continued(0, whole) == ()
        assert continued(0, (4, WINNER)) == ()

    def test_nor_past_the_context(self):
        target = TableTarget(tied(), V, context=8)
        assert len(continuation(target, requests())(0, (1, 2))) == 3
        assert continuation(target, requests())(0, (1, 2, 3, 4, 5)) == ()


class TestDiffersAt:
    TIE = Divergence(2, 0, 1, 1e-4, 1e-4, 1)
    BUG = Divergence(4, 0, 1, 3.0, 1e-4, 1)

    def test_equal(self):
        assert differs_at((5, 6, 7), (5, 6, 7), []) == "==="

    def test_after_a_certified_tie_the_text_is_excused_until_a_bug(self):
        expected, emitted = (5, 6, 7, 8, 0, 1, 2), (5, 6, 1, 8, 1, 1, 3)
        assert differs_at(expected, emitted, [self.TIE]) == "==~=~=~"
        assert differs_at(expected, emitted, [self.TIE, self.BUG]) == "==~=x=x"

    def test_a_bug_alone(self):
        assert differs_at((5, 6, 7, 8, 0), (5, 6, 7, 8, 1), [self.BUG]) == "====x"

    def test_lengths(self):
        cut = Divergence(2, -1, -1, float("inf"), 0.0, -1)
        assert differs_at((5, 6, 7, 8), (5, 6), [cut]) == "==xx"
        assert differs_at((5, 6), (5, 6, 7), [cut]) == "==x"
        assert differs_at((5, 6, 7, 8), (5, 6, 1), [self.TIE]) == "==~"  # it may end elsewhere
        assert differs_at((5, 6, 7), (5, 6, 1, 4), [self.TIE]) == "==~~"
