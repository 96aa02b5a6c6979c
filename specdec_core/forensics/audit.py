"""An audit of any sampler: do its tokens follow the target's law?

The decoder is a callable; nothing is known of its inside. Its sequences are scored under the target's own law, compared
with autoregressive ones of the same prompts (statistics/battery.py), and their endings are checked exactly. That no
test rejects is not taken for proof: a decoder is called lossless only if its bias is *shown* to be small.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specdec_core.decode import decode, generate
from specdec_core.forensics.audit_report import Finding, Report
from specdec_core.forensics.near_ties import examine
from specdec_core.forensics.scoring import Scorer
from specdec_core.protocol import Drafter, LengthPolicy, RowRound, Target
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.statistics import battery
from specdec_core.statistics.battery import DELTA, EQUIVALENCE, Sample
from specdec_core.statistics.teacher_forced import directed
from specdec_core.statistics.two_sample import choose_bins, pad

Decoder = Callable[[tuple[int, ...], int], Sequence[int] | Sequence[Sequence[int]]]
"""decoder(prompt, seed): the new tokens of one continuation, the end token included, or the tokens of each round."""

BINS = 200
LEAST = 10
"""Bins of the two-sample χ² at most; tokens that there must be for any test."""

_SLOTS = 32
_DECODER, _REFERENCE, _PILOT, _SCORES = range(4)  # random streams of their own


def audit(
    decoder: Decoder,
    target: Target,
    prompts: Sequence[Sequence[int]],
    options: Options,
    *,
    alternative: Target | None = None,
    reference: Target | None = None,
    repeats: int = 1,
    delta: float = DELTA,
    alpha: float = 0.05,
    seed: int = 0,
    slots: int = _SLOTS,
) -> Report:
    """Draw `repeats` sequences a prompt from `decoder` and hold them against `target` under `options`.

    alternative  the drafter's model, which a wrong decoder would lean to: tests look in its direction.
    reference    the target in float64, if greedy near-ties are to be certified. The decoder must tell its rounds, whose
                 passes are taken to be as wide as what they emitted.
    alpha        of the whole family of tests that may reject (Holm); delta: what bias counts as none.
    slots        rows that are decoded together for the autoregressive comparison.

    A decoder that raises costs that one sequence (`failures`). Raises ValueError for no prompts or repeats and for stop
    strings (tokens are compared, not text), and RequestError for prompts or options that the target cannot decode.
    """
    if not len(prompts) or repeats < 1:
        raise ValueError(f"{len(prompts)} prompts and {repeats} repeats: expected at least one of each")
    if options.stop:
        raise ValueError(f"stop strings {options.stop}: an audit compares tokens; end rows by eos or max_new_tokens")
    judge = _Judge(target, [tuple(map(int, prompt)) for prompt in prompts], options, seed, slots)
    once = judge.autoregressive(_PILOT, 1)  # first: what the target cannot decode is told before anything long runs
    drawn, failures = judge.draw(decoder, repeats)
    violations = [found for each in drawn for found in each.violations]
    report = Report(options, sum(len(each.tokens) for each in drawn), len(drawn), failures=tuple(failures),
                    alpha=alpha, delta=delta)  # fmt: skip
    if drawn and all(each.rounds is not None for each in drawn):
        report = replace(report, rounds=sum(len(each.rounds or ()) for each in drawn))
    if options.greedy:
        found, ties = judge.greedy(drawn, once, reference)
        return replace(report, violations=(*violations, *found), near_ties=ties)
    report = replace(report, violations=tuple(violations))
    if report.tokens < LEAST:
        return report
    sample = judge.score(drawn, Scorer(target, alternative))
    kept = {(each.prompt, each.repeat) for each in drawn}
    compared = [each for each in judge.autoregressive(_REFERENCE, repeats) if (each.prompt, each.repeat) in kept]
    pilot = _unscored(once)
    bins = battery.merged_bins(choose_bins(pad(pilot.sequences), BINS), pilot, sample.tokens)
    results = battery.one_sample(sample) | battery.two_sample(sample, _unscored(compared), bins, seed=seed)
    return replace(
        report,
        results=results | {EQUIVALENCE: battery.equivalent(sample, delta)},
        adjusted=battery.adjusted(results),
        bias=directed(sample.in_set, sample.mass),
    )


def ours(target: Target, drafter: Drafter | None, policy: LengthPolicy | None, options: Options) -> Decoder:
    """Our own loop as a decoder that tells its rounds; no drafter and no policy: autoregressive."""

    def decoder(prompt: tuple[int, ...], seed: int) -> list[tuple[int, ...]]:
        request = Request(prompt, replace(options, seed=seed), policy)
        return [row.emitted for each in decode(target, [request], drafter) for row in each.rows]

    return decoder


@dataclass(frozen=True)
class _Sequence:
    """One continuation, cut where it should have ended. `rounds`: how many tokens each emitted, if that is known."""

    prompt: int
    repeat: int
    tokens: tuple[int, ...]
    rounds: tuple[int, ...] | None = None
    violations: tuple[Finding, ...] = ()

    @property
    def offsets(self) -> list[int]:
        """Each token's place in its round, 0 where rounds are unknown."""
        if self.rounds is None:
            return [0] * len(self.tokens)
        return [place for size in self.rounds for place in range(size)][: len(self.tokens)]


