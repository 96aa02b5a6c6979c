"""One notebook in its own process: it ends well, fails in words, dies in words, or is stopped at its deadline."""

from __future__ import annotations

import json
import os
import sys
import time

import pytest

from specdec_core.evidence.execute import ExecutionError, run_notebook, write_kernel_spec

PARAMETERS = 'profile = "quick"\nprompts = 4'


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    with open(f"/proc/{pid}/stat") as stat:
        return stat.read().rsplit(")", 1)[1].split()[0] != "Z"


def test_a_failing_cell_is_named_and_its_copy_kept(layout, write_notebook):
    source = write_notebook(
        "02_{sweep}",  # papermill would take the braces for a field to fill in
        PARAMETERS,
        "import sys, os\nprint(prompts, profile, sys.executable, os.getcwd())",
        "raise KeyError('no such thing')",
        "print('never')",
    )
    executed = layout.executed("full") / source.name
    with pytest.raises(ExecutionError, match=r"02_\{sweep\}\.ipynb, cell \[4\]: KeyError: 'no such thing'"):
        run_notebook(source, executed, {"prompts": 9}, 60, layout)
    cells = json.loads(executed.read_text())["cells"]
    printed = "".join(text for cell in cells for output in cell.get("outputs", []) for text in output.get("text", []))
    assert printed == f"9 quick {sys.executable} {layout.notebooks}\n"


def test_a_dead_kernel_is_explained(layout, write_notebook):
    source = write_notebook("02_sweep", PARAMETERS, "import os, signal\nos.kill(os.getpid(), signal.SIGKILL)")
    with pytest.raises(ExecutionError, match=r"the kernel of 02_sweep\.ipynb died .*ran out of memory"):
        run_notebook(source, layout.executed("quick") / source.name, {}, 60, layout)


def test_a_hanging_notebook_is_stopped_with_its_kernel(layout, write_notebook):
    note = layout.root / "pid"
    source = write_notebook(
        "02_sweep",
        PARAMETERS,
        f"import os, pathlib, re\npathlib.Path({str(note)!r}).write_text(str(os.getpid()))\n"
        "re.match('(a+)+b', 'a' * 64)",  # years, without ever letting another thread of the kernel run
    )
    for timeout in (6, 20, 60):  # a busy machine may need longer to start the kernel at all
        with pytest.raises(ExecutionError, match=f"did not end within {timeout} s and was stopped"):
            run_notebook(source, layout.executed("quick") / source.name, {}, timeout, layout)
        if note.is_file():
            break
    deadline = time.monotonic() + 5
    while alive(int(note.read_text())) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not alive(int(note.read_text()))


def test_the_kernel_is_this_interpreter(layout):
    data = write_kernel_spec(layout)
    spec = layout.build / "jupyter" / "kernels" / "python3" / "kernel.json"
    assert data == str(layout.build / "jupyter")
    assert json.loads(spec.read_text())["argv"][0] == sys.executable
    spec.write_text("{}")
    write_kernel_spec(layout)
    assert json.loads(spec.read_text())["argv"][0] == sys.executable
