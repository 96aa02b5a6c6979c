"""The decoder step with int8 weights, compiled for the CPU: a quarter of the stream, the same bits at any width.

Every matrix and the inputs of every product are quantized as skinny_linear/int8.py says; what lies between the products
is float32, as are the cache and the embedding. Sums of integers are exact and all others have one fixed order, so as in
float32 a token's logits do not depend on how many tokens or rows are computed with it, on how a prompt is cut into
chunks or on the number of threads. They are not those of the float32 step: this is another model, near to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec_core.kernels.llama_step import LlamaShape
from specdec_core.kernels.llama_step.int8_step import Matrices, Rows, Width, int8_step
from specdec_core.kernels.llama_step.numba import EMBEDDING, NumbaLlama, head_name, model_of, plain, tensor_of
from specdec_core.kernels.llama_step.numba_step import (
    DOWN,
    GATE_UP,
    NORM,
    OUT,
    POST_NORM,
    QKV,
    Model,
    Pass,
    Scratch,
)
from specdec_core.kernels.simd import LANES, padded
from specdec_core.kernels.skinny_linear.int8 import aligned_bytes, group_of, groups_of, pack_int8, quantize, row_bytes
from specdec_core.kernels.threads import team


class Int8Llama(NumbaLlama):
    """`LlamaStep` with int8 weights, quantized once from weights by Hugging Face names, of any float dtype.

    The embedding is looked up in float32 rows, tied to the head or not: a pass reads only those of its tokens, so that
    they cost no time. Rows that are float32 already are used as they are, others are converted once.

    Weights must be finite (ValueError). Arrays, errors of a call and Python threads as for `NumbaLlama`; of `placement`
    only the number of threads is used.
    """

    def _pack(self, weights: Mapping[str, Any]) -> None:
        self._model, self._matrices = pack_int8_model(self.config, weights)
        self._rows = Rows(aligned_bytes(0), aligned_bytes(0))

    def _run(self, work: Pass, scratch: Scratch) -> None:
        m, nodes, scored = self._matrices, len(work.tokens), len(work.scored)
        inputs = max(nodes * max(m.hidden.step, m.queries.step), scored * m.hidden.step)
        self._rows = room_for_rows(self._rows, inputs, nodes * m.inner.step)
        team(self.workers).run(int8_step, self._model, m, work, scratch, self._rows)


def room_for_rows(rows: Rows, inputs: int, active: int) -> Rows:
    """Quantized rows of so many bytes: those at hand if there are enough."""
    needed = {"inputs": inputs, "active": active}
    grown = {name: aligned_bytes(size + size // 4) for name, size in needed.items() if getattr(rows, name).size < size}
    return rows._replace(**grown)


def pack_int8_model(config: LlamaShape, weights: Mapping[str, Any]) -> tuple[Model, Matrices]:
    """Norms, padded with zeros, as `Model.weights`; the matrices in one array of bytes, in the order of `pack_model`.

    KeyError for a tensor that is absent; ValueError for one of another shape, and for a matrix with NaN or infinities.
    """
    c = config
    hidden, inner, padded_hidden = c.hidden_size, c.intermediate_size, padded(c.hidden_size)
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    norms = np.zeros((2 * c.layers + 1, padded_hidden), np.float32)
    places = np.zeros((c.layers, 6), np.int64)
    places[:, NORM] = np.arange(c.layers) * 2 * padded_hidden
    places[:, POST_NORM] = places[:, NORM] + padded_hidden
    packed: list[np.ndarray] = []

    def get(name: str, *shape: int) -> np.ndarray:
        return tensor_of(config, weights, name, *shape)

    def tiles(inputs: int, **outputs: int) -> np.ndarray:
        return tiles_of({name: get(name, rows, inputs) for name, rows in outputs.items()})

    def put(matrix: np.ndarray) -> int:
        """Keep a packed matrix; where it begins."""
        packed.append(matrix.reshape(-1))
        return sum(each.size for each in packed[:-1])

    for layer in range(c.layers):
        prefix = f"model.layers.{layer}."
        attention, mlp = prefix + "self_attn.", prefix + "mlp."
        norms[2 * layer, :hidden] = get(prefix + "input_layernorm.weight", hidden)
        norms[2 * layer + 1, :hidden] = get(prefix + "post_attention_layernorm.weight", hidden)
        joined = {f"{attention}{which}_proj.weight": keys if which in "kv" else queries for which in "qkv"}
        places[layer, QKV] = put(tiles(hidden, **joined))
        places[layer, OUT] = put(tiles(queries, **{attention + "o_proj.weight": hidden}))
        gate, up = (tiles(hidden, **{f"{mlp}{which}_proj.weight": inner}) for which in ("gate", "up"))
        places[layer, GATE_UP] = put(np.stack([gate, up], axis=1))
        places[layer, DOWN] = put(tiles(inner, **{mlp + "down_proj.weight": hidden}))
    norms[-1, :hidden] = get("model.norm.weight", hidden)
    head = put(tiles(hidden, **{head_name(c): c.vocabulary}))
    # The embedding has rows of its own, whatever the head is.
    embedding = plain(get(EMBEDDING, c.vocabulary, hidden), np.float32).reshape(-1)
    final_norm = 2 * c.layers * padded_hidden
    model = model_of(c, norms.reshape(-1), places, final_norm, head, embedding=embedding, tied=False)
    return model, Matrices(end_to_end(packed), width_of(hidden), width_of(queries), width_of(inner))


def tiles_of(matrices: Mapping[str, np.ndarray]) -> np.ndarray:
    """Float32 matrices `[·, in]`, one below the other → `[tiles, bytes]`. ValueError names one that is not finite."""
    parts = []
    for name, matrix in matrices.items():
        try:
            parts.append(quantize(matrix))
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
    values, scales = (np.concatenate(each) for each in zip(*parts, strict=True))
    return pack_int8(values, scales).reshape(padded(len(values)) // LANES, -1)


def end_to_end(parts: list[np.ndarray]) -> np.ndarray:
    """Flat bytes, one part after the other, from the start of a cache line on."""
    whole = aligned_bytes(sum(part.size for part in parts))
    return np.concatenate(parts, out=whole)


def width_of(inputs: int) -> Width:
    group = group_of(inputs)
    return Width(inputs, group, groups_of(inputs, group), row_bytes(inputs, group))
