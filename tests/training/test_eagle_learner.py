"""The drafter as a torch module, held against a plain one written out here: one anchor and one step at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from specdec_core.models.checkpoints import tiny_llama
from specdec_core.models.eagle_checkpoint import PARTS, eagle_config, expected_shapes, layer_shapes
from specdec_core.training import distilled_loss as module
from specdec_core.training.distilled_loss import Loss
from specdec_core.training.eagle_batches import Batch, batch_of
from specdec_core.training.eagle_learner import EagleLearner, feature_scale, initial_weights
from tests.training.test_eagle_batches import random_corpus, random_features

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPE = {"vocabulary": 23, "context": 32, "hidden_size": 24, "intermediate_size": 40, "heads": 6, "head_dim": 4}
CHECKPOINT = tiny_llama(1, **SHAPE)
CONFIG = eagle_config(CHECKPOINT, features=2, vocabulary=11)
TOKENS = torch.tensor([0, 2, 3, 5, 8, 9, 13, 14, 17, 20, 22])
CORPUS = random_corpus([(3, 5), (1, 2), (2, 7), (5, 1), (1, 1)], greedy=[0, 2])
FEATURES = random_features(CORPUS, layers=2, hidden=24)
ROWS, UNROLL = np.array([2, 0, 3, 1, 4]), 3
LOSS = Loss(decay=0.7, mode_share=0.3)


def new_learner(seed: int = 0) -> EagleLearner:
    """Its weights are moved a little away from their start, so that none of them is special."""
    learner = EagleLearner(CONFIG, CHECKPOINT, TOKENS, feature_scale=0.8, seed=seed)
    random = torch.Generator().manual_seed(seed)
    learner.load({n: v + 0.1 * torch.randn(v.shape, generator=random) for n, v in learner.named_weights().items()})
    return learner


@pytest.fixture(scope="module")
def learner() -> EagleLearner:
    return new_learner()


@pytest.fixture(scope="module")
def batch() -> Batch:
    return batch_of(CORPUS, FEATURES, ROWS, UNROLL)


class Plain:
    """The definition, in float64: no batch, no padding, nothing shared between anchors."""

    def __init__(self, weights: dict[str, Tensor]):
        self.weights = {name: values.double().requires_grad_() for name, values in weights.items()}
        self._embedding = CHECKPOINT.weights["model.embed_tokens.weight"].double()
        self._head = CHECKPOINT.weights["lm_head.weight"].double()[TOKENS]

    def logits(self, text: np.ndarray, features: np.ndarray, anchor: int) -> list[Tensor]:
        """Of each step from this anchor on, as far as the row goes, `[D]`."""
        hidden = [self.weights["fc.weight"] @ torch.cat([unit(layer) for layer in each]) for each in floats(features)]
        entries = [("committed", self._input("committed", text[p + 1], hidden[p])) for p in range(anchor + 1)]
        before, found = hidden[anchor], []
        for step in range(UNROLL):
            if anchor + step + 1 >= len(text):
                break
            if step:
                entries.append(("drafted", self._input("drafted", text[anchor + step + 1], before)))
            layer, newest = entries[-1]
            between = before + self._of(layer, "embedding_proj") @ newest[: CONFIG.hidden_size]
            between = between + self._of(layer, "self_attn.o_proj") @ self._attended(entries)
            normed = unit(between) * self._of(layer, "post_attention_layernorm")
            gate, up = (self._of(layer, f"mlp.{name}_proj") @ normed for name in ("gate", "up"))
            before = between + self._of(layer, "mlp.down_proj") @ (gate * torch.sigmoid(gate) * up)
            found.append(self._head @ (unit(before) * self._of(layer, "norm")))
        return found

    def law(self, final: np.ndarray) -> Tensor:
        """The target's, of the draft vocabulary."""
        said = unit(floats(final)) * CHECKPOINT.weights["model.norm.weight"].double()
        return torch.softmax(self._head @ said, 0)

    def _of(self, layer: str, name: str) -> Tensor:
        return self.weights[f"{layer}.{name}.weight"]

    def _input(self, layer: str, token: int, hidden: Tensor) -> Tensor:
        embedded = unit(self._embedding[int(token)]) * self._of(layer, "embedding_norm")
        return torch.cat([embedded, unit(hidden) * self._of(layer, "hidden_norm")])

    def _attended(self, entries: list[tuple[str, Tensor]]) -> Tensor:
        """What the last entry attends to; an entry's position is its place, its keys and values are its layer's."""
        group = CONFIG.heads // CONFIG.kv_heads
        newest, read = entries[-1]
        heads = []
        for head in range(CONFIG.heads):
            query = rotated(self._part(newest, "q", head) @ read, len(entries) - 1)
            keys = [rotated(self._part(of, "k", head // group) @ e, place) for place, (of, e) in enumerate(entries)]
            shares = torch.softmax(torch.stack([query @ key for key in keys]) / CONFIG.head_dim**0.5, 0)
            values = [self._part(of, "v", head // group) @ e for of, e in entries]
            heads.append(sum(share * value for share, value in zip(shares, values, strict=True)))
        return torch.cat(heads)

    def _part(self, layer: str, which: str, head: int) -> Tensor:
        rows = slice(head * CONFIG.head_dim, (head + 1) * CONFIG.head_dim)
        return self._of(layer, f"self_attn.{which}_proj")[rows]


def floats(values: np.ndarray) -> Tensor:
    return torch.from_numpy(np.asarray(values, np.float64))


def unit(values: Tensor) -> Tensor:
    return values / torch.sqrt((values**2).mean() + CONFIG.norm_eps)


def rotated(values: Tensor, position: int) -> Tensor:
    half = len(values) // 2
    angles = position * CONFIG.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
    first, second = values[:half], values[half:]
    return torch.cat([first * angles.cos() - second * angles.sin(), second * angles.cos() + first * angles.sin()])


def plainly(plain: Plain, rows: np.ndarray = ROWS) -> list[list[tuple[Tensor, Tensor, int, int]]]:
    """For each step: (law, logits, row, anchor) of all that is compared, anchors counted from the row's first."""
    steps: list[list[tuple[Tensor, Tensor, int, int]]] = [[] for _ in range(UNROLL)]
    for place, row in enumerate(rows):
        text, start = CORPUS.sequence(row), CORPUS.offsets[row]
        first = max(0, int(CORPUS.prompt_lengths[row]) - 2)
        for anchor in range(first, len(text) - 1):
            features = FEATURES[start : start + anchor + 1, :-1]
            for step, logits in enumerate(plain.logits(text, features, anchor)):
                law = plain.law(FEATURES[start + anchor + step + 1, -1])
                steps[step].append((law, logits, place, anchor - first))
    return steps


def plain_loss(plain: Plain, loss: Loss, rows: np.ndarray = ROWS) -> tuple[Tensor, list[Tensor]]:
    means = []
    for compared in plainly(plain, rows):
        total = torch.zeros((), dtype=torch.float64)
        for law, logits, *_ in compared:
            wanted = (1 - loss.mode_share) * law
            wanted[law.argmax()] += loss.mode_share
            total = total - (wanted * torch.log_softmax(logits, 0)).sum()
        means.append(total / len(compared))
    weights = [loss.decay**step for step in range(UNROLL)]
    return sum(w * mean for w, mean in zip(weights, means, strict=True)) / sum(weights), means


class TestTheLoss:
    @pytest.mark.parametrize("loss", [LOSS, Loss(), Loss(1.0, 0.0), Loss(0.0, 1.0)], ids=str)
    def test_it_and_its_gradient_are_those_of_the_definition(self, learner, batch, loss):
        plain = Plain(learner.named_weights())
        expected, means = plain_loss(plain, loss)
        found, losses = learner(batch, UNROLL, loss, mixed=False)
        assert found.item() == pytest.approx(expected.item(), rel=1e-5)
        assert losses.tolist() == pytest.approx([mean.item() for mean in means], rel=1e-5)
        gradients = torch.autograd.grad(found, [learner.weight(name) for name in plain.weights])
        theirs = torch.autograd.grad(expected, list(plain.weights.values()))
        for name, ours, their in zip(plain.weights, gradients, theirs, strict=True):
            scale = their.abs().max()
            assert (scale > 0) == (loss.decay > 0 or not name.startswith("drafted")), name
            assert (ours - their).abs().max() <= 1e-4 * scale, name

    def test_a_multiple_of_it_has_a_multiple_of_the_gradient(self, learner, batch):
        parameters = list(learner.parameters())
        once, thrice = (
            torch.autograd.grad(factor * learner(batch, UNROLL, LOSS, mixed=False)[0], parameters) for factor in (1, 3)
        )
        for ours, more in zip(once, thrice, strict=True):
            assert torch.allclose(3 * ours, more, rtol=1e-4, atol=1e-6)

    def test_a_decay_of_nothing_leaves_the_first_step_and_one_weighs_all_alike(self, learner, batch):
        first, losses = learner(batch, UNROLL, Loss(decay=0.0), mixed=False)
        assert first.item() == pytest.approx(losses[0].item())
        alike, losses = learner(batch, UNROLL, Loss(decay=1.0), mixed=False)
        assert alike.item() == pytest.approx(losses.mean().item())

    def test_mixed_precision_is_near_and_not_the_same(self, learner, batch):
        parameters = list(learner.parameters())
        (full, _), (mixed, _) = (learner(batch, UNROLL, LOSS, mixed=mixed) for mixed in (False, True))
        assert full.item() != mixed.item() and mixed.item() == pytest.approx(full.item(), rel=0.02)
        ours, theirs = (
            torch.cat([each.flatten() for each in torch.autograd.grad(loss, parameters)]) for loss in (full, mixed)
        )
        assert torch.cosine_similarity(ours, theirs, dim=0) > 0.99
        assert (ours.norm() / theirs.norm()).item() == pytest.approx(1, abs=0.05)

    def test_only_the_drafters_own_weights_learn(self, batch):
        learner = new_learner()
        assert {name.removeprefix("weights.").replace("/", ".") for name, _ in learner.named_parameters()} == set(
            expected_shapes(CONFIG)
        )
        frozen = {name: values.clone() for name, values in learner.named_buffers()}
        assert {"embedding", "head", "target_norm"} <= set(frozen)
        loss, _ = learner(batch, UNROLL, LOSS, mixed=False)
        loss.backward()
        torch.optim.SGD(learner.parameters(), 0.1).step()
        for name, values in learner.named_buffers():
            assert values.grad is None and torch.equal(values, frozen[name]), name
        assert all(p.grad is not None and p.grad.abs().max() > 0 for p in learner.parameters())
        assert torch.equal(learner.embedding, CHECKPOINT.weights["model.embed_tokens.weight"])


class TestPadding:
    def test_a_row_alone_is_the_row_in_a_padded_batch(self, learner, batch):
        together = learner.judge(batch, UNROLL, mixed=False)
        losses, common = np.zeros(UNROLL), np.zeros(UNROLL)
        gradients = [torch.zeros_like(p) for p in learner.parameters()]
        counts = torch.stack([batch.reached(step).sum() for step in range(UNROLL)])
        first = Loss(decay=0.0)
        for place in range(len(ROWS)):
            alone = batch_of(CORPUS, FEATURES, ROWS[place : place + 1], UNROLL)
            found = learner.judge(alone, UNROLL, mixed=False)
            anchors = alone.anchors.shape[1]
            assert torch.equal(found.agree[:, 0], together.agree[:, place, :anchors])
            assert not together.agree[:, place, anchors:].any()
            own = np.array([int(alone.reached(step).sum()) for step in range(UNROLL)])
            losses += found.losses.numpy() * own
            common += found.common.numpy() * own
            loss, _ = learner(alone, UNROLL, first, mixed=False)
            for total, each in zip(gradients, torch.autograd.grad(loss, list(learner.parameters())), strict=True):
                total += each * own[0] / counts[0]
        assert together.losses.tolist() == pytest.approx(losses / counts.numpy(), rel=1e-5)
        assert together.common.tolist() == pytest.approx(common / counts.numpy(), rel=1e-5)
        loss, _ = learner(batch, UNROLL, first, mixed=False)
        for total, each in zip(gradients, torch.autograd.grad(loss, list(learner.parameters())), strict=True):
            assert torch.allclose(total, each, rtol=1e-4, atol=1e-5)

    def test_what_stands_in_it_is_not_looked_at(self, learner, batch):
        random = torch.Generator().manual_seed(1)
        pairs = torch.arange(batch.tokens.shape[1]) >= batch.lengths[:, None]
        laws = torch.arange(batch.final.shape[1]) >= batch.real.sum(1)[:, None]
        tokens, features, final = batch.tokens.clone(), batch.features.clone(), batch.final.clone()
        tokens[pairs] = 19
        features[pairs] = 100 * torch.randn(features[pairs].shape, generator=random)
        final[laws] = 100 * torch.randn(final[laws].shape, generator=random)
        changed = replace(batch, tokens=tokens, features=features, final=final)
        assert pairs.any() and laws.any()
        parameters = list(learner.parameters())
        for mixed in (False, True):
            (ours, _), (theirs, _) = (learner(each, UNROLL, LOSS, mixed) for each in (batch, changed))
            assert torch.equal(ours, theirs)
            pairs_of = zip(torch.autograd.grad(ours, parameters), torch.autograd.grad(theirs, parameters), strict=True)
            assert all(torch.allclose(one, other, rtol=1e-5, atol=1e-7) for one, other in pairs_of)


class TestComparing:
    def test_agreement_and_what_laws_have_in_common_are_those_of_the_definition(self, learner, batch):
        with torch.no_grad():
            steps = plainly(Plain(learner.named_weights()))
        found = learner.judge(batch, UNROLL, mixed=False)
        agree = torch.zeros_like(found.agree)
        for step, compared in enumerate(steps):
            shared = []
            for law, logits, row, anchor in compared:
                agree[step, row, anchor] = law.argmax() == logits.argmax()
                shared.append(torch.minimum(law, torch.softmax(logits, 0)).sum().item())
            assert found.common[step].item() == pytest.approx(np.mean(shared), rel=1e-5)
        assert torch.equal(found.agree, agree)
        assert 0 < agree.sum() < sum(len(compared) for compared in steps)
        assert found.losses.tolist() == pytest.approx(
            learner(batch, UNROLL, Loss(mode_share=0.0), mixed=False)[1].tolist(), rel=1e-6
        )

    @pytest.mark.parametrize("portion", [1, 5, 1000])
    def test_portions_change_nothing(self, learner, batch, portion, monkeypatch):
        def everything():
            loss, losses = learner(batch, UNROLL, LOSS, mixed=False)
            return (
                learner.judge(batch, UNROLL, mixed=False),
                loss,
                losses,
                *torch.autograd.grad(loss, list(learner.parameters())),
            )

        before, *numbers = everything()
        monkeypatch.setattr(module, "PORTION", portion)
        after, *others = everything()
        assert torch.equal(before.agree, after.agree)
        numbers += [before.losses, before.common]
        others += [after.losses, after.common]
        assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(numbers, others, strict=True))

    def test_rows_that_reach_no_second_step_have_no_loss_there(self, learner):
        short = batch_of(CORPUS, FEATURES, np.array([4]), UNROLL)
        assert [int(short.reached(step).sum()) for step in range(UNROLL)] == [1, 0, 0]
        _, losses = learner(short, UNROLL, LOSS, mixed=False)
        assert losses[0] > 0 and losses[1:].tolist() == [0, 0]


class TestTheStart:
    def test_it_is_the_targets_last_layer_that_reads_the_last_feature(self):
        found = initial_weights(CONFIG, CHECKPOINT, feature_scale=3.0, seed=1)
        assert {name: tuple(values.shape) for name, values in found.items()} == expected_shapes(CONFIG)
        last, hidden = "model.layers.2.", CONFIG.hidden_size
        assert all(torch.equal(found[f"committed.{n}"], found[f"drafted.{n}"]) for n in layer_shapes(CONFIG))
        of_layer = {name.removeprefix("drafted."): values for name, values in found.items()}
        same = ("self_attn.o_proj", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
        for name in same:
            assert torch.equal(of_layer[f"{name}.weight"], CHECKPOINT.weights[f"{last}{name}.weight"]), name
        for name in ("q", "k", "v"):
            of_embedding, of_hidden = of_layer[f"self_attn.{name}_proj.weight"].split(hidden, dim=1)
            assert torch.equal(of_hidden, CHECKPOINT.weights[f"{last}self_attn.{name}_proj.weight"])
            assert 0.01 < of_embedding.std() < 0.03
        assert torch.equal(of_layer["hidden_norm.weight"], CHECKPOINT.weights[f"{last}input_layernorm.weight"])
        assert torch.equal(of_layer["norm.weight"], CHECKPOINT.weights["model.norm.weight"])
        assert torch.equal(of_layer["embedding_norm.weight"], torch.ones(hidden))
        assert 0.01 < of_layer["embedding_proj.weight"].std() < 0.03
        others, of_last = found["fc.weight"].split(hidden, dim=1)
        assert 0.05 < others.std() < 0.07 and (of_last - 3 * torch.eye(hidden)).std() < 0.07

    def test_it_is_a_copy(self):
        learner = EagleLearner(CONFIG, CHECKPOINT, TOKENS, feature_scale=1.0, seed=0)
        theirs = CHECKPOINT.weights["model.layers.2.mlp.up_proj.weight"].clone()
        learner.load({name: v + 1 for name, v in learner.named_weights().items() if name.startswith("drafted")})
        assert torch.equal(CHECKPOINT.weights["model.layers.2.mlp.up_proj.weight"], theirs)
        assert torch.equal(learner.weight("committed.mlp.up_proj.weight"), theirs)

    def test_the_drafted_layer_can_go_on_from_the_committed_one(self):
        learner = new_learner()
        before = {name: values.clone() for name, values in learner.named_weights().items()}
        learner.begin_drafting()
        for name, values in learner.named_weights().items():
            assert torch.equal(values, before[name.replace("drafted.", "committed.")]), name
        learner.load({"drafted.norm.weight": before["drafted.norm.weight"]})
        assert torch.equal(learner.weight("committed.norm.weight"), before["committed.norm.weight"])

    def test_the_seed_decides_what_is_random(self):
        first, again, other = (initial_weights(CONFIG, CHECKPOINT, 1.0, seed) for seed in (1, 1, 2))
        assert all(torch.equal(first[name], again[name]) for name in first)
        differ = {name for name in first if not torch.equal(first[name], other[name])}
        random = ("embedding_proj.weight", *(f"self_attn.{each}_proj.weight" for each in "qkv"))
        assert differ == {"fc.weight", *(f"{part}.{name}" for part in PARTS for name in random)}

    def test_the_size_of_features_is_that_of_the_last_one_read(self):
        features = np.zeros((5, 3, 4), np.float16)
        features[:, 0], features[:, 2] = 50, 70
        features[:, 1] = np.array([1, 2, 3, 4, 100])[:, None]
        assert feature_scale(features) == 3
        assert feature_scale(features, rows=3) == 2
        features[:, 1] = [0, 0, 0, 8]
        assert feature_scale(features) == 4

    def test_a_head_that_is_tied_to_the_embedding(self):
        tied = tiny_llama(1, tied_head=True, **SHAPE)
        learner = EagleLearner(CONFIG, tied, TOKENS, feature_scale=1.0, seed=0)
        assert torch.equal(learner.head, tied.weights["model.embed_tokens.weight"][TOKENS])

    def test_weights_are_loaded_by_their_names_in_a_checkpoint(self):
        learner, other = new_learner(0), new_learner(1)
        learner.load(other.named_weights())
        assert all(torch.equal(learner.weight(name), other.weight(name)) for name in expected_shapes(CONFIG))
        assert not any(values.requires_grad for values in learner.named_weights().values())
