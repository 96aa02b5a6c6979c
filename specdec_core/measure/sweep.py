"""Speculative against autoregressive decoding of the same prompts: configurations × K, every row kept.

AR is run before and after the SD arms of every prompt, which come in random order: ratios are paired by prompt, and
drift within a prompt cancels. Prefill is left out of the times: it is the same for all arms. Standalone curves are
measured before the first SD run, and the prediction uses only them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specdec_core.decode import decode, outputs
from specdec_core.lengths.fixed import FixedLength
from specdec_core.measure.clock import Arm, interleaved, once
from specdec_core.measure.cost_model import DraftCost, count, predict_seconds
from specdec_core.measure.curves import TimeCurve, verification_arm
from specdec_core.protocol import Drafter, Round, RowView, Target
from specdec_core.randomness import DRAFT, streams
from specdec_core.rows import Request
from specdec_core.sampling import Options


@dataclass(frozen=True)
class Configuration:
    """A draft/target pair to sweep.

    step_model  what one draft step runs (None: drafting is a look-up, or is timed otherwise).
    ks          its own speculation lengths, where it cannot have all of the sweep's; empty: those of the sweep.
    """

    name: str
    backend: str
    target_name: str
    drafter_name: str
    target: Target
    drafter: Drafter
    step_model: Target | None = None
    ks: tuple[int, ...] = ()


@dataclass(frozen=True)
class Case:
    """One prompt of a sweep."""

    prompt_id: str
    domain: str
    split: str
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class Costs:
    """Standalone costs of a configuration, measured before its SD runs.

    overhead  seconds outside drafting and verification of a round that emits one token; token: of every further one.
    """

    curve: TimeCurve
    draft: DraftCost
    overhead: float
    token: float = 0.0


def measure_draft(configuration: Configuration, context: int, repeats: int = 9) -> DraftCost:
    """Seconds of one draft step on a warm cache; a look-up is timed as a whole round of it."""
    arms = {"draft": draft_arm(configuration, context)}
    return draft_cost(configuration, interleaved(arms, repeats, warmup=2)["draft"])


def draft_cost(configuration: Configuration, seconds: np.ndarray) -> DraftCost:
    """The cost that samples of `draft_arm` stand for: their median, a step of a model or a round of a look-up."""
    median = float(np.median(seconds))
    return DraftCost(round=median) if configuration.step_model is None else DraftCost(step=median)


def draft_arm(configuration: Configuration, context: int) -> Arm:
    """One step of the configuration's model behind so many cached entries; of a look-up, a whole proposal."""
    model = configuration.step_model
    if model is None:
        return _lookup_arm(configuration.drafter, context)
    tokens = np.random.default_rng(0).integers(0, model.vocabulary, (1, context + 1))
    state = model.new_state(1, context + 1)
    model.prefill(state, np.array([0]), list(tokens))
    return verification_arm(model, state, tokens[:, context:])


