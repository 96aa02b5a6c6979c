"""Which tokens a drafter can draft: those that its target writes most often (the head is most of what a step reads)."""

from __future__ import annotations

import numpy as np

from specdec_core.training.corpus import Corpus


def draft_vocabulary(corpus: Corpus, size: int) -> np.ndarray:
    """The `size` tokens that occur most often in what the target wrote in training rows, `[size]` int64, ascending.

    Ties go to the lower id, and tokens that never occurred fill it up, so it does not depend on held-out rows. Raises
    ValueError for more tokens than the target has.
    """
    vocabulary = int(corpus.origin["vocabulary"])
    if not 1 <= size <= vocabulary:
        raise ValueError(f"a draft vocabulary of {size} tokens: expected 1…{vocabulary}, those of the target")
    counts = np.zeros(vocabulary, np.int64)
    for _, continuation in corpus.rows(corpus.training):
        np.add.at(counts, continuation, 1)
    return np.sort(np.argsort(-counts, kind="stable")[:size])


def coverage(corpus: Corpus, tokens: np.ndarray, rows: np.ndarray) -> float:
    """Share of these rows' written tokens that can be drafted."""
    written = np.concatenate([continuation for _, continuation in corpus.rows(rows)])
    return float(np.isin(written, tokens).mean())
