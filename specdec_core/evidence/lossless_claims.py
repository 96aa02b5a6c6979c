"""Verdicts on losslessness, L1–L6: pure functions from records to findings."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from specdec_core.evidence.verdicts import Claim, Finding, Outcome, exact_at_most, exact_zero_mismatch
from specdec_core.statistics import battery
from specdec_core.statistics.intervals import binomial_interval, simultaneous

Rows = Sequence[Mapping[str, Any]]

TABLE = "table"
_LAW_TESTS_EXCLUDE = ("row isolation", "acceptance canary")


def exact_law_holds(claim: Claim, rows: Rows) -> Finding:
    """L1: largest total variation over the grid of exact cases."""
    return _exact(claim, [row for row in rows if row["level"] == TABLE])


def sequence_law_holds(claim: Claim, rows: Rows) -> Finding:
    """L2: the same of tiny transformers."""
    return _exact(claim, [row for row in rows if row["level"] != TABLE])


def _exact(claim: Claim, rows: Rows) -> Finding:
    if not rows:
        return Finding(Outcome.INCONCLUSIVE, note="no case was enumerated")
    worst = max(rows, key=lambda row: row["total_variation"])
    value = worst["total_variation"]
    branches = sum(row["branches"] for row in rows)
    note = f"{len(rows)} cases, {branches} branches; furthest: {worst['axis']}, {worst['case']}"
    outcome = exact_at_most(value, claim.thresholds["total_variation"], len(rows), claim.minimum_n)
    return Finding(outcome, value, None, note)


def tokens_agree(claim: Claim, rows: Rows) -> Finding:
    """L3: no test of the family rejects after Holm, in no setting, and equivalence within δ is shown in each.

    Value: the least adjusted p over all settings. A rejection refutes only if the same test does not reject where both
    sides are autoregressive.
    """
    family = [row for row in rows if row["adjusted"] is not None]
    if not family:
        return Finding(Outcome.INCONCLUSIVE, note="no test was made")
    settings = list(dict.fromkeys(row["setting"] for row in rows))
    level = claim.thresholds["alpha"] / len(settings)  # a family a setting, all settings together at alpha
    worst = min(family, key=lambda row: row["adjusted"])
    tokens = min(row["tokens"] for row in family)
    shown = [row for row in rows if row["test"] == battery.EQUIVALENCE and row["p"] <= claim.thresholds["alpha"]]
    nominal = next(
        (row for row in rows if row["test"] == battery.NOMINAL and row["comparison"] == "SD against AR"), None
    )
    note = f"{len(settings)} settings, {tokens}–{max(row['tokens'] for row in family)} tokens a method; {worst['test']}"
    if nominal is not None:
        note += f"; {nominal['setting']}: χ²={nominal['statistic']:.1f}/{nominal['dof']}"
    note += f"; {_origin(rows)}; equivalence within {battery.DELTA:g} shown in {len(shown)} of {len(settings)}"
    if tokens < claim.minimum_n:
        return Finding(Outcome.INCONCLUSIVE, worst["adjusted"], None, f"{note}; {claim.minimum_n} tokens are wanted")
    if worst["adjusted"] <= level:
        null = [row["p"] for row in rows if row["test"] == worst["test"] and row["comparison"] == "AR against AR"]
        refuted = not null or min(null) > claim.thresholds["alpha"]
        return Finding(Outcome.REFUTED if refuted else Outcome.INCONCLUSIVE, worst["adjusted"], None, note)
    outcome = Outcome.SUPPORTED if len(shown) == len(settings) else Outcome.INCONCLUSIVE
    return Finding(outcome, worst["adjusted"], None, note)


def greedy_agrees(claim: Claim, rows: Rows) -> Finding:
    """L4: on the compiled engine every sequence is identical; elsewhere every divergence is a certified near-tie."""
    if not rows:
        return Finding(Outcome.INCONCLUSIVE, note="no sequence was compared")
    compiled = [row for row in rows if row["backend"].startswith("numba")]
    wrong = [row for row in rows if not (row["identical"] if row in compiled else row["certified"])]
    ties = sum(row["divergences"] for row in rows if row["certified"])
    note = (
        f"{len(compiled)} sequences of the compiled engine, {len(rows) - len(compiled)} of torch with {ties} certified "
        f"near-ties, {sum(row['tokens'] for row in rows)} tokens"
    )
    if wrong:
        note += f"; first: {wrong[0]['backend']}, {wrong[0]['drafter']}, {wrong[0]['prompt_id']}"
    return Finding(exact_zero_mismatch(len(wrong), len(compiled)), float(len(wrong)), None, note)


def mutants_die(claim: Claim, rows: Rows) -> Finding:
    """L5: mutants of the law are seen by a test of the law, those of acceptance by the canary alone, those of isolation
    by row isolation; clean code and controls by no test of the law. Value: mutants that survive."""
    survivors, alarms = [], []
    names = list(dict.fromkeys(row["mutant"] for row in rows))
    for name in names:
        own = [row for row in rows if row["mutant"] == name]
        effect = own[0]["effect"]
        if effect == "nothing":
            alarms += [f"{name} by {row['test']}" for row in own if row["seen"] and _is_of_the_law(row)]
            if name == "clean code":
                alarms += [f"{name} by {row['test']}" for row in own if row["seen"] and not _is_of_the_law(row)]
        elif not _killed(effect, own):
            survivors.append(name)
        if effect in ("acceptance", "isolation"):
            alarms += [f"{name} by {row['test']}" for row in own if row["seen"] and _is_of_the_law(row)]
    bugs = len({row["mutant"] for row in rows if row["effect"] != "nothing"})
    reached = sorted(row["tokens"] for row in rows if row["seen"] and row["tokens"] > 0)
    note = f"{bugs} mutants, {len(names) - bugs} clean or right"
    if reached:
        note += f"; sampled tests saw them after {reached[0]}–{reached[-1]} tokens"
    if survivors or alarms:
        note += f"; survived: {', '.join(survivors) or 'none'}; false alarms: {', '.join(alarms) or 'none'}"
        return Finding(Outcome.REFUTED, float(len(survivors)), None, note)
    return Finding(Outcome.SUPPORTED if bugs >= 20 else Outcome.INCONCLUSIVE, 0.0, None, note)


def _is_of_the_law(row: Mapping[str, Any]) -> bool:
    return row["test"] not in _LAW_TESTS_EXCLUDE


def _killed(effect: str, rows: Iterable[Mapping[str, Any]]) -> bool:
    seen = {row["test"] for row in rows if row["seen"]}
    wanted = {"acceptance": {"acceptance canary"}, "isolation": {"row isolation"}}.get(effect)
    return bool(seen & wanted) if wanted else bool(seen - set(_LAW_TESTS_EXCLUDE))


def sizes_hold(claim: Claim, rows: Rows) -> Finding:
    """L6: no test of the family rejects more often than α says, simultaneous Clopper–Pearson intervals.

    Value: the largest rate; outside the family (the nominal χ²) the rate is only told.
    """
    family = [row for row in rows if row["family"]]
    if not family:
        return Finding(Outcome.INCONCLUSIVE, note="no replicates")
    level = simultaneous(0.95, len(family), "bonferroni")
    rates = [(binomial_interval(row["rejections"], row["replicates"], level=level), row) for row in family]
    worst, row = max(rates, key=lambda pair: pair[0].estimate)
    fewest = min(one["replicates"] for one in family)
    note = f"{len(family)} tests, {fewest} replicates or more; {row['test']}; {_origin(rows)}"
    for other in rows:
        if not other["family"]:
            note += f"; {other['test']} rejects {other['rejections'] / other['replicates']:.1%}"
    if any(rate.low > one["alpha"] for rate, one in rates):
        return Finding(Outcome.REFUTED, worst.estimate, worst, note)
    enough = all(one["replicates"] >= claim.minimum_n for _, one in rates)
    return Finding(Outcome.SUPPORTED if enough else Outcome.INCONCLUSIVE, worst.estimate, worst, note)


def _origin(rows: Rows) -> str:
    """Which settings were drawn in this run, and which are replayed."""
    kinds = {row.get("setting", "tokens"): row["live"] for row in rows}
    replayed = [name for name, live in kinds.items() if not live]
    return f"replayed from committed tokens: {', '.join(replayed)}" if replayed else "all drawn in this run"
