"""Which rows of an answer are right: token by token against autoregressive decoding, near-ties told from errors.

What a decoder returns behind the end token is its own affair if it is one token repeated (padding); anything else there
is a row that went on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from specdec_core.forensics.batch_ties import census_of_batch, continuation
from specdec_core.forensics.diagnosis_experiments import Experiment, Prompt, Run
from specdec_core.forensics.near_ties import ROUNDING, Divergence, first_difference, logits_after
from specdec_core.protocol import Target
from specdec_core.rows import Request
from specdec_core.sampling import Options

SAME, TIE, ROUNDED = "same", "certified near-tie", "within rounding"
SHORT, LONG, WRONG, FAILED = "too short", "too long", "wrong", "failed"
REPLAYED, AGAIN_ALONE, AGAIN_TOGETHER = "replayed batch", "decoder restarted alone", "decoder restarted in the batch"


@dataclass(frozen=True)
class Observation:
    """One row of one experiment.

    row, padding   which of the user's prompts; tokens shorter than the longest of its batch.
    special        the prompt holds an end token, or another that masks are made from.
    outcome        the worst that was found in the row; index, expected and found: of the first place where it was. −1
                   for what is not there.
    how            a certified near-tie's control; what a failed decoder raised.
    gap, epsilon   of a near-tie, else of the first wrong token (float64 reference; 0 if there is none).
    tokens         cut at the end token.
    round          that emitted the token at `index`; counts: Run.counts. The rest: rounds before it in which a draft
                   token of this row was rejected, a draft of it was accepted whole, rows got unequally many tokens; and
                   whether the token at `index` was an accepted draft token. False where unknown.
    """

    experiment: str
    row: int
    place: int
    padding: int
    special: bool
    outcome: str
    index: int = -1
    expected: int = -1
    found: int = -1
    how: str = ""
    gap: float = 0.0
    epsilon: float = 0.0
    tokens: tuple[int, ...] = ()
    round: int = -1
    counts: tuple[tuple[int, ...], ...] | None = None
    after_rejection: bool = False
    after_whole: bool = False
    after_unequal: bool = False
    kept: bool = False

    @property
    def bad(self) -> bool:
        return self.outcome in (SHORT, LONG, WRONG)


Restart = Callable[[Sequence[Prompt]], Run]
"""The first token that the decoder under test emits after each of these prompts, its caches fresh."""


class Judge:
    """What rows should have been, and what excuses them.

    target     trusted; decodes every prompt alone, without a drafter.
    reference  the same weights in float64; None: nothing is excused.
    restart    asks the decoder itself, where no replay of its rounds can be had.
    """

    def __init__(
        self, target: Target, options: Options, reference: Target | None, restart: Restart, special: Sequence[int]
    ) -> None:
        self._target, self._options, self._reference = target, options, reference
        self._restart, self._special = restart, set(special)
        # The same row of the same batch comes again in most experiments.
        self._known: dict[tuple[Prompt, tuple[int, ...]], tuple[int, ...]] = {}
        self._margins: dict[tuple[Prompt, int, int], tuple[float, float]] = {}

    def observe(self, experiment: Experiment, run: Run) -> list[Observation]:
        """One observation of each row that the experiment looks at."""
        replayed = _Replayed(self, experiment, run)
        found = []
        for place, row in enumerate(experiment.rows):
            if row < 0:
                continue
            prompt = experiment.prompts[place]
            blank = Observation(
                experiment.name, row, place, experiment.padding[place], bool(self._special & set(prompt)), SAME
            )
            if run.error:
                found.append(replace(blank, outcome=FAILED, how=run.error))
                continue
            seen = self._compare(blank, prompt, run.tokens[place], experiment, replayed)
            found.append(_placed(seen, run))
        return found

    def right(self, prompt: Prompt, shared: tuple[int, ...] = ()) -> tuple[int, ...]:
        """The whole output that autoregressive decoding gives, if it begins with `shared`."""
        if (prompt, shared) not in self._known:
            added = continuation(self._target, [Request(prompt, self._options)])(0, shared)
            self._known[prompt, shared] = (*shared, *added)
        return self._known[prompt, shared]

    def census(self, experiment: Experiment, run: Run) -> list[list[Divergence]]:
        """Of every row, by a replay of the run's rounds; nothing where they cannot be replayed."""
        if self._reference is None or run.rounds is None:
            return [[] for _ in experiment.prompts]
        options = replace(self._options, max_new_tokens=experiment.cap)
        requests = [Request(prompt, options) for prompt in experiment.prompts]
        expected = [self.right(prompt)[: experiment.cap] for prompt in experiment.prompts]
        try:
            return census_of_batch(
                self._target, self._reference, requests, run.rounds, expected, continuation(self._target, requests)
            )
        except (ValueError, RuntimeError):  # rounds of another loop, which a pass of this target cannot have made
            return [[] for _ in experiment.prompts]

    def _compare(
        self, blank: Observation, prompt: Prompt, raw: tuple[int, ...], experiment: Experiment, replayed: _Replayed
    ) -> Observation:
        tokens, too_long = _cut(raw, experiment.cap, self._options.eos)
        seen = replace(blank, tokens=tokens)
        expected = self.right(prompt)[: experiment.cap]
        while (index := first_difference(expected, tokens)) is not None:
            if index >= len(tokens):
                return replace(seen, outcome=SHORT, index=index, expected=expected[index], found=-1)
            if index >= len(expected):
                return replace(seen, outcome=LONG, index=index, expected=-1, found=tokens[index])
            here = replace(blank, tokens=tokens, index=index, expected=expected[index], found=tokens[index])
            here = self._excused(here, prompt, experiment, replayed)
            if here.outcome == WRONG:
                return replace(here, outcome=SHORT if self._ends(raw[index:]) else WRONG)
            if seen.outcome == SAME or (seen.outcome, here.outcome) == (TIE, ROUNDED):
                seen = here
            expected = self.right(prompt, tokens[: index + 1])[: experiment.cap]
        if too_long:
            after = raw[len(tokens)] if len(raw) > len(tokens) else -1
            return replace(seen, outcome=LONG, index=len(tokens), expected=-1, found=after)
        return seen

    def _ends(self, rest: tuple[int, ...]) -> bool:
        """Whether a row ends here: with an end token, or with nothing but padding that is known as such."""
        return rest[0] in self._options.eos or (rest[0] in self._special and len(set(rest)) == 1)

    def _excused(self, here: Observation, prompt: Prompt, experiment: Experiment, replayed: _Replayed) -> Observation:
        """The observation with the outcome of its token: a near-tie, certified or not, or wrong."""
        if self._reference is None:
            return replace(here, outcome=WRONG)
        told = replayed.at(here.place, here.index)
        if told is None or (told.expected, told.emitted) != (here.expected, here.found):
            gap, epsilon = self._margin(prompt, here)
        elif told.certified:
            return replace(here, outcome=TIE, how=REPLAYED, gap=told.gap, epsilon=told.epsilon)
        else:
            gap, epsilon = told.gap, told.epsilon
        here = replace(here, gap=gap, epsilon=epsilon)
        if not gap <= 2 * epsilon:
            return replace(here, outcome=WRONG)
        how = "" if told is not None else self._control(here, prompt, experiment, replayed)
        return replace(here, outcome=TIE if how else ROUNDED, how=how)

    def _margin(self, prompt: Prompt, here: Observation) -> tuple[float, float]:
        """Gap and ε where the decoder's passes are unknown: ε is then the target's largest error of *any* logit there,
        which stands for an error of the decoder's own size that cannot be measured. Capped as in near_ties.py."""
        assert self._reference is not None
        prefix = (*prompt, *here.tokens[: here.index])
        case = prefix, here.expected, here.found
        if case not in self._margins:
            fed = np.array(prefix, np.int64)
            truth, found = (logits_after(model, fed, width=1)[-1] for model in (self._reference, self._target))
            gap = float(truth.max() - truth[[here.expected, here.found]].min())
            error = float(np.abs(found - truth).max())
            self._margins[case] = gap, min(error, ROUNDING * float(np.abs(truth).max()))
        return self._margins[case]

    def _control(self, here: Observation, prompt: Prompt, experiment: Experiment, replayed: _Replayed) -> str:
        """How the decoder itself emits the token again from a fresh cache, which no earlier round can have spoiled."""
        prefix = (*prompt, *here.tokens[: here.index])
        if self._restart([prefix]).tokens[0] == (here.found,):
            return AGAIN_ALONE
        cut = [_cut(raw, experiment.cap, self._options.eos)[0][: here.index] for raw in replayed.run.tokens]
        together = [(*one, *tokens) for one, tokens in zip(experiment.prompts, cut, strict=True)]
        again = self._restart(together).tokens[here.place] == (here.found,)
        return AGAIN_TOGETHER if again else ""


