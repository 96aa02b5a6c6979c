"""Records of the backend sweep, and the sums over prompts that its claims and figures are made of.

Words: τ tokens emitted per target pass; a_K accepted/drafted at speculation length K; α_i conditional acceptance at
position i; c, s, o the draft step, the serialization index s_{K+1} and the overhead of a round, in target steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np

from specdec_core.evidence.schemas import RecordError, Schema
from specdec_core.statistics.intervals import Interval, columns, ratio_interval

Row = Mapping[str, Any]


def _check_sweep(row: Row) -> None:
    """Counts that contradict each other are a bug of the measuring code, best found before the run ends."""
    drafted, tested, accepted = (row[f"{name}_by_position"] for name in ("drafted", "tested", "accepted"))
    if row["arm"] not in ("sd", "ar") or row["split"] not in ("tuning", "report"):
        raise RecordError(f"arm {row['arm']!r}, split {row['split']!r}: expected 'sd' or 'ar', 'tuning' or 'report'")
    if not len(drafted) == len(tested) == len(accepted) or len(drafted) > row["K"]:
        raise RecordError(f"positions drafted {drafted}, tested {tested}, accepted {accepted}: expected ≤ K each")
    if sum(drafted) != row["drafted"] or sum(accepted) != row["accepted"]:
        raise RecordError(
            f"drafted {row['drafted']} and accepted {row['accepted']} are not the sums of their positions, {drafted} "
            f"and {accepted}"
        )
    if not all(a <= t <= d for a, t, d in zip(accepted, tested, drafted, strict=True)):
        raise RecordError(f"accepted {accepted} ≤ tested {tested} ≤ drafted {drafted} fails at some position")
    if row["arm"] == "ar" and (row["K"] or row["drafted"]):
        raise RecordError(f"an 'ar' row with K {row['K']} and {row['drafted']} drafted tokens: expected 0 and 0")
    if min(row["tokens"], row["target_passes"]) < 1 or not row["seconds"] > 0:
        raise RecordError(
            f"{row['tokens']} tokens in {row['target_passes']} passes and {row['seconds']} s: expected ≥ 1, ≥ 1, > 0"
        )


SWEEP = Schema(
    "sweep",
    1,
    {
        "configuration": str,  # name of the pair, 'skinny f32 + n-gram'
        "backend": str,
        "target": str,
        "drafter": str,  # 'none' for the 'ar' arm is welcome but not needed
        "K": int,  # 0 in the 'ar' arm
        "temperature": float,
        "prompt_id": str,
        "domain": str,  # math, code, chat
        "split": str,  # 'tuning' chooses the best cell, 'report' judges it
        "repetitive": bool,  # the autoregressive text repeats itself
        "arm": str,  # 'sd' or 'ar'; an 'ar' row for each (configuration, temperature, prompt)
        "identical": bool,  # the emitted tokens equal those of the first autoregressive run
        "tokens": int,  # emitted
        "target_passes": int,
        "drafted": int,
        "accepted": int,
        "drafted_by_position": list[int],  # rounds that drafted position i
        "tested_by_position": list[int],  # … and accepted every position before it, so that i was decided
        "accepted_by_position": list[int],  # … and accepted i
        "seconds": float,  # all of it: draft + verify + overhead, prefill left out
        "draft_seconds": float,
        "verify_seconds": float,
        "overhead_seconds": float,
        "predicted_seconds": float,  # from standalone curves recorded before: Σ over rounds of v(n) + draft + overhead
    },
    _check_sweep,
)
"""One line per (configuration, K, temperature, prompt, arm); repeats are lines of their own and are pooled."""

COST_CURVE = Schema(
    "cost_curve",
    1,
    {
        "configuration": str,
        "backend": str,
        "n": int,  # new tokens in one target pass
        "context": int,  # tokens cached before it
        "seconds_median": float,
        "seconds_low": float,  # ends of its interval
        "seconds_high": float,
        "samples": int,
    },
)
"""t(n): one line per (configuration, n, context). A drafter's own curve is a configuration of its own name."""

CEILING = Schema(
    "ceiling",
    1,
    {
        "configuration": str,
        "weight_bytes": float,  # read once a pass
        "flops_per_token": float,
        "bytes_per_second": float,  # measured in the same run
        "flops_per_second": float,
    },
)
"""What bounds t(n) on this machine: max(weight_bytes/bytes_per_second, n·flops_per_token/flops_per_second)."""


@dataclass(frozen=True, order=True)
class Cell:
    """One point of the sweep."""

    configuration: str
    temperature: float
    K: int


