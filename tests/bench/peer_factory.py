"""One tiny model as our checkpoint and as a GGUF file: what the engines of peers are opened over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from specdec_core.bench.serial_backends import BackendFactory
from specdec_core.measure.sweep import Case
from specdec_core.models.checkpoints import save_checkpoint
from specdec_core.models.quantize import dequantised_checkpoint
from specdec_core.pairs import open_target
from specdec_core.placement import Placement
from tests.tiny import save_tiny
from tests.tiny_gguf import gguf_model, write_gguf

SIZES = {"hidden_size": 64, "heads": 4, "kv_heads": 2, "head_dim": 16}
CASES = [
    Case("math-1", "math", "report", (1, 40, 41, 42, 43, 44, 40, 41, 42, 43)),
    Case("chat-1", "chat", "report", (1, 90, 91, 50, 90, 91, 50, 60, 90, 91)),
]


@contextmanager
def tiny_factory(folder: Path, engine: str = "numba", features: tuple[int, ...] = ()) -> Iterator[BackendFactory]:
    """Within: files that llama.cpp's quantizer makes go into the folder. As for a registered model, the checkpoint
    holds the values of the file, which is in the shipped format. One thread; `features` are layers for a drafter."""
    sizes = {"context": 256, "layers": 3, **SIZES}
    file = write_gguf(gguf_model(**sizes), folder / "tiny.gguf", kind=GGMLQuantizationType.Q4_1)
    checkpoint = dequantised_checkpoint(file)
    model = save_tiny(folder / "model", vocabulary=checkpoint.config.vocabulary, **sizes)
    save_checkpoint(checkpoint, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SPECDEC_CACHE", str(folder / "cache"))
        yield BackendFactory(open_target(str(model), Placement(engine, threads=1), features), file)


def up_to(text: Sequence[int], end: Sequence[int]) -> tuple[int, ...]:
    """The text up to its first end token, which is the last of it."""
    ended = next((index for index, token in enumerate(text) if token in end), len(text))
    return tuple(text[: ended + 1])
