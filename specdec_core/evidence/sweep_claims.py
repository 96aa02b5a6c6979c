"""Verdicts on the backend sweep, B1–B4: pure functions from sweep rows to findings.

The best cell is chosen on the tuning prompts and judged on the report prompts, so that choosing costs no honesty.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from specdec_core.evidence.sweep_records import Cell, Pairs, Row, pair_up
from specdec_core.evidence.verdicts import Claim, Finding, Outcome, interval_above
from specdec_core.statistics.intervals import Interval, columns, ratio_interval, simultaneous

SERIAL, SLOW_DRAFT, BOTH = "serial verification", "slow draft", "both"
EITHER = "either alone"
LOW_ACCEPTANCE = "low acceptance"


def best_speedup(claim: Claim, rows: Sequence[Row]) -> Finding:
    """B1: interval of the best cell's speedup, report prompts without repetition, against the threshold."""
    tuning, report = pair_up(rows, split="tuning", repetitive=False), pair_up(rows, split="report", repetitive=False)
    candidates = [cell for cell in tuning if cell in report]
    if not candidates:
        return _too_little("no cell has both tuning and report prompts free of repetition")
    best = max(candidates, key=lambda cell: _point_speedup(tuning[cell]))
    speedup = report[best].speedup()
    unfiltered = pair_up(rows, split="report")[best].speedup()
    note = f"{_name(best)}, {speedup.n} prompts; unfiltered {unfiltered} on {unfiltered.n}"
    outcome = interval_above(speedup, claim.thresholds["speedup"], claim.minimum_n)
    return Finding(outcome, speedup.estimate, speedup, note)


def acceptance_falls(claim: Claim, rows: Sequence[Row]) -> Finding:
    """B2: in every configuration a_K at the least K exceeds a_K at the greatest, and rises between no neighbours.

    A drafter that is never wrong (the target itself) has nothing to fall from and is left out. Intervals are
    simultaneous over all comparisons; value: the ratio of the configuration that falls least.
    """
    curves = [
        cells
        for cells in by_configuration(pair_up(rows)).values()
        if len(cells) > 1 and any(pairs.acceptance() < 1 for pairs in cells)
    ]
    if not curves:
        return _too_little("no configuration was measured at two lengths K")
    level = simultaneous(0.95, sum(len(cells) for cells in curves))
    falls, rises, unmeasured = [], [], []
    for cells in curves:
        falls.append((_acceptance_ratio(cells[0], cells[-1], level), cells))
        for shorter, longer in pairwise(cells):
            step = _acceptance_ratio(shorter, longer, level)
            if step is not None and step.high < 1:
                rises.append(f"{_name(longer.cell)} above K={shorter.cell.K}")
    unmeasured = [_name(cells[0].cell) for fall, cells in falls if fall is None]
    known = [(fall, cells) for fall, cells in falls if fall is not None]
    note = "; ".join(
        f"{cells[0].cell.configuration} {cells[0].acceptance():.1%} → {cells[-1].acceptance():.1%}"
        for _, cells in known
    )
    if not known:
        return _too_little(f"nothing was accepted at the greatest K by {', '.join(unmeasured)}")
    least, _ = min(known, key=lambda item: item[0].estimate)
    if rises or least.high < claim.thresholds["ratio"]:
        return Finding(Outcome.REFUTED, least.estimate, least, f"rises: {', '.join(rises) or 'overall'}; {note}")
    supported = not unmeasured and all(
        interval_above(fall, claim.thresholds["ratio"], claim.minimum_n) is Outcome.SUPPORTED for fall, _ in known
    )
    return Finding(Outcome.SUPPORTED if supported else Outcome.INCONCLUSIVE, least.estimate, least, note)


def prediction_holds(claim: Claim, rows: Sequence[Row]) -> Finding:
    """B3: predicted speedups have the right sign wherever the measured interval excludes 1, and the right size.

    Value: the measured/predicted ratio furthest from 1, with its interval, simultaneous over all cells.
    """
    cells = list(pair_up(rows, split="report").values())
    if not cells:
        return _too_little("no report prompts")
    low, high = claim.thresholds["low"], claim.thresholds["high"]
    level = simultaneous(0.95, len(cells))
    ratios = {pairs.cell: pairs.measured_over_predicted(level) for pairs in cells}
    wrong = [
        _name(pairs.cell)
        for pairs in cells
        if (measured := pairs.speedup(level)).excludes(1.0)
        and (measured.estimate > 1) != (pairs.predicted_speedup() > 1)
    ]
    off = [_name(cell) for cell, ratio in ratios.items() if ratio.outside(low, high)]
    furthest = max(ratios, key=lambda cell: abs(math.log(ratios[cell].estimate)))
    worst = ratios[furthest]
    note = f"{len(cells)} cells, furthest {_name(furthest)}"
    if worst.n < claim.minimum_n:
        return Finding(Outcome.INCONCLUSIVE, worst.estimate, worst, f"{note}; {worst.n} prompts of {claim.minimum_n}")
    if wrong or off:
        note += f"; wrong sign: {', '.join(wrong) or 'none'}; outside the band: {', '.join(off) or 'none'}"
        return Finding(Outcome.REFUTED, worst.estimate, worst, note)
    supported = all(ratio.inside(low, high) for ratio in ratios.values())
    return Finding(Outcome.SUPPORTED if supported else Outcome.INCONCLUSIVE, worst.estimate, worst, note)


