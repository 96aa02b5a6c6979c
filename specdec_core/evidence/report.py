"""The HTML report, one self-contained page, and the replay: figures, verdicts and tables from records alone."""

from __future__ import annotations

import base64
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_core.cache import atomic_write
from specdec_core.evidence.claims import claim
from specdec_core.evidence.claims_table import json_rows, measured_text, replay_text
from specdec_core.evidence.evaluate import evaluate_all
from specdec_core.evidence.figures import read_captions
from specdec_core.evidence.gallery import redraw_all
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import find_records
from specdec_core.evidence.report_page import TEMPLATE
from specdec_core.evidence.verdicts import Verdict


@dataclass(frozen=True)
class Replay:
    """What `replay` made again from records."""

    verdicts: tuple[Verdict, ...]
    figures: tuple[Path, ...]
    report: Path


def replay(layout: Layout | None = None) -> Replay:
    """Redraw the figures, evaluate the claims and write the report from records: no model, no torch, seconds.

    Also writes build/claims.json. Verdicts from committed records say that they are replayed; those whose code has
    changed since come out STALE (`evaluate.failures` lists them, and a command should then fail).
    """
    layout = layout or Layout()
    figures = tuple(redraw_all(layout))
    verdicts = tuple(evaluate_all(layout))
    with atomic_write(layout.build / "claims.json") as temporary:
        temporary.write_text(json.dumps(json_rows(verdicts), indent=1, ensure_ascii=False), encoding="utf-8")
    return Replay(verdicts, figures, write_report(verdicts, layout=layout))


def write_report(
    verdicts: Sequence[Verdict] | None = None, profile: str = "quick", layout: Layout | None = None
) -> Path:
    """Write build/report.html: claims, figures with captions inlined, links to the notebooks' HTML, provenance."""
    from jinja2 import Environment

    layout = layout or Layout()
    verdicts = verdicts if verdicts is not None else evaluate_all(layout)
    page = Environment(autoescape=True, trim_blocks=True).from_string(TEMPLATE)
    text = page.render(
        summary=_summary(verdicts),
        claims=[_claim_row(verdict) for verdict in verdicts],
        figures=_figures(layout),
        notebooks=_notebook_pages(profile, layout),
        provenance=_provenance(profile, layout),
    )
    path = layout.build / "report.html"
    with atomic_write(path) as temporary:
        temporary.write_text(text, encoding="utf-8")
    return path


def _summary(verdicts: Sequence[Verdict]) -> str:
    counts = Counter(str(verdict.verdict) for verdict in verdicts)
    return f"{len(verdicts)} registered claims: " + ", ".join(f"{n} {name}" for name, n in counts.most_common()) + "."


def _claim_row(verdict: Verdict) -> dict[str, Any]:
    registered = claim(verdict.id)
    return {
        "id": verdict.id,
        "statement": registered.statement,
        "note": verdict.note,
        "paper": registered.paper,
        "ours": registered.ours,
        "verdict": str(verdict.verdict),
        "how": replay_text(verdict),
        "measured": measured_text(verdict),
        "evidence": ", ".join(verdict.evidence),
        "device": verdict.device or "–",
    }


def _figures(layout: Layout) -> list[dict[str, str]]:
    found = []
    for name, entry in sorted(read_captions(layout).items()):
        path = layout.figures / f"{name}.png"
        if path.is_file():
            found.append({"name": name, **entry, "png": base64.b64encode(path.read_bytes()).decode()})
    return found


def _notebook_pages(profile: str, layout: Layout) -> list[dict[str, str]]:
    """HTML of each notebook, of its executed copy if there is one; converted again only when the notebook is newer."""
    pages = []
    for committed in layout.find_notebooks():
        executed = layout.executed(profile) / committed.name
        source, origin = (executed, f"run here, {profile}") if executed.is_file() else (committed, "as committed")
        page = layout.build / "html" / profile / f"{committed.stem}.html"
        if not page.is_file() or page.stat().st_mtime < source.stat().st_mtime:
            _convert(source, page)
        pages.append({"name": committed.stem, "href": f"html/{profile}/{page.name}", "origin": origin})
    return pages


def _convert(source: Path, page: Path) -> None:
    from nbconvert import HTMLExporter

    text, _ = HTMLExporter(template_name="classic").from_filename(str(source))  # the one that keeps alternative texts
    with atomic_write(page) as temporary:
        temporary.write_text(text, encoding="utf-8")


def _provenance(profile: str, layout: Layout) -> list[dict[str, Any]]:
    """This machine, and every device whose records the verdicts may rest on."""
    blocks = [_block("This report's machine", fingerprint(profile, layout=layout).as_dict())]
    for file in find_records(layout=layout):
        origin = "committed" if file.kept else "measured here"
        title = f"Records {file.path.name}, {origin}, {file.header['created']}"
        blocks.append(_block(title, file.header["provenance"]))
    return blocks


def _block(title: str, provenance: Mapping[str, Any]) -> dict[str, Any]:
    entries = [("device", provenance.get("device", "–"))]
    for part in ("hardware", "software", "source", "run"):
        for name, value in provenance.get(part, {}).items():
            if isinstance(value, Mapping):
                value = ", ".join(f"{key} {version}" for key, version in value.items())
            entries.append((name.replace("_", " "), "–" if value is None else value))
    entries += [(name.replace("_", " "), provenance.get(name, "–")) for name in ("hardware_hash", "software_hash")]
    return {"title": title, "entries": entries}
