"""How far a drafter's laws are from its target's, at every unrolled step: what training minimises, and what it reports.

Both laws go through the target's frozen head, over the draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from specdec_core.training.eagle_batches import Batch

PORTION = 48
"""Positions whose laws are compared together, with every step that speaks of them."""


@dataclass(frozen=True)
class Loss:
    """How far the drafter's laws are from the target's.

    decay       weight of a step over that of the step before it (a token counts only if those before it stand).
    mode_share  share of the loss that asks for the target's most probable token alone; the rest asks for its whole law.
    """

    decay: float = 0.8
    mode_share: float = 0.5


@dataclass(frozen=True)
class Steps:
    """How the drafter compares with the target at each unrolled step, U of them.

    losses  `[U]` mean cross-entropy.
    agree   `[U, B, A]` bool: the drafter's most probable token is the target's (of the draft vocabulary).
    common  `[U]` mean of Σ min(p, q), both laws normalised over the draft vocabulary: about the probability that a
            sampled draft is accepted (the target's law has a little mass outside it).
    """

    losses: Tensor
    agree: Tensor
    common: Tensor


class Laws:
    """The target's law after every position, compared with what the drafter says of it at each step.

    A position's law is worked out once for all steps that speak of it, and positions go through in portions whose
    logits stay in the processor's cache: all of them at once would be gigabytes.
    """

    def __init__(self, batch: Batch, unroll: int, wanted: Tensor, head: Tensor):
        """wanted `[B, A + U − 1, H]`: what the target's head reads after each position; head `[D, H]`."""
        self._wanted, self._head, self._unroll = wanted, head, unroll
        rows, places = batch.anchors.shape[0], batch.anchors.shape[1] + unroll - 1
        self._rows = torch.arange(rows).repeat_interleave(places)
        self._places = torch.arange(places).repeat(rows)
        self._anchors = batch.anchors.shape[1]
        self._reached = torch.stack([batch.reached(step) for step in range(unroll)])
        self.counts = self._reached.sum((1, 2)).clamp(min=1)

    def portions(self) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor, Tensor]]:
        """Of each portion of C positions: law `[C, D]`; and of every step and position `[U, C]`: the step, its row and
        anchor, and whether that step speaks of that position."""
        steps = torch.arange(self._unroll)[:, None]
        for start in range(0, len(self._rows), PORTION):
            rows, places = self._rows[start : start + PORTION], self._places[start : start + PORTION]
            anchors = places - steps
            inside = (anchors >= 0) & (anchors < self._anchors)
            anchors, spread = anchors.clamp(0, self._anchors - 1), rows.expand(self._unroll, -1)
            inside &= self._reached[steps, spread, anchors]
            if inside.any():
                law = torch.softmax(product(self._wanted[rows, places], self._head), dim=-1)
                yield law, steps.expand_as(anchors), spread, anchors, inside

    def logits(self, said: Tensor) -> Tensor:
        """The drafter's logits `[…, D]` from what its head reads `[…, H]`."""
        return product(said, self._head)

    def towards(self, gradient: Tensor) -> Tensor:
        """From a gradient of logits `[…, D]` to one of what the head read `[…, H]`."""
        return torch.matmul(gradient.to(self._head.dtype), self._head).float()

    def compare(self, said: Tensor) -> Steps:
        """Every step's laws, from what the head reads `[U, B, A, H]`, beside the target's."""
        losses, common = torch.zeros(self._unroll), torch.zeros(self._unroll)
        agree = torch.zeros_like(self._reached)
        for p, step, row, anchor, inside in self.portions():
            logits = self.logits(said[step, row, anchor])
            log_q = torch.log_softmax(logits, dim=-1)
            losses -= ((p * log_q).sum(-1) * inside).sum(-1)
            common += (torch.minimum(p, log_q.exp()).sum(-1) * inside).sum(-1)
            right = (logits.argmax(-1) == p.argmax(-1)) & inside
            agree[step[inside], row[inside], anchor[inside]] = right[inside]
        return Steps(losses / self.counts, agree, common / self.counts)


class Distilled(torch.autograd.Function):
    """Mean cross-entropy of each step `[U]` against the frozen target, through the frozen head.

    The gradient is worked out with the loss, so that no logits have to be kept.
    """

    @staticmethod
    def forward(ctx, said, laws, mode_share):
        losses, gradient = torch.zeros(len(said)), torch.zeros_like(said)
        for p, step, row, anchor, inside in laws.portions():
            mode = p.argmax(-1, keepdim=True)
            wanted = p.mul_(1 - mode_share).scatter_add_(1, mode, torch.full(mode.shape, mode_share))
            log_q = torch.log_softmax(laws.logits(said[step, row, anchor]), dim=-1)
            losses -= ((wanted * log_q).sum(-1) * inside).sum(-1)
            difference = log_q.exp_().sub_(wanted).mul_((inside / laws.counts[:, None])[..., None])
            gradient[step[inside], row[inside], anchor[inside]] = laws.towards(difference)[inside]
        ctx.save_for_backward(gradient)
        return losses / laws.counts

    @staticmethod
    def backward(ctx, of_losses):
        (gradient,) = ctx.saved_tensors
        return gradient * of_losses[:, None, None, None], None, None


def product(rows: Tensor, matrix: Tensor) -> Tensor:
    """rows · matrixᵀ in the matrix's dtype, as float32."""
    return F.linear(rows.to(matrix.dtype), matrix).float()
