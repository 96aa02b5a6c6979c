"""The bench of linear attention on an accelerator, in small: interpreted where there is none."""

from __future__ import annotations

import gc
import itertools
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from specdec_core.__main__ import main
from specdec_core.bench import gdn_device, gdn_device_clock, gdn_device_gate, gdn_device_model, gdn_device_speed
from specdec_core.bench.gdn_device import CODE, FORMS, FULL, MODEL_CODE, TINY, NotExact, bench_gdn, require_device
from specdec_core.bench.gdn_device_clock import Budget, gates_trusted, sample, stopwatch
from specdec_core.bench.gdn_device_gate import DTYPES, Forests, check_device, judged, random_case
from specdec_core.bench.gdn_device_model import GDN_1B3, random_checkpoint, round_arm, state_bytes, time_steps
from specdec_core.bench.gdn_device_speed import Cell, SpeedPlan, arms_of, copies_of, room, time_layers, ways
from specdec_core.bench.gdn_rivals import EagerSequential, EagerSnapshots
from specdec_core.bench.linear_windows import batch_of, in_dtype, random_inputs, random_state
from specdec_core.evidence.linear_device_records import (
    GDN_DEVICE_CHECK,
    GDN_DEVICE_SKIPPED,
    GDN_DEVICE_STEP,
    GDN_DEVICE_TIME,
)
from specdec_core.evidence.records import find_records, read_records
from specdec_core.kernels.gated_delta import checks, reference, triton
from specdec_core.kernels.gated_delta import torch as closed_form
from specdec_core.measure import clock
from specdec_core.models.gdn_config import expected_shapes
from specdec_core.placement import Placement, PlacementError
from specdec_core.targets.gated_delta_net import GatedDeltaNet
from specdec_core.topology import chain, forest, tree
from tests.interpreted import DEVICE

pytest.importorskip("triton", reason="Triton is not installed: pip install -r requirements.txt (Linux)")

pytestmark = pytest.mark.usefixtures("one_thread")

PLACEMENT = Placement("torch", DEVICE.type)
WAYS = ("triton ieee", "triton tf32x3", "closed form", "eager sequential", "eager snapshots")
CPU = torch.device("cpu")
CELL = Cell(1, 4, 4, 2, 3, "tree")
PLAN = TINY.speed


