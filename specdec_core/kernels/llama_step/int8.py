"""The decoder step with int8 weights, compiled for the CPU: a quarter of the stream, the same bits at any width.

Every matrix and the inputs of every product are quantized as skinny_linear/int8.py says; what lies between the products
is float32, as are the cache and the embedding. Sums of integers are exact and all others have one fixed order, so as in
float32 a token's logits do not depend on how many tokens or rows are computed with it, on how a prompt is cut into
chunks or on the number of threads. They are not those of the float32 step: this is another model, near to it.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec_core.arrays import host
from specdec_core.kernels.attention.numba import nodes_of_unit
from specdec_core.kernels.llama_step import KeyValueCache, LlamaShape
from specdec_core.kernels.llama_step.int8_step import Matrices, Rows, Width, int8_step
from specdec_core.kernels.llama_step.numba import NumbaLlama, _plain, _units, _visible
from specdec_core.kernels.llama_step.numba_step import (
    CLAIMS,
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
from specdec_core.kernels.plan import StepPlan
from specdec_core.kernels.rotary import rotary_tables
from specdec_core.kernels.simd import LANES, padded
from specdec_core.kernels.skinny_linear.int8 import aligned_bytes, group_of, groups_of, pack_int8, quantize, row_bytes
from specdec_core.kernels.threads import COUNTER, team
from specdec_core.placement import Placement


class Int8Llama(NumbaLlama):
    """`LlamaStep` with int8 weights, quantized once from weights by Hugging Face names, of any float dtype.

    The embedding is looked up in float32 rows, tied to the head or not: a pass reads only those of its tokens, so that
    they cost no time. Rows that are float32 already are used as they are, others are converted once.

    Weights must be finite (ValueError). Arrays, errors of a call and Python threads as for `NumbaLlama`; of `placement`
    only the number of threads is used.
    """

    def __init__(self, config: LlamaShape, weights: Mapping[str, Any], placement: Placement):
        # Not the parent's: that would pack the weights in float32.
        self.config = config
        self.workers = placement.workers
        self._model, self._matrices = pack_int8_model(config, weights)
        self._scratch: Scratch | None = None
        self._rows = Rows(aligned_bytes(0), aligned_bytes(0))
        self._calling = threading.Lock()

    def __call__(
        self,
        plan: StepPlan,
        cache: KeyValueCache,
        *,
        layers: int,
        scored: np.ndarray | None,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[np.ndarray | None, np.ndarray | None]:
        self._require(plan, cache, layers, scored, feature_layers)
        c, nodes = self.config, len(plan.tokens)
        asked = _plain(np.zeros(0, np.int64) if scored is None else scored)
        logits = np.empty((len(asked), padded(c.vocabulary)), np.float32)
        features = np.empty((nodes, len(feature_layers), c.hidden_size), np.float32)
        work = Pass(
            tokens=_plain(plan.tokens),
            slots=_plain(plan.slots),
            entries=plan.entries,
            positions=plan.positions,
            visible=_visible(plan),
            units=_units(plan, nodes_of_unit(c.heads // c.kv_heads)),
            scored=asked,
            layers=layers,
            feature_layers=np.array(feature_layers, np.int64),
            keys=cache.keys.numpy().reshape(-1),
            values=cache.values.numpy().reshape(-1),
            cache_slots=cache.keys.shape[1],
            capacity=cache.keys.shape[3],
            features=features.reshape(-1),
            logits=logits.reshape(-1),
            counters=np.zeros((CLAIMS * layers + 1) * COUNTER, np.int64),
        )
        with self._calling:
            scratch = self._room(nodes, len(asked), int(work.visible.lengths.max()))
            m = self._matrices
            inputs = max(nodes * max(m.hidden.step, m.queries.step), len(asked) * m.hidden.step)
            self._rows = room_for_rows(self._rows, inputs, nodes * m.inner.step)
            team(self.workers).run(int8_step, self._model, m, work, scratch, self._rows)
        if logits.shape[1] != c.vocabulary:
            logits = np.ascontiguousarray(logits[:, : c.vocabulary])
        return (None if scored is None else logits), (features if feature_layers else None)


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
        if name not in weights:
            raise KeyError(f"the weights have no tensor {name!r}, which a Llama model of {c.layers} layers needs")
        values = host(weights[name])
        if values.shape != shape:
            raise ValueError(f"{name} has shape {values.shape}: expected {shape} from the model's config")
        return np.ascontiguousarray(values, np.float32)

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
    embedding = "model.embed_tokens.weight"
    head = put(tiles(hidden, **{embedding if c.tied_head else "lm_head.weight": c.vocabulary}))
    tables = rotary_tables(c.context, c.head_dim, c.rope_theta)
    cosine, sine = (table.astype(np.float32).reshape(-1) for table in tables)
    model = Model(
        weights=norms.reshape(-1),
        places=places,
        embedding=_plain(get(embedding, c.vocabulary, hidden), np.float32).reshape(-1),
        tied=False,  # as for the look-up: whatever the head is, the embedding has rows of its own
        final_norm=2 * c.layers * padded_hidden,
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
