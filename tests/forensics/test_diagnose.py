import numpy as np
import pytest

from specdec_core.decode import RequestError
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.forensics.diagnose import diagnose, our_decoder
from specdec_core.forensics.diagnosis_experiments import ALONE, CAP, CUT, LONGER, MARKED, PLAIN, REPEATED, RESTARTED
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.protocol import Round, RowRound
from specdec_core.sampling import Options
from specdec_core.targets.table import TableTarget, random_logits
from specdec_core.targets.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")

V, PAD, END, K, CAPPED = 40, 0, 1, 3, 12
LOGITS = random_logits(V, 3)
PROMPTS = [(5, 6, 7, 8, 9), (10, 11), (12, 13, 14), (15, 16, 17, 18, 19, 20, 21)]
OPTIONS = Options(max_new_tokens=CAPPED, eos=(END,))


def after(prefix):
    """The greedy token; ends are frequent, so that some rows come to one before the cap."""
    values = LOGITS(tuple(prefix)).copy()
    values[END] += 1.0
    return int(np.argmax(values))


class Law(TableTarget):
    def __init__(self, context=128):
        super().__init__(lambda prefix: np.eye(V)[after(prefix)], V, context)


TARGET = Law()


class Simulated:
    """A batched speculative decoder that keeps, a row, the tokens its cache stands for. Faults override its parts.

    Drafts are the right tokens but for every third place, where they are wrong; that depends on the text, so rows of
    different texts accept unequally.
    """

    def __call__(self, prompts, max_new_tokens=CAPPED):
        return self.run([list(prompt) for prompt in prompts], max_new_tokens)

    def run(self, prompts, cap):
        caches = self.prefill(prompts)
        texts = [list(prompt) for prompt in prompts]
        emitted = [[] for _ in prompts]
        active, number = list(range(len(prompts))), 0
        while active:
            rows = []
            for key in active:
                draft = self.draft(texts[key], min(K, cap - len(emitted[key]) - 1))
                taken, accepted = self.verify(caches[key], draft)
                ended = None
                for count, token in enumerate(taken, start=1):
                    if self.ends(token):
                        taken, ended = taken[:count], "eos"
                        break
                done = emitted[key] + taken
                ended = ended or ("length" if self.full(done, cap) else None)
                rows.append(RowRound(key, key, len(texts[key]), (1,) * len(draft), min(accepted, len(taken)),
                                     "cut" if ended else "recovered", tuple(taken), ended))  # fmt: skip
                emitted[key] = done
                texts[key] = prompts[key] + done
                self.commit(caches, key, draft, taken, accepted)
            self.align(caches, rows)
            yield Round(number, tuple(rows), 0)
            active = self.left(active, rows)
            number += 1

    def prefill(self, prompts):
        return [list(prompt) for prompt in prompts]

    def draft(self, text, room):
        tokens = []
        for _ in range(room):
            tokens.append(after([*text, *tokens]))
        at = sum(text) % 4
        if at < len(tokens):
            tokens[at] = (tokens[at] + 1) % V
        return tokens

    def verify(self, cache, draft):
        """Emitted tokens, and how many of the draft's are among them."""
        taken = []
        for token in draft:
            right = self.greedy([*cache, *taken])
            if not self.accepts(cache, taken, token, right):
                return [*taken, right], len(taken)
            taken.append(token)
        return [*taken, self.greedy([*cache, *taken])], len(draft)

    def greedy(self, prefix):
        return after(prefix)

    def accepts(self, cache, taken, token, right):
        return token == right

    def commit(self, caches, key, draft, taken, accepted):
        caches[key] += taken

    def align(self, caches, rows):
        """Nothing to do: rows know nothing of one another."""

    def ends(self, token):
        return token == END

    def full(self, done, cap):
        return len(done) >= cap

    def left(self, active, rows):
        return [row.key for row in rows if row.finished is None]


def in_lists(decoder):
    """The same decoder, telling lists of tokens a round."""

    def told(prompts):
        for each in decoder(prompts):
            emitted = {row.key: row.emitted for row in each.rows}
            yield [list(emitted.get(key, ())) for key in range(len(prompts))]

    return told


def plainly(decoder):
    """The same decoder, returning a rectangle."""

    def answer(prompts):
        rows = [[t for part in each for t in part] for each in zip(*in_lists(decoder)(prompts), strict=True)]
        return [row + [PAD] * (max(map(len, rows)) - len(row)) for row in rows]

    return answer


class StaleEntries(Simulated):
    def commit(self, caches, key, draft, taken, accepted):
        caches[key] += [*taken[:-1], *draft[accepted:], *taken[-1:]]


