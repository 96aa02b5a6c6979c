"""From logits to the law that a token is drawn from.

The law of the next token is a function of the raw logits, the row's options and the row's history *including* the
drafted tokens before it. Target and drafter use the same function; laws are float64 whatever the engine's dtype.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from specdec_core.arrays import Array, host


class OptionsError(ValueError):
    """An option outside its range."""


class LogitsError(FloatingPointError):
    """The model produced logits that no law can be made of."""


@dataclass(frozen=True)
class Options:
    """How one row is decoded. Every option is per row.

    temperature         0 is greedy. Otherwise logits are divided by it.
    top_k               keep the k most probable tokens (ties with the k-th are kept); 0 keeps all.
    top_p               keep the smallest set of most probable tokens whose probability reaches top_p, in (0, 1].
    min_p               drop tokens under min_p × the largest probability, in [0, 1].
    repetition_penalty  > 0: logits of tokens in prompt or output are divided (positive) or multiplied (negative) by it.
    presence_penalty    subtracted from the logits of tokens in the output.
    max_new_tokens      the row ends with this many; min_new_tokens: no end token or stop string before as many.
    eos                 token ids that end the row (emitted as its last token); never looked for in the prompt.
    stop                strings that end the row when they appear in its text.
    seed                of the row's random streams; logprobs: report the log-probability of each emitted token.

    Order of the warps: penalties, end-token ban, temperature, top-k, top-p, min-p (as in transformers).
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    max_new_tokens: int = 128
    min_new_tokens: int = 0
    eos: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    seed: int = 0
    logprobs: bool = False

    def __post_init__(self) -> None:
        checks = [
            (np.isfinite(self.temperature) and self.temperature >= 0, "temperature", "a number ≥ 0 (0 is greedy)"),
            (self.top_k >= 0, "top_k", "an integer ≥ 0 (0 keeps all tokens)"),
            (0 < self.top_p <= 1, "top_p", "a number in (0, 1]"),
            (0 <= self.min_p <= 1, "min_p", "a number in [0, 1]"),
            (0 < self.repetition_penalty < np.inf, "repetition_penalty", "a number > 0"),
            (np.isfinite(self.presence_penalty), "presence_penalty", "a finite number"),
            (self.max_new_tokens >= 1, "max_new_tokens", "an integer ≥ 1"),
            (0 <= self.min_new_tokens <= self.max_new_tokens, "min_new_tokens", "an integer in 0…max_new_tokens"),
            (self.seed >= 0, "seed", "an integer ≥ 0"),
            (not isinstance(self.stop, str) and all(self.stop), "stop", "a tuple of non-empty strings"),
        ]
        for fine, name, expected in checks:
            if not fine:
                raise OptionsError(f"{name} {getattr(self, name)!r}: expected {expected}")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def penalised(self) -> bool:
        return self.repetition_penalty != 1 or self.presence_penalty != 0


@dataclass(frozen=True)
class History:
    """The tokens before the one to be drawn: `prompt` `[P]` and `output` `[m]`, drafted ones on the path included."""

    prompt: np.ndarray
    output: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))

    def extended(self, tokens: np.ndarray) -> History:
        """With the tokens of a path behind it; the history itself is unchanged."""
        return History(self.prompt, np.concatenate([self.output, tokens]))


def has_processors(options: Options, emitted: int) -> bool:
    """Whether logits are changed before temperature, so that the raw argmax is not the greedy token."""
    return options.penalised or (emitted < options.min_new_tokens and bool(options.eos))


def processed(logits: np.ndarray, options: Options, history: History) -> np.ndarray:
    """Logits `[V]` in float64 after penalties and the end-token ban."""
    logits = np.array(logits, np.float64)
    if options.repetition_penalty != 1:
        seen = _known(np.concatenate([history.prompt, history.output]), len(logits))
        values = logits[seen]
        logits[seen] = np.where(values > 0, values / options.repetition_penalty, values * options.repetition_penalty)
    if options.presence_penalty != 0:
        logits[_known(history.output, len(logits))] -= options.presence_penalty
    if len(history.output) < options.min_new_tokens and options.eos:
        logits[_known(np.array(options.eos, np.int64), len(logits))] = -np.inf
    return logits


def _known(tokens: np.ndarray, vocabulary: int) -> np.ndarray:
    """Distinct tokens, without those that a drafter of a smaller vocabulary lacks."""
    distinct = np.unique(tokens)
    return distinct[distinct < vocabulary]


def require_finite_peak(peak: float, where: str) -> None:
    """The largest logit is finite unless some logit is NaN or +inf, or all are -inf: one look finds all three."""
    if not np.isfinite(peak):
        raise LogitsError(
            f"the largest logit of {where} is {peak}: expected a finite number; "
            "look for overflow (float16?), broken weights, or a mask that hides every token"
        )


def law(logits: np.ndarray, options: Options, history: History) -> np.ndarray:
    """The law `[V]` (float64, sums to one) that the next token is drawn from; greedy: all mass on the first argmax."""
    logits = processed(logits, options, history)
    best = int(np.argmax(logits))  # NaN counts as the largest
    require_finite_peak(logits[best], "a token's law")
    if options.greedy:
        one_hot = np.zeros(len(logits))
        one_hot[best] = 1.0
        return one_hot
    probabilities = np.exp((logits - logits[best]) / options.temperature)
    if 0 < options.top_k < len(probabilities):
        kth = np.partition(probabilities, -options.top_k)[-options.top_k]
        probabilities[probabilities < kth] = 0.0
    probabilities /= probabilities.sum()
    if options.top_p < 1:
        _keep_nucleus(probabilities, options.top_p)
    if options.min_p > 0:
        probabilities[probabilities < options.min_p * probabilities.max()] = 0.0
    return probabilities / probabilities.sum()


def _keep_nucleus(probabilities: np.ndarray, mass: float) -> None:
    """Zero all but the smallest set of most probable tokens that reaches `mass`, ties in favour of lower ids, in place.

    A nucleus is small: its head is sorted first, the whole vocabulary only if the head does not reach the mass.
    """
    size = len(probabilities)
    for head in dict.fromkeys((min(512, size), size)):
        floor = np.partition(probabilities, size - head)[size - head]
        # All that tie with the last of the head belong to it, or their order would depend on the partition.
        candidates = np.flatnonzero(probabilities >= floor)
        order = candidates[np.argsort(-probabilities[candidates], kind="stable")]
        cumulative = np.cumsum(probabilities[order])
        if cumulative[-1] >= mass or head == size:
            kept = order[: int(np.searchsorted(cumulative, mass)) + 1]
            values = probabilities[kept]
            probabilities[:] = 0.0
            probabilities[kept] = values
            return


def greedy_tokens(logits: Array) -> np.ndarray:
    """First argmax of each row of raw logits `[N, V]` → `[N]`, on the host so that ties break alike everywhere."""
    values = host(logits)
    best = values.argmax(axis=-1)
    peaks = values[np.arange(len(values)), best]
    if not np.isfinite(peaks).all():
        node = int(np.flatnonzero(~np.isfinite(peaks))[0])
        require_finite_peak(float(peaks[node]), f"node {node}")
    return best


def log_probability(logits: np.ndarray, token: int) -> float:
    """Log-probability of `token` under the softmax of raw logits `[V]`: natural logarithm, no warps."""
    logits = np.asarray(logits, np.float64)
    peak = logits.max()
    return float(logits[token] - peak - np.log(np.exp(logits - peak).sum()))
