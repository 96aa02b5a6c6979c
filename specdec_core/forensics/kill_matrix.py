"""Every mutant against every test: which test sees it, and after how many tokens.

Exact tests come first (enumerated laws, the one-step closed form, greedy agreement); sampled tests draw from the real
random streams and judge the tokens under the target's law; row isolation and the acceptance canary look at what no law
shows. A mutant that makes the decoder raise is no kill: a crash is counted apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
from scipy.stats import chisquare

from specdec_core import decode as loop
from specdec_core import rows
from specdec_core.drafters.model import ModelDrafter
from specdec_core.forensics.enumeration import distance, exact_law
from specdec_core.forensics.exact_drafters import FixedTree, SampledTree
from specdec_core.forensics.exact_grid import Case, DraftModel, defined_law, enumerate_case, grid
from specdec_core.forensics.mutants import NOTHING, Mutant
from specdec_core.forensics.scoring import Scorer
from specdec_core.lengths.fixed import FixedLength
from specdec_core.protocol import Draft, Drafter, RowRound
from specdec_core.randomness import streams
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.statistics import battery
from specdec_core.statistics.battery import ONE_SAMPLE, Sample
from specdec_core.statistics.multiplicity import holm
from specdec_core.statistics.teacher_forced import e_process
from specdec_core.statistics.two_sample import choose_bins
from specdec_core.targets.table import TableTarget, random_logits
from specdec_core.topology import chain

EXACT, ONE_STEP, GREEDY = "exact law", "one step, exact", "greedy ids"
ONE_STEP_SAMPLED, ROWS, CANARY = "one step, sampled", "row isolation", "acceptance canary"
SAMPLED = (ONE_STEP_SAMPLED, *ONE_SAMPLE, battery.PERMUTED, battery.DISCREPANCY)
TESTS = (EXACT, ONE_STEP, GREEDY, *SAMPLED, ROWS, CANARY)
CLEAN = "clean code"
TOLERANCE, ALPHA = 1e-12, 0.01
"""Of exact laws; and the level of all sampled tests together, on one mutant."""

PROBES = (
    "K=2, soft q", "K=2, fixed tree", "K=2, sampled tree", "T=0.6, soft q", "top-p 0.7, soft q",
    "presence penalty, soft q", "EOS, soft q", "cap 2, soft q",
)  # fmt: skip
"""Cases of the exact grid that between them reach every mutant's seam."""

V, K, LENGTH, ROWS_TOGETHER = 12, 3, 16, 24


@dataclass(frozen=True)
class Sight:
    """What one test saw of one decoder. `tokens`: how many it took, −1 if it saw nothing or counts none."""

    seen: bool
    statistic: float = 0.0
    tokens: int = -1


Inject = Callable[[], AbstractContextManager[Any]]


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
    yield SAMPLED, lambda inject: _sampled(budget, inject)
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
    expected = loop.generate(_target(), requests)
    drafting = [replace(request, policy=FixedLength(K)) for request in requests]
    with inject():
        found = [loop.generate(_target(), drafting, drafter) for drafter in (_soft_drafter(), FixedTree())]
    differing = sum(
        one.tokens != other.tokens for outputs in found for one, other in zip(outputs, expected, strict=True)
    )
    return {GREEDY: Sight(differing > 0, differing)}


# --- Sampled tests ------------------------------------------------------------------------------------------------


