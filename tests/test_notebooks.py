"""The committed notebooks as files: nbval re-runs them, but never sees what was not executed or is not checked."""

import ast
import json
import platform
import re
from pathlib import Path

import pytest

from specdec_core.evidence.claims import CLAIMS
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.notebooks import read_notebook

LAYOUT = Layout()
NOTEBOOKS = sorted(path for path in LAYOUT.notebooks.rglob("*.ipynb") if ".ipynb_checkpoints" not in path.parts)
CHECKED = "nbval-check-output"
ABSOLUTE = re.compile(r"(?<![\w.])(/(home|root|Users|tmp|private|var|work|workspace|mnt|opt|data|usr)/|[A-Z]:\\)")

assert NOTEBOOKS, "run from a full checkout"
pytestmark = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def content(path: Path) -> dict:
    return json.loads(path.read_text(encoding="utf-8"))


def code_cells(path: Path) -> list[dict]:
    return [cell for cell in content(path)["cells"] if cell["cell_type"] == "code"]


def source(cell: dict) -> str:
    return "".join(cell["source"])


def tags(cell: dict) -> list[str]:
    return cell["metadata"].get("tags", [])


def checked_cells(path: Path) -> list[dict]:
    return [cell for cell in code_cells(path) if CHECKED in tags(cell) or "NBVAL_CHECK_OUTPUT" in source(cell)]


def printed(cell: dict) -> str:
    return "".join("".join(output["text"]) for output in cell["outputs"] if output["output_type"] == "stream")


def texts(cell: dict) -> list[str]:
    """Everything that a reader can read in a cell's outputs, images aside."""
    found = []
    for output in cell["outputs"]:
        parts = [output.get("text", ""), *output.get("traceback", [])]
        parts += [part for kind, part in output.get("data", {}).items() if not kind.startswith("image/")]
        found += ["".join(part) if isinstance(part, list) else str(part) for part in parts]
    return found


def test_every_cell_is_executed_in_order(path):
    # nbval passes over a cell without a count in silence.
    assert [cell["execution_count"] for cell in code_cells(path)] == list(range(1, len(code_cells(path)) + 1))


def test_no_cell_failed(path):
    assert not [output for cell in code_cells(path) for output in cell["outputs"] if output["output_type"] == "error"]


def test_it_is_thin(path):
    assert len(code_cells(path)) <= 15
    assert max(len(source(cell).splitlines()) for cell in content(path)["cells"]) <= 40


def test_its_defaults_are_the_quick_profile(path):
    assert read_notebook(path).parameters["profile"] == "quick"


def test_code_is_plain_python(path):
    # Magics can fail without a word; they are no Python.
    for cell in code_cells(path):
        names = {node.id for node in ast.walk(ast.parse(source(cell))) if isinstance(node, ast.Name)}
        assert "get_ipython" not in names


def test_checked_cells_print_a_little_text_and_nothing_else(path):
    for cell in checked_cells(path):
        assert printed(cell).strip() and len(printed(cell)) < 2000
        assert {(output["output_type"], output.get("name")) for output in cell["outputs"]} == {("stream", "stdout")}


def test_something_is_checked(path):
    assert checked_cells(path)


def test_every_claim_of_it_is_in_exactly_one_checked_cell(path):
    claims = [claim.id for claim in CLAIMS if claim.notebook == path.stem]
    lines = [line for cell in checked_cells(path) for line in printed(cell).splitlines()]
    assert sorted(line.split(":")[0] for line in lines if re.match(r"[A-Z]\d+:", line)) == sorted(claims)


def test_checked_verdicts_are_those_registered(path):
    assert "is outside the set registered" not in "".join(printed(cell) for cell in checked_cells(path))


def test_outputs_name_no_path_and_no_host_of_a_machine(path):
    host = re.compile(rf"\b{re.escape(platform.node() or 'localhost')}\b")
    for text in (text for cell in code_cells(path) for text in texts(cell)):
        assert not ABSOLUTE.search(text) and not host.search(text) and str(LAYOUT.root) not in text


def test_nothing_of_a_run_is_left_in_its_metadata(path):
    whole = content(path)
    assert set(whole["metadata"]) <= {"kernelspec", "language_info"}
    assert whole["metadata"]["kernelspec"]["name"] == "python3"
    for cell in whole["cells"]:
        assert set(cell["metadata"]) <= {"tags"} and "injected-parameters" not in tags(cell)


def test_every_image_is_a_png_with_alternative_text(path):
    for output in (output for cell in code_cells(path) for output in cell["outputs"]):
        images = [kind for kind in output.get("data", {}) if kind.startswith("image/")]
        assert images in ([], ["image/png"])
        assert not images or output["metadata"]["image/png"]["alt"].strip()
