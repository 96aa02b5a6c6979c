"""Notebook 01's parts on a tiny model: what is recorded, what is read, and what is refused."""

from __future__ import annotations

import shutil
from dataclasses import replace

import pytest

from specdec_core.bench import audit, lossless
from specdec_core.bench.lossless import (
    PLANS,
    LosslessPlan,
    agree_greedily,
    audit_samplers,
    audit_table,
    kill_mutants,
    prove_exactly,
    sample_law,
)
from specdec_core.bench.token_records import MAIN, SD, SETTINGS
from specdec_core.evidence.audit_records import AUDIT
from specdec_core.evidence.evaluate import judge
from specdec_core.evidence.layout import PROFILES
from specdec_core.evidence.lossless_records import EXACT_LAW, GREEDY, KILL, LAW_CURVE, LAW_TEST, SIZE
from specdec_core.evidence.provenance import device_slug
from specdec_core.evidence.records import RecordWriter, keep_records, read_records
from specdec_core.evidence.schemas import RecordError
from specdec_core.evidence.verdicts import Outcome
from specdec_core.forensics.exact_grid import grid
from specdec_core.forensics.mutants import MUTANTS
from specdec_core.models.rounding import rounded
from tests.bench.conftest import copy_checkout, small_design

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = LosslessPlan(True, 500, False, greedy_prompts=4, greedy_tokens=8, torch_prompts=1)


def test_every_profile_has_a_plan_and_the_full_one_reads_nothing():
    assert set(PLANS) == set(PROFILES)
    assert PLANS["quick"].live and not PLANS["full"].live and PLANS["full"].thorough


def test_exact_laws_are_recorded_and_judged(layout, monkeypatch):
    monkeypatch.setattr(lossless, "grid", lambda: list(grid())[:3])
    rows = prove_exactly("quick", layout)
    assert read_records(layout.records("quick") / "01_exact_law.jsonl", EXACT_LAW)[1] == rows
    assert {judge(id, rows).verdict for id in ("L1", "L2")} == {Outcome.SUPPORTED}


def test_kills_are_recorded_of_the_clean_decoder_too(layout, monkeypatch):
    monkeypatch.setattr(lossless, "MUTANTS", MUTANTS[:2])
    rows = kill_mutants(PLAN, "quick", layout)
    assert read_records(layout.records("quick") / "01_kills.jsonl", KILL)[1] == rows
    assert {row["mutant"] for row in rows} == {"clean code", *(mutant.name for mutant in MUTANTS[:2])}


@pytest.fixture(scope="module")
def drawn(tmp_path_factory, tiny_opened, short_prompts):
    """A checkout whose full run has been made and kept."""
    layout = copy_checkout(tmp_path_factory.mktemp("drawn"))
    with pytest.MonkeyPatch.context() as patch:
        small_design(patch, short_prompts, 24)
        rows = sample_law(LosslessPlan(False, 0, False, 0, 0, 0), tiny_opened, "full", layout)
    keep_records("full", layout)
    return layout, rows


def test_a_full_run_draws_everything(drawn):
    layout, rows = drawn
    folder = layout.records("full")
    assert read_records(folder / "01_law_tests.jsonl", LAW_TEST)[1] == rows.tests
    assert read_records(folder / "01_law_curves.jsonl", LAW_CURVE)[1] == rows.curves
    assert read_records(folder / "01_sizes.jsonl", SIZE)[1] == rows.sizes
    assert {row["setting"] for row in rows.tests} == {setting.name for setting in SETTINGS}
    assert all(row["live"] for row in rows.tests)
    assert {row["tokens"] for row in rows.tests if row["setting"] == "t1" and row["comparison"] == SD} == {5 * 24 * 6}


def test_a_quick_run_draws_the_main_setting_and_reads_the_rest(drawn, tiny_opened, short_prompts, monkeypatch):
    layout, full = drawn
    small_design(monkeypatch, short_prompts, 24)
    rows = sample_law(PLAN, tiny_opened, "quick", layout)
    assert {row["setting"]: row["live"] for row in rows.tests} == {s.name: s == MAIN for s in SETTINGS}
    assert {row["tokens"] for row in rows.tests if row["setting"] == "t1"} == {5 * 24}
    others = [row | {"live": True} for row in rows.tests if row["setting"] != "t1"]
    assert others == [row for row in full.tests if row["setting"] != "t1"]
    assert [row | {"live": True} for row in rows.sizes] == full.sizes  # from the committed autoregressive tokens
    assert (layout.records("quick") / "01_law_tests.jsonl").is_file()


