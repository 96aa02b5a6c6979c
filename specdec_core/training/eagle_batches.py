"""What an EAGLE-style drafter is trained on, in batches: pairs of a token and the target's features before it.

Pair i of a row is token i + 1 with the features of token i; the drafter is to say what the target says after that
token. *Anchors* are the pairs from which a draft may start: what follows them was written by the target.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from specdec_core.training.corpus import IS_GREEDY, Corpus


@dataclass(frozen=True)
class Batch:
    """B rows, padded at the end to T pairs, A anchors and A + U − 1 laws; U steps are unrolled.

    tokens    `[B, T]` int64: the token of each pair.
    features  `[B, T, F, H]` float32.
    anchors   `[B, A]` int64: pairs; the anchors of a row are consecutive. Padding repeats the last one.
    lengths   `[B]` int64: pairs of each row. Step u (from 0) of anchor a reads pair a + u's token, so it is real if
              a + u < length.
    final     `[B, A + U − 1, H]` float32: the target's last hidden states after pair anchors[:, 0] + 0, 1, …: what it
              says there is the law for step u of anchor a at a − anchors[:, 0] + u.
    real      `[B, A]` bool: not padding.
    greedy    `[B]` bool: rows that the target wrote greedily.
    """

    tokens: torch.Tensor
    features: torch.Tensor
    anchors: torch.Tensor
    lengths: torch.Tensor
    final: torch.Tensor
    real: torch.Tensor
    greedy: torch.Tensor

    def reached(self, step: int) -> torch.Tensor:
        """`[B, A]` bool: anchors whose step `step` (from 0) lies inside the row."""
        return self.real & (self.anchors + step < self.lengths[:, None])


def batch_of(corpus: Corpus, features: np.ndarray, rows: np.ndarray, unroll: int) -> Batch:
    """These rows, of two pairs or more. `features` `[tokens, F + 1, H]`: the target's last layer at the end.

    Raises ValueError for features of another corpus.
    """
    if len(features) != len(corpus.tokens):
        raise ValueError(f"features of {len(features)} tokens for a corpus of {len(corpus.tokens)}: not this corpus's")
    lengths = np.array([corpus.offsets[row + 1] - corpus.offsets[row] - 1 for row in rows])
    firsts = np.array([max(0, corpus.prompt_lengths[row] - 2) for row in rows])
    counts = lengths - firsts
    pairs, most = int(lengths.max()), int(counts.max())
    _, joined, hidden = features.shape
    tokens = np.zeros((len(rows), pairs), np.int64)
    inputs = np.zeros((len(rows), pairs, joined - 1, hidden), np.float32)
    final = np.zeros((len(rows), most + unroll - 1, hidden), np.float32)
    for place, (row, length, first) in enumerate(zip(rows, lengths, firsts, strict=True)):
        start = int(corpus.offsets[row])
        tokens[place, :length] = corpus.tokens[start + 1 : start + 1 + length]
        own = np.asarray(features[start : start + length + 1], np.float32)
        inputs[place, :length] = own[:length, :-1]
        final[place, : length - first] = own[first + 1 :, -1]
    anchors = firsts[:, None] + np.minimum(np.arange(most), counts[:, None] - 1)
    return Batch(
        torch.from_numpy(tokens),
        torch.from_numpy(inputs),
        torch.from_numpy(anchors),
        torch.from_numpy(lengths),
        torch.from_numpy(final),
        torch.from_numpy(np.arange(most) < counts[:, None]),
        torch.from_numpy(corpus.flagged(IS_GREEDY)[rows]),
    )


def training_order(corpus: Corpus, rows: np.ndarray, size: int, seed: int, start: int = 0) -> Iterator[np.ndarray]:
    """Batches of `size` training rows without end, from batch `start` on: each epoch sees every row once, shuffled.

    Rows of like length go together, so that little is padding. The order depends on the seed and the epoch alone, so a
    run can go on from any batch.
    """
    lengths = np.diff(corpus.offsets)
    epoch, skipped = divmod(start, max(1, len(rows) // size))
    while True:
        random = np.random.default_rng((seed, epoch))
        shuffled = random.permutation(rows)
        # Sorted within stretches only, so that batches differ from epoch to epoch.
        stretches = [shuffled[at : at + 16 * size] for at in range(0, len(shuffled), 16 * size)]
        ordered = np.concatenate([each[np.argsort(lengths[each], kind="stable")] for each in stretches])
        whole = ordered[: max(size, len(ordered) // size * size)]
        batches = [whole[at : at + size] for at in range(0, len(whole), size)]
        for place in random.permutation(len(batches))[skipped:]:
            yield batches[place]
        epoch, skipped = epoch + 1, 0
