"""A Gated DeltaNet decoder written a second time: numpy, float64, token by token from the definition, no cache."""

from __future__ import annotations

import numpy as np

from tests.llama_reference import Reference


class GdnReference(Reference):
    """As `Reference`, for a GdnCheckpoint."""

    def _uncached(self, tokens: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        x = self._weights["model.embeddings.weight"][list(tokens)]
        after = []
        for layer in range(self._layers):
            prefix = f"model.layers.{layer}."
            mixer = self._attention if layer in self._config.attention_layers else self._recurrence
            x = x + mixer(self._norm(x, prefix + "attn_norm"), prefix + "attn.")
            x = x + self._mlp(self._norm(x, prefix + "mlp_norm"), prefix + "mlp.")
            after.append(x)
        head = "model.embeddings.weight" if self._config.tied_head else "lm_head.weight"
        return self._norm(x, "model.norm") @ self._weights[head].T, np.array(after)

    def _recurrence(self, x: np.ndarray, prefix: str) -> np.ndarray:
        c, n = self._config, len(x)
        q, k, v = (self._convolved(x, prefix, which) for which in "qkv")
        q, k = (each.reshape(n, c.linear_heads, c.linear_key_dim) for each in (q, k))
        q, k = (each / np.sqrt((each**2).sum(axis=2, keepdims=True) + 1e-6) for each in (q, k))
        # Value heads 0…g − 1 share query and key head 0, and so on.
        q, k = (np.repeat(each, c.linear_value_heads // c.linear_heads, axis=1) for each in (q, k))
        v = v.reshape(n, c.linear_value_heads, c.linear_value_dim)
        a, b = self._linear(x, prefix + "a_proj"), self._linear(x, prefix + "b_proj")
        rate, bias, scale = (self._weights[prefix + name] for name in ("A_log", "dt_bias", "o_norm.weight"))
        decay = np.exp(-np.exp(rate) * np.logaddexp(0, a + bias))
        beta = (2 if c.negative_eigenvalues else 1) / (1 + np.exp(-b))
        gate = self._linear(x, prefix + "g_proj").reshape(v.shape)
        out = np.empty(v.shape)
        state = np.zeros((c.linear_value_heads, c.linear_key_dim, c.linear_value_dim))
        for t in range(n):
            state = decay[t, :, None, None] * state
            found = np.einsum("hk,hkv->hv", k[t], state)
            state = state + np.einsum("hk,hv->hkv", k[t], beta[t, :, None] * (v[t] - found))
            out[t] = np.einsum("hk,hkv->hv", q[t], state) / np.sqrt(c.linear_key_dim)
        normed = out / np.sqrt((out**2).mean(axis=2, keepdims=True) + c.norm_eps) * scale
        return self._linear((normed * gate / (1 + np.exp(-gate))).reshape(n, -1), prefix + "o_proj")

    def _convolved(self, x: np.ndarray, prefix: str, which: str) -> np.ndarray:
        """Every channel's last W inputs with its W taps, the last tap for the present input; then SiLU."""
        inputs, taps = self._linear(x, f"{prefix}{which}_proj"), self._weights[f"{prefix}{which}_conv1d.weight"][:, 0]
        width = taps.shape[1]
        padded = np.concatenate([np.zeros((width - 1, len(taps))), inputs])
        total = sum(padded[tap : tap + len(x)] * taps[:, tap] for tap in range(width))
        return total / (1 + np.exp(-total))
