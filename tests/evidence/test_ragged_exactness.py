from __future__ import annotations

import pytest

from specdec_core.evidence.claims import claim
from specdec_core.evidence.ragged_exactness import (
    batches_equal_rows,
    broken_ways_corrupt,
    faults_are_caught,
    match_shares,
    sampled_rows_are_isolated,
)
from specdec_core.evidence.ragged_records import FAULT_CELL, RAGGED_OUTPUT, SEEDED_ROW
from specdec_core.evidence.schemas import RecordError
from specdec_core.evidence.verdicts import Outcome
from tests.evidence.ragged_rows import cell, output, seeded

BSP, DSD = "positions kept (BSP-like)", "draft kept (DSD-like)"


def outputs(**wrong):
    """Six rows of three ways; `wrong` changes the row of that way and prompt: `dsd_p1={...}`."""
    rows = []
    for way, short, broken in (("realign (EQSPEC)", "realign", False), (BSP, "bsp", True), (DSD, "dsd", True)):
        for prompt in ("p0", "p1"):
            first = {"realign": -1, "bsp": 9, "dsd": 6}[short]
            changes = {"broken": broken, "first": first, "rejection": 7} | wrong.get(f"{short}_{prompt}", {})
            rows.append(output(way, prompt, **changes))
    return rows


class TestR1:
    def decide(self, rows):
        return broken_ways_corrupt(claim("R1"), rows)

    def test_broken_ways_that_corrupt_where_they_should_support_it(self):
        found = self.decide(outputs())
        assert (found.outcome, found.value) == (Outcome.SUPPORTED, 1.0)
        assert "realign (EQSPEC) 100% exact" in found.note and f"{DSD} 0% exact" in found.note

    def test_a_broken_way_that_corrupts_nothing_refutes_it(self):
        fine = {"first": -1}
        found = self.decide(outputs(dsd_p0=fine, dsd_p1=fine))
        assert found.outcome is Outcome.REFUTED and f"corrupted nothing: {DSD}" in found.note

    def test_one_exact_row_of_a_broken_way_does_not(self):
        assert self.decide(outputs(bsp_p0={"first": -1})).outcome is Outcome.SUPPORTED

    @pytest.mark.parametrize(
        "wrong", [{"dsd_p1": {"first": 7}}, {"bsp_p1": {"first": 6}}, {"bsp_p0": {"rejection": -1}}]
    )
    def test_a_corruption_at_another_place_refutes_it(self, wrong):
        found = self.decide(outputs(**wrong))
        assert found.outcome is Outcome.REFUTED and "other signature" in found.note

    def test_a_sound_way_that_differs_refutes_it_unless_certified(self):
        assert self.decide(outputs(realign_p1={"first": 3, "certified": True})).outcome is Outcome.SUPPORTED
        found = self.decide(outputs(realign_p1={"first": 3}))
        assert found.outcome is Outcome.REFUTED and "NOT SOUND: realign (EQSPEC) on p1 at 3" in found.note

    def test_rows_of_the_compiled_engine_are_another_claims(self):
        rows = [output("scatter (ours)", "p0", engine="numba float32", first=3)]
        assert self.decide(rows).outcome is Outcome.INCONCLUSIVE
        assert self.decide([*outputs(), *rows]).outcome is Outcome.SUPPORTED


def test_match_shares_count_tokens_of_the_longer_text():
    rows = [output("a", "p0", first=-1), output("a", "p1", first=4, tokens=6, expected=12)]
    assert match_shares(rows) == [("a", 0.5, (12 + 4) / 24)]


class TestR3:
    def decide(self, rows):
        return batches_equal_rows(claim("R3"), rows)

    def test_a_certified_near_tie_is_no_excuse_on_the_compiled_engine(self):
        sound = [output("scatter (ours)", f"p{i}", engine="numba float32", first=-1) for i in range(3)]
        found = self.decide(sound)
        assert (found.outcome, found.value) == (Outcome.SUPPORTED, 0) and "3 rows of batches of 4" in found.note
        tie = output("scatter (ours)", "p9", engine="numba float32", first=3, certified=True)
        found = self.decide([*sound, tie])
        assert (found.outcome, found.value) == (Outcome.REFUTED, 1) and "p9 at 3" in found.note

    def test_nothing_compared_is_no_support(self):
        assert self.decide(outputs()).outcome is Outcome.INCONCLUSIVE


