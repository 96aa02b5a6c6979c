"""An EAGLE-style drafter as a torch module: all anchors of a batch at once, several steps unrolled, as they are served.

When it serves, the drafter's cache holds entries made from the target's features for everything committed, and entries
made from its own hidden states for the tokens that it drafted since. So step u of an anchor sees here: the committed
entries up to the anchor, which are the same for all steps ("the true prefix"), and its own u entries. The first step is
the committed layer's, the others are the drafted one's. The tokens that are fed are those of the text: a draft goes on
being of use only as long as it is what the target says.
"""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from specdec_core.kernels.rotary import rotary_tables
from specdec_core.models.checkpoints import Checkpoint
from specdec_core.models.eagle_checkpoint import PARTS, EagleConfig, expected_shapes, layer_shapes
from specdec_core.training.distilled_loss import Distilled, Laws, Loss, Steps
from specdec_core.training.eagle_batches import Batch


class EagleLearner(nn.Module):
    """Trainable weights by the names of `eagle_checkpoint.expected_shapes`; the target's embedding and head are frozen.

    tokens  `[D]` the target's ids of the draft tokens.
    """

    embedding: Tensor
    head: Tensor
    head_half: Tensor
    target_norm: Tensor
    cosine: Tensor
    sine: Tensor

    def __init__(self, config: EagleConfig, target: Checkpoint, tokens: Tensor, feature_scale: float, seed: int):
        super().__init__()
        self.config, self.tokens = config, tokens
        initial = initial_weights(config, target, feature_scale, seed)
        self.weights = nn.ParameterDict({name.replace(".", "/"): nn.Parameter(v) for name, v in initial.items()})
        embedding = target.weights["model.embed_tokens.weight"].float()
        head = embedding if target.config.tied_head else target.weights["lm_head.weight"].float()
        self.register_buffer("embedding", embedding, persistent=False)
        self.register_buffer("head", head[tokens].contiguous(), persistent=False)
        self.register_buffer("head_half", self.head.bfloat16(), persistent=False)
        self.register_buffer("target_norm", target.weights["model.norm.weight"].float(), persistent=False)
        cosine, sine = rotary_tables(config.context, config.head_dim, config.rope_theta)
        self.register_buffer("cosine", torch.from_numpy(cosine).float(), persistent=False)
        self.register_buffer("sine", torch.from_numpy(sine).float(), persistent=False)

    def weight(self, name: str) -> Tensor:
        return self.weights[name.replace(".", "/")]

    def named_weights(self) -> dict[str, Tensor]:
        """Detached weights by their names in a checkpoint."""
        return {name: self.weight(name).detach() for name in expected_shapes(self.config)}

    @torch.no_grad()
    def begin_drafting(self) -> None:
        """Let the drafted layer start from what the committed one has learned so far."""
        for name in layer_shapes(self.config):
            self.weight(f"drafted.{name}").copy_(self.weight(f"committed.{name}"))

    def load(self, weights: dict[str, Tensor]) -> None:
        with torch.no_grad():
            for name, values in weights.items():
                self.weight(name).copy_(values)

    def forward(self, batch: Batch, unroll: int, loss: Loss, mixed: bool = True) -> tuple[Tensor, Tensor]:
        """Unroll `unroll` steps from every anchor: the loss to minimise, and the mean cross-entropy of each step `[U]`.

        `mixed`: matrix products in bfloat16, everything else in float32.
        """
        laws = Laws(batch, unroll, self._wanted(batch), self._head(mixed))
        losses = Distilled.apply(self._said(batch, unroll, mixed), laws, loss.mode_share)
        weights = loss.decay ** torch.arange(unroll)
        return (losses * weights).sum() / weights.sum(), losses.detach()

    @torch.no_grad()
    def judge(self, batch: Batch, unroll: int, mixed: bool = True) -> Steps:
        """Compare every step with the target."""
        laws = Laws(batch, unroll, self._wanted(batch), self._head(mixed))
        return laws.compare(self._said(batch, unroll, mixed))

    def _said(self, batch: Batch, unroll: int, mixed: bool) -> Tensor:
        """What the head reads at each step, `[U, B, A, H]`."""
        # Autocast's cache of cast weights is shared by all threads: which of them filled or emptied it would decide how
        # gradients are rounded.
        with torch.autocast("cpu", torch.bfloat16, enabled=mixed, cache_enabled=False):
            hidden = self._unrolled(batch, unroll)
        first, *later = hidden
        drafted = _Layer(self, "drafted")
        return torch.stack([_Layer(self, "committed").said(first), *(drafted.said(each) for each in later)])

    def _wanted(self, batch: Batch) -> Tensor:
        """What the target's head reads, `[B, A + U − 1, H]`."""
        return _rms(batch.final, self.config.norm_eps) * self.target_norm

    def _head(self, mixed: bool) -> Tensor:
        return self.head_half if mixed else self.head

    def project(self, features: Tensor) -> Tensor:
        """Features `[…, F, H]`, each normed on its own, joined and brought to `[…, H]`."""
        return F.linear(_rms(features, self.config.norm_eps).flatten(-2), self.weight("fc.weight")).float()

    def _unrolled(self, batch: Batch, unroll: int) -> list[Tensor]:
        """Hidden states `[B, A, H]` of each step."""
        rows = torch.arange(len(batch.tokens))[:, None]
        committed, drafted = _Layer(self, "committed"), _Layer(self, "drafted")
        prefix = self.project(batch.features)
        pairs = batch.tokens.shape[1]
        positions = torch.arange(pairs).expand(len(batch.tokens), pairs)
        inputs = committed.inputs(self.embedding[batch.tokens], prefix)
        prefix_keys, prefix_values = committed.keys_values(inputs, positions)
        # [B, 1, A, T]: an anchor sees the pairs up to itself.
        visible = (torch.arange(pairs) <= batch.anchors[..., None])[:, None]
        own_keys: list[Tensor] = []
        own_values: list[Tensor] = []

        def step(layer: _Layer, hidden: Tensor, own_inputs: Tensor, places: Tensor) -> Tensor:
            queries = layer.queries(own_inputs, places)
            attended = self._attend(queries, prefix_keys, prefix_values, visible, own_keys, own_values)
            return layer.continued(hidden, own_inputs, attended)

        hidden = step(committed, prefix[rows, batch.anchors], inputs[rows, batch.anchors], batch.anchors)
        found = [hidden]
        for later in range(1, unroll):
            places = batch.anchors + later
            tokens = batch.tokens[rows, places.clamp(max=pairs - 1)]
            own_inputs = drafted.inputs(self.embedding[tokens], hidden)
            keys, values = drafted.keys_values(own_inputs, places)
            own_keys.append(keys)
            own_values.append(values)
            hidden = step(drafted, hidden, own_inputs, places)
            found.append(hidden)
        return found

    def _attend(
        self, queries: Tensor, keys: Tensor, values: Tensor, visible: Tensor, own_keys: list, own_values: list
    ) -> Tensor:
        """Attention of `[B, heads, A, d]` over the prefix `[B, kv, T, d]` and own entries → `[B, A, heads · d]`."""
        c, group = self.config, self.config.heads // self.config.kv_heads
        batch, _, anchors, size = queries.shape
        grouped = queries.reshape(batch, c.kv_heads, group, anchors, size)
        scores = torch.matmul(grouped, keys[:, :, None].transpose(-1, -2)).float()
        scores = scores.masked_fill(~visible[:, :, None], -torch.inf)
        own = [(grouped.float() * each[:, :, None].float()).sum(-1, keepdim=True) for each in own_keys]
        shares = torch.softmax(torch.cat([scores, *own], dim=-1) * size**-0.5, dim=-1)
        pairs = keys.shape[2]
        out = torch.matmul(shares[..., :pairs], values[:, :, None]).float()
        for place, each in enumerate(own_values):
            out = out + shares[..., pairs + place, None] * each[:, :, None].float()
        return out.reshape(batch, c.heads, anchors, size).transpose(1, 2).flatten(2)


