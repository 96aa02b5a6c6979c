import pytest

from specdec_core.bench.engine import ENGINE
from specdec_core.bench.machine import WIDTHS
from specdec_core.bench.setup import PLANS, SetupPlan, curve_table, engine_table, measure_setup
from specdec_core.evidence.layout import PROFILES
from specdec_core.evidence.records import read_records
from specdec_core.evidence.sweep_records import CEILING, COST_CURVE
from specdec_core.placement import Placement

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = SetupPlan(widths=(1, 4), contexts=(8,), repeats=3, prompts=2, max_new_tokens=6)


def test_every_profile_has_a_plan():
    assert set(PLANS) == set(PROFILES)
    assert all(plan.widths == WIDTHS and plan.widths[0] == 1 for plan in PLANS.values())


@pytest.fixture(scope="module")
def measured(tiny_opened, layout_of_module, small_ceilings_of_module):
    """Rows of a tiny plan, and the folder of their records."""
    peer = tiny_opened.target.placed(Placement("torch"))
    targets = {"ours": tiny_opened.target, "torch": peer}
    rows = measure_setup(PLAN, tiny_opened, targets, "full", layout_of_module)
    return rows, layout_of_module.records("full")


def test_rows_are_recorded_as_they_are_returned(measured):
    rows, folder = measured
    assert read_records(folder / "00_cost_curve.jsonl", COST_CURVE)[1] == rows.curves
    assert read_records(folder / "00_ceiling.jsonl", CEILING)[1] == rows.ceilings
    assert read_records(folder / "00_engine.jsonl", ENGINE)[1] == rows.engine


def test_every_target_is_measured_at_every_width(measured):
    found = [(row["configuration"], row["n"]) for row in measured[0].curves]
    assert found == [("ours", 1), ("ours", 4), ("torch", 1), ("torch", 4)]


def test_records_say_their_profile(measured):
    header, _ = read_records(measured[1] / "00_ceiling.jsonl")
    assert header["provenance"]["run"]["profile"] == "full"


def test_demands_on_the_engine_are_of_the_first_target(measured):
    table = engine_table(measured[0].engine)
    assert len(table) == len(measured[0].engine) == 6 and table.index[0] == "t(1) over the memory floor, context 8"


def test_the_table_is_in_floors_with_the_machines_limit_below():
    curves = [
        {"configuration": "e", "backend": "e", "context": 8, "n": n, "seconds_median": seconds}
        for n, seconds in ((1, 0.2), (10, 0.6))
    ]
    ceiling = {
        "configuration": "e",
        "weight_bytes": 1e9,
        "bytes_per_second": 1e10,  # the floor: 0.1 s
        "flops_per_token": 2e9,
        "flops_per_second": 1e11,  # 0.02 s a token
    }
    table = curve_table(curves, [ceiling])
    assert table.loc[("e", 8)].tolist() == pytest.approx([2.0, 6.0])
    assert table.loc[("e, limit", 0)].tolist() == pytest.approx([1.0, 2.0])
