"""Records survive what happens to runs: being killed, a full disk, bad records, a second run at the same time."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import textwrap
import warnings
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specdec_core.evidence.layout import Layout, package_root
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter, find_records, keep_records, left_over, read_records
from specdec_core.evidence.schemas import RecordError, Schema

SCHEMA = Schema("trial", 1, {"n": int, "text": str})

CHILD = """
    import sys
    from pathlib import Path
    from specdec_core.evidence.layout import Layout
    from specdec_core.evidence.records import RecordWriter
    from specdec_core.evidence.schemas import Schema
    layout = Layout(Path(sys.argv[1]))
    writer = RecordWriter(layout.records("quick"), "02_trial", Schema("trial", 1, {"n": int, "text": str}), {},
                          code=["specdec_core"], layout=layout)
"""


def child(layout: Layout, body: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CHILD) + textwrap.dedent(body), str(layout.root)],
        stdin=subprocess.PIPE,  # one that waits for a line goes on waiting where the tests have no standard input
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=package_root(),
    )  # fmt: skip


def write(layout: Layout, numbers, name="02_trial", profile="quick", schema=SCHEMA, device=None) -> Path:
    made_on = fingerprint(profile, layout=layout).as_dict() | ({"device": device} if device else {})
    with RecordWriter(layout.records(profile), name, schema, made_on, code=["specdec_core"], layout=layout) as writer:
        for n in numbers:
            writer.append({"n": n, "text": "x"})
    return writer.path


def numbers(path: Path) -> list[int]:
    return [record["n"] for record in read_records(path)[1]]


def test_what_was_written_is_read_with_its_header(layout):
    path = write(layout, range(3))
    header, records = read_records(path, SCHEMA)
    assert records == [{"n": n, "text": "x"} for n in range(3)]
    assert header["schema"] == "trial" and header["fields"] == {"n": "int", "text": "str"}
    assert header["code"]["paths"] == ["specdec_core"] and len(header["code"]["hash"]) == 64
    assert header["provenance"]["run"]["profile"] == "quick"


@given(texts=st.lists(st.text(), max_size=5))
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_text_stays_on_its_line(layout, texts):
    with RecordWriter(layout.records("quick"), "02_text", SCHEMA, {}, code=[], layout=layout) as writer:
        for text in texts:
            writer.append({"n": 0, "text": text})
    assert [record["text"] for record in read_records(writer.path)[1]] == texts


def test_a_bad_record_is_refused_and_loses_nothing(layout):
    with RecordWriter(layout.records("quick"), "02_trial", SCHEMA, {}, code=[], layout=layout) as writer:
        writer.append({"n": 1, "text": "before"})
        with pytest.raises(RecordError, match="'n'"):
            writer.append({"n": 1.5, "text": "bad"})
        writer.append({"n": 2, "text": "after"})
    assert numbers(writer.path) == [1, 2]
    with pytest.raises(RecordError, match="is closed"):
        writer.append({"n": 3, "text": "late"})


def test_a_failing_run_leaves_the_earlier_complete_file(layout):
    path = write(layout, [1, 2, 3])
    with (
        pytest.raises(ZeroDivisionError),
        RecordWriter(layout.records("quick"), "02_trial", SCHEMA, {}, code=[], layout=layout) as writer,
    ):
        writer.append({"n": 9, "text": "x"})
        raise ZeroDivisionError
    assert numbers(path) == [1, 2, 3]
    assert numbers(writer.partial) == [9]
    assert [file.path for file in find_records(SCHEMA, layout=layout)] == [path]


def test_a_killed_run_keeps_its_records_and_the_next_one_recovers(layout):
    run = child(layout, """
        for n in range(10**9):
            writer.append({"n": n, "text": "x" * 100})
            if n == 500:
                print("measuring", flush=True)
    """)  # fmt: skip
    assert run.stdout is not None and run.stdout.readline() == "measuring\n"
    run.send_signal(signal.SIGKILL)
    run.communicate()
    partial = layout.records("quick") / "02_trial.partial.jsonl"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        kept = numbers(partial)
    assert kept == list(range(len(kept))) and len(kept) > 500
    path = write(layout, [7])
    assert numbers(path) == [7]
    assert not partial.exists()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        assert numbers(layout.records("quick") / "02_trial.interrupted-1.jsonl") == kept


def killed(layout, numbers, name="02_trial", profile="quick", **made_on) -> None:
    """What a run that was killed after these records leaves: its file was never closed."""
    provenance = fingerprint(profile, layout=layout).as_dict() | made_on
    code = ["specdec_core"]
    with (
        contextlib.suppress(KeyboardInterrupt),
        RecordWriter(layout.records(profile), name, SCHEMA, provenance, code=code, layout=layout) as writer,
    ):
        for n in numbers:
            writer.append({"n": n, "text": "x"})
        raise KeyboardInterrupt


def left(layout, name="02_trial", profile="quick", code=("specdec_core",)) -> list[int]:
    mine = fingerprint(profile, layout=layout)
    rows = left_over(layout.records("quick"), name, SCHEMA, mine, code=code, layout=layout)
    return [row["n"] for row in rows]


def test_a_run_takes_up_what_a_killed_one_of_the_same_code_and_machine_left(layout):
    assert left(layout) == []
    killed(layout, [1, 2])
    assert left(layout) == [1, 2]
    assert left(layout, name="02_other") == left(layout, profile="full") == left(layout, code=("tests",)) == []
    write(layout, [7])  # sets it aside
    assert left(layout) == []


@pytest.mark.parametrize("field", ["device", "hardware_hash", "software_hash"])
def test_what_another_machine_left_is_not_taken_up(layout, field):
    killed(layout, [1, 2], **{field: "another"})
    assert left(layout) == []


def test_what_other_code_left_is_not_taken_up(layout):
    killed(layout, [1, 2])
    with (layout.root / "specdec_core" / "more.py").open("w") as file:
        file.write("changed = True\n")
    assert left(layout) == []


@pytest.mark.parametrize("damage", [b"", b'{"schema":"tri', b"no header\n"])
@pytest.mark.filterwarnings("ignore:.*last line is cut off")
def test_a_run_killed_at_once_leaves_nothing_and_stops_no_other(layout, damage):
    killed(layout, [1, 2])
    (layout.records("quick") / "02_trial.partial.jsonl").write_bytes(damage)
    assert left(layout) == []
    assert numbers(write(layout, [7])) == [7]


def test_what_another_schema_left_is_not_taken_up(layout):
    killed(layout, [1, 2])
    later = Schema("trial", 2, SCHEMA.fields)
    rows = left_over(
        layout.records("quick"), "02_trial", later, fingerprint("quick", layout=layout), code=["specdec_core"],
        layout=layout,
    )  # fmt: skip
    assert rows == []


def test_a_line_cut_short_is_left_out_with_a_warning(layout):
    path = write(layout, [1, 2])
    path.write_bytes(path.read_bytes() + b'{"n":3,"te')
    with pytest.warns(UserWarning, match="last line is cut off"):
        assert numbers(path) == [1, 2]


@given(cut=st.integers(1, 2000))
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_wherever_a_file_is_cut_a_prefix_is_read(layout, cut):
    path = layout.root / "whole.jsonl"
    if not path.exists():
        path.write_bytes(write(layout, range(5)).read_bytes())
    whole = path.read_bytes()
    shortened = layout.root / "shortened.jsonl"
    shortened.write_bytes(whole[: max(len(whole) - cut, 0)])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            assert numbers(shortened) == list(range(5))[: len(numbers(shortened))]
        except RecordError as error:
            assert "no header" in str(error)


def test_a_full_disk_is_said_and_the_half_line_taken_back(layout):
    # A limit on the size of files is the full disk that a test can have.
    run = child(layout, """
        import json, resource
        size = writer.partial.stat().st_size
        resource.setrlimit(resource.RLIMIT_FSIZE, (size + 150, resource.RLIM_INFINITY))
        writer.append({"n": 1, "text": "x" * 80})
        try:
            writer.append({"n": 2, "text": "x" * 80})
        except OSError as error:
            print(error)
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        writer.append({"n": 3, "text": "x"})
        writer.close()
    """)  # fmt: skip
    printed, errors = run.communicate()
    assert "cannot append to 02_trial.partial.jsonl" in printed and "The 1 records before are safe" in printed, errors
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert numbers(layout.records("quick") / "02_trial.jsonl") == [1, 3]


def test_a_second_run_at_the_same_time_is_refused(layout):
    run = child(layout, """
        print("open", flush=True)
        sys.stdin.readline()
    """)  # fmt: skip
    assert run.stdout is not None
    run.stdout.readline()
    try:
        with pytest.raises(RecordError, match="is being written by another run"):
            write(layout, [1])
        write(layout, [1], name="02_other")
    finally:
        run.kill()
        run.communicate()
    assert numbers(write(layout, [1])) == [1]


def test_a_damaged_file_names_its_line(layout):
    path = write(layout, [1, 2, 3])
    lines = path.read_text().splitlines()
    lines[2] = lines[2][:-1]
    path.write_text("\n".join(lines) + "\n")
    with pytest.raises(RecordError, match="line 3"):
        read_records(path)
    path.write_text('{"n": 1}\n')
    with pytest.raises(RecordError, match="no header of records"):
        read_records(path)
    path.write_text("")
    with pytest.raises(RecordError, match="no header line"):
        read_records(path)


def test_another_schema_or_version_is_refused(layout):
    path = write(layout, [1])
    with pytest.raises(RecordError, match="expected 'trial', version 2"):
        read_records(path, Schema("trial", 2, SCHEMA.fields))
    with pytest.raises(RecordError, match="expected 'other', version 1"):
        read_records(path, Schema("other", 1, SCHEMA.fields))


@pytest.mark.parametrize("name", ["", "a/b", "02_x.partial", "02_x.interrupted-1"])
def test_a_name_that_would_be_mistaken_is_refused(layout, name):
    with pytest.raises(RecordError, match="cannot name a file of records"):
        write(layout, [1], name=name)


def test_the_newest_file_comes_first_and_built_before_kept(layout):
    old = write(layout, [1], name="02_old")
    new = write(layout, [2], name="02_new", profile="full")
    newest = write(layout, [3], name="02_kept")
    kept = keep_records("quick", layout, ["02_kept"])
    newest.unlink()
    assert [file.path for file in find_records("trial", layout=layout)] == [new, old, *kept]
    assert [file.kept for file in find_records("trial", layout=layout)] == [False, False, True]
    assert find_records("other", layout=layout) == []
    assert len(find_records(layout=layout)) == 3
    assert [file.path for file in find_records("trial", folder=layout.kept_records, layout=layout)] == kept


def test_records_are_found_by_device_and_notebook(layout):
    here, there = write(layout, [1], name="02_a", device="here-2c"), write(layout, [2], name="03_b", device="there-8c")
    assert [file.path for file in find_records("trial", device="there-8c", layout=layout)] == [there]
    assert [file.path for file in find_records("trial", number="02", layout=layout)] == [here]
    assert [path.parent.name for path in keep_records("quick", layout)] == ["here-2c", "there-8c"]


def test_an_unreadable_file_hides_no_other(layout):
    path = write(layout, [1])
    (path.parent / "02_broken.jsonl").write_text("not json\n")
    with pytest.warns(UserWarning, match="02_broken"):
        assert [file.path for file in find_records(SCHEMA, layout=layout)] == [path]


def test_records_go_stale_with_the_code_that_made_them(layout):
    write(layout, [1])
    (found,) = find_records(SCHEMA, layout=layout)
    assert not found.is_stale(layout)
    source = layout.package / "measured.py"
    source.write_text("ANSWER = 2\n")
    assert found.is_stale(layout)
    source.unlink()
    source.parent.rmdir()
    assert found.is_stale(layout)


def test_every_record_is_one_line_on_disk_at_once(layout):
    with RecordWriter(layout.records("quick"), "02_trial", SCHEMA, {}, code=[], layout=layout) as writer:
        for n in range(3):
            writer.append({"n": n, "text": "x"})
            lines = writer.partial.read_bytes().split(b"\n")
            assert lines[-1] == b"" and json.loads(lines[-2])["n"] == n
    assert not os.path.exists(writer.partial)
