"""Notebook 04: what batched decoders emit, token by token, against each prompt decoded alone without a drafter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from specdec_core.bench.sources import DECODING
from specdec_core.bench.token_records import BITS
from specdec_core.decode import decode, generate, outputs
from specdec_core.drafters.layer_skip import LayerSkipDrafter
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.ragged_records import RAGGED_OUTPUT, RAGGED_ROUND
from specdec_core.evidence.records import RecordWriter
from specdec_core.evidence.schemas import Schema
from specdec_core.forensics.batch_ties import census_of_batch, continuation, differs_at
from specdec_core.forensics.huggingface_decoders import open_model
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.rounding import rounded
from specdec_core.pairs import Opened
from specdec_core.placement import Placement
from specdec_core.prompts import held_out, load_prompts
from specdec_core.protocol import Draft, Drafter, Round, RowRound, RowView
from specdec_core.published.ways import POOL, WAYS
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.huggingface import HuggingFaceTarget
from specdec_core.targets.transformer import Transformer

CODE = (
    *DECODING,
    "specdec_core/targets/padded.py",
    "specdec_core/targets/huggingface.py",
    "specdec_core/targets/huggingface_cache.py",
    "specdec_core/models/rounding.py",
    "specdec_core/published",
    "specdec_core/forensics/near_ties.py",
    "specdec_core/forensics/batch_ties.py",
    "specdec_core/bench/ragged_outputs.py",
)
"""What the records depend on."""

LENGTHS = (4, 1, 7, 2, 5, 3)
"""Speculation lengths that the rows of a batch have in turn, where each has its own."""
FIRST_LAYERS = 10


@dataclass(frozen=True)
class OutputPlan:
    """How much to decode.

    published  prompts and new tokens each for every published way, on transformers.
    slots      rows of their batches, as in the paper.
    ours       prompts and new tokens each for our engine; batches of that many rows in `our_slots`.
    """

    published: tuple[int, int]
    ours: tuple[int, int]
    our_slots: tuple[int, ...]
    slots: int = 4
    k: int = 4


PLANS = {
    "quick": OutputPlan(published=(8, 12), ours=(16, 16), our_slots=(8,)),
    "full": OutputPlan(published=(36, 32), ours=(96, 32), our_slots=(4, 16, 32)),
}


@dataclass(frozen=True)
class OutputRows:
    """RAGGED_OUTPUT rows of all decoders, and RAGGED_ROUND rows of one round."""

    outputs: list[dict[str, Any]]
    round: list[dict[str, Any]]


def compare_outputs(
    plan: OutputPlan, opened: Opened, profile: str, layout: Layout | None = None, progress: bool = False
) -> OutputRows:
    """Decode in every way, compare, record."""
    layout = layout or Layout()
    kept: list[dict[str, Any]] = []

    provenance = fingerprint(profile, threads=opened.target.placement.workers)

    def writer(name: str, schema: Schema) -> RecordWriter:
        return RecordWriter(layout.records(profile), name, schema, provenance, code=CODE, layout=layout)

    with writer("04_outputs", RAGGED_OUTPUT) as file:
        for row in (*_published(plan, opened, progress), *_ours(plan, opened, progress)):
            kept.append(RAGGED_OUTPUT.validated(row))
            file.append(row)
    shown = list(_one_round(plan, opened))
    with writer("04_round", RAGGED_ROUND) as file:
        for row in shown:
            file.append(row)
    return OutputRows(kept, shown)


def _published(plan: OutputPlan, opened: Opened, progress: bool) -> Iterator[dict[str, Any]]:
    """Every way on transformers' model. A divergence is judged on masked scatter, whichever way it was decoded."""
    count, tokens = plan.published
    ids, requests = _requests(opened, count, tokens)
    model = open_model(opened.checkpoint)
    sound, reference = HuggingFaceTarget(model), opened.target.placed(Placement("torch", dtype="float64"))
    expected = [generate(sound, [request])[0].tokens for request in tqdm(requests, "alone", disable=not progress)]
    drafting = [replace(request, policy=FixedLength(plan.k)) for request in requests]
    drafter = ModelDrafter(Transformer(rounded(opened.checkpoint, BITS), opened.target.placement), sound.vocabulary)
    continued = continuation(sound, requests)
    for way in tqdm(WAYS, "ways", disable=not progress):
        rounds = way.decode(way.target(model), drafting, drafter, plan.slots)
        slots = POOL * plan.slots
        found = census_of_batch(sound, reference, drafting, rounds, expected, continued, slots)
        about = {
            "way": way.name,
            "broken": way.broken,
            "engine": "transformers float32",
            "drafter": "4-bit copy",
            "K": plan.k,
            "slots": plan.slots,
        }
        yield from _rows(about, ids, expected, rounds, found)


