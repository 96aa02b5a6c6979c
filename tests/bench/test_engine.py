import numpy as np
import pytest

from specdec_core.bench import engine
from specdec_core.bench.engine import (
    ENGINE,
    FLOORS,
    decode_arm,
    floor_rows,
    lookup_rows,
    measure_engine,
    prefill_arm,
    transformers_arm,
    verification_arm_at,
)
from specdec_core.measure.ceilings import READ_BYTES
from specdec_core.measure.curves import TimeCurve
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.sampling import Options
from specdec_core.targets.table import TableTarget, random_logits

pytestmark = pytest.mark.usefixtures("one_thread")


class Watched(TableTarget):
    """Counts passes, and the tokens of each; remembers what was prefilled."""

    def __init__(self):
        super().__init__(random_logits(7, seed=1), 7)
        self.nodes, self.prefilled = [], []

    def prefill(self, state, slots, prompts):
        self.prefilled.append([len(prompt) for prompt in prompts])
        return super().prefill(state, slots, prompts)

    def verify(self, state, slots, tokens, forest):
        self.nodes.append(len(tokens))
        return super().verify(state, slots, tokens, forest)


TABLE = TableTarget(random_logits(7, seed=1), 7)
TABLE.name = "table"
PROMPTS = np.arange(18).reshape(3, 6) % 7


class TestArms:
    def test_decoding_takes_so_many_tokens_of_every_row(self):
        target = Watched()
        rounds = decode_arm(target, PROMPTS, 5)()
        assert target.nodes == [3] * 5 and sum(len(row.emitted) for each in rounds for row in each.rows) == 15

    def test_prefill_computes_no_logits(self):
        target = Watched()
        prefill_arm(target, PROMPTS[0])()
        assert target.prefilled == [[6]] and target.nodes == []

    def test_a_step_of_a_batch_is_one_node_a_row_on_a_warm_cache(self):
        target = Watched()
        arm = verification_arm_at(target, PROMPTS, 5)
        arm(), arm()
        assert target.nodes == [3, 3] and target.prefilled == [[6] * 3]

    def test_a_model_made_in_memory_is_no_model_for_transformers(self):
        with pytest.raises(ValueError, match="tiny-1 was made in memory: transformers needs a folder"):
            transformers_arm(tiny_llama(1), PROMPTS[0], 3)


CEILING = {"weight_bytes": READ_BYTES / 4}
READ = np.array([0.4, 0.8])  # so the floors are 0.1 and 0.2


class TestFloors:
    def test_a_pass_is_paired_with_the_floor_of_its_repeat(self):
        (row,) = floor_rows({(64, 1): np.array([0.12, 0.24])}, READ, CEILING)
        assert ENGINE.validated(row) == row
        assert row["ratio"] == pytest.approx(1.2) and row["low"] == pytest.approx(1.2) == row["high"]
        assert row["reached"] and row["threshold"] == FLOORS[1] and row["samples"] == 2

    def test_a_slow_pass_does_not_reach_it(self):
        (row,) = floor_rows({(64, 8): np.array([0.3, 0.6])}, READ, CEILING)
        assert row["ratio"] == pytest.approx(3.0) and not row["reached"]

    def test_only_widths_with_a_demand_have_a_row(self):
        rows = floor_rows({(64, n): READ for n in range(1, 20)}, READ, CEILING)
        assert len(rows) == len(FLOORS)


def test_rates_and_times_are_compared_the_right_way_round(tiny_opened, monkeypatch):
    seconds = {"ours": 1, "transformers": 3, "prefill": 1, "torch prefill": 2, "batch 1": 1, "batch 8": 2}
    monkeypatch.setattr(
        engine, "interleaved", lambda arms, repeats, seed: {name: np.full(repeats, seconds[name]) for name in arms}
    )
    monkeypatch.setattr(engine, "PREFILL", 9)
    rows = measure_engine(tiny_opened.checkpoint, tiny_opened.target, tiny_opened.target, repeats=2)
    assert [row["ratio"] for row in rows] == pytest.approx([3.0, 0.5, 4.0])
    assert [row["bound"] for row in rows] == ["at least", "at most", "at least"]
    assert [row["reached"] for row in rows] == [rows[0]["threshold"] <= 3.0, True, True]


def invented_sweep(seconds):
    """Two prompts of ten tokens: two autoregressive runs of two seconds each, one look-up run of `seconds`."""
    same = {"configuration": "c", "backend": "b", "temperature": 0.0, "split": "report", "repetitive": False}
    same |= {"tokens": 10, "accepted": 6, "drafted": 12, "predicted_seconds": 1.0, "verify_seconds": 0.5}
    for prompt in ("p", "q"):
        same["prompt_id"] = prompt
        plain = same | {"arm": "ar", "K": 0, "target_passes": 10, "seconds": 2.0}
        drafted = same | {"arm": "sd", "K": 7, "target_passes": 4, "seconds": seconds}
        for row in (plain, plain, drafted):
            yield row | {"draft_seconds": 0.02, "overhead_seconds": 0.08}


@pytest.mark.parametrize(("seconds", "reached"), [(1.0, True), (2.0, False)])
def test_look_up_must_be_faster_and_a_round_cost_little_outside_of_its_pass(monkeypatch, seconds, reached):
    monkeypatch.setattr(engine, "sweep", lambda *arguments: invented_sweep(seconds))
    curve = TimeCurve((1,), (64,), np.array([[0.5]]))
    speed, outside = rows = lookup_rows(TABLE, curve, [], Options())
    assert [ENGINE.validated(row) for row in rows] == rows
    assert speed["ratio"] == pytest.approx(2 / seconds) and speed["reached"] is reached
    assert outside["ratio"] == pytest.approx(0.1 / (4 * 0.5)) and outside["samples"] == 2


def test_look_up_is_measured_on_every_prompt(monkeypatch):
    seen = []
    monkeypatch.setattr(engine, "sweep", lambda *arguments: seen.append(arguments) or invented_sweep(1.0))
    lookup_rows(TABLE, TimeCurve((1,), (64,), np.array([[0.5]])), ["case"], Options(max_new_tokens=3), k=5)
    (configuration,), _, cases, ks, options = seen[0]
    assert (configuration.target, cases, ks, options.max_new_tokens) == (TABLE, ["case"], [5], 3)
