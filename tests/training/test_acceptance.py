"""How much is accepted when drafters serve: counts are those of decoding each prompt by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from specdec_core.decode import decode, generate
from specdec_core.drafters.eagle import EagleDrafter
from specdec_core.drafters.layer_skip import LayerSkipDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.evidence.training_records import ACCEPTANCE, by_arm, without_repetition
from specdec_core.lengths.fixed import FixedLength
from specdec_core.measure.cost_model import count
from specdec_core.measure.sweep import is_repetitive
from specdec_core.models.eagle_checkpoint import tiny_eagle
from specdec_core.models.tokenizer import Tokenizer
from specdec_core.pairs import Opened, open_target
from specdec_core.placement import Placement
from specdec_core.prompts import Prompt
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.training import acceptance as module
from specdec_core.training.acceptance import Arm, acceptance_rows, tau
from specdec_core.training.corpus import IS_GREEDY
from specdec_core.training.served import held_out_prompts, served_tau
from tests.tiny import save_tiny
from tests.training.test_eagle_batches import random_corpus

pytestmark = pytest.mark.usefixtures("one_thread")

LENGTH = 24
PROMPTS = [
    Prompt(f"chat-{number}", domain, text, "short", split="tuning" if number == 2 else "report")
    for number, (domain, text) in enumerate([("math", "2+2"), ("code", "def f(x):"), ("chat", "to be or not to be")])
]


@pytest.fixture(scope="module")
def opened(tmp_path_factory) -> Opened:
    """Of five layers, of which four guess the last one's token often enough."""
    return open_target(str(save_tiny(tmp_path_factory.mktemp("tiny"), layers=5)), Placement("numba", threads=1), (0, 1))


@pytest.fixture(scope="module")
def arms(opened) -> list[Arm]:
    return [
        Arm("chain", LayerSkipDrafter(opened.target, 4), 3),
        Arm("tree", NGramDrafter(candidates=2), 2),
        Arm("chain", LayerSkipDrafter(opened.target, 4), 3, temperature=1.0),
    ]


@pytest.fixture(scope="module")
def rows(opened, arms) -> list[dict[str, Any]]:
    return list(acceptance_rows(opened, arms, PROMPTS, LENGTH, slots=2))


def options(opened: Opened, temperature: float = 0.0) -> Options:
    return Options(temperature, max_new_tokens=LENGTH, eos=opened.tokenizer.eos_ids)


def ids(opened: Opened, prompt: Prompt) -> tuple[int, ...]:
    return tuple(opened.tokenizer.chat(prompt.messages))


def test_a_row_a_prompt_and_arm_in_order(rows, arms):
    assert [(row["arm"], row["K"], row["temperature"], row["prompt_id"]) for row in rows] == [
        (arm.name, arm.k, arm.temperature, prompt.id) for arm in arms for prompt in PROMPTS
    ]
    named = {prompt.id: (prompt.domain, prompt.split) for prompt in PROMPTS}
    assert all((row["domain"], row["split"]) == named[row["prompt_id"]] for row in rows)
    assert all(ACCEPTANCE.validated(row) == row for row in rows)


