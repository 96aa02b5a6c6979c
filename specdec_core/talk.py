"""`generate`: stream an answer, then say what speculation did for it and what decoding without it would have cost."""

from __future__ import annotations

import sys
from dataclasses import replace
from time import perf_counter

from specdec_core.decode import decode, outputs
from specdec_core.lengths.fixed import FixedLength
from specdec_core.measure.cost_model import count
from specdec_core.pairs import Opened, open_drafter
from specdec_core.rows import Request
from specdec_core.sampling import Options


def talk(opened: Opened, prompt: str, drafter_kind: str, k: int, options: Options, raw: bool = False) -> None:
    """Answer `prompt` (through the chat template unless `raw`), streaming to standard output."""
    if not prompt:
        raise ValueError("empty prompt: expected some text to answer")
    tokenizer = opened.tokenizer
    ids = tokenizer.encode(prompt) if raw else tokenizer.chat([{"role": "user", "content": prompt}])
    options = replace(options, eos=tokenizer.eos_ids)
    drafter, _ = open_drafter(drafter_kind, opened)
    policy = FixedLength(k) if drafter is not None else None
    warm_up = Request(tuple(ids), replace(options, max_new_tokens=2, min_new_tokens=0))
    list(decode(opened.target, [warm_up], detokenize=tokenizer.decode))
    stream, rounds = tokenizer.stream(), []
    start = perf_counter()
    for each in decode(opened.target, [Request(tuple(ids), options, policy)], drafter, detokenize=tokenizer.decode):
        rounds.append(each)
        for token in each.rows[0].emitted:
            sys.stdout.write(stream.push(token))
        sys.stdout.flush()
    seconds = perf_counter() - start
    print(stream.flush())
    done, counts = outputs(rounds, 1)[0], count(rounds)
    print(f"\n{len(done.tokens)} tokens, {len(done.tokens) / seconds:.1f} tokens/s, ended by {done.finished}", end="")
    if drafter is None:
        print()
        return
    start = perf_counter()
    plain = outputs(decode(opened.target, [Request(tuple(ids), options)], detokenize=tokenizer.decode), 1)[0]
    ar = len(plain.tokens) / (perf_counter() - start)
    print(f"; τ {counts.tau:.2f} tokens per target pass, a_K {counts.a_k:.1%} at K = {k}")
    same = "the same tokens" if plain.tokens == done.tokens else "other tokens (sampled, or a near-tie)"
    print(f"autoregressive: {ar:.1f} tokens/s, {same}; speedup {len(done.tokens) / seconds / ar:.2f}")
