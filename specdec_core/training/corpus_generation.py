"""Writing a corpus: the target answers questions, half of them greedily and half at temperature 1.

Each chunk of rows leaves a shard, and an interrupted run goes on at the first that is missing; a row depends on its
question, seed and place alone, so nothing of this shows. Joined, without rows that repeat others, the shards of a
source make one file to commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tqdm import tqdm

from specdec_core.decode import Output, decode, generate, outputs
from specdec_core.pairs import Opened
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.training.corpus import (
    CORPUS,
    FLAGS,
    SHARD,
    Corpus,
    CorpusError,
    Entry,
    counts,
    load_corpus,
    packed,
    read_corpus,
    save_corpus,
)
from specdec_core.training.questions import SOURCES, Question

LARGEST_VOCABULARY = 1 << 16
SAME_START = 24  # continuations that share so many first tokens count as one


@dataclass(frozen=True)
class CorpusPlan:
    """How much to write. `batch` and `chunk` (rows a shard) cost time and change no token.

    source  where the questions come from, one of questions.SOURCES.
    """

    prompts: int
    max_new_tokens: int
    batch: int
    seed: int
    chunk: int = 64
    source: str = "templates"

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise CorpusError(f"source {self.source!r} of questions: expected one of {', '.join(SOURCES)}")


PLANS = {
    "quick": (
        CorpusPlan(24, 16, batch=8, seed=1, chunk=8),
        CorpusPlan(8, 16, batch=8, seed=1, chunk=8, source="asked"),
    ),
    "full": (CorpusPlan(5952, 160, batch=32, seed=1), CorpusPlan(4096, 160, batch=32, seed=1, source="asked")),
}
"""A profile's parts, each with its file. Rows that repeat an earlier part's are left out of a later one."""


def generate_corpus(plan: CorpusPlan, opened: Opened, folder: Path, progress: bool = False) -> list[Path]:
    """Write those of the plan's shards that `folder` lacks; returns all of them. A longer plan can go on in it.

    Raises CorpusError if the vocabulary does not fit into 16 bits or the folder holds shards of another corpus,
    TemplateError as `templates.sample`, RequestError for a prompt that is longer than the context.
    """
    expected, paths = _identity(plan, opened), _shards(plan, folder)
    source = SOURCES[plan.source](opened, plan.prompts, plan.seed)
    present = {path: read_corpus(path, expected) for path in paths if path.is_file()}
    before = sum(len(each.tokens) - int(each.prompt_lengths.sum()) for each in present.values())
    with tqdm(unit=" tokens", desc=opened.checkpoint.name, initial=before, disable=not progress) as bar:
        for number, path in enumerate(paths):
            if path not in present:
                first = number * plan.chunk
                questions = source.questions(range(first, min(first + plan.chunk, plan.prompts)))
                # Long answers first: the last rows of a chunk have the machine to themselves, so let them be short.
                questions.sort(key=lambda question: question.is_short)
                requests, rounds = _requests(plan, opened, questions), []
                # The source may have nothing to ask at any of these places, and a decoder wants a row at least.
                for each in decode(opened.target, requests, slots=plan.batch) if requests else ():
                    bar.update(sum(len(row.emitted) for row in each.rows))
                    rounds.append(each)
                found = map(_entry, questions, outputs(rounds, len(requests)))
                save_corpus(packed(sorted(found, key=lambda entry: entry[-1]), expected), path)
            bar.set_postfix_str(f"shard {number + 1} of {len(paths)}")
    return paths


def join_corpus(plan: CorpusPlan, opened: Opened, folder: Path, path: Path, earlier: Sequence[Corpus] = ()) -> Corpus:
    """Join the plan's shards into the file `path`, each continuation once, and load it.

    A row whose continuation equals that of one before it, or begins with the same SAME_START tokens, is left out. Rows
    of the `earlier` parts count as before it.
    Raises CorpusError for a shard that is absent or of another corpus, if no row is left, or if the file would exceed
    LARGEST_FILE bytes.
    """
    identity = _identity(plan, opened)
    shards = [read_corpus(shard, identity) for shard in _shards(plan, folder)]
    seen, starts, kept, equal = set[bytes](), set[bytes](), list[Entry](), 0
    for part in earlier:
        for _, continuation in part.rows(range(len(part))):
            seen.add(continuation.tobytes())
            starts.add(continuation[:SAME_START].tobytes())
    for shard in shards:
        for row, details in enumerate(zip(shard.prompt_lengths, shard.flags, shard.prompts, strict=True)):
            _, continuation = shard.row(row)
            whole, start = continuation.tobytes(), continuation[:SAME_START].tobytes()
            equal += whole in seen
            if start not in starts:
                kept.append((shard.sequence(row), *details))
            seen.add(whole)
            starts.add(start)
    if not kept:
        raise CorpusError(
            f"no row is left for {path}: nothing was asked, or all answers repeat earlier ones; plan more prompts"
        )
    corpus = packed(kept, {})
    origin = {
        **identity,
        "format": CORPUS,
        "plan": asdict(plan),
        "counts": counts(corpus),
        "dropped": {"equal": equal, "same_start": sum(map(len, shards)) - len(kept) - equal},
        "split": f"{SOURCES[plan.source].split}. Rows that repeat an earlier one were dropped across the split too",
    }
    save_corpus(replace(corpus, origin=origin), path)
    return load_corpus(path)


def written(plan: CorpusPlan, opened: Opened, path: Path) -> Corpus | None:
    """The joined file, if it is there and is of this plan and target."""
    if not Path(path).is_file():
        return None
    corpus = load_corpus(path)
    wanted = {**_identity(plan, opened), "format": CORPUS}
    same = all(corpus.origin.get(name) == value for name, value in wanted.items())
    return corpus if same and corpus.origin.get("plan", {}).get("prompts") == plan.prompts else None


def throughput_by_batch(opened: Opened, batches: Sequence[int], plan: CorpusPlan) -> list[tuple[int, int, float]]:
    """Decode all prompts of the plan at each batch: (batch, new tokens, seconds of all rounds, prefill included)."""
    source = SOURCES[plan.source](opened, plan.prompts, plan.seed)
    requests, found = _requests(plan, opened, source.questions(range(plan.prompts))), []
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
        "source": plan.source,
        "questions": SOURCES[plan.source].version(),
        "seed": plan.seed,
        "max_new_tokens": plan.max_new_tokens,
    }


def _shards(plan: CorpusPlan, folder: Path) -> list[Path]:
    starts = range(0, plan.prompts, plan.chunk)
    return [Path(folder) / f"{s:06d}-{min(s + plan.chunk, plan.prompts):06d}.safetensors" for s in starts]


def _requests(plan: CorpusPlan, opened: Opened, questions: Sequence[Question]) -> list[Request]:
    eos = opened.tokenizer.eos_ids
    return [
        Request(
            question.tokens,
            Options(0.0 if question.greedy else 1.0, max_new_tokens=plan.max_new_tokens, eos=eos, seed=plan.seed),
            key=question.place,
        )
        for question in questions
    ]


def _entry(question: Question, output: Output) -> Entry:
    bits = question.greedy, question.held_out, question.of_new_template, output.finished == "eos"
    sequence = np.array([*question.tokens, *output.tokens])
    return sequence, len(question.tokens), int(np.dot(FLAGS, bits)), question.place
