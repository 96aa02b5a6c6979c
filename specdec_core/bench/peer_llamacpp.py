"""llama-cpp-python's high-level `Llama` as a peer: its own loop, plain and with its own prompt lookup.

Everything is as the package does it (keys and values in float16, its Python loop and sampler), but for one setting: the
same threads serve one token and many, as in our own use of the library.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

from specdec_core.bench.peer_decoders import AR, PLAIN, Decoder, Peer, PeerRun, Setting, Stopwatch, grid, with_default
from specdec_core.bench.serial_backends import WIDEST, BackendFactory
from specdec_core.models.errors import UnsupportedModel
from specdec_core.models.llama_library import complaint, forget_complaints, library
from specdec_core.protocol import Target
from specdec_core.sampling import Options
from specdec_core.targets.llamacpp import LlamaCppOptions, LlamaCppTarget

LOOKUP = "prompt lookup"
FORMATS = ("F32", "Q8_0", "Q4_1", "Q4_0")
LOOKUP_DEFAULT = Setting(10, 2)
"""`LlamaPromptLookupDecoding`'s own."""
CONTEXT = 1024
"""Longest sequence; its lookup keeps the logits of all of it, 200 MB for a vocabulary of 49152."""


def llamacpp_peers(
    factory: BackendFactory, format: str, drafts: Sequence[int], ngrams: Sequence[int], context: int = CONTEXT
) -> list[Peer]:
    """Peers over the model's file in this format. MissingPackage without llama.cpp, UnsupportedModel if it cannot load
    the file."""
    library()
    file, threads, backend = factory.file(format), factory.threads, f"llama.cpp {format}"

    @cache
    def judged() -> tuple[Target, Target]:
        options = LlamaCppOptions(threads=threads, cache_type="float16", branches=0, chunk=WIDEST)
        target = LlamaCppTarget(file, options, backend)
        return target, factory.reference(backend, target)

    def peer(method: str, settings: Sequence[Setting], decoder: Decoder) -> Peer:
        return Peer(
            backend, "llama.cpp", format, method, tuple(settings), decoder, judged, file=file.name, threads=threads
        )

    return [
        peer(AR, [PLAIN], _plain(_open(file, threads, context))),
        # A model of its own: llama.cpp is told beforehand whether the logits of all tokens are wanted.
        peer(
            LOOKUP,
            with_default(grid(drafts, ngrams), LOOKUP_DEFAULT),
            _lookup(_open(file, threads, context, draft_model=_CountedLookup(LOOKUP_DEFAULT))),
        ),
    ]


def _open(file: Path, threads: int, context: int, draft_model: Any = None) -> Any:
    from llama_cpp import Llama

    forget_complaints()
    try:
        return Llama(
            str(file),
            n_ctx=context,
            n_threads=threads,
            n_threads_batch=threads,
            draft_model=draft_model,
            # Speculation needs all logits; unless it is said so, the package has room for those of one batch only.
            logits_all=draft_model is not None,
            verbose=False,
        )
    except ValueError as error:
        raise UnsupportedModel(f"llama.cpp cannot load {file} ({error}): {complaint()}") from error


def _plain(llama: Any) -> Decoder:
    def decoder(prompt: tuple[int, ...], options: Options, setting: Setting) -> PeerRun:
        watch = _listen(llama, prompt, options)
        return watch.run(watch.emissions - 1)

    return decoder


def _lookup(llama: Any) -> Decoder:
    def decoder(prompt: tuple[int, ...], options: Options, setting: Setting) -> PeerRun:
        llama.draft_model = counted = _CountedLookup(setting)
        return _listen(llama, prompt, options).run(counted.calls)

    return decoder


class _CountedLookup:
    """The package's own lookup. It is asked once before every pass but the first, so its calls count the passes."""

    def __init__(self, setting: Setting) -> None:
        from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

        self._lookup = LlamaPromptLookupDecoding(max_ngram_size=setting.ngram or 0, num_pred_tokens=setting.draft)
        self.calls = 0

    def __call__(self, input_ids: np.ndarray, /, **how: Any) -> np.ndarray:
        self.calls += 1
        return self._lookup(input_ids, **how)


def _listen(llama: Any, prompt: tuple[int, ...], options: Options) -> Stopwatch:
    watch = Stopwatch()
    for token in _tokens(llama, prompt, options):
        watch.emit([token])
        if token in options.eos or watch.emissions == options.max_new_tokens:
            break
    return watch


def _tokens(llama: Any, prompt: tuple[int, ...], options: Options) -> Iterator[int]:
    longest = llama.n_ctx()
    if len(prompt) + options.max_new_tokens > longest:
        raise ValueError(
            f"{len(prompt)} prompt tokens and {options.max_new_tokens} new ones: this peer was opened for {longest}; "
            "open it with a longer context"
        )
    llama.reset()  # or a prompt that begins like the last one is not prefilled in the same passes
    llama.set_seed(options.seed)
    # Named because the package's own defaults are others: min_p 0.05, top_p 0.95, top_k 40.
    return llama.generate(list(prompt), temp=options.temperature, top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0)
