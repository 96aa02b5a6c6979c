"""Tests of a mutant that draw from the real random streams and judge the tokens under the target's law."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import lru_cache
from itertools import product

import numpy as np
from scipy.stats import chisquare

from specdec_core import decode as loop
from specdec_core import rows
from specdec_core.forensics.exact_drafters import SampledTree
from specdec_core.forensics.kill_subject import (
    LENGTH,
    Inject,
    K,
    Sight,
    V,
    alternative,
    leaning,
    soft_drafter,
    target,
)
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
from specdec_core.topology import chain

ONE_STEP_SAMPLED = "one step, sampled"
SAMPLED = (ONE_STEP_SAMPLED, *ONE_SAMPLE, battery.PERMUTED, battery.DISCREPANCY)
ALPHA = 0.01
"""The level of all these tests together, on one mutant."""
ROWS_TOGETHER = 24


def sampled(budget: int, inject: Inject) -> dict[str, Sight]:
    """What each test of SAMPLED says of `budget` tokens of the decoder with a mutant in place."""
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
    requests = sampled_requests(drafting)
    scorer = Scorer(target(), alternative())
    records = []
    tokens = seed = 0
    while tokens < budget:
        drafter: Drafter | None = None
        if drafting:
            drafter = SampledTree(leaning, replacement=True) if seed % 2 else soft_drafter()
        # Speculative and autoregressive runs draw from streams of their own.
        seeded = [
            replace(one, options=replace(one.options, seed=2 * seed + drafting), key=key)
            for key, one in enumerate(requests)
        ]
        rounds: list[list[RowRound]] = [[] for _ in seeded]
        with inject():
            for each in loop.decode(target(), seeded, drafter):
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


def sampled_requests(drafting: bool) -> list[Request]:
    """Rows of every kind of options."""
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
