"""Notebook 03's measurement on a tiny model: our checkpoint and the GGUF file hold the same one."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from specdec_core.bench import serial_backends, serial_verification
from specdec_core.bench.serial_backends import BACKENDS, BackendFactory, same_values
from specdec_core.bench.serial_rows import op_rows
from specdec_core.bench.serial_verification import (
    FILES,
    LEAST,
    PLANS,
    SerialPlan,
    Session,
    measure_arms,
    measure_serial,
)
from specdec_core.evidence.layout import PROFILES
from specdec_core.evidence.provenance import code_hash
from specdec_core.evidence.records import find_records, read_records
from specdec_core.evidence.sweep_records import pair_up
from specdec_core.forensics.near_ties import Divergence
from specdec_core.measure import clock
from specdec_core.models.errors import MissingPackage
from specdec_core.pairs import open_target
from specdec_core.placement import Placement
from specdec_core.targets.table import TableTarget, random_logits
from tests.bench.conftest import copy_checkout
from tests.tiny import save_tiny
from tests.tiny_gguf import gguf_model, write_gguf

pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: make setup builds it where there is a compiler")
pytest.importorskip("mlx.core", reason="MLX is not installed")

pytestmark = pytest.mark.usefixtures("one_thread")

OURS, SHIPPED, GPU = "numba float32", "llama.cpp Q4_1", "llama.cpp Q4_1, GPU"
SWAPPED = (OURS, SHIPPED, "llama.cpp Q4_0", "llama.cpp Q4_0, not repacked", "llama.cpp F32")
PLAN = SerialPlan(
    sessions=(
        Session(SWAPPED, (1, 2, 7, 9), (8, 16), 3, 60, (2, 7), SWAPPED[:2], SWAPPED),
        Session(("torch float32", "transformers float32", "MLX 4-bit"), (1, 7), (8,), 3, 60, (), (), ("MLX 4-bit",)),
        Session((GPU,), (1, 2), (8,), 3, 60, (2,), (GPU,), (GPU,)),
    ),
    ops=(OURS, SHIPPED, "torch float32"),
    op_widths=(1, 7),
    op_repeats=3,
    prompts=1,
    twin_prompts=1,
    max_new_tokens=8,
    k=6,
    variants=("Q4_1", "Q4_0", "F32"),
)
SIZES = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}


@pytest.fixture(scope="module")
def factory(tmp_path_factory):
    folder = tmp_path_factory.mktemp("serial")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_CACHE", str(folder / "cache"))
        opened = open_target(str(save_tiny(folder / "model", context=256, **SIZES)), Placement("numba", threads=1))
        yield BackendFactory(opened, write_gguf(gguf_model(context=256, layers=4), folder / "tiny.gguf"))


@pytest.fixture(scope="module")
def run(factory, tmp_path_factory, short_prompts):
    """All of it, the layout that its records lie in, and what was said."""
    layout, said = copy_checkout(tmp_path_factory.mktemp("checkout")), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(serial_verification, "load_prompts", lambda: short_prompts)
        patch.setattr(clock, "SETTLE", 0.0)
        rows = measure_serial(PLAN, factory.opened, "quick", factory=factory, layout=layout, say=said.append)
    return rows, layout, said


class TestRun:
    def test_all_of_it_is_recorded(self, run):
        rows, layout, said = run
        assert len(FILES) == 8 and said
        for field, (name, schema, _) in FILES.items():
            found = getattr(rows, field)
            recorded = read_records(layout.records("quick") / f"{name}.jsonl", schema)[1]
            assert found and len(recorded) == len(found)
            assert [schema.validated(row) for row in found] == recorded

    def test_every_arm_has_a_sample_a_repeat(self, run):
        curves = run[0].curves
        assert all(len(row["seconds"]) == 3 and min(row["seconds"]) > 0 for row in curves)
        timed = {(row["backend"], row["arm"], row["context"], row["n"]) for row in curves}
        assert len(timed) == len(curves)
        passes = {(name, "verify", context, n) for name in SWAPPED for context in (8, 16) for n in (1, 2, 7, 9)}
        loops = {(name, "loop", 8, n) for name in SWAPPED for n in (2, 7)}
        others = {(name, "verify", 8, n) for name in PLAN.sessions[1].backends for n in (1, 7)}
        assert timed == passes | loops | others

    def test_curves_say_what_they_are_of(self, run):
        row = {each["backend"]: each for each in run[0].curves}
        assert (row[OURS]["engine"], row[OURS]["quantized"], row[OURS]["repack"]) == ("numba", False, None)
        assert (row[SHIPPED]["format"], row[SHIPPED]["quantized"], row[SHIPPED]["repack"]) == ("Q4_1", True, True)
        assert row["llama.cpp Q4_0, not repacked"]["repack"] is False
        assert (row["MLX 4-bit"]["session"], row["MLX 4-bit"]["threads"], row[OURS]["threads"]) == (1, None, 1)
        assert not row["llama.cpp F32"]["quantized"]

    def test_swaps_change_the_kernel_and_no_value(self, run):
        swaps = run[0].swaps
        assert all(row["same_values"] for row in swaps)
        assert {(row["swap"], row["context"]) for row in swaps if row["before"] != row["after"]} == {
            (swap, context) for swap in ("Q4_0 repacking", "Q4_1 → F32") for context in (8, 16)
        }
        padded = [row for row in swaps if row["before"] == row["after"]]
        assert {row["before"] for row in padded} == {*SWAPPED}
        assert all((row["n_before"], row["n_after"]) == (7, 9) for row in padded)

    def test_parts_and_the_model_of_every_engine(self, run):
        for name in PLAN.ops:
            own = [row for row in run[0].ops if row["backend"] == name]
            for n in PLAN.op_widths:
                assert next(row["operation"] for row in own if row["n"] == n and not row["part"]) == "model"
                assert sum(row["part"] for row in own if row["n"] == n) == 6
            assert all(len(row["seconds"]) == 3 and row["context"] == 8 for row in own)
        head = next(row for row in run[0].ops if (row["backend"], row["operation"]) == (OURS, "head"))
        assert head["count"] == 1

    def test_every_file_is_dispatched_by_both_rules(self, run):
        rows = run[0]
        assert {row["variant"] for row in rows.dispatch} == set(PLAN.variants)
        assert {row["backend"] for row in rows.dispatch} >= {"Metal"}
        assert {row["n"] for row in rows.shares} == set(range(2, 17))
        backends = {(row["backend"], row["variant"]) for row in rows.shares}
        assert {(row["backend"], row["variant"]) for row in rows.dispatch} == backends
        assert any("not repacked" in name for name, variant in backends if variant == "Q4_0") or len(backends) == 3

    def test_twins_emit_the_same_tokens_on_our_engine_and_certified_ones_elsewhere(self, run):
        twins = {row["backend"]: row for row in run[0].twins}
        assert set(twins) == {*SWAPPED, "MLX 4-bit"}
        assert twins[OURS]["exact"] and twins[OURS]["identical"] and twins[OURS]["same_rounds"]
        assert [row for row in twins.values() if not row["certified"]] == []
        assert all(row["K"] == 6 and 1 <= row["tokens"] <= 8 for row in twins.values())
        assert not any(row["exact"] for name, row in twins.items() if name != OURS)

    def test_speculation_is_predicted_from_curves_of_before(self, run):
        sweep = run[0].sweep
        assert {row["backend"] for row in sweep} == set(SWAPPED[:2])
        assert all(row["predicted_seconds"] > 0 and row["split"] == "report" for row in sweep)
        cells = pair_up(sweep)
        assert {(cell.configuration, cell.K, len(pairs)) for cell, pairs in cells.items()} == {
            (f"{name} · n-gram", 6, 3) for name in SWAPPED[:2]
        }

    def test_a_backend_that_is_not_here_is_left_out_and_said_to_be(self, run):
        (absent,) = run[0].absent
        assert absent["backend"] == GPU and "has no GPU" in absent["reason"]
        assert not any(row["backend"] == GPU for row in (*run[0].curves, *run[0].twins, *run[0].sweep))

    def test_records_know_the_code_that_made_them(self, run):
        for name, schema, code in FILES.values():
            (file,) = find_records(schema, folder=run[1].build)
            assert file.path.stem == name and not file.is_stale(run[1])
            assert file.header["code"]["hash"] == code_hash(code, run[1])

    def test_torch_has_its_threads_back(self, run):
        import torch

        assert torch.get_num_threads() == 1


def test_without_a_package_the_rest_is_measured(factory, layout, short_prompts, monkeypatch):
    def missing(self, name):
        if name.startswith("llama.cpp"):
            raise MissingPackage("llama.cpp is not here")
        return real(self, name)

    def no_file(self, kind):
        raise MissingPackage("llama.cpp is not here")

    real = BackendFactory.open
    monkeypatch.setattr(BackendFactory, "open", missing)
    monkeypatch.setattr(BackendFactory, "file", no_file)
    monkeypatch.setattr(serial_verification, "load_prompts", lambda: short_prompts)
    monkeypatch.setattr(clock, "SETTLE", 0.0)
    first = replace(PLAN.sessions[0], contexts=(8,), repeats=1)
    plan = replace(
        PLAN, sessions=(first, replace(first, backends=SWAPPED[1:3], swept=(), twins=())), ops=(OURS, SHIPPED)
    )
    rows = measure_serial(plan, factory.opened, "quick", factory=factory, layout=layout)
    assert {row["backend"] for row in (*rows.curves, *rows.twins, *rows.sweep, *rows.ops)} == {OURS}
    assert {row["backend"] for row in rows.absent} == {*SWAPPED[1:]} and not rows.dispatch


def test_a_divergence_is_recorded_with_its_certificate(factory, short_prompts, monkeypatch):
    from specdec_core.bench import serial_rows
    from specdec_core.bench.backend_sweep import cases_of

    found, asked = [Divergence(2, 5, 6, 0.5, 0.3, 6), Divergence(4, 7, 8, 1.0, 0.1, 8)], []
    monkeypatch.setattr(serial_rows, "census", lambda *arguments: asked.append(arguments) or found)
    noisy = Noisy(random_logits(factory.opened.target.vocabulary, 1), factory.opened.target.vocabulary, 256)
    cases = cases_of(short_prompts, factory.opened.tokenizer, 0, 1)[:1]
    (row,) = serial_rows.twin_rows(SHIPPED, noisy, factory, cases, 6, 8, ())
    assert not row["identical"] and not row["certified"] and row["divergences"] == 2
    assert (row["index"], row["gap"], row["epsilon"]) == (2, 0.5, 0.3)
    ((target, _, prompt, expected, emitted, rounds, continued),) = asked
    assert target is noisy and prompt == cases[0].tokens
    assert expected == (0,) * 8 and 1 in emitted  # the twin never takes a wide pass
    assert sum((each.emitted for each in rounds), ()) == emitted and continued((0, 0)) == (0,) * 6
    serial_verification.TWIN.validated(row)


class Noisy(TableTarget):
    """Emits token 0 after a pass over one node and token 1 after a wider one, so that a look-up always drafts."""

    def verify(self, state, slots, tokens, forest):
        found = super().verify(state, slots, tokens, forest)
        found.logits[:, 0 if len(tokens) == 1 else 1] += 100
        return found


def test_loops_are_the_serial_twins(monkeypatch):
    monkeypatch.setattr(clock, "SETTLE", 0.0)
    target = Counted(random_logits(11, 1), 11)
    session = Session((OURS,), (1, 5), (4, 6), 2, 60, (3,), (), (OURS,))
    samples = measure_arms({OURS: target}, session)
    assert set(samples) == {(OURS, "verify", c, n) for c in (4, 6) for n in (1, 5)} | {(OURS, "loop", 4, 3)}
    assert target.widths.count(5) == 2 * 3 and target.widths.count(3) == 0  # a call to time it, and two repeats
    assert target.widths.count(1) == 2 * 3 + 3 * 3 + 1  # and one that asks whether a token can be taken back


class Counted(TableTarget):
    def verify(self, state, slots, tokens, forest):
        self.__dict__.setdefault("widths", []).append(len(tokens))
        return super().verify(state, slots, tokens, forest)


class TestPlans:
    def test_every_profile_has_one(self):
        assert set(PLANS) == set(PROFILES)

    @pytest.mark.parametrize("profile", PROFILES)
    def test_what_claims_need_is_in_it(self, profile):
        plan = PLANS[profile]
        first = plan.sessions[0]
        assert {OURS, *SWAPPED} <= set(first.backends) and {1, 7, 9} <= set(first.widths) and first.repeats >= 10
        assert {OURS, SHIPPED} <= set(first.twins) & set(first.swept) & set(plan.ops) and 7 in first.loops
        assert plan.k == 6 and plan.op_repeats >= 10
        assert any(name.endswith("GPU") for session in plan.sessions for name in session.backends)

    def test_the_full_one_measures_every_backend(self):
        assert {name for session in PLANS["full"].sessions for name in session.backends} == set(BACKENDS)

    def test_bad_sessions(self):
        with pytest.raises(ValueError, match=r"unknown backend 'vLLM': expected one of numba float32, "):
            Session(("vLLM",), (1,), (8,), 1, 1)
        with pytest.raises(ValueError, match=r"\['llama.cpp Q4_1'\] are swept or twinned and not among the backends"):
            Session((OURS,), (1,), (8,), 1, 1, swept=(SHIPPED,))
        with pytest.raises(ValueError, match="expected 1 among them"):
            Session((OURS,), (2, 3), (8,), 1, 1)


@pytest.mark.parametrize(("seconds", "repeats"), [(1e9, 9), (0.0, LEAST)])
def test_repeats_fit_the_time_there_is(factory, monkeypatch, seconds, repeats):
    monkeypatch.setattr(clock, "SETTLE", 0.0)
    session = Session((OURS,), (1, 2), (8,), 9, seconds)
    samples = measure_arms({OURS: factory.opened.target}, session)
    assert {len(each) for each in samples.values()} == {repeats}


def test_operations_of_a_foreign_engine(factory):
    target = factory.open("transformers float32")
    with pytest.raises(ValueError, match=r"operations of HF: expected one of our own engines or llama\.cpp"):
        list(op_rows("HF", target, factory.opened.checkpoint, (1,), 8, 1))


class TestFactory:
    def test_every_thread_count_is_the_same(self, factory):
        two = BackendFactory(factory.opened, factory.model, threads=2)
        assert (two.open(OURS).placement.workers, two.open(SHIPPED).threads) == (2, 2)
        assert factory.open(OURS) is factory.opened.target

    @pytest.mark.parametrize("name", [name for name, each in BACKENDS.items() if each.engine == "llama.cpp"])
    def test_llama_cpp_is_opened_as_its_name_says(self, factory, monkeypatch, name):
        seen = []
        monkeypatch.setattr(serial_backends, "LlamaCppTarget", lambda file, options, name: seen.append((file, options)))
        factory.open(name)
        ((file, options),) = seen
        assert file == factory.file(BACKENDS[name].format)
        assert (options.repack, options.gpu_layers) == ("not repacked" not in name, -1 if "GPU" in name else 0)
        assert (options.cache_type, options.threads) == ("float32", 1)

    def test_float32_holds_the_values_of_the_shipped_format(self, factory):
        assert same_values(factory.file("Q4_1"), factory.file("F32"))
        assert not same_values(factory.file("Q4_1"), factory.file("Q4_0"))
        assert not same_values(factory.model, factory.file("F32"))

    def test_a_file_in_the_shipped_format_is_taken_as_it_is(self, factory):
        again = BackendFactory(factory.opened, factory.file("Q4_1"))
        assert again.file("Q4_1") == factory.file("Q4_1")

    @pytest.mark.parametrize("name", ["llama.cpp Q4_1", "MLX 4-bit", "numba float32"])
    def test_references_hold_the_values_that_the_backend_runs_on(self, factory, name):
        from specdec_core.topology import chain, forest

        target = factory.open(name)
        found = []
        for each in (target, factory.reference(name, target)):
            state = each.new_state(1, 16)
            each.prefill(state, np.array([0]), [np.arange(5)])
            found.append(np.asarray(each.verify(state, np.array([0]), np.arange(3), forest([chain(3)])).logits))
        assert np.abs(found[0] - found[1]).max() < 0.1 * np.abs(found[1]).max()
        assert found[1].dtype == np.float64
