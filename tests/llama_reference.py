"""A Llama-family decoder written a second time: numpy, float64, the whole sequence at once, no cache, no batch."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from specdec_core.models.checkpoints import Checkpoint


class Reference:
    """`logits(tokens)` `[n, V]` and `hidden(tokens)` `[layers, n, H]`, the residual stream after every layer."""

    def __init__(self, checkpoint: Checkpoint, layers: int | None = None):
        self._config = checkpoint.config
        self._weights = {name: tensor.double().numpy() for name, tensor in checkpoint.weights.items()}
        self._layers = layers or checkpoint.config.layers
        self._run = lru_cache(maxsize=4096)(self._uncached)

    def last(self, tokens: Sequence[int]) -> np.ndarray:
        """Logits `[V]` of the token after `tokens`."""
        return self.logits(tokens)[-1]

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        return self._run(tuple(int(token) for token in tokens))[0]

    def hidden(self, tokens: Sequence[int]) -> np.ndarray:
        return self._run(tuple(int(token) for token in tokens))[1]

    def _uncached(self, tokens: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        x = self._weights["model.embed_tokens.weight"][list(tokens)]
        after = []
        for layer in range(self._layers):
            prefix = f"model.layers.{layer}."
            x = x + self._attention(self._norm(x, prefix + "input_layernorm"), prefix + "self_attn.")
            x = x + self._mlp(self._norm(x, prefix + "post_attention_layernorm"), prefix + "mlp.")
            after.append(x)
        head = "model.embed_tokens.weight" if self._config.tied_head else "lm_head.weight"
        return self._norm(x, "model.norm") @ self._weights[head].T, np.array(after)

    def _norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(axis=1, keepdims=True) + self._config.norm_eps) * self._weights[name + ".weight"]

    def _linear(self, x: np.ndarray, name: str) -> np.ndarray:
        return x @ self._weights[name + ".weight"].T

    def _mlp(self, x: np.ndarray, prefix: str) -> np.ndarray:
        gate = self._linear(x, prefix + "gate_proj")
        return self._linear(gate / (1 + np.exp(-gate)) * self._linear(x, prefix + "up_proj"), prefix + "down_proj")

    def _attention(self, x: np.ndarray, prefix: str) -> np.ndarray:
        c, n = self._config, len(x)
        q, k, v = (self._linear(x, f"{prefix}{which}_proj").reshape(n, -1, c.head_dim) for which in "qkv")
        heads = []
        for head in range(c.heads):
            shared = head // (c.heads // c.kv_heads)
            scores = self._rotated(q[:, head]) @ self._rotated(k[:, shared]).T / np.sqrt(c.head_dim)
            scores[np.triu_indices(n, 1)] = -np.inf
            weights = np.exp(scores - scores.max(axis=1, keepdims=True))
            heads.append(weights / weights.sum(axis=1, keepdims=True) @ v[:, shared])
        return self._linear(np.concatenate(heads, axis=1), prefix + "o_proj")

    def _rotated(self, x: np.ndarray) -> np.ndarray:
        """Pairs (i, i + d/2) as complex numbers, turned by position · theta^(−2i/d)."""
        half = x.shape[1] // 2
        turns = np.outer(np.arange(len(x)), self._config.rope_theta ** (-2.0 * np.arange(half) / x.shape[1]))
        turned = (x[:, :half] + 1j * x[:, half:]) * np.exp(1j * turns)
        return np.concatenate([turned.real, turned.imag], axis=1)
