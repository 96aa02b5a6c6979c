"""A tiny GGUF file, the truth about it, and llama.cpp on it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pytest

from specdec_core.models.quantize import dequantised_checkpoint
from tests.llama_reference import Reference
from tests.tiny_gguf import gguf_model, write_gguf

if TYPE_CHECKING:
    from specdec_core.targets.llamacpp import LlamaCppTarget


@pytest.fixture(scope="session")
def gguf_folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("llamacpp")


@pytest.fixture(scope="session")
def gguf_file(gguf_folder) -> Path:
    return write_gguf(gguf_model(context=128), gguf_folder / "tiny.gguf")


@pytest.fixture(scope="session")
def truth(gguf_file) -> Callable[[Sequence[int]], np.ndarray]:
    """Our float64 decoder at the very values of the file."""
    return Reference(dequantised_checkpoint(gguf_file)).last


@pytest.fixture(scope="session")
def llamacpp(gguf_file) -> LlamaCppTarget:
    from specdec_core.targets.llamacpp import LlamaCppOptions, LlamaCppTarget

    return LlamaCppTarget(gguf_file, LlamaCppOptions(threads=1, cache_type="float32"))
