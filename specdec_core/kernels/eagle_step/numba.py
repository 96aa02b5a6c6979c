"""The drafter's step compiled for the CPU: float32, at the memory's speed, the same bits at any width.

As with llama_step.numba: what a node comes to does not depend on the nodes, rows or parts of a tree that are computed
with it, nor on the number of threads. One call runs the whole step in one parallel region.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from specdec_core.arrays import host
from specdec_core.kernels.attention.numba import Visible, nodes_of_unit, workspace
from specdec_core.kernels.eagle_step import EagleShape, no_law, require_count, require_shape, take
from specdec_core.kernels.eagle_step.numba_step import (
    EMBEDDING_CLAIM,
    Bounds,
    best_of_rows,
    eagle_step,
    first_astray,
    unit_states,
)
from specdec_core.kernels.llama_step import KeyValueCache
from specdec_core.kernels.llama_step.numba import aligned, plain, require_within, units_of
from specdec_core.kernels.llama_step.numba_step import (
    GATE_ROWS,
    Model,
    Pass,
    Scratch,
    find_visible,
)
from specdec_core.kernels.plan import StepPlan
from specdec_core.kernels.rotary import rotary_tables
from specdec_core.kernels.simd import LANES, padded, row_step
from specdec_core.kernels.skinny_linear import SkinnyLinear
from specdec_core.kernels.skinny_linear.numba import MOST_TILES, PackedLinear, pack, require_float32
from specdec_core.kernels.threads import COUNTER, team
from specdec_core.placement import Placement

_NO_LAYERS = np.zeros(0, np.int64)
_NO_FEATURES = np.zeros(0, np.float32)


class NumbaEagle:
    """`EagleStep` in compiled code. Weights are packed once; the originals are not kept.

    Inputs are contiguous float32 numpy arrays, none of them empty but `scored`. Returned arrays are numpy and new;
    scratch memory is reused. Several Python threads may call one engine: calls wait for each other.
    """

    def __init__(self, config: EagleShape, weights: Mapping[str, Any], placement: Placement):
        self.config = config
        self.workers = placement.workers
        self._pack(weights)
        self._ones = np.ones(padded(config.hidden_size), np.float32)
        self._scratch: Scratch | None = None
        self._held = (0, 0, 0)
        self._calling = threading.Lock()

    def _pack(self, weights: Mapping[str, Any]) -> None:
        """Make what a step reads of the weights: `_model`, and `_join`, the product with fc."""
        self._model = pack_eagle(self.config, weights)
        self._join: SkinnyLinear = PackedLinear(fc_apart(self.config, weights), self.workers)

    def _run(self, work: Pass, scratch: Scratch, *states: np.ndarray) -> None:
        """The compiled step; states are embedded, hidden and continued, flat `[N, H]`."""
        team(self.workers).run(eagle_step, self._model, work, scratch, *states)

    def project(self, features: np.ndarray) -> np.ndarray:
        c = self.config
        require_float32(features, "features", ("m", "feature layers", "hidden"))
        require_shape(features, "features", (len(features), c.features, c.hidden_size), "[m, feature layers, hidden]")
        normed = np.empty((len(features), c.features * padded(c.hidden_size)), np.float32)
        unit_states(self._model, self._ones, plain(features, np.float32).reshape(-1), normed.reshape(-1))
        return self._join(normed)

    def __call__(
        self, plan: StepPlan, cache: KeyValueCache, embedded: np.ndarray, hidden: np.ndarray, scored: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        c, nodes = self.config, len(plan.tokens)
        for name, values in (("embedded", embedded), ("hidden", hidden)):
            require_float32(values, name, ("nodes", "hidden"))
            require_shape(values, name, (nodes, c.hidden_size), "[nodes, hidden]")
        self._require_cache(cache)
        rows = plain(scored)
        visible = self._visible(plan, cache, rows)
        logits = np.empty((len(rows), padded(c.vocabulary)), np.float32)
        continued = np.empty((nodes, c.hidden_size), np.float32)
        work = Pass(
            tokens=plain(plan.tokens),
            slots=plain(plan.slots),
            entries=plain(plan.entries),
            positions=plain(plan.positions),
            visible=visible,
            units=units_of(plan, nodes_of_unit(c.heads // c.kv_heads)),
            scored=rows,
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
        flat = [plain(each, np.float32).reshape(-1) for each in (embedded, hidden)]
        with self._calling:
            scratch = self._room(nodes, len(rows), int(visible.lengths.max()))
            self._run(work, scratch, *flat, continued.reshape(-1))
        if logits.shape[1] != c.vocabulary:
            logits = np.ascontiguousarray(logits[:, : c.vocabulary])
        return logits, continued

    def best_tokens(self, logits: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        size = self.config.vocabulary
        require_count(count, size)
        require_float32(logits, "logits", ("rows", "draft vocabulary"))
        require_shape(logits, "logits", (len(logits), size), "[rows, draft vocabulary]")
        tokens = np.empty((len(logits), count), np.int64)
        log_probabilities = np.empty((len(logits), count), np.float64)
        wrong = best_of_rows(plain(logits, np.float32).reshape(-1), size, tokens, log_probabilities)
        if wrong >= 0:
            raise no_law(wrong, len(logits))
        return tokens, log_probabilities

    def _visible(self, plan: StepPlan, cache: KeyValueCache, scored: np.ndarray) -> Visible:
        """What each node sees, after making sure that the plan leads compiled code nowhere out of bounds."""
        sizes = [len(each) for each in (plan.tokens, plan.slots, plan.committed, plan.depths, plan.nodes, plan.paths)]
        if len(set(sizes)) > 1:
            raise ValueError(f"a plan of {sizes} tokens, slots, lengths, depths, nodes and paths: expected one a node")
        shape, nodes, depths = cache.keys.shape, plain(plan.nodes), plain(plan.depths)
        paths, columns = plain(plan.paths, np.int32).reshape(-1), plan.paths.shape[1]
        lengths = plain(plan.positions + 1)
        visible = Visible(plain(plan.committed), lengths, np.empty(len(nodes), np.int64), paths, columns)
        bounds = Bounds(shape[1], shape[3], self.config.context)
        astray = first_astray(plain(plan.slots), nodes, depths, visible, plain(plan.offsets), scored, bounds)
        if astray >= 0:
            _complain(plan, scored, bounds, astray)
        find_visible(visible.committed, depths, nodes, paths, columns, visible.straight)
        return visible

    def _require_cache(self, cache: KeyValueCache) -> None:
        c, shape = self.config, cache.keys.shape
        expected = (1, shape[1], c.kv_heads, shape[3], c.head_dim) if len(shape) == 5 else None
        if shape != expected or cache.values.shape != expected:
            raise ValueError(
                f"keys {tuple(shape)} and values {tuple(cache.values.shape)}: expected [1, slots, {c.kv_heads}, "
                f"capacity, {c.head_dim}], the one layer, KV heads and head size of this drafter"
            )
        for store in (cache.keys, cache.values):
            if store.dtype is not torch.float32 or store.device.type != "cpu" or not store.is_contiguous():
                raise TypeError(
                    f"a cache of {store.dtype} on {store.device}, contiguous: {store.is_contiguous()}; expected "
                    "contiguous float32 on the cpu (the numba engine computes nothing else)"
                )

    def _room(self, nodes: int, scored: int, longest: int) -> Scratch:
        """Scratch arrays for a pass of this size: the ones at hand if they are large enough."""
        needed = (nodes, scored, longest)
        if self._scratch is None or any(size > held for size, held in zip(needed, self._held, strict=True)):
            # A generation lengthens the context a little every step: leave room for many.
            self._held = tuple(max(held, size + size // 4) for size, held in zip(needed, self._held, strict=True))
            self._scratch = _make_scratch(self.config, self.workers, *self._held)
        return self._scratch


def pack_eagle(config: EagleShape, weights: Mapping[str, Any]) -> Model:
    """All weights but fc in one flat array, as `llama_step.numba.pack_model` lays out a model of one layer.

    The norm of the hidden state follows that of the embedding; q/k/v have zeros where the padding between their two
    inputs lies.
    """
    c = config
    hidden, width, inner = c.hidden_size, padded(c.hidden_size), c.intermediate_size
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    sizes = [
        2 * width, padded(queries + 2 * keys) * (width + hidden), width * queries, width,
        2 * padded(inner) * hidden, width * inner, width, padded(c.vocabulary) * hidden, width * hidden,
    ]  # fmt: skip
    flat = aligned(sum(sizes))
    places = [int(at) for at in np.cumsum([0, *sizes[:-1]])]
    norm, qkv, out, post_norm, gate_up, down, final_norm, head, embedding = places

    for at, name in (
        (norm, "embedding_norm"), (norm + width, "hidden_norm"), (post_norm, "post_attention_layernorm"),
        (final_norm, "norm"),
    ):  # fmt: skip
        flat[at : at + width] = 0
        flat[at : at + hidden] = matrix_of(weights, name, hidden)
    attention = [("q", queries), ("k", keys), ("v", keys)]
    joined = np.concatenate(
        [matrix_of(weights, f"self_attn.{name}_proj", rows, 2 * hidden) for name, rows in attention]
    )
    apart = np.zeros((len(joined), width + hidden), np.float32)
    apart[:, :hidden], apart[:, width:] = joined[:, :hidden], joined[:, hidden:]
    pack(apart, flat, qkv, LANES)
    pack(matrix_of(weights, "self_attn.o_proj", hidden, queries), flat, out, LANES)
    pack(matrix_of(weights, "mlp.gate_proj", inner, hidden), flat, gate_up, 2 * LANES)
    pack(matrix_of(weights, "mlp.up_proj", inner, hidden), flat, gate_up + LANES * hidden, 2 * LANES)
    pack(matrix_of(weights, "mlp.down_proj", hidden, inner), flat, down, LANES)
    pack(matrix_of(weights, "embedding_proj", hidden, hidden), flat, embedding, LANES)
    pack(matrix_of(weights, "head", c.vocabulary, hidden), flat, head, LANES)
    return model_of(c, flat, [norm, qkv, out, post_norm, gate_up, down, embedding], final_norm, head)


def model_of(config: EagleShape, weights: np.ndarray, places: list[int], final_norm: int, head: int) -> Model:
    """A model of the drafter's one layer over flat float32 `weights`; an embedding it has none."""
    c = config
    tables = rotary_tables(c.context, c.head_dim, c.rope_theta)
    cosine, sine = (table.astype(np.float32).reshape(-1) for table in tables)
    return Model(
        weights=weights,
        places=np.array([places], np.int64),
        embedding=weights,
        tied=True,
        final_norm=final_norm,
        head=head,
        cosine=cosine,
        sine=sine,
        hidden=c.hidden_size,
        inner=c.intermediate_size,
        heads=c.heads,
        kv_heads=c.kv_heads,
        head_dim=c.head_dim,
        vocabulary=c.vocabulary,
        epsilon=float(c.norm_eps),
    )