@dataclass(frozen=True)
class Attribution:
    """Why a cell is as slow as it is. Terms c, s, o in target steps (notes in sweep_records.py).

    drafted, seconds       of a round: tokens, and its whole time in target steps
    needed     the a_K at which it would be as fast as AR: c + s + o/K, where o counts what is more than a round of AR's
    parallel, free, ideal  its speedup with v≡1, with c≡0, and with both
    accepting  … and with the a_K of the best drafter instead of its own
    …_share    parts of the log speedup between actual and all three at once, summing to 1 (all 0 if nothing is lost)
    cause      the least change of costs that makes it faster than AR, or LOW_ACCEPTANCE if no change of costs does
    """

    cell: Cell
    backend: str
    speedup: Interval
    predicted: float
    acceptance: float
    tau: float
    drafted: float
    seconds: float
    c: float
    s: float
    o: float
    needed: float
    parallel: float
    free: float
    ideal: float
    accepting: float
    verification_share: float
    draft_share: float
    acceptance_share: float

    @property
    def cause(self) -> str:
        if self.parallel > 1 and self.free > 1:
            return EITHER
        if self.parallel > 1:
            return SERIAL
        if self.free > 1:
            return SLOW_DRAFT
        return BOTH if self.ideal > 1 else LOW_ACCEPTANCE

    @property
    def sign_is_right(self) -> bool | None:
        """Whether the prediction is on the side of 1 that was measured; None where the interval holds 1."""
        if not self.speedup.excludes(1.0):
            return None
        return (self.speedup.estimate > 1) == (self.predicted > 1)


def attribute(pairs: Pairs, level: float = 0.95, best_acceptance: float = 0.0) -> Attribution:
    """Counterfactuals on the measured phases of one cell.

    With one target step t(1) taken from the same prompts' AR rows: v≡1 replaces the verification time by passes·t(1),
    c≡0 the drafting time by 0; the third has `best_acceptance` of the drafted tokens accepted, if that is more than
    were, at the same time. The shares are Shapley values of the three changes in log speedup: the mean gain of each
    over the orders of making them. The third multiplies tokens and not seconds, so it gains the same in every order.
    """
    sd = {name: float(values.sum()) for name, values in pairs.sd.items()}
    ar = {name: float(values.sum()) for name, values in pairs.ar.items()}
    step = ar["verify_seconds"] / ar["target_passes"]
    rate_ar = ar["tokens"] / ar["seconds"]
    verify, draft = sd["verify_seconds"], sd["draft_seconds"]
    rest = sd["seconds"] - verify - draft
    once = min(sd["target_passes"] * step, verify)  # noise may put a one-token pass above a block's
    drafted = sd["drafted"]

    def speedup(verifying: float, drafting: float) -> float:
        return sd["tokens"] / (verifying + drafting + rest) / rate_ar

    actual, parallel = speedup(verify, draft), speedup(once, draft)
    free, ideal = speedup(verify, 0.0), speedup(once, 0.0)
    more = 1 + max(0.0, best_acceptance * drafted - sd["accepted"]) / sd["tokens"]
    whole = math.log(ideal / actual) + math.log(more)
    lost = whole > 1e-9  # below it is rounding
    serial = (math.log(parallel / actual) + math.log(ideal / free)) / 2
    return Attribution(
        cell=pairs.cell,
        backend=pairs.backend,
        speedup=pairs.speedup(level),
        predicted=pairs.predicted_speedup(),
        acceptance=pairs.acceptance(),
        tau=sd["tokens"] / sd["target_passes"],
        drafted=drafted / sd["target_passes"],
        seconds=sd["seconds"] / sd["target_passes"] / step,
        c=draft / drafted / step if drafted else 0.0,
        s=(verify - once) / step / drafted if drafted else 0.0,
        o=rest / sd["target_passes"] / step,
        needed=(sd["seconds"] * rate_ar - sd["target_passes"]) / drafted if drafted else 0.0,
        parallel=parallel,
        free=free,
        ideal=ideal,
        accepting=actual * more,
        verification_share=serial / whole if lost else 0.0,
        draft_share=(math.log(ideal / actual) - serial) / whole if lost else 0.0,
        acceptance_share=math.log(more) / whole if lost else 0.0,
    )


