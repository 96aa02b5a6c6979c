"""The grid of exact cases: every option of the decoder and every shape of draft, each small enough to be enumerated.

Vocabulary 3, outputs of two to four tokens, drafts of up to three: all that the rejection rule, the processors and the
endings can do happens within that. What grows too fast is cut as follows: three rows only with one or two new tokens
each, K = 3 only with a single row at T = 1, penalties and truncations together only in three combinations.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.forensics.enumeration import (
    Tokens,
    distance,
    output_law,
    product_law,
    sequence_law,
    total_variation,
)
from specdec_core.forensics.exact_drafters import FixedTree, SampledTree, ScriptedChain
from specdec_core.lengths.fixed import FixedLength
from specdec_core.protocol import Drafter
from specdec_core.rows import Detokenize, Request
from specdec_core.sampling import Options
from specdec_core.targets.table import Logits, TableTarget, random_logits

V, CONTEXT = 3, 8
PROMPT = (0, 1, 0)
TARGET, FAR = random_logits(V, seed=1), random_logits(V, seed=2)


@dataclass(frozen=True)
class Case:
    """One cell of the grid: a batch decoded with one drafter, enumerated and compared with the definition."""

    axis: str
    name: str
    requests: tuple[Request, ...]
    drafter: Callable[[], Drafter] | None
    logits: Logits = TARGET
    slots: int | None = None


def letters(tokens: Sequence[int]) -> str:
    """Text of table tokens: a letter each."""
    return "".join("abcdefgh"[token] for token in tokens)


def request(k: int | None = 2, prompt: tuple[int, ...] = PROMPT, **options: Any) -> Request:
    """A request at T = 1 with three new tokens unless said otherwise; K = 0 or None does not draft."""
    how = replace(Options(temperature=1.0, max_new_tokens=3), **options)
    return Request(prompt, how, FixedLength(k) if k else None)


def never(logits: Logits, *tokens: int) -> Logits:
    """The same logits with probability zero on some tokens."""

    def masked(prefix: tuple[int, ...]) -> np.ndarray:
        values = logits(prefix).copy()
        values[list(tokens)] = -np.inf
        return values

    return masked


class DraftModel(TableTarget):
    """A table that drafts. Its `commit` is its own, so that one that is broken on purpose breaks the target alone."""

    commit = TableTarget.commit


def model(logits: Logits, vocabulary: int = V) -> Callable[[], Drafter]:
    """A model drafter on a table."""
    return lambda: ModelDrafter(DraftModel(logits, vocabulary, CONTEXT), V)


def one_hot(depth: int) -> np.ndarray:
    return np.eye(V)[(depth + 1) % V]


DRAFTERS: dict[str, Callable[[], Drafter]] = {
    "soft q": model(FAR),
    "q = p": model(TARGET),
    "q with zeros": model(never(FAR, 1)),
    "q one-hot as a law": lambda: ScriptedChain(one_hot),
    "narrower vocabulary": model(random_logits(2, seed=2), 2),
    "wider vocabulary": model(random_logits(5, seed=2), 5),
    "look-up chain": lambda: NGramDrafter(candidates=1),
    "look-up tree": lambda: NGramDrafter(candidates=3),
    "fixed tree": FixedTree,
    "sampled tree": lambda: SampledTree(FAR, replacement=True),
    "sampled tree, distinct siblings": lambda: SampledTree(FAR, replacement=False),
}

OPTIONS: dict[str, dict[str, Any]] = {
    "T=0": {"temperature": 0.0},
    "T=0.6": {"temperature": 0.6},
    "T=1.4": {"temperature": 1.4},
    "top-k 1": {"top_k": 1},
    "top-k 2": {"top_k": 2},
    "top-p 0.7": {"top_p": 0.7},
    "min-p 0.4": {"min_p": 0.4},
    "repetition penalty": {"repetition_penalty": 1.7},
    "presence penalty": {"presence_penalty": 0.9},
    "penalties, top-k, T": {"top_k": 2, "presence_penalty": -0.5, "repetition_penalty": 1.3, "temperature": 1.4},
    "top-p, min-p, T": {"top_p": 0.9, "min_p": 0.2, "temperature": 0.8},
    "T=0, penalties": {"temperature": 0.0, "repetition_penalty": 1.7, "presence_penalty": 0.9},
}

ENDINGS: dict[str, dict[str, Any]] = {
    "EOS": {"eos": (1,)},
    "two EOS": {"eos": (0, 2)},
    "min new tokens": {"eos": (1, 2), "min_new_tokens": 2},
    "stop string": {"stop": ("ab", "c")},
    "stop string, min new tokens": {"stop": ("a", "bc"), "min_new_tokens": 2},
    "cap 1": {"max_new_tokens": 1},
    "cap 2": {"max_new_tokens": 2},
    "context": {"max_new_tokens": 9, "prompt": (0, 1, 0, 2, 1)},
}


def grid() -> Iterator[Case]:
    """All cases."""
    yield Case("K", "no drafter", (request(None, max_new_tokens=4),), None)
    for k in (1, 2, 3):
        for name, drafter in DRAFTERS.items():
            # One token more than is drafted: a draft is never longer than the room that is left behind it.
            yield Case("K × drafter", f"K={k}, {name}", (request(k, max_new_tokens=max(3, k + 1)),), drafter)
    disjoint = (request(2),)
    yield Case("support", "q and p disjoint", disjoint, model(never(FAR, 1, 2)), never(TARGET, 0))
    yield Case("support", "p one-hot", disjoint, model(FAR), never(TARGET, 0, 2))
    yield Case("support", "p with zeros", disjoint, model(FAR), never(TARGET, 2))
    for axis, table in (("options", OPTIONS), ("endings", ENDINGS)):
        for name, options in table.items():
            for kind in ("soft q", "fixed tree", "sampled tree"):
                yield Case(axis, f"{name}, {kind}", (request(**options),), DRAFTERS[kind])
    yield Case("prompt", "one token", (request(prompt=(2,)),), DRAFTERS["soft q"])
    yield from _batches()


def _batches() -> Iterator[Case]:
    unlike = (
        request(1, max_new_tokens=2),
        request(2, prompt=(1,), max_new_tokens=2, temperature=0.7, eos=(2,)),
    )
    for kind in ("soft q", "fixed tree", "look-up tree"):
        for slots in (1, 2):
            yield Case("batch", f"two rows unlike, {kind}, {slots} slots", unlike, DRAFTERS[kind], slots=slots)
    plain = (request(None, max_new_tokens=2), request(1, prompt=(2, 2), max_new_tokens=2, top_p=0.7))
    yield Case("batch", "a drafted row beside a plain one", plain, DRAFTERS["soft q"])
    greedy = (request(2, temperature=0.0), request(1, prompt=(1,), max_new_tokens=2, presence_penalty=0.9))
    yield Case("batch", "a greedy row beside a sampled one", greedy, DRAFTERS["soft q"])
    three = (
        request(1, max_new_tokens=2),
        request(1, prompt=(1,), max_new_tokens=1, top_k=2),
        request(2, prompt=(2, 0), temperature=0.7, max_new_tokens=1, eos=(2,)),
    )
    yield Case("batch", "three rows unlike, two slots", three, DRAFTERS["soft q"], slots=2)


def enumerate_case(case: Case) -> tuple[dict[tuple[Tokens, ...], float], int]:
    """The production loop's law of a case, and the number of branches."""
    drafter = case.drafter() if case.drafter else None
    target = TableTarget(case.logits, V, CONTEXT)
    return output_law(target, case.requests, drafter, slots=case.slots, detokenize=_detokenize(case))


def defined_law(case: Case) -> dict[tuple[Tokens, ...], float]:
    """The law that the case should have."""
    return product_law([sequence_law(case.logits, each, CONTEXT, _detokenize(case)) for each in case.requests])


def measure(case: Case) -> dict[str, Any]:
    """Record of EXACT_LAW: largest error and total variation of the enumerated law."""
    found, count = enumerate_case(case)
    expected = defined_law(case)
    return {
        "level": "table",
        "axis": case.axis,
        "case": case.name,
        "branches": count,
        "outcomes": len(expected),
        "error": distance(found, expected),
        "total_variation": total_variation(found, expected),
    }


def _detokenize(case: Case) -> Detokenize | None:
    return letters if any(each.options.stop for each in case.requests) else None
