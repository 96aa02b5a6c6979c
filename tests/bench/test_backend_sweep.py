import pytest

from specdec_core.bench import backend_sweep
from specdec_core.bench.backend_sweep import (
    PLANS,
    SweepPlan,
    build_configurations,
    cases_of,
    open_targets,
    planned,
    run_sweep,
    summary_table,
)
from specdec_core.evidence.claims import claim
from specdec_core.evidence.evaluate import evaluate, judge
from specdec_core.evidence.layout import PROFILES
from specdec_core.evidence.provenance import code_hash
from specdec_core.evidence.records import find_records, read_records
from specdec_core.evidence.sweep_records import CEILING, COST_CURVE, SWEEP
from specdec_core.evidence.verdicts import MEASURED

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = SweepPlan(ks=(1, 3), tuning=1, report=1, max_new_tokens=8, repeats=2, contexts=(8, 24))


class TestPlans:
    def test_every_profile_has_one(self):
        assert set(PLANS) == set(PROFILES) and all(plan.ks[0] == 1 for plan in PLANS.values())

    def test_lengths_replace_the_profiles(self):
        assert planned("quick") is PLANS["quick"]
        assert planned("full", [4, 2, 2]).ks == (2, 4)
        assert planned("full", [3]).report == PLANS["full"].report

    @pytest.mark.parametrize("ks", [[0], [2, -1]])
    def test_lengths_that_are_none(self, ks):
        with pytest.raises(ValueError, match=r"ks \[.*\]: expected speculation lengths K ≥ 1, such as \[1, 2, 4\]"):
            planned("quick", ks)

    def test_an_unknown_profile(self):
        with pytest.raises(ValueError, match="unknown profile 'fast': expected one of quick, full"):
            planned("fast")


class TestConfigurations:
    def test_each_backend_has_winners_and_losers_over_its_own_target(self, tiny_opened):
        targets = open_targets(tiny_opened.target)
        configurations = build_configurations(targets)
        assert len(configurations) >= 5 and len({c.name for c in configurations}) == len(configurations)
        assert {c.backend for c in configurations} == set(targets)
        assert all(c.target is targets[c.backend] for c in configurations)

    def test_a_backend_is_named_for_its_engine(self, tiny_opened):
        for name, target in open_targets(tiny_opened.target).items():
            assert name == f"{target.placement.engine} {target.placement.dtype}"

    def test_a_look_up_has_no_step_and_a_model_has(self, tiny_opened):
        for each in build_configurations(open_targets(tiny_opened.target)):
            assert (each.step_model is None) == each.drafter_name.startswith("n-gram")


def test_cases_are_the_first_prompts_of_each_domain_and_split(tiny_opened, short_prompts):
    cases = cases_of(short_prompts, tiny_opened.tokenizer, 1, 1)
    assert [(case.domain, case.split) for case in cases] == [
        (domain, split) for domain in ("math", "code", "chat") for split in ("tuning", "report")
    ]
    assert all(case.prompt_id.endswith("-1") for case in cases)
    assert cases[0].tokens == tuple(tiny_opened.tokenizer.chat(short_prompts[0].messages))


@pytest.fixture(scope="module")
def run(tiny_opened, short_prompts, layout_of_module, small_ceilings_of_module):
    """One tiny sweep, the layout that its records lie in, and the cases that it ran."""
    cases = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend_sweep, "load_prompts", lambda: short_prompts)
        rows = run_sweep(
            PLAN,
            tiny_opened.target,
            tiny_opened.tokenizer,
            layout=layout_of_module,
            progress=lambda these: cases.extend(these) or these,
        )
    return rows, layout_of_module, cases


class TestRun:
    def test_all_of_it_is_recorded(self, run):
        rows, layout, _ = run
        folder = layout.records("quick")
        for name, schema, expected in (
            ("02_curves", COST_CURVE, rows.curves),
            ("02_ceilings", CEILING, rows.ceilings),
            ("02_sweep", SWEEP, rows.sweep),
        ):
            assert read_records(folder / f"{name}.jsonl", schema)[1] == expected

    def test_every_configuration_ran_at_every_length_on_every_prompt(self, run):
        rows, _, cases = run
        configurations = {row["configuration"] for row in rows.sweep}
        assert len(configurations) >= 5 and len(cases) == 6
        assert len(rows.sweep) == len(configurations) * 6 * (2 + len(PLAN.ks))

    def test_curves_reach_the_widest_pass_of_a_tree(self, run):
        assert {row["n"] for row in run[0].curves} == {1, 2, 4, 7}

    def test_the_compiled_engine_is_lossless(self, run):
        compiled = [row for row in run[0].sweep if row["backend"].startswith("numba")]
        assert compiled and all(row["identical"] for row in compiled)

    def test_the_target_as_its_own_drafter_is_accepted_always(self, run):
        itself = [row for row in run[0].sweep if row["drafter"] == "itself"]
        assert itself and all(row["accepted"] == row["drafted"] > 0 for row in itself)

    @pytest.mark.parametrize("id", ["B1", "B2", "B3", "B4"])
    def test_claims_are_judged_from_rows_as_from_records(self, run, id):
        rows, layout, _ = run
        here, there = judge(id, rows.sweep), evaluate(claim(id), layout)
        assert here.verdict in MEASURED and (here.verdict, here.value) == (there.verdict, there.value)

    def test_the_table_has_a_line_a_configuration(self, run):
        table = summary_table(run[0].sweep)
        assert set(table.index) == {row["configuration"] for row in run[0].sweep}
        assert (table["speedup"] > 0).all() and table["K"].isin(PLAN.ks).all()

    def test_records_know_the_code_that_made_them(self, run):
        (file,) = find_records(SWEEP, folder=run[1].build)
        assert file.header["code"]["hash"] == code_hash(backend_sweep.CODE) and not file.is_stale(run[1])
