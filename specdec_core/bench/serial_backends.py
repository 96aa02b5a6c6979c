"""The backends of notebook 03 by name: every engine and file format, opened with the same number of threads."""

from __future__ import annotations

import gc
import sys
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

import numpy as np
import torch

from specdec_core.bench.sources import INT8_PASS, PASS, TIMING
from specdec_core.forensics.dispatch import WeightMatrix, weight_matrices
from specdec_core.models import gguf
from specdec_core.models.checkpoints import Checkpoint
from specdec_core.models.errors import MissingPackage, ModelError
from specdec_core.models.llama_library import library as llama_library
from specdec_core.models.quantize import dequantised_checkpoint, gguf_source, variant
from specdec_core.pairs import Opened
from specdec_core.placement import Placement, PlacementError
from specdec_core.protocol import Target
from specdec_core.targets.huggingface import HuggingFaceTarget
from specdec_core.targets.llamacpp import LlamaCppOptions, LlamaCppTarget
from specdec_core.targets.mlx import MlxOptions, MlxTarget
from specdec_core.targets.mlx import library as mlx_library
from specdec_core.targets.transformer import Transformer

CODE = (
    *PASS,
    *TIMING,
    *INT8_PASS,
    "specdec_core/protocol.py",
    "specdec_core/models/gguf.py",
    "specdec_core/models/quantize.py",
    "specdec_core/models/llama_library.py",
    "specdec_core/targets/padded.py",
    "specdec_core/targets/llamacpp.py",
    "specdec_core/targets/llamacpp_context.py",
    "specdec_core/targets/mlx.py",
    "specdec_core/targets/huggingface.py",
    "specdec_core/targets/huggingface_cache.py",
    "specdec_core/forensics/dispatch.py",
    "specdec_core/bench/serial_backends.py",
)
"""One pass of any backend."""

WIDEST = 32
"""Tokens of a pass: llama.cpp's decodes are no longer, which keeps its buffers small."""


@dataclass(frozen=True)
class Backend:
    """An engine with weights in one format. `gpu`: llama.cpp with all layers on the GPU."""

    engine: str
    format: str
    repack: bool | None = None
    gpu: bool = False

    @property
    def quantized(self) -> bool:
        return self.format not in ("float32", "F32", "F16")

    @property
    def exact(self) -> bool:
        """Whether a token's bits do not depend on how many are verified with it."""
        return self.engine == "numba"


BACKENDS = MappingProxyType(
    {
        "numba float32": Backend("numba", "float32"),
        "numba int8": Backend("numba", "int8"),
        "torch float32": Backend("torch", "float32"),
        "transformers float32": Backend("transformers", "float32"),
        "MLX 4-bit": Backend("mlx", "4-bit"),
        "MLX 8-bit": Backend("mlx", "8-bit"),
        "llama.cpp F32": Backend("llama.cpp", "F32", True),
        "llama.cpp F16": Backend("llama.cpp", "F16", True),
        "llama.cpp Q8_0": Backend("llama.cpp", "Q8_0", True),
        "llama.cpp Q4_K_M": Backend("llama.cpp", "Q4_K_M", True),
        "llama.cpp Q4_1": Backend("llama.cpp", "Q4_1", True),
        "llama.cpp Q4_0": Backend("llama.cpp", "Q4_0", True),
        "llama.cpp Q4_0, not repacked": Backend("llama.cpp", "Q4_0", False),
        "llama.cpp F16, GPU": Backend("llama.cpp", "F16", True, gpu=True),
        "llama.cpp Q4_1, GPU": Backend("llama.cpp", "Q4_1", True, gpu=True),
        "llama.cpp Q4_0, GPU": Backend("llama.cpp", "Q4_0", True, gpu=True),
    }
)
SHIPPED = "Q4_1"
"""Format of the file that SmolLM2 ships in. F32 is made from it, so that both hold the same values."""


