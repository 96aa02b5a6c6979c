"""What is printed of verdicts: for people, for programs, for the README and for checked notebook cells."""

from __future__ import annotations

import dataclasses
import json

import pytest

from specdec_core.evidence.claims import CLAIMS
from specdec_core.evidence.claims_table import (
    BEGIN,
    END,
    checked_line,
    json_rows,
    markdown_table,
    print_claims,
    text_table,
    update_readme,
    verdict_line,
)
from specdec_core.evidence.evaluate import EVALUATORS, evaluate_all, judge
from specdec_core.evidence.verdicts import Outcome

KEYS = {"id", "statement", "verdict", "value", "interval", "threshold", "evidence", "device"}


@pytest.fixture
def b1(make_pair, make_sweep):
    return judge("B1", make_sweep([make_pair("a")]), device="amd-epyc-2c")


@pytest.fixture
def b2(make_pair, make_sweep):
    return judge("B2", make_sweep([make_pair("a")]))


def test_a_checked_line_says_no_more_than_every_run_says(b1, b2):
    assert checked_line(b2) == "B2: SUPPORTED"
    assert checked_line(b1) == "B1: verdict within the set registered for this device"
    refuted = dataclasses.replace(b1, verdict=Outcome.REFUTED)
    assert checked_line(refuted) == checked_line(b1)
    for outcome in (Outcome.STALE, Outcome.NOT_TESTABLE, Outcome.NOT_YET_MEASURED):
        line = checked_line(dataclasses.replace(b1, verdict=outcome))
        assert line.startswith(f"B1: {outcome} is outside the set registered for this device")


def test_a_checked_line_of_a_claim_that_nothing_measures_yet_says_so(layout, monkeypatch):
    monkeypatch.delitem(EVALUATORS, "S1")
    verdict = next(verdict for verdict in evaluate_all(layout) if verdict.id == "S1")
    assert checked_line(verdict) == "S1: NOT YET MEASURED"


def test_a_checked_line_depends_on_the_device(layout):
    metal = next(verdict for verdict in evaluate_all(layout) if verdict.id == "S5")
    assert "within the set" in checked_line(metal, frozenset({"cpu"}))
    assert "outside the set" in checked_line(metal, frozenset({"cpu", "mps"}))


def test_a_verdict_line_has_number_device_and_origin(b1):
    line = verdict_line(dataclasses.replace(b1, replayed=True))
    assert line.startswith(f"B1 {b1.verdict}: {b1.interval} on amd-epyc-2c, replayed from committed records. a K=")
    assert line.endswith(".") and not line.endswith("..")


@pytest.mark.parametrize(
    ("replayed", "profile", "mark"),
    [(False, "quick", ""), (True, "full", " (replayed)"), (True, "quick", " (replayed, quick)"), (False, "full", "")],
)
def test_tables_mark_what_is_replayed_and_what_a_quick_run_gave(b1, replayed, profile, mark):
    verdict = dataclasses.replace(b1, replayed=replayed, profile=profile)
    assert f"| {b1.verdict}{mark} |" in markdown_table([verdict])
    assert f"  {b1.verdict}{mark}  " in text_table([verdict])
    assert json_rows([verdict])[0]["profile"] == profile


def test_the_text_table_has_every_claim_and_fits(layout, b1):
    verdicts = [b1 if verdict.id == "B1" else verdict for verdict in evaluate_all(layout)]
    lines = text_table(verdicts).splitlines()
    assert len(lines) == 1 + len(CLAIMS) + 1
    assert all(len(line) <= 120 for line in lines if not line.startswith("    "))
    assert lines[lines.index(next(line for line in lines if line.startswith("B1"))) + 1].strip() == b1.note


def test_json_is_a_list_with_the_promised_keys(layout, capsys):
    print_claims(as_json=True, layout=layout)
    rows = json.loads(capsys.readouterr().out)
    assert [row["id"] for row in rows] == [one.id for one in CLAIMS]
    assert all(set(row) >= KEYS for row in rows)


def test_the_plain_command_prints_the_table(layout, capsys):
    verdicts = print_claims(layout=layout)
    assert capsys.readouterr().out.rstrip("\n") == text_table(verdicts)


def test_the_markdown_table_is_regular(layout):
    lines = markdown_table(evaluate_all(layout)).splitlines()
    assert len({line.count("|") - line.count("\\|") for line in lines}) == 1
    assert sum(line.startswith("| | **") for line in lines) == 6
    assert any("1.61× at K=6" in line and "| B1 |" in line for line in lines)


def test_the_readme_block_is_rewritten_and_nothing_else(layout):
    readme = layout.root / "README.md"
    verdicts = evaluate_all(layout)
    readme.write_text(f"# Title\n\n{BEGIN}\nold\n{END}\n\nafter\n")
    assert update_readme(readme, verdicts)
    text = readme.read_text()
    assert text == f"# Title\n\n{BEGIN}\n{markdown_table(verdicts)}\n{END}\n\nafter\n"
    assert not update_readme(readme, verdicts)
    assert readme.read_text() == text


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}\n{BEGIN}", f"{BEGIN}{BEGIN}{END}"])
def test_a_readme_without_its_marks_is_refused_and_kept(layout, text):
    readme = layout.root / "README.md"
    readme.write_text(text)
    with pytest.raises(ValueError, match="needs one line"):
        update_readme(readme, evaluate_all(layout))
    assert readme.read_text() == text