def _sampled(budget: int, inject: Inject) -> dict[str, Sight]:
    sample, reference = draw(budget, True, inject), reference_sample(budget)
    looks = _looks(len(sample.pit))
    found = {n: battery.one_sample(sample.first(n)) for n in looks}
    # Looked at repeatedly, so each p counts as often; the e-process may be looked at at any time by its nature.
    least = {
        name: min(1.0, min(found[n][name].p for n in looks) * (1 if name == battery.BETTING else len(looks)))
        for name in ONE_SAMPLE
    }
    bins = choose_bins(np.arange(V), V)
    compared = battery.two_sample(sample, reference, bins, resamples=1_999)
    least |= {name: compared[name].p for name in (battery.PERMUTED, battery.DISCREPANCY)}
    with inject():
        steps = _one_step_sampled(budget // 4)
    least[ONE_STEP_SAMPLED] = min(1.0, min(steps.values()) * len(steps))
    held = holm(least)
    level = {name: ALPHA * least[name] / held[name] if held[name] else ALPHA for name in least}
    sights = {}
    for name in SAMPLED:
        seen, tokens = held[name] <= ALPHA, -1
        if name == ONE_STEP_SAMPLED:
            reached = next((n for (n, *_), p in sorted(steps.items()) if p * len(steps) <= level[name]), -1)
            sights[name] = Sight(seen, least[name], reached if seen else -1)
            continue
        if seen and name == battery.BETTING:
            tokens = e_process(sample.ratio, alpha=level[name]).first or -1
        elif seen and name in ONE_SAMPLE:
            tokens = next((n for n in looks if found[n][name].p * len(looks) <= level[name]), looks[-1])
        elif seen:
            tokens = sample.tokens
        statistic = (found[looks[-1]] | compared)[name].statistic
        sights[name] = Sight(seen, min(statistic, 1e300), tokens)
    return sights


def _looks(tokens: int) -> list[int]:
    """Sample sizes at which tests are looked at: doubling, and the whole."""
    return [n for n in (125 * 2**power for power in range(20)) if n < tokens] + [tokens]


def _one_step_sampled(budget: int) -> dict[tuple[int, int, bool], float]:
    """One drafted token at a time from the real streams, against p: p-value of a χ² by (tokens, laws, fresh).

    fresh  every draft is the first of its streams, or all are drawn one after another from the same two.
    """
    found = {}
    for pair, fresh in product(range(len(_STEPS)), (False, True)):
        p, q = _STEPS[pair]
        drawing, deciding = streams(pair, 0, rows.DRAFT), streams(pair, 0, rows.VERIFY)
        tokens = []
        for trial in range(budget):
            if fresh:
                drawing, deciding = streams(pair, trial, rows.DRAFT), streams(pair, trial, rows.VERIFY)
            draft = Draft(np.array([drawing.choose(q)]), chain(2), q[None])
            outcome = loop.walk(draft, [p, p].__getitem__, deciding)
            tokens.append(int(draft.tokens[0]) if len(outcome.path) > 1 else outcome.token)
        for n in _looks(budget):
            counted = np.bincount(tokens[:n], minlength=len(p))
            found[n, pair, fresh] = float(chisquare(counted, n * p).pvalue)
    return found


_STEPS = (
    (np.full(5, 0.2), np.array([0.9, 0.025, 0.025, 0.025, 0.025])),
    (np.array([0.05, 0.15, 0.2, 0.25, 0.35]), np.array([0.35, 0.25, 0.2, 0.15, 0.05])),
    (np.array([0.5, 0.3, 0.2]), np.array([0.6, 0.3, 0.1])),
)
"""Pairs (p, q): a narrow draft, an upside-down one, a mild one."""


@lru_cache(maxsize=2)
def reference_sample(budget: int) -> Sample:
    """Autoregressive sequences of the clean decoder."""
    return draw(budget, drafting=False)


def draw(budget: int, drafting: bool, inject: Inject = nullcontext) -> Sample:
    """Sequences of the decoder with a mutant in place, half from chains and half from trees, scored without it."""
    requests = _sampled_requests(drafting)
    scorer = Scorer(_target(), _alternative())
    records = []
    tokens = seed = 0
    while tokens < budget:
        drafter: Drafter | None = None
        if drafting:
            drafter = SampledTree(_leaning, replacement=True) if seed % 2 else _soft_drafter()
        # Speculative and autoregressive runs draw from streams of their own.
        seeded = [
            replace(one, options=replace(one.options, seed=2 * seed + drafting), key=key)
            for key, one in enumerate(requests)
        ]
        rounds: list[list[RowRound]] = [[] for _ in seeded]
        with inject():
            for each in loop.decode(_target(), seeded, drafter):
                for row in each.rows:
                    rounds[row.key].append(row)
        for key, one in enumerate(seeded):
            emitted = [token for row in rounds[key] for token in row.emitted]
            scores = scorer.score(one.prompt, emitted, one.options, seed=1000 * seed + key + 500 * drafting)
            records.append(
                {
                    "tokens": emitted,
                    "prompt_id": key,
                    "offsets": "".join(str(place) for row in rounds[key] for place in range(len(row.emitted))),
                    "pit": scores.pit.tolist(),
                    "in_set": "".join("01"[value] for value in scores.in_set.tolist()),
                    "mass": scores.mass.tolist(),
                    "ratio": scores.ratio.tolist(),
                }
            )
            tokens += len(emitted)
        seed += 1
    return Sample.of(records)


def _sampled_requests(drafting: bool) -> list[Request]:
    kinds = (
        Options(temperature=1.0),
        Options(temperature=0.7, top_p=0.9),
        Options(temperature=1.0, presence_penalty=0.8),
        Options(temperature=1.0, eos=(3,)),
    )
    policy = FixedLength(K) if drafting else None
    return [
        Request((row % V, 5), replace(kinds[row % len(kinds)], max_new_tokens=LENGTH), policy, row)
        for row in range(ROWS_TOGETHER)
    ]


# --- Behaviour ----------------------------------------------------------------------------------------------------


def _isolation(inject: Inject) -> dict[str, Sight]:
    """A seeded row's tokens, alone and beside others."""
    requests = _sampled_requests(drafting=True)[:4]
    with inject():
        together = loop.generate(_target(), requests, _soft_drafter())
        alone = [loop.generate(_target(), [request], _soft_drafter())[0] for request in requests]
    differing = sum(one.tokens != other.tokens for one, other in zip(alone, together, strict=True))
    return {ROWS: Sight(differing > 0, differing)}


def _canary(inject: Inject) -> dict[str, Sight]:
    """A target that drafts for itself: everything is accepted, and every whole round yields K + 1 tokens."""
    drafter = ModelDrafter(DraftModel(_logits, V), V)
    requests = [
        Request((row, 5), Options(temperature=1.0, max_new_tokens=LENGTH), FixedLength(K), row) for row in (0, 1)
    ]
    with inject():
        reports = [row for each in loop.decode(_target(), requests, drafter) for row in each.rows]
    missing = sum(1 + len(row.drafted) - len(row.emitted) for row in reports if row.finished is None)
    return {CANARY: Sight(missing > 0, missing)}


_logits = random_logits(V, seed=7)
_noise = random_logits(V, seed=8, spread=0.5)
_TILT = np.linspace(1.5, -1.5, V)


def _leaning(prefix: tuple[int, ...]) -> np.ndarray:
    """Logits of a drafter that errs at random, and always to low ids, so that errors do not average out."""
    return _logits(prefix) + _noise(prefix) + _TILT


def _target() -> TableTarget:
    return TableTarget(_logits, V)


def _alternative() -> TableTarget:
    return DraftModel(_leaning, V)


def _soft_drafter() -> ModelDrafter:
    return ModelDrafter(_alternative(), V)