class KeepsMismatch(Simulated):
    def accepts(self, cache, taken, token, right):
        return True


class LosesBonusEntry(Simulated):
    def commit(self, caches, key, draft, taken, accepted):
        caches[key] += [*taken[:-2], taken[-1]] if draft and accepted == len(draft) else taken


class NotRealigned(Simulated):
    """Every row is moved by the fullest row's number of tokens, as if it had got as many."""

    def align(self, caches, rows):
        most = max(len(row.emitted) for row in rows)
        for row in rows:
            if len(row.emitted) < most:
                caches[row.key].insert(len(caches[row.key]) - 1, PAD)


class WritesAcrossRows(Simulated):
    def prefill(self, prompts):
        caches = super().prefill(prompts)
        for key in range(1, len(prompts)):
            caches[key][0] = prompts[key - 1][-1]
        return caches


class VisiblePadding(Simulated):
    def prefill(self, prompts):
        width = max(map(len, prompts))
        return [[PAD] * (width - len(prompt)) + list(prompt) for prompt in prompts]


class PaddingFromTheFirstStep(Simulated):
    """Hides padding in the prefill, and shows it to every step after the first."""

    def run(self, prompts, cap):
        self.width = max(map(len, prompts))
        self.padding = [self.width - len(prompt) for prompt in prompts]
        return super().run(prompts, cap)

    def commit(self, caches, key, draft, taken, accepted):
        caches[key] += taken
        caches[key][:0] = [PAD] * self.padding[key]
        self.padding[key] = 0


class MaskFromIds(Simulated):
    def prefill(self, prompts):
        return [[token for token in prompt if token != END] for prompt in prompts]


class OtherWeights(Simulated):
    def greedy(self, prefix):
        return after(prefix) if sum(prefix) % 5 else 39


class ByPlace(Simulated):
    """The first row is decoded with its first token twice, whoever it is; a row alone takes another path."""

    def prefill(self, prompts):
        caches = super().prefill(prompts)
        if len(caches) > 1:
            caches[0].insert(0, caches[0][0])
        return caches


class EndsTogether(Simulated):
    def left(self, active, rows):
        return [] if any(row.finished for row in rows) else active


class IgnoresEnd(Simulated):
    def ends(self, token):
        return False


class IgnoresCap(Simulated):
    def full(self, done, cap):
        return len(done) >= cap + 2


class Remembers(Simulated):
    calls = 0

    def prefill(self, prompts):
        self.calls += 1
        return [[*prompt[:1] * (self.calls % 2), *prompt] for prompt in prompts]


class FailsWhenPadded(Simulated):
    def prefill(self, prompts):
        if len(set(map(len, prompts))) > 1:
            raise RuntimeError("expected a tensor of equal lengths")
        return super().prefill(prompts)


def found(decoder, prompts=PROMPTS, options=OPTIONS, **how):
    return diagnose(decoder, TARGET, prompts, options, **how)


class TestSignatures:
    @pytest.mark.parametrize(
        ("fault", "rounds", "lists", "plain"),
        [
            (Simulated, "clean", "clean", "clean"),
            (StaleEntries, "drift after rejections", "drift after rejections", "spoiled by earlier rounds"),
            (KeepsMismatch, "draft token kept", "wrong alone too", "wrong alone too"),
            (
                LosesBonusEntry,
                "spoiled by a whole acceptance",
                "spoiled by earlier rounds",
                "spoiled by earlier rounds",
            ),
            (NotRealigned, "unequal acceptance", "unequal acceptance", "neighbours' content or lengths"),
            (WritesAcrossRows, "neighbours' content", "neighbours' content", "neighbours' content or lengths"),
            (VisiblePadding, *["padding at prefill"] * 3),
            (PaddingFromTheFirstStep, *["padding in later steps"] * 3),
            (MaskFromIds, *["mask made from ids"] * 3),
            (OtherWeights, *["wrong alone too"] * 3),
            (ByPlace, *["order of rows"] * 3),
            (EndsTogether, *["too short"] * 3),
            (IgnoresEnd, *["too long"] * 3),
            (IgnoresCap, *["too long"] * 3),
            (Remembers, *["not repeatable"] * 3),
            (FailsWhenPadded, *["raises"] * 3),
        ],
        ids=lambda value: "" if isinstance(value, str) else value.__name__,
    )
    def test_every_fault_by_what_is_told_of_it(self, fault, rounds, lists, plain):
        reports = [found(form(fault()), special=(PAD,)) for form in (lambda decoder: decoder, in_lists, plainly)]
        assert [report.verdict for report in reports] == [rounds, lists, plain]
        assert all(report.correct is (fault is Simulated) for report in reports)

    def test_end_tokens_in_the_prompts_are_told_apart_from_padding(self):
        chats = [(*prompt[:1], END, *prompt[1:]) for prompt in PROMPTS]
        report = found(MaskFromIds(), chats)
        assert report.verdict == "mask made from ids" and "wrong alone too" in [s.name for s in report.signatures]
        assert PLAIN in report.agreeing and ALONE in report.disagreeing
        assert found(VisiblePadding(), chats).verdict == "padding at prefill"
        assert found(Simulated(), chats).verdict == "clean"

    def test_restarting_tells_a_spoiled_cache_from_other_weights(self):
        spoiled, other = found(plainly(StaleEntries())), found(plainly(OtherWeights()))
        assert RESTARTED in spoiled.agreeing and RESTARTED in other.disagreeing

    def test_rounds_without_a_draft_accept_nothing_whole(self):
        class Autoregressive(OtherWeights):
            def draft(self, text, room):
                return []

        assert [each.name for each in found(Autoregressive()).signatures] == ["wrong alone too"]

    def test_copies_hide_what_unequal_acceptance_does(self):
        report = found(NotRealigned())
        assert {ALONE, REPEATED} <= set(report.agreeing) and CUT in report.disagreeing


