"""Notebook 04: sampled batches. Their exact joint laws, and whether a seeded row of a batch knows its neighbours."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdec_core.bench.lossless import EXACT_CODE
from specdec_core.bench.ragged_outputs import LENGTHS
from specdec_core.bench.sources import DECODING
from specdec_core.bench.token_records import BITS
from specdec_core.decode import decode
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.lossless_records import EXACT_LAW
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.ragged_records import SEEDED_ROW
from specdec_core.evidence.records import RecordWriter
from specdec_core.forensics.batch_laws import measure_batch_laws
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.rounding import rounded
from specdec_core.pairs import Opened
from specdec_core.prompts import held_out, load_prompts
from specdec_core.protocol import Drafter, RowRound
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer

LAW_CODE = (
    *EXACT_CODE,
    "specdec_core/published/acceptance.py",
    "specdec_core/forensics/batch_laws.py",
)
ROW_CODE = (*DECODING, "specdec_core/models/rounding.py", "specdec_core/bench/seeded_rows.py")
"""What each kind of record depends on."""


@dataclass(frozen=True)
class SeededPlan:
    """How much to do: rows of a batch, new tokens each; thorough: all exact laws (batch_laws.py)."""

    rows: int
    tokens: int
    thorough: bool


PLANS = {"quick": SeededPlan(4, 8, thorough=False), "full": SeededPlan(24, 48, thorough=True)}

SAMPLING = (
    Options(temperature=1.0),
    Options(temperature=0.7, top_p=0.9),
    Options(temperature=1.0, top_k=40, min_p=0.02),
    Options(temperature=1.3, repetition_penalty=1.1),
)
"""Options that the rows of a batch have in turn."""

Told = list[list[RowRound]]


@dataclass(frozen=True)
class SampledRows:
    """EXACT_LAW rows of batches, and SEEDED_ROW rows of the real model."""

    laws: list[dict[str, Any]]
    seeded: list[dict[str, Any]]


def sample_batches(plan: SeededPlan, opened: Opened, profile: str, layout: Layout | None = None) -> SampledRows:
    """Enumerate, decode, compare, record."""
    layout, found = layout or Layout(), []
    provenance = fingerprint(profile, threads=opened.target.placement.workers)
    for name, schema, code, rows in (
        ("04_batch_law", EXACT_LAW, LAW_CODE, measure_batch_laws(plan.thorough)),
        ("04_seeded_rows", SEEDED_ROW, ROW_CODE, isolate_rows(plan, opened)),
    ):
        kept = []
        with RecordWriter(layout.records(profile), name, schema, provenance, code=code, layout=layout) as file:
            for row in rows:
                kept.append(schema.validated(row))
                file.append(row)
        found.append(kept)
    return SampledRows(*found)


def isolate_rows(plan: SeededPlan, opened: Opened) -> Iterator[dict[str, Any]]:
    """Decode a sampled batch again and again with its neighbourhood changed; compare every row's tokens and rounds."""
    target = opened.target
    prompts = held_out(load_prompts())
    step = max(1, len(prompts) // (2 * plan.rows))
    chosen = prompts[::step][: 2 * plan.rows]
    texts = [tuple(opened.tokenizer.chat(prompt.messages)) for prompt in chosen]
    requests = [_request(index, texts[index], plan.tokens, opened) for index in range(plan.rows)]
    drafters: dict[str, Drafter] = {
        "look-up tree": NGramDrafter(candidates=2),
        "4-bit copy": ModelDrafter(Transformer(rounded(opened.checkpoint, BITS), target.placement), target.vocabulary),
    }

    def told(batch: Sequence[Request], drafter: Drafter, slots: int) -> Told:
        """What every row of the batch went through."""
        rounds = [row for each in decode(target, batch, drafter, slots=slots) for row in each.rows]
        return [[_placeless(row) for row in rounds if row.key == index] for index in range(len(batch))]

    for name, drafter in drafters.items():
        base = told(requests, drafter, plan.rows)
        reseeded = [replace(each, options=replace(each.options, seed=each.options.seed + 1)) for each in requests]
        anew = told(reseeded, drafter, plan.rows)
        own = [_tokens(one) != _tokens(other) for one, other in zip(base, anew, strict=True)]
        elsewhere = [
            replace(each, prompt=texts[(plan.rows + index) % len(texts)]) for index, each in enumerate(requests)
        ]
        longer = [replace(each, policy=FixedLength(7)) for each in requests]
        greedy = [replace(each, options=replace(each.options, temperature=0.0)) for each in requests]
        changed = {
            "alone": [told([each], drafter, 1)[0] for each in requests],
            "in reverse order": told(requests[::-1], drafter, plan.rows)[::-1],
            "queued over fewer slots": told(requests, drafter, max(2, plan.rows // 3)),
        }
        for change, others in (
            ("neighbours with other seeds", reseeded),
            ("neighbours with other prompts", elsewhere),
            ("neighbours that draft further", longer),
            ("greedy neighbours", greedy),
        ):
            changed[change] = _beside(requests, others, lambda batch, with_=drafter: told(batch, with_, plan.rows))
        for change, rows in changed.items():
            for index, prompt in enumerate(chosen[: plan.rows]):
                yield {
                    "engine": "numba float32",
                    "drafter": name,
                    "change": change,
                    "slots": plan.rows,
                    "prompt_id": prompt.id,
                    "tokens": len(_tokens(base[index])),
                    "same": rows[index] == base[index],
                    "own": own[index],
                }


def _beside(requests: Sequence[Request], others: Sequence[Request], told: Any) -> Told:
    """Every row as it is beside changed neighbours: odd rows are changed first, then even ones."""
    numbers = range(len(requests))
    halves = [told([(requests if index % 2 == kept else others)[index] for index in numbers]) for kept in (0, 1)]
    return [halves[index % 2][index] for index in numbers]


def _request(index: int, text: tuple[int, ...], tokens: int, opened: Opened) -> Request:
    sampling = SAMPLING[index % len(SAMPLING)]
    options = replace(sampling, max_new_tokens=tokens, eos=opened.tokenizer.eos_ids, seed=100 + index)
    return Request(text, options, FixedLength(LENGTHS[index % len(LENGTHS)]), key=index)


def _tokens(rounds: Sequence[RowRound]) -> list[int]:
    return [token for row in rounds for token in row.emitted]


def _placeless(row: RowRound) -> RowRound:
    """The round without where it took place: which request of which batch, in which slot."""
    return replace(row, key=0, slot=0)