def test_counts_are_those_of_the_prompt_decoded_alone(opened, arms, rows):
    for number, row in enumerate(rows):
        arm, key = arms[number // len(PROMPTS)], number % len(PROMPTS)
        request = Request(
            ids(opened, PROMPTS[key]), options(opened, arm.temperature), FixedLength(arm.k), key=key
        )  # fmt: skip
        rounds = list(decode(opened.target, [request], arm.drafter))
        counts = count(rounds)
        assert (row["tokens"], row["target_passes"]) == (counts.tokens, counts.rounds)
        assert row["tested_by_position"] == counts.tested.tolist()
        assert row["accepted_by_position"] == counts.accepted.tolist()
        assert row["nodes"] == sum(sum(each.rows[0].drafted) for each in rounds)
    chains = [row for row in rows if row["arm"] == "chain"]
    assert sum(sum(row["accepted_by_position"]) for row in chains) > 10
    assert any(sum(row["tested_by_position"]) < row["nodes"] for row in rows)


def test_greedy_rows_are_identical_to_plain_decoding_and_sampled_ones_are_not(rows):
    assert all(row["identical"] == (row["temperature"] == 0) for row in rows)


def test_repetition_is_that_of_the_greedy_answer_whatever_the_arm(opened, arms, monkeypatch, rows):
    answers = generate(opened.target, [Request(ids(opened, prompt), options(opened)) for prompt in PROMPTS])
    expected = [is_repetitive(each.tokens) for each in answers]
    assert [row["repetitive"] for row in rows] == expected * len(arms)
    monkeypatch.setattr(module, "is_repetitive", lambda tokens: tokens == answers[1].tokens)
    found = [row["repetitive"] for row in acceptance_rows(opened, arms[1:], PROMPTS, LENGTH)]
    assert found == [False, True, False] * 2


def test_an_answer_ends_at_an_end_token(opened, arms, monkeypatch):
    plain = generate(opened.target, [Request(ids(opened, PROMPTS[0]), options(opened))])[0].tokens
    monkeypatch.setattr(Tokenizer, "eos_ids", (plain[5],))
    [row] = acceptance_rows(opened, arms[:1], PROMPTS[:1], LENGTH)
    assert row["tokens"] == plain.index(plain[5]) + 1 < LENGTH and row["identical"]


ROWS: list[dict[str, Any]] = [
    {"arm": arm, "K": k, "temperature": t, "repetitive": repetitive, "tokens": tokens, "target_passes": passes}
    for arm, k, t, repetitive, tokens, passes in [
        ("tree", 5, 0.0, False, 30, 10),
        ("chain", 5, 0.0, False, 20, 10),
        ("tree", 5, 0.0, True, 60, 10),
        ("tree", 5, 0.0, False, 10, 10),
        ("chain", 5, 1.0, True, 12, 10),
        ("chain", 3, 0.0, False, 14, 10),
    ]
]


def test_tau_is_of_all_rows_together():
    assert tau(ROWS[:2]) == 2.5
    assert tau([{"tokens": 10, "target_passes": 1}, {"tokens": 10, "target_passes": 9}]) == 2


def test_arms_come_with_and_without_what_repeats_itself():
    arms = by_arm([row | {"split": split} for row in ROWS for split in ("report", "tuning")])
    found = {name: (without_repetition(own), own) for name, own in arms.items()}
    clean, whole = found["tree, K = 5, T = 0"]
    assert tau(clean) == 2.0 and tau(whole) == pytest.approx(100 / 30)
    clean, whole = found["chain, K = 5, T = 0"]
    assert tau(clean) == tau(whole) == 2.0
    clean, whole = found["chain, K = 5, T = 1"]
    assert clean == [] and tau(whole) == 1.2
    assert tau(found["chain, K = 3, T = 0"][1]) == 1.4 and len(found) == 4


class TestWhileItLearns:
    CORPUS = random_corpus(
        [(3 + row % 4, 5) for row in range(60)],
        greedy=range(0, 60, 2),
        held_out=range(30, 60),
        vocabulary=259,
    )

    def test_prompts_are_of_held_out_greedy_rows_spread_over_them(self):
        candidates = [row for row in range(30, 60) if row % 2 == 0]
        prompts = [tuple(self.CORPUS.row(row)[0].tolist()) for row in candidates]
        assert held_out_prompts(self.CORPUS, 3) == prompts[::5]
        assert held_out_prompts(self.CORPUS, 99) == prompts
        assert held_out_prompts(replace(self.CORPUS, flags=self.CORPUS.flags & ~np.uint8(IS_GREEDY)), 3) == []

    def test_its_tau_is_that_of_decoding(self, opened):
        drafter = tiny_eagle(1, opened.checkpoint, (0, 1))
        prompts = held_out_prompts(self.CORPUS, 4)
        requests = [Request(prompt, options(opened), FixedLength(2)) for prompt in prompts]
        serving = EagleDrafter(drafter, opened.checkpoint, opened.target.placement)
        expected = count(decode(opened.target, requests, serving)).tau
        assert served_tau(drafter, opened, prompts, 2, LENGTH) == expected >= 1
        assert served_tau(drafter, opened, prompts, 2, 1) == 1
