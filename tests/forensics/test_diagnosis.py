"""Signatures by hand-made observations, and what a report says."""

from dataclasses import replace

import pytest

from specdec_core.forensics import diagnosis_experiments as names
from specdec_core.forensics.diagnosis import Diagnosis
from specdec_core.forensics.diagnosis_experiments import Run, Step, experiments, read
from specdec_core.forensics.diagnosis_judge import FAILED, LONG, ROUNDED, SAME, SHORT, TIE, WRONG, Observation
from specdec_core.forensics.diagnosis_signatures import SIGNATURES, UNKNOWN, Features, features, matching
from specdec_core.protocol import Round, RowRound

PROMPTS = [(5, 6, 7, 8), (9, 10), (11, 12, 13, 14, 15, 16), (17, 18, 19)]
NOTHING = {name: False for name in Features.__dataclass_fields__} | {"repeatable": True}


def seen(experiment=names.WHOLE, row=0, outcome=WRONG, **more):
    return Observation(experiment, row, row, more.pop("padding", 0), more.pop("special", False), outcome, **more)


class TestExperiments:
    planned = experiments(PROMPTS, 8, 64, (1,))

    def named(self, name):
        return [each for each in self.planned if each.name == name]

    def test_all_are_planned(self):
        expected = {names.WHOLE, names.AGAIN, names.ALONE, names.REPEATED, names.CUT, names.PERMUTED, names.CONTENT}
        expected |= {names.LONGER, names.SHORTER, names.CAP, names.MARKED}
        assert {each.name for each in self.planned} == expected
        assert self.planned[0].prompts == tuple(PROMPTS) and self.planned[0].padding == [2, 4, 0, 3]

    def test_equal_lengths_have_no_padding(self):
        equal = [*self.named(names.ALONE), *self.named(names.REPEATED), *self.named(names.CUT)]
        assert not any(any(each.padding) for each in equal) and len(equal) == 4 + 2 + 1
        assert [each.rows for each in self.named(names.REPEATED)] == [(1,) * 4, (2,) * 4]
        assert self.named(names.CUT)[0].prompts == ((5, 6), (9, 10), (11, 12), (17, 18))

    def test_permuted_rows_are_all_elsewhere(self):
        one = self.named(names.PERMUTED)[0]
        assert all(row != place for place, row in enumerate(one.rows))
        assert all(one.prompts[place] == PROMPTS[row] for place, row in enumerate(one.rows))

    def test_every_row_is_once_among_changed_neighbours_of_the_same_length(self):
        pair = self.named(names.CONTENT)
        assert sorted(row for each in pair for row in each.rows if row >= 0) == [0, 1, 2, 3]
        for each in pair:
            assert [len(prompt) for prompt in each.prompts] == [len(prompt) for prompt in PROMPTS]
            changed = [prompt != PROMPTS[place] for place, prompt in enumerate(each.prompts)]
            assert changed == [row < 0 for row in each.rows] and sum(changed) == 2

    def test_one_neighbour_longer_or_shorter(self):
        longer, shorter = self.named(names.LONGER)[0], self.named(names.SHORTER)[0]
        assert [len(prompt) for prompt in longer.prompts] == [4, 2, 18, 3]
        assert [len(prompt) for prompt in shorter.prompts] == [4, 2, 1, 3]
        assert longer.rows == shorter.rows == (0, 1, -1, 3)
        assert not [e for e in experiments(PROMPTS, 8, 22, ()) if e.name == names.LONGER]  # 22 − 2 · 8 = 6: no room
        assert len(next(e for e in experiments(PROMPTS, 8, 24, ()) if e.name == names.LONGER).prompts[2]) == 8

    def test_smaller_caps(self):
        assert [each.cap for each in self.named(names.CAP)] == [1, 4]
        assert [e.cap for e in experiments(PROMPTS, 2, 64, ()) if e.name == names.CAP] == [1]
        assert not [e for e in experiments(PROMPTS, 1, 64, ()) if e.name == names.CAP]

    def test_special_tokens_are_put_in_or_taken_out(self):
        assert self.named(names.MARKED)[0].prompts == ((5, 1, 7, 8), (9, 1), (11, 1, 13, 14, 15, 1), (17, 1, 19))
        two = next(each for each in experiments(PROMPTS, 8, 64, (1, 2)) if each.name == names.MARKED)
        assert [set(prompt) & {1, 2} for prompt in two.prompts] == [{1}, {2}, {1}, {2}]
        one_held = experiments([(5, 1, 7, 1), (9, 10)], 8, 64, (1, 2))
        assert [each.name for each in one_held[-2:]] == [names.PLAIN, names.MARKED]
        assert one_held[-1].prompts == ((5, 2, 7, 1), (9, 2))
        holding = [(5, 1, 7, 1), (9, 10)]
        plain = next(each for each in experiments(holding, 8, 64, (1,)) if each.name == names.PLAIN)
        assert not any(1 in prompt for prompt in plain.prompts) and plain.prompts[1] == (9, 10)
        assert [len(prompt) for prompt in plain.prompts] == [4, 2] and plain.prompts[0][::2] == (5, 7)


