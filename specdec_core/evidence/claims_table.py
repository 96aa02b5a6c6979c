"""Verdicts in words: a terminal table, markdown for the README, JSON, and the line a checked notebook cell prints."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from specdec_core.cache import atomic_write
from specdec_core.evidence.claims import claim
from specdec_core.evidence.evaluate import EVALUATORS, evaluate_all
from specdec_core.evidence.layout import QUICK, Layout
from specdec_core.evidence.provenance import device_kinds
from specdec_core.evidence.verdicts import Verdict

BEGIN, END = "<!-- claims:begin -->", "<!-- claims:end -->"
_WIDTH = 120


def checked_line(verdict: Verdict, kinds: frozenset[str] | None = None) -> str:
    """What a checked cell prints of a verdict, the same on every machine where it is as registered.

    Exact and counted claims, and those that nothing measures yet: the verdict itself. Timed and device-bound ones:
    whether the verdict is one of those registered for a machine with these device kinds (default: this machine's).
    """
    registered = claim(verdict.id)
    if registered.repeatable or verdict.id not in EVALUATORS:
        return f"{verdict.id}: {verdict.verdict}"
    allowed = registered.registered(device_kinds() if kinds is None else kinds)
    if verdict.verdict in allowed:
        return f"{verdict.id}: verdict within the set registered for this device"
    return (
        f"{verdict.id}: {verdict.verdict} is outside the set registered for this device "
        f"({', '.join(sorted(allowed))}): {verdict.note}"
    )


def verdict_line(verdict: Verdict) -> str:
    """The verdict with its number, device and detail, for an unchecked cell beside the checked one."""
    measured = f" {measured_text(verdict)}" if verdict.value is not None else ""
    where = f" on {verdict.device}" if verdict.device else ""
    replayed = ", replayed from committed records" if verdict.replayed else ""
    head = f"{verdict.id} {verdict.verdict}:{measured}{where}{replayed}"
    return f"{head}{'' if head.endswith(':') else '.'} {verdict.note}".rstrip(". ") + "."


def measured_text(verdict: Verdict) -> str:
    """'1.73 [1.65, 1.81]', '–' where there is none."""
    if verdict.interval is not None:
        return str(verdict.interval)
    return f"{verdict.value:.3g}" if verdict.value is not None else "–"


def replay_text(verdict: Verdict) -> str:
    """'replayed', 'replayed, quick' if a quick run made any of its records, '' for a verdict of this machine's."""
    if not verdict.replayed:
        return ""
    return "replayed, quick" if verdict.profile == QUICK else "replayed"


def text_table(verdicts: Sequence[Verdict]) -> str:
    """A table for the terminal, one claim a line, details of measured ones below it."""
    rows = [("id", "verdict", "measured", "device", "statement")]
    rows += [(one.id, _marked(one), measured_text(one), one.device or "–", claim(one.id).statement) for one in verdicts]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    lines = []
    for number, row in enumerate(rows):
        fixed = "  ".join(text.ljust(width) for text, width in zip(row[:4], widths, strict=True))
        lines.append(f"{fixed}  {_shortened(row[4], _WIDTH - len(fixed) - 2)}".rstrip())
        if number and verdicts[number - 1].device:
            lines.append(f"    {verdicts[number - 1].note}")
    return "\n".join(lines)


def markdown_table(verdicts: Sequence[Verdict]) -> str:
    """The README's table: claim, the paper's figure, what is asked here, what was found, on what evidence and where."""
    lines = [
        "| id | claim | paper | to reach here | verdict | measured | evidence | device | minutes |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    notebook = None
    for one in verdicts:
        registered = claim(one.id)
        if registered.notebook != notebook:
            notebook = registered.notebook
            lines.append(f"| | **{notebook}** | | | | | | | |")
        cells = (
            one.id,
            registered.statement,
            registered.paper,
            registered.ours,
            _marked(one),
            measured_text(one),
            ", ".join(one.evidence),
            one.device or (f"needs {registered.needs}" if registered.needs else "–"),
            f"{registered.minutes:g}",
        )
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines)


def json_rows(verdicts: Sequence[Verdict]) -> list[dict[str, Any]]:
    """`claims --json`: a list of {id, statement, verdict, value, interval, threshold, evidence, device, …}."""
    return [one.as_json(claim(one.id)) for one in verdicts]


def print_claims(as_json: bool = False, layout: Layout | None = None) -> list[Verdict]:
    """Evaluate all claims, print them, return the verdicts."""
    verdicts = evaluate_all(layout)
    if as_json:
        print(json.dumps(json_rows(verdicts), ensure_ascii=False, allow_nan=False, indent=1))
    else:
        print(text_table(verdicts))
    return verdicts


def update_readme(path: Path | None = None, verdicts: Sequence[Verdict] | None = None) -> bool:
    """Rewrite the claims table between the two marks of the README; returns whether that changed the file.

    ValueError if the marks are not there, once each and in order.
    """
    path = path or Layout().root / "README.md"
    text = path.read_text(encoding="utf-8")
    if not (text.count(BEGIN) == text.count(END) == 1 and text.index(BEGIN) < text.index(END)):
        raise ValueError(f"{path.name} needs one line {BEGIN} and below it one line {END}: the table goes between them")
    before, rest = text.split(BEGIN)
    after = rest.split(END)[1]
    table = markdown_table(verdicts if verdicts is not None else evaluate_all())
    updated = f"{before}{BEGIN}\n{table}\n{END}{after}"
    if updated == text:
        return False
    with atomic_write(path) as temporary:
        temporary.write_text(updated, encoding="utf-8")
    return True


def _marked(verdict: Verdict) -> str:
    return f"{verdict.verdict} ({how})" if (how := replay_text(verdict)) else str(verdict.verdict)


def _shortened(text: str, width: int) -> str:
    width = max(width, 20)
    return text if len(text) <= width else text[: width - 1].rstrip() + "…"
