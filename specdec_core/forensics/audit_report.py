"""What an audit of a sampler found (audit.py), and what may be said of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from specdec_core.sampling import Options
from specdec_core.statistics.battery import DELTA, EQUIVALENCE
from specdec_core.statistics.results import TestResult
from specdec_core.statistics.teacher_forced import Directed

SHOWN = 0.05
"""Level of the equivalence test, pre-registered like its delta: `alpha` is of the tests that may reject."""


@dataclass(frozen=True)
class Finding:
    """What one sequence showed: `prompt` and `repeat` count from 0."""

    prompt: int
    repeat: int
    what: str

    def __str__(self) -> str:
        return f"prompt {self.prompt}, sequence {self.repeat}: {self.what}"


@dataclass(frozen=True)
class Report:
    """What an audit found.

    results     by test: the family of battery.py, the nominal χ² (no part of it) and the equivalence test; empty if
                the options are greedy or there were too few tokens.
    adjusted    Holm-adjusted p-values of the family.
    bias        mean excess of tokens that the alternative favours, its interval, and the bound on the total variation.
    violations  exact findings: an ending that the options do not allow, a token outside the vocabulary, a greedy token
                that is not the autoregressive one (but for certified near-ties).
    failures    sequences that were not had: the decoder raised, or returned nothing that could be read.
    tokens      that were judged; `rounds`: that they came in, None if the decoder did not tell.
    near_ties   greedy divergences that were certified.
    """

    options: Options
    tokens: int
    sequences: int
    rounds: int | None = None
    results: Mapping[str, TestResult] = field(default_factory=dict)
    adjusted: Mapping[str, float] = field(default_factory=dict)
    bias: Directed | None = None
    violations: tuple[Finding, ...] = ()
    failures: tuple[Finding, ...] = ()
    near_ties: int = 0
    alpha: float = 0.05
    delta: float = DELTA

    @property
    def rejected(self) -> tuple[str, ...]:
        """Tests of the family that reject at `alpha` after Holm."""
        return tuple(name for name, p in self.adjusted.items() if p <= self.alpha)

    @property
    def equivalent(self) -> bool:
        """Whether agreement is shown: a bias below `delta`, or, for greedy options, the same tokens."""
        if self.options.greedy:
            return self.tokens > 0 and not self.violations
        return EQUIVALENCE in self.results and self.results[EQUIVALENCE].p <= SHOWN

    @property
    def lossless(self) -> bool | None:
        """False: an exact violation, or a test rejects. True: neither, and equivalence is shown. None: undecided."""
        if self.violations or self.rejected:
            return False
        return True if self.equivalent and not self.failures else None

    @property
    def verdict(self) -> str:
        return {True: "lossless", False: "not lossless", None: "undecided"}[self.lossless]

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        yield f"{self.verdict}: {self.tokens} tokens in {self.sequences} sequences, alpha {self.alpha:g}"
        for name, result in self.results.items():
            if name in self.adjusted:
                held = f"adjusted {self.adjusted[name]:.3g}" + (" ← rejects" if name in self.rejected else "")
            elif name == EQUIVALENCE:
                held = f"|bias| < {self.delta:g} " + ("shown" if self.equivalent else "not shown")
            else:
                held = "not in the family"
            yield f"  {name:24} {result.statistic:12.4g}  p {result.p:<9.3g} {held}"
        if self.bias:
            b = self.bias
            yield f"  bias {b.bias:+.4f} [{b.low:+.4f}, {b.high:+.4f}], total variation ≥ {b.tv_lower:.4f}"
        if self.options.greedy:
            yield f"  greedy: {self.sequences} sequences compared, {self.near_ties} certified near-ties"
        for kind, findings in (("violation", self.violations), ("failure", self.failures)):
            yield from (f"  {kind}: {each}" for each in findings[:5])
            if len(findings) > 5:
                yield f"  … {len(findings)} {kind}s in all"