class TestReading:
    def test_lists_of_rounds(self):
        run = read(iter([[[1, 2], [3]], [[4], []]]), rows=2, cap=4)
        assert run.tokens == ((1, 2, 4), (3,)) and run.counts == ((2, 1), (1, -1))
        assert run.steps[0] == {0: Step(2, False), 1: Step(1, True)}
        assert read(iter([[[1], [3]]]), 2, 4, fullest=3).steps[0][0].rejected

    def test_one_token_a_round_rejects_nothing(self):
        run = read(iter([[[1], [3]], [[4], [5]]]), rows=2, cap=4)
        assert not any(step.rejected for each in run.steps for step in each.values())

    def test_rounds_of_the_loop(self):
        drafts = [((), 0), ((1, 1), 2), ((1, 1), 1)]
        rows = [RowRound(0, 0, 3, drafted, taken, "", tuple(range(taken + 1))) for drafted, taken in drafts]
        run = read(iter([Round(index, (row,), 3) for index, row in enumerate(rows)]), rows=1, cap=9)
        assert run.tokens == ((0, 0, 1, 2, 0, 1),) and len(run.rounds) == 3
        told = [Step(1, False, False, 0), Step(3, False, True, 2), Step(2, True, False, 1)]
        assert [each[0] for each in run.steps] == told

    def test_a_rectangle(self):
        assert read([[1, 2], [3, 4]], 2, 4) == Run(((1, 2), (3, 4)))


class TestFeatures:
    def test_nothing_is_known_of_what_is_right(self):
        found = features([seen(outcome=SAME), seen(names.ALONE, outcome=SAME)])
        assert found == Features(**NOTHING)

    def test_padding(self):
        rows = [seen(row=0, padding=3, index=0), seen(row=1, padding=2, index=4), seen(row=2, outcome=SAME)]
        found = features(rows)
        assert found.padded_only and found.at_start
        assert not features([*rows, seen(names.CUT, row=2, index=1)]).padded_only
        assert not features(rows[1:]).at_start

    def test_changes_count_only_if_something_is_wrong(self):
        pair = [seen(outcome=SAME, tokens=(1, 2)), seen(names.CONTENT, outcome=TIE, tokens=(1, 3))]
        assert not features(pair).content
        assert features([pair[0], replace(pair[1], outcome=WRONG)]).content
        assert not features([replace(each, outcome=WRONG, tokens=(1, 2)) for each in pair]).content

    @pytest.mark.parametrize(
        ("counts", "leaks"),
        [
            (((1, 1), (1, 1)), True),  # everything as before, and yet another token
            (((1, 2), (1, 1)), False),  # the neighbour had got another number of tokens by then
            (((1, 1), (1, 2)), True),  # only in the round itself
            (((2, 1),), False),  # the token came in another round
            (None, False),
        ],
    )
    def test_a_leak_is_a_change_that_lengths_do_not_explain(self, counts, leaks):
        before = seen(outcome=SAME, tokens=(1, 2), counts=((1, 1), (1, 1)))
        found = features([before, seen(names.CONTENT, tokens=(1, 3), counts=counts)])
        assert found.content and found.leaks is leaks

    def test_restarts_heal_only_if_all_go_on_right(self):
        wrong = seen(names.ALONE, index=3)
        healed = seen(names.RESTARTED, outcome=SAME)
        assert features([wrong, healed]).heals and not features([wrong]).heals
        assert not features([wrong, healed, seen(names.RESTARTED, row=1, outcome=WRONG)]).heals

    def test_special_needs_a_right_row_without(self):
        marked = seen(names.MARKED, special=True, index=2)
        assert features([marked, seen(outcome=SAME)]).special_only
        assert not features([marked, seen(outcome=SAME, special=True)]).special_only
        assert not features([marked, seen(outcome=SAME), seen(row=1, index=1)]).special_only

    @pytest.mark.parametrize("name", ["after_rejection", "after_whole", "after_unequal", "kept"])
    def test_what_must_hold_of_every_wrong_row(self, name):
        rows = [seen(index=3, **{name: True}), seen(row=1, index=2, **{name: True}), seen(row=2, outcome=SAME)]
        assert getattr(features(rows), name)
        assert not getattr(features([*rows, seen(row=3, index=1)]), name)

    def test_the_same_batch_twice(self):
        pair = [seen(tokens=(1, 2)), seen(names.AGAIN, tokens=(1, 3))]
        assert not features(pair).repeatable and features([pair[0], replace(pair[1], tokens=(1, 2))]).repeatable