def attribute_best(rows: Sequence[Row], level: float = 0.95) -> list[Attribution]:
    """One attribution a configuration and temperature, at the K that is best on its tuning prompts, judged on its
    report prompts; the best drafter is that with the greatest a_K at the same K and temperature."""
    tuning, report = pair_up(rows, split="tuning"), pair_up(rows, split="report")
    best_drafters = best_acceptances(report.values())
    found = []
    for cells in by_configuration(report).values():
        known = [pairs.cell for pairs in cells if pairs.cell in tuning] or [pairs.cell for pairs in cells]
        best = max(known, key=lambda cell: _point_speedup(tuning.get(cell, report[cell])))
        found.append(attribute(report[best], level, best_drafters.get((best.temperature, best.K), 0.0)))
    return found


def best_acceptances(cells: Iterable[Pairs]) -> dict[tuple[float, int], float]:
    """(temperature, K) → the greatest a_K of any configuration. A drafter that is never wrong is the target itself,
    which no drafter can be asked to equal: it is left out."""
    found: dict[tuple[float, int], float] = {}
    for pairs in cells:
        key, acceptance = (pairs.cell.temperature, pairs.cell.K), pairs.acceptance()
        if acceptance < 1:
            found[key] = max(found.get(key, 0.0), acceptance)
    return found


def deceleration_explained(claim: Claim, rows: Sequence[Row]) -> Finding:
    """B4: which configurations are slower than AR at their best K, and the cause of each. Value: how many are, one that
    was measured at two temperatures counting twice."""
    configurations = len({row["configuration"] for row in rows})
    backends = len({row["backend"] for row in rows})
    judged = {(row["configuration"], row["temperature"]) for row in rows}
    found = attribute_best(rows, simultaneous(0.95, max(len(judged), 1)))
    slow = [one for one in found if one.speedup.high < 1]
    undecided = [one for one in found if not one.speedup.excludes(1.0)]
    note = "; ".join(
        f"{_name(one.cell)} {one.speedup.estimate:.2f}: {one.cause} "
        f"(verification {one.verification_share:.0%}, draft {one.draft_share:.0%}, acceptance "
        f"{one.acceptance_share:.0%})"
        for one in slow
    )
    note = f"{configurations} configurations, {backends} backends, {len(undecided)} undecided; {note or 'none slower'}"
    enough = configurations >= claim.thresholds["configurations"] and backends >= claim.thresholds["backends"]
    if not enough or any(one.speedup.n < claim.minimum_n for one in found):
        return Finding(Outcome.INCONCLUSIVE, float(len(slow)), None, note)
    if slow:
        return Finding(Outcome.SUPPORTED, float(len(slow)), None, note)
    return Finding(Outcome.INCONCLUSIVE if undecided else Outcome.REFUTED, 0.0, None, note)


def by_configuration(cells: dict[Cell, Pairs]) -> dict[tuple[str, float], list[Pairs]]:
    """(configuration, temperature) → its cells in the order of K."""
    grouped: dict[tuple[str, float], list[Pairs]] = {}
    for cell in sorted(cells):
        grouped.setdefault((cell.configuration, cell.temperature), []).append(cells[cell])
    return grouped


def _acceptance_ratio(shorter: Pairs, longer: Pairs, level: float) -> Interval | None:
    """a_K of the shorter over that of the longer, paired by prompt; None where the longer accepts nothing."""
    common = sorted(set(shorter.prompts) & set(longer.prompts))
    if not common:
        return None
    a, b = _select(shorter, common), _select(longer, common)
    if any(side[name].sum() == 0 for side in (a, b) for name in ("drafted", "accepted")):
        return None
    return ratio_interval(columns(a["accepted"], b["drafted"]), columns(a["drafted"], b["accepted"]), level=level)


def _select(pairs: Pairs, prompts: Iterable[str]) -> dict[str, np.ndarray]:
    index = [pairs.prompts.index(prompt) for prompt in prompts]
    return {name: values[index] for name, values in pairs.sd.items()}


def _point_speedup(pairs: Pairs) -> float:
    sd, ar = pairs.sd, pairs.ar
    return float(sd["tokens"].sum() / sd["seconds"].sum() * ar["seconds"].sum() / ar["tokens"].sum())


def _too_little(what: str) -> Finding:
    return Finding(Outcome.INCONCLUSIVE, note=what)


def _name(cell: Cell) -> str:
    warm = f", T={cell.temperature:g}" if cell.temperature else ""
    return f"{cell.configuration} K={cell.K}{warm}"
