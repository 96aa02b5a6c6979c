from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.drafters.layer_skip import LayerSkipDrafter
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.evidence.sweep_records import SWEEP, pair_up
from specdec_core.measure import clock
from specdec_core.measure import sweep as module
from specdec_core.measure.cost_model import DraftCost
from specdec_core.measure.curves import TimeCurve
from specdec_core.measure.sweep import (
    Case,
    Configuration,
    Costs,
    draft_arm,
    draft_cost,
    is_repetitive,
    measure_draft,
    measure_overhead,
    sweep,
)
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.sampling import Options
from specdec_core.targets.table import TableTarget, random_logits
from specdec_core.targets.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")

DOUBLE = Placement(dtype="float64")
TINY = Transformer(tiny_llama(1), DOUBLE)
TABLE = TableTarget(random_logits(5, seed=1), 5)
NEAR = TableTarget(random_logits(5, seed=1, spread=2.0), 5)  # the same order of tokens, a sharper law
CASES = [Case("a", "math", "tuning", (1, 2, 3, 1, 2)), Case("b", "code", "report", (4, 4, 4))]
KS = (1, 3)
COSTS = Costs(TimeCurve((1, 2, 4), (8,), np.array([[1.0, 1.1, 1.4]])), DraftCost(step=0.2, round=0.1), 0.05, token=0.01)
CONFIGURATIONS = [
    Configuration("table · n-gram", "table", "table", "n-gram", TABLE, NGramDrafter()),
    Configuration("table · tree", "table", "table", "tree", TABLE, NGramDrafter(candidates=2)),
    Configuration("table · itself", "table", "table", "itself", TABLE, ModelDrafter(NEAR, 5), NEAR),
    Configuration("tiny · layers", "tiny", "tiny", "layers", TINY, LayerSkipDrafter(TINY, 1), TINY.early_exit(1)),
]


def swept(options=Options(max_new_tokens=12), configurations=CONFIGURATIONS, **how):
    return list(sweep(configurations, {c.name: COSTS for c in configurations}, CASES, KS, options, **how))


