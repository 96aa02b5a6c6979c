"""Rounds of all schemes are compared, then timed; what is left out says why."""

from __future__ import annotations

import ast
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from specdec_core.bench import linear_speed
from specdec_core.bench.linear_speed import (
    CODE,
    PLANS,
    TOLERANCE,
    Judge,
    SchemesDisagree,
    SpeedCell,
    SpeedPlan,
    beyond_cache,
    cell_rows,
    cells,
    machine_limits,
    measure_speed,
    operations,
    speed_table,
)
from specdec_core.bench.linear_traffic import Layer, prepare
from specdec_core.bench.linear_windows import batch_of, in_dtype, random_inputs, random_state, spread_paths
from specdec_core.evidence.evaluate import judge
from specdec_core.evidence.layout import PROFILES, Layout
from specdec_core.evidence.linear_claims import (
    CACHES,
    DELAYED,
    EAGER,
    FACTORS,
    FUSED,
    RELOAD,
    SCHEMES,
    SNAPSHOTS,
    floors,
)
from specdec_core.evidence.linear_records import LINEAR_SPEED
from specdec_core.evidence.records import find_records, read_records
from specdec_core.evidence.verdicts import Outcome
from specdec_core.measure import ceilings
from specdec_core.measure.caches import last_level_cache
from specdec_core.topology import chain, forest, tree
from tests.evidence.linear_rows import speed_row, speeds

pytestmark = pytest.mark.usefixtures("one_thread", "small_ceilings_of_module")

TINY = Layer("tiny", 3, 32, 48)
SMALL_PLAN = SpeedPlan((SpeedCell(TINY, 2, "chain", 4), SpeedCell(TINY, 1, "tree", 5)), repeats=2)


@pytest.fixture(scope="module")
def rows(layout_of_module):
    return measure_speed(SMALL_PLAN, "quick", layout_of_module, threads=1)


def test_every_cell_and_scheme_is_recorded(rows, layout_of_module):
    path = layout_of_module.records("quick") / "06_speed.jsonl"
    assert read_records(path, LINEAR_SPEED)[1] == rows
    (file,) = find_records(LINEAR_SPEED, folder=layout_of_module.build)
    assert file.header["code"]["paths"] == sorted(CODE) and not file.is_stale(layout_of_module)
    assert file.header["provenance"]["run"]["threads"] == 1
    cells_of = [("chain", 2, 4), ("tree", 1, 5)]
    expected = [(*cell, scheme) for cell in cells_of for scheme in SCHEMES]
    assert [(row["shape"], row["batch"], row["n"], row["scheme"]) for row in rows] == expected
    assert all(len(row["seconds"]) == 2 and row["worst_error"] <= TOLERANCE for row in rows)
    assert {row["cache_bytes"] for row in rows} == {last_level_cache()} and {row["threads"] for row in rows} == {1}
    assert judge("G3", rows).verdict is Outcome.INCONCLUSIVE  # nothing so small is a headline


def test_the_limits_are_the_best_of_the_same_run(monkeypatch):
    given = {}

    def timed(arms, repeats, warmup):
        given.update(arms=set(arms), repeats=repeats)
        return {"read": np.array([0.5, 0.25]), "gemm": np.array([2.0, 4.0])}

    monkeypatch.setattr(linear_speed, "interleaved", timed)
    found = machine_limits(7)
    assert given == {"arms": {"read", "gemm"}, "repeats": 7}
    assert found["bytes_per_second"] == ceilings.READ_BYTES / 0.25
    assert found["flops_per_second"] == 2 * ceilings.GEMM_SIZE**3 / 2.0


def test_a_cell_is_bounded_by_the_better_of_what_the_machine_does_before_and_after_it(monkeypatch, layout):
    told = iter([(1.0, 9.0), (3.0, 8.0), (2.0, 8.5)])  # before the first cell, between both, after the second
    names = "bytes_per_second", "flops_per_second"
    monkeypatch.setattr(linear_speed, "machine_limits", lambda repeats: dict(zip(names, next(told), strict=True)))
    rows = measure_speed(SMALL_PLAN, "quick", layout, threads=1)
    limits = [tuple(row[name] for name in names) for row in rows]
    assert limits == [(3.0, 9.0)] * len(SCHEMES) + [(3.0, 8.5)] * len(SCHEMES)


def test_a_headline_cell_lies_beyond_any_usual_cache():
    layer = Layer("half a MiB", 8, 128, 128)
    state = layer.state_bytes()
    for cache in (state, 40 * state, 63 * state):
        assert CACHES * cache < beyond_cache(layer, 8, cache=cache) * state <= max(CACHES * cache + state, 8 * state)
    assert beyond_cache(layer, 8, at_most=100, cache=1000 * state) == 100
    here = last_level_cache() or 0
    for plan in PLANS.values():
        sizes = [cell.layer.state_bytes(cell.batch) for cell in plan.cells if cell.n == 16]
        assert max(sizes) > CACHES * here or here > 128 << 20


