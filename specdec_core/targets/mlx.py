"""A Llama-family checkpoint run by MLX as a target: quantized or not, on Metal or, on Linux, on the CPU.

The forward pass is our own, because trees and ragged rows need positions and a mask a node; every product with a
weight is one MLX call over all tokens of the pass, so what is measured is MLX's kernel for that number of tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch

from specdec_core.arrays import Array
from specdec_core.models.checkpoints import Checkpoint, fingerprint
from specdec_core.models.config import LlamaConfig
from specdec_core.models.errors import MissingPackage, UnsupportedModel
from specdec_core.placement import PlacementError
from specdec_core.protocol import Verification
from specdec_core.state.slots import Slots, require_context, require_tokens
from specdec_core.targets.padded import PaddedBatch, pad
from specdec_core.topology import Forest, chain, forest

DTYPES = ("float32", "bfloat16", "float16")
BITS = (4, 8)
GROUPS = (32, 64, 128)


@cache
def library() -> Any:
    """The module `mlx.core`. Raises MissingPackage if it is not installed or does not load here."""
    try:
        import mlx.core as mx
    except (ImportError, OSError) as error:
        raise MissingPackage(f"MLX is not here ({error}): pip install 'mlx[cpu]' (Linux) or mlx (Mac)") from error
    return mx


@dataclass(frozen=True)
class MlxOptions:
    """How MLX runs a checkpoint.

    dtype   of activations, cache, norms, and of weights that are not quantized.
    bits    4 or 8 to quantize every matrix, embedding and head included; None leaves them as they are.
    group   weights that share a scale and an offset; divides every row.
    device  'gpu' (Metal) or 'cpu'; None takes MLX's own choice, the GPU where there is one.
    """

    dtype: str = "float32"
    bits: int | None = None
    group: int = 64
    device: str | None = None

    def __post_init__(self) -> None:
        allowed = {"dtype": DTYPES, "bits": (None, *BITS), "group": GROUPS, "device": (None, "cpu", "gpu")}
        for name, values in allowed.items():
            if getattr(self, name) not in values:
                raise PlacementError(f"{name} {getattr(self, name)!r}: expected one of {', '.join(map(str, values))}")


class MlxCache(Slots):
    """Keys and values `[slots, kv_heads, capacity, head_dim]` of each layer."""

    def __init__(self, config: LlamaConfig, slots: int, capacity: int, dtype: Any):
        super().__init__(slots, capacity)
        mx = library()
        shape = (slots, config.kv_heads, capacity, config.head_dim)
        # Zeros, not garbage: a masked entry is multiplied by zero in some forms of attention, and 0 · NaN is NaN.
        self.keys = [mx.zeros(shape, dtype) for _ in range(config.layers)]
        self.values = [mx.zeros(shape, dtype) for _ in range(config.layers)]

    @property
    def arrays(self) -> Iterator[Any]:
        return iter((*self.keys, *self.values))

    def keep(self, slot: int, path: np.ndarray) -> None:
        """Move the entries of these nodes to the front of the slot's scratch."""
        if np.array_equal(path, np.arange(len(path))):
            return
        base = int(self.lengths[slot])
        chosen = library().array(base + path)
        for store in self.arrays:
            store[slot, :, base : base + len(path)] = store[slot][:, chosen]


