from dataclasses import replace

import numpy as np
import pytest

from specdec_core.bench import BENCHES, greedy
from specdec_core.bench.greedy import greedy_agreement
from specdec_core.bench.sources import INT8_PASS
from specdec_core.decode import decode
from specdec_core.drafters.layer_skip import LayerSkipDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.evidence.lossless_records import GREEDY
from specdec_core.evidence.records import RecordWriter, read_records
from specdec_core.measure.sweep import Case
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.sampling import Options
from specdec_core.targets.table import TableTarget, random_logits
from specdec_core.targets.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")

DOUBLE = Transformer(tiny_llama(1), Placement(dtype="float64"))
CASES = [Case(f"p{number}", "math", "report", (number, 5, number, 5)) for number in range(3)]
OPTIONS = Options(max_new_tokens=16)
TABLE = TableTarget(random_logits(6, seed=2), 6)


def agreement(target, drafters, **how):
    return list(greedy_agreement("b", target, how.pop("reference", target), drafters, CASES, OPTIONS, **how))


@pytest.mark.parametrize("slots", [1, 3])
def test_a_right_decoder_agrees_on_every_prompt_with_every_drafter(slots):
    drafters = {"n-gram": NGramDrafter(), "tree": NGramDrafter(candidates=2), "layers": LayerSkipDrafter(DOUBLE, 1)}
    rows = agreement(DOUBLE, drafters, slots=slots, k=3)
    assert [(row["drafter"], row["prompt_id"]) for row in rows] == [(d, c.prompt_id) for d in drafters for c in CASES]
    assert all(row["identical"] and row["certified"] and row["index"] == -1 for row in rows)
    assert {(row["K"], row["slots"], row["tokens"], row["gap"]) for row in rows} == {(3, slots, 16, 0.0)}


class Wrong(TableTarget):
    """Verifies one token rightly and more of them wrongly."""

    def verify(self, state, slots, tokens, forest):
        found = super().verify(state, slots, tokens, forest)
        return replace(found, logits=-found.logits) if len(tokens) > 1 else found


def test_a_wrong_target_is_told_with_place_and_gap_and_not_excused():
    wrong = Wrong(random_logits(6, seed=2), 6)
    rows = agreement(wrong, {"n-gram": NGramDrafter()}, reference=TABLE)
    assert not any(row["identical"] or row["certified"] for row in rows)
    assert all(0 <= row["index"] < 16 and row["gap"] > 2 * row["epsilon"] for row in rows)


class Rounded(TableTarget):
    """The same, but that rounding of wide passes decides near-ties."""

    def verify(self, state, slots, tokens, forest):
        found = super().verify(state, slots, tokens, forest)
        if len(tokens) > 1:
            found.logits[:, 5] += 2e-4
        return found


def near_tie(prefix):
    """Token 4 wins after seven tokens, by a hair; the same pattern for look-up everywhere else."""
    values = np.eye(6)[prefix[-2] % 4 if len(prefix) > 1 else 0]
    return values if len(prefix) != 7 else np.array([0, 0, 0, 0, 1.0, 1.0 - 1e-4])


def test_near_ties_differ_and_are_certified_each_by_the_rounds_of_its_own_prompt():
    target, reference = Rounded(near_tie, 6), TableTarget(near_tie, 6)
    # The first token is verified alone in the first prompt, with a draft in the second.
    prompts = ((0, 1, 2, 3), (2, 1, 2, 1, 2, 1, 2))
    cases = [Case(f"p{len(tokens)}", "math", "report", tokens) for tokens in prompts]
    rows = list(greedy_agreement("b", target, reference, {"n-gram": NGramDrafter()}, cases, OPTIONS, slots=2))
    assert [(row["identical"], row["certified"], row["index"]) for row in rows] == [(False, True, 3), (False, True, 0)]


def test_rows_are_decoded_together(monkeypatch):
    seen = []
    monkeypatch.setattr(greedy, "decode", lambda *a, **how: seen.append(how.get("slots")) or decode(*a, **how))
    agreement(TABLE, {"n-gram": NGramDrafter()}, slots=2)
    assert seen == [None] * 3 + [2]


def test_a_length_fault_has_a_gap_that_can_be_recorded(monkeypatch):
    def losing(target, requests, *drafter, **how):
        rounds = list(decode(target, requests, *drafter, **how))
        return rounds[:-1] if drafter else rounds

    monkeypatch.setattr(greedy, "decode", losing)
    last = agreement(TABLE, {"n-gram": NGramDrafter()})[-1]
    assert not last["identical"] and not last["certified"]
    assert last["gap"] == 1e300 and last["index"] == last["tokens"] < 16


def test_rows_are_records_that_can_be_read_again(tmp_path):
    rows = agreement(TABLE, {"n-gram": NGramDrafter()})
    with RecordWriter(tmp_path, "greedy", GREEDY, {}, code=["specdec_core/bench/greedy.py"]) as file:
        for row in rows:
            file.append(row)
    assert read_records(file.path, GREEDY)[1] == rows


@pytest.mark.parametrize(("engine", "dtype"), [("torch", "float64"), ("numba", "int8")])
def test_the_bench_asks_every_prompt_and_says_what_differs(
    tiny_folder, short_prompts, tmp_path, monkeypatch, capsys, engine, dtype
):
    monkeypatch.setattr(greedy, "load_prompts", lambda: short_prompts)
    BENCHES["greedy"](str(tiny_folder), Placement(engine, dtype=dtype, threads=1), tmp_path)
    header, rows = read_records(tmp_path / f"bench_greedy_{engine}_{dtype}.jsonl", GREEDY)
    assert set(INT8_PASS).isdisjoint(header["code"]["paths"]) == (dtype != "int8")
    assert [row["prompt_id"] for row in rows] == [prompt.id for prompt in short_prompts]
    assert all(row["identical"] and row["certified"] for row in rows)
    assert "12 outputs, 0 differ from AR, uncertified: none" in capsys.readouterr().out
