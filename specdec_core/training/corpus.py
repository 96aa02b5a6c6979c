"""A corpus of the target's own text: what drafters are trained on, since it is that text which they have to foresee.

The target answers prompts from templates (templates.py), half of them greedily and half at temperature 1. Each chunk
of rows leaves a shard, and an interrupted run goes on at the first that is missing; a row depends on its prompt, seed
and place alone, so nothing of this shows. Joined, without rows that repeat others, they make one file to commit.
"""

from __future__ import annotations

import hashlib
import json
import lzma
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file
from tqdm import tqdm

from specdec_core.cache import atomic_write
from specdec_core.decode import Output, decode, generate, outputs
from specdec_core.models.errors import safetensors_as_os_error
from specdec_core.pairs import Opened, file_name
from specdec_core.prompts import Prompt
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.training.templates import HELD_OUT, HELD_OUT_EVERY, is_held_out, sample, turn, version

FOLDER = Path(__file__).resolve().parent.parent.parent / "data" / "corpus"
LARGEST_FILE, LARGEST_VOCABULARY = 2_000_000, 1 << 16
SAME_START = 24  # continuations that share so many first tokens count as one

CORPUS, SHARD = "specdec corpus, version 2", "specdec corpus shard, version 2"
IS_GREEDY, IS_HELD_OUT, OF_NEW_TEMPLATE, IS_ENDED = FLAGS = 1, 2, 4, 8
"""Bits of a row's flags."""

_ARRAYS = {"tokens": "uint8", "offsets": "int64", "prompt_lengths": "int32", "flags": "uint8", "prompts": "int32"}
"""What a file holds, and in which types: the tokens are an LZMA stream of uint16, a third of their size."""

Entry = tuple[np.ndarray, int, int, int]  # one row's tokens, prompt length, flags and prompt, as in `Corpus`


class CorpusError(ValueError):
    """A corpus that cannot be made, or a file that is none."""


@dataclass(frozen=True)
class CorpusPlan:
    """How much to write. `batch` and `chunk` (rows a shard) cost time and change no token."""

    prompts: int
    max_new_tokens: int
    batch: int
    seed: int
    chunk: int = 64


PLANS = {"quick": CorpusPlan(24, 16, batch=8, seed=1, chunk=8), "full": CorpusPlan(5952, 160, batch=32, seed=1)}


@dataclass(frozen=True, eq=False)
class Corpus:
    """Rows of prompt and continuation, one behind the other.

    tokens, offsets `[T]` uint16, `[R + 1]` int64: row i is tokens[offsets[i]:offsets[i + 1]].
    prompt_lengths  `[R]` int32: so many of them are the prompt, chat template included.
    flags           `[R]` uint8: IS_GREEDY (else temperature 1), IS_HELD_OUT, OF_NEW_TEMPLATE (no prompt of its template
                    is trained on, so it is held out), IS_ENDED (by an end token, else cut at the limit).
    prompts         `[R]` int32: the row's place in `templates.sample`.
    origin          what the file says of target, plan, templates, split and counts.
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


def corpus_path(opened: Opened) -> Path:
    """Where this target's corpus is committed."""
    return FOLDER / f"{file_name(opened.checkpoint.name)}.safetensors"


def generate_corpus(plan: CorpusPlan, opened: Opened, folder: Path, progress: bool = False) -> list[Path]:
    """Write those of the plan's shards that `folder` lacks; returns all of them. A longer plan can go on in it.

    Raises CorpusError if the vocabulary does not fit into 16 bits or the folder holds shards of another corpus,
    TemplateError as `templates.sample`, RequestError for a prompt that is longer than the context.
    """
    expected, prompts, paths = _identity(plan, opened), sample(plan.prompts, plan.seed), _shards(plan, folder)
    present = {path: _read(path, expected) for path in paths if path.is_file()}
    before = sum(len(each.tokens) - int(each.prompt_lengths.sum()) for each in present.values())
    with tqdm(unit=" tokens", desc=opened.checkpoint.name, initial=before, disable=not progress) as bar:
        for number, path in enumerate(paths):
            if path not in present:
                first = number * plan.chunk
                requests = _requests(plan, opened, prompts[first : first + plan.chunk], first)
                # Long answers first: the last rows of a chunk have the machine to themselves, so let them be short.
                requests.sort(key=lambda request: prompts[request.key].length == "short")
                rounds = []
                for each in decode(opened.target, requests, slots=plan.batch):
                    bar.update(sum(len(row.emitted) for row in each.rows))
                    rounds.append(each)
                found = map(_entry, requests, outputs(rounds, len(requests)))
                _write(_packed(sorted(found, key=lambda entry: entry[-1]), expected), path)
            bar.set_postfix_str(f"shard {number + 1} of {len(paths)}")
    return paths