def _ours(plan: OutputPlan, opened: Opened, progress: bool) -> Iterator[dict[str, Any]]:
    """Our engine, where nothing excuses a difference: rows of unequal speculation lengths, queued over the slots."""
    count, tokens = plan.ours
    ids, requests = _requests(opened, count, tokens)
    target, reference = opened.target, opened.target.float64_reference()
    expected = [generate(target, [request])[0].tokens for request in tqdm(requests, "alone", disable=not progress)]
    drafters: dict[str, Drafter] = {
        "look-up": NGramDrafter(),
        "look-up tree": NGramDrafter(candidates=2),
        "4-bit copy": ModelDrafter(Transformer(rounded(opened.checkpoint, BITS), target.placement), target.vocabulary),
        "first layers": LayerSkipDrafter(target, FIRST_LAYERS),
    }
    drafting = [
        replace(request, policy=FixedLength(LENGTHS[index % len(LENGTHS)])) for index, request in enumerate(requests)
    ]
    continued = continuation(target, requests)
    arms = [(slots, name) for slots in plan.our_slots for name in drafters]
    for slots, name in tqdm(arms, "batches", disable=not progress):
        rounds = list(decode(target, drafting, drafters[name], slots=slots))
        found = census_of_batch(target, reference, drafting, rounds, expected, continued, slots)
        about = {
            "way": "scatter (ours)",
            "broken": False,
            "engine": "numba float32",
            "drafter": name,
            "K": max(LENGTHS),
            "slots": slots,
        }
        yield from _rows(about, ids, expected, rounds, found)


def _rows(
    about: dict[str, Any], ids: Sequence[str], expected: Sequence[Sequence[int]], rounds: list[Round], found: Any
) -> Iterator[dict[str, Any]]:
    emitted = outputs(rounds, len(ids))
    for index, (prompt_id, right, divergences) in enumerate(zip(ids, expected, found, strict=True)):
        own = [row for each in rounds for row in each.rows if row.key == index]
        tokens = emitted[index].tokens
        yield about | {
            "prompt_id": prompt_id,
            "tokens": len(tokens),
            "expected": len(right),
            "exact": not divergences,
            "matching": sum(one == other for one, other in zip(tokens, right, strict=False)),
            "first_divergence": divergences[0].index if divergences else -1,
            "certified": all(divergence.certified for divergence in divergences),
            "divergences": len(divergences),
            "first_rejection": first_rejection(own),
            "rounds": len(own),
            "drafted": sum(sum(row.drafted) for row in own),
            "accepted": sum(row.accepted for row in own),
            "differs_at": differs_at(right, tokens, divergences),
        }


def first_rejection(rounds: Sequence[RowRound]) -> int:
    """Tokens that a row had emitted when its first round with a rejected draft token was over, or −1."""
    emitted = 0
    for row in rounds:
        emitted += len(row.emitted)
        if row.ending == "recovered":
            return emitted
    return -1


def _one_round(plan: OutputPlan, opened: Opened) -> Iterator[dict[str, Any]]:
    """The round of a batch of four whose rows accepted most unequally, as our engine decoded it."""
    ids, requests = _requests(opened, 4, 16)
    drafting = [replace(request, policy=FixedLength(plan.k)) for request in requests]
    target = opened.target
    drafter = ModelDrafter(Transformer(rounded(opened.checkpoint, BITS), target.placement), target.vocabulary)
    told = _Told(drafter)
    rounds = list(decode(target, drafting, told))
    whole = [each for each in rounds if len(each.rows) == len(ids) and not any(row.finished for row in each.rows)]
    chosen = max(whole, key=lambda each: len({row.accepted for row in each.rows}))
    for row in chosen.rows:
        nodes = told.drafted[chosen.index][row.slot]
        yield {
            "engine": "numba float32",
            "round": chosen.index,
            "slot": row.slot,
            "prompt_id": ids[row.key],
            "cached": row.context - 1,
            "pieces": [opened.tokenizer.decode([token]) for token in nodes],
            "kept": row.accepted + 1,
            "emitted": [opened.tokenizer.decode([token]) for token in row.emitted],
            "ending": row.ending,
        }


class _Told(ModelDrafter):
    """The drafter, and what it drafted in each round: the nodes of each slot."""

    def __init__(self, drafter: ModelDrafter):
        super().__init__(drafter.model, drafter.vocabulary)
        self.drafted: list[dict[int, list[int]]] = []

    def propose(self, views: Sequence[RowView], state: Any) -> list[Draft]:
        drafts = super().propose(views, state)
        nodes = {v.slot: [int(v.committed[-1]), *d.tokens.tolist()] for v, d in zip(views, drafts, strict=True)}
        self.drafted.append(nodes)
        return drafts


def _requests(opened: Opened, count: int, tokens: int) -> tuple[list[str], list[Request]]:
    """Prompts of all domains in turn, each with plain greedy options."""
    prompts = load_prompts() if count > 108 else held_out(load_prompts())
    chosen = prompts[:: max(1, len(prompts) // count)][:count]
    options = Options(max_new_tokens=tokens, eos=opened.tokenizer.eos_ids)
    requests = [
        Request(tuple(opened.tokenizer.chat(prompt.messages)), options, None, index)
        for index, prompt in enumerate(chosen)
    ]
    return [prompt.id for prompt in chosen], requests