class _Replayed:
    """The census of one run, taken when it is first asked for."""

    def __init__(self, judge: Judge, experiment: Experiment, run: Run) -> None:
        self._judge, self._experiment, self.run = judge, experiment, run
        self._census: list[list[Divergence]] | None = None

    def at(self, place: int, index: int) -> Divergence | None:
        if self._census is None:
            self._census = self._judge.census(self._experiment, self.run)
        return next((each for each in self._census[place] if each.index == index), None)


def _cut(raw: tuple[int, ...], cap: int, eos: Sequence[int]) -> tuple[tuple[int, ...], bool]:
    """Tokens up to the end token or the cap, and whether the row went on behind it."""
    end = next((index + 1 for index, token in enumerate(raw[:cap]) if token in eos), None)
    if end is None:
        return raw[:cap], len(raw) > cap
    return raw[:end], len(set(raw[end:])) > 1


def _placed(seen: Observation, run: Run) -> Observation:
    """The observation with what the rounds before its token tell."""
    if run.steps is None or seen.index < 0:
        return replace(seen, counts=run.counts)
    place, done, offset, here = seen.place, 0, 0, len(run.steps)
    for number, steps in enumerate(run.steps):
        emitted = steps[place].emitted if place in steps else 0
        if done <= seen.index < done + emitted:
            here, offset = number, seen.index - done
            break
        done += emitted
    before = run.steps[:here]
    own = [steps[place] for steps in before if place in steps]
    accepted = run.steps[here][place].accepted if here < len(run.steps) else None
    return replace(
        seen,
        round=here if here < len(run.steps) else -1,
        counts=run.counts,
        after_rejection=any(step.rejected for step in own),
        after_whole=any(step.whole for step in own),
        after_unequal=any(len({step.emitted for step in steps.values()}) > 1 for steps in before),
        kept=accepted is not None and offset < accepted,
    )
