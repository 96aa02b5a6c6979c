"""Records of a training run: what contradicts itself is refused."""

import pytest

from specdec_core.evidence.schemas import RecordError
from specdec_core.evidence.training_records import ACCEPTANCE, TRAINING

CHECK = {
    "drafter": "eagle", "step": 100, "epoch": 0.5, "seconds": 61.5, "learning_rate": 1e-3, "loss": 2.5,
    "losses": [2.4, 2.7], "held_out_losses": [2.6, 2.9], "greedy_alpha": [0.6, 0.5], "greedy_tau": 2.1,
    "sampled_alpha": [0.5, 0.4], "drafted_tau": 2.0,
}  # fmt: skip
SERVED = {
    "arm": "chain", "K": 2, "temperature": 0.0, "prompt_id": "math-01", "domain": "math", "split": "report",
    "repetitive": False, "identical": True, "tokens": 30, "target_passes": 15, "nodes": 30,
    "tested_by_position": [15, 9], "accepted_by_position": [9, 6],
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "row"),
    [
        (TRAINING, CHECK),
        (TRAINING, CHECK | {"step": 0, "seconds": 0.0, "loss": None, "losses": [], "drafted_tau": None}),
        (TRAINING, CHECK | {"greedy_alpha": [0.0, 1.0], "sampled_alpha": []}),
        (ACCEPTANCE, SERVED),
        (ACCEPTANCE, SERVED | {"tested_by_position": [], "accepted_by_position": [], "nodes": 0}),
        (ACCEPTANCE, SERVED | {"tokens": 1, "target_passes": 1, "accepted_by_position": [15, 9]}),
    ],
)
def test_a_good_row_is_taken_as_it_is(schema, row):
    assert schema.validated(row) == row


@pytest.mark.parametrize(
    ("schema", "row", "change", "message"),
    [
        (TRAINING, CHECK, {"greedy_alpha": [0.6, 1.1]}, "expected probabilities"),
        (TRAINING, CHECK, {"sampled_alpha": [-0.1]}, "expected probabilities"),
        (TRAINING, CHECK, {"step": -1}, "step -1 after 61.5 s: expected ≥ 0"),
        (TRAINING, CHECK, {"seconds": -0.5}, "step 100 after -0.5 s: expected ≥ 0"),
        (TRAINING, CHECK, {"loss": float("nan")}, "field 'loss' .* not finite"),
        (TRAINING, CHECK, {"losses": None}, "field 'losses'"),
        (TRAINING, CHECK, {"step": 1.5}, "field 'step'"),
        (ACCEPTANCE, SERVED, {"accepted_by_position": [9, 10]}, "expected at most as many at each position"),
        (ACCEPTANCE, SERVED, {"accepted_by_position": [9]}, "expected at most as many at each position"),
        (ACCEPTANCE, SERVED, {"tokens": 0}, "0 tokens in 15 passes: expected at least one of each"),
        (ACCEPTANCE, SERVED, {"target_passes": 0}, "30 tokens in 0 passes: expected at least one of each"),
        (ACCEPTANCE, SERVED, {"repetitive": None}, "field 'repetitive'"),
    ],
)  # fmt: skip
def test_a_row_that_contradicts_itself(schema, row, change, message):
    with pytest.raises(RecordError, match=message):
        schema.validated(row | change)


def test_the_two_kinds_are_told_apart():
    assert (TRAINING.name, ACCEPTANCE.name) == ("training", "acceptance")
