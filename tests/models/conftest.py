"""The real model, converted once a session, and tiny GGUF files made on the fly."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from specdec_core.models import registry
from specdec_core.models.checkpoints import Checkpoint
from specdec_core.models.tokenizer import Tokenizer
from tests import tiny_gguf as files


@pytest.fixture(scope="session")
def tiny() -> Checkpoint:
    """What the tiny GGUF files hold."""
    return files.gguf_model()


@pytest.fixture(scope="session")
def write_gguf(tiny) -> Callable[..., Path]:
    """Write the tiny model as a GGUF file, with changes to metadata and tensors (None leaves one out)."""
    return partial(files.write_gguf, tiny)


@pytest.fixture(scope="session")
def tiny_gguf(write_gguf, tmp_path_factory) -> Path:
    return write_gguf(tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture(scope="session")
def tiny_metadata() -> Callable[[], dict]:
    return files.metadata


@pytest.fixture
def own_cache(tmp_path, monkeypatch) -> Path:
    """An empty cache for this test."""
    monkeypatch.setenv("SPECDEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="session")
def smollm() -> Checkpoint:
    """The real model, from the shared cache."""
    return registry.load("smollm2-135m-instruct")


@pytest.fixture(scope="session")
def smollm_tokenizer(smollm) -> Tokenizer:
    return Tokenizer.from_folder(smollm.folder)