class BackendFactory:
    """Opens backends over one model: our engine's `opened`, and its GGUF file (a registered model's name, or a path).

    threads  of every engine that can be told; default: those of the opened target.
    """

    def __init__(self, opened: Opened, model: str | Path | None = None, threads: int | None = None):
        self.opened, self.model = opened, model or opened.name
        self.threads = threads or opened.target.placement.workers
        self._files: dict[str, Path] = {}
        self._matrices: dict[Path, list[WeightMatrix]] = {}

    def open(self, name: str) -> Target:
        """A target. Raises MissingPackage, PlacementError or another ModelError, saying what is not here."""
        backend = require_backend(name)
        checkpoint = self.opened.checkpoint
        if backend.engine == "numba":
            target, placement = self.opened.target, Placement("numba", dtype=backend.format, threads=self.threads)
            alike = [(each.engine, each.dtype, each.workers) for each in (target.placement, placement)]
            return target if alike[0] == alike[1] else target.placed(placement)
        if backend.engine == "torch":
            return Transformer(checkpoint, Placement("torch", "cpu", "float32"))
        if backend.engine == "transformers":
            return HuggingFaceTarget.open(checkpoint.folder or self.opened.name)
        if backend.engine == "mlx":
            return MlxTarget(checkpoint, MlxOptions(bits=int(backend.format[0]), group=_group(checkpoint)))
        options = LlamaCppOptions(
            threads=self.threads,
            gpu_layers=-1 if backend.gpu else 0,
            repack=bool(backend.repack),
            cache_type="float32",
            branches=0,
            chunk=WIDEST,
        )
        return LlamaCppTarget(self.file(backend.format), options, name)

    def file(self, kind: str) -> Path:
        """The GGUF file in this format: the shipped one itself, or what llama.cpp's quantizer makes of it."""
        if kind not in self._files:  # a file is found by its digest, which takes a while
            self._files[kind] = self._find(kind)
        return self._files[kind]

    def _find(self, kind: str) -> Path:
        source = gguf_source(self.model)
        shipped = source if self._holds_shipped(source) else variant(source, SHIPPED)
        if kind == SHIPPED:
            return shipped
        return variant(shipped if kind == "F32" else source, kind)

    def matrices(self, kind: str) -> list[WeightMatrix]:
        """Weight matrices of the file in this format; files are read once, which takes seconds."""
        return self._matrices_of(self.file(kind))

    def _matrices_of(self, file: Path) -> list[WeightMatrix]:
        if file not in self._matrices:
            self._matrices[file] = weight_matrices(file)
            gc.collect()  # the gguf package leaves a vocabulary of small objects behind, in cycles
        return self._matrices[file]

    def _holds_shipped(self, source: Path) -> bool:
        return any(matrix.part == "up" and matrix.kind == SHIPPED for matrix in self._matrices_of(source))

    def device(self, name: str) -> str:
        """cpu, metal or cuda: where this backend computes on this machine."""
        backend, accelerator = require_backend(name), "metal" if sys.platform == "darwin" else "cuda"
        if backend.engine == "mlx":
            return "metal" if mlx_library().metal.is_available() else "cpu"
        return accelerator if backend.gpu else "cpu"

    def computes_on_gpu(self) -> bool:
        """Whether llama.cpp's build or MLX has a GPU here."""
        found = []
        for has_gpu in (
            lambda: llama_library().llama_supports_gpu_offload(),
            lambda: mlx_library().metal.is_available(),
        ):
            with suppress(MissingPackage):
                found.append(bool(has_gpu()))
        return any(found)

    def told_threads(self, name: str) -> int | None:
        """Threads that the engine was told to use; MLX decides itself."""
        return None if require_backend(name).engine == "mlx" else self.threads

    def reference(self, name: str, target: Target) -> Transformer:
        """The values that a backend's weights stand for, in float64: near-ties are judged in it."""
        if isinstance(target, LlamaCppTarget):
            return _float64(dequantised_checkpoint(target.file))
        if isinstance(target, MlxTarget):
            return _float64(target.dequantised_checkpoint())
        return self.opened.target.float64_reference()


def require_backend(name: str) -> Backend:
    if name not in BACKENDS:
        raise ValueError(f"unknown backend {name!r}: expected one of {', '.join(BACKENDS)}")
    return BACKENDS[name]


NOT_HERE = (ModelError, PlacementError)
"""What opening a backend raises where the machine lacks it."""


def same_values(one: Path, other: Path) -> bool:
    """Whether two GGUF files' tensors stand for the very same numbers, bit for bit in float32."""
    if one == other:
        return True
    first, second = ({t.name: t for t in gguf.open_gguf(file).tensors} for file in (one, other))
    gc.collect()
    return first.keys() == second.keys() and all(
        np.array_equal(gguf.dequantised(tensor), gguf.dequantised(second[name])) for name, tensor in first.items()
    )


def _group(checkpoint: Checkpoint) -> int:
    """MLX's usual group of 64, or 32 for a model whose rows are no multiple of 64."""
    c = checkpoint.config
    return 64 if not any(size % 64 for size in (c.hidden_size, c.intermediate_size, c.heads * c.head_dim)) else 32


def _float64(checkpoint: Checkpoint) -> Transformer:
    from specdec_core.kernels.llama_step.torch import StreamedTorchLlama

    placement = Placement("torch", "cpu", "float64")
    step = StreamedTorchLlama(checkpoint.config, checkpoint.weights, placement)
    return Transformer(checkpoint, placement, step=step)


class TorchThreads:
    """Within: torch works with so many threads, as the other engines do."""

    def __init__(self, threads: int):
        self._threads, self._before = threads, torch.get_num_threads()

    def __enter__(self) -> None:
        torch.set_num_threads(self._threads)

    def __exit__(self, *error: object) -> None:
        torch.set_num_threads(self._before)
