"""The decoder step in plain torch: any device, float64 to float16. Also the reference for the compiled form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F

from specdec_core.kernels.llama_step import KeyValueCache, LlamaShape
from specdec_core.kernels.plan import StepPlan
from specdec_core.kernels.rotary import rotary_tables
from specdec_core.placement import Placement


@dataclass(frozen=True)
class _Layout:
    """Index tensors of one plan on the device, shared by all layers. B rows, at most n nodes in one, L visible entries.

    slots, entries, positions `[N]`; rows, nodes `[N]` scatter flat nodes into `[B, n]`; cache_slots `[B]` or None when
    the batch is all slots in order; visible `[B, 1, n, L]` bool, additive mask left to the attention.
    """

    slots: torch.Tensor
    entries: torch.Tensor
    positions: torch.Tensor
    rows: torch.Tensor
    nodes: torch.Tensor
    cache_slots: torch.Tensor | None
    visible: torch.Tensor
    shape: tuple[int, int, int]
    rectangular: bool


def _layout(plan: StepPlan, all_slots: int, device: torch.device) -> _Layout:
    counts = np.diff(plan.offsets)
    rows = np.repeat(np.arange(len(counts)), counts)
    slots = plan.slots[plan.offsets[:-1]]
    batch, width = len(counts), int(counts.max())
    longest = int((plan.entries).max()) + 1
    visible = np.zeros((batch, width, longest), bool)
    entry = np.arange(longest)
    visible[rows, plan.nodes] = entry < plan.committed[:, None]
    node, depth = np.nonzero(plan.paths >= 0)
    visible[rows[node], plan.nodes[node], plan.committed[node] + plan.paths[node, depth]] = True

    def on(values: np.ndarray) -> torch.Tensor:
        return torch.as_tensor(values, device=device)

    in_order = batch == all_slots and bool((slots == np.arange(all_slots)).all())
    return _Layout(
        on(plan.slots), on(plan.entries), on(plan.positions), on(rows), on(plan.nodes),
        None if in_order else on(slots), on(visible[:, None]), (batch, width, longest), bool((counts == width).all()),
    )  # fmt: skip


class TorchLlama:
    """`LlamaStep` in torch. Weights by Hugging Face names, brought to the placement's dtype and device once."""

    def __init__(self, config: LlamaShape, weights: Mapping[str, torch.Tensor], placement: Placement):
        self.config = config
        self.device, self.dtype = placement.torch_device, placement.torch_dtype
        if placement.threads is not None and self.device.type == "cpu":
            torch.set_num_threads(placement.threads)

        self._stored = weights
        self._take_weights()
        tables = rotary_tables(config.context, config.head_dim, config.rope_theta)
        self.cosine, self.sine = (torch.as_tensor(t).to(self.dtype).to(self.device) for t in tables)

    def _take_weights(self) -> None:
        self.embedding = self._load("model.embed_tokens.weight")
        self.head = self.embedding if self.config.tied_head else self._load("lm_head.weight")
        self.final_norm = self._load("model.norm.weight")
        self.layers: list[dict[str, torch.Tensor]] | _OnDemand = [
            self._load_layer(index) for index in range(self.config.layers)
        ]
        self._stored = {}

    def _load(self, name: str) -> torch.Tensor:
        return self._stored[name].to(self.device, self.dtype)

    def _load_layer(self, index: int) -> dict[str, torch.Tensor]:
        def load(name: str) -> torch.Tensor:
            return self._load(f"model.layers.{index}.{name}.weight")

        return {
            "input_norm": load("input_layernorm"),
            "qkv": torch.cat([load(f"self_attn.{which}_proj") for which in "qkv"]),
            "o": load("self_attn.o_proj"),
            "post_norm": load("post_attention_layernorm"),
            "gate_up": torch.cat([load("mlp.gate_proj"), load("mlp.up_proj")]),
            "down": load("mlp.down_proj"),
        }

    @torch.inference_mode()
    def __call__(
        self,
        plan: StepPlan,
        cache: KeyValueCache,
        *,
        layers: int,
        scored: np.ndarray | None,
        feature_layers: tuple[int, ...] = (),
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        layout = _layout(plan, cache.keys.shape[1], self.device)
        hidden = self._embed(torch.as_tensor(plan.tokens, device=self.device))
        features = []
        for index in range(layers):
            hidden = self._layer(index, hidden, cache, layout)
            if index in feature_layers:
                features.append(hidden)
        stacked = torch.stack(features, dim=1) if features else None
        if scored is None:
            return None, stacked
        if not np.array_equal(scored, np.arange(len(hidden))):
            hidden = hidden[torch.as_tensor(scored, device=self.device)]
        return self._score(self._norm(hidden, self.final_norm)), stacked

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.embedding[tokens]

    def _score(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.head)

    def _layer(self, index: int, hidden: torch.Tensor, cache: KeyValueCache, layout: _Layout) -> torch.Tensor:
        c, w = self.config, self.layers[index]
        qkv = F.linear(self._norm(hidden, w["input_norm"]), w["qkv"])
        q, k, v = qkv.split([c.heads * c.head_dim, c.kv_heads * c.head_dim, c.kv_heads * c.head_dim], dim=-1)
        q = self._rotate(q.unflatten(-1, (c.heads, c.head_dim)), layout.positions)
        k = self._rotate(k.unflatten(-1, (c.kv_heads, c.head_dim)), layout.positions)
        keys, values = cache.keys[index], cache.values[index]
        keys[layout.slots, :, layout.entries] = k
        values[layout.slots, :, layout.entries] = v.unflatten(-1, (c.kv_heads, c.head_dim))
        hidden = hidden + F.linear(self._attend(q, keys, values, layout), w["o"])
        gate, up = F.linear(self._norm(hidden, w["post_norm"]), w["gate_up"]).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, w["down"])

    def _attend(self, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, layout: _Layout) -> torch.Tensor:
        """Attention of flat queries `[N, heads, d]` over their rows' visible entries → `[N, heads · d]`.

        Queries of one key/value head stand behind one another, so that keys are read once and never repeated.
        """
        c, (batch, width, longest) = self.config, layout.shape
        group = c.heads // c.kv_heads
        if layout.rectangular:
            padded = q.view(batch, width, c.heads, c.head_dim)
        else:
            padded = q.new_zeros(batch, width, c.heads, c.head_dim)
            padded[layout.rows, layout.nodes] = q
        grouped = padded.view(batch, width, c.kv_heads, group, c.head_dim).permute(0, 2, 3, 1, 4)
        grouped = grouped.reshape(batch, c.kv_heads, group * width, c.head_dim)
        keys, values = keys[:, :, :longest], values[:, :, :longest]
        if layout.cache_slots is not None:
            keys, values = keys[layout.cache_slots], values[layout.cache_slots]
        mask = layout.visible.repeat(1, 1, group, 1)
        out = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask)
        out = out.view(batch, c.kv_heads, group, width, c.head_dim).permute(0, 3, 1, 2, 4)
        out = out.reshape(batch, width, c.heads * c.head_dim)
        return out.flatten(0, 1) if layout.rectangular else out[layout.rows, layout.nodes]

    def _norm(self, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """RMSNorm; the mean square in at least float32."""
        wide = hidden if hidden.dtype in (torch.float32, torch.float64) else hidden.float()
        scale = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)
        return (wide * scale).to(hidden.dtype) * weight

    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of `[N, h, d]` by position: halves (x1, x2) → (x1 cos − x2 sin, x2 cos + x1 sin)."""
        cosine, sine = self.cosine[positions, None], self.sine[positions, None]
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


class StreamedTorchLlama(TorchLlama):
    """The same step with weights kept as they are stored, brought to the engine's dtype layer by layer in every pass.

    Slower, but a float64 reference beside other engines then needs no second copy of the model.
    """

    def _take_weights(self) -> None:
        self.final_norm = self._load("model.norm.weight")
        self.layers = _OnDemand(self._load_layer)

    def _embed(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._stored["model.embed_tokens.weight"][tokens].to(self.dtype)

    def _score(self, hidden: torch.Tensor) -> torch.Tensor:
        name = "model.embed_tokens.weight" if self.config.tied_head else "lm_head.weight"
        return F.linear(hidden, self._load(name))


class _OnDemand:
    """A list whose entries are made when they are asked for."""

    def __init__(self, make: Callable[[int], dict[str, torch.Tensor]]):
        self._make = make

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return self._make(index)