def test_all_schemes_of_a_cell_are_interleaved_and_short_rounds_repeated(monkeypatch):
    seen = []

    def timed(arms, repeats, warmup):
        seen.append((list(arms), repeats, warmup))
        return {name: np.full(repeats, 8.0) for name in arms}

    monkeypatch.setattr(linear_speed, "interleaved", timed)
    cell = SMALL_PLAN.cells[0]
    monkeypatch.setattr(linear_speed, "SAMPLE_BYTES", 3 * TINY.state_bytes(2))
    found = list(cell_rows(cell, SMALL_PLAN, 1))
    assert seen == [(list(SCHEMES), 2, 0)]
    assert {tuple(row["seconds"]) for row in found} == {(8.0 / 3, 8.0 / 3)}
    monkeypatch.setattr(linear_speed, "SAMPLE_BYTES", 1 << 40)
    assert {tuple(row["seconds"]) for row in cell_rows(cell, SMALL_PLAN, 1)} == {(1.0, 1.0)}  # at most 8
    monkeypatch.setattr(linear_speed, "SAMPLE_BYTES", 1)
    assert {tuple(row["seconds"]) for row in cell_rows(cell, SMALL_PLAN, 1)} == {(8.0, 8.0)}


def test_a_sample_is_as_many_rounds_as_it_is_divided_by(monkeypatch):
    ran = dict.fromkeys(SCHEMES, 0)
    real = linear_speed.prepare

    def preparing(name, *given):
        run = real(name, *given)

        def counted():
            ran[name] += 1
            return run()

        return counted

    monkeypatch.setattr(linear_speed, "prepare", preparing)
    monkeypatch.setattr(linear_speed, "SAMPLE_BYTES", 3 * TINY.state_bytes(2))
    list(cell_rows(SMALL_PLAN.cells[0], SMALL_PLAN, 1))
    assert ran == dict.fromkeys(SCHEMES, 1 + 2 * 3)


@pytest.mark.parametrize("wrong", [EAGER, FACTORS, DELAYED, SNAPSHOTS])
@pytest.mark.parametrize("part", [0, 1])
def test_nothing_is_timed_while_a_scheme_is_wrong(monkeypatch, wrong, part):
    real = linear_speed.prepare

    def preparing(name, *given):
        run = real(name, *given)

        def off():
            found = list(run())
            found[part] = found[part] * (1 + (name == wrong) * 1e-3)
            return tuple(found)

        return off

    def never(*_, **__):
        raise AssertionError("timed")

    monkeypatch.setattr(linear_speed, "prepare", preparing)
    monkeypatch.setattr(linear_speed, "interleaved", never)
    with pytest.raises(SchemesDisagree, match=f"{wrong} is off by"):
        list(cell_rows(SMALL_PLAN.cells[0], SMALL_PLAN, 1))


def test_a_delayed_round_is_judged_behind_its_commit():
    shapes = batch_of(chain(3), 2)
    rng, paths = np.random.default_rng(0), spread_paths(shapes)
    start = random_state(rng, 2, 3, 32, 48).float()
    inputs = in_dtype(random_inputs(rng, 6, 3, 32, 48, adverse=False), torch.float32)
    check = Judge(start, inputs, shapes, paths)
    for name in (FACTORS, DELAYED):
        outputs, kept = prepare(name, start.clone(), inputs, shapes, paths, 1)()
        assert check.error(name, outputs, kept) <= TOLERANCE
        with pytest.raises(SchemesDisagree):
            check.error(DELAYED if name == FACTORS else FACTORS, outputs, kept)


def test_what_needs_too_much_is_left_out_with_a_reason(monkeypatch):
    cell, state = SpeedCell(TINY, 2, "chain", 4), TINY.state_bytes(2)
    plan = replace(SMALL_PLAN, most_states=4 * state, most_eager=14 * TINY.state_bytes())  # 2 × 4 + 3 + 4 = 15 passes
    found = {row["scheme"]: row for row in cell_rows(cell, plan, 1)}
    assert [name for name, row in found.items() if row["left_out"]] == [EAGER]
    assert f"pass over {15 * TINY.state_bytes()} bytes" in found[EAGER]["left_out"]
    assert found[EAGER]["seconds"] == [] and found[EAGER]["worst_error"] is None
    plan = replace(plan, most_states=4 * state - 1, most_eager=15 * TINY.state_bytes())
    found = {row["scheme"]: row["left_out"] for row in cell_rows(cell, plan, 1)}
    assert {name for name, why in found.items() if why} == {SNAPSHOTS, RELOAD}
    assert found[RELOAD] == f"needs {4 * state} bytes for states, the plan allows {4 * state - 1}"
    plan = replace(plan, most_states=3 * TINY.state_bytes() - 1)
    found = {row["scheme"]: row["left_out"] for row in cell_rows(SpeedCell(TINY, 1, "tree", 7), plan, 1)}
    assert {name for name, why in found.items() if why} == {SNAPSHOTS, RELOAD, EAGER, FUSED}  # the tree needs 3 slots