class _Layer:
    """One of a learner's layers, step by step."""

    def __init__(self, learner: EagleLearner, part: str):
        self._config, self._learner, self._part = learner.config, learner, part

    def _weight(self, name: str) -> Tensor:
        return self._learner.weight(f"{self._part}.{name}.weight")

    def _linear(self, inputs: Tensor, name: str) -> Tensor:
        return F.linear(inputs, self._weight(name))

    def _normed(self, values: Tensor, name: str) -> Tensor:
        return _rms(values, self._config.norm_eps) * self._weight(name)

    def inputs(self, embedded: Tensor, hidden: Tensor) -> Tensor:
        """What the attention reads, `[…, 2H]`."""
        return torch.cat([self._normed(embedded, "embedding_norm"), self._normed(hidden, "hidden_norm")], dim=-1)

    def queries(self, inputs: Tensor, positions: Tensor) -> Tensor:
        return self._rotated(self._heads(inputs, "q", self._config.heads), positions)

    def keys_values(self, inputs: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        kv = self._config.kv_heads
        return self._rotated(self._heads(inputs, "k", kv), positions), self._heads(inputs, "v", kv)

    def continued(self, hidden: Tensor, inputs: Tensor, attended: Tensor) -> Tensor:
        """The hidden state behind the one before, `[…, H]` each, from what the attention read and found."""
        hidden = hidden + self._linear(inputs[..., : self._config.hidden_size], "embedding_proj").float()
        hidden = hidden + self._linear(attended, "self_attn.o_proj").float()
        normed = self._normed(hidden, "post_attention_layernorm")
        gate, up = (self._linear(normed, f"mlp.{which}_proj") for which in ("gate", "up"))
        return hidden + self._linear(F.silu(gate) * up, "mlp.down_proj").float()

    def said(self, hidden: Tensor) -> Tensor:
        """What the head reads."""
        return self._normed(hidden, "norm")

    def _heads(self, inputs: Tensor, which: str, heads: int) -> Tensor:
        """`[B, heads, n, head_dim]`."""
        found = self._linear(inputs, f"self_attn.{which}_proj")
        return found.unflatten(-1, (heads, self._config.head_dim)).transpose(1, 2)

    def _rotated(self, heads: Tensor, positions: Tensor) -> Tensor:
        cosine, sine = (table[positions][:, None] for table in (self._learner.cosine, self._learner.sine))
        first, second = heads.float().chunk(2, dim=-1)
        return torch.cat([first * cosine - second * sine, second * cosine + first * sine], dim=-1)


def initial_weights(config: EagleConfig, target: Checkpoint, feature_scale: float, seed: int) -> dict[str, Tensor]:
    """Where training starts: both layers are the target's last one, continuing its last feature.

    fc passes the last feature on, at the size `feature_scale` that it has in the target; the rest of fc and the weights
    of the embedding are small and random.
    """
    random = torch.Generator().manual_seed(seed)
    prefix = f"model.layers.{target.config.layers - 1}."
    hidden = config.hidden_size
    joined = 0.02 * feature_scale * torch.randn(expected_shapes(config)["fc.weight"], generator=random)
    joined[:, -hidden:] += feature_scale * torch.eye(hidden)
    layer = {}
    for name, shape in layer_shapes(config).items():
        if name == "embedding_proj.weight":
            values = 0.02 * torch.randn(shape, generator=random)
        elif name == "embedding_norm.weight":
            values = torch.ones(shape)
        elif name == "norm.weight":
            values = target.weights["model.norm.weight"].float()
        elif name == "hidden_norm.weight":
            values = target.weights[prefix + "input_layernorm.weight"].float()
        elif name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            of_hidden = target.weights[prefix + name].float()
            values = torch.cat([0.02 * torch.randn(of_hidden.shape, generator=random), of_hidden], dim=1)
        else:
            values = target.weights[prefix + name].float()
        layer[name] = values
    return {"fc.weight": joined, **{f"{part}.{name}": v.clone() for part in PARTS for name, v in layer.items()}}


def feature_scale(features: np.ndarray, rows: int = 4096) -> float:
    """Median size (root mean square) of the last feature that the drafter reads, over the first tokens of a corpus."""
    values = np.asarray(features[:rows, -2], np.float32)
    return float(np.median(np.sqrt((values**2).mean(-1))))


def _rms(values: Tensor, epsilon: float) -> Tensor:
    wide = values.float()
    return wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + epsilon)
