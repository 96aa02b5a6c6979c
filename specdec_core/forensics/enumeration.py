"""Exact output laws: the production decoder run once for every way that chance can go, with that way's weight.

A decoder asks chance for decisions only (randomness.py), so a source that replays every prefix of decisions walks the
whole tree of what can happen, and the sum of the weights of all ways to an output is its probability: no noise, no
sample size. What it cannot see are faults of the real source (a uniform used twice, a generator seeded again); those
are for sampled tests.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import TypeVar

import numpy as np

from specdec_core.decode import generate
from specdec_core.protocol import Drafter, Target
from specdec_core.rows import Detokenize, Request
from specdec_core.sampling import Options

Result = TypeVar("Result", bound=Hashable)
Tokens = tuple[int, ...]
SUM = 1e-12
"""How far the probabilities that a decoder offers may be from one."""


class NotALaw(ArithmeticError):
    """A decoder asked for a decision whose probabilities are none."""


class Script:
    """`Decisions` that replays a prefix of choices and then takes the first possible one each time."""

    def __init__(self, prefix: tuple[int, ...] = ()):
        self._prefix = prefix
        self.taken: list[int] = []
        self.widths: list[int] = []
        self.weight = 1.0

    def accept(self, probability: float) -> bool:
        if not -SUM <= probability <= 1 + SUM:
            raise NotALaw(f"accept with probability {probability}: expected 0…1")
        yes = min(max(probability, 0.0), 1.0)
        return bool(self._decide([1.0 - yes, yes]))

    def choose(self, law: np.ndarray) -> int:
        if not ((law >= 0).all() and abs(law.sum() - 1) < SUM):
            raise NotALaw(f"choose from {law}: expected probabilities that sum to one")
        return self._decide(law.tolist())

    def _decide(self, weights: list[float]) -> int:
        possible = [value for value, weight in enumerate(weights) if weight > 0]
        place = len(self.taken)
        number = self._prefix[place] if place < len(self._prefix) else 0
        self.taken.append(number)
        self.widths.append(len(possible))
        self.weight *= weights[possible[number]]
        return possible[number]


def branches(run: Callable[[Script], Result]) -> Iterator[tuple[Result, float]]:
    """Results of `run` in every branch of its decisions, each with the branch's probability."""
    open_prefixes: list[tuple[int, ...]] = [()]
    while open_prefixes:
        prefix = open_prefixes.pop()
        script = Script(prefix)
        yield run(script), script.weight
        for place in range(len(prefix), len(script.taken)):
            open_prefixes += [(*script.taken[:place], other) for other in range(1, script.widths[place])]


def exact_law(run: Callable[[Script], Result]) -> dict[Result, float]:
    """Probability of every result of `run`."""
    return _summed(branches(run))


def output_law(
    target: Target,
    requests: Sequence[Request],
    drafter: Drafter | None,
    *,
    slots: int | None = None,
    detokenize: Detokenize | None = None,
) -> tuple[dict[tuple[Tokens, ...], float], int]:
    """Law of what the production loop emits for a batch, one tuple of tokens a row; and the number of branches."""

    def run(decisions: Script) -> tuple[Tokens, ...]:
        how = {"slots": slots, "detokenize": detokenize, "source": lambda seed, key, purpose: decisions}
        return tuple(output.tokens for output in generate(target, requests, drafter, **how))

    found = list(branches(run))
    return _summed(found), len(found)


def sequence_law(
    logits_after: Callable[[Tokens], np.ndarray],
    request: Request,
    context: int,
    detokenize: Detokenize | None = None,
) -> dict[Tokens, float]:
    """Law of the output by the definition of autoregressive sampling: no decoder, no cache, no code shared with them.

    `logits_after(prefix)` `[V]` are the target's logits after prompt and output so far. Stop strings are compared with
    the end of the text, so a token has to be a whole number of characters here.
    """
    options, prompt = request.options, request.prompt
    found: dict[Tokens, float] = {}

    def grow(output: Tokens, weight: float) -> None:
        p = plain_law(logits_after((*prompt, *output)), options, prompt, output)
        for token in np.flatnonzero(p).tolist():
            longer = (*output, token)
            text = detokenize(longer) if detokenize and options.stop else ""
            may_end = len(longer) >= options.min_new_tokens
            ends = may_end and (token in options.eos or any(text.endswith(stop) for stop in options.stop))
            full = len(longer) == options.max_new_tokens or len(prompt) + len(longer) == context
            if ends or full:
                found[longer] = weight * p[token]
            else:
                grow(longer, weight * p[token])

    grow((), 1.0)
    return found


def plain_law(logits: np.ndarray, options: Options, prompt: Sequence[int], output: Sequence[int]) -> np.ndarray:
    """The law `[V]` of the next token, written out token by token from the options' definitions (sampling.Options)."""
    values = [float(value) for value in logits]
    for token in sorted({*prompt, *output} & set(range(len(values)))):
        penalty = options.repetition_penalty
        values[token] = values[token] / penalty if values[token] > 0 else values[token] * penalty
    for token in sorted(set(output) & set(range(len(values)))):
        values[token] -= options.presence_penalty
    if len(output) < options.min_new_tokens:
        for token in options.eos:
            values[token] = -np.inf
    if options.temperature == 0:
        best = values.index(max(values))
        return np.array([float(token == best) for token in range(len(values))])
    weights = [float(np.exp((value - max(values)) / options.temperature)) for value in values]
    if 0 < options.top_k < len(weights):
        kth = sorted(weights, reverse=True)[options.top_k - 1]
        weights = [weight if weight >= kth else 0.0 for weight in weights]
    weights = _shares(weights)
    if options.top_p < 1:
        kept, mass = set(), 0.0
        for token in sorted(range(len(weights)), key=lambda token: -weights[token]):
            kept.add(token)
            mass += weights[token]
            if mass >= options.top_p:
                break
        weights = [weight if token in kept else 0.0 for token, weight in enumerate(weights)]
    floor = options.min_p * max(weights)
    return np.array(_shares([weight if weight >= floor else 0.0 for weight in weights]))


def product_law(laws: Sequence[Mapping[Tokens, float]]) -> dict[tuple[Tokens, ...], float]:
    """Joint law of independent rows."""
    joint: dict[tuple[Tokens, ...], float] = {(): 1.0}
    for one in laws:
        joint = {(*done, each): weight * value for done, weight in joint.items() for each, value in one.items()}
    return joint


def distance(found: Mapping[Result, float], expected: Mapping[Result, float]) -> float:
    """Largest difference between two laws at any result."""
    return max(abs(found.get(key, 0.0) - expected.get(key, 0.0)) for key in {*found, *expected})


def total_variation(found: Mapping[Result, float], expected: Mapping[Result, float]) -> float:
    """Half the sum of all differences between two laws."""
    return sum(abs(found.get(key, 0.0) - expected.get(key, 0.0)) for key in {*found, *expected}) / 2


def _summed(weighted: Iterator[tuple[Result, float]] | list[tuple[Result, float]]) -> dict[Result, float]:
    found: dict[Result, float] = defaultdict(float)
    for result, weight in weighted:
        found[result] += weight
    return dict(found)


def _shares(weights: list[float]) -> list[float]:
    total = sum(weights)
    return [weight / total for weight in weights]
