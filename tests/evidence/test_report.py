"""The report is one page that needs nothing else, and a replay makes everything from records."""

from __future__ import annotations

import json
import re
from html.parser import HTMLParser

import pytest

from specdec_core.evidence import report
from specdec_core.evidence.claims import CLAIMS
from specdec_core.evidence.evaluate import failures
from specdec_core.evidence.figures import read_captions
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter, keep_records
from specdec_core.evidence.report import replay, write_report
from specdec_core.evidence.sweep_records import SWEEP


class Page(HTMLParser):
    """Tags that are left open, references, alternative texts, and the text."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.references: list[str] = []
        self.alternatives: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        values = dict(attrs)
        self.references += [values[name] for name in ("src", "href") if name in values]
        if tag == "img":
            self.alternatives.append(values["alt"])
        if tag not in ("meta", "img"):
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text += data


def read(path) -> Page:
    page = Page()
    page.feed(path.read_text(encoding="utf-8"))
    return page


@pytest.fixture
def kept(layout, make_pair, make_sweep):
    """A checkout with committed records of another machine and nothing built."""
    made_on = fingerprint(layout=layout).as_dict() | {"device": "there-8c"}
    with RecordWriter(
        layout.records("quick"), "02_sweep", SWEEP, made_on, code=["specdec_core"], layout=layout
    ) as writer:
        for row in make_sweep([make_pair("a", alpha=(0.85,) * 8)], lengths=(1, 4)):
            writer.append(row)
    keep_records("quick", layout)
    writer.path.unlink()
    return layout


def test_a_replay_makes_figures_verdicts_and_a_self_contained_report(kept):
    made = replay(kept)
    assert {path.stem for path in made.figures} == set(read_captions(kept)) and len(made.figures) == 5
    b1 = next(verdict for verdict in made.verdicts if verdict.id == "B1")
    assert b1.verdict == "SUPPORTED" and b1.replayed and b1.device == "there-8c"
    assert [row["id"] for row in json.loads((kept.build / "claims.json").read_text())] == [one.id for one in CLAIMS]
    page = read(made.report)
    assert page.open == [] and "there-8c" in page.text and "replayed, quick" in page.text
    assert failures(made.verdicts) == []
    assert len(page.alternatives) == len(made.figures) and all(page.alternatives)
    assert all(reference.startswith("data:image/png;base64,") for reference in page.references)
    assert not re.search(r"https?://", page.text)
    for one in CLAIMS:
        assert one.statement in page.text


def test_a_replay_with_changed_code_fails(kept, monkeypatch):
    monkeypatch.setattr(report, "redraw_all", lambda layout: [])
    (kept.package / "measured.py").write_text("ANSWER = 2\n")
    made = replay(kept)
    assert {verdict.id for verdict in failures(made.verdicts)} == {"B1", "B2", "B3", "B4"}
    assert "STALE" in read(made.report).text


def test_an_empty_checkout_has_a_report_too(layout):
    page = read(write_report(layout=layout))
    assert page.open == [] and "None yet" in page.text and f"{len(CLAIMS)} registered claims" in page.text


def test_what_records_say_is_escaped(layout):
    source = layout.figures
    source.mkdir()
    (source / "02_x.png").write_bytes(b"png")
    (source / "captions.json").write_text(json.dumps({"02_x": {"caption": "<script>a & b</script>", "alt": '"x"'}}))
    path = write_report(layout=layout)
    assert "<script>" not in path.read_text() and "<script>a & b</script>" in read(path).text


def test_notebook_pages_are_made_once(layout, write_notebook):
    write_notebook("00_setup", 'profile = "quick"', "print(1)")
    page = read(write_report(layout=layout))
    assert page.references == ["html/quick/00_setup.html"] and "as committed" in page.text
    html = layout.build / "html" / "quick" / "00_setup.html"
    assert "print" in html.read_text()
    made = html.stat().st_mtime_ns
    write_report(layout=layout)
    assert html.stat().st_mtime_ns == made