@dataclass(frozen=True)
class Pairs:
    """One cell's prompts, each speculative row beside the autoregressive one of the same prompt; sums over repeats.

    sd, ar  name → `[n]` float64, for every counted or timed field of SWEEP
    """

    cell: Cell
    backend: str
    prompts: tuple[str, ...]
    sd: Mapping[str, np.ndarray]
    ar: Mapping[str, np.ndarray]

    def __len__(self) -> int:
        return len(self.prompts)

    def speedup(self, level: float = 0.95) -> Interval:
        """Measured speedup over AR: (Σtokens/Σseconds) of the one over that of the other."""
        return ratio_interval(
            columns(self.sd["tokens"], self.ar["seconds"]), columns(self.sd["seconds"], self.ar["tokens"]), level=level
        )

    def predicted_speedup(self) -> float:
        sd, ar = self.sd, self.ar
        rate = sd["tokens"].sum() / sd["predicted_seconds"].sum()
        return float(rate * ar["predicted_seconds"].sum() / ar["tokens"].sum())

    def measured_over_predicted(self, level: float = 0.95) -> Interval:
        """Measured/predicted speedup; the tokens cancel, times pair by prompt."""
        return ratio_interval(
            columns(self.sd["predicted_seconds"], self.ar["seconds"]),
            columns(self.sd["seconds"], self.ar["predicted_seconds"]),
            level=level,
        )

    def acceptance(self) -> float:
        """a_K = Σaccepted/Σdrafted; NaN if nothing was drafted."""
        drafted = self.sd["drafted"].sum()
        return float(self.sd["accepted"].sum() / drafted) if drafted else float("nan")


_SUMMED = (
    "tokens", "target_passes", "drafted", "accepted", "seconds", "draft_seconds", "verify_seconds",
    "overhead_seconds", "predicted_seconds",
)  # fmt: skip


def pair_up(rows: Iterable[Row], *, split: str | None = None, repetitive: bool | None = None) -> dict[Cell, Pairs]:
    """Cell → its pairs, sorted.

    split       only prompts of this split.
    repetitive  False: leave out prompts whose autoregressive text repeats itself (the 'ar' row decides).

    RecordError for a speculative row without its autoregressive partner.
    """
    chosen = [row for row in rows if split is None or row["split"] == split]
    numbers = np.array([_numbers(row) for row in chosen], dtype=float).reshape(len(chosen), len(_SUMMED))
    ar: dict[_Key, list[int]] = {}
    sd: dict[_Key, dict[str, list[int]]] = {}
    repeating = set()
    for index, row in enumerate(chosen):
        configuration, temperature, prompt = row["configuration"], row["temperature"], row["prompt_id"]
        if row["arm"] == "ar":
            ar.setdefault((configuration, temperature, prompt), []).append(index)
            if row["repetitive"]:
                repeating.add((configuration, temperature, prompt))
        else:
            sd.setdefault((configuration, temperature, row["K"]), {}).setdefault(prompt, []).append(index)
    paired = {}
    for key, by_prompt in sorted(sd.items()):
        cell = Cell(*key)
        partners = {prompt: _partner(ar, cell, prompt) for prompt in by_prompt}
        prompts = sorted(
            prompt
            for prompt in by_prompt
            if repetitive is None or ((cell.configuration, cell.temperature, prompt) in repeating) == repetitive
        )
        if prompts:
            paired[cell] = Pairs(
                cell,
                chosen[by_prompt[prompts[0]][0]]["backend"],
                tuple(prompts),
                _sums(numbers, [by_prompt[prompt] for prompt in prompts]),
                _sums(numbers, [partners[prompt] for prompt in prompts]),
            )
    return paired


_Key = tuple[str, float, Any]
_numbers = itemgetter(*_SUMMED)


def _partner(ar: Mapping[_Key, list[int]], cell: Cell, prompt: str) -> list[int]:
    found = ar.get((cell.configuration, cell.temperature, prompt))
    if found is None:
        raise RecordError(
            f"no 'ar' row for prompt {prompt!r} of {cell.configuration!r} at temperature {cell.temperature}: every "
            "speculative row needs the autoregressive one of the same configuration, temperature and split"
        )
    return found


def _sums(numbers: np.ndarray, groups: Sequence[Sequence[int]]) -> dict[str, np.ndarray]:
    """Field → its sum over each group of row indices (repeats of a prompt), `[n]`."""
    starts = np.cumsum([0, *(len(group) for group in groups[:-1])])
    sums = np.add.reduceat(numbers[[index for group in groups for index in group]], starts, axis=0)
    return {name: np.ascontiguousarray(sums[:, column]) for column, name in enumerate(_SUMMED)}


def conditional_acceptance(rows: Iterable[Row], minimum: int = 1) -> dict[Cell, list[float]]:
    """α_i of each cell, pooled over prompts: accepted/tested at position i = 1, 2, …

    NaN where a position was tested fewer than `minimum` times.
    """
    totals: dict[Cell, tuple[np.ndarray, np.ndarray]] = {}
    for row in rows:
        if row["arm"] != "sd":
            continue
        cell = Cell(row["configuration"], row["temperature"], row["K"])
        accepted, tested = totals.setdefault(cell, (np.zeros(row["K"]), np.zeros(row["K"])))
        accepted[: len(row["accepted_by_position"])] += row["accepted_by_position"]
        tested[: len(row["tested_by_position"])] += row["tested_by_position"]
    return {
        cell: [float(a / t) if t >= max(minimum, 1) else float("nan") for a, t in zip(accepted, tested, strict=True)]
        for cell, (accepted, tested) in totals.items()
    }
