"""What a round moves is what its scheme's idea must, and launches are counted where they happen."""

from __future__ import annotations

import pytest
import torch

from specdec_core.bench import linear_traffic
from specdec_core.bench.linear_traffic import (
    CODE,
    GDN_1B,
    GDN_340M,
    MIDDLE,
    PLANS,
    SMALL,
    Layer,
    TrafficPlan,
    count_traffic,
    counted_launches,
    traffic_table,
)
from specdec_core.evidence.evaluate import judge
from specdec_core.evidence.layout import PROFILES
from specdec_core.evidence.linear_claims import DELAYED, EAGER, FACTORS, FUSED, RELOAD, RESIDENT, SCHEMES, SNAPSHOTS
from specdec_core.evidence.linear_records import LINEAR_TRAFFIC, SHAPES
from specdec_core.evidence.records import find_records, read_records
from specdec_core.evidence.verdicts import Outcome
from specdec_core.kernels.gated_delta import schemes
from specdec_core.kernels.threads import Team
from tests.bench.test_linear_speed import reached_without
from tests.evidence.linear_rows import PASSES

pytestmark = pytest.mark.usefixtures("one_thread")

TINY = Layer("tiny", 3, 32, 48)
PLAN = TrafficPlan((1, 4, 7), batch=1, layer=TINY)


@pytest.fixture(scope="module")
def rows(layout_of_module):
    return count_traffic(PLAN, "quick", layout_of_module, threads=1)


def row_of(rows, scheme, n, shape="chain"):
    (row,) = [row for row in rows if (row["scheme"], row["n"], row["shape"]) == (scheme, n, shape)]
    return row


def test_every_scheme_shape_and_n_is_recorded(rows, layout_of_module):
    path = layout_of_module.records("quick") / "06_traffic.jsonl"
    assert read_records(path, LINEAR_TRAFFIC)[1] == rows
    (file,) = find_records(LINEAR_TRAFFIC, folder=layout_of_module.build)
    assert file.header["code"]["paths"] == sorted(CODE) and not file.is_stale(layout_of_module)
    expected = [(shape, n, scheme) for shape in SHAPES for n in PLAN.widths for scheme in SCHEMES]
    assert [(row["shape"], row["n"], row["scheme"]) for row in rows] == expected
    assert all(row["size"] == "tiny" and row["state_bytes"] == TINY.state_bytes() for row in rows)


def test_the_names_are_those_of_the_engine():
    assert [name for name in SCHEMES if name != DELAYED] == list(schemes.SCHEMES)
    assert tuple(linear_traffic.SHAPES) == SHAPES


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("n", PLAN.widths)
def test_passes_over_the_states_of_a_chain(rows, scheme, n):
    row = row_of(rows, scheme, n)
    accepted = {1: 1, 4: 3, 7: 4}[n]
    read, written = PASSES[scheme](n, accepted)
    found = (row["read_bytes"] / row["state_bytes"], row["written_bytes"] / row["state_bytes"])
    assert (row["accepted"], *found) == (accepted, read, written)


@pytest.mark.parametrize(
    ("scheme", "read", "written"),
    # 7 nodes in 3 levels; 2 nodes of the deepest branch are committed.
    [(EAGER, 27, 18), (FUSED, 9, 9), (RESIDENT, 2, 1), (SNAPSHOTS, 2, 8), (RELOAD, 8, 8), (FACTORS, 2, 1),
     (DELAYED, 1, 1)],
)  # fmt: skip
def test_passes_over_the_states_of_a_tree(rows, scheme, read, written):
    row = row_of(rows, scheme, 7, "tree")
    assert row["accepted"] == 2
    assert (row["read_bytes"], row["written_bytes"]) == (read * row["state_bytes"], written * row["state_bytes"])


@pytest.mark.parametrize(
    ("scheme", "launches"),
    # 7 tokens verified and 4 committed: three operations a token, a launch a token, one region and a copy, regions.
    [(EAGER, 33), (FUSED, 11), (RESIDENT, 2), (SNAPSHOTS, 2), (RELOAD, 2), (FACTORS, 2), (DELAYED, 1)],
)
def test_launches_of_a_chain(rows, scheme, launches):
    assert row_of(rows, scheme, 7)["launches"] == launches


def test_memory_of_states_and_of_factors(rows):
    node = 4 * TINY.heads * (TINY.keys + TINY.values + 1)
    for scheme in (FACTORS, DELAYED):
        row = row_of(rows, scheme, 7)
        assert (row["kept_bytes"], row["working_bytes"]) == (7 * node, 0)
    for scheme in (SNAPSHOTS, RELOAD):
        row = row_of(rows, scheme, 7)
        assert row["kept_bytes"] == 7 * row["state_bytes"]
    assert row_of(rows, FUSED, 7)["working_bytes"] == TINY.state_bytes()
    assert row_of(rows, FUSED, 7, "tree")["working_bytes"] == 3 * TINY.state_bytes()


def test_the_counts_are_judged(rows):
    assert judge("G2", rows).verdict is Outcome.SUPPORTED


def test_the_table_has_a_line_a_shape_and_scheme(rows):
    table = traffic_table(rows)
    assert list(table.index) == [(shape, scheme) for shape in SHAPES for scheme in SCHEMES]
    assert table["states moved"].loc[("chain", SNAPSHOTS)].tolist() == [4, 7, 10]
    assert table["launches"].loc[("chain", EAGER), 7] == 33
    held = row_of(rows, RELOAD, 7)["kept_bytes"]
    assert table["KiB held"].loc[("chain", RELOAD), 7] == held // 1024


def test_launches_are_counted_of_states_and_of_nothing_else():
    run = Team.run
    state, other = torch.zeros(2, 3, 32, 48), torch.zeros(3, 48)
    with counted_launches((32, 48)) as launches:
        assert Team.run is not run
        state.add_(1)  # 1
        torch.zeros(2, 3, 5, 32) @ state  # 2
        torch.mul(state, 2.0, out=torch.empty_like(state))  # 3
        state.view(6, 32, 48)
        state[0]
        other + 1
        torch.zeros(32, 49) * 2
    assert launches.count == 3 and Team.run is run
    with pytest.raises(KeyError), counted_launches((32, 48)):
        raise KeyError
    assert Team.run is run


def test_a_layer_whose_states_look_like_inputs_is_refused():
    with pytest.raises(ValueError, match="expected another number of heads than of key channels"):
        TrafficPlan(layer=Layer("square", 8, 8, 16))


def test_layers_are_those_of_the_models():
    assert GDN_1B.state_bytes() == 2 << 20 and GDN_340M.state_bytes() == 3 << 20
    assert SMALL.state_bytes(64) == 8 << 20 and MIDDLE.state_bytes(2) == 1 << 20
    assert set(PLANS) == set(PROFILES) and all({1, 16, 64} <= set(plan.widths) for plan in PLANS.values())


def test_the_code_that_records_depend_on_is_named():
    assert not reached_without("specdec_core/bench/linear_traffic.py", CODE)
