"""The drafter's step with int8 weights, compiled for the CPU: a quarter of the stream, the same bits at any width.

Every matrix and the inputs of every product are quantized as skinny_linear/int8.py says, the two halves of the
attention's input apart. What lies between the products is float32: norms, attention, the cache and the hidden states
that go from step to step. As in float32, what a node comes to does not depend on the nodes, rows or parts of a tree
that are computed with it, nor on the number of threads. It is not what the float32 step finds, but near to it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec_core.kernels.attention.numba import nodes_of_unit
from specdec_core.kernels.eagle_step import EagleShape, require_shape
from specdec_core.kernels.eagle_step.int8_step import EagleMatrices, int8_eagle_step
from specdec_core.kernels.eagle_step.numba import _NO_FEATURES, _NO_LAYERS, NumbaEagle, _matrix
from specdec_core.kernels.eagle_step.numba_step import EMBEDDING_CLAIM
from specdec_core.kernels.llama_step import KeyValueCache
from specdec_core.kernels.llama_step.int8 import end_to_end, room_for_rows, tiles_of, width_of
from specdec_core.kernels.llama_step.int8_step import Rows, Width
from specdec_core.kernels.llama_step.numba import _plain, _units
from specdec_core.kernels.llama_step.numba_step import Model, Pass, Scratch
from specdec_core.kernels.plan import StepPlan
from specdec_core.kernels.rotary import rotary_tables
from specdec_core.kernels.simd import padded
from specdec_core.kernels.skinny_linear.int8 import QuantizedLinear, aligned_bytes, row_bytes
from specdec_core.kernels.skinny_linear.numba import require_float32
from specdec_core.kernels.threads import COUNTER, team
from specdec_core.placement import Placement


class Int8Eagle(NumbaEagle):
    """`EagleStep` with int8 weights, quantized once; the originals are not kept. Weights must be finite (ValueError).

    Inputs, returned arrays, errors of a call and Python threads as for `NumbaEagle`; of `placement` only the number of
    threads is used.
    """

    def __init__(self, config: EagleShape, weights: Mapping[str, Any], placement: Placement):
        # Not the parent's: that would pack the weights in float32.
        self.config = config
        self.workers = placement.workers
        self._model, self._matrices = pack_int8_eagle(config, weights)
        self._join = _quantized_join(config, weights, self.workers)
        self._ones = np.ones(padded(config.hidden_size), np.float32)
        self._scratch: Scratch | None = None
        self._held = (0, 0, 0)
        self._rows = Rows(aligned_bytes(0), aligned_bytes(0))
        self._calling = threading.Lock()

    def __call__(
        self, plan: StepPlan, cache: KeyValueCache, embedded: np.ndarray, hidden: np.ndarray, scored: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        c, nodes = self.config, len(plan.tokens)
        for name, values in (("embedded", embedded), ("hidden", hidden)):
            require_float32(values, name, ("nodes", "hidden"))
            require_shape(values, name, (nodes, c.hidden_size), "[nodes, hidden]")
        self._require_cache(cache)
        asked = _plain(scored)
        visible = self._visible(plan, cache, asked)
        logits = np.empty((len(asked), padded(c.vocabulary)), np.float32)
        continued = np.empty((nodes, c.hidden_size), np.float32)
        work = Pass(
            tokens=_plain(plan.tokens),
            slots=_plain(plan.slots),
            entries=_plain(plan.entries),
            positions=_plain(plan.positions),
            visible=visible,
            units=_units(plan, nodes_of_unit(c.heads // c.kv_heads)),
            scored=asked,
            layers=1,
            feature_layers=_NO_LAYERS,
            keys=cache.keys.numpy().reshape(-1),
            values=cache.values.numpy().reshape(-1),
            cache_slots=cache.keys.shape[1],
            capacity=cache.keys.shape[3],
            features=_NO_FEATURES,
            logits=logits.reshape(-1),
            counters=np.zeros((EMBEDDING_CLAIM + 1) * COUNTER, np.int64),
        )
        flat = [_plain(each, np.float32).reshape(-1) for each in (embedded, hidden)]
        with self._calling:
            scratch, m = self._room(nodes, len(asked), int(visible.lengths.max())), self._matrices
            inputs = max(nodes * max(m.joined.step, m.hidden.step, m.queries.step), len(asked) * m.hidden.step)
            self._rows = room_for_rows(self._rows, inputs, nodes * m.inner.step)
            team(self.workers).run(
                int8_eagle_step, self._model, m, work, scratch, self._rows, *flat, continued.reshape(-1)
            )
        if logits.shape[1] != c.vocabulary:
            logits = np.ascontiguousarray(logits[:, : c.vocabulary])
        return logits, continued


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
        norms[row, :hidden] = _matrix(weights, name, hidden)

    def tiles(name: str, rows: int, inputs: int) -> np.ndarray:
        return tiles_of({f"{name}.weight": _matrix(weights, name, rows, inputs)})

    attention = {
        f"self_attn.{which}_proj": _matrix(weights, f"self_attn.{which}_proj", rows, 2 * hidden)
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
    tables = rotary_tables(c.context, c.head_dim, c.rope_theta)
    cosine, sine = (table.astype(np.float32).reshape(-1) for table in tables)
    model = Model(
        weights=norms.reshape(-1),
        places=np.array([[0, qkv, out, 2 * width, gates, down, embedding]], np.int64),
        embedding=norms.reshape(-1),
        tied=False,
        final_norm=3 * width,
        head=head,
        cosine=cosine,
        sine=sine,
        hidden=hidden,
        inner=inner,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        vocabulary=c.vocabulary,
        epsilon=float(c.norm_eps),
    )
    single = width_of(hidden)
    flat = end_to_end([each.reshape(-1) for each in packed])
    return model, EagleMatrices(flat, _twice(single), single, width_of(queries), width_of(inner))


def _quantized_join(config: EagleShape, weights: Mapping[str, Any], workers: int) -> QuantizedLinear:
    """fc, with zeros where the padding between the normed hidden states lies."""
    c = config
    joined = _matrix(weights, "fc", c.hidden_size, c.features * c.hidden_size)
    apart = np.zeros((c.hidden_size, c.features, padded(c.hidden_size)), np.float32)
    apart[:, :, : c.hidden_size] = joined.reshape(c.hidden_size, c.features, c.hidden_size)
    try:
        return QuantizedLinear(apart.reshape(c.hidden_size, -1), workers)
    except ValueError as error:
        raise ValueError(f"fc.weight: {error}") from None


def _columns(matrix: np.ndarray, first: int, count: int) -> np.ndarray:
    return np.ascontiguousarray(matrix[:, first : first + count])


def _twice(width: Width) -> Width:
    """Two rows of this width, one after the other."""
    groups = 2 * width.groups
    return Width(2 * width.size, width.group, groups, row_bytes(groups * width.group, width.group))
