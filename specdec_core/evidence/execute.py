"""Executes one notebook in a process of its own, so that it can be given a deadline and its death be explained.

`python -m specdec_core.evidence.execute` reads a job (JSON) from standard input and prints what happened (JSON) as
its last line; `run_notebook` is the caller's side.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from specdec_core.evidence.layout import Layout, package_root


class ExecutionError(RuntimeError):
    """A notebook did not run to its end; the message says where, why and what to do."""


def run_notebook(source: Path, executed: Path, parameters: Mapping[str, Any], timeout: float, layout: Layout) -> None:
    """Execute `source` by papermill with the current interpreter and leave the executed copy at `executed`.

    The copy is there after a failure too, with the error in it; what the run printed beside it is in NAME.log.
    ExecutionError if a cell fails, the kernel dies, or `timeout` seconds pass.
    """
    executed.parent.mkdir(parents=True, exist_ok=True)
    job = {
        "source": str(source),
        "executed": str(executed),
        "parameters": dict(parameters),
        "folder": str(source.parent),  # where nbval runs it too
    }
    environment = os.environ | {
        "JUPYTER_PATH": os.pathsep.join(_given(write_kernel_spec(layout), os.environ.get("JUPYTER_PATH"))),
        "PYTHONPATH": os.pathsep.join(_given(str(package_root()), os.environ.get("PYTHONPATH"))),
        "PYDEVD_DISABLE_FILE_VALIDATION": "1",  # else the kernel prints a warning about frozen modules
    }
    with executed.with_suffix(".log").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "specdec_core.evidence.execute"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env=environment,
            cwd=source.parent,
            start_new_session=True,
        )
        try:
            printed, _ = process.communicate(json.dumps(job), timeout=timeout)
        except subprocess.TimeoutExpired:
            raise ExecutionError(
                f"{source.name} did not end within {timeout:.0f} s and was stopped: a busy machine, or a cell that "
                "hangs. What it had recorded is kept; run it again with a longer timeout"
            ) from None
        finally:
            _end(process)  # also when this process is interrupted
    _explain(source, executed, printed, process.returncode)


def write_kernel_spec(layout: Layout) -> str:
    """A Jupyter data folder whose kernel 'python3' is this very interpreter; returns that folder.

    An installed kernel of that name may belong to another Python.
    """
    data = layout.build / "jupyter"
    spec = data / "kernels" / "python3" / "kernel.json"
    content = json.dumps(
        {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": "Python 3",
            "language": "python",
        }
    )
    if not spec.is_file() or spec.read_text() != content:
        spec.parent.mkdir(parents=True, exist_ok=True)
        spec.write_text(content)
    return str(data)


def _explain(source: Path, executed: Path, printed: str, returncode: int) -> None:
    """Nothing if the run went well, else the error in words."""
    lines = printed.strip().splitlines()
    outcome: dict[str, Any] = {}
    if lines:
        with contextlib.suppress(ValueError):
            outcome = json.loads(lines[-1])
    match outcome.get("outcome"):
        case "done":
            return
        case "cell":
            raise ExecutionError(
                f"{source.name}, cell [{outcome['cell']}]: {outcome['error']}. The executed copy up to there is "
                f"{executed.name} in {executed.parent.name}/"
            )
        case "other":
            raise ExecutionError(f"{source.name} could not be run: {outcome['error']}; see {executed.stem}.log")
    raise ExecutionError(
        f"the kernel of {source.name} died (exit {returncode}). Most often the machine ran out of memory: close other "
        f"programs, or run the quick profile. See {executed.stem}.log"
    )


def _end(process: subprocess.Popen[str]) -> None:
    """End the child and its kernel, which lives in a session of its own; nothing if both have ended."""
    if process.poll() is not None:
        return
    import psutil  # comes with ipykernel

    with contextlib.suppress(psutil.Error):
        family = psutil.Process(process.pid).children(recursive=True)
        os.killpg(process.pid, signal.SIGKILL)
        for member in family:
            with contextlib.suppress(psutil.Error):
                member.kill()
    process.wait()


def _given(*parts: str | None) -> list[str]:
    return [part for part in parts if part]


def _execute(job: Mapping[str, Any]) -> dict[str, Any]:
    import papermill
    from nbclient.exceptions import CellTimeoutError, DeadKernelError

    try:
        papermill.execute_notebook(
            _literal(job["source"]),
            _literal(job["executed"]),
            parameters=job["parameters"],
            kernel_name="python3",
            cwd=job["folder"],
            progress_bar=False,
            autosave_cell_every=0,
            request_save_on_cell_execute=False,  # nothing is written between timed cells
        )
    except papermill.PapermillExecutionError as error:
        return {"outcome": "cell", "cell": error.exec_count, "error": f"{error.ename}: {error.evalue}"}
    except (DeadKernelError, CellTimeoutError):
        return {"outcome": "dead"}
    except Exception as error:  # whatever it is, the caller should read it and not a traceback
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return {"outcome": "other", "error": f"{type(error).__name__}: {error}"}
    return {"outcome": "done"}


def _literal(path: str) -> str:
    """papermill passes paths through str.format."""
    return path.replace("{", "{{").replace("}", "}}")


if __name__ == "__main__":
    print(json.dumps(_execute(json.load(sys.stdin))))