@pytest.fixture(scope="module", autouse=True)
def restless():
    """Nothing here depends on how long anything takes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock, "SETTLE", 0.0)
        yield


@pytest.fixture(scope="module")
def rows(restless):
    return swept()


class TestRows:
    def test_every_row_fits_the_schema(self, rows):
        assert [SWEEP.validated(row) for row in rows] == rows

    def test_there_is_one_for_each_arm_and_two_autoregressive_ones_a_configuration(self, rows):
        found = sorted((row["configuration"], row["prompt_id"], row["K"]) for row in rows)
        expected = [(c.name, case.prompt_id, k) for c in CONFIGURATIONS for case in CASES for k in (0, 0, *KS)]
        assert found == sorted(expected)

    def test_they_pair_up_by_prompt(self, rows):
        pairs = pair_up(rows)
        assert {(cell.configuration, cell.K) for cell in pairs} == {(c.name, k) for c in CONFIGURATIONS for k in KS}
        assert all(each.prompts == ("a", "b") for each in pairs.values())
        assert all((each.ar["tokens"] == 2 * each.sd["tokens"]).all() for each in pairs.values())

    def test_greedy_output_is_the_autoregressive_one(self, rows):
        assert all(row["identical"] and row["tokens"] == 12 for row in rows)

    def test_the_autoregressive_arm_drafts_nothing(self, rows):
        plain = [row for row in rows if row["arm"] == "ar"]
        assert all(row["drafter"] == "none" and row["target_passes"] == row["tokens"] for row in plain)

    def test_a_drafter_that_always_agrees_is_accepted_always(self, rows):
        agreed = [row for row in rows if row["drafter"] == "itself"]
        assert agreed and all(row["accepted"] == row["drafted"] > 0 for row in agreed)

    def test_phases_add_up(self, rows):
        phases = ("draft_seconds", "verify_seconds", "overhead_seconds")
        assert all(row["seconds"] == pytest.approx(sum(row[phase] for phase in phases)) for row in rows)

    def test_domain_and_split_are_the_cases(self, rows):
        assert {(row["prompt_id"], row["domain"], row["split"]) for row in rows} == {
            ("a", "math", "tuning"),
            ("b", "code", "report"),
        }

    def test_the_prediction_is_of_the_standalone_costs(self, rows):
        plain = next(row for row in rows if row["arm"] == "ar")
        assert plain["predicted_seconds"] == pytest.approx(12 * (1.0 + 0.05))
        one = next(row for row in rows if row["drafter"] == "itself" and row["K"] == 3)  # 12 tokens by fours
        assert one["predicted_seconds"] == pytest.approx(3 * (1.4 + 0.05 + 3 * 0.01 + 0.1 + 3 * 0.2))


def test_a_configuration_with_lengths_of_its_own_is_swept_over_those():
    own = replace(CONFIGURATIONS[0], name="own", ks=(2,))
    rows = swept(Options(max_new_tokens=4), [CONFIGURATIONS[0], own])
    found = {name: [row["K"] for row in rows if row["configuration"] == name] for name in ("table · n-gram", "own")}
    assert found == {"table · n-gram": [0, 0, *KS] * 2, "own": [0, 0, 2] * 2}


def test_sampled_rows_say_their_temperature_and_every_case_has_its_seed(monkeypatch):
    seeds = []
    run = module._run
    monkeypatch.setattr(
        module,
        "_run",
        lambda target, case, options, *more: seeds.append(options.seed) or run(target, case, options, *more),
    )
    rows = swept(Options(max_new_tokens=5, temperature=0.7, seed=40), CONFIGURATIONS[:1])
    assert {row["temperature"] for row in rows} == {0.7}
    assert seeds == [40] * 4 + [41] * 4


def test_autoregressive_runs_frame_the_speculative_ones_whose_order_is_random(monkeypatch):
    ran = []
    run = module._run

    def watched(target, case, options, drafter=None, policy=None):
        ran.append((case.prompt_id, policy.k if policy else 0))
        return run(target, case, options, drafter, policy)

    monkeypatch.setattr(module, "_run", watched)
    list(sweep(CONFIGURATIONS[:1], {"table · n-gram": COSTS}, CASES * 4, range(1, 9), Options(max_new_tokens=3)))
    blocks = [[k for _, k in ran[start : start + 10]] for start in range(0, len(ran), 10)]
    assert all(block[0] == block[-1] == 0 and sorted(block[1:-1]) == list(range(1, 9)) for block in blocks)
    assert len({tuple(block) for block in blocks}) > 4


def test_outputs_that_differ_are_told():
    class Wrong(TableTarget):
        """Verifies one token rightly and more of them wrongly."""

        def verify(self, state, slots, tokens, forest):
            found = super().verify(state, slots, tokens, forest)
            return replace(found, logits=-found.logits) if len(tokens) > 1 else found

    wrong = Wrong(random_logits(5, seed=1), 5)
    rows = swept(configurations=[Configuration("w", "w", "w", "n-gram", wrong, NGramDrafter())])
    assert all(row["identical"] for row in rows if row["arm"] == "ar")
    assert not any(row["identical"] for row in rows if row["arm"] == "sd")


def test_progress_sees_the_cases():
    seen = []
    swept(Options(max_new_tokens=2), CONFIGURATIONS[:1], progress=lambda cases: seen.append(cases) or cases)
    assert seen == [CASES]


class TestStandaloneCosts:
    def test_a_model_pays_by_step(self):
        cost = measure_draft(CONFIGURATIONS[3], 20, repeats=3)
        assert cost.step > 0 and cost.round == 0

    def test_a_look_up_pays_by_round_and_is_timed_where_it_finds_something(self, monkeypatch):
        drafted = []
        propose = NGramDrafter.propose

        def watched(self, views, state):
            drafted.append(propose(self, views, state))
            return drafted[-1]

        monkeypatch.setattr(NGramDrafter, "propose", watched)
        cost = measure_draft(CONFIGURATIONS[0], 20, repeats=3)
        assert cost.round > 0 and cost.step == 0
        assert all(len(draft.tokens) == 4 for (draft,) in drafted)

    @pytest.mark.parametrize(("index", "expected"), [(0, DraftCost(round=3.0)), (3, DraftCost(step=3.0))])
    def test_a_cost_is_the_median_of_its_samples(self, index, expected):
        assert draft_cost(CONFIGURATIONS[index], np.array([9.0, 2.0, 3.0])) == expected

    def test_a_step_is_one_token_behind_a_warm_cache(self, monkeypatch):
        seen, verify = [], TableTarget.verify

        def watched(model, state, slots, tokens, forest):
            seen.append((model, state.lengths.tolist(), len(tokens)))
            return verify(model, state, slots, tokens, forest)

        monkeypatch.setattr(TableTarget, "verify", watched)
        arm = draft_arm(CONFIGURATIONS[2], 20)
        for _ in range(2):
            arm()
        assert seen == [(NEAR, [20], 1)] * 2

    @pytest.mark.parametrize("temperature", [0.0, 0.8])
    def test_the_overhead_is_a_time_at_the_temperature_asked_for(self, monkeypatch, temperature):
        asked, decode = [], module.decode
        monkeypatch.setattr(module, "decode", lambda *given: asked.append(given[1][0].options) or decode(*given))
        assert 0 < measure_overhead(TABLE, CASES[0], tokens=6, temperature=temperature) < 1
        assert asked == [Options(temperature=temperature, max_new_tokens=6)]

    def test_the_overhead_is_the_median_of_accepting_and_committing(self, monkeypatch):
        decode = module.decode

        def slowed(*arguments):
            for index, each in enumerate(decode(*arguments)):
                seconds = replace(each.seconds, admit=9.0, draft=9.0, verify=9.0, accept=2.0 * index, commit=1.0)
                yield replace(each, seconds=seconds)

        monkeypatch.setattr(module, "decode", slowed)
        assert measure_overhead(TABLE, CASES[0], tokens=4) == 1 + 4.0  # rounds 1, 2, 3


class TestRepetition:
    @given(st.lists(st.integers(0, 9), min_size=1, max_size=32), st.integers(0, 20), st.integers(0, 9))
    def test_a_loop_behind_a_shorter_text_is_repetitive(self, loop, before, seed):
        text = np.random.default_rng(seed).integers(100, 10_000, before).tolist()
        times = 3 + (2 * before + 16) // len(loop)
        assert is_repetitive(text + loop * times)

    @given(st.integers(0, 200), st.integers(0, 10_000))
    def test_distinct_tokens_are_not(self, length, seed):
        assert not is_repetitive(np.random.default_rng(seed).permutation(10_000)[:length].tolist())

    @given(st.integers(0, 150), st.integers(0, 10_000))
    def test_random_text_of_a_small_vocabulary_is_not(self, length, seed):
        assert not is_repetitive(np.random.default_rng(seed).integers(0, 20, length).tolist())

    @given(st.integers(33, 90), st.integers(0, 10_000))
    def test_a_period_longer_than_the_limit_is_not(self, period, seed):
        assert not is_repetitive(np.random.default_rng(seed).permutation(10_000)[:period].tolist() * 4)

    @given(st.integers(1, 32), st.integers(0, 10_000))
    def test_a_passage_said_twice_in_a_long_text_is_not(self, length, seed):
        text = np.random.default_rng(seed).permutation(10_000)[:100].tolist()
        assert not is_repetitive(text + text[-length:])

    @given(st.lists(st.integers(0, 5), max_size=60), st.integers(1, 50))
    def test_renaming_tokens_changes_nothing(self, text, shift):
        assert is_repetitive(text) == is_repetitive([7 * token + shift for token in text])

    @pytest.mark.parametrize(("same", "fresh"), [(2, 1), (20, 10)])
    def test_a_form_that_is_filled_in_again_and_again_is_not(self, same, fresh):
        lines = [[*range(same), *range(1000 + fresh * number, 1000 + fresh * (number + 1))] for number in range(8)]
        assert not is_repetitive([token for line in lines for token in line])

    @pytest.mark.parametrize("text", [[], [1], [1, 1, 1]])
    def test_too_short_to_tell(self, text):
        assert is_repetitive(text) is False
