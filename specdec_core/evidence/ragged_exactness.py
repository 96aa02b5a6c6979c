"""Verdicts on what batches emit, R1, R2, R3 and R6: pure functions from records of notebook 04 to findings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from specdec_core.evidence.verdicts import Claim, Finding, Outcome, exact_at_most, exact_zero_mismatch

Rows = Sequence[Mapping[str, Any]]

COMPILED = "numba float32"
KEPT_POSITIONS, KEPT_DRAFT = "positions kept (BSP-like)", "draft kept (DSD-like)"

SIGNATURES: dict[str, Callable[[Mapping[str, Any]], bool]] = {
    # The text is right until positions have drifted, which the first rejected token makes them do.
    KEPT_POSITIONS: lambda row: row["first_divergence"] >= row["first_rejection"] >= 0,
    # The token that should have been recovered at the first rejection is the first that is wrong.
    KEPT_DRAFT: lambda row: row["first_divergence"] == row["first_rejection"] - 1 >= 0,
}
"""Where a broken way's first wrong token has to be, of a row that it corrupted."""


def broken_ways_corrupt(claim: Claim, rows: Rows) -> Finding:
    """R1: every broken way corrupts rows, each where its signature says, and no sound one does.

    Value: share of rows that the broken ways corrupted. A row whose divergences are all certified near-ties counts as
    sound.
    """
    published = [row for row in rows if row["engine"] != COMPILED]
    broken = [row for row in published if row["broken"]]
    if not broken:
        return Finding(Outcome.INCONCLUSIVE, note="no broken way was decoded")
    corrupted = [row for row in broken if not row["certified"]]
    harmless = {row["way"] for row in broken} - {row["way"] for row in corrupted}
    elsewhere = [row for row in corrupted if row["way"] not in SIGNATURES or not SIGNATURES[row["way"]](row)]
    unsound = [row for row in published if not row["broken"] and not row["certified"]]
    shares = [f"{way} {exact:.0%} exact, {partial:.0%} of tokens" for way, exact, partial in match_shares(published)]
    note = "; ".join(shares)
    if unsound:
        note += f"; NOT SOUND: {unsound[0]['way']} on {unsound[0]['prompt_id']} at {unsound[0]['first_divergence']}"
    if elsewhere:
        note += f"; other signature: {elsewhere[0]['way']} on {elsewhere[0]['prompt_id']}"
    if harmless:
        note += f"; corrupted nothing: {', '.join(sorted(harmless))}"
    value = len(corrupted) / len(broken)
    return Finding(exact_zero_mismatch(len(unsound) + len(elsewhere) + len(harmless), len(broken)), value, None, note)


def match_shares(rows: Rows) -> list[tuple[str, float, float]]:
    """Of each way: share of rows that are exact, and share of tokens that equal those of the row alone."""
    found = []
    for way in dict.fromkeys(row["way"] for row in rows):
        own = [row for row in rows if row["way"] == way]
        tokens = sum(max(row["tokens"], row["expected"]) for row in own)
        found.append((way, sum(row["exact"] for row in own) / len(own), sum(row["matching"] for row in own) / tokens))
    return found


def faults_are_caught(claim: Claim, rows: Rows) -> Finding:
    """R2: every fault is seen by a detector in every subject that it is put into; correct code and controls by none.

    Value: faults not caught. A crash is no detection.
    """
    if not rows:
        return Finding(Outcome.INCONCLUSIVE, note="no fault was injected")
    sound = [row for row in rows if row["sound"]]
    put = list(dict.fromkeys((row["fault"], row["subject"]) for row in rows if not row["sound"]))
    caught = {(row["fault"], row["subject"]) for row in rows if row["fired"]}
    missed = [pair for pair in put if pair not in caught]
    alarms = [row for row in sound if row["fired"] or row["crashed"]]
    detectors = {row["detector"] for row in rows}
    idle = detectors - {row["detector"] for row in rows if row["fired"]}
    note = (
        f"{len({fault for fault, _ in put})} faults in {len(put)} decoders, {len(detectors)} detectors, "
        f"{len(sound)} checks of correct code"
    )
    if missed:
        note += "; missed: " + ", ".join(f"{fault} in {subject}" for fault, subject in missed[:4])
    if alarms:
        note += "; false alarm: " + ", ".join(f"{row['detector']} on {row['subject']}" for row in alarms[:4])
    if idle:
        note += f"; never needed: {', '.join(sorted(idle))}"
    return Finding(exact_zero_mismatch(len(missed) + len(alarms), len(sound)), float(len(missed)), None, note)


def batches_equal_rows(claim: Claim, rows: Rows) -> Finding:
    """R3: on the compiled engine every row of every batch is the same row decoded alone. Value: rows that differ."""
    own = [row for row in rows if row["engine"] == COMPILED]
    wrong = [row for row in own if not row["exact"]]
    slots = sorted({row["slots"] for row in own})
    note = (
        f"{len(own)} rows of batches of {', '.join(map(str, slots))}, {len({row['drafter'] for row in own})} drafters, "
        f"{sum(row['tokens'] for row in own)} tokens"
    )
    if wrong:
        note += f"; first: {wrong[0]['drafter']}, {wrong[0]['prompt_id']} at {wrong[0]['first_divergence']}"
    return Finding(exact_zero_mismatch(len(wrong), len(own)), float(len(wrong)), None, note)


def sampled_rows_are_isolated(claim: Claim, laws: Rows, rows: Rows) -> Finding:
    """R6: every enumerated joint law of a batch is its rows' product, and no seeded row changes with its neighbours.

    Value: the largest total variation. Rows that would be the same under any seed show nothing: at least half have to
    answer to their own.
    """
    if not laws or not rows:
        return Finding(Outcome.INCONCLUSIVE, note="no law was enumerated, or no row decoded")
    worst = max(laws, key=lambda row: row["total_variation"])
    changed = [row for row in rows if not row["same"]]
    own = sum(row["own"] for row in rows) / len(rows)
    note = (
        f"{len(laws)} batches, {sum(row['branches'] for row in laws)} branches, furthest {worst['level']}, "
        f"{worst['case']}; {len(rows)} rows beside changed neighbours, {own:.0%} of them change with their own seed"
    )
    if changed:
        note += f"; changed: {changed[0]['prompt_id']} by {changed[0]['change']}"
    value = worst["total_variation"]
    outcome = exact_at_most(value, claim.thresholds["total_variation"], len(laws))
    if changed:
        outcome = Outcome.REFUTED
    elif outcome is Outcome.SUPPORTED and own < 0.5:
        outcome = Outcome.INCONCLUSIVE
    return Finding(outcome, value, None, note)
