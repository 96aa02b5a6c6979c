"""Notebooks as files: what is asked of them is checked before anything runs, what is committed is clean."""

from __future__ import annotations

import copy
import json

import pytest

from specdec_core.evidence.notebooks import (
    NotebookError,
    assign_parameters,
    commit_notebook,
    normalised,
    parse_parameter,
    read_notebook,
    select,
)

PARAMETERS = 'profile = "quick"\nprompts = 4\nrate: float = 0.5\nlengths = [1, 2]\nmodel = "tiny"\nnothing = None'


def executed(*outputs: dict, count: int | None = 7) -> dict:
    """An executed notebook of three code cells as papermill leaves it; the last has these outputs."""

    def cell(tags: list[str], execution_count: int | None, outputs: list[dict], source: str = "x") -> dict:
        metadata = {"tags": tags, "papermill": {"duration": 1.5}, "execution": {"iopub.status.busy": "noon"}}
        return {"cell_type": "code", "execution_count": execution_count, "id": "i", "metadata": metadata,
                "outputs": outputs, "source": [source]}  # fmt: skip

    cells = [
        cell(["parameters"], 1, []),
        cell(["injected-parameters"], 2, []),
        {"cell_type": "markdown", "id": "m", "metadata": {"papermill": {}}, "source": ["text"]},
        cell([], 3, [], source=" "),
        cell(["nbval-check-output"], count, list(outputs)),
    ]
    metadata = {
        "kernelspec": {"display_name": "Mine", "language": "python", "name": "mine"},
        "language_info": {"name": "python", "version": "3.99"},
        "papermill": {"input_path": "somewhere"},
    }
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def test_parameters_are_read_without_running_anything(write_notebook):
    notebook = read_notebook(write_notebook("02_sweep", PARAMETERS, "raise RuntimeError"))
    assert notebook.parameters == {
        "profile": "quick", "prompts": 4, "rate": 0.5, "lengths": [1, 2], "model": "tiny", "nothing": None,
    }  # fmt: skip
    assert (notebook.name, notebook.number) == ("02_sweep", "02")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("prompts = 4", "expected profile = .quick."),
        ('profile = "full"', "found 'full'"),
        ('profile = "quick"\nn = len("abc")', "expected name = literal"),
        ('profile = "quick"\na.b = 1', "expected name = literal"),
    ],
)
def test_a_bad_parameters_cell_is_named(write_notebook, source, message):
    with pytest.raises(NotebookError, match=message):
        read_notebook(write_notebook("02_sweep", source))


def test_damaged_notebooks_are_named(write_notebook):
    path = write_notebook("02_sweep", PARAMETERS)
    path.write_text(path.read_text()[:-5])
    with pytest.raises(NotebookError, match=r"02_sweep\.ipynb is damaged"):
        read_notebook(path)
    path.write_text("[]")
    with pytest.raises(NotebookError, match="no notebook of format 4"):
        read_notebook(path)
    path.write_text('{"cells": [], "nbformat": 4, "nbformat_minor": 5}')
    with pytest.raises(NotebookError, match="0 cells tagged 'parameters'"):
        read_notebook(path)


def test_the_source_hash_ignores_outputs_and_sees_sources(write_notebook):
    path = write_notebook("02_sweep", PARAMETERS, "x = 1")
    before = read_notebook(path).source_hash
    content = json.loads(path.read_text())
    content["cells"][1]["outputs"] = [{"output_type": "stream", "name": "stdout", "text": "1"}]
    content["cells"][1]["source"] = ["x = 1"]  # a list of lines is the same source
    path.write_text(json.dumps(content))
    assert read_notebook(path).source_hash == before
    assert read_notebook(write_notebook("02_sweep", PARAMETERS, "x = 2")).source_hash != before


def test_selecting_notebooks(layout, write_notebook):
    with pytest.raises(NotebookError, match="no notebooks named NN_name"):
        select(layout)
    for name in ("00_setup", "02_sweep", "07_summary"):
        write_notebook(name, PARAMETERS)

    def names(*only: str) -> list[str]:
        return [notebook.name for notebook in select(layout, only)]

    assert names() == ["00_setup", "02_sweep", "07_summary"]
    assert names("07", "00") == ["00_setup", "07_summary"]
    assert names("02_sweep") == names("02_sweep.ipynb") == names("02") == ["02_sweep"]
    for unknown in ("03", "sweep", "0", ""):
        with pytest.raises(NotebookError, match=f"unknown notebook '{unknown}': expected .* 00_setup, 02_sweep"):
            names(unknown)


