"""A corpus of the target's own text: what drafters are trained on, since it is that text which they have to foresee.

A file holds the target's answers to the questions of one source (questions.py); all files of a target together are its
corpus. corpus_generation.py writes them.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from specdec_core.cache import atomic_write
from specdec_core.models.errors import safetensors_as_os_error
from specdec_core.pairs import Opened, file_name
from specdec_core.training.questions import SOURCES

FOLDER = Path(__file__).resolve().parent.parent.parent / "data" / "corpus"
LARGEST_FILE = 2_000_000

CORPUS, SHARD = "specdec corpus, version 2", "specdec corpus shard, version 2"
IS_GREEDY, IS_HELD_OUT, OF_NEW_TEMPLATE, IS_ENDED = FLAGS = 1, 2, 4, 8
"""Bits of a row's flags."""

_ARRAYS = {"tokens": "uint8", "offsets": "int64", "prompt_lengths": "int32", "flags": "uint8", "prompts": "int32"}
"""What a file holds, and in which types: the tokens are an LZMA stream of uint16, a third of their size."""

Entry = tuple[np.ndarray, int, int, int]  # one row's tokens, prompt length, flags and prompt, as in `Corpus`


class CorpusError(ValueError):
    """A corpus that cannot be made, or a file that is none."""


@dataclass(frozen=True, eq=False)
class Corpus:
    """Rows of prompt and continuation, one behind the other.

    tokens, offsets `[T]` uint16, `[R + 1]` int64: row i is tokens[offsets[i]:offsets[i + 1]].
    prompt_lengths  `[R]` int32: so many of them are the prompt, chat template included.
    flags           `[R]` uint8: IS_GREEDY (else temperature 1), IS_HELD_OUT, OF_NEW_TEMPLATE (no prompt of its template
                    is trained on, so it is held out), IS_ENDED (by an end token, else cut at the limit).
    prompts         `[R]` int32: the question's place in its source.
    origin          what the file says of target, plan, source, split and counts.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    prompt_lengths: np.ndarray
    flags: np.ndarray
    prompts: np.ndarray
    origin: Mapping[str, Any]

    def __len__(self) -> int:
        return len(self.flags)

    def sequence(self, row: int) -> np.ndarray:
        """All tokens of a row, int64."""
        if not 0 <= row < len(self):
            raise IndexError(f"row {row}: expected 0…{len(self) - 1}")
        return self.tokens[self.offsets[row] : self.offsets[row + 1]].astype(np.int64)

    def row(self, row: int) -> tuple[np.ndarray, np.ndarray]:
        """Prompt and continuation of a row, int64."""
        prompt, continuation = np.split(self.sequence(row), [self.prompt_lengths[row]])
        return prompt, continuation

    def rows(self, which: Iterable[int]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
        """Prompt and continuation of each of these rows, for instance of `training` or `held_out`."""
        return (self.row(int(row)) for row in which)

    def flagged(self, flag: int) -> np.ndarray:
        """`[R]` bool: the rows with this flag."""
        return (self.flags & flag) != 0

    @property
    def training(self) -> np.ndarray:
        """Rows to train on, ascending."""
        return np.flatnonzero(~self.flagged(IS_HELD_OUT))

    @property
    def held_out(self) -> np.ndarray:
        """Rows that training must not see, ascending."""
        return np.flatnonzero(self.flagged(IS_HELD_OUT))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of tokens, offsets, prompt lengths and flags."""
        digest = hashlib.sha256()
        for values in (self.tokens, self.offsets, self.prompt_lengths, self.flags):
            digest.update(f"{values.dtype} {len(values)}\n".encode() + np.ascontiguousarray(values).tobytes())
        return digest.hexdigest()


def corpus_path(opened: Opened, source: str = "templates") -> Path:
    """Where this target's answers to the questions of a source are committed."""
    return FOLDER / f"{file_name(opened.checkpoint.name)}-{source}.safetensors"


def committed_corpus(opened: Opened) -> Corpus:
    """All of this target's committed text: the rows of `templates`, then those of the other sources that there are.

    Raises CorpusError as `load_corpus`, and for files of different targets.
    """
    parts = [load_corpus(corpus_path(opened))]
    others = (corpus_path(opened, source) for source in SOURCES if source != "templates")
    return joined([*parts, *(load_corpus(path) for path in others if path.is_file())])


def load_corpus(path: Path) -> Corpus:
    """Read a joined corpus. Raises CorpusError for a file that is absent, damaged, of another kind or inconsistent."""
    return read_corpus(Path(path), {"format": CORPUS})


def joined(parts: Sequence[Corpus]) -> Corpus:
    """Corpora of one target as one, in their order. Raises CorpusError for different targets."""
    first = parts[0]
    for part in parts[1:]:
        for name in ("target", "weights", "vocabulary"):
            if part.origin[name] != first.origin[name]:
                raise CorpusError(
                    f"corpora of {name} {first.origin[name]} and {part.origin[name]}: expected one target; make the "
                    "second again with `train corpus`"
                )
    offsets = np.cumsum([0, *(len(part.tokens) for part in parts)])
    whole = Corpus(
        np.concatenate([part.tokens for part in parts]),
        np.concatenate([[0], *(part.offsets[1:] + start for part, start in zip(parts, offsets, strict=False))]),
        np.concatenate([part.prompt_lengths for part in parts]),
        np.concatenate([part.flags for part in parts]),
        np.concatenate([part.prompts for part in parts]),
        first.origin,
    )
    return replace(whole, origin={**first.origin, "counts": counts(whole)})