def join_corpus(plan: CorpusPlan, opened: Opened, folder: Path, path: Path) -> Corpus:
    """Join the plan's shards into the file `path`, each continuation once, and load it.

    A row whose continuation equals that of an earlier one, or begins with the same SAME_START tokens, is left out.
    Raises CorpusError for a shard that is absent or of another corpus, or if the file would exceed LARGEST_FILE bytes.
    """
    identity = _identity(plan, opened)
    shards = [_read(shard, identity) for shard in _shards(plan, folder)]
    seen, starts, kept, equal = set[bytes](), set[bytes](), list[Entry](), 0
    for shard in shards:
        for row, details in enumerate(zip(shard.prompt_lengths, shard.flags, shard.prompts, strict=True)):
            _, continuation = shard.row(row)
            whole, start = continuation.tobytes(), continuation[:SAME_START].tobytes()
            equal += whole in seen
            if start not in starts:
                kept.append((shard.sequence(row), *details))
            seen.add(whole)
            starts.add(start)
    corpus = _packed(kept, {})
    origin = {
        **identity,
        "format": CORPUS,
        "plan": asdict(plan),
        "counts": _counts(corpus),
        "dropped": {"equal": equal, "same_start": sum(map(len, shards)) - len(kept) - equal},
        "split": f"held out: all prompts of the templates {', '.join(HELD_OUT)}; of each other one prompt in "
        f"{HELD_OUT_EVERY} (templates.is_held_out). Rows that repeat an earlier one were dropped across the split too",
    }
    _write(replace(corpus, origin=origin), path)
    return load_corpus(path)


def load_corpus(path: Path) -> Corpus:
    """Read a joined corpus. Raises CorpusError for a file that is absent, damaged, of another kind or inconsistent."""
    return _read(Path(path), {"format": CORPUS})


def only_rows(corpus: Corpus, rows: Sequence[int]) -> Corpus:
    """A corpus of these rows of another, in their order."""
    entries = [
        (corpus.sequence(row), int(corpus.prompt_lengths[row]), int(corpus.flags[row]), int(corpus.prompts[row]))
        for row in map(int, rows)
    ]
    part = _packed(entries, corpus.origin)
    return replace(part, origin={**corpus.origin, "counts": _counts(part)})


def throughput_by_batch(opened: Opened, batches: Sequence[int], plan: CorpusPlan) -> list[tuple[int, int, float]]:
    """Decode all prompts of the plan at each batch: (batch, new tokens, seconds of all rounds, prefill included)."""
    requests, found = _requests(plan, opened, sample(plan.prompts, plan.seed), 0), []
    # The first passes of a process load kernels and weights.
    generate(opened.target, [Request(requests[0].prompt, Options(max_new_tokens=2))])
    for batch in batches:
        rounds = list(decode(opened.target, requests, slots=batch))
        tokens = sum(len(row.emitted) for each in rounds for row in each.rows)
        found.append((batch, tokens, sum(each.seconds.total for each in rounds)))
    return found


def _identity(plan: CorpusPlan, opened: Opened) -> dict[str, Any]:
    """What a shard says of itself: all that its rows depend on, besides their places."""
    placement = opened.target.placement
    if (size := opened.target.vocabulary) > LARGEST_VOCABULARY:
        raise CorpusError(f"a vocabulary of {size} tokens: expected {LARGEST_VOCABULARY} at most; use another target")
    return {
        "format": SHARD,
        "target": opened.checkpoint.name,
        "weights": opened.checkpoint.fingerprint,
        "vocabulary": size,
        "engine": f"{placement.engine} {placement.device} {placement.dtype}",
        "templates": version(),
        "seed": plan.seed,
        "max_new_tokens": plan.max_new_tokens,
    }


