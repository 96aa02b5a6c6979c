"""From files to verdicts: which records are read, and what is said when there are none, old ones or bad ones."""

from __future__ import annotations

import shutil

import pytest

from specdec_core.evidence import evaluate as module
from specdec_core.evidence.claims import CLAIMS, claim
from specdec_core.evidence.evaluate import EVALUATORS, Evaluator, evaluate, evaluate_all, failures, judge
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter, keep_records
from specdec_core.evidence.sweep_records import SWEEP
from specdec_core.evidence.verdicts import Finding, Outcome


@pytest.fixture
def rows(make_pair, make_sweep):
    return make_sweep([make_pair("a", alpha=(0.85,) * 8)])


def write(layout, rows, schema=SWEEP, name="02_sweep", profile="quick", **changes):
    made_on = fingerprint(profile, layout=layout).as_dict() | changes
    with RecordWriter(layout.records(profile), name, schema, made_on, code=["specdec_core"], layout=layout) as writer:
        for row in rows:
            writer.append(row)
    return writer.path


def outcomes(layout):
    return {verdict.id: verdict.verdict for verdict in evaluate_all(layout)}


def test_without_records_nothing_is_hidden(layout):
    found = outcomes(layout)
    assert set(found) == {one.id for one in CLAIMS}
    assert set(found.values()) == {Outcome.NOT_YET_MEASURED, Outcome.NOT_TESTABLE}
    assert found["S5"] is Outcome.NOT_TESTABLE
    assert "needs a device of kind 'mps'" in evaluate(claim("S5"), layout).note
    assert evaluate(claim("G7"), layout).note == "notebook 06_linear_attention does not exist yet"
    (layout.notebooks / "02_backend_sweep.ipynb").touch()
    assert "reproduce --only 02" in evaluate(claim("B1"), layout).note


def test_a_device_that_is_there_is_no_longer_missing(layout, monkeypatch):
    monkeypatch.setattr(module, "device_kinds", lambda: frozenset({"cpu", "mps"}))
    assert outcomes(layout)["S5"] is Outcome.NOT_YET_MEASURED


def test_records_of_this_machine_decide(layout, rows):
    write(layout, rows, device="here-2c")
    verdict = evaluate(claim("B1"), layout)
    assert verdict.verdict is Outcome.SUPPORTED and verdict.device == "here-2c" and not verdict.replayed
    in_process = judge("B1", rows)
    assert (verdict.value, verdict.interval) == (in_process.value, in_process.interval)


def test_kept_records_are_replayed_and_say_so(layout, rows):
    write(layout, rows, device="there-8c")
    keep_records("quick", layout)
    shutil.rmtree(layout.build)
    verdict = evaluate(claim("B1"), layout)
    assert verdict.verdict is Outcome.SUPPORTED and verdict.device == "there-8c" and verdict.replayed


@pytest.mark.parametrize("profile", ["quick", "full"])
def test_a_verdict_knows_the_profile_of_its_records(layout, rows, profile):
    write(layout, rows, device="there-8c", profile=profile)
    keep_records(profile, layout)
    assert evaluate(claim("B1"), layout).profile == profile  # of this machine's, which come first
    shutil.rmtree(layout.build)
    verdict = evaluate(claim("B1"), layout)
    assert verdict.replayed and verdict.profile == profile


def test_kept_records_of_this_device_come_first(layout, rows, monkeypatch):
    for device in ("here-2c", "there-8c"):  # the other device's are newer
        write(layout, rows, device=device)
        keep_records("quick", layout)
    shutil.rmtree(layout.build)
    assert evaluate(claim("B1"), layout).device == "there-8c"
    monkeypatch.setattr(module, "device_slug", lambda: "here-2c")
    assert evaluate(claim("B1"), layout).device == "here-2c"


def test_records_of_changed_code_fail(layout, rows):
    write(layout, rows)
    (layout.package / "measured.py").write_text("ANSWER = 2\n")
    verdicts = evaluate_all(layout)
    stale = {verdict.id for verdict in failures(verdicts)}
    assert stale == {"B1", "B2", "B3", "B4"}
    verdict = evaluate(claim("B1"), layout)
    assert verdict.value is None and "run notebook 02_backend_sweep again" in verdict.note


def test_records_of_another_version_fail(layout, rows):
    path = write(layout, rows)
    path.write_text(path.read_text().replace('"version":1', '"version":0', 1))
    assert evaluate(claim("B1"), layout).verdict is Outcome.STALE


def test_records_of_another_notebook_are_not_read(layout, rows):
    write(layout, rows, name="03_sweep")
    assert evaluate(claim("B1"), layout).verdict is Outcome.NOT_YET_MEASURED


def test_bad_records_are_said_and_stop_nothing(layout, rows):
    write(layout, [row for row in rows if row["arm"] == "sd"])
    verdict = evaluate(claim("B1"), layout)
    assert verdict.verdict is Outcome.INCONCLUSIVE and "no 'ar' row" in verdict.note
    path = write(layout, rows)
    path.write_text(path.read_text().replace('"arm":"sd"', '"arm":"sd', 1))
    verdict = evaluate(claim("B1"), layout)
    assert verdict.verdict is Outcome.INCONCLUSIVE and "cannot be used" in verdict.note


def test_a_claim_bound_to_a_device_reads_only_its_records(layout, rows, monkeypatch):
    monkeypatch.setitem(
        EVALUATORS, "S5", Evaluator((SWEEP,), lambda claim, rows: Finding(Outcome.SUPPORTED, float(len(rows))))
    )
    write(layout, rows, name="03_cpu")
    assert evaluate(claim("S5"), layout).verdict is Outcome.NOT_TESTABLE
    hardware = fingerprint(gpu="Apple M2").hardware
    write(layout, rows[:2], name="03_metal", hardware=hardware, device="apple-m2-8c")
    verdict = evaluate(claim("S5"), layout)
    assert verdict.verdict is Outcome.SUPPORTED and verdict.device == "apple-m2-8c" and verdict.value == 2


def test_judge_refuses_what_it_cannot_judge(rows):
    with pytest.raises(ValueError, match="unknown claim"):
        judge("Z1", rows)
    with pytest.raises(ValueError, match="G7 has no evaluator yet"):
        judge("G7", rows)
    with pytest.raises(ValueError, match="reads records of sweep, got 2 lists"):
        judge("B1", rows, rows)


def test_evaluators_belong_to_claims():
    assert set(EVALUATORS) <= {one.id for one in CLAIMS}
