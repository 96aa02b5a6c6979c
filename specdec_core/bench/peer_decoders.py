"""What another engine's own decoder looks like to a benchmark: a run of its loop under the same stopwatch as ours.

The stopwatch starts when the first pass hands over its tokens and stops with the last token, and counts the tokens
between: prefill is left out, whatever else the engine does is not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import numpy as np

from specdec_core.arrays import host
from specdec_core.forensics.near_ties import ROUNDING, first_difference
from specdec_core.protocol import Target
from specdec_core.sampling import Options
from specdec_core.topology import chain, forest

AR = "AR"
"""The method of a peer that drafts nothing."""


@dataclass(frozen=True)
class Setting:
    """What of a decoder is tuned; None where it has no such setting.

    draft     most draft tokens of a pass (its first, where a schedule changes it); 0 is autoregressive.
    ngram     longest suffix that is looked up.
    schedule  how the number of draft tokens changes, by the engine's own name for it.
    """

    draft: int = 0
    ngram: int | None = None
    schedule: str | None = None

    def __str__(self) -> str:
        parts = [f"draft {self.draft}", f"n-gram {self.ngram}" if self.ngram else "", self.schedule or ""]
        return ", ".join(part for part in parts if part)


PLAIN = Setting()
"""The only setting of autoregressive decoding."""


@dataclass(frozen=True)
class PeerRun:
    """One prompt decoded.

    tokens   all that were emitted.
    counted  those emitted within `seconds`: all but the first pass's, which is the prefill's.
    passes   target passes within `seconds`; None if the engine does not tell.
    """

    tokens: tuple[int, ...]
    counted: int
    seconds: float
    passes: int | None


class Stopwatch:
    """Takes an engine's tokens as they come."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._first = self._last = 0.0
        self._uncounted = self.emissions = 0

    def emit(self, tokens: Sequence[int]) -> None:
        """Tokens that were handed over at once, at this moment."""
        self._last = perf_counter()
        if not self.emissions:
            self._first, self._uncounted = self._last, len(tokens)
        self._tokens += tokens
        self.emissions += 1

    def run(self, passes: int | None) -> PeerRun:
        tokens = tuple(self._tokens)
        return PeerRun(tokens, len(tokens) - self._uncounted, self._last - self._first, passes)


Prompt = tuple[int, ...]
Decoder = Callable[[Prompt, Options, Setting], PeerRun]


@dataclass(frozen=True)
class Peer:
    """A decoder that a user could pick.

    backend   engine and format, 'llama.cpp Q8_0': what its autoregressive decoding and its speculation share.
    format    of the weights; `file` is the GGUF file's name, for engines that read one.
    method    AR, or how it drafts.
    settings  those to choose from.
    decoder   its own loop.
    judged    opens (the engine's passes as a target, the same weights in float64): differences are judged in them.
    threads   that it is told to use.
    exact     whether a token's bits do not depend on how many are computed with it: no difference is a near-tie then.
    """

    backend: str
    engine: str
    format: str
    method: str
    settings: tuple[Setting, ...]
    decoder: Decoder
    judged: Callable[[], tuple[Target, Target]] | None = None
    file: str | None = None
    threads: int | None = None
    exact: bool = False

    @property
    def name(self) -> str:
        return f"{self.backend} · {self.method}"

    @property
    def speculates(self) -> bool:
        return self.method != AR

    def run(self, prompt: Prompt, options: Options, setting: Setting = PLAIN) -> PeerRun:
        """Decode one prompt. ValueError for a setting that drafts where nothing can be drafted, or the reverse, and for
        an option that engines do not share: all but temperature, max_new_tokens, eos and seed."""
        if self.speculates != bool(setting.draft):
            raise ValueError(
                f"{self.name}: draft {setting.draft}, expected {'at least 1' if self.speculates else '0'}; choose one "
                "of its settings"
            )
        shared = Options(options.temperature, max_new_tokens=options.max_new_tokens, eos=options.eos, seed=options.seed)
        if options != shared:
            raise ValueError(
                f"{options}: engines share temperature, max_new_tokens, eos and seed only; leave the others as they are"
            )
        return self.decoder(tuple(prompt), options, setting)


def grid(drafts: Sequence[int], ngrams: Sequence[int] = (), schedule: str | None = None) -> tuple[Setting, ...]:
    """Settings of every draft length, with every n-gram size if there are such."""
    return tuple(Setting(draft, ngram, schedule) for ngram in (ngrams or (None,)) for draft in drafts)


def with_default(settings: Sequence[Setting], default: Setting) -> tuple[Setting, ...]:
    """The settings and the library's own, each once."""
    return tuple(dict.fromkeys((*settings, default)))


@dataclass(frozen=True)
class Difference:
    """Where greedy speculation first leaves its engine's own autoregressive text.

    index     tokens in common before it.
    gap       largest logit of the float64 reference there, minus the lower one of the two tokens'; None: not judged.
    epsilon   largest rounding error of these logits in the engine's passes, over the widths in question.
    near_tie  gap ≤ 2 epsilon. No control without a drafter is run, so it is a judgement and no certificate.
    """

    index: int
    gap: float | None = None
    epsilon: float | None = None
    near_tie: bool | None = None


def difference(
    peer: Peer, prompt: Sequence[int], expected: Sequence[int], emitted: Sequence[int], draft: int
) -> Difference | None:
    """The first difference of the peer's greedy output from its engine's autoregressive one, judged; None if equal.

    `draft`: most tokens of a draft, so that passes of 1 and of draft + 1 tokens are looked at.
    """
    index = first_difference(expected, emitted)
    if index is None:
        return None
    one_ended = index >= min(len(expected), len(emitted))
    if peer.exact or one_ended:  # no rounding explains either
        return Difference(index, near_tie=False)
    if peer.judged is None:
        return Difference(index)
    target, reference = peer.judged()
    prefix, tokens = np.array([*prompt, *expected[:index]], np.int64), [expected[index], emitted[index]]
    truth = logits_after(reference, prefix)
    tokens.append(int(truth.argmax()))
    errors = [np.abs(logits_after(target, prefix, width)[tokens] - truth[tokens]).max() for width in {1, draft + 1}]
    # An error that no rounding explains excuses nothing: a wrong kernel would excuse itself.
    epsilon = min(float(max(errors)), ROUNDING * float(np.abs(truth).max()))
    gap = float(truth.max() - truth[tokens].min())
    return Difference(index, gap, epsilon, gap <= 2 * epsilon)


def logits_after(target: Target, tokens: np.ndarray, width: int = 1) -> np.ndarray:
    """Logits `[V]` (float64) after `tokens`, the last of them being the last of a pass over `width`."""
    width = min(width, len(tokens))
    state, slots = target.new_state(1, len(tokens)), np.array([0])
    target.prefill(state, slots, [tokens[: len(tokens) - width + 1]])
    found = target.verify(state, slots, tokens[len(tokens) - width :], forest([chain(width)])).logits
    return np.asarray(host(found[width - 1]), np.float64)


def seeded(options: Options, index: int) -> Options:
    """The options of the prompt of this index: sampled prompts draw from streams of their own."""
    return replace(options, seed=options.seed + index)