class TestSignatures:
    @pytest.mark.parametrize(
        ("what", "verdict"),
        [
            ({}, "clean"),
            ({"differs"}, "certified near-ties only"),
            ({"differs", "rounded"}, "within rounding only"),
            ({"differs", "failed", "rounded"}, "raises"),
            ({"differs", "short"}, "too short"),
            ({"differs", "long", "rounded"}, "too long"),
            ({"differs", "long", "short"}, "wrong length"),
            ({"differs", "wrong", "special_only", "alone", "padded_only"}, "mask made from ids"),
            ({"differs", "wrong", "kept", "alone"}, "draft token kept"),
            ({"differs", "wrong", "kept", "alone", "after_rejection", "heals"}, "drift after rejections"),
            ({"differs", "wrong", "after_rejection", "alone"}, "wrong alone too"),
            ({"differs", "wrong", "after_rejection"}, "drift after rejections"),
            ({"differs", "wrong", "after_whole", "alone", "heals"}, "spoiled by a whole acceptance"),
            ({"differs", "wrong", "padded_only", "at_start", "order"}, "padding at prefill"),
            ({"differs", "wrong", "padded_only"}, "padding in later steps"),
            ({"differs", "wrong", "content", "leaks", "cut", "after_unequal"}, "neighbours' content"),
            ({"differs", "wrong", "content", "cut", "after_unequal"}, "unequal acceptance"),
            ({"differs", "wrong", "content", "cut", "after_unequal", "repeated"}, "neighbours' content or lengths"),
            ({"differs", "wrong", "alone", "heals"}, "spoiled by earlier rounds"),
            ({"differs", "wrong", "alone", "order"}, "wrong alone too"),
            ({"differs", "wrong", "order"}, "order of rows"),
            ({"differs", "wrong", "repeated"}, "any batch"),
            ({"differs", "wrong"}, UNKNOWN.name),
            ({"differs", "wrong", "short"}, UNKNOWN.name),
        ],
    )
    def test_the_most_particular_one_comes_first(self, what, verdict):
        assert matching(Features(**NOTHING | {name: True for name in what}))[0].name == verdict

    def test_the_same_batch_twice(self):
        told = {"differs": True, "wrong": True, "repeatable": False, "alone": True}
        assert [each.name for each in matching(Features(**NOTHING | told))] == ["not repeatable", "wrong alone too"]

    def test_padding_is_not_blamed_for_what_special_tokens_explain(self):
        told = {"differs": True, "wrong": True, "padded_only": True, "special_only": True}
        for start in (True, False):
            found = matching(Features(**NOTHING | told | {"at_start": start}))
            assert [each.name for each in found] == ["mask made from ids"]

    def test_every_signature_can_be_told(self):
        assert len({each.name for each in SIGNATURES}) == len(SIGNATURES)
        assert all(each.seen and each.look for each in SIGNATURES)


class TestReport:
    wrong = seen(row=1, index=3, expected=7, found=9, round=2, padding=4)
    tie = seen(names.ALONE, outcome=TIE, index=1, expected=3, found=4, how="replayed batch", gap=1e-4, epsilon=2e-4)
    rows = (seen(outcome=SAME), wrong, tie, seen(names.ALONE, row=1, outcome=SAME))
    report = Diagnosis(rows, ("smaller cap (…)",), judged=False)

    def test_what_agrees(self):
        assert self.report.disagreeing == (names.WHOLE,) and self.report.agreeing == (names.ALONE,)
        assert self.report.verdict == "padding in later steps" and not self.report.correct

    def test_the_worst_of_each_row_is_told(self):
        assert {row: each.outcome for row, each in self.report.first_divergences.items()} == {0: TIE, 1: WRONG}
        said = str(self.report)
        assert "row 1: wrong at token 3 (round 2), whole batch: expected 7, found 9, 4 shorter than its batch" in said
        assert "row 0: certified near-tie by replayed batch at token 1, alone" in said and "2ε = 0.0004" in said
        assert "look at: mask and positions after the prefill" in said and "not run: smaller cap" in said
        assert "whole batch                  1 same, 1 wrong" in said and "near-ties were not told" in said

    def test_of_equally_bad_ones_the_first(self):
        later = replace(self.wrong, experiment=names.PERMUTED, index=1)
        assert Diagnosis((self.wrong, later)).first_divergences == {1: self.wrong}

    def test_ends_and_failures(self):
        lengths = Diagnosis((seen(outcome=SHORT, index=2, expected=5), seen(row=1, outcome=LONG, index=3, found=6)))
        assert lengths.verdict == "wrong length"
        assert "expected 5, found the end" in str(lengths) and "expected the end, found 6" in str(lengths)
        assert "near-ties were not told" not in str(lengths)
        failed = Diagnosis((seen(outcome=FAILED, how="ValueError: no"), seen(names.ALONE, outcome=SAME)))
        assert failed.verdict == "raises" and "failed, whole batch: ValueError: no" in str(failed)
        assert failed.disagreeing == (names.WHOLE,)

    def test_right_answers_have_nothing_to_look_at(self):
        clean = Diagnosis((seen(outcome=SAME),), judged=False)
        assert clean.correct and "look at" not in str(clean) and "near-ties" not in str(clean)
        rounded = Diagnosis((seen(outcome=ROUNDED),))
        assert rounded.verdict == "within rounding only" and not rounded.correct

    def test_the_table(self):
        table = self.report.table()
        assert len(table) == 4 and table.loc[1, ["row", "outcome", "index", "found"]].tolist() == [1, WRONG, 3, 9]
        assert {"experiment", "padding", "round", "how", "gap", "epsilon", "tokens"} <= set(table.columns)
        assert list(Diagnosis(()).table().columns) == list(table.columns)