def test_parameters_go_to_the_notebooks_that_declare_them(write_notebook):
    one = read_notebook(write_notebook("00_setup", PARAMETERS))
    other = read_notebook(write_notebook("02_sweep", 'profile = "quick"\nseed = 0'))
    assert assign_parameters([one, other], {}, "quick") == {"00_setup": {}, "02_sweep": {}}
    assert assign_parameters([one, other], {"seed": 3}, "full") == {
        "00_setup": {"profile": "full"},
        "02_sweep": {"profile": "full", "seed": 3},
    }


@pytest.mark.parametrize(
    ("given", "assigned"),
    [
        ({"rate": 1}, {"rate": 1.0}),
        ({"lengths": (3,)}, {"lengths": [3]}),
        ({"model": 135}, {"model": "135"}),
        ({"nothing": [1]}, {"nothing": [1]}),
    ],
)
def test_values_take_their_defaults_type(write_notebook, given, assigned):
    notebook = read_notebook(write_notebook("00_setup", PARAMETERS))
    result = assign_parameters([notebook], given, "quick")["00_setup"]
    assert result == assigned and list(map(type, result.values())) == list(map(type, assigned.values()))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"promts": 4}, "unknown parameter 'promts': the notebooks selected have 00_setup: profile, prompts"),
        ({"profile": "full"}, "chosen by --profile"),
        ({"prompts": "many"}, r"'prompts' of 00_setup is int \(default 4\): got 'many'"),
        ({"prompts": 4.5}, "is int"),
        ({"prompts": True}, "is int"),
        ({"rate": True}, "is float"),
        ({"lengths": 3}, "is list"),
    ],
)
def test_bad_parameters_are_named(write_notebook, given, message):
    notebook = read_notebook(write_notebook("00_setup", PARAMETERS))
    with pytest.raises(NotebookError, match=message):
        assign_parameters([notebook], given, "quick")
    with pytest.raises(ValueError, match="unknown profile 'fast'"):
        assign_parameters([notebook], {}, "fast")


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("prompts=8", ("prompts", 8)),
        ("rate=0.5", ("rate", 0.5)),
        ("lengths=[1, 2]", ("lengths", [1, 2])),
        ("model=tiny-135m", ("model", "tiny-135m")),
        ("text=a=b", ("text", "a=b")),
        ("flag=True", ("flag", True)),
        ("empty=", ("empty", "")),
    ],
)
def test_parameters_from_the_command_line(text, parsed):
    assert parse_parameter(text) == parsed


@pytest.mark.parametrize("text", ["prompts", "=8", "my prompts=8"])
def test_a_parameter_without_name_or_value_is_refused(text):
    with pytest.raises(NotebookError, match="expected name=value"):
        parse_parameter(text)


def test_a_committed_notebook_tells_nothing_of_the_run():
    outputs = [
        {"output_type": "stream", "name": "stdout", "text": ["/srv/checkout/build/x\n"]},
        {"output_type": "execute_result", "execution_count": 7, "metadata": {},
         "data": {"text/plain": "'/srv/checkout/y'", "image/png": "/srv/checkout/"}},
    ]  # fmt: skip
    content = executed(*outputs)
    before = copy.deepcopy(content)
    clean = normalised(content, "/srv/checkout", "02_sweep.ipynb")
    assert content == before
    assert "papermill" not in json.dumps(clean) and "iopub" not in json.dumps(clean)
    assert clean["metadata"]["kernelspec"]["name"] == "python3" and "version" not in clean["metadata"]["language_info"]
    assert [cell.get("execution_count") for cell in clean["cells"]] == [1, None, None, 2]
    assert [cell["metadata"] for cell in clean["cells"]] == [
        {"tags": ["parameters"]}, {}, {}, {"tags": ["nbval-check-output"]},
    ]  # fmt: skip
    printed, result = clean["cells"][-1]["outputs"]
    assert printed["text"] == ["build/x\n"]
    assert result["data"] == {"text/plain": "'y'", "image/png": "/srv/checkout/"} and result["execution_count"] == 2


def test_only_a_clean_run_is_committed():
    with pytest.raises(NotebookError, match="never executed"):
        normalised(executed(count=None), "/srv", "02_sweep.ipynb")
    error = {"output_type": "error", "ename": "ValueError", "evalue": "", "traceback": []}
    with pytest.raises(NotebookError, match=r"cell \[2\] failed with ValueError"):
        normalised(executed(error), "/srv", "02_sweep.ipynb")


def test_committing_twice_changes_nothing(layout):
    copy_of = layout.executed("quick") / "02_sweep.ipynb"
    copy_of.parent.mkdir(parents=True)
    copy_of.write_text(json.dumps(executed()))
    target = commit_notebook(copy_of, layout)
    assert target == layout.notebooks / "02_sweep.ipynb"
    written = target.stat().st_mtime_ns
    assert commit_notebook(copy_of, layout) == target and target.stat().st_mtime_ns == written
    assert commit_notebook(target, layout).read_text() == target.read_text()
