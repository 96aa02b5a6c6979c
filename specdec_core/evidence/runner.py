"""The reproduction: the notebooks, one after another, then figures, claims and report. A second call repeats no work.

A notebook's run is done when its stamp carries the same key: the hash of its source, its parameters, the package's
sources, the data it may read, and this machine's hardware and software. So an interrupted reproduction goes on with
the first unfinished notebook. Two notebooks never run side by side, not even from two commands: both would be timed
wrong.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from specdec_core.cache import atomic_write
from specdec_core.evidence.claims_table import text_table
from specdec_core.evidence.evaluate import evaluate_all
from specdec_core.evidence.execute import ExecutionError, run_notebook
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.notebooks import Notebook, NotebookError, assign_parameters, commit_notebook, select
from specdec_core.evidence.provenance import bytes_hash, fingerprint
from specdec_core.evidence.report import write_report
from specdec_core.evidence.verdicts import Verdict

DEADLINES = {"quick": 30 * 60.0, "full": 24 * 3600.0}
"""Seconds after which a notebook of the profile is taken to hang."""


@dataclass(frozen=True)
class NotebookRun:
    """What became of one notebook: `ran` now, or found done; seconds of the run that counts."""

    name: str
    ran: bool
    seconds: float
    executed: Path


@dataclass(frozen=True)
class Reproduction:
    runs: tuple[NotebookRun, ...]
    verdicts: tuple[Verdict, ...]
    report: Path


def reproduce(
    profile: str = "quick",
    only: Sequence[str] = (),
    parameters: Mapping[str, Any] | None = None,
    *,
    write_back: bool = False,
    wait: bool = True,
    timeout: float | None = None,
    layout: Layout | None = None,
) -> Reproduction:
    """Run the notebooks (all, or `only` those numbers or names), print the claims table, write the report.

    parameters  name → value, injected into the notebooks that declare them
    write_back  commit the executed quick-profile copies into notebooks/, normalised
    wait        whether to wait for another reproduction in this checkout, or to raise
    timeout     seconds allowed for each notebook (default: DEADLINES)

    Everything is checked before anything runs: NotebookError for an unknown notebook or parameter, ValueError for an
    unknown profile. ExecutionError stops at the first notebook that fails; what ran before it stays done.
    """
    layout = layout or Layout()
    given = dict(parameters or {})
    if write_back and (profile != "quick" or given):
        raise NotebookError("only a quick run with default parameters is written back: drop --profile full and -p")
    chosen = select(layout, only)
    assigned = assign_parameters(chosen, given, profile)
    with exclusive_run(layout, wait):
        runs = tuple(_run_all(chosen, assigned, profile, timeout or DEADLINES[profile], layout))
        if write_back:
            for run in runs:
                commit_notebook(run.executed, layout)
        verdicts = tuple(evaluate_all(layout))
        report = write_report(verdicts, profile, layout)
    print(text_table(verdicts))
    print(f"report: {layout.relative(report)}")
    return Reproduction(runs, verdicts, report)


@contextmanager
def exclusive_run(layout: Layout, wait: bool = True) -> Iterator[None]:
    """Hold this checkout's run lock; a second run says who holds it and waits, or raises ExecutionError."""
    layout.build.mkdir(parents=True, exist_ok=True)
    holder = layout.build / "run.pid"
    lock = FileLock(layout.build / "run.lock")
    try:
        lock.acquire(timeout=0)
    except Timeout:
        who = f"process {holder.read_text().strip()}" if holder.is_file() else "another process"
        if not wait:
            raise ExecutionError(f"a reproduction is running already ({who}): wait for it to end") from None
        print(f"a reproduction is running already ({who}); waiting for it to end", flush=True)
        lock.acquire()
    try:
        holder.write_text(str(os.getpid()))
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _run_all(
    chosen: Sequence[Notebook],
    assigned: Mapping[str, Mapping[str, Any]],
    profile: str,
    timeout: float,
    layout: Layout,
) -> Iterator[NotebookRun]:
    from tqdm import tqdm

    with tqdm(chosen, unit="notebook", disable=None, leave=False) as progress:
        for notebook in progress:
            progress.set_description(notebook.name)
            run = _run_one(notebook, assigned[notebook.name], profile, timeout, layout)
            progress.write(f"{run.name}: {f'ran in {run.seconds:.0f} s' if run.ran else 'done before'}")
            yield run


def _run_one(
    notebook: Notebook, parameters: Mapping[str, Any], profile: str, timeout: float, layout: Layout
) -> NotebookRun:
    executed = layout.executed(profile) / notebook.path.name
    stamp_path = executed.with_suffix(".done.json")
    key = run_key(notebook, parameters, profile, layout)
    stamp = _read_stamp(stamp_path)
    if stamp.get("key") == key and executed.is_file() and _still_there(stamp, layout):
        return NotebookRun(notebook.name, False, stamp["seconds"], executed)
    stamp_path.unlink(missing_ok=True)
    start = time.perf_counter()
    run_notebook(notebook.path, executed, parameters, timeout, layout)
    seconds = time.perf_counter() - start
    stamp = {
        "key": key,
        "parameters": dict(parameters),
        "seconds": round(seconds, 1),
        "produced": {layout.relative(path): _digest(path) for path in _products(notebook, profile, layout)},
    }
    with atomic_write(stamp_path) as temporary:
        temporary.write_text(json.dumps(stamp, indent=1))
    return NotebookRun(notebook.name, True, seconds, executed)


def run_key(notebook: Notebook, parameters: Mapping[str, Any], profile: str, layout: Layout) -> str:
    """Hash of everything that a run of this notebook depends on.

    Its data are all of data/ but records, and the records of notebooks of lower numbers (build/ and committed ones).
    """
    made_on = fingerprint(profile, layout=layout)
    content = {
        "source": notebook.source_hash,
        "parameters": dict(parameters),
        "profile": profile,
        "package": bytes_hash(layout.package),
        "data": {layout.relative(path): _digest(path) for path in _inputs(notebook, profile, layout)},
        "hardware": made_on.hardware_hash,
        "software": made_on.software_hash,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def _inputs(notebook: Notebook, profile: str, layout: Layout) -> list[Path]:
    data = [path for path in _files(layout.data) if not path.is_relative_to(layout.kept_records)]
    records = [*_files(layout.records(profile)), *_files(layout.kept_records)]
    return sorted(data + [path for path in records if path.suffix == ".jsonl" and path.name[:2] < notebook.number])


def _products(notebook: Notebook, profile: str, layout: Layout) -> list[Path]:
    """Complete records and figures that bear the notebook's number."""
    records = layout.records(profile).glob(f"{notebook.number}_*.jsonl")
    figures = layout.figures.glob(f"{notebook.number}_*.p*")
    unfinished = (".partial.", ".interrupted-")
    return sorted(path for path in (*records, *figures) if not any(mark in path.name for mark in unfinished))


def _still_there(stamp: Mapping[str, Any], layout: Layout) -> bool:
    """Whether what the run produced is there; records unchanged, figures in whatever later form (they are redrawn)."""
    for name, digest in stamp["produced"].items():
        path = layout.root / name
        if not path.is_file() or (path.suffix == ".jsonl" and _digest(path) != digest):
            return False
    return True


def _read_stamp(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}


def _files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and not path.name.startswith(".")]


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