def test_operations_are_those_of_the_closed_form():
    layer = Layer("square", 2, 16, 16)
    one = forest([chain(1)])
    # S₀ᵀk and S₀ᵀq; q·k and its sum with u; decay and product of rank 1.
    assert operations(layer, one, [np.array([0])]) == 2 * (4 * 256 + 2 * 32 + 3 * 256)
    assert operations(layer, one, [np.array([], int)]) == 2 * (4 * 256 + 2 * 32)
    # A chain of 3 has 3 strict pairs, a star of 3 has 2.
    pairs = {chain(3): 3, tree((-1, 0, 0)): 2}
    for shape, strict in pairs.items():
        expected = 2 * (4 * 3 * 256 + 2 * (2 * strict + 3) * 32)
        assert operations(layer, forest([shape]), [np.array([], int)]) == expected
    wide = Layer("wide", 1, 8, 32)
    assert operations(wide, one, [np.array([0])]) == 4 * 256 + 2 * 40 + 3 * 256


def test_a_tree_that_is_a_chain_is_left_to_the_chain():
    found = cells([(TINY, (1, 2))], (1, 2, 3))
    assert [(cell.batch, cell.n, cell.shape) for cell in found] == [
        (batch, *one) for batch in (1, 2) for one in ((1, "chain"), (2, "chain"), (3, "chain"), (3, "tree"))
    ]


def test_the_plans_leave_the_headline_to_both_rivals():
    for profile in PROFILES:
        plan = PLANS[profile]
        for cell in plan.cells:
            why = linear_speed._too_much(EAGER, cell, spread_paths(cell.forest), plan)
            assert not (why and cell.n == 16), cell
            assert not linear_speed._too_much(FACTORS, cell, spread_paths(cell.forest), plan)


def test_the_table_has_every_cell_in_units_of_compact_factors():
    table = speed_table(speeds())
    assert len(table) == 8 and table["states, MiB"].is_monotonic_increasing
    headline = table.loc["GDN-1.3B", 32, 16, "chain"]
    assert headline["eager sequential, ×"] == pytest.approx(12, rel=0.02)
    assert headline["compact factors, delayed commit, ×"] == pytest.approx(0.75, rel=0.02)
    ours = speed_row(FACTORS)
    assert headline["compact factors, ms"] == pytest.approx(1e3 * np.median(ours["seconds"]))
    assert headline["× floor"] == pytest.approx(floors(ours).estimate)
    assert np.isnan(table.loc["GDN-1.3B", 32, 64, "tree"]["eager sequential, ×"])


def imported(path: Path) -> set[str]:
    """Files of the package that a file imports."""
    root, found = Layout().root, set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("specdec_core"):
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
            files = [Path(*name.split(".")).with_suffix(".py") for name in names]
            files += [Path(*name.split(".")) / "__init__.py" for name in names]
            found |= {file.as_posix() for file in files if (root / file).is_file()}
    return found


def reached_without(start: str, code: tuple[str, ...]) -> set[str]:
    """Files that a bench reaches by imports and does not name, but those that only keep records or say where numbers
    live; TorchThreads is a class of three lines in a file about other things."""
    root = Layout().root
    apart = ("specdec_core/evidence/", "specdec_core/bench/sources.py", "specdec_core/bench/serial_backends.py")
    apart += ("specdec_core/arrays.py", "specdec_core/placement.py", "specdec_core/cache.py")
    apart += ("specdec_core/bench/__init__.py", "specdec_core/kernels/skinny_linear/__init__.py")
    apart += ("specdec_core/measure/__init__.py", "specdec_core/kernels/__init__.py")
    assert all((root / path).exists() for path in code)
    reached, waiting = set(), {start}
    while waiting:
        file = waiting.pop()
        reached.add(file)
        waiting |= {each for each in imported(root / file) if not each.startswith(apart)} - reached
    return reached - set(code)


def test_the_code_that_records_depend_on_is_named():
    assert not reached_without("specdec_core/bench/linear_speed.py", CODE)
