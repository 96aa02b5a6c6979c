from __future__ import annotations

from specdec_core.bench.ragged import PLANS
from specdec_core.evidence.claims import claim
from specdec_core.evidence.layout import PROFILES


def test_every_profile_has_a_plan_and_the_full_one_is_enough_for_its_claims():
    assert set(PLANS) == set(PROFILES)
    full, quick = PLANS["full"], PLANS["quick"]
    assert full.realigning.repeats >= claim("R4").minimum_n and full.speed.repeats >= claim("R5").minimum_n
    assert full.thorough and full.faults.thorough and full.seeded.thorough
    assert quick.outputs.published < full.outputs.published and quick.speed.repeats < full.speed.repeats
