"""Plans of notebook 06's first half: what each profile measures, and that its verdicts can be reached."""

from __future__ import annotations

import pytest

from specdec_core.bench import linear_exactness, linear_speed, linear_traffic
from specdec_core.bench.linear_verification import PLANS, count_traffic, measure_exactness, measure_speed
from specdec_core.evidence.claims import claim
from specdec_core.evidence.layout import PROFILES
from specdec_core.evidence.linear_claims import HEADLINE_N


@pytest.mark.parametrize("profile", PROFILES)
def test_a_profile_measures_all_three(profile):
    plan = PLANS[profile]
    assert plan.exactness is linear_exactness.PLANS[profile] and plan.speed is linear_speed.PLANS[profile]
    assert plan.traffic is linear_traffic.PLANS[profile] and set(PLANS) == set(PROFILES)


def test_the_full_plan_is_as_large_as_registered():
    plan = PLANS["full"]
    assert plan.exactness.trees >= 10_000 and plan.speed.repeats >= claim("G3").minimum_n
    assert {cell.n for cell in plan.speed.cells} == {1, 2, 4, 8, 16, 32, 64}
    assert {1, 64} <= {cell.batch for cell in plan.speed.cells}
    assert {cell.layer.name for cell in plan.speed.cells} == {"8 × 64 × 64", "8 × 128 × 128", "GDN-340M", "GDN-1.3B"}
    assert len(plan.speed.cells) == len(set(plan.speed.cells))


@pytest.mark.parametrize("profile", PROFILES)
def test_states_of_two_caches_of_32_mib_are_among_the_cells(profile):
    large = [
        cell
        for cell in PLANS[profile].speed.cells
        if cell.n == HEADLINE_N and cell.layer.state_bytes(cell.batch) >= 64 << 20
    ]
    assert {cell.shape for cell in large} == {"chain", "tree"}


def test_the_notebook_finds_all_in_one_place():
    assert measure_exactness is linear_exactness.measure_exactness
    assert count_traffic is linear_traffic.count_traffic and measure_speed is linear_speed.measure_speed
