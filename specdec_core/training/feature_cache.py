"""Features of a corpus, worked out once: the target's hidden states at every token, in a file that is mapped.

One prefill pass a row. The file lies in the ignored cache under a name made of all that it depends on, so it can be
neither stale nor another target's. It is large: two bytes a token, layer and hidden unit.
"""

from __future__ import annotations

import errno
import hashlib
import json
import os
import shutil
from pathlib import Path

import numpy as np
from tqdm import tqdm

from specdec_core.arrays import host
from specdec_core.cache import CacheError, exclusive
from specdec_core.pairs import Opened
from specdec_core.state.ragged_kv import RaggedKV
from specdec_core.targets.transformer import Transformer
from specdec_core.training.corpus import Corpus

ROWS_PER_BLOCK = 64
"""Rows that reach the disk together, and so the most that an interruption costs."""

DTYPE = np.dtype(np.float16)


class FeatureError(ValueError):
    """The target cannot give features for this corpus."""


class FeatureOverflow(FloatingPointError):
    """A feature that float16 cannot hold."""


def corpus_features(corpus: Corpus, opened: Opened, progress: bool = False) -> np.ndarray:
    """`[T, F, H]` float16, read-only: features of the target's feature layers, ascending, aligned with `corpus.tokens`.

    Entry t is the hidden state after the target has read its row up to and including token t; what foresees token t is
    entry t − 1. A row's last token has its own entry like any other, although nothing follows it in the row.

    Computed by the first call, block by block; an interrupted one goes on where it was. Raises FeatureError for a
    target without feature layers, with too few tokens or too short a context, FeatureOverflow naming the layer, and
    CacheError if the disk cannot take the file.
    """
    target = opened.target
    _require(corpus, target)
    shape = (len(corpus.tokens), len(target.feature_layers), target.config.hidden_size)
    size = int(np.prod(shape)) * DTYPE.itemsize
    with exclusive(f"features/{_key(corpus, opened)}.f16") as path:
        if not path.is_file() or path.stat().st_size != size:
            partial = path.with_suffix(".partial")
            _compute(corpus, target, partial, size, progress)
            os.replace(partial, path)
    return np.memmap(path, DTYPE, mode="r", shape=shape)


def _require(corpus: Corpus, target: Transformer) -> None:
    if not target.feature_layers:
        raise FeatureError(f"{target.name} has no feature layers: open it with open_target(…, feature_layers=(…))")
    if (last := int(corpus.tokens.max())) >= target.vocabulary:
        raise FeatureError(
            f"token {last} is outside the vocabulary 0…{target.vocabulary - 1} of {target.name}: the corpus belongs to "
            "another tokenizer; give the target that wrote it"
        )
    if (longest := int(np.diff(corpus.offsets).max())) > target.context:
        raise FeatureError(
            f"a row of {longest} tokens, and the context of {target.name} holds {target.context}: give the target that "
            "wrote the corpus"
        )


def _key(corpus: Corpus, opened: Opened) -> str:
    target, placement = opened.target, opened.target.placement
    content = {
        "corpus": corpus.fingerprint,
        "weights": opened.checkpoint.fingerprint,
        "layers": target.feature_layers,
        "engine": f"{placement.engine} {placement.device} {placement.dtype}",
        "dtype": DTYPE.name,
    }
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:24]


def _compute(corpus: Corpus, target: Transformer, path: Path, size: int, progress: bool) -> None:
    """Append to `path` what it lacks of its `size` bytes."""
    token_bytes = size // len(corpus.tokens)
    path.touch()
    done = _finished_rows(path.stat().st_size // token_bytes, corpus.offsets)
    start = int(corpus.offsets[done]) * token_bytes
    if size - start > shutil.disk_usage(path.parent).free + path.stat().st_size - start:
        raise CacheError(
            errno.ENOSPC,
            f"{path.parent} has no room for {size} bytes of features: free some, keep fewer layers, or let "
            "SPECDEC_CACHE name a folder on another disk",
        )
    state = target.new_state(1, int(np.diff(corpus.offsets).max()))
    with (
        path.open("r+b") as file,
        tqdm(total=len(corpus), initial=done, unit=" rows", desc="features", disable=not progress) as bar,
    ):
        file.truncate(start)
        file.seek(start)
        for first in range(done, len(corpus), ROWS_PER_BLOCK):
            rows = range(first, min(first + ROWS_PER_BLOCK, len(corpus)))
            block = np.concatenate([_row_features(target, state, corpus.sequence(row)) for row in rows])
            file.write(block.tobytes())
            file.flush()
            os.fsync(file.fileno())
            bar.update(len(rows))


def _finished_rows(tokens: int, offsets: np.ndarray) -> int:
    """Rows to keep of a file with so many whole tokens: all blocks but the newest, which may not have reached the disk.

    A block is begun when the one before it is on the disk.
    """
    rows = int(np.searchsorted(offsets, tokens, side="right")) - 1
    return max(0, rows - 1) // ROWS_PER_BLOCK * ROWS_PER_BLOCK


def _row_features(target: Transformer, state: RaggedKV, tokens: np.ndarray) -> np.ndarray:
    """`[n, F, H]` float16 of a row of n tokens."""
    # Prefill leaves a prompt's last token out; one put behind the row is never looked at, and brings in the row's own.
    [found] = target.prefill(state, np.array([0]), [np.append(tokens, tokens[-1])])
    features = host(found)
    with np.errstate(over="ignore"):
        halves = features.astype(DTYPE)
    if not np.isfinite(halves).all():
        token, column, _ = np.argwhere(~np.isfinite(halves))[0]
        raise FeatureOverflow(
            f"layer {target.feature_layers[column]} gives {np.abs(features[token, column]).max():.4g} at token {token} "
            f"of a row: expected at most {np.finfo(DTYPE).max:.4g}, which float16 can hold; choose another layer"
        )
    return halves
