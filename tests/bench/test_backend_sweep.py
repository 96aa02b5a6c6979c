import pytest

from specdec_core.bench import backend_sweep
from specdec_core.bench.backend_sweep import (
    PLANS,
    SweepPlan,
    cases_of,
    compared_with_paper,
    open_targets,
    planned,
    run_sweep,
    summary_table,
)
from specdec_core.bench.serial_backends import BackendFactory
from specdec_core.bench.sweep_configurations import BACKENDS, TREES
from specdec_core.evidence.claims import claim
from specdec_core.evidence.evaluate import evaluate, judge
from specdec_core.evidence.layout import PROFILES
from specdec_core.evidence.provenance import code_hash
from specdec_core.evidence.records import find_records, read_records
from specdec_core.evidence.serial_records import ABSENT
from specdec_core.evidence.sweep_claims import attribute_best, by_configuration
from specdec_core.evidence.sweep_records import CEILING, COST_CURVE, SWEEP, pair_up
from specdec_core.evidence.verdicts import MEASURED
from specdec_core.models.eagle_checkpoint import tiny_eagle
from specdec_core.models.errors import MissingPackage
from specdec_core.prompts import DOMAINS
from tests.bench.peer_factory import tiny_factory
from tests.evidence.conftest import Pair, sweep

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = SweepPlan(
    ks=(1, 3), tuning=1, report=1, max_new_tokens=8, repeats=2, contexts=(8, 24), sampled=(0, 1), sampled_ks=(3,),
    backends=("numba float32", "numba int8", "torch float32", "llama.cpp Q4_1", "llama.cpp Q4_0", "llama.cpp Q8_0"),
)  # fmt: skip
KNOWING = ("n-gram", "EAGLE chain", *(f"EAGLE tree {nodes}" for nodes in TREES))
LENGTHS = {f"{backend} · {drafter}": (3,) for backend in ("numba float32", "numba int8") for drafter in KNOWING}
GREEDY = dict.fromkeys((*LENGTHS, "numba float32 · n-gram tree", "numba float32 · itself in int8"), PLAN.ks) | {
    f"{backend} · {drafter}": (1,)
    for backend, drafter in (
        ("numba float32", "first 1 layers"),
        ("numba float32", "itself"),
        ("torch float32", "n-gram"),
        ("llama.cpp Q4_1", "n-gram"),
    )
}
"""Configuration → its lengths K, at T = 1 and greedily."""


class TestPlans:
    def test_every_profile_has_one(self):
        assert set(PLANS) == set(PROFILES) and all(plan.ks[0] == 1 for plan in PLANS.values())

    def test_lengths_replace_the_profiles(self):
        assert planned("quick") is PLANS["quick"]
        assert planned("full", [4, 2, 2]).ks == (2, 4)
        assert planned("full", [3]).report == PLANS["full"].report
        assert [planned("full", ks).sampled_ks for ks in ([3, 5], [2, 5], [8, 6, 2])] == [(5,), (2,), (2, 6)]

    @pytest.mark.parametrize("ks", [[0], [2, -1]])
    def test_lengths_that_are_none(self, ks):
        with pytest.raises(ValueError, match=r"ks \[.*\]: expected speculation lengths K ≥ 1, such as \[1, 2, 4\]"):
            planned("quick", ks)

    def test_an_unknown_profile(self):
        with pytest.raises(ValueError, match="unknown profile 'fast': expected one of quick, full"):
            planned("fast")


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_samples_lengths_that_it_measures(name):
    plan = PLANS[name]
    assert set(plan.sampled_ks) <= set(plan.ks) and set(plan.backends) <= set(BACKENDS)


def test_the_full_plan_is_as_broad_as_its_claims_ask():
    plan, claims = PLANS["full"], [claim(id) for id in ("B1", "B2", "B3", "B4")]
    assert len(DOMAINS) * min(plan.report, plan.sampled[1]) >= max(each.minimum_n for each in claims)
    assert plan.tuning and plan.sampled[0] and plan.backends == BACKENDS


def test_both_our_engines_are_named_for_what_they_are(tiny_opened):
    for name, target in open_targets(tiny_opened.target).items():
        assert name == f"{target.placement.engine} {target.placement.dtype}"


