"""The Gated DeltaNet step in plain torch: the Llama step, with recurrent layers among its layers of attention."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from specdec_core.kernels.gated_delta import DeltaInputs
from specdec_core.kernels.gdn_step import GdnCache, GdnShape
from specdec_core.kernels.llama_step.torch import TorchLlama, _Layout


class TorchGdn(TorchLlama):
    """`GdnStep` in torch. Weights by flash-linear-attention's names, brought to the placement's dtype and device once.

    Gates are worked out in at least float32, as is the state.
    """

    config: GdnShape

    def _take_weights(self) -> None:
        self.embedding = self._load("model.embeddings.weight")
        self.head = self.embedding if self.config.tied_head else self._load("lm_head.weight")
        self.final_norm = self._load("model.norm.weight")
        self._wide = torch.promote_types(self.dtype, torch.float32)
        attention = self.config.attention_layers
        recurrent = [layer for layer in range(self.config.layers) if layer not in attention]
        # Weights and caches of either kind are counted by themselves.
        self._place = {layer: place for kind in (attention, recurrent) for place, layer in enumerate(kind)}
        self.layers = [self._load_attention(layer) for layer in attention]
        self.recurrent = [self._load_recurrent(layer) for layer in recurrent]
        self._stored = {}

    def _load_shared(self, index: int) -> dict[str, torch.Tensor]:
        prefix = f"model.layers.{index}."
        inner = [self._load(f"{prefix}mlp.{which}_proj.weight") for which in ("gate", "up")]
        return {
            "input_norm": self._load(f"{prefix}attn_norm.weight"),
            "o": self._load(f"{prefix}attn.o_proj.weight"),
            "post_norm": self._load(f"{prefix}mlp_norm.weight"),
            "gate_up": torch.cat(inner),
            "down": self._load(f"{prefix}mlp.down_proj.weight"),
        }

    def _load_attention(self, index: int) -> dict[str, torch.Tensor]:
        """As TorchLlama's layers."""
        qkv = [self._load(f"model.layers.{index}.attn.{which}_proj.weight") for which in "qkv"]
        return self._load_shared(index) | {"qkv": torch.cat(qkv)}

    def _load_recurrent(self, index: int) -> dict[str, torch.Tensor]:
        prefix = f"model.layers.{index}.attn."

        def wide(name: str) -> torch.Tensor:
            return self._stored[prefix + name].to(self.device, self._wide)

        taps = [self._load(f"{prefix}{which}_conv1d.weight").squeeze(1) for which in "qkv"]
        return self._load_shared(index) | {
            "mix": torch.cat([self._load(f"{prefix}{which}_proj.weight") for which in "qkvgab"]),
            "taps": torch.cat(taps),
            # A rate that overflows would meet softplus = 0 as ∞ · 0; the largest number forgets as much.
            "rate": wide("A_log").exp().clamp(max=torch.finfo(self._wide).max),
            "bias": wide("dt_bias"),
            "o_norm": self._load(f"{prefix}o_norm.weight"),
        }

    def _layer(self, index: int, hidden: torch.Tensor, cache: GdnCache, layout: _Layout) -> torch.Tensor:  # type: ignore[override]
        place = self._place[index]
        if index in self.config.attention_layers:
            return super()._layer(place, hidden, cache, layout)
        w = self.recurrent[place]
        hidden = hidden + F.linear(self._mix(place, self._norm(hidden, w["input_norm"]), cache), w["o"])
        gate, up = F.linear(self._norm(hidden, w["post_norm"]), w["gate_up"]).chunk(2, dim=-1)
        return hidden + F.linear(F.silu(gate) * up, w["down"])

    def _mix(self, place: int, x: torch.Tensor, cache: GdnCache) -> torch.Tensor:
        """The recurrent mixer of flat nodes `[N, H]` before its output projection, `[N, heads · V]`."""
        c, w = self.config, self.recurrent[place]
        heads, shared, key_dim = c.linear_value_heads, c.linear_heads, c.linear_key_dim
        keys, values = shared * key_dim, heads * c.linear_value_dim
        qkv, gate, a, b = F.linear(x, w["mix"]).split([c.conv_channels, values, heads, heads], dim=-1)
        q, k, v = cache.convolve(place, qkv, w["taps"]).split([keys, keys, values], dim=-1)
        # Value heads that share a query and key stand behind one another.
        q, k = (self._unit(each.unflatten(-1, (shared, key_dim)), heads // shared) for each in (q, k))
        # Above 40, softplus(x) is x to the last bit of a float64.
        log_decay = -w["rate"] * F.softplus(a.to(self._wide) + w["bias"], threshold=40.0)
        beta = b.to(self._wide).sigmoid() * (2.0 if c.negative_eigenvalues else 1.0)
        inputs = DeltaInputs(q * key_dim**-0.5, k, v.unflatten(-1, (heads, -1)), log_decay, beta)
        out = self._norm(cache.recur(place, inputs), w["o_norm"]) * F.silu(gate.unflatten(-1, (heads, -1)))
        return out.flatten(1)

    def _unit(self, heads: torch.Tensor, repeats: int) -> torch.Tensor:
        """Vectors `[N, h, K]` of length 1, each `repeats` times: x / √(Σ x² + 1e-6)."""
        wide = heads.to(self._wide)
        scaled = wide * torch.rsqrt(wide.pow(2).sum(-1, keepdim=True) + 1e-6)
        return scaled.to(heads.dtype).repeat_interleave(repeats, dim=1)