class MlxTarget:
    """`Target` over a Llama-family checkpoint.

    chunk  most tokens of one prefill pass.

    Raises MissingPackage without MLX, PlacementError for a device that is not there, UnsupportedModel if a row is not
    a whole number of quantization groups.
    """

    def __init__(self, checkpoint: Checkpoint, options: MlxOptions | None = None, chunk: int = 512):
        mx = library()
        self.config, self.options, self.name = checkpoint.config, options or MlxOptions(), checkpoint.name
        if self.options.device == "gpu" and not mx.metal.is_available():
            raise PlacementError("device gpu: MLX finds no Metal device here; use cpu")
        self._chunk = chunk
        chosen = {"cpu": mx.cpu, "gpu": mx.gpu}.get(self.options.device or "")
        self._device = mx.default_device() if chosen is None else mx.Device(chosen)
        self._dtype = getattr(mx, self.options.dtype)
        with mx.stream(self._device):
            self._weights = {name: self._placed(name, tensor) for name, tensor in checkpoint.weights.items()}
            mx.eval(self._weights)
        half = self.config.head_dim // 2
        self._frequencies = self.config.rope_theta ** (-np.arange(half) / half)

    @property
    def vocabulary(self) -> int:
        return self.config.vocabulary

    @property
    def context(self) -> int:
        return self.config.context

    def dequantised_checkpoint(self) -> Checkpoint:
        """The values that the weights stand for, in float32: the same model for another engine."""
        mx, weights = library(), {}
        with mx.stream(self._device):
            for name, parts in self._weights.items():
                whole = mx.dequantize(*parts, **self._format) if isinstance(parts, tuple) else parts
                weights[name] = torch.from_numpy(np.array(whole.astype(mx.float32)))
        return Checkpoint(self.name, self.config, MappingProxyType(weights), None, fingerprint(weights))

    def new_state(self, slots: int, capacity: int) -> MlxCache:
        return MlxCache(self.config, slots, capacity, self._dtype)

    def prefill(self, state: MlxCache, slots: np.ndarray, prompts: Sequence[np.ndarray]) -> list[Array | None]:
        state.release(slots)
        for slot, prompt in zip(slots, prompts, strict=True):
            self._prefill_row(state, np.array([slot]), np.asarray(prompt, np.int64))
        return [None] * len(prompts)

    def verify(self, state: MlxCache, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> Verification:
        batch = self._padded(state, slots, tokens, forest)
        epoch = state.begin()
        mx = library()
        with mx.stream(self._device):
            logits = self._head(self._hidden(state, slots, batch, forest)).astype(mx.float32)
            mx.eval(logits, *state.arrays)
        return Verification(np.array(logits), None, slots, forest, epoch)

    def commit(self, state: MlxCache, verification: Verification, paths: Sequence[np.ndarray]) -> None:
        state.require_paths(verification.epoch, verification.forest, paths)
        with library().stream(self._device):
            for slot, path in zip(verification.slots.tolist(), paths, strict=True):
                state.keep(slot, path)
            library().eval(*state.arrays)
        state.advance(verification.slots, [len(path) for path in paths])

    def synchronise(self) -> None:
        """Nothing to wait for: every pass and commit is evaluated before it returns."""

    def _prefill_row(self, state: MlxCache, slots: np.ndarray, prompt: np.ndarray) -> None:
        for start in range(0, len(prompt) - 1, self._chunk):
            tokens = prompt[start : min(start + self._chunk, len(prompt) - 1)]
            shape = forest([chain(len(tokens))])
            batch = self._padded(state, slots, tokens, shape)
            state.begin()
            with library().stream(self._device):
                library().eval(self._hidden(state, slots, batch, shape), *state.arrays)
            state.advance(slots, [len(tokens)])

    def _padded(self, state: MlxCache, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> PaddedBatch:
        require_tokens(tokens, self.vocabulary)
        state.require_room(slots, forest.counts)
        require_context(state.lengths[slots][forest.rows], forest.depths, self.context)
        return pad(tokens, slots, state.lengths[slots], forest)

    @property
    def _format(self) -> dict[str, Any]:
        return {"group_size": self.options.group, "bits": self.options.bits}

    def _placed(self, name: str, tensor: torch.Tensor) -> Any:
        """The array of a norm or plain matrix, or (packed, scales, offsets) of a quantized matrix `[out, in]`."""
        mx = library()
        array = mx.array(tensor.float().numpy()).astype(self._dtype)
        if self.options.bits is None or tensor.ndim == 1:
            return array
        if tensor.shape[1] % self.options.group:
            raise UnsupportedModel(
                f"{self.name}: rows of {name} have {tensor.shape[1]} weights, no multiple of the quantization group "
                f"{self.options.group}; choose another group of {', '.join(map(str, GROUPS))}, or no quantization"
            )
        return tuple(mx.quantize(array, **self._format))

    def _linear(self, x: Any, name: str) -> Any:
        weight = self._weights[name]
        if isinstance(weight, tuple):
            return library().quantized_matmul(x, *weight, transpose=True, **self._format)
        return x @ weight.T

    def _norm(self, x: Any, name: str) -> Any:
        return library().fast.rms_norm(x, self._weights[name], self.config.norm_eps)

    def _embedded(self, tokens: np.ndarray) -> Any:
        mx = library()
        weight, chosen = self._weights["model.embed_tokens.weight"], mx.array(tokens)
        if isinstance(weight, tuple):
            return mx.dequantize(*(part[chosen] for part in weight), **self._format)
        return weight[chosen]

    def _head(self, x: Any) -> Any:
        name = "model.embed_tokens.weight" if self.config.tied_head else "lm_head.weight"
        return self._linear(self._norm(x, "model.norm.weight"), name)

    def _hidden(self, state: MlxCache, slots: np.ndarray, batch: PaddedBatch, forest: Forest) -> Any:
        """The residual stream after the last layer, `[N, H]`; the nodes' keys and values in the state."""
        mx, c = library(), self.config
        rows, columns = batch.rows, batch.columns
        x = self._embedded(batch.tokens[rows, columns])
        angles = batch.positions[rows, columns][:, None, None] * self._frequencies
        cosine, sine = mx.array(np.cos(angles).astype(np.float32)), mx.array(np.sin(angles).astype(np.float32))
        view = _View(batch, slots, state.lengths[slots], forest)
        for layer in range(c.layers):
            prefix = f"model.layers.{layer}."
            inner = self._norm(x, prefix + "input_layernorm.weight")
            q, k, v = (
                self._linear(inner, f"{prefix}self_attn.{which}_proj.weight").reshape(len(rows), -1, c.head_dim)
                for which in "qkv"
            )
            state.keys[layer] = view.written(state.keys[layer], _rotated(k, cosine, sine))
            state.values[layer] = view.written(state.values[layer], v)
            seen = view.attended(_rotated(q, cosine, sine), state.keys[layer], state.values[layer])
            x = x + self._linear(seen.reshape(len(rows), -1), prefix + "self_attn.o_proj.weight")
            inner = self._norm(x, prefix + "post_attention_layernorm.weight")
            gate, up = (self._linear(inner, f"{prefix}mlp.{which}_proj.weight") for which in ("gate", "up"))
            x = x + self._linear(gate * mx.sigmoid(gate) * up, prefix + "mlp.down_proj.weight")
        return x


class _View:
    """Which entries one pass writes and looks at, as MLX indices made once for all layers."""

    def __init__(self, batch: PaddedBatch, slots: np.ndarray, lengths: np.ndarray, forest: Forest):
        mx = library()
        counts, width = forest.counts, batch.tokens.shape[1]
        starts = forest.offsets[:-1].tolist()
        self._parts = list(zip(slots.tolist(), lengths.tolist(), starts, counts.tolist(), strict=True))
        self._rectangular = bool((counts == width).all())
        self._shape, self._reach = batch.tokens.shape, batch.reach
        flat = np.zeros(batch.tokens.shape, np.int64)  # padding asks what the first node asks; nobody reads its answer
        flat[batch.rows, batch.columns] = np.arange(len(batch.rows))
        self._spread, self._gather = mx.array(flat.ravel()), mx.array(batch.rows * width + batch.columns)
        self._mask = mx.array(batch.visible[:, None])
        first = int(slots[0])
        consecutive = np.array_equal(slots, np.arange(first, first + len(slots)))
        self._chosen = slice(first, first + len(slots)) if consecutive else mx.array(slots)

    def written(self, store: Any, new: Any) -> Any:
        """The store with every node's `[N, kv_heads, head_dim]` at its entry."""
        for slot, length, start, count in self._parts:
            store[slot, :, length : length + count] = new[start : start + count].swapaxes(0, 1)
        return store

    def attended(self, queries: Any, keys: Any, values: Any) -> Any:
        """Attention of every node over what it sees, `[N, heads, head_dim]`."""
        batch, width = self._shape
        padded = queries if self._rectangular else queries[self._spread]
        found = library().fast.scaled_dot_product_attention(
            padded.reshape(batch, width, *queries.shape[1:]).swapaxes(1, 2),
            keys[self._chosen][:, :, : self._reach],
            values[self._chosen][:, :, : self._reach],
            scale=queries.shape[-1] ** -0.5,
            mask=self._mask,
        )
        flat = found.swapaxes(1, 2).reshape(batch * width, *queries.shape[1:])
        return flat if self._rectangular else flat[self._gather]


def _rotated(x: Any, cosine: Any, sine: Any) -> Any:
    """Pairs (i, i + d/2) of `[N, heads, d]` turned by their position's angles, in float32 whatever the dtype."""
    mx = library()
    first, second = mx.split(x.astype(mx.float32), 2, axis=-1)
    turned = mx.concatenate([first * cosine - second * sine, second * cosine + first * sine], axis=-1)
    return turned.astype(x.dtype)
