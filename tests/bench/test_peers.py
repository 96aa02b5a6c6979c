"""Tuning and measuring peers, with invented ones; then all of it on a tiny model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from specdec_core.bench import peers as bench
from specdec_core.bench.peer_decoders import AR, PLAIN, Peer, PeerRun, Setting
from specdec_core.bench.peers import CODE, PLANS, PeerPlan, measure_peers, open_peers, run_peers, tune, tuned_before
from specdec_core.bench.sweep_configurations import TREES
from specdec_core.evidence.layout import PROFILES
from specdec_core.evidence.peer_records import PEER, PEER_TUNING, over_fastest, peers, speedup, work
from specdec_core.evidence.provenance import code_hash
from specdec_core.evidence.records import find_records, read_records
from specdec_core.evidence.serial_records import ABSENT
from specdec_core.measure import clock
from specdec_core.measure.sweep import Case
from specdec_core.models.eagle_checkpoint import tiny_eagle
from specdec_core.models.errors import MissingPackage
from specdec_core.sampling import Options
from tests.bench.conftest import copy_checkout
from tests.bench.peer_factory import tiny_factory

pytestmark = pytest.mark.usefixtures("one_thread")

OPTIONS = Options(max_new_tokens=4, seed=10)
TEXT = (7, 8, 9, 6)


def cases_of(split: str) -> list[Case]:
    return [Case(f"{domain}-{split}", domain, split, (1, number)) for number, domain in enumerate(("math", "code"))]


@pytest.fixture
def quick(monkeypatch):
    monkeypatch.setattr(clock, "SETTLE", 0.0)


Say = Callable[[tuple[int, ...], Options, Setting], PeerRun]


def at(seconds: float, tokens: tuple[int, ...] = TEXT) -> Say:
    return lambda prompt, options, setting: PeerRun(tokens, len(tokens) - 1, seconds, len(tokens) - 1)


def peer_of(method: str, say: Say, settings=(Setting(1), Setting(2, 3)), backend: str = "b f", **changes) -> Peer:
    settings = (PLAIN,) if method == AR else settings
    return Peer(backend, "b", "f", method, settings, say, file="f.gguf", threads=2, **changes)


@pytest.mark.usefixtures("quick")
class TestTune:
    def test_the_setting_with_most_tokens_a_second_is_best(self):
        def say(prompt, options, setting):  # slower tokens, but more of them in the same time, win
            return PeerRun(TEXT, *{1: (3, 0.3), 2: (2, 0.1), 3: (1, 0.08)}[setting.draft], 1)

        found = tune(peer_of("x", say, (Setting(1), Setting(2), Setting(3))), cases_of("tuning"), OPTIONS)
        assert found.best == Setting(2)
        assert [(row["draft"], row["counted"], row["chosen"]) for row in found.rows] == [
            (1, 6, False), (2, 4, True), (3, 2, False)
        ]  # fmt: skip
        assert [row["seconds"] for row in found.rows] == pytest.approx([0.6, 0.2, 0.16])
        assert all(PEER_TUNING.validated(row) and row["prompts"] == 2 for row in found.rows)

    def test_speeds_are_pooled_over_prompts(self):
        def say(prompt, options, setting):  # the first is faster on one prompt, the second over both
            return PeerRun(TEXT, 3, {1: (0.1, 9.0), 2: (1.0, 1.0)}[setting.draft][prompt[1]], 3)

        assert tune(peer_of("x", say, (Setting(1), Setting(2))), cases_of("tuning"), OPTIONS).best == Setting(2)

    def test_settings_come_in_random_order_and_prompts_with_their_own_seeds(self):
        asked = []

        def say(prompt, options, setting):
            asked.append((prompt, options.seed, setting.draft))
            return PeerRun(TEXT, 3, 0.1, 3)

        settings = tuple(Setting(k) for k in range(1, 9))
        tune(peer_of("x", say, settings), cases_of("tuning"), OPTIONS)
        first, second = asked[:8], asked[8:]
        assert {prompt for prompt, _, _ in first} == {(1, 0)} and {seed for _, seed, _ in first} == {10}
        assert {seed for _, seed, _ in second} == {11}
        orders = [[k for _, _, k in each] for each in (first, second)]
        assert sorted(orders[0]) == sorted(orders[1]) == list(range(1, 9)) and orders[0] != orders[1] != sorted(
            orders[1]
        )

    def test_a_setting_that_was_never_timed_is_not_chosen(self):
        def say(prompt, options, setting):
            return PeerRun(TEXT, 3, 0.1, 3) if setting.draft == 1 else PeerRun(TEXT, 0, 0.0, 0)

        found = tune(peer_of("x", say), cases_of("tuning"), OPTIONS)
        assert found.best == Setting(1) and [row["draft"] for row in found.rows] == [1]
        with pytest.raises(ValueError, match="no prompt's text went on after its first pass"):
            tune(peer_of("x", lambda *asked: PeerRun(TEXT, 0, 0.0, 0)), cases_of("tuning"), OPTIONS)

    def test_settings_are_chosen_on_tuning_prompts_only(self):
        for cases, named in ((cases_of("tuning") + cases_of("report"), "math-report"), ([], "none")):
            with pytest.raises(ValueError, match=rf"{named}.*on prompts of the split 'tuning' only"):
                tune(peer_of("x", at(1.0)), cases, OPTIONS)

    def test_what_an_earlier_run_chose_is_taken_up_if_it_tried_everything(self):
        peer = peer_of("x", at(0.5), (Setting(1), Setting(2), Setting(2, 3, "constant")))
        found = tune(peer, cases_of("tuning"), OPTIONS)
        other = [row | {"peer": "b f · y"} for row in found.rows]
        warm = [row | {"temperature": 1.0} for row in found.rows]
        assert tuned_before(peer, other + found.rows + warm, 2, 0.0) == found
        for rows, prompts in ((found.rows[:-1], 2), (found.rows, 3), (warm, 2), (other, 2), ([], 2)):
            assert tuned_before(peer, rows, prompts, 0.0) is None

    def test_there_is_nothing_to_choose_without_drafts(self):
        assert tune(peer_of(AR, at(1.0)), [], OPTIONS) == bench.Tuned(PLAIN, [])


@pytest.mark.usefixtures("quick")
class TestMeasure:
    def test_autoregression_runs_before_and_after_and_all_is_recorded(self):
        asked = []

        def saying(name, seconds):
            def say(prompt, options, setting):
                asked.append((name, prompt, options.seed, setting))
                return at(seconds)(prompt, options, setting)

            return say

        group = [peer_of(AR, saying("ar", 0.3)), peer_of("x", saying("x", 0.1)), peer_of("y", saying("y", 0.2))]
        group += [peer_of(AR, saying("other", 0.5), backend="c f")]
        settings = {"b f · x": Setting(2, 3), "b f · y": Setting(1)}
        rows = list(measure_peers(group, cases_of("report"), OPTIONS, settings))
        assert [PEER.validated(row) for row in rows] == rows and len(rows) == 2 * (2 + 2 + 2)
        for index, case in enumerate(cases_of("report")):
            order = [name for name, prompt, seed, _ in asked if prompt == case.tokens and seed == 10 + index]
            assert set(order[:2]) == set(order[-2:]) == {"ar", "other"} and set(order[2:-2]) == {"x", "y"}
            assert len(order) == 6
        assert {setting for name, *_, setting in asked if name == "x"} == {Setting(2, 3)}
        assert {setting for name, *_, setting in asked if name in ("ar", "other")} == {PLAIN}
        row = next(row for row in rows if row["peer"] == "b f · x")
        assert (row["backend"], row["method"], row["draft"], row["ngram"], row["arm"]) == ("b f", "x", 2, 3, "sd")
        assert (row["prompt_id"], row["domain"], row["split"], row["file"]) == (
            "math-report",
            "math",
            "report",
            "f.gguf",
        )
        assert (row["tokens"], row["counted"], row["seconds"], row["passes"], row["threads"]) == (4, 3, 0.1, 3, 2)
        assert row["identical"] is True and row["difference"] == -1 and not row["repetitive"]

    def test_arms_come_in_another_order_with_every_prompt(self):
        orders = {}

        def saying(name):
            return lambda prompt, *rest: orders.setdefault(prompt, []).append(name) or at(0.1)(prompt, *rest)

        names = "qrstuvwxyz"
        group = [peer_of(AR, at(0.1)), *(peer_of(name, saying(name)) for name in names)]
        list(measure_peers(group, cases_of("report"), OPTIONS, {f"b f · {name}": Setting(1) for name in names}))
        one, two = orders.values()
        assert sorted(one) == sorted(two) == sorted(names) and one != two and list(names) not in (one, two)

    def test_output_is_compared_with_the_backends_own_first_run(self, monkeypatch):
        seen = []
        monkeypatch.setattr(
            bench,
            "difference",
            lambda peer, *given: seen.append((peer.name, given)) or bench.Difference(2, 0.5, 0.3, True),
        )
        group = [peer_of(AR, at(0.1)), peer_of("x", at(0.1, (7, 8, 1, 6)))]
        group += [peer_of(AR, at(0.1, (5,) * 40), backend="c f"), peer_of("y", at(0.1, (5,) * 40), backend="c f")]
        settings = {"b f · x": Setting(2, 3), "c f · y": Setting(1)}
        rows = list(measure_peers(group, cases_of("report")[:1], OPTIONS, settings))
        given = dict(seen)
        assert given["b f · x"] == ((1, 0), TEXT, (7, 8, 1, 6), 2) and given["c f · y"] == (
            (1, 0),
            (5,) * 40,
            (5,) * 40,
            1,
        )
        row = next(row for row in rows if row["peer"] == "b f · x")
        assert (row["identical"], row["difference"], row["near_tie"]) == (False, 2, True)
        assert (row["gap"], row["epsilon"]) == (0.5, 0.3)
        assert {row["peer"] for row in rows if row["repetitive"]} == {"c f · AR", "c f · y"}

    def test_a_difference_that_is_found_is_judged(self):
        group = [peer_of(AR, at(0.1)), peer_of("x", at(0.1, (7, 8, 1, 6)), exact=True)]
        rows = list(measure_peers(group, cases_of("report")[:1], OPTIONS, {"b f · x": Setting(1)}))
        assert [(row["identical"], row["difference"], row["near_tie"]) for row in rows] == [
            (True, -1, None), (True, -1, None), (False, 2, False)
        ]  # fmt: skip

    def test_sampled_output_has_no_right_answer(self):
        group = [peer_of(AR, at(0.1)), peer_of("x", at(0.1, (1, 2)))]
        warm = replace(OPTIONS, temperature=1.0)
        rows = list(measure_peers(group, cases_of("report")[:1], warm, {"b f · x": Setting(1)}))
        assert {row["identical"] for row in rows} == {None} and {row["temperature"] for row in rows} == {1.0}
        assert [PEER.validated(row) for row in rows] == rows

    def test_what_is_missing_is_named(self):
        lonely, ar = peer_of("x", at(0.1)), peer_of(AR, at(0.1))
        for group, settings, message in (
            ([lonely], {"b f · x": Setting(1)}, "b f: no autoregressive peer"),
            ([ar, ar], {}, "b f decodes autoregressively twice"),
            ([ar, lonely], {}, "no setting for b f · x: choose one with tune"),
        ):
            with pytest.raises(ValueError, match=message):
                list(measure_peers(group, cases_of("report"), OPTIONS, settings))


class TestPlans:
    def test_every_profile_has_one(self):
        assert set(PLANS) == set(PROFILES)
        for plan in PLANS.values():
            assert plan.ours == ("numba float32", "numba int8") and {"Q8_0", "Q4_1"} <= set(plan.formats)

    def test_the_full_one_looks_at_every_length_format_and_temperature(self):
        plan = PLANS["full"]
        assert plan.drafts == tuple(range(1, 9)) and set(plan.formats) == {"F32", "Q8_0", "Q4_1", "Q4_0"}
        assert set(plan.temperatures) == {0.0, 1.0} and len(plan.ngrams) > 1


PLAN = PeerPlan((2,), (2,), ("Q8_0",), tuning=1, report=1, max_new_tokens=10, temperatures=(0.0, 1.0))


@pytest.fixture(scope="module")
def run(tmp_path_factory, short_prompts):
    """All peers on a tiny model, and the layout that its records lie in."""
    pytest.importorskip("llama_cpp", reason="llama.cpp is not installed")
    layout = copy_checkout(tmp_path_factory.mktemp("checkout"))
    folder = tmp_path_factory.mktemp("peers")
    with tiny_factory(folder, features=(0, 2)) as factory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(bench, "load_prompts", lambda: short_prompts)
        patch.setattr(clock, "SETTLE", 0.0)
        drafter = tiny_eagle(1, factory.opened.checkpoint, (0, 2), vocabulary=100)
        yield run_peers(PLAN, factory, "quick", drafter=drafter, layout=layout), layout, factory


OURS = ("n-gram", "its first layers", "EAGLE chain", *(f"EAGLE tree {nodes}" for nodes in TREES))
BACKENDS = {"numba float32", "numba int8", "transformers float32", "llama.cpp Q8_0"}


class TestRun:
    def test_all_of_it_is_recorded_and_knows_its_code(self, run):
        rows, layout, _ = run
        for name, schema, kept in (
            ("02_peer_tuning", PEER_TUNING, rows.tuning),
            ("02_peers", PEER, rows.runs),
            ("02_peer_absent", ABSENT, rows.absent),
        ):
            assert read_records(layout.records("quick") / f"{name}.jsonl", schema)[1] == kept
            (file,) = find_records(schema, folder=layout.build)
            assert file.header["code"]["paths"] == sorted(CODE) and not file.is_stale(layout)
        assert code_hash(CODE) and len(CODE) == len(set(CODE))

    def test_every_backend_ran_in_every_arm(self, run):
        rows = run[0].runs
        assert {row["backend"] for row in rows} == BACKENDS and not run[0].absent
        sd = {row["peer"] for row in rows if row["arm"] == "sd"}
        ours = [f"{backend} · {method}" for backend in ("numba float32", "numba int8") for method in OURS]
        assert sd > set(ours) and len(sd) == len(ours) + 2 + 1 and len(rows) == 2 * 3 * (2 * len(BACKENDS) + len(sd))
        assert {row["split"] for row in rows} == {"report"} and len({row["prompt_id"] for row in rows}) == 3

    def test_every_peer_runs_once_before_any_is_timed(self, run, monkeypatch, tmp_path):
        order: list[str] = []
        timed, ran = bench._timed, Peer.run
        monkeypatch.setattr(bench, "_timed", lambda *given: order.append("timed") or timed(*given))
        monkeypatch.setattr(Peer, "run", lambda peer, *given: order.append(peer.name) or ran(peer, *given))
        plan = replace(PLAN, formats=(), temperatures=(0.0,), max_new_tokens=4)
        rows = run_peers(plan, run[2], "quick", layout=copy_checkout(tmp_path / "checkout"))
        assert sorted(order[: order.index("timed")]) == sorted({row["peer"] for row in rows.runs})

    def test_a_killed_run_is_gone_on_with(self, run, monkeypatch, tmp_path):
        plan = replace(PLAN, formats=(), temperatures=(0.0,), max_new_tokens=4)
        layout = copy_checkout(tmp_path / "checkout")

        def killed(*given, **options):
            raise KeyboardInterrupt

        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(bench, "measure_peers", killed)
            run_peers(plan, run[2], "quick", layout=layout)
        left = read_records(layout.records("quick") / "02_peer_tuning.partial.jsonl", PEER_TUNING)[1]
        monkeypatch.setattr(bench, "tune", lambda *given: pytest.fail("tuned again"))
        rows = run_peers(plan, run[2], "quick", layout=layout)
        assert rows.tuning == left == read_records(layout.records("quick") / "02_peer_tuning.jsonl", PEER_TUNING)[1]
        assert left and rows.runs

    def test_every_speculation_was_tuned_first_and_ran_at_its_best(self, run):
        tuning, runs = run[0].tuning, run[0].runs
        for temperature in PLAN.temperatures:
            chosen = {
                row["peer"]: (row["draft"], row["ngram"], row["schedule"])
                for row in tuning
                if row["chosen"] and row["temperature"] == temperature
            }
            ran = {
                (row["peer"], (row["draft"], row["ngram"], row["schedule"]))
                for row in runs
                if row["arm"] == "sd" and row["temperature"] == temperature
            }
            assert ran == set(chosen.items())

    def test_greedy_output_is_the_backends_own(self, run):
        greedy = [row for row in run[0].runs if row["temperature"] == 0]
        assert all(row["identical"] or row["near_tie"] for row in greedy)
        assert all(row["identical"] for row in greedy if row["engine"] == "numba")

    def test_claims_can_be_taken_from_it(self, run):
        rows = run[0].runs
        for name in peers(rows, "sd"):
            assert speedup(rows, name).n == 3
        ours = work(row for row in rows if row["peer"] == "numba int8 · n-gram" and row["temperature"] == 0)
        lead = over_fastest(ours, rows)
        assert lead.peer in ("transformers float32 · AR", "llama.cpp Q8_0 · AR") and lead.ratio.estimate > 0

    def test_what_is_not_here_is_left_out_and_said_to_be(self, run, monkeypatch):
        def missing(*asked):
            raise MissingPackage("llama.cpp is not here")

        monkeypatch.setattr(bench, "llamacpp_peers", missing)
        found, absent = open_peers(replace(PLAN, ours=("numba float32",), formats=("Q8_0", "F32")), run[2])
        assert {peer.backend for peer in found} == {"numba float32", "transformers float32"}
        assert absent == [
            {"backend": f"llama.cpp {kind}", "reason": "llama.cpp is not here"} for kind in ("Q8_0", "F32")
        ]