def _shards(plan: CorpusPlan, folder: Path) -> list[Path]:
    starts = range(0, plan.prompts, plan.chunk)
    return [Path(folder) / f"{s:06d}-{min(s + plan.chunk, plan.prompts):06d}.safetensors" for s in starts]


def _requests(plan: CorpusPlan, opened: Opened, prompts: Sequence[Prompt], first: int) -> list[Request]:
    """Of prompts `first`, `first` + 1, …: a template's prompts are greedy and sampled in turn."""
    requests, eos = [], opened.tokenizer.eos_ids
    for index, prompt in enumerate(prompts, first):
        temperature = float(sum(turn(index)[1:]) % 2)
        options = Options(temperature, max_new_tokens=plan.max_new_tokens, eos=eos, seed=plan.seed)
        requests.append(Request(tuple(opened.tokenizer.chat(prompt.messages)), options, key=index))
    return requests


def _entry(request: Request, output: Output) -> Entry:
    new_template = turn(request.key)[0].name in HELD_OUT
    bits = request.options.greedy, is_held_out(request.key), new_template, output.finished == "eos"
    return np.array([*request.prompt, *output.tokens]), len(request.prompt), int(np.dot(FLAGS, bits)), request.key


def _packed(entries: Sequence[Entry], origin: Mapping[str, Any]) -> Corpus:
    sequences, prompt_lengths, flags, prompts = zip(*entries, strict=True)
    offsets = np.cumsum([0, *map(len, sequences)], dtype=np.int64)
    rest = np.array(prompt_lengths, np.int32), np.array(flags, np.uint8), np.array(prompts, np.int32)
    return Corpus(np.concatenate(sequences).astype(np.uint16), offsets, *rest, origin)


def _counts(corpus: Corpus) -> dict[str, dict[str, int]]:
    """Rows and new tokens, of all and of those with each flag."""
    new = np.diff(corpus.offsets) - corpus.prompt_lengths
    named = dict(zip(("greedy", "held_out", "of_new_template", "ended"), map(corpus.flagged, FLAGS), strict=True))
    chosen = {"all": np.ones(len(corpus), bool), **named}
    return {n: {"rows": int(which.sum()), "new_tokens": int(new[which].sum())} for n, which in chosen.items()}


def _write(corpus: Corpus, path: Path) -> None:
    with atomic_write(path) as temporary, safetensors_as_os_error():
        # One entry, because the library orders several at random: equal corpora are equal files.
        header = {"corpus": json.dumps(corpus.origin, sort_keys=True)}
        arrays = {name: getattr(corpus, name) for name in _ARRAYS} | {"tokens": _compressed(corpus.tokens)}
        save_file(arrays, temporary, metadata=header)
        if temporary.stat().st_size > LARGEST_FILE:
            size = temporary.stat().st_size
            raise CorpusError(f"{path} would be {size} bytes: expected {LARGEST_FILE} at most; plan fewer prompts")


def _read(path: Path, expected: Mapping[str, Any]) -> Corpus:
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
    if not rows or {len(corpus.prompt_lengths), len(corpus.prompts), len(lengths)} != {rows}:
        return "its arrays disagree on the number of rows, or there are none: expected one entry a row, one offset more"
    if corpus.offsets[0] != 0 or corpus.offsets[-1] != len(corpus.tokens):
        return f"its offsets do not lead from 0 to its {len(corpus.tokens)} tokens"
    if (corpus.prompt_lengths < 1).any() or (corpus.prompt_lengths >= lengths).any():
        return "a row lacks a prompt or a continuation: expected at least one token of each"
    if corpus.tokens.max() >= vocabulary:
        return f"token {corpus.tokens.max()} is outside the target's vocabulary of {vocabulary}"
    if corpus.flags.max() > sum(FLAGS):
        return f"flags {corpus.flags.max()}: expected the sum of some of {FLAGS}"
    return None