def test_tokens_that_are_absent_or_of_other_code_are_refused(drawn, tiny_opened, tmp_path):
    layout, _ = drawn
    elsewhere = copy_checkout(tmp_path / "empty")
    with pytest.raises(RecordError, match=r"no records 01_tokens_t1.jsonl: run notebook 01 with the full"):
        sample_law(PLAN, tiny_opened, "quick", elsewhere)
    shutil.copytree(layout.kept_records / device_slug(), elsewhere.kept_records / device_slug())
    source = elsewhere.package / "rejection.py"
    source.write_text(source.read_text() + "\nX = 1\n")
    with pytest.raises(RecordError, match=r"01_tokens_t1.jsonl was made by other code than this"):
        sample_law(PLAN, tiny_opened, "quick", elsewhere)


def test_greedy_ids_are_compared_on_both_engines(tiny_opened, short_prompts, layout, monkeypatch):
    monkeypatch.setattr(lossless, "load_prompts", lambda: short_prompts)
    monkeypatch.setattr(lossless, "rounded", lambda checkpoint, bits: rounded(checkpoint, bits, 16))
    monkeypatch.setattr(lossless, "SKIPPED_TO", 1)
    rows = agree_greedily(PLAN, tiny_opened, "quick", layout)
    assert read_records(layout.records("quick") / "01_greedy.jsonl", GREEDY)[1] == rows
    assert [(row["backend"], row["drafter"]) for row in rows[::4]][:5] == [
        ("numba float32", "look-up"), ("numba float32", "look-up tree"), ("numba float32", "4-bit copy"),
        ("numba float32", "first layers"), ("torch float32", "look-up"),
    ]  # fmt: skip
    assert len(rows) == 4 * 4 + 1 and judge("L4", rows).verdict is Outcome.SUPPORTED


def audit_row(test, adjusted, decoder="ours", verdict="lossless", **changes):
    return {
        "decoder": decoder, "pair": "p", "setting": "T=1", "test": test, "statistic": 1.0, "p": 0.5, "bias": 0.01,
        "adjusted": adjusted, "low": 0.0, "high": 0.02, "tv_lower": 0.001, "tokens": 50, "rounds": None, "note": "",
        "verdict": verdict,
    } | changes  # fmt: skip


def test_audits_are_made_once_in_full_and_read_in_quick(tiny_opened, layout, monkeypatch):
    full, made = LosslessPlan(False, 0, False, 0, 0, 0), []

    def record(folder, pairs, provenance, layout):
        made.append([pair.name for pair in pairs])
        with RecordWriter(folder, "01_audit", AUDIT, provenance, code=audit.CODE, layout=layout) as file:
            file.append(audit_row("e-process", 0.4))

    monkeypatch.setattr(lossless, "record_audit", record)
    monkeypatch.setattr(lossless, "real_pair", lambda opened: replace(audit.tiny_pair(), name="real"))
    with pytest.raises(RecordError, match=r"no records 01_audit.jsonl"):
        audit_samplers(PLAN, tiny_opened, "quick", layout)
    rows = audit_samplers(full, tiny_opened, "full", layout)
    assert rows == audit_samplers(full, tiny_opened, "full", layout) and made == [["tiny, 4 bits", "real"]]
    keep_records("full", layout)
    assert audit_samplers(PLAN, tiny_opened, "quick", layout) == rows
    source = layout.package / "forensics" / "scoring.py"
    source.write_text(source.read_text() + "\nX = 1\n")
    audit_samplers(full, tiny_opened, "full", layout)
    assert len(made) == 2


def test_an_audit_is_a_line_with_its_nearest_test():
    rows = [audit_row("PIT", 0.4), audit_row("e-process", 0.2), audit_row("χ², nominal", None)]
    rows += [audit_row("PIT", 0.001, decoder="other", verdict="not lossless")]
    table = audit_table(rows)
    assert table.index.get_level_values("decoder").tolist() == ["ours", "other"]
    assert table["nearest test"].tolist() == ["e-process", "PIT"] and table["its adjusted p"].tolist() == [0.2, 0.001]
    assert table["verdict"].tolist() == ["lossless", "not lossless"]