@pytest.fixture(autouse=True)
def no_rest(monkeypatch):
    monkeypatch.setattr(clock, "SETTLE", 0.0)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A tiny run, once: its folder and what it printed."""
    folder, said = tmp_path_factory.mktemp("gdn"), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "SETTLE", 0.0)
        patch.setattr("builtins.print", lambda *each: said.append(" ".join(map(str, each))))
        bench_gdn(PLACEMENT, folder, TINY)
    return folder, said


def rows_of(run, what, schema):
    return read_records(run[0] / f"06_gdn_device_{what}.jsonl", schema)[1]


class TestARun:
    def test_every_form_and_dtype_is_checked(self, run):
        rows = rows_of(run, "checks", GDN_DEVICE_CHECK)
        assert [(row["dtype"], row["form"]) for row in rows] == list(itertools.product(DTYPES, FORMS))
        assert all(row["passed"] and row["commits"] == 6 and row["most_nodes"] == 5 for row in rows)
        assert all(0 < row["state_error"] < 1e-6 for row in rows)
        assert all((row["output_error"] > 1e-4) == (row["dtype"] == "bfloat16") for row in rows)

    def test_every_way_and_phase_of_every_cell_is_timed(self, run):
        rows = rows_of(run, "times", GDN_DEVICE_TIME)
        cells = [("chain", 1), ("chain", 3), ("tree", 3)]
        expected = [(*cell, way, phase) for cell in cells for way in WAYS for phase in ("verify", "commit", "round")]
        found = [(row["shape"], row["n"], row["way"], row["phase"]) for row in rows if row["clock"] != "graph"]
        assert found == expected
        assert all(len(row["seconds"]) == TINY.speed.repeats and row["copies"] == 1 for row in rows)
        assert [row["path"] for row in rows[:: len(WAYS) * 3]] == [1, 2, 2]
        assert {row["batch"] for row in rows} == {2} and rows[0]["clock"] in ("host", "stream")

    def test_every_kernel_and_width_of_the_model_is_timed(self, run):
        rows = rows_of(run, "steps", GDN_DEVICE_STEP)
        assert [(row["kernel"], row["shape"], row["n"], row["path"]) for row in rows] == [
            (kernel, *each) for kernel in FORMS for each in (("chain", 1, 1), ("chain", 3, 2), ("tree", 3, 2))
        ]
        assert all("random weights" in row["model"] and row["dtype"] == "float32" for row in rows)

    def test_nothing_was_left_out_and_all_was_told(self, run):
        assert rows_of(run, "skipped", GDN_DEVICE_SKIPPED) == []
        assert run[1][0] == f"6 checks against the float64 reference passed: {', '.join(FORMS)}"
        assert sum(" µs [" in line for line in run[1]) == len(rows_of(run, "times", GDN_DEVICE_TIME)) + 9
        assert "records in" in run[1][-1]

    def test_records_name_their_code(self, run):
        for schema, code in ((GDN_DEVICE_CHECK, CODE), (GDN_DEVICE_TIME, CODE), (GDN_DEVICE_STEP, MODEL_CODE)):
            (file,) = find_records(schema, folder=run[0])
            assert file.header["code"]["paths"] == sorted(code)
            assert file.header["provenance"]["run"]["profile"] == "quick"
            assert file.accelerator == DEVICE.type


class Forgetting:
    """A form whose commits change nothing."""

    verify = staticmethod(closed_form.verify)

    @staticmethod
    def commit(state, pending, paths):
        return state.clone()

    @classmethod
    def commit_then_verify(cls, state, pending, paths, inputs, shapes):
        return state.clone(), *closed_form.verify(state, inputs, shapes)


class NoNumber(Forgetting):
    @staticmethod
    def verify(state, inputs, shapes):
        outputs, pending = closed_form.verify(state, inputs, shapes)
        return outputs * torch.nan, pending


class OnlyTogether(Forgetting):
    """Right, but for the commit that is delayed."""

    commit = staticmethod(closed_form.commit)


class TestTheGate:
    @pytest.mark.parametrize("form", [Forgetting, NoNumber, OnlyTogether])
    def test_a_form_that_is_not_exact_stops_the_run_before_any_clock(self, form, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr(gdn_device, "ways", lambda: {"closed form": form})
        monkeypatch.setattr(gdn_device, "time_layers", lambda *_: pytest.fail("timed"))
        with pytest.raises(NotExact, match=r"2 of 2 checks against the float64 reference failed, of closed form: noth"):
            bench_gdn(PLACEMENT, tmp_path, TINY)
        assert [path.name for path in tmp_path.iterdir()] == ["06_gdn_device_checks.jsonl"]
        rows = read_records(tmp_path / "06_gdn_device_checks.jsonl", GDN_DEVICE_CHECK)[1]
        assert not any(row["passed"] for row in rows)
        assert (rows[0]["output_error"] is None) == (form is NoNumber)
        assert capsys.readouterr().out.count("FAILED form closed form, dtype ") == 2

    def test_the_command_ends_with_a_status_that_says_so(self, monkeypatch, tmp_path, capsys):
        monkeypatch.setattr(gdn_device, "ways", lambda: {"closed form": Forgetting})
        assert main(["bench", "gdn", "--device", DEVICE.type, "--out", str(tmp_path)]) == 2
        assert "NotExact: 2 of 2 checks" in capsys.readouterr().err

    def test_cases_have_the_widest_row_and_one_that_accepts_nothing(self):
        for seed in range(4):
            case = random_case(seed, Forests(1, 4, 4, nodes=6, dtype="bfloat16"))
            assert len(case.shapes.trees[0]) == 6 and len(case.paths) == 3
            assert case.paths[0].tolist() == list(range(6)) and not len(case.paths[-1])
            assert torch.equal(case.first.k, case.first.k.bfloat16().double())
        gates = torch.cat([random_case(seed, Forests(1, 4, 4, nodes=16)).first.log_decay for seed in (0, 1)])
        assert (gates == -torch.inf).any() and (gates == 0).any()

    def test_outputs_are_judged_after_the_second_verify_too(self):
        class Late(Forgetting):
            commit = staticmethod(closed_form.commit)

            @staticmethod
            def commit_then_verify(state, pending, paths, inputs, shapes):
                kept, outputs, last = closed_form.commit_then_verify(state, pending, paths, inputs, shapes)
                return kept, outputs + 1, last

        row = judged(next(check_device(TINY.gate, {"closed form": Late}, CPU)))
        assert not row["passed"] and row["state_error"] < 1e-5

    def test_each_form_has_a_tolerance_and_bfloat16_outputs_more(self):
        assert set(gdn_device_gate.TOLERANCE) == set(FORMS) and set(ways()) == set(WAYS)
        rows = [judged(row) for row in check_device(TINY.gate, {"closed form": closed_form}, CPU)]
        assert rows[0]["output_tolerance"] == rows[0]["state_tolerance"] == rows[1]["state_tolerance"] == 1e-5
        assert rows[1]["output_tolerance"] == 1e-5 + 2**-7


class TestRivals:
    @pytest.mark.parametrize("rival", [EagerSequential, EagerSnapshots])
    @pytest.mark.parametrize("shape", [chain(1), chain(4), tree((-1, 0, 0, 1, 1, 2))])
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    def test_they_do_the_same(self, rival, shape, dtype):
        rng = np.random.default_rng(len(shape))
        shapes = batch_of(shape, 2)
        wide = random_inputs(rng, len(shapes.rows), 2, 3, 5, adverse=True)
        inputs = in_dtype(wide, torch.float32)
        inputs = type(inputs)(**vars(inputs) | {name: getattr(inputs, name).to(dtype) for name in "qkv"})
        state = random_state(rng, 2, 2, 3, 5)
        expected, snapshots = reference.verify(state, in_dtype(inputs, torch.float64), shapes)
        found, pending = rival().verify(state.float(), inputs, shapes)
        assert found.dtype == dtype
        np.testing.assert_allclose(found.float(), expected, atol=1e-5 if dtype == torch.float32 else 0.05)
        for node in range(-1, len(shape)):
            paths = [shape.path(node) if node >= 0 else np.empty(0, np.int64)] * 2
            kept = rival().commit(state.float(), pending, paths)
            np.testing.assert_allclose(kept, reference.commit(state, snapshots, paths), atol=1e-5)

    def test_rows_of_several_shapes_or_paths_are_refused(self):
        shapes = forest([chain(2), tree((-1, 0, 0))])
        rng = np.random.default_rng(0)
        inputs = in_dtype(random_inputs(rng, 5, 1, 2, 2, adverse=False), torch.float32)
        for rival in (EagerSequential(), EagerSnapshots()):
            with pytest.raises(ValueError, match="2 shapes among 2 rows: the eager rivals expect one for all"):
                rival.verify(torch.zeros(2, 1, 2, 2), inputs, shapes)
            same = batch_of(chain(2), 2)
            four = type(inputs)(**{name: each[:4] for name, each in vars(inputs).items()})
            _, pending = rival.verify(torch.zeros(2, 1, 2, 2), four, same)
            with pytest.raises(ValueError, match="paths differ among the rows"):
                rival.commit(torch.zeros(2, 1, 2, 2), pending, [np.arange(2), np.arange(1)])


class Watched:
    """A budget of 100 seconds of which so much is left, whenever it is asked."""

    seconds = 100.0

    def __init__(self, *left):
        self._left = list(left)

    @property
    def left(self):
        return self._left.pop(0)


class TestCells:
    def test_the_smallest_come_first_and_every_one_is_there(self):
        cells = FULL.speed.cells()
        work = [cell.work for cell in cells]
        assert work == sorted(work) and len(set(cells)) == len(cells) == 2 * 5 * (6 + 5)
        assert all(cell.shape == "chain" for cell in cells if cell.n <= 2)
        assert cells[-1] == Cell(8, 256, 256, 256, 64, cells[-1].shape)
        assert {(cell.batch, cell.n) for cell in cells} >= {(1, 1), (256, 1), (1, 64), (256, 64)}

    def test_states_take_turns_until_they_fill_what_they_shall(self):
        plan = SpeedPlan((), (), (), 1, spread=1000, copies=3)
        sizes = {Cell(1, 1, 125, 2, 1, "chain"): 1, Cell(1, 1, 124, 2, 1, "chain"): 2, Cell(1, 1, 1, 1, 1, "chain"): 3}
        assert {cell: copies_of(cell, plan) for cell in sizes} == sizes

    def test_cells_for_which_there_is_no_time_are_left_out_and_named(self, monkeypatch):
        told = []
        monkeypatch.setattr(gdn_device_speed, "arms_of", lambda cell, *_: {("way", "verify"): lambda: None})

        # At the start; after compiling; after sampling: the first cell took two seconds.
        watched = Watched(90.0, 88.0, 86.0, 86.0)
        plan = SpeedPlan(((1, 4, 4),), (1, 1000), (1,), repeats=2)
        rows = list(time_layers(plan, CPU, ("host", lambda arm: 0.5), watched, lambda *each: told.append(each)))
        assert [row["batch"] for row in rows] == [1]
        assert told == [(str(Cell(1, 4, 4, 1000, 1, "chain")), "86 s left of 100, about 2000 needed")]
        np.testing.assert_array_equal(rows[0]["seconds"], [0.5 / 8] * 2)

    def test_no_time_at_all_leaves_everything_out(self):
        told = []
        assert list(time_layers(PLAN, CPU, ("host", lambda arm: 1.0), Budget(-1.0), lambda *e: told.append(e))) == []
        assert len(told) == 3 and "0 s left of -1" in told[0][1]

    def test_a_way_for_whose_states_there_is_no_room_is_left_out(self, monkeypatch):
        told = []
        monkeypatch.setattr(gdn_device_speed, "room", lambda device: CELL.state_bytes * 8.0)
        arms = arms_of(CELL, PLAN, CPU, lambda *each: told.append(each))
        assert {way for way, _ in arms} == set(WAYS) - {"eager snapshots"}
        assert told == [(f"eager snapshots: {CELL}", "0.0 GiB of states, 0.0 free")]

    def test_memory_that_runs_out_all_the_same_ends_only_that_way(self, monkeypatch):
        told = []

        def fail(*_):
            raise torch.OutOfMemoryError("out of memory\nby far")

        monkeypatch.setattr(EagerSnapshots, "commit", fail)
        arms = arms_of(CELL, PLAN, CPU, lambda *each: told.append(each))
        assert {way for way, _ in arms} == set(WAYS) - {"eager snapshots"}
        assert told == [(f"eager snapshots: {CELL}", "out of memory")]

    def test_room_is_what_is_free_and_what_torch_keeps_ready(self, monkeypatch):
        assert room(CPU) == float("inf")
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 70)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
        assert room(torch.device("cuda")) == pytest.approx(0.9 * 150)


class TestClocks:
    def test_ways_take_turns_in_random_order_and_each_is_timed_as_often(self):
        order = []
        arms = {name: lambda name=name: order.append(name) for name in "abc"}
        now = itertools.count(1)

        def watch(arm):
            arm()
            return float(next(now))

        seconds = sample(arms, 20, watch, seed=3)
        assert sorted(np.concatenate(list(seconds.values()))) == list(range(1, 61))
        turns = [tuple(order[at : at + 3]) for at in range(0, 60, 3)]
        assert all(sorted(turn) == list("abc") for turn in turns) and len(set(turns)) > 3
        assert [order[int(second) - 1] for second in seconds["b"]] == ["b"] * 20

    def test_a_stream_is_timed_by_its_events(self, monkeypatch):
        log = []

        class Event:
            def __init__(self, enable_timing):
                assert enable_timing

            def record(self):
                log.append("record")

            def synchronize(self):
                log.append("wait")

            def elapsed_time(self, end):
                assert self is not end
                return 250.0  # milliseconds

        monkeypatch.setattr(torch.cuda, "Event", Event)
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("idle"))
        name, watch = stopwatch(torch.device("cuda"))
        assert name == "stream" and watch(lambda: log.append("arm")) == 0.25
        assert log == ["idle", "record", "arm", "record", "wait"]
        assert stopwatch(CPU) == ("host", clock.once)

    def test_on_a_stream_ways_are_timed_as_graphs_too_but_those_that_wait(self, monkeypatch):
        told = []

        def graphed(arm, pool):
            if arm is bad:
                raise RuntimeError("not permitted\nwhile capturing")
            return arm

        def bad():
            pass

        monkeypatch.setattr(gdn_device_speed, "graphed", graphed)
        monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
        arms = {("a", "verify"): lambda: None, ("b", "verify"): bad}
        monkeypatch.setattr(gdn_device_speed, "arms_of", lambda *_: arms)
        plan = SpeedPlan(((1, 4, 4),), (1,), (1,), repeats=1)
        rows = list(time_layers(plan, CPU, ("stream", lambda arm: 1.0), Budget(9e9), lambda *each: told.append(each)))
        assert [(row["way"], row["clock"]) for row in rows] == [("a", "stream"), ("b", "stream"), ("a", "graph")]
        assert told == [("b, verify as a graph: 1 × 4 × 4, batch 1, n = 1, chain", "not permitted")]

    def test_a_graph_is_made_after_a_run_aside_and_without_a_look_at_gates(self, monkeypatch):
        log = []
        graph = SimpleNamespace(
            replay="replay",
            capture_begin=lambda pool: log.append(f"begin in {pool}"),
            capture_end=lambda: log.append("end"),
        )
        monkeypatch.setattr(torch.cuda, "Stream", lambda: "aside")
        monkeypatch.setattr(torch.cuda, "stream", lambda each: log.append(each) or nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda: log.append("idle"))
        monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
        looking = checks.check_log_decay
        found = gdn_device_clock.graphed(lambda: log.append((checks.check_log_decay is looking, gc.isenabled())), "p")
        assert found == "replay" and checks.check_log_decay is looking and gc.isenabled()
        assert log == ["aside", "idle", (False, False), "idle", "begin in p", (False, False), "end"]

        def waits():
            log.append("waits")
            if log.count("waits") == 2:
                raise RuntimeError

        with pytest.raises(RuntimeError):
            gdn_device_clock.graphed(waits, "p")
        assert log[-1] == "end" and checks.check_log_decay is looking and gc.isenabled()

    def test_gates_are_looked_at_again_whatever_happened(self):
        growing = torch.ones(1)
        with pytest.raises(KeyError), gates_trusted():
            checks.check_log_decay(growing)
            raise KeyError
        with pytest.raises(ValueError, match="log_decay"):
            checks.check_log_decay(growing)

    def test_a_budget_runs_out(self, monkeypatch):
        now = [100.0]
        monkeypatch.setattr(gdn_device_clock, "monotonic", lambda: now[0])
        budget = Budget(30.0)
        budget._start = 100.0
        now[0] = 112.0
        assert budget.left == 18.0


class TestTheModel:
    config = replace(TINY.model.config, context=12)

    def test_it_has_the_published_sizes(self):
        shapes = expected_shapes(GDN_1B3)
        assert 1.2e9 < sum(int(np.prod(shape)) for shape in shapes.values()) < 1.5e9
        assert state_bytes(GDN_1B3) == 48 * 2**20

    def test_weights_are_random_and_the_same_for_a_seed(self):
        one, same = (random_checkpoint(self.config, CPU, torch.bfloat16) for _ in range(2))
        other = random_checkpoint(self.config, CPU, torch.bfloat16, seed=1)
        assert {name: tuple(each.shape) for name, each in one.weights.items()} == expected_shapes(self.config)
        assert one.dtype == torch.bfloat16 and one.fingerprint != other.fingerprint
        name = "model.layers.0.mlp.up_proj.weight"
        assert torch.equal(one.weights[name], same.weights[name])
        assert not torch.equal(one.weights[name], other.weights[name])

    def test_the_triton_form_in_the_model_scores_as_the_closed_form_does(self):
        checkpoint = random_checkpoint(self.config, DEVICE, torch.float32)
        shapes, slots = forest([tree((-1, 0, 0)), chain(2)]), np.arange(2)
        logits = []
        for kernel in (ways()["triton ieee"], closed_form):
            target = GatedDeltaNet(checkpoint, PLACEMENT, kernel=kernel)
            state = target.new_state(2, 12)
            for tokens in ([1, 2, 3, 4, 5], [5, 4, 3, 2, 1]):  # the second pass takes the first's commit along
                found = target.verify(state, slots, np.array(tokens), shapes)
                target.commit(state, found, [np.array([0, 2]), np.array([0, 1])])
                logits.append(found.logits.cpu())
        assert torch.allclose(logits[0], logits[2], atol=1e-4) and torch.allclose(logits[1], logits[3], atol=1e-4)
        assert not torch.allclose(logits[0], logits[1], atol=1e-2) and logits[0].std() > 0.1

    def test_rounds_go_on_and_begin_anew_when_the_context_is_full(self):
        target = GatedDeltaNet(random_checkpoint(self.config, CPU, torch.float32), Placement("torch"))
        lengths = []
        real = target.commit
        target.commit = lambda state, *rest: (real(state, *rest), lengths.append(state.lengths.tolist()))
        arm = round_arm(target, chain(4), 2, replace(TINY.model, config=self.config, path=3))
        for _ in range(4):
            arm()
        assert lengths == [[3, 3], [6, 6], [9, 9], [3, 3]]

    def test_batches_for_which_there_is_no_time_are_left_out_and_named(self):
        told = []

        plan, watched = replace(TINY.model, batches=(1, 2), widths=(), repeats=1), Watched(50.0, 20.0, 20.0)
        rows = time_steps(
            plan, Placement("torch"), {"closed form": closed_form}, ("host", lambda arm: 1.0), watched,
            lambda *each: told.append(each),
        )  # fmt: skip
        assert [row["batch"] for row in rows] == [1]
        assert told == [("a tiny decoder, random weights, batch 2", "20 s left, about 30 needed")]

    def test_batches_for_whose_states_there_is_no_room_are_left_out_and_named(self, monkeypatch):
        told = []
        plan = replace(TINY.model, batches=(1, 2), widths=(3,), repeats=1)
        # One kernel, three shapes, a state and the one that replaces it.
        monkeypatch.setattr(gdn_device_model, "room", lambda device: 6 * state_bytes(plan.config))
        rows = time_steps(
            plan, Placement("torch"), {"closed form": closed_form}, ("host", lambda arm: 1.0), Budget(9e9),
            lambda *each: told.append(each),
        )  # fmt: skip
        assert [row["batch"] for row in rows] == [1] * 3
        assert told == [(f"{plan.name}, batch 2", "0.0 GiB of states needed, and not free")]


class TestTheCommand:
    def test_it_hands_on_device_and_folder(self, monkeypatch, tmp_path):
        seen = []
        monkeypatch.setattr(gdn_device, "bench_gdn", lambda *given: seen.append(given))
        assert main(["bench", "gdn", "--out", str(tmp_path), "--engine", "torch", "--dtype", "bfloat16"]) == 0
        (placement, out), *_ = seen
        assert (placement.device, placement.dtype, out) == ("cpu", "bfloat16", tmp_path)

    def test_a_full_run_is_for_cuda_and_takes_no_five_minutes(self):
        assert FULL.seconds < 300 and FULL.for_model < FULL.seconds / 2
        assert FULL.speed.batches[0] == 1 and FULL.speed.batches[-1] == 256
        assert FULL.speed.nodes[0] == 1 and FULL.speed.nodes[-1] == 64
        assert {(8, 128, 128), (8, 256, 256)} == set(FULL.speed.sizes)

    def test_a_full_run_checks_tiles_of_every_width_and_both_dtypes_of_the_model(self, monkeypatch):
        monkeypatch.setattr(triton, "interpreted", lambda: False)
        checked = {(each.values, triton._value_block(each.values, each.rows * each.heads)) for each in FULL.gate}
        timed = {
            (cell.values, triton._value_block(cell.values, cell.batch * cell.heads)) for cell in FULL.speed.cells()
        }
        assert timed <= checked and {each.dtype for each in FULL.gate} == set(DTYPES)
        assert max(each.nodes for each in FULL.gate) == max(FULL.speed.nodes)

    def test_the_cpu_without_the_interpreter_is_refused(self, monkeypatch, tmp_path):
        monkeypatch.setattr(gdn_device, "interpreted", lambda: False)
        with pytest.raises(PlacementError, match=r"device cpu: bench gdn runs Triton .*--device cuda.*INTERPRET=1"):
            bench_gdn(Placement("torch"), tmp_path)
        with pytest.raises(PlacementError, match="device mps"):
            require_device(torch.device("mps"))
        assert not list(tmp_path.iterdir())
