"""The evidence wing stands by itself: light to import, and nothing of the engine in it."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import time

import pytest

from specdec_core.evidence.layout import Layout, package_root

HEAVY = (
    "torch", "transformers", "numba", "scipy", "pandas", "matplotlib", "seaborn", "papermill", "IPython", "nbconvert",
)  # fmt: skip
WING = sorted(
    path for folder in ("evidence", "statistics") for path in (package_root() / "specdec_core" / folder).glob("*.py")
)
GROUND = ("specdec_core.evidence", "specdec_core.statistics", "specdec_core.cache")


def loaded_by(code: str) -> tuple[list[str], float]:
    """Heavy modules that the code loads in a fresh interpreter, and the seconds of its better of two runs."""
    program = f"{code}\nimport sys, json\nprint(json.dumps(sorted(set({HEAVY!r}) & set(sys.modules))))"
    best = float("inf")
    for _ in range(2):
        start = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=package_root()
        )
        best = min(best, time.perf_counter() - start)
    return json.loads(done.stdout.splitlines()[-1]), best


def calling(module: str, function: str, layout: Layout) -> str:
    return (
        "from pathlib import Path\nfrom specdec_core.evidence.layout import Layout\n"
        f"from specdec_core.evidence.{module} import {function}\n"
        f"{function}(layout=Layout(Path({str(layout.root)!r})))"
    )


def test_importing_the_wing_is_light():
    heavy, seconds = loaded_by("import specdec_core.evidence")
    assert heavy == [] and seconds < 1


def test_every_file_of_the_wing_can_be_imported_without_the_heavy_ones():
    names = [f"specdec_core.{path.parent.name}.{path.stem}" for path in WING if path.stem != "__init__"]
    heavy, seconds = loaded_by("\n".join(f"import {name}" for name in names))
    assert heavy == [] and seconds < 1


def test_the_claims_command_is_light(layout):
    heavy, seconds = loaded_by(calling("claims_table", "print_claims", layout))
    assert heavy == [] and seconds < 1


def test_a_replay_loads_no_torch(layout):
    heavy, _ = loaded_by(calling("report", "replay", layout))
    assert {"torch", "transformers", "numba"}.isdisjoint(heavy)


@pytest.mark.parametrize("path", WING, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_no_file_imports_the_engine_not_even_inside_a_function(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            assert name.split(".")[0] not in ("torch", "transformers", "numba")
            assert not name.startswith("specdec_core.") or name.startswith(GROUND)
            assert path.parent.name != "statistics" or not name.startswith("specdec_core.evidence")
