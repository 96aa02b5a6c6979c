"""The zoo is large enough, every fault can be put somewhere, and is gone when its context ends."""

from __future__ import annotations

import pytest

from specdec_core import decode, randomness, rejection, rows
from specdec_core.drafters import model
from specdec_core.forensics import suspects
from specdec_core.forensics.faults import DRAFTER_STATE, FAULTS, LOOP, TARGET_STATE
from specdec_core.forensics.suspects import SUBJECTS

OWNERS = (
    decode,
    randomness,
    rejection,
    rows,
    rows.Row,
    model,
    model.ModelDrafter,
    suspects,
    suspects.Scatter,
    suspects.ScatterState,
    suspects.Realigned,
    suspects.WindowedScatter,
)


def state():
    return [dict(vars(owner)) for owner in OWNERS] + [dict(suspects.CLASSES)]


def test_there_are_enough_and_names_are_distinct():
    assert len(FAULTS) >= 18 and len({fault.name for fault in FAULTS}) == len(FAULTS)
    assert {fault.seam for fault in FAULTS} == {TARGET_STATE, LOOP, DRAFTER_STATE}
    assert all(fault.expected for fault in FAULTS)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_injection_replaces_something_and_ends_with_its_context(fault):
    before = state()
    with fault.inject():
        assert state() != before
    assert state() == before


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_it_applies_somewhere_and_is_not_a_control_everywhere(fault):
    where = [subject for subject in SUBJECTS if fault.applies(subject)]
    assert [subject for subject in where if not fault.control(subject)]


def test_the_only_control_is_the_shift_under_rotary_positions():
    controls = [(fault.name, s.name) for fault in FAULTS for s in SUBJECTS if fault.applies(s) and fault.control(s)]
    assert controls == [("constant position shift", "scatter, rotary")]


def test_drafters_stay_right_while_a_target_is_broken():
    """Seams of a target's state are its own class's, so that the drafter is not broken with it."""
    drafting = [vars(suspects.HuggingFaceTarget), vars(suspects.HoledCache), vars(suspects.Windowed)]
    before = [dict(each) for each in drafting]
    for fault in FAULTS:
        if fault.seam == TARGET_STATE:
            with fault.inject():
                assert [dict(each) for each in drafting] == before