def _lookup_arm(drafter: Drafter, context: int) -> Arm:
    """A proposal over a text in which the suffix occurred before. The drafter belongs to the arm until it has run."""
    text = np.tile(np.arange(context // 2), 3)[: context + 8]
    drafter.start(1, len(text) + 64)
    drafter.admit(np.array([0]), [text], [None])
    view = RowView(0, text, len(text), 4, FixedLength(4), Options(), streams(0, 0, DRAFT))
    state: Any = None
    return lambda: drafter.propose([view], state)


def measure_overhead(target: Target, case: Case, tokens: int = 24, temperature: float = 0.0) -> float:
    """Median seconds that a round takes outside drafting and verification, from autoregressive rounds."""
    options = Options(temperature=temperature, max_new_tokens=tokens)
    rounds = list(decode(target, [Request(case.tokens, options)]))
    return float(np.median([each.seconds.accept + each.seconds.commit for each in rounds[1:]]))


def sweep(
    configurations: Sequence[Configuration],
    costs: dict[str, Costs],
    cases: Sequence[Case],
    ks: Sequence[int],
    options: Options,
    *,
    seed: int = 0,
    progress: Callable[[Sequence[Case]], Any] = iter,
) -> Iterator[dict[str, Any]]:
    """Run every configuration at every K of `ks`, or of its own, on every case; yields one record an arm
    (evidence.sweep_records.SWEEP).

    Configurations of one backend share its target. `identical` compares the emitted tokens with the first AR run's.
    """
    targets = {c.backend: c.target for c in configurations}
    order = np.random.default_rng(seed)
    arms = [(configuration, k) for configuration in configurations for k in configuration.ks or ks]
    for index, case in enumerate(progress(cases)):
        row = replace(options, seed=options.seed + index)
        before = {backend: _run(target, case, row) for backend, target in targets.items()}
        runs: dict[tuple[str, int], _Run] = {}
        for configuration, k in (arms[i] for i in order.permutation(len(arms))):
            runs[configuration.name, k] = _run(configuration.target, case, row, configuration.drafter, FixedLength(k))
        after = {backend: _run(target, case, row) for backend, target in targets.items()}
        for configuration in configurations:
            ar, cost = before[configuration.backend], costs[configuration.name]
            for reference in (ar, after[configuration.backend]):
                yield _record(configuration, case, row, 0, reference, ar.tokens, cost)
            for k in configuration.ks or ks:
                yield _record(configuration, case, row, k, runs[configuration.name, k], ar.tokens, cost)


@dataclass(frozen=True)
class _Run:
    rounds: list[Round]
    tokens: tuple[int, ...]


def _run(
    target: Target, case: Case, options: Options, drafter: Drafter | None = None, policy: FixedLength | None = None
) -> _Run:
    rounds: list[Round] = []
    once(lambda: rounds.extend(decode(target, [Request(case.tokens, options, policy)], drafter)))
    return _Run(rounds, outputs(rounds, 1)[0].tokens)


def _record(
    configuration: Configuration, case: Case, options: Options, k: int, run: _Run, ar_tokens: Sequence[int], cost: Costs
) -> dict[str, Any]:
    counts = count(run.rounds)
    phases = [each.seconds for each in run.rounds]
    draft, verify = sum(p.draft for p in phases), sum(p.verify for p in phases)
    overhead = sum(p.accept + p.commit for p in phases)
    return {
        "configuration": configuration.name,
        "backend": configuration.backend,
        "target": configuration.target_name,
        "drafter": configuration.drafter_name if k else "none",
        "K": k,
        "temperature": float(options.temperature),
        "prompt_id": case.prompt_id,
        "domain": case.domain,
        "split": case.split,
        "repetitive": is_repetitive(ar_tokens),
        "arm": "sd" if k else "ar",
        "identical": run.tokens == ar_tokens,
        "tokens": len(run.tokens),
        "target_passes": counts.rounds,
        "drafted": int(counts.drafted.sum()),
        "accepted": int(counts.accepted.sum()),
        "drafted_by_position": counts.drafted.tolist(),
        "tested_by_position": counts.tested.tolist(),
        "accepted_by_position": counts.accepted.tolist(),
        "seconds": draft + verify + overhead,
        "draft_seconds": draft,
        "verify_seconds": verify,
        "overhead_seconds": overhead,
        "predicted_seconds": predict_seconds(
            run.rounds, cost.curve, cost.draft if k else DraftCost(), cost.overhead, cost.token
        ),
    }


def is_repetitive(tokens: Sequence[int], period: int = 32, share: float = 0.5) -> bool:
    """Whether a text loops: more than `share` of its tokens repeat, in runs of at least one whole period, what stood
    1…`period` tokens before. A small model loops under greedy decoding, and a loop flatters every drafter.
    """
    values = np.asarray(tokens)
    looped = np.zeros(len(values), bool)
    for lag in range(1, min(period, len(values) - 1) + 1):
        same = np.concatenate([np.zeros(lag, bool), values[lag:] == values[:-lag]])
        run = 0
        for index, equal in enumerate(same):
            run = run + 1 if equal else 0
            if run >= max(lag, 8):
                looped[index - run + 1 : index + 1] = True
    return bool(looped.mean() > share) if len(values) else False
