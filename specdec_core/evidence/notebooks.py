"""Notebooks as files: finding them, checking parameters against their `parameters` cell, normalising executed ones.

papermill only warns about a parameter that a notebook does not have, and then measures something else than was asked
for; here it is refused before anything runs.
"""

from __future__ import annotations

import ast
import copy
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_core.cache import atomic_write
from specdec_core.evidence.layout import Layout, known_profile


class NotebookError(ValueError):
    """A notebook, or what was asked of it, is not as expected; the message says what to do."""


@dataclass(frozen=True)
class Notebook:
    """A notebook to run; `parameters` are the literal defaults of its `parameters` cell, the quick profile's."""

    path: Path
    parameters: Mapping[str, Any]
    source_hash: str

    @property
    def name(self) -> str:
        return self.path.stem

    @property
    def number(self) -> str:
        return self.name[:2]


def read_notebook(path: Path) -> Notebook:
    """Read a notebook's parameters and source. NotebookError if it is damaged or declares no parameter `profile`."""
    content = _load(path)
    cells = [cell for cell in content["cells"] if "parameters" in cell.get("metadata", {}).get("tags", [])]
    if len(cells) != 1:
        raise NotebookError(f"{path.name} has {len(cells)} cells tagged 'parameters': expected exactly one")
    parameters = _declared(path, "".join(cells[0]["source"]))
    if parameters.get("profile") != "quick":
        raise NotebookError(
            f'{path.name}: expected profile = "quick" in its parameters cell, found {parameters.get("profile")!r}. '
            "The defaults are the quick profile"
        )
    sources = [[cell["cell_type"], "".join(cell["source"])] for cell in content["cells"]]
    return Notebook(path, parameters, hashlib.sha256(json.dumps(sources).encode()).hexdigest())


def select(layout: Layout, only: Sequence[str] = ()) -> list[Notebook]:
    """The notebooks to run, in order; `only`: numbers ('02') or names. NotebookError lists the known ones."""
    known = {path.stem: path for path in layout.find_notebooks()}
    if not known:
        raise NotebookError(f"no notebooks named NN_name.ipynb in {layout.notebooks.name}/: run from a full checkout")
    chosen = set()
    for wanted in only:
        matches = {name for name in known if name == wanted.removesuffix(".ipynb") or name[:2] == wanted}
        if not matches:
            raise NotebookError(f"unknown notebook {wanted!r}: expected a number or name of {', '.join(known)}")
        chosen |= matches
    return [read_notebook(path) for name, path in known.items() if not only or name in chosen]


def assign_parameters(
    notebooks: Sequence[Notebook], given: Mapping[str, Any], profile: str
) -> dict[str, dict[str, Any]]:
    """Notebook name → the parameters to inject: the profile, and those given ones that it declares.

    NotebookError if a given parameter is known to none of the notebooks, or is not of its default's type.
    """
    known_profile(profile)
    for name in given:
        if name == "profile":
            raise NotebookError("the profile is chosen by --profile, not as a parameter")
        if not any(name in notebook.parameters for notebook in notebooks):
            listing = "; ".join(f"{notebook.name}: {', '.join(notebook.parameters)}" for notebook in notebooks)
            raise NotebookError(f"unknown parameter {name!r}: the notebooks selected have {listing}")
    assigned = {}
    for notebook in notebooks:
        own = {name: _converted(notebook, name, value) for name, value in given.items() if name in notebook.parameters}
        # The quick profile is what the notebook says by itself: nothing injected, nothing to take out again.
        assigned[notebook.name] = own if profile == "quick" else {"profile": profile} | own
    return assigned


def parse_parameter(text: str) -> tuple[str, Any]:
    """'name=value' → (name, value): a Python literal where it is one, else the text itself."""
    name, equals, value = text.partition("=")
    if not equals or not name.isidentifier():
        raise NotebookError(f"parameter {text!r}: expected name=value, such as -p prompts=8")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value