def only_rows(corpus: Corpus, rows: Sequence[int]) -> Corpus:
    """A corpus of these rows of another, in their order."""
    entries = [
        (corpus.sequence(row), int(corpus.prompt_lengths[row]), int(corpus.flags[row]), int(corpus.prompts[row]))
        for row in map(int, rows)
    ]
    part = packed(entries, corpus.origin)
    return replace(part, origin={**corpus.origin, "counts": counts(part)})


def packed(entries: Sequence[Entry], origin: Mapping[str, Any]) -> Corpus:
    """These rows, none or more, as a corpus."""
    sequences, prompt_lengths, flags, prompts = zip(*entries, strict=True) if entries else ((), (), (), ())
    offsets = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    rest = np.array(prompt_lengths, np.int32), np.array(flags, np.uint8), np.array(prompts, np.int32)
    return Corpus(np.concatenate([np.zeros(0, np.int64), *sequences]).astype(np.uint16), offsets, *rest, origin)


def counts(corpus: Corpus) -> dict[str, dict[str, int]]:
    """Rows and new tokens, of all and of those with each flag."""
    new = np.diff(corpus.offsets) - corpus.prompt_lengths
    named = dict(zip(("greedy", "held_out", "of_new_template", "ended"), map(corpus.flagged, FLAGS), strict=True))
    chosen = {"all": np.ones(len(corpus), bool), **named}
    return {n: {"rows": int(which.sum()), "new_tokens": int(new[which].sum())} for n, which in chosen.items()}


def save_corpus(corpus: Corpus, path: Path) -> None:
    """Write atomically. Raises CorpusError for more than LARGEST_FILE bytes."""
    with atomic_write(path) as temporary, safetensors_as_os_error():
        # One entry, because the library orders several at random: equal corpora are equal files.
        header = {"corpus": json.dumps(corpus.origin, sort_keys=True)}
        arrays = {name: getattr(corpus, name) for name in _ARRAYS} | {"tokens": _compressed(corpus.tokens)}
        save_file(arrays, temporary, metadata=header)
        if temporary.stat().st_size > LARGEST_FILE:
            size = temporary.stat().st_size
            raise CorpusError(f"{path} would be {size} bytes: expected {LARGEST_FILE} at most; plan fewer prompts")


def read_corpus(path: Path, expected: Mapping[str, Any]) -> Corpus:
    """The file, checked: its header says what is expected, and its arrays are consistent."""
    if not path.is_file():
        raise CorpusError(f"{path} is absent: let generate_corpus and join_corpus finish, or take it from the checkout")
    try:
        with safe_open(path, framework="np") as stored:
            origin = dict(json.loads((stored.metadata() or {}).get("corpus", "{}")))
            arrays = {name: stored.get_tensor(name) for name in stored.keys()}  # noqa: SIM118
    except (SafetensorError, OSError, ValueError, TypeError) as error:
        raise CorpusError(f"{path} is truncated or damaged ({error}); remove it and make it again") from None
    if (given := {name: origin.get(name) for name in expected}) != expected:
        raise CorpusError(f"{path} is of {given}: expected {dict(expected)}; choose another, or an empty folder")
    if (types := {name: values.dtype.name for name, values in arrays.items()}) != _ARRAYS:
        raise CorpusError(f"{path} holds arrays {types}: expected {_ARRAYS}; make it again")
    try:
        arrays["tokens"] = np.frombuffer(lzma.decompress(arrays["tokens"].tobytes()), np.uint16)
    except (lzma.LZMAError, ValueError) as error:
        raise CorpusError(f"{path} is damaged in its tokens ({error}); remove it and make it again") from None
    corpus = Corpus(**arrays, origin=origin)
    if fault := _fault(corpus):
        raise CorpusError(f"{path}: {fault}; remove it and make it again")
    return corpus


def _compressed(tokens: np.ndarray) -> np.ndarray:
    return np.frombuffer(lzma.compress(np.ascontiguousarray(tokens).tobytes(), preset=9), np.uint8)


def _fault(corpus: Corpus) -> str | None:
    """What is inconsistent, in words. Later checks rely on earlier ones."""
    rows, lengths, vocabulary = len(corpus), np.diff(corpus.offsets), corpus.origin.get("vocabulary", 0)
    if {len(corpus.prompt_lengths), len(corpus.prompts), len(lengths)} != {rows}:
        return "its arrays disagree on the number of rows: expected one entry a row, one offset more"
    if not len(corpus.offsets) or corpus.offsets[0] != 0 or corpus.offsets[-1] != len(corpus.tokens):
        return f"its offsets do not lead from 0 to its {len(corpus.tokens)} tokens"
    if not rows:
        # At none of a shard's places there may have been anything to ask.
        return None if corpus.origin.get("format") == SHARD else "it has no rows: expected at least one"
    if (corpus.prompt_lengths < 1).any() or (corpus.prompt_lengths >= lengths).any():
        return "a row lacks a prompt or a continuation: expected at least one token of each"
    if corpus.tokens.max() >= vocabulary:
        return f"token {corpus.tokens.max()} is outside the target's vocabulary of {vocabulary}"
    if corpus.flags.max() > sum(FLAGS):
        return f"flags {corpus.flags.max()}: expected the sum of some of {FLAGS}"
    return None
