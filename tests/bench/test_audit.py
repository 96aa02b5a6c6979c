import json
from dataclasses import replace

import pytest

from specdec_core.bench import audit as bench
from specdec_core.bench.audit import CODE, Pair, Setting, real_pair, record_audit, rows_of, summary, tiny_pair
from specdec_core.evidence.audit_records import AUDIT, DECODERS, FINDINGS, SINGLE
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.records import read_records
from specdec_core.evidence.schemas import RecordError
from specdec_core.forensics.audit_report import Finding, Report
from specdec_core.placement import Placement, PlacementError
from specdec_core.sampling import Options
from specdec_core.statistics.battery import EQUIVALENCE, NOMINAL, ONE_SAMPLE, PERMUTED

pytestmark = pytest.mark.usefixtures("one_thread")


def short(settings: int = 1) -> Pair:
    pair = tiny_pair(prompts=4, length=12, repeats=1)
    return replace(pair, settings=pair.settings[:settings])


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("audit")
    path = record_audit(folder, [short(2)], {}, progress=False)
    assert path == folder / "01_audit.jsonl"
    return read_records(path, AUDIT)[1]


def test_every_decoder_is_audited_under_every_setting_by_every_test(rows):
    tests = (*ONE_SAMPLE, NOMINAL, PERMUTED, EQUIVALENCE, FINDINGS)
    audits = [("T=1", decoder) for decoder in DECODERS] + [("T=0.7", d) for d in DECODERS if d != SINGLE]
    expected = [(*each, test) for each in audits for test in tests]
    assert [(row["setting"], row["decoder"], row["test"]) for row in rows] == expected
    assert {row["tokens"] for row in rows} == {48} and {row["pair"] for row in rows} == {"tiny, 4 bits"}
    assert {row["test"] for row in rows if row["adjusted"] is None} == {NOMINAL, EQUIVALENCE, FINDINGS}


def test_one_audit_has_one_verdict_and_one_bias(rows):
    audits = {(row["setting"], row["decoder"]) for row in rows}
    assert len(audits) == 7
    for setting, decoder in audits:
        own = [row for row in rows if (row["setting"], row["decoder"]) == (setting, decoder)]
        assert len({(row["verdict"], row["bias"], row["tv_lower"], row["rounds"]) for row in own}) == 1
        assert own[0]["low"] < own[0]["bias"] < own[0]["high"]
        assert (own[0]["rounds"] is None) == (decoder == "transformers, plain")


def test_audits_of_one_setting_are_not_made_on_the_same_sequences(rows):
    assert len({row["bias"] for row in rows}) == 7


def test_the_level_is_shared_by_all_audits_of_a_run(monkeypatch):
    seen = []
    monkeypatch.setattr(bench, "audit", lambda *a, alpha, **how: seen.append(alpha) or Report(a[3], 0, 0))
    list(bench.measure_audit(short(2), alpha=0.07))
    assert seen == pytest.approx([0.01] * 7)


def test_violations_and_failures_are_one_row_of_their_own():
    broken = Report(Options(temperature=1.0), 5, 1, violations=(Finding(0, 1, "too long"),))
    assert [(row["test"], row["p"], row["statistic"], row["verdict"]) for row in rows_of("d", "p", "s", broken)] == [
        (FINDINGS, 0.0, 1, "not lossless")
    ]
    crashed = Report(Options(temperature=1.0), 0, 0, failures=(Finding(0, 1, "boom"),))
    (row,) = rows_of("d", "p", "s", crashed)
    assert (row["p"], row["verdict"], row["note"]) == (1.0, "undecided", "prompt 0, sequence 1: boom")
    AUDIT.validated(row)
    assert summary(crashed) == "undecided, 0 tokens; 0 violations, 1 failures"
    with pytest.raises(RecordError, match="verdict 'fine'"):
        AUDIT.validated(row | {"verdict": "fine"})


def test_the_tiny_pair_is_as_large_as_the_abstracts_sample_and_drafts_well_enough():
    pair = tiny_pair()
    for setting in pair.settings:
        most = setting.options.max_new_tokens * setting.repeats * len(pair.prompts)
        assert most >= 9200 and setting.repeats > 1  # more than one sequence a prompt, or there is no MMD
    assert pair.drafting.fingerprint != pair.checkpoint.fingerprint


def test_the_real_pair_takes_prompts_of_every_domain_and_bans_end_tokens(tiny_opened, monkeypatch, short_prompts):
    monkeypatch.setattr(bench, "load_prompts", lambda: short_prompts)
    monkeypatch.setattr(bench, "held_out", lambda prompts: prompts)
    monkeypatch.setattr(bench, "rounded", lambda checkpoint, bits: checkpoint)  # its 48 inputs are no groups of 32
    pair = real_pair(tiny_opened, prompts=3, length=9)
    assert len(set(pair.prompts)) == 3
    assert all(setting.options.min_new_tokens == 9 and setting.options.eos for setting in pair.settings)


def test_the_bench_audits_the_tiny_pair_and_then_the_model(tiny_folder, tmp_path, monkeypatch, capsys):
    small = [Setting("T=1", Options(temperature=1.0, max_new_tokens=6), 1)]
    monkeypatch.setattr(bench, "tiny_pair", lambda: short())
    monkeypatch.setattr(bench, "real_pair", lambda opened: replace(short(), name=opened.name, settings=small))
    bench.bench_audit(str(tiny_folder), Placement("numba", threads=1), tmp_path)
    header, *lines = (tmp_path / "01_audit.jsonl").read_text().splitlines()
    assert json.loads(header)["code"]["paths"] == sorted(CODE)
    assert {json.loads(line)["pair"] for line in lines} == {"tiny, 4 bits", str(tiny_folder)}
    assert capsys.readouterr().out.count("tokens") == 7


def test_int8_weights_are_no_dtype_of_the_decoders_beside_ours(tmp_path):
    with pytest.raises(PlacementError, match="would take int8 for something else: expected one of float64, float32, b"):
        bench.bench_audit("any", Placement("numba", dtype="int8"), tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_the_records_depend_on_is_there():
    assert all((Layout().root / path).exists() for path in CODE)
