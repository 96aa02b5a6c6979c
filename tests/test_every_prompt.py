"""Greedy speculative decoding on the compiled engine says what autoregressive decoding says, to every prompt."""

import pytest

from specdec_core.decode import decode, outputs
from specdec_core.lengths.fixed import FixedLength
from specdec_core.pairs import open_drafter, open_target
from specdec_core.prompts import load_prompts
from specdec_core.rows import Request
from specdec_core.sampling import Options

OPTIONS = Options(max_new_tokens=12)


@pytest.fixture(scope="module")
def answered():
    """The model, every prompt, and its autoregressive answer, decoded alone."""
    opened = open_target("smollm2-135m-instruct")
    asked = [tuple(opened.tokenizer.chat(prompt.messages)) for prompt in load_prompts()]
    return opened, asked, [outputs(decode(opened.target, [Request(each, OPTIONS)]), 1)[0] for each in asked]


@pytest.mark.parametrize(("kind", "k", "slots"), [("ngram", 5, 1), ("ngram-tree", 4, 16), ("layer-skip:20", 2, 16)])
def test_every_answer_is_the_autoregressive_one(answered, kind, k, slots):
    opened, asked, expected = answered
    drafter, _ = open_drafter(kind, opened)
    requests = [Request(each, OPTIONS, FixedLength(k)) for each in asked]
    rounds = list(decode(opened.target, requests, drafter, slots=slots))
    assert outputs(rounds, len(asked)) == expected
    assert sum(row.accepted for each in rounds for row in each.rows) > len(asked) / 2