class Tied(TableTarget):
    """After prefixes of one length a rival is a hair behind the winner; passes of some numbers of rows favour it."""

    GAP, WINNER, RIVAL = 1e-4, 30, 31

    def __init__(self, noise=0.0, lengths=(8,), rows=range(99)):
        super().__init__(self.law, V, 128)
        self.noise, self.lengths, self.rows = noise, lengths, rows

    def law(self, prefix):
        if len(prefix) not in self.lengths:
            return 3.0 * np.eye(V)[after(prefix)]
        return 3.0 * np.eye(V)[self.WINNER] + (3.0 - self.GAP) * np.eye(V)[self.RIVAL]

    def verify(self, state, slots, tokens, forest):
        seen = super().verify(state, slots, tokens, forest)
        if len(slots) in self.rows:
            seen.logits[:, self.RIVAL] += self.noise
        return seen


class Leaning:
    """A foreign greedy decoder that takes the rival by how far `leans(rows, tokens so far, prefix length)`."""

    def __init__(self, law, leans):
        self.law, self.leans = law, leans

    def __call__(self, prompts):
        rows = []
        for prompt in prompts:
            tokens = []
            while len(tokens) < CAPPED and END not in tokens:
                logits = self.law((*prompt, *tokens)).copy()
                if logits[Tied.RIVAL] > 1:
                    logits[Tied.RIVAL] += self.leans(len(prompts), len(tokens), len(prompt) + len(tokens))
                tokens.append(int(np.argmax(logits)))
            rows.append(tokens)
        return rows


