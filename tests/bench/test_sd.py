import pytest

from specdec_core.bench import BENCHES, sd
from specdec_core.bench.conformance import TOLERANCE, ConformanceError
from specdec_core.bench.engine import ENGINE
from specdec_core.bench.sources import INT8_PASS
from specdec_core.evidence.evaluate import judge
from specdec_core.evidence.lossless_records import GREEDY
from specdec_core.evidence.records import find_records, read_records
from specdec_core.evidence.sweep_records import CEILING, COST_CURVE, SWEEP, pair_up
from specdec_core.evidence.verdicts import MEASURED
from specdec_core.placement import Placement

pytestmark = pytest.mark.usefixtures("one_thread")

SCHEMAS = {"curves": COST_CURVE, "ceilings": CEILING, "engine": ENGINE, "sweep": SWEEP, "greedy": GREEDY}


def shorten(patch, short_prompts):
    for name, value in {"CONTEXTS": (8, 20), "WIDTHS": (1, 2, 6), "KS": (2, 3)}.items():
        patch.setattr(sd, name, value)
    patch.setattr(sd, "load_prompts", lambda: short_prompts[1::2])


@pytest.fixture(scope="module")
def out(tiny_folder, short_prompts, small_ceilings_of_module, tmp_path_factory):
    """Where the bench left its records, run as the command line runs it."""
    folder = tmp_path_factory.mktemp("out")
    with pytest.MonkeyPatch.context() as patch:
        shorten(patch, short_prompts)
        BENCHES["sd"](str(tiny_folder), Placement("numba", threads=1), folder)
    return folder


def rows_of(out, what):
    return read_records(out / f"bench_sd_{what}.jsonl", SCHEMAS[what])[1]


@pytest.mark.parametrize("what", SCHEMAS)
def test_every_part_is_recorded_and_found(out, what):
    assert rows_of(out, what)
    assert [file.path.name for file in find_records(SCHEMAS[what], folder=out)] == [f"bench_sd_{what}.jsonl"]


def test_nothing_unfinished_is_left(out):
    assert sorted(path.name for path in out.iterdir()) == sorted(f"bench_sd_{what}.jsonl" for what in SCHEMAS)


def test_greedy_output_agrees_on_every_prompt(out):
    rows = rows_of(out, "greedy")
    assert len(rows) == 2 * 6 and all(row["identical"] for row in rows)


def test_the_sweep_pairs_up_and_can_be_judged(out):
    rows = rows_of(out, "sweep")
    assert {cell.K for cell in pair_up(rows)} == {2, 3} and len({row["configuration"] for row in rows}) == 2
    assert all(judge(id, rows).verdict in MEASURED for id in ("B1", "B2", "B3", "B4"))


@pytest.mark.parametrize(("engine", "dtype"), [("torch", "float64"), ("numba", "int8")])
def test_provenance_is_what_was_asked_for(
    tiny_folder, short_prompts, small_ceilings, tmp_path, monkeypatch, capsys, engine, dtype
):
    shorten(monkeypatch, short_prompts[:2])
    monkeypatch.setitem(TOLERANCE, "int8", 0.5)  # a random model of three layers amplifies rounding
    sd.bench_sd(str(tiny_folder), Placement(engine, dtype=dtype, threads=1), tmp_path)
    header, _ = read_records(tmp_path / "bench_sd_sweep.jsonl")
    run = header["provenance"]["run"]
    assert (run["threads"], run["dtype"]) == (1, dtype)
    assert set(INT8_PASS).isdisjoint(header["code"]["paths"]) == (dtype != "int8")
    # Demands on the compiled engine are of it alone.
    assert (tmp_path / "bench_sd_engine.jsonl").exists() == (engine == "numba")
    printed = capsys.readouterr().out
    assert "2 outputs, 0 differ, 0 of them uncertified" in printed and "peak memory" in printed


def test_nothing_is_timed_while_logits_are_wrong(tiny_folder, tmp_path, monkeypatch):
    monkeypatch.setitem(TOLERANCE, "float32", 1e-12)
    with pytest.raises(ConformanceError, match="no timing is reported while this is so"):
        sd.bench_sd(str(tiny_folder), Placement("torch"), tmp_path)
    assert not list(tmp_path.iterdir())
