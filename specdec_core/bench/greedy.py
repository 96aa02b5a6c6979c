"""Greedy agreement: speculative against autoregressive decoding, token ids, every divergence examined."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from tqdm import tqdm

from specdec_core.bench.sources import DECODING, INT8_PASS
from specdec_core.decode import decode, outputs
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.evidence.lossless_records import GREEDY
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter
from specdec_core.forensics.near_ties import census
from specdec_core.lengths.fixed import FixedLength
from specdec_core.measure.sweep import Case
from specdec_core.pairs import open_target
from specdec_core.placement import INT8, Placement
from specdec_core.prompts import load_prompts
from specdec_core.protocol import Drafter, Target
from specdec_core.rows import Request
from specdec_core.sampling import Options

CODE = (*DECODING, "specdec_core/forensics/near_ties.py", "specdec_core/bench/greedy.py")


def greedy_agreement(
    backend: str,
    target: Target,
    reference: Target,
    drafters: dict[str, Drafter],
    cases: Sequence[Case],
    options: Options,
    *,
    k: int = 4,
    slots: int = 1,
) -> Iterator[dict[str, Any]]:
    """Records of GREEDY. AR is decoded one row at a time; SD over `slots` rows together.

    `reference` holds the same weights in float64 (near-ties are judged in it). Options are those of plain greedy
    decoding: no penalties, no min_new_tokens (a text that is gone on with would count its history anew).
    """
    if options.penalised or options.min_new_tokens:
        raise ValueError(f"options {options}: expected plain greedy ones, without penalties or min_new_tokens")
    requests = [Request(case.tokens, options, None, index) for index, case in enumerate(cases)]
    expected = [outputs(decode(target, [request]), 1)[0].tokens for request in requests]
    drafting = [replace(request, policy=FixedLength(k)) for request in requests]
    for name, drafter in drafters.items():
        rounds = list(decode(target, drafting, drafter, slots=slots))
        emitted = outputs(rounds, len(drafting))
        for index, case in enumerate(cases):
            own = [row for each in rounds for row in each.rows if row.key == index]
            tokens = emitted[index].tokens

            def continued(shared: tuple[int, ...], case: Case = case) -> tuple[int, ...]:
                if shared[-1] in options.eos or len(shared) == options.max_new_tokens:
                    return ()
                left = replace(options, max_new_tokens=options.max_new_tokens - len(shared))
                return outputs(decode(target, [Request((*case.tokens, *shared), left)]), 1)[0].tokens

            found = census(target, reference, case.tokens, expected[index], tokens, own, continued)
            first = found[0] if found else None
            yield {
                "backend": backend,
                "drafter": name,
                "K": k,
                "slots": slots,
                "prompt_id": case.prompt_id,
                "tokens": len(tokens),
                "identical": not found,
                "certified": all(divergence.certified for divergence in found),
                "divergences": len(found),
                "index": -1 if first is None else first.index,
                "gap": 0.0 if first is None else min(first.gap, 1e300),
                "epsilon": 0.0 if first is None else first.epsilon,
            }


def bench_greedy(model: str, placement: Placement, out: Path) -> None:
    """Greedy n-gram SD against AR on every prompt, 12 tokens each, one row at a time; records of GREEDY into `out`."""
    opened = open_target(model, placement)
    target, backend = opened.target, f"{placement.engine} {placement.dtype} {placement.device}"
    prompts = load_prompts()
    cases = [Case(p.id, p.domain, p.split, tuple(opened.tokenizer.chat(p.messages))) for p in prompts]
    options = Options(max_new_tokens=12, eos=opened.tokenizer.eos_ids)
    provenance = fingerprint("full", threads=placement.workers, dtype=placement.dtype)
    name = f"bench_greedy_{placement.engine}_{placement.dtype}"
    code = (*CODE, *INT8_PASS) if placement.dtype == INT8 else CODE
    rows = []
    with RecordWriter(out, name, GREEDY, provenance, code=code) as file:
        for case in tqdm(cases, "prompts"):
            reference = target.float64_reference()
            for row in greedy_agreement(backend, target, reference, {"n-gram": NGramDrafter()}, [case], options):
                file.append(row)
                rows.append(row)
    differing = [row for row in rows if not row["identical"]]
    wrong = [row["prompt_id"] for row in differing if not row["certified"]]
    print(f"{backend}: {len(rows)} outputs, {len(differing)} differ from AR, uncertified: {wrong or 'none'}")
