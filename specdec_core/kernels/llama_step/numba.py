"""The decoder step compiled for the CPU: float32, at the memory's speed, the same bits at any width.

A token's logits do not depend on how many tokens or rows are computed with it, on how a prompt is cut into chunks or
on the number of threads: every sum has one fixed order (see the kernels). One call runs the whole step in one parallel
region; Python only checks the input and hands over arrays.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from typing import Any

import numpy as np

from specdec_core.arrays import host
from specdec_core.kernels.attention.numba import Visible, nodes_of_unit, workspace
from specdec_core.kernels.llama_step import KeyValueCache, LlamaShape
from specdec_core.kernels.llama_step.numba_step import (
    CLAIMS,
    GATE_ROWS,
    Model,
    Pass,
    Scratch,
    decoder_step,
    find_units,
    find_visible,
)
from specdec_core.kernels.plan import StepPlan
from specdec_core.kernels.rotary import rotary_tables
from specdec_core.kernels.simd import LANES, padded, row_step
from specdec_core.kernels.skinny_linear.numba import MOST_TILES, pack
from specdec_core.kernels.threads import COUNTER, team
from specdec_core.placement import Placement

EMBEDDING = "model.embed_tokens.weight"
_NONE = np.zeros(0, np.int64)


class NumbaLlama:
    """`LlamaStep` in compiled code. Weights by Hugging Face names are packed once; the originals are not kept.

    Returned arrays are numpy and new; scratch memory is reused. Several engines may be alive, and several Python
    threads may call one: calls wait for each other.
    """

    def __init__(self, config: LlamaShape, weights: Mapping[str, Any], placement: Placement):
        self.config = config
        self.workers = placement.workers
        self._pack(weights)
        self._scratch: Scratch | None = None
        self._calling = threading.Lock()

    def _pack(self, weights: Mapping[str, Any]) -> None:
        """Make what a step reads of the weights: `_model`."""
        self._model = pack_model(self.config, weights)

    def _run(self, work: Pass, scratch: Scratch) -> None:
        """The compiled step."""
        team(self.workers).run(decoder_step, self._model, work, scratch)

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
        rows = _NONE if scored is None else plain(scored)
        logits = np.empty((len(rows), padded(c.vocabulary)), np.float32)
        features = np.empty((nodes, len(feature_layers), c.hidden_size), np.float32)
        work = Pass(
            tokens=plain(plan.tokens),
            slots=plain(plan.slots),
            entries=plan.entries,
            positions=plan.positions,
            visible=visible_of(plan),
            units=units_of(plan, nodes_of_unit(c.heads // c.kv_heads)),
            scored=rows,
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
            scratch = self._room(nodes, len(rows), int(work.visible.lengths.max()))
            self._run(work, scratch)
        if logits.shape[1] != c.vocabulary:
            logits = np.ascontiguousarray(logits[:, : c.vocabulary])
        return (None if scored is None else logits), (features if feature_layers else None)

    def _room(self, nodes: int, scored: int, longest: int) -> Scratch:
        """Scratch arrays for a pass of this size: the ones at hand if they are large enough."""
        c = self.config
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        hidden = row_step(c.hidden_size)
        attention = workspace(c.heads // c.kv_heads, c.head_dim, longest)
        needed = {
            "hidden": nodes * hidden,
            "normed": nodes * hidden,
            "qkv": nodes * padded(queries + 2 * keys),
            "query": nodes * queries,
            "attended": nodes * row_step(queries),
            "active": nodes * row_step(c.intermediate_size),
            "scored": scored * hidden,
            "private": self.workers * max(attention, GATE_ROWS * MOST_TILES * LANES),
        }
        if self._scratch is None:
            nothing = np.zeros(0, np.float32)
            empty = dict.fromkeys(Scratch._fields, nothing)
            self._scratch = Scratch(**empty)._replace(private=nothing.reshape(self.workers, 0))
        grown = {}
        for name, size in needed.items():
            if getattr(self._scratch, name).size < size:
                # A generation lengthens the context a little every step: leave room for many.
                grown[name] = np.zeros(size + size // 4, np.float32)
        if "private" in grown:
            each = grown["private"].size // self.workers // LANES * LANES
            grown["private"] = grown["private"][: self.workers * each].reshape(self.workers, each)
        self._scratch = self._scratch._replace(**grown)
        return self._scratch

    def _require(
        self, plan: StepPlan, cache: KeyValueCache, layers: int, scored: np.ndarray | None, features: tuple[int, ...]
    ) -> None:
        """Raise for anything that compiled code, which does not check, would read or write out of bounds."""
        c = self.config
        if not len(plan.tokens):
            raise ValueError("a pass over no tokens: expected at least one node")
        if not 1 <= layers <= c.layers:
            raise ValueError(f"layers {layers}: expected 1…{c.layers}")
        if any(not 0 <= layer < layers for layer in features):
            raise ValueError(f"feature layers {features}: expected layers in 0…{layers - 1}, those of the pass")
        shape = tuple(cache.keys.shape)
        if shape != tuple(cache.values.shape) or (shape[0], shape[2], shape[4]) != (c.layers, c.kv_heads, c.head_dim):
            raise ValueError(
                f"keys {shape} and values {tuple(cache.values.shape)}: expected [{c.layers}, slots, {c.kv_heads}, "
                f"capacity, {c.head_dim}], the layers, KV heads and head size of this model"
            )
        for store in (cache.keys, cache.values):
            if str(store.dtype) != "torch.float32" or store.device.type != "cpu" or not store.is_contiguous():
                raise TypeError(
                    f"a cache of {store.dtype} on {store.device}, contiguous: {store.is_contiguous()}; expected "
                    "contiguous float32 on the cpu (the numba engine computes nothing else)"
                )
        require_within(plan.tokens, c.vocabulary, "token", "the vocabulary")
        require_within(plan.positions, c.context, "position", "the model's context")
        require_within(plan.slots, shape[1], "slot", "the cache's slots")
        require_within(plan.entries, shape[3], "cache entry", "the cache's capacity")
        if scored is not None:
            require_within(scored, len(plan.tokens), "scored node", "the nodes of the pass")


def pack_model(config: LlamaShape, weights: Mapping[str, Any]) -> Model:
    """All weights in one flat array: norms padded with zeros, q/k/v one matrix, gate and up tile by tile alternating.

    A tied embedding is read from the packed head; another one is used as it is given.
    """
    c = config
    hidden, inner = c.hidden_size, padded(c.intermediate_size)
    queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
    sizes = [
        padded(hidden), padded(queries + 2 * keys) * hidden, padded(hidden) * queries, padded(hidden),
        2 * inner * hidden, padded(hidden) * c.intermediate_size,
    ]  # fmt: skip
    layer_size = sum(sizes)
    final_norm = layer_size * c.layers
    head = final_norm + padded(hidden)
    flat = aligned(head + padded(c.vocabulary) * hidden)
    places = np.arange(c.layers)[:, None] * layer_size + np.cumsum([0, *sizes[:-1]])

    def get(name: str, *shape: int) -> np.ndarray:
        return tensor_of(config, weights, name, *shape)

    def put_norm(name: str, at: int) -> None:
        flat[at : at + padded(hidden)] = 0
        flat[at : at + hidden] = get(name, hidden)

    for layer in range(c.layers):
        prefix, at = f"model.layers.{layer}.", places[layer]
        put_norm(prefix + "input_layernorm.weight", at[0])
        attention = [("q", queries), ("k", keys), ("v", keys)]
        qkv = [get(f"{prefix}self_attn.{name}_proj.weight", rows, hidden) for name, rows in attention]
        pack(np.concatenate(qkv), flat, at[1], LANES)
        pack(get(prefix + "self_attn.o_proj.weight", hidden, queries), flat, at[2], LANES)
        put_norm(prefix + "post_attention_layernorm.weight", at[3])
        pack(get(prefix + "mlp.gate_proj.weight", c.intermediate_size, hidden), flat, at[4], 2 * LANES)
        pack(get(prefix + "mlp.up_proj.weight", c.intermediate_size, hidden), flat, at[4] + LANES * hidden, 2 * LANES)
        pack(get(prefix + "mlp.down_proj.weight", hidden, c.intermediate_size), flat, at[5], LANES)
    put_norm("model.norm.weight", final_norm)
    pack(get(head_name(c), c.vocabulary, hidden), flat, head, LANES)
    embedding = flat if c.tied_head else get(EMBEDDING, c.vocabulary, hidden).reshape(-1)
    return model_of(c, flat, places, final_norm, head, embedding=embedding, tied=c.tied_head)


def model_of(
    config: LlamaShape, weights: np.ndarray, places: np.ndarray, final_norm: int, head: int, *,
    embedding: np.ndarray, tied: bool,
) -> Model:  # fmt: skip
    """A model of this shape: where its weights lie, and the sizes and tables that a step needs beside them."""
    c = config
    tables = rotary_tables(c.context, c.head_dim, c.rope_theta)
    cosine, sine = (table.astype(np.float32).reshape(-1) for table in tables)
    return Model(
        weights=weights,
        places=places.astype(np.int64),
        embedding=embedding,
        tied=tied,
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


def head_name(config: LlamaShape) -> str:
    """The tensor that is the head."""
    return EMBEDDING if config.tied_head else "lm_head.weight"


def tensor_of(config: LlamaShape, weights: Mapping[str, Any], name: str, *shape: int) -> np.ndarray:
    """A tensor as contiguous float32. KeyError if it is absent, ValueError if it has another shape."""
    if name not in weights:
        raise KeyError(f"the weights have no tensor {name!r}, which a Llama model of {config.layers} layers needs")
    values = host(weights[name])
    if values.shape != shape:
        raise ValueError(f"{name} has shape {values.shape}: expected {shape} from the model's config")
    return np.ascontiguousarray(values, np.float32)


def aligned(size: int) -> np.ndarray:
    """Uninitialised float32, beginning at a cache line: then no vector of a tile straddles two."""
    room = np.empty(size + LANES, np.float32)
    skip = -(room.ctypes.data // 4) % LANES
    return room[skip : skip + size]


def plain(values: np.ndarray, dtype: type = np.int64) -> np.ndarray:
    """The values as a contiguous, writable array: for any other kind numba would compile the whole step once more."""
    if values.dtype == dtype and values.flags.c_contiguous and values.flags.writeable:
        return values
    return np.array(values, dtype, order="C")


def visible_of(plan: StepPlan) -> Visible:
    """What each node of a plan sees, as attention takes it."""
    straight = np.empty(len(plan.tokens), np.int64)
    committed, paths, columns = plain(plan.committed), plain(plan.paths, np.int32).reshape(-1), plan.paths.shape[1]
    find_visible(committed, plain(plan.depths), plain(plan.nodes), paths, columns, straight)
    return Visible(committed, plan.positions + 1, straight, paths, columns)


def units_of(plan: StepPlan, most: int) -> np.ndarray:
    """Every row's nodes cut into units of attention of at most `most`: first and last node, `[U, 2]`."""
    units = np.empty((len(plan.tokens), 2), np.int64)
    return units[: find_units(plain(plan.offsets), most, units)]


def require_within(values: np.ndarray, limit: int, what: str, whose: str) -> None:
    """Raise ValueError, naming one, unless all values lie in 0…limit − 1; `whose` says what the limit is."""
    if not len(values):
        return
    lowest, highest = int(values.min()), int(values.max())
    if lowest < 0 or highest >= limit:
        wrong = lowest if lowest < 0 else highest
        raise ValueError(f"{what} {wrong}: expected 0…{limit - 1}, {whose}")
