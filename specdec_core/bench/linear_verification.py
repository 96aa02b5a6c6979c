"""Notebook 06, first half: how much of each part a profile measures (claims G1–G3). The parts have files of their own.

`measure_exactness` compares every form with the sequential rule, `count_traffic` counts what a round of every scheme
moves and keeps, `measure_speed` times them.
"""

from __future__ import annotations

from dataclasses import dataclass

from specdec_core.bench import linear_exactness, linear_speed, linear_traffic
from specdec_core.bench.linear_exactness import ExactnessPlan, measure_exactness
from specdec_core.bench.linear_speed import SpeedPlan, measure_speed
from specdec_core.bench.linear_traffic import TrafficPlan, count_traffic

__all__ = ["PLANS", "LinearPlan", "count_traffic", "measure_exactness", "measure_speed"]


@dataclass(frozen=True)
class LinearPlan:
    """What a run of notebook 06 measures of verification."""

    exactness: ExactnessPlan
    traffic: TrafficPlan
    speed: SpeedPlan


PLANS = {
    profile: LinearPlan(linear_exactness.PLANS[profile], linear_traffic.PLANS[profile], linear_speed.PLANS[profile])
    for profile in ("quick", "full")
}
