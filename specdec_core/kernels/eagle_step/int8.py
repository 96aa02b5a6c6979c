"""The drafter's step with int8 weights, compiled for the CPU: a quarter of the stream, the same bits at any width.

Every matrix and the inputs of every product are quantized as skinny_linear/int8.py says, the two halves of the
attention's input apart. What lies between the products is float32: norms, attention, the cache and the hidden states
that go from step to step. As in float32, what a node comes to does not depend on the nodes, rows or parts of a tree
that are computed with it, nor on the number of threads. It is not what the float32 step finds, but near to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec_core.kernels.eagle_step import EagleShape
from specdec_core.kernels.eagle_step.int8_step import EagleMatrices, int8_eagle_step
from specdec_core.kernels.eagle_step.numba import NumbaEagle, fc_apart, matrix_of, model_of
from specdec_core.kernels.llama_step.int8 import end_to_end, room_for_rows, tiles_of, width_of
from specdec_core.kernels.llama_step.int8_step import Rows, Width
from specdec_core.kernels.llama_step.numba_step import Model, Pass, Scratch
from specdec_core.kernels.simd import padded
from specdec_core.kernels.skinny_linear.int8 import QuantizedLinear, aligned_bytes, row_bytes
from specdec_core.kernels.threads import team


class Int8Eagle(NumbaEagle):
    """`EagleStep` with int8 weights, quantized once; the originals are not kept. Weights must be finite (ValueError).

    Inputs, returned arrays, errors of a call and Python threads as for `NumbaEagle`; of `placement` only the number of
    threads is used.
    """

    def _pack(self, weights: Mapping[str, Any]) -> None:
        self._model, self._matrices = pack_int8_eagle(self.config, weights)
        try:
            self._join = QuantizedLinear(fc_apart(self.config, weights), self.workers)
        except ValueError as error:
            raise ValueError(f"fc.weight: {error}") from None
        self._rows = Rows(aligned_bytes(0), aligned_bytes(0))

    def _run(self, work: Pass, scratch: Scratch, *states: np.ndarray) -> None:
        m, nodes, scored = self._matrices, len(work.tokens), len(work.scored)
        inputs = max(nodes * max(m.joined.step, m.hidden.step, m.queries.step), scored * m.hidden.step)
        self._rows = room_for_rows(self._rows, inputs, nodes * m.inner.step)
        team(self.workers).run(int8_eagle_step, self._model, m, work, scratch, self._rows, *states)


def pack_int8_eagle(config: EagleShape, weights: Mapping[str, Any]) -> tuple[Model, EagleMatrices]:
    """Norms, padded with zeros, as `Model.weights`, in the order of the layer; all matrices but fc in one array of
    bytes, in the order of `pack_eagle`.

    KeyError for a tensor that is absent; ValueError for one of another shape, and for a matrix with NaN or infinities.
    """
    c = config
    hidden, width, inner = c.hidden_size, padded(c.hidden_size), c.intermediate_size
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    norms = np.zeros((4, width), np.float32)
    for row, name in enumerate(("embedding_norm", "hidden_norm", "post_attention_layernorm", "norm")):
        norms[row, :hidden] = matrix_of(weights, name, hidden)

    def tiles(name: str, rows: int, inputs: int) -> np.ndarray:
        return tiles_of({f"{name}.weight": matrix_of(weights, name, rows, inputs)})

    attention = {
        f"self_attn.{which}_proj": matrix_of(weights, f"self_attn.{which}_proj", rows, 2 * hidden)
        for which, rows in (("q", queries), ("k", keys), ("v", keys))
    }
    halves = [
        tiles_of({f"{name}.weight, {half} half": _columns(matrix, at, hidden) for name, matrix in attention.items()})
        for half, at in (("first", 0), ("second", hidden))
    ]
    gate_up = [tiles(f"mlp.{which}_proj", inner, hidden) for which in ("gate", "up")]
    packed = [
        np.concatenate(halves, axis=1),  # a tile is its groups, one after the other
        tiles("self_attn.o_proj", hidden, queries),
        np.stack(gate_up, axis=1),
        tiles("mlp.down_proj", hidden, inner),
        tiles("head", c.vocabulary, hidden),
        tiles("embedding_proj", hidden, hidden),
    ]
    qkv, out, gates, down, head, embedding = (int(at) for at in np.cumsum([0, *(each.size for each in packed[:-1])]))
    model = model_of(c, norms.reshape(-1), [0, qkv, out, 2 * width, gates, down, embedding], 3 * width, head)
    single = width_of(hidden)
    flat = end_to_end([each.reshape(-1) for each in packed])
    return model, EagleMatrices(flat, _twice(single), single, width_of(queries), width_of(inner))


def _columns(matrix: np.ndarray, first: int, count: int) -> np.ndarray:
    return np.ascontiguousarray(matrix[:, first : first + count])


def _twice(width: Width) -> Width:
    """Two rows of this width, one after the other."""
    groups = 2 * width.groups
    return Width(2 * width.size, width.group, groups, row_bytes(groups * width.group, width.group))
