"""What a diagnosis of a batched decoder found (diagnose.py), and what may be said of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdec_core.forensics.diagnosis_judge import FAILED, LONG, ROUNDED, SAME, SHORT, TIE, WRONG, Observation
from specdec_core.forensics.diagnosis_signatures import Features, Signature, features, matching

if TYPE_CHECKING:
    import pandas as pd

_OUTCOMES = (SAME, TIE, ROUNDED, SHORT, LONG, WRONG, FAILED)
_COLUMNS = ["experiment", "row", "padding", "outcome", "index", "expected", "found", "round", "how", "gap", "epsilon"]


@dataclass(frozen=True)
class Diagnosis:
    """What a diagnosis found.

    observations  one a row and experiment.
    skipped       experiments that could not be made, and why.
    judged        whether a float64 reference was there to excuse near-ties.
    """

    observations: tuple[Observation, ...]
    skipped: tuple[str, ...] = ()
    judged: bool = True

    @property
    def features(self) -> Features:
        return features(self.observations)

    @property
    def signatures(self) -> tuple[Signature, ...]:
        return matching(self.features)

    @property
    def verdict(self) -> str:
        """The name of the most particular signature."""
        return self.signatures[0].name

    @property
    def correct(self) -> bool:
        """Whether every row is the expected one, or differs by certified near-ties only."""
        return self.verdict in ("clean", "certified near-ties only")

    @property
    def disagreeing(self) -> tuple[str, ...]:
        """Experiments in which a row is wrong, of a wrong length, or failed."""
        return tuple(dict.fromkeys(e.experiment for e in self.observations if e.bad or e.outcome == FAILED))

    @property
    def agreeing(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(e.experiment for e in self.observations if e.experiment not in self.disagreeing))

    @property
    def first_divergences(self) -> dict[int, Observation]:
        """Of each of the user's prompts that differs anywhere: the worst of the first experiment where it is worst."""
        found: dict[int, Observation] = {}
        for each in self.observations:
            worst = found.get(each.row)
            if each.outcome != SAME and (worst is None or _severity(each) > _severity(worst)):
                found[each.row] = each
        return dict(sorted(found.items()))

    def table(self) -> pd.DataFrame:
        """A line an observation."""
        import pandas as pd

        lines = [{name: getattr(each, name) for name in _COLUMNS} for each in self.observations]
        return pd.DataFrame(lines, columns=_COLUMNS).assign(tokens=[len(e.tokens) for e in self.observations])

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def _lines(self) -> Iterator[str]:
        first, *others = self.signatures
        yield f"{first.name}: {first.seen}"
        if not self.correct:
            yield f"  look at: {first.look}"
        yield from (f"  also: {each.name} ({each.seen})" for each in others)
        for name in dict.fromkeys(each.experiment for each in self.observations):
            outcomes = [each.outcome for each in self.observations if each.experiment == name]
            counted = ", ".join(f"{outcomes.count(one)} {one}" for one in _OUTCOMES if one in outcomes)
            yield f"  {name:28} {counted}"
        yield from (f"  row {row}: {_sentence(each)}" for row, each in self.first_divergences.items())
        if not self.judged and self.features.differs:
            yield "  no float64 reference: near-ties were not told from errors"
        yield from (f"  not run: {each}" for each in self.skipped)


def _severity(each: Observation) -> int:
    return _OUTCOMES.index(each.outcome)


def _sentence(each: Observation) -> str:
    if each.outcome == FAILED:
        return f"failed, {each.experiment}: {each.how}"
    where = f"token {each.index}" + (f" (round {each.round})" if each.round >= 0 else "")
    tokens = f"expected {_token(each.expected)}, found {_token(each.found)}"
    tie = f", gap {each.gap:.2g} ≤ 2ε = {2 * each.epsilon:.2g}" if each.outcome in (TIE, ROUNDED) else ""
    how = f" by {each.how}" if each.how else ""
    padding = f", {each.padding} shorter than its batch" if each.padding else ""
    return f"{each.outcome}{how} at {where}, {each.experiment}: {tokens}{tie}{padding}"


def _token(token: int) -> str:
    return str(token) if token >= 0 else "the end"
