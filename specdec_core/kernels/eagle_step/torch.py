"""The drafter's step in plain torch: any device, float64 to float16. Also the reference for the compiled form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from specdec_core.arrays import Array
from specdec_core.kernels.eagle_step import EagleShape, no_law, require_count, require_shape, take
from specdec_core.kernels.llama_step import KeyValueCache
from specdec_core.kernels.plan import StepPlan
from specdec_core.kernels.rotary import rotary_tables
from specdec_core.placement import Placement


class TorchEagle:
    """`EagleStep` in torch. Weights are brought to the placement's dtype and device once; tensors come back there."""

    def __init__(self, config: EagleShape, weights: Mapping[str, Any], placement: Placement):
        self.config = c = config
        self.device, self.dtype = placement.torch_device, placement.torch_dtype
        if placement.threads is not None and self.device.type == "cpu":
            torch.set_num_threads(placement.threads)

        def load(name: str, *shape: int) -> torch.Tensor:
            return self._on(take(weights, f"{name}.weight", *shape))

        hidden, inner = c.hidden_size, c.intermediate_size
        queries, keys = c.heads * c.head_dim, c.kv_heads * c.head_dim
        attention = [("q", queries), ("k", keys), ("v", keys)]
        self.joined = load("fc", hidden, c.features * hidden)
        self.embedding_norm, self.hidden_norm = load("embedding_norm", hidden), load("hidden_norm", hidden)
        self.qkv = torch.cat([load(f"self_attn.{name}_proj", rows, 2 * hidden) for name, rows in attention])
        self.residual_of_embedding = load("embedding_proj", hidden, hidden)
        self.out = load("self_attn.o_proj", hidden, queries)
        self.post_norm = load("post_attention_layernorm", hidden)
        self.gate_up = torch.cat([load("mlp.gate_proj", inner, hidden), load("mlp.up_proj", inner, hidden)])
        self.down = load("mlp.down_proj", hidden, inner)
        self.final_norm, self.head = load("norm", hidden), load("head", c.vocabulary, hidden)
        tables = rotary_tables(c.context, c.head_dim, c.rope_theta)
        self.cosine, self.sine = (self._on(torch.as_tensor(table)) for table in tables)

    @torch.inference_mode()
    def project(self, features: Array) -> torch.Tensor:
        c = self.config
        require_shape(features, "features", (len(features), c.features, c.hidden_size), "[m, feature layers, hidden]")
        return F.linear(self._unit(self._on(features)).flatten(1), self.joined)

    @torch.inference_mode()
    def __call__(
        self, plan: StepPlan, cache: KeyValueCache, embedded: Array, hidden: Array, scored: np.ndarray
    ) -> tuple[torch.Tensor, torch.Tensor]:
        c = self.config
        for name, values in (("embedded", embedded), ("hidden", hidden)):
            require_shape(values, name, (len(plan.tokens), c.hidden_size), "[nodes, hidden]")
        before = self._on(hidden)
        inputs = [self._unit(self._on(embedded)) * self.embedding_norm, self._unit(before) * self.hidden_norm]
        attended = self._attend(plan, cache, F.linear(torch.cat(inputs, dim=-1), self.qkv))
        between = before + F.linear(inputs[0], self.residual_of_embedding) + F.linear(attended, self.out)
        gate, up = F.linear(self._unit(between) * self.post_norm, self.gate_up).chunk(2, dim=-1)
        continued = between + F.linear(F.silu(gate) * up, self.down)
        chosen = continued[torch.as_tensor(scored, dtype=torch.int64, device=self.device)]
        return F.linear(self._unit(chosen) * self.final_norm, self.head), continued

    @torch.inference_mode()
    def best_tokens(self, logits: Array, count: int) -> tuple[torch.Tensor, torch.Tensor]:
        require_count(count, self.config.vocabulary)
        require_shape(logits, "logits", (len(logits), self.config.vocabulary), "[rows, draft vocabulary]")
        wide = torch.as_tensor(logits)
        wide = (wide.cpu() if wide.device.type == "mps" else wide).double()  # Metal has no float64
        law = wide.log_softmax(-1)
        wrong = law.isnan().any(-1).nonzero()
        if len(wrong):
            raise no_law(int(wrong[0]), len(law))
        tokens = wide.sort(dim=-1, descending=True, stable=True).indices[:, :count]
        return tokens, law.gather(-1, tokens)

    def _on(self, values: Array) -> torch.Tensor:
        return torch.as_tensor(values).to(self.device, self.dtype)

    def _unit(self, hidden: torch.Tensor) -> torch.Tensor:
        """RMSNorm before its weight; the mean square in at least float32."""
        wide = hidden if hidden.dtype in (torch.float32, torch.float64) else hidden.float()
        return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.config.norm_eps)).to(hidden.dtype)

    def _attend(self, plan: StepPlan, cache: KeyValueCache, qkv: torch.Tensor) -> torch.Tensor:
        """Cache the nodes' keys and values, then attend to what each node sees: `[N, (heads + 2 kv_heads) · d]` →
        `[N, heads · d]`. Rows go through one by one, so that none is padded."""
        c = self.config
        slots, entries, positions = (
            torch.as_tensor(each, device=self.device) for each in (plan.slots, plan.entries, plan.positions)
        )
        q, k, v = qkv.unflatten(-1, (-1, c.head_dim)).split([c.heads, c.kv_heads, c.kv_heads], dim=1)
        keys, values = cache.keys[0], cache.values[0]
        keys[slots, :, entries] = self._rotate(k, positions)
        values[slots, :, entries] = v
        q, visible = self._rotate(q, positions), torch.as_tensor(_visible(plan), device=self.device)
        attended = torch.empty_like(q)
        for first, last in zip(plan.offsets[:-1], plan.offsets[1:], strict=True):
            slot, seen = plan.slots[first], visible[first:last]
            attended[first:last] = F.scaled_dot_product_attention(
                q[first:last].transpose(0, 1),
                keys[slot, :, : seen.shape[1]].repeat_interleave(c.heads // c.kv_heads, dim=0),
                values[slot, :, : seen.shape[1]].repeat_interleave(c.heads // c.kv_heads, dim=0),
                attn_mask=seen,
            ).transpose(0, 1)
        return attended.flatten(1)

    def _rotate(self, heads: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """Rotary embedding of `[N, h, d]` by position: halves (x1, x2) → (x1 cos − x2 sin, x2 cos + x1 sin)."""
        cosine, sine = self.cosine[positions, None], self.sine[positions, None]
        first, second = heads.chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def _visible(plan: StepPlan) -> np.ndarray:
    """Which cache entries of its slot each node sees, `[N, L]`: the committed ones, and those of its path."""
    visible = np.arange(int(plan.entries.max()) + 1) < plan.committed[:, None]
    node, depth = np.nonzero(plan.paths >= 0)
    visible[node, plan.committed[node] + plan.paths[node, depth]] = True
    return visible
