"""The layering of the package, from the ground up: a module imports from lower layers or from its own."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import specdec_core

LAYERS: tuple[tuple[str, ...], ...] = (
    ("statistics",),
    ("cache",),
    ("evidence",),  # so it knows statistics and the cache folder, and nothing of the engine
    ("arrays", "randomness", "topology", "placement"),
    ("prompts",),
    ("sampling",),
    ("kernels",),
    ("state",),
    ("models",),
    ("protocol",),
    ("rejection",),
    ("rows",),
    ("targets",),
    ("drafters",),
    ("lengths",),
    ("pairs",),
    ("decode",),
    ("published",),
    ("measure",),
    ("forensics",),
    ("talk",),
    ("training",),
    ("bench",),
    ("doctor",),
    ("__main__",),
)
HEIGHT = {name: height for height, layer in enumerate(LAYERS) for name in layer}
ENGINE = [name for name, height in HEIGHT.items() if HEIGHT["arrays"] <= height <= HEIGHT["decode"]]
WITHOUT_TORCH = ("statistics", "cache", "evidence")

ROOT = Path(specdec_core.__file__).parent


def layer_of(file: Path) -> str:
    return file.relative_to(ROOT).parts[0].removesuffix(".py")


def imports(source: str) -> Iterator[str]:
    """Modules that a file imports anywhere, functions included, by their full names."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"line {node.lineno}: write imports in full"
            if node.module == "specdec_core":
                yield from (f"specdec_core.{alias.name}" for alias in node.names)
            else:
                yield node.module or ""


def own(modules: Iterator[str]) -> set[str]:
    """Layers of our own package among imported modules."""
    return {module.split(".")[1] for module in modules if module.startswith("specdec_core.")} - {"__version__"}


def complaints(layer: str, source: str) -> list[str]:
    found = []
    for other in sorted(own(imports(source))):
        if HEIGHT[other] > HEIGHT[layer]:
            found.append(f"{layer} imports {other}, which lies above it")
        if layer in ENGINE and other in ("statistics", "evidence"):
            found.append(f"{layer} imports {other}: the engine knows nothing of claims")
    if layer in WITHOUT_TORCH:
        found += [f"{layer} imports {name}" for name in imports(source) if name.split(".")[0] == "torch"]
    return found


FILES = sorted(file for file in ROOT.rglob("*.py") if file != ROOT / "__init__.py")


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_module_imports_from_below(file):
    assert layer_of(file) in HEIGHT, f"{layer_of(file)} has no layer yet: give it one in LAYERS"
    assert not complaints(layer_of(file), file.read_text(encoding="utf-8"))


def test_the_package_itself_imports_nothing():
    assert not list(imports((ROOT / "__init__.py").read_text(encoding="utf-8")))


def test_no_layer_is_named_twice():
    assert len(HEIGHT) == sum(map(len, LAYERS))


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("sampling", "from specdec_core.decode import decode"),
        ("targets", "def late():\n    import specdec_core.drafters.model"),
        ("rows", "from specdec_core import targets"),
        ("evidence", "from specdec_core.protocol import Round"),
        ("evidence", "import torch.nn"),
        ("statistics", "from specdec_core.evidence import claims"),
        ("decode", "from specdec_core.evidence.claims import CLAIMS"),
    ],
)
def test_an_import_from_above_is_seen(layer, source):
    assert complaints(layer, source)


@pytest.mark.parametrize(
    ("layer", "source"),
    [
        ("targets", "from specdec_core.targets.table import TableTarget"),
        ("arrays", "from specdec_core.topology import chain"),
        ("decode", "import numpy\nfrom specdec_core.rows import Row"),
        ("__main__", "from specdec_core import __version__"),
    ],
)
def test_an_import_from_below_or_beside_is_fine(layer, source):
    assert not complaints(layer, source)