class TestNearTies:
    # The target's error is on a token that decides nothing: how large rounding is, not where it falls.
    ROUNDING = 2e-4

    def report(self, leans, reference=True, noise=ROUNDING, lengths=(8,)):
        exact, target = Tied(lengths=lengths), Tied(lengths=lengths)
        target._logits = lambda prefix: exact.law(prefix) + noise * np.eye(V)[2]
        decoder = Leaning(exact.law, leans)
        return diagnose(decoder, target, PROMPTS, OPTIONS, exact if reference else None)

    def test_a_token_that_the_decoder_repeats_alone_from_a_fresh_cache(self):
        report = self.report(lambda rows, done, length: 2e-4)
        assert report.verdict == "certified near-ties only" and report.correct
        assert {each.how for each in report.observations} == {"", "decoder restarted alone"}

    def test_one_that_it_repeats_only_in_a_batch(self):
        report = self.report(lambda rows, done, length: 2e-4 * (rows > 1))
        assert report.correct and "decoder restarted in the batch" in {each.how for each in report.observations}
        assert "token 3" in str(report) and "2ε = 0.0004" in str(report)

    def test_one_that_it_does_not_repeat_is_within_rounding_only(self):
        report = self.report(lambda rows, done, length: 2e-4 * (done > 0))
        assert report.verdict == "within rounding only" and not report.correct

    @pytest.mark.parametrize("later", [8, 10])
    def test_one_uncertified_near_tie_is_what_the_row_is_reported_by(self, later):
        report = self.report(lambda rows, done, length: 2e-4 * (done > 0 or length == later), lengths=(8, 10))
        assert {each.how for each in report.observations} >= {""} and report.verdict == "within rounding only"

    def test_a_gap_that_rounding_does_not_explain(self):
        report = self.report(lambda rows, done, length: 2e-4, noise=1e-5)
        assert report.verdict == "wrong alone too" and not report.correct

    def test_nothing_is_excused_without_a_reference(self):
        report = self.report(lambda rows, done, length: 2e-4, reference=False)
        assert report.verdict == "wrong alone too" and "near-ties were not told from errors" in str(report)

    def test_our_own_rounds_are_replayed(self):
        target = Tied(noise=2e-4, rows=(3, 4))
        drafter = ModelDrafter(TARGET, V)
        report = diagnose(our_decoder(target, OPTIONS, drafter, FixedLength(K)), target, PROMPTS, OPTIONS, Tied())
        assert report.verdict == "certified near-ties only"
        assert {each.how for each in report.observations} == {"", "replayed batch"}

    def test_a_replay_that_emits_another_token_certifies_nothing(self):
        decoder = our_decoder(Tied(noise=2e-4), OPTIONS)
        report = diagnose(decoder, Tied(noise=-2e-4), PROMPTS, OPTIONS, Tied())
        assert report.verdict == "within rounding only" and {each.how for each in report.observations} == {""}

    def test_a_target_that_is_far_off_excuses_nothing(self):
        target = Law()
        target._logits = lambda prefix: 3.0 * np.eye(V)[after(prefix)] - 4.0 * np.eye(V)[2]
        exact = TableTarget(lambda prefix: 3.0 * np.eye(V)[after(prefix)], V, 128)
        report = diagnose(plainly(OtherWeights()), target, PROMPTS, OPTIONS, exact)
        assert report.verdict == "wrong alone too"

    def test_a_kernel_that_is_wrong_in_batches_is_not_excused_by_its_replay(self):
        target = Tied(noise=4.0, rows=(3, 4))
        report = diagnose(our_decoder(target, OPTIONS), target, PROMPTS, OPTIONS, Tied())
        assert not report.correct and report.agreeing[0] == ALONE


class TestOurDecoder:
    @pytest.mark.parametrize("slots", [None, 2])
    def test_ours_is_clean(self, slots):
        target = Transformer(tiny_llama(1), Placement(dtype="float64"))
        options = Options(max_new_tokens=12, eos=(3,))
        decoder = our_decoder(target, options, NGramDrafter(candidates=2), FixedLength(K), slots)
        report = diagnose(decoder, target, [(7, 8, 7, 8, 7), (5, 6), (9,), (5, 3, 5, 3, 4, 4)], options)
        assert report.verdict == "clean" and not report.disagreeing and report.skipped == ()
        assert PLAIN in report.agreeing and MARKED not in report.agreeing


class TestArguments:
    def test_what_cannot_be_diagnosed_is_refused(self):
        with pytest.raises(ValueError, match="1 prompts: expected at least two"):
            found(Simulated(), PROMPTS[:1])
        for change in ({"temperature": 1.0}, {"min_new_tokens": 2}, {"stop": ("a",)}, {"repetition_penalty": 2.0}):
            with pytest.raises(ValueError, match="expected plain greedy ones"):
                found(Simulated(), options=Options(**change))

    def test_prompts_that_the_target_cannot_decode_are_told_before_anything_runs(self):
        with pytest.raises(RequestError, match="token ids"):
            found(lambda prompts: 1 / 0, [(1, 2), (V,)])

    def test_what_was_not_run_is_told(self):
        report = diagnose(plainly(Simulated()), Law(context=30), [(5,), (6,)], Options(max_new_tokens=20))
        said = str(report)
        assert all(f"not run: {name}" in said for name in (LONGER, CAP, PLAIN)) and CAP not in report.agreeing

    def test_a_decoder_that_never_ends_fails_and_is_left(self):
        def forever(prompts):
            while True:
                yield [[] for _ in prompts]

        report = found(forever)
        assert report.verdict == "raises" and "more than 56 rounds for 4 rows" in str(report)

    @pytest.mark.parametrize(
        ("answer", "said"),
        [
            (lambda prompts: [[5]], "expected one for each of the 4 rows"),
            (lambda prompts: [[0.5]] * len(prompts), "holds 0.5: expected token ids"),
            (lambda prompts: iter([[[5]]]), "round 0 of 1 lists"),
            (lambda prompts: None, "TypeError"),
        ],
    )
    def test_answers_that_cannot_be_read(self, answer, said):
        report = found(answer)
        assert report.verdict == "raises" and said in str(report)

    def test_rounds_in_a_list_are_rounds(self):
        report = found(lambda prompts: list(Simulated()(prompts)))
        assert report.verdict == "clean" and all(each.counts for each in report.observations)