def fc_apart(config: EagleShape, weights: Mapping[str, Any]) -> np.ndarray:
    """fc `[H, F · padded H]`, with zeros where the padding between the normed hidden states lies."""
    hidden, features = config.hidden_size, config.features
    apart = np.zeros((hidden, features, padded(hidden)), np.float32)
    apart[:, :, :hidden] = matrix_of(weights, "fc", hidden, features * hidden).reshape(hidden, features, hidden)
    return apart.reshape(hidden, -1)


def matrix_of(weights: Mapping[str, Any], name: str, *shape: int) -> np.ndarray:
    return np.ascontiguousarray(host(take(weights, f"{name}.weight", *shape)), np.float32)


def _make_scratch(config: EagleShape, workers: int, nodes: int, scored: int, longest: int) -> Scratch:
    c = config
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    hidden, width = row_step(c.hidden_size), padded(c.hidden_size)
    own = max(workspace(c.heads // c.kv_heads, c.head_dim, longest), GATE_ROWS * MOST_TILES * LANES)

    def room(*shape: int) -> np.ndarray:
        return np.zeros(shape, np.float32)

    return Scratch(
        hidden=room(nodes * hidden),
        normed=room(nodes * row_step(width + c.hidden_size)),
        qkv=room(nodes * padded(queries + 2 * keys)),
        query=room(nodes * queries),
        attended=room(nodes * row_step(queries)),
        active=room(nodes * row_step(c.intermediate_size)),
        scored=room(scored * hidden),
        private=room(workers, padded(own)),
    )


def _complain(plan: StepPlan, scored: np.ndarray, bounds: Bounds, node: int) -> None:
    """Raise for a plan that would lead out of bounds, first at a flat node; at N if no node is to blame."""
    require_within(plan.slots, bounds.slots, "slot", "the cache's slots")
    require_within(plan.entries, bounds.capacity, "cache entry", "the cache's capacity")
    require_within(plan.positions, bounds.context, "position", "the drafter's context")
    require_within(scored, len(plan.tokens), "scored node", "the nodes of the pass")
    if node == len(plan.tokens):
        raise ValueError(f"offsets {plan.offsets}: expected 0 to {node}, the nodes of the pass, ascending")
    raise ValueError(
        f"flat node {node} is node {plan.nodes[node]} of its tree, after {plan.committed[node]} entries, at depth "
        f"{plan.depths[node]} by the path {plan.paths[node]}: expected a path of so many earlier nodes, then itself"
    )
