"""A GGUF file run by llama.cpp as a target: quantized kernels, on the CPU or with layers on a GPU.

The low-level interface of llama-cpp-python is used, because its high-level one keeps no logits of all positions. The
same thread count serves one token and many: llama.cpp has two settings, and different ones would hide how its kernels
scale with the number of tokens.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from specdec_core.arrays import Array
from specdec_core.models.errors import CorruptFile, UnknownModel, UnsupportedModel
from specdec_core.models.llama_library import complaint, forget_complaints, library
from specdec_core.placement import PlacementError, physical_threads
from specdec_core.protocol import Verification
from specdec_core.state.slots import require_context, require_tokens
from specdec_core.targets.llamacpp_context import LlamaContext
from specdec_core.topology import Forest

CACHE_TYPES = {"float32": 0, "float16": 1}
"""ggml's numbers of the types that keys and values may be kept in."""

_MAGIC = b"GGUF"


@dataclass(frozen=True)
class LlamaCppOptions:
    """How llama.cpp runs a file.

    threads     CPU threads, for one token and for many; None: every core this process may use.
    gpu_layers  layers on the GPU (Metal, CUDA) if this build has one; -1 all of them.
    repack      rearrange weights on loading for kernels that work on many tokens at once, where there are any
                (`use_extra_bufts`): the same values in another kernel.
    cache_type  of keys and values: 'float16', llama.cpp's own choice, or 'float32', to compare with other engines.
    flash       attention that never stores all scores; off, its sums are in the order of the plain one.
    branches    leaves of trees, beyond the first of each row, that one verification may have; 0 takes chains only.
    chunk       most tokens of one decode.
    """

    threads: int | None = None
    gpu_layers: int = 0
    repack: bool = True
    cache_type: str = "float16"
    flash: bool = False
    branches: int = 32
    chunk: int = 256

    def __post_init__(self) -> None:
        if self.cache_type not in CACHE_TYPES:
            raise PlacementError(f"cache type {self.cache_type!r}: expected one of {', '.join(CACHE_TYPES)}")
        for name, least in (("gpu_layers", -1), ("branches", 0), ("chunk", 1)):
            if getattr(self, name) < least:
                raise PlacementError(f"{name} {getattr(self, name)}: expected at least {least}")
        if self.threads is not None and self.threads < 1:
            raise PlacementError(f"threads {self.threads}: expected at least 1")


class _Model:
    """A `llama_model *` that is freed when nothing uses it any more."""

    def __init__(self, file: Path, options: LlamaCppOptions):
        llama = library()
        params = llama.llama_model_default_params()
        params.n_gpu_layers, params.use_extra_bufts = options.gpu_layers, options.repack
        forget_complaints()
        self.pointer = llama.llama_model_load_from_file(str(file).encode(), params)
        if not self.pointer:
            raise UnsupportedModel(f"llama.cpp cannot load {file}: {complaint()}")
        weakref.finalize(self, llama.llama_model_free, self.pointer)


class LlamaCppTarget:
    """`Target` over a GGUF file.

    Raises MissingPackage without llama.cpp, UnknownModel if there is no such file, CorruptFile if it is no GGUF,
    UnsupportedModel if llama.cpp does not know the architecture or its state cannot be rolled back, PlacementError if
    layers are wanted on a GPU that this build does not have.
    """

    def __init__(self, file: str | Path, options: LlamaCppOptions | None = None, name: str | None = None):
        self._llama = library()
        self.file, self.options = Path(file).expanduser(), options or LlamaCppOptions()
        self.name = name or self.file.stem
        _require_gguf(self.file)
        if self.options.gpu_layers and not self._llama.llama_supports_gpu_offload():
            raise PlacementError(
                f"gpu_layers {self.options.gpu_layers}: this build of llama.cpp has no GPU; use 0, or build it for one"
            )
        self._model = _Model(self.file, self.options)
        pointer = self._model.pointer
        self._require_rollback()
        self.vocabulary = int(self._llama.llama_vocab_n_tokens(self._llama.llama_model_get_vocab(pointer)))
        self.context = int(self._llama.llama_model_n_ctx_train(pointer))

    @property
    def threads(self) -> int:
        return self.options.threads or physical_threads()

    @property
    def bytes(self) -> int:
        """Size of all weights."""
        return int(self._llama.llama_model_size(self._model.pointer))

    def new_state(self, slots: int, capacity: int) -> LlamaContext:
        params = self._llama.llama_context_default_params()
        params.n_threads = params.n_threads_batch = self.threads
        params.n_batch = params.n_ubatch = self.options.chunk
        params.type_k = params.type_v = CACHE_TYPES[self.options.cache_type]
        params.flash_attn_type = int(self.options.flash)
        params.offload_kqv = params.op_offload = bool(self.options.gpu_layers)
        return LlamaContext(self._model, params, slots, capacity, self.options.branches, self.vocabulary)

    def prefill(self, state: LlamaContext, slots: np.ndarray, prompts: Sequence[np.ndarray]) -> list[Array | None]:
        state.release(slots)
        for slot, prompt in zip(slots.tolist(), prompts, strict=True):
            tokens = np.asarray(prompt, np.int64)
            require_tokens(tokens, self.vocabulary)
            state.require_room(np.array([slot]), np.array([len(tokens) - 1]))
            require_context(np.zeros(1, np.int64), np.array([len(tokens) - 1]), self.context)
            for start in range(0, len(tokens) - 1, self.options.chunk):
                state.append(slot, tokens[start : min(start + self.options.chunk, len(tokens) - 1)])
        return [None] * len(prompts)

    def verify(self, state: LlamaContext, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> Verification:
        require_tokens(tokens, self.vocabulary)
        state.require_room(slots, forest.counts)
        require_context(state.lengths[slots][forest.rows], forest.depths, self.context)
        state.require_branches(forest)
        epoch = state.begin()
        return Verification(state.score(slots, tokens, forest), None, slots, forest, epoch)

    def commit(self, state: LlamaContext, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        state.keep(verification, paths)

    def synchronise(self) -> None:
        """Nothing to wait for: copying the logits out waits for whatever computes them."""

    def _require_rollback(self) -> None:
        llama, pointer = self._llama, self._model.pointer
        reasons = {
            "a recurrent state": llama.llama_model_is_recurrent(pointer),
            "a recurrent state in some layers": llama.llama_model_is_hybrid(pointer),
            "an encoder": llama.llama_model_has_encoder(pointer),
            "no causal order (a diffusion model)": llama.llama_model_is_diffusion(pointer),
            "a sliding window": llama.llama_model_n_swa(pointer) > 0,
        }
        for what, found in reasons.items():
            if found:
                raise UnsupportedModel(
                    f"{self.file} has {what}: what a rejected draft did cannot be taken back; choose a model with full "
                    "attention in every layer"
                )


def _require_gguf(file: Path) -> None:
    # Looked at here, because llama.cpp says of every such file only that loading failed.
    if not file.is_file():
        raise UnknownModel(f"no file {file}: name a GGUF file")
    with file.open("rb") as stream:
        start = stream.read(len(_MAGIC))
    if start != _MAGIC:
        raise CorruptFile(f"{file} is no GGUF file: it starts with {start!r} instead of {_MAGIC!r}")
