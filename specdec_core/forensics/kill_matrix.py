"""Every mutant against every test: which test sees it, and after how many tokens.

Exact tests come first (enumerated laws, the one-step closed form, greedy agreement); sampled tests draw from the real
random streams and judge the tokens under the target's law; row isolation and the acceptance canary look at what no law
shows. A mutant that makes the decoder raise is no kill: a crash is counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from typing import Any

import numpy as np

from specdec_core import decode as loop
from specdec_core.drafters.model import ModelDrafter
from specdec_core.forensics.enumeration import distance, exact_law
from specdec_core.forensics.exact_drafters import FixedTree
from specdec_core.forensics.exact_grid import Case, DraftModel, defined_law, enumerate_case, grid
from specdec_core.forensics.kill_sampled import SAMPLED, reference_sample, sampled, sampled_requests
from specdec_core.forensics.kill_subject import LENGTH, LOGITS, Inject, K, Sight, V, soft_drafter, target
from specdec_core.forensics.mutants import NOTHING, Mutant
from specdec_core.lengths.fixed import FixedLength
from specdec_core.protocol import Draft
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.topology import chain

EXACT, ONE_STEP, GREEDY = "exact law", "one step, exact", "greedy ids"
ROWS, CANARY = "row isolation", "acceptance canary"
TESTS = (EXACT, ONE_STEP, GREEDY, *SAMPLED, ROWS, CANARY)
CLEAN = "clean code"
TOLERANCE = 1e-12
"""Of exact laws."""

PROBES = (
    "K=2, soft q", "K=2, fixed tree", "K=2, sampled tree", "T=0.6, soft q", "top-p 0.7, soft q",
    "presence penalty, soft q", "EOS, soft q", "cap 2, soft q",
)  # fmt: skip
"""Cases of the exact grid that between them reach every mutant's seam."""


def examine(mutant: Mutant | None, budget: int, thorough: bool = False) -> Iterator[dict[str, Any]]:
    """Records of KILL: every test of TESTS on a mutant (None: the clean decoder), sampled ones on `budget` tokens.

    thorough  makes the sampled tests even where exact ones have seen the mutant already.
    """
    inject: Inject = mutant.inject if mutant else nullcontext
    reference_sample(budget)  # before anything is broken
    known = False
    for names, run in _runs(budget):
        if names is SAMPLED and known and not thorough:
            continue
        sights: dict[str, Sight] = {}
        crashed = False
        try:
            sights = run(inject)
        except Exception:  # whatever a broken decoder raises: it is a crash, and no kill
            crashed = True
        known = known or any(sight.seen for sight in sights.values())
        for name in names:
            sight = sights.get(name, Sight(False))
            yield {
                "mutant": mutant.name if mutant else CLEAN,
                "effect": mutant.effect if mutant else NOTHING,
                "test": name,
                "seen": sight.seen,
                "crashed": crashed,
                "statistic": float(sight.statistic),
                "tokens": sight.tokens,
                "budget": budget if name in SAMPLED else 0,
            }


def _runs(budget: int) -> Iterator[tuple[tuple[str, ...], Callable[[Inject], dict[str, Sight]]]]:
    yield (EXACT,), _exact
    yield (ONE_STEP,), _one_step
    yield (GREEDY,), _greedy
    yield SAMPLED, lambda inject: sampled(budget, inject)
    yield (ROWS,), _isolation
    yield (CANARY,), _canary


# --- Exact tests --------------------------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _probes() -> tuple[Case, ...]:
    cases = {case.name: case for case in grid()}
    return tuple(cases[name] for name in PROBES)


def _exact(inject: Inject) -> dict[str, Sight]:
    worst = 0.0
    for case in _probes():
        with inject():
            found, _ = enumerate_case(case)
        worst = max(worst, distance(found, defined_law(case)))
        if worst > TOLERANCE:
            break
    return {EXACT: Sight(worst > TOLERANCE, worst)}


def _one_step(inject: Inject) -> dict[str, Sight]:
    """Draft one token from q: what comes out is min(p, q) + (1 − Σ min(p, q))·residual, which is p."""
    worst = 0.0
    for p, q in _pairs():

        def run(decisions, p=p, q=q) -> int:
            token = decisions.choose(q)
            draft = Draft(np.array([token]), chain(2), q[None])
            outcome = loop.walk(draft, lambda node: p, decisions)
            return int(draft.tokens[0]) if len(outcome.path) > 1 else outcome.token

        with inject():
            found = exact_law(run)
        worst = max(worst, distance(found, {token: p[token] for token in range(len(p))}))
    return {ONE_STEP: Sight(worst > TOLERANCE, worst)}


def _pairs() -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Random laws, and ones that are alike, disjoint, one-hot, or differ by rounding."""
    random = np.random.default_rng(0)
    for _ in range(20):
        p, q = random.dirichlet(np.full(5, 0.5), 2)
        yield p, q
        yield p, p
        yield p, (p + 1e-16) / (p + 1e-16).sum()
    one, other = np.eye(5)[1], np.array([0.5, 0.0, 0.5, 0.0, 0.0])
    yield from ((one, other), (other, one), (one, one))


def _greedy(inject: Inject) -> dict[str, Sight]:
    options = Options(max_new_tokens=LENGTH, presence_penalty=0.3)
    requests = [Request((row,), options, None, row) for row in range(V)]
    expected = loop.generate(target(), requests)
    drafting = [replace(request, policy=FixedLength(K)) for request in requests]
    with inject():
        found = [loop.generate(target(), drafting, drafter) for drafter in (soft_drafter(), FixedTree())]
    differing = sum(
        one.tokens != other.tokens for outputs in found for one, other in zip(outputs, expected, strict=True)
    )
    return {GREEDY: Sight(differing > 0, differing)}


# --- Behaviour ----------------------------------------------------------------------------------------------------


def _isolation(inject: Inject) -> dict[str, Sight]:
    """A seeded row's tokens, alone and beside others."""
    requests = sampled_requests(drafting=True)[:4]
    with inject():
        together = loop.generate(target(), requests, soft_drafter())
        alone = [loop.generate(target(), [request], soft_drafter())[0] for request in requests]
    differing = sum(one.tokens != other.tokens for one, other in zip(alone, together, strict=True))
    return {ROWS: Sight(differing > 0, differing)}


def _canary(inject: Inject) -> dict[str, Sight]:
    """A target that drafts for itself: everything is accepted, and every whole round yields K + 1 tokens."""
    drafter = ModelDrafter(DraftModel(LOGITS, V), V)
    requests = [
        Request((row, 5), Options(temperature=1.0, max_new_tokens=LENGTH), FixedLength(K), row) for row in (0, 1)
    ]
    with inject():
        reports = [row for each in loop.decode(target(), requests, drafter) for row in each.rows]
    missing = sum(1 + len(row.drafted) - len(row.emitted) for row in reports if row.finished is None)
    return {CANARY: Sight(missing > 0, missing)}
