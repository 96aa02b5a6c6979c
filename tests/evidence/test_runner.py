"""A reproduction runs once what has to run, goes on where it was interrupted, and never beside another one."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from specdec_core.evidence import runner
from specdec_core.evidence.execute import ExecutionError
from specdec_core.evidence.layout import Layout, package_root
from specdec_core.evidence.notebooks import NotebookError, read_notebook
from specdec_core.evidence.runner import exclusive_run, reproduce, run_key

PARAMETERS = 'profile = "quick"\nprompts = 4'

MEASURE = """
from pathlib import Path
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter
from specdec_core.evidence.schemas import Schema
layout = Layout(Path("..").resolve())
with RecordWriter(layout.records(profile), "00_trial", Schema("trial", 1, {"n": int}), fingerprint(profile),
                  code=["specdec_core"], layout=layout) as writer:
    for n in range(prompts):
        writer.append({"n": n})
print(writer.count)
"""


@pytest.fixture
def pretend(monkeypatch):
    """Executes notebooks in no time: copies them, writes a record; returns the names in the order of running."""
    ran: list[str] = []

    def run_notebook(source: Path, executed: Path, parameters, timeout, layout: Layout) -> None:
        if "broken" in source.read_text():
            raise ExecutionError(f"{source.name}, cell [2]: broken")
        ran.append(source.stem)
        executed.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source, executed)
        profile = parameters.get("profile", "quick")
        record = layout.records(profile) / f"{source.stem}.jsonl"
        record.parent.mkdir(parents=True, exist_ok=True)
        cells = json.loads(source.read_text())["cells"]
        record.write_text(json.dumps(parameters) + cells[1]["source"] + "\n")

    monkeypatch.setattr(runner, "run_notebook", run_notebook)
    monkeypatch.setattr(runner, "write_report", lambda verdicts, profile, layout: layout.build / "report.html")
    monkeypatch.setattr(runner, "evaluate_all", lambda layout: [])
    return ran


@pytest.fixture
def three(layout, write_notebook):
    for name in ("00_setup", "02_sweep", "07_summary"):
        write_notebook(name, PARAMETERS, "x = 1")
    return layout


def test_from_notebooks_to_report_and_back(layout, write_notebook, capfd):
    """The whole of it once with real kernels: measured, written back, reported, and not repeated."""
    write_notebook("00_setup", PARAMETERS, MEASURE)
    first = reproduce(write_back=True, layout=layout)
    assert [run.ran for run in first.runs] == [True]
    records = layout.records("quick") / "00_trial.jsonl"
    assert len(records.read_text().splitlines()) == 5
    committed = json.loads((layout.notebooks / "00_setup.ipynb").read_text())
    assert [cell["execution_count"] for cell in committed["cells"]] == [1, 2]
    assert committed["cells"][1]["outputs"][0]["text"] == ["4\n"] and "papermill" not in json.dumps(committed)
    report = first.report.read_text()
    assert "html/quick/00_setup.html" in report and (layout.build / "html" / "quick" / "00_setup.html").is_file()
    assert "00_trial.jsonl" in report
    start = time.monotonic()
    assert [run.ran for run in reproduce(layout=layout).runs] == [False]
    assert time.monotonic() - start < 2
    printed = capfd.readouterr().out
    assert "B1  NOT YET MEASURED" in printed and "report: build/report.html" in printed


def test_a_second_call_repeats_no_work(three, pretend):
    assert [run.ran for run in reproduce(layout=three).runs] == [True, True, True]
    again = reproduce(layout=three)
    assert [run.ran for run in again.runs] == [False, False, False]
    assert pretend == ["00_setup", "02_sweep", "07_summary"]
    assert again.runs[0].executed == three.executed("quick") / "00_setup.ipynb"


def test_an_interrupted_run_goes_on_at_the_first_unfinished_notebook(three, write_notebook, pretend):
    good = (three.notebooks / "02_sweep.ipynb").read_text()
    write_notebook("02_sweep", PARAMETERS, "broken")
    with pytest.raises(ExecutionError, match="broken"):
        reproduce(layout=three)
    assert pretend == ["00_setup"]
    (three.notebooks / "02_sweep.ipynb").write_text(good)
    reproduce(layout=three)
    assert pretend == ["00_setup", "02_sweep", "07_summary"]


def test_a_failed_rerun_is_not_taken_for_done(three, write_notebook, pretend):
    reproduce(layout=three, only=["02"])
    good = (three.notebooks / "02_sweep.ipynb").read_text()
    write_notebook("02_sweep", PARAMETERS, "broken")
    with pytest.raises(ExecutionError):
        reproduce(layout=three, only=["02"])
    (three.notebooks / "02_sweep.ipynb").write_text(good)
    assert [run.ran for run in reproduce(layout=three, only=["02"]).runs] == [True]


@pytest.mark.parametrize(
    ("touch", "expected"),
    [
        ("source", ["02_sweep", "07_summary"]),  # the summary reads the sweep's records, which are now others
        ("package", ["00_setup", "02_sweep", "07_summary"]),
        ("data", ["00_setup", "02_sweep", "07_summary"]),
        ("earlier records", ["02_sweep", "07_summary"]),
        ("kept records", ["07_summary"]),
        ("own records", ["02_sweep"]),  # which makes them what they were, so that the summary still holds
        ("executed copy", ["02_sweep"]),
        ("stamp", ["02_sweep"]),
        ("outputs", []),
        ("figure", []),
    ],
)
def test_what_makes_a_notebook_run_again(three, write_notebook, pretend, touch, expected):
    def figure() -> Path:
        three.figures.mkdir(exist_ok=True)
        return three.figures / "02_x.png"

    figure().write_text("drawn")
    reproduce(layout=three)
    pretend.clear()
    records = three.records("quick")
    match touch:
        case "source":
            write_notebook("02_sweep", PARAMETERS, "x = 2")
        case "package":
            (three.package / "measured.py").write_text("ANSWER = 2\n")
        case "data":
            (three.data / "prompts").mkdir(parents=True)
            (three.data / "prompts" / "math.jsonl").write_text("{}\n")
        case "earlier records":
            (records / "00_more.jsonl").write_text("{}\n")
        case "kept records":
            (three.kept_records / "there-8c").mkdir(parents=True)
            (three.kept_records / "there-8c" / "05_x.jsonl").write_text("{}\n")
        case "own records":
            (records / "02_sweep.jsonl").write_text("spoilt\n")
        case "executed copy":
            (three.executed("quick") / "02_sweep.ipynb").unlink()
        case "stamp":
            (three.executed("quick") / "02_sweep.done.json").write_text("{")
        case "outputs":
            path = three.notebooks / "02_sweep.ipynb"
            content = json.loads(path.read_text())
            content["cells"][1]["execution_count"] = 5
            path.write_text(json.dumps(content))
        case "figure":
            figure().write_text("drawn again by a replay")
    reproduce(layout=three)
    assert pretend == expected


def test_hardware_software_parameters_and_profile_are_in_the_key(three, monkeypatch):
    notebook = read_notebook(three.notebooks / "02_sweep.ipynb")
    keys = {run_key(notebook, {}, "quick", three), run_key(notebook, {"prompts": 5}, "quick", three)}
    keys.add(run_key(notebook, {}, "full", three))
    from specdec_core.evidence import provenance

    monkeypatch.setattr(provenance, "cpu_model", lambda: "Other CPU")
    keys.add(run_key(notebook, {}, "quick", three))
    monkeypatch.setattr(provenance, "installed_versions", lambda: {})
    keys.add(run_key(notebook, {}, "quick", three))
    assert len(keys) == 5


def test_profiles_do_not_share_their_runs(three, pretend):
    reproduce("quick", ["00"], layout=three)
    full = reproduce("full", ["00"], {"prompts": 7}, layout=three)
    assert full.runs[0].ran and full.runs[0].executed == three.executed("full") / "00_setup.ipynb"
    record = (three.records("full") / "00_setup.jsonl").read_text()
    assert json.loads(record.partition("x")[0]) == {"profile": "full", "prompts": 7}


def test_everything_is_checked_before_anything_runs(three, pretend):
    for arguments, error, message in (
        ({"profile": "fast"}, ValueError, "unknown profile 'fast'"),
        ({"only": ["09"]}, NotebookError, "unknown notebook '09'"),
        ({"parameters": {"promts": 1}}, NotebookError, "unknown parameter 'promts'"),
        ({"parameters": {"prompts": "x"}}, NotebookError, "got 'x'"),
        ({"profile": "full", "write_back": True}, NotebookError, "only a quick run"),
        ({"parameters": {"prompts": 1}, "write_back": True}, NotebookError, "only a quick run"),
    ):
        with pytest.raises(error, match=message):
            reproduce(layout=three, **arguments)
    assert pretend == [] and not three.build.exists()


def test_of_two_runs_at_once_the_second_waits_or_says_so(layout):
    hold = subprocess.Popen(
        [sys.executable, "-c", """if True:
            import sys
            from pathlib import Path
            from specdec_core.evidence.layout import Layout
            from specdec_core.evidence.runner import exclusive_run
            with exclusive_run(Layout(Path(sys.argv[1]))):
                print("held", flush=True)
                sys.stdin.readline()
        """, str(layout.root)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=package_root(),
    )  # fmt: skip
    assert hold.stdin is not None and hold.stdout is not None
    hold.stdout.readline()
    with (
        pytest.raises(ExecutionError, match=rf"running already \(process {hold.pid}\): wait for it"),
        exclusive_run(layout, wait=False),
    ):
        pass
    waiting = subprocess.Popen(
        [sys.executable, "-u", "-c", """if True:
            import sys
            from pathlib import Path
            from specdec_core.evidence.layout import Layout
            from specdec_core.evidence.runner import exclusive_run
            with exclusive_run(Layout(Path(sys.argv[1]))):
                print("mine now")
        """, str(layout.root)],
        stdout=subprocess.PIPE, text=True, cwd=package_root(),
    )  # fmt: skip
    assert waiting.stdout is not None
    assert f"running already (process {hold.pid}); waiting" in waiting.stdout.readline()
    hold.communicate("\n")
    assert waiting.communicate()[0] == "mine now\n"


def test_a_killed_run_leaves_no_lock(layout):
    hold = subprocess.Popen(
        [sys.executable, "-c", """if True:
            import sys, os, signal
            from pathlib import Path
            from specdec_core.evidence.layout import Layout
            from specdec_core.evidence.runner import exclusive_run
            with exclusive_run(Layout(Path(sys.argv[1]))):
                os.kill(os.getpid(), signal.SIGKILL)
        """, str(layout.root)],
        cwd=package_root(),
    )  # fmt: skip
    hold.wait()
    with exclusive_run(layout, wait=False):
        pass