class TestR2:
    def decide(self, rows):
        return faults_are_caught(claim("R2"), rows)

    def test_a_fault_has_to_be_caught_in_every_decoder_that_it_is_put_into(self):
        rows = [
            cell("none", "scatter"),
            cell("stale", "scatter", fired=True),
            cell("stale", "scatter", detector="other"),
        ]
        found = self.decide(rows)
        assert (found.outcome, found.value) == (Outcome.SUPPORTED, 0)
        assert "1 faults in 1 decoders, 2 detectors" in found.note and "never needed: other" in found.note
        found = self.decide([*rows, cell("stale", "rectangle")])
        assert (found.outcome, found.value) == (Outcome.REFUTED, 1) and "missed: stale in rectangle" in found.note

    def test_a_crash_catches_nothing(self):
        rows = [cell("none", "scatter"), cell("stale", "scatter", crashed=True)]
        assert self.decide(rows).outcome is Outcome.REFUTED

    @pytest.mark.parametrize("sound", [{}, {"fault": "shift", "sound": True}])
    @pytest.mark.parametrize("seen", [{"fired": True}, {"crashed": True}])
    def test_correct_code_and_controls_may_not_be_seen(self, sound, seen):
        rows = [cell("stale", "scatter", fired=True), cell("none", "scatter", **seen) | sound]
        found = self.decide(rows)
        assert found.outcome is Outcome.REFUTED and "false alarm: detector on scatter" in found.note

    def test_without_correct_code_beside_them_faults_show_nothing(self):
        assert self.decide([cell("stale", "scatter", fired=True)]).outcome is Outcome.INCONCLUSIVE
        assert self.decide([]).outcome is Outcome.INCONCLUSIVE


LAW = {"level": "table", "axis": "a", "case": "c", "branches": 3, "outcomes": 2, "error": 0.0}


class TestR6:
    def decide(self, variation=1e-16, rows=None):
        rows = [seeded(), seeded(own=False)] if rows is None else rows
        return sampled_rows_are_isolated(claim("R6"), [LAW | {"total_variation": variation}], rows)

    def test_exact_laws_and_isolated_rows(self):
        found = self.decide()
        assert (found.outcome, found.value) == (Outcome.SUPPORTED, 1e-16)
        assert self.decide(variation=1e-9).outcome is Outcome.REFUTED
        assert self.decide(rows=[seeded(), seeded(same=False)]).outcome is Outcome.REFUTED

    def test_rows_that_answer_to_no_seed_show_nothing(self):
        assert self.decide(rows=[seeded(), seeded(own=False), seeded(own=False)]).outcome is Outcome.INCONCLUSIVE
        assert self.decide(rows=[]).outcome is Outcome.INCONCLUSIVE


def test_rows_that_contradict_themselves_are_refused():
    RAGGED_OUTPUT.validated(output("a", "p0"))
    SEEDED_ROW.validated(seeded())
    FAULT_CELL.validated(cell("f", "s", fired=True))
    with pytest.raises(RecordError, match="diverges nowhere"):
        RAGGED_OUTPUT.validated(output("a", "p0") | {"exact": False})
    with pytest.raises(RecordError, match="diverges nowhere"):
        RAGGED_OUTPUT.validated(output("a", "p0") | {"certified": False})
    with pytest.raises(RecordError, match="99 matching"):
        RAGGED_OUTPUT.validated(output("a", "p0") | {"matching": 99})
    with pytest.raises(RecordError, match="contradict"):
        FAULT_CELL.validated(cell("f", "s", fired=True) | {"round": -1, "where": ""})