def test_cases_are_the_first_prompts_of_each_domain_and_split(tiny_opened, short_prompts):
    cases = cases_of(short_prompts, tiny_opened.tokenizer, 1, 1)
    assert [(case.domain, case.split) for case in cases] == [
        (domain, split) for domain in ("math", "code", "chat") for split in ("tuning", "report")
    ]
    assert all(case.prompt_id.endswith("-1") for case in cases)
    assert cases[0].tokens == tuple(tiny_opened.tokenizer.chat(short_prompts[0].messages))


ABSENT_HERE = "llama.cpp Q4_0"


@pytest.fixture(scope="module")
def run(tmp_path_factory, short_prompts, layout_of_module, small_ceilings_of_module):
    """One tiny sweep with a drafter that knows nothing, the layout that its records lie in, and the cases it ran."""
    pytest.importorskip("llama_cpp", reason="llama.cpp is not installed")
    cases, opening = [], BackendFactory.open

    def open_others(factory, name):
        if name == ABSENT_HERE:
            raise MissingPackage("it is not here")
        return opening(factory, name)

    with (
        tiny_factory(tmp_path_factory.mktemp("sweep"), features=(0, 2)) as factory,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.setattr(backend_sweep, "load_prompts", lambda: short_prompts)
        patch.setattr(BackendFactory, "open", open_others)
        rows = run_sweep(
            PLAN,
            factory.opened,
            drafter=tiny_eagle(1, factory.opened.checkpoint, (0, 2), vocabulary=100),
            factory=factory,
            layout=layout_of_module,
            progress=lambda these: cases.append(list(these)) or these,
        )
    return rows, layout_of_module, cases


class TestRun:
    def test_all_of_it_is_recorded_and_knows_its_code(self, run):
        rows, layout, _ = run
        for name, schema, expected in (
            ("02_curves", COST_CURVE, rows.curves),
            ("02_ceilings", CEILING, rows.ceilings),
            ("02_sweep", SWEEP, rows.sweep),
            ("02_absent", ABSENT, rows.absent),
        ):
            assert read_records(layout.records("quick") / f"{name}.jsonl", schema)[1] == expected
            (file,) = find_records(schema, folder=layout.build)
            assert file.header["code"]["hash"] == code_hash(backend_sweep.CODE) and not file.is_stale(layout)

    def test_every_configuration_ran_at_its_lengths_on_every_prompt(self, run):
        rows, _, (greedy, sampled) = run
        assert [len(greedy), len(sampled)] == [6, 3] and {case.split for case in sampled} == {"report"}
        for temperature, cases in ((0.0, greedy), (1.0, sampled)):
            own: dict[str, list[int]] = {}
            for row in rows.sweep:
                if row["temperature"] == temperature:
                    own.setdefault(row["configuration"], []).append(row["K"])
            expected = {
                name: sorted(len(cases) * (0, 0, *ks)) for name, ks in (LENGTHS if temperature else GREEDY).items()
            }
            assert {name: sorted(ks) for name, ks in own.items()} == expected

    def test_every_backend_is_timed_as_wide_as_it_verifies(self, run):
        widths: dict[str, set[int]] = {}
        for row in run[0].curves:
            widths.setdefault(row["backend"], set()).add(row["n"])
        chains = {1, 2, 4}
        assert widths == {
            "numba float32": chains | {6, 7, 12, 16}, "numba int8": chains | {6, 12, 16}, "torch float32": {1, 2},
            "llama.cpp Q4_1": {1, 2}, "llama.cpp Q8_0": chains,
        }  # fmt: skip
        assert {row["context"] for row in run[0].curves} == set(PLAN.contexts)

    def test_our_engines_have_ceilings_by_their_own_bytes(self, run):
        sizes = {row["configuration"]: row["weight_bytes"] for row in run[0].ceilings}
        assert list(sizes) == ["numba float32", "numba int8", "torch float32"]
        assert sizes["numba int8"] * 64 == sizes["numba float32"] * 17 and sizes["torch float32"] == max(sizes.values())

    def test_what_is_not_here_says_why(self, run):
        assert run[0].absent == [{"backend": ABSENT_HERE, "reason": "it is not here"}]

    def test_the_compiled_engine_is_lossless(self, run):
        compiled = [row for row in run[0].sweep if row["backend"].startswith("numba") and not row["temperature"]]
        assert compiled and all(row["identical"] for row in compiled)

    def test_the_target_as_its_own_drafter_is_accepted_always(self, run):
        itself = [row for row in run[0].sweep if row["drafter"] == "itself"]
        assert itself and all(row["accepted"] == row["drafted"] > 0 for row in itself)

    @pytest.mark.parametrize("id", ["B1", "B2", "B3", "B4"])
    def test_claims_are_judged_from_rows_as_from_records(self, run, id):
        rows, layout, _ = run
        here, there = judge(id, rows.sweep), evaluate(claim(id), layout)
        assert here.verdict in MEASURED and (here.verdict, here.value) == (there.verdict, there.value)

    def test_the_table_has_a_line_a_configuration_and_temperature(self, run):
        table = summary_table(run[0].sweep)
        lines = {(row["configuration"], row["temperature"]) for row in run[0].sweep}
        assert set(zip(table.index, table["T"], strict=True)) == lines and len(table) == len(lines)
        assert (table["speedup"] > 0).all() and table["K"].isin(PLAN.ks).all()


@pytest.fixture(scope="module")
def invented():
    """Rows of four configurations, the first of them at T = 1 too."""
    wins, slow = Pair("wins", alpha=(0.8, 0.5)), Pair("slow", alpha=(0.6, 0.3), c=0.9)
    wrong = Pair("wrong", alpha=(0.6, 0.5), bias=2.0)
    even = Pair("even", alpha=(0.5, 0.5), c=0.35, s=0.2, o=0.0)
    cold = sweep([wins, slow, wrong, even], lengths=(1, 2), prompts=64)
    return [*cold, *(row | {"temperature": 1.0, "prompt_id": "w" + row["prompt_id"]} for row in cold[:192])]


class TestTables:
    def test_a_line_is_what_its_cell_measured(self, invented):
        table = summary_table(invented)
        assert len(table) == 5 and list(table.loc["wins", "T"]) == [0.0, 1.0]
        assert table.loc[["slow", "wrong"], "sign"].tolist() == ["right", "wrong"]
        assert table.loc[["slow", "wrong"], "slower because"].tolist() == ["slow draft", "serial verification"]
        line = table.loc["wins"].iloc[0]
        assert line["sign"] == "right" and line["slower because"] == "" and line["low"] > 1
        own = [row for row in invented if (row["configuration"], row["K"]) == ("wins", line["K"])]
        own = [row for row in own if row["split"] == "report" and not row["temperature"]]
        total = {name: sum(row[name] for row in own) for name in ("verify_seconds", "target_passes", "tokens")}
        assert line["t(draft + 1), ms"] == pytest.approx(1e3 * total["verify_seconds"] / total["target_passes"])
        assert line["τ"] == pytest.approx(total["tokens"] / total["target_passes"])
        first, second = map(float, line["α_i"].split())
        assert first == pytest.approx(0.8, abs=0.05) and second == pytest.approx(0.56, abs=0.08)

    def test_a_cell_that_could_be_either_has_no_sign(self, invented):
        (even,) = [one for one in attribute_best(invented) if one.cell.configuration == "even"]
        assert even.speedup.low < 1 < even.speedup.high and summary_table(invented).loc["even", "sign"] == "undecided"

    def test_the_papers_figures_stand_beside_ours(self, invented):
        table = compared_with_paper(invented)
        best = max(attribute_best(invented), key=lambda one: one.speedup.estimate)
        assert table.loc["best speedup"].tolist() == [
            "1.61× at K=6", f"{best.speedup.estimate:.2f}× at K={best.cell.K}, wins"
        ]  # fmt: skip
        cells = by_configuration(pair_up(invented, split="report"))["wins", best.cell.temperature]
        ends = " → ".join(f"{cells[end].acceptance():.1%}" for end in (0, -1))
        assert table.loc["a_K from the least K to the greatest"].tolist() == [
            "69.7% → 37.8%", f"{ends}, K=1 to 2, wins"
        ]  # fmt: skip
        assert table.loc["slower than AR, and why", "ours"] == "2 of 5; serial verification, slow draft"

    def test_nothing_slower_has_no_cause(self):
        table = compared_with_paper(sweep([Pair("wins", alpha=(0.8,))], lengths=(1,)))
        assert table.loc["slower than AR, and why", "ours"] == "0 of 1; no cause"