def commit_notebook(executed: Path, layout: Layout) -> Path:
    """Write an executed copy back into notebooks/, normalised; returns the committed file.

    Normalised: no papermill metadata and injected cell, no timings, execution counts 1, 2, …, no kernel of one
    machine's name, no path of this checkout in outputs. NotebookError if a cell failed or was never executed.
    """
    content = normalised(_load(executed), str(layout.root), executed.name)
    target = layout.notebooks / executed.name
    text = json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False) + "\n"
    if not target.is_file() or target.read_text(encoding="utf-8") != text:
        with atomic_write(target) as temporary:
            temporary.write_text(text, encoding="utf-8")
    return target


def normalised(content: Mapping[str, Any], root: str, name: str) -> dict[str, Any]:
    """`commit_notebook` without the files: the notebook's content in, the content to commit out."""
    cells = []
    count = 0
    for cell in content["cells"]:
        metadata = cell.get("metadata", {})
        if "injected-parameters" in metadata.get("tags", []):
            continue
        cell = copy.deepcopy({**cell, "metadata": {key: metadata[key] for key in ("tags",) if metadata.get(key)}})
        if cell["cell_type"] == "code":
            empty = not "".join(cell["source"]).strip()
            if not empty and cell.get("execution_count") is None:
                raise NotebookError(f"{name}: a cell was never executed; run the notebook to its end first")
            count += not empty
            cell["execution_count"] = None if empty else count
            cell["outputs"] = [_clean(output, count, root, name) for output in cell["outputs"]]
        cells.append(cell)
    return {
        "cells": cells,
        "metadata": {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        },
        "nbformat": content["nbformat"],
        "nbformat_minor": content["nbformat_minor"],
    }


def _clean(output: dict[str, Any], count: int, root: str, name: str) -> dict[str, Any]:
    if output["output_type"] == "error":
        raise NotebookError(f"{name}: cell [{count}] failed with {output['ename']}; only a clean run is committed")
    if output["output_type"] == "execute_result":
        output["execution_count"] = count
    if "text" in output:
        output["text"] = _relative(output["text"], root)
    for kind, data in output.get("data", {}).items():
        if kind.startswith("text/"):
            output["data"][kind] = _relative(data, root)
    return output


def _relative(text: str | list[str], root: str) -> str | list[str]:
    if isinstance(text, list):
        return [line.replace(f"{root}/", "") for line in text]
    return text.replace(f"{root}/", "")


def _load(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise NotebookError(f"{path.name} is damaged ({error}): restore it from git") from error
    if not isinstance(content, dict) or not {"cells", "nbformat", "nbformat_minor"} <= set(content):
        raise NotebookError(f"{path.name} is no notebook of format 4: restore it from git")
    return content


def _declared(path: Path, source: str) -> dict[str, Any]:
    declared = {}
    for statement in ast.parse(source).body:
        if isinstance(statement, ast.Assign) and len(statement.targets) == 1:
            target, value = statement.targets[0], statement.value
        elif isinstance(statement, ast.AnnAssign) and statement.value is not None:
            target, value = statement.target, statement.value
        else:
            continue
        try:
            literal = ast.literal_eval(value)
        except ValueError:
            literal = ...
        if literal is ... or not isinstance(target, ast.Name):
            line = ast.unparse(statement)
            raise NotebookError(f"{path.name}: {line!r} in its parameters cell: expected name = literal")
        declared[target.id] = literal
    return declared


def _converted(notebook: Notebook, name: str, value: Any) -> Any:
    default = notebook.parameters[name]
    if default is None or type(value) is type(default):
        return value
    if isinstance(default, float) and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if isinstance(default, list | tuple) and isinstance(value, list | tuple):
        return list(value)
    if isinstance(default, str) and re.fullmatch(r"[\w.+-]+", str(value)):
        return str(value)  # a name that reads like a number
    kind = type(default).__name__
    raise NotebookError(f"parameter {name!r} of {notebook.name} is {kind} (default {default!r}): got {value!r}")