class _Judge:
    """The prompts and options of one audit, and what they allow."""

    def __init__(
        self, target: Target, prompts: Sequence[tuple[int, ...]], options: Options, seed: int, slots: int
    ) -> None:
        self._target, self._prompts, self._options = target, prompts, options
        self._seed, self._slots = seed, slots

    def seed(self, purpose: int, prompt: int, repeat: int) -> int:
        """One of 32 bits, which any library takes."""
        return int(np.random.SeedSequence(self._seed, spawn_key=(purpose, repeat, prompt)).generate_state(1)[0])

    def draw(self, decoder: Decoder, repeats: int) -> tuple[list[_Sequence], list[Finding]]:
        drawn, failures = [], []
        for repeat in range(repeats):
            for number, prompt in enumerate(self._prompts):
                try:
                    rounds, told = _read(decoder(prompt, self.seed(_DECODER, number, repeat)))
                    drawn.append(self._cut(number, repeat, rounds, told))
                except Exception as error:  # whatever a foreign decoder raises is a finding, and no end of the audit
                    failures.append(Finding(number, repeat, f"{type(error).__name__}: {error}"))
        return drawn, failures

    def autoregressive(self, purpose: int, repeats: int) -> list[_Sequence]:
        """Sequences of our own loop without a drafter."""
        places = [(number, repeat) for repeat in range(repeats) for number in range(len(self._prompts))]
        requests = [Request(self._prompts[n], replace(self._options, seed=self.seed(purpose, n, r))) for n, r in places]
        outputs = generate(self._target, requests, slots=self._slots)
        return [_Sequence(*place, output.tokens) for place, output in zip(places, outputs, strict=True)]

    def score(self, drawn: Sequence[_Sequence], scorer: Scorer) -> Sample:
        scores = [
            scorer.score(self._prompts[each.prompt], each.tokens, self._options, self.seed(_SCORES, *_place(each)))
            for each in drawn
            if each.tokens
        ]
        names = ("pit", "in_set", "mass", "ratio")
        joined: dict[str, Any] = {name: np.concatenate([getattr(one, name) for one in scores]) for name in names}
        offsets = np.array([offset for each in drawn for offset in each.offsets], int)
        return replace(_unscored(drawn), offsets=offsets, **joined)

    def greedy(
        self, drawn: Sequence[_Sequence], expected: Sequence[_Sequence], reference: Target | None
    ) -> tuple[list[Finding], int]:
        """Sequences that are not the expected ones, and how many of the others differ by a certified near-tie."""
        found, ties = [], 0
        for each in drawn:
            right = expected[each.prompt].tokens
            if each.tokens == right or each.violations:  # what breaks the options is told already
                continue
            if reference is not None and self._certified(each, right, reference):
                ties += 1
                continue
            pairs = enumerate(zip(each.tokens, right, strict=False))
            index = next((i for i, (one, other) in pairs if one != other), min(len(each.tokens), len(right)))
            found.append(Finding(*_place(each), f"differs from autoregressive decoding at token {index}"))
        return found, ties

    def _certified(self, each: _Sequence, expected: tuple[int, ...], reference: Target) -> bool:
        sizes, done, rounds = each.rounds or (1,) * len(each.tokens), 0, []
        for size in sizes:
            emitted = each.tokens[done : done + size]
            rounds.append(RowRound(0, 0, done, (1,) * (size - 1), size - 1, "bonus", emitted))
            done += size
        found = examine(self._target, reference, self._prompts[each.prompt], expected, each.tokens, rounds)
        return found is None or found.certified

    def _cut(self, number: int, repeat: int, rounds: Sequence[Sequence[int]], told: bool) -> _Sequence:
        """The sequence as far as the options allow it, with the violation that ended it."""
        options, tokens = self._options, [token for each in rounds for token in each]
        most = min(options.max_new_tokens, self._target.context - len(self._prompts[number]))
        end, what = len(tokens), ""
        for index, token in enumerate(tokens):
            if index == most:
                end, what = index, f"{len(tokens)} tokens: expected at most {most}"
            elif not 0 <= token < self._target.vocabulary:
                end, what = index, f"token {token} at {index}: expected 0…{self._target.vocabulary - 1}"
            elif token in options.eos and index < options.min_new_tokens:
                end, what = index, f"end token at {index}: expected none before {options.min_new_tokens} tokens"
            elif token in options.eos and index + 1 < len(tokens):
                end, what = index + 1, f"{len(tokens) - index - 1} tokens after the end token at {index}"
            if what:
                break
        if not what and len(tokens) < most and tokens[-1] not in options.eos:
            what = f"ends after {len(tokens)} tokens without an end token: expected {most}"
        sizes = tuple(len(each) for each in rounds) if told else None
        broken = (Finding(number, repeat, what),) if what else ()
        return _Sequence(number, repeat, tuple(tokens[:end]), sizes, broken)


def _read(returned: Any) -> tuple[list[list[int]], bool]:
    """What a decoder returned as tokens by round, and whether it told rounds. ValueError if it is neither."""
    items = list(returned) if returned is not None else []
    flat = all(np.ndim(item) == 0 for item in items)
    rounds = [items] if flat else [list(item) for item in items]
    rounds = [each for each in rounds if each]
    if not rounds:
        raise ValueError("returned no tokens: expected one or more new tokens, the end token included")
    wrong = [token for each in rounds for token in each if int(token) != token]
    if wrong:
        raise ValueError(f"returned {wrong[0]!r}: expected token ids, or one list of token ids a round")
    return [[int(token) for token in each] for each in rounds], not flat


def _place(each: _Sequence) -> tuple[int, int]:
    return each.prompt, each.repeat


def _unscored(sequences: Sequence[_Sequence]) -> Sample:
    nothing = np.empty(0)
    strata = [each.prompt for each in sequences]
    return Sample([each.tokens for each in sequences], strata, nothing, nothing, nothing, nothing, nothing)
