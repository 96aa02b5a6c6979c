"""A tiny model on disk, the machine's ceilings in small, and short prompts: benches run as they are, only sooner."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from specdec_core.bench import token_records
from specdec_core.evidence.layout import Layout
from specdec_core.measure import ceilings, clock
from specdec_core.models.rounding import rounded
from specdec_core.pairs import Opened, open_target
from specdec_core.placement import Placement
from specdec_core.prompts import DOMAINS, Prompt
from tests.tiny import save_tiny


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory) -> Path:
    return save_tiny(tmp_path_factory.mktemp("tiny"), context=600)


@pytest.fixture(scope="session")
def tiny_opened(tiny_folder) -> Opened:
    """On the compiled engine, one thread."""
    return open_target(str(tiny_folder), Placement("numba", threads=1))


def shrink(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ceilings, "READ_BYTES", 1 << 16)
    patch.setattr(ceilings, "GEMM_SIZE", 32)
    patch.setattr(clock, "SETTLE", 0.0)


@pytest.fixture
def small_ceilings(monkeypatch) -> None:
    shrink(monkeypatch)


@pytest.fixture(scope="module")
def small_ceilings_of_module() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        shrink(patch)
        yield


@pytest.fixture(scope="session")
def short_prompts() -> tuple[Prompt, ...]:
    """Two tuning and two report prompts of each domain."""
    return tuple(
        Prompt(f"{domain}-{split}-{number}", domain, f"{domain} {number * 7}, again", "short", None, split)
        for domain in DOMAINS
        for split in ("tuning", "report")
        for number in (1, 2)
    )


def copy_checkout(root: Path) -> Layout:
    """The package's sources, which records are stamped with, and a build folder of its own."""
    own = Layout(root)
    shutil.copytree(Layout().package, own.package, ignore=shutil.ignore_patterns("__pycache__"))
    own.notebooks.mkdir()
    return own


@pytest.fixture
def layout(tmp_path) -> Layout:
    return copy_checkout(tmp_path)


@pytest.fixture(scope="module")
def layout_of_module(tmp_path_factory) -> Layout:
    return copy_checkout(tmp_path_factory.mktemp("checkout"))


def small_design(patch: pytest.MonkeyPatch, prompts: tuple[Prompt, ...], length: int) -> None:
    """Five prompts and `length` tokens a sequence instead of 46 × 200; groups that a tiny model's matrices hold."""
    patch.setattr(token_records, "load_prompts", lambda domain: tuple(p for p in prompts if p.domain == domain))
    patch.setattr(token_records, "PROMPTS", 5)
    patch.setattr(token_records.Setting.options, "__defaults__", (length,))
    patch.setattr(token_records, "rounded", lambda checkpoint, bits: rounded(checkpoint, bits, 16))
