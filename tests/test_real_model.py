"""The real model from the first token to the last: accuracy, losslessness and memory."""

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from specdec_core.arrays import host
from specdec_core.decode import decode, outputs
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.registry import load
from specdec_core.pairs import Opened, open_drafter, open_target
from specdec_core.placement import Placement
from specdec_core.prompts import DOMAINS, load_prompts
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.topology import chain, forest
from tests.llama_reference import Reference

pytestmark = pytest.mark.usefixtures("one_thread")

NAME = "smollm2-135m-instruct"
DRAFTERS = ("ngram", "ngram-tree", "layer-skip")
SHORT = Options(max_new_tokens=10)


@pytest.fixture(scope="module")
def compiled() -> Opened:
    # One worker: two that wait for each other in a spin are slow on a busy machine.
    return open_target(NAME, Placement("numba", threads=1))


@pytest.fixture(scope="module")
def double() -> Opened:
    return open_target(NAME, Placement("torch", dtype="float64"))


def prompts(opened: Opened, of_domain: int) -> list[tuple[int, ...]]:
    """The shortest prompts of each domain: tokens are spent on answers."""
    chosen = []
    for domain in DOMAINS:
        some = sorted((tuple(opened.tokenizer.chat(p.messages)) for p in load_prompts(domain)), key=len)
        chosen += some[:of_domain]
    return chosen


def speculate(opened: Opened, asked, kind: str, options: Options, slots: int):
    """Outputs with this drafter at K = 4, and how many draft tokens were accepted."""
    drafter, _ = open_drafter(kind, opened)
    rounds = list(decode(opened.target, [Request(p, options, FixedLength(4)) for p in asked], drafter, slots=slots))
    return outputs(rounds, len(asked)), sum(row.accepted for each in rounds for row in each.rows)


@pytest.fixture(scope="module")
def plain(compiled):
    """Two prompts of each domain, and what the compiled engine says to them one by one without a drafter."""
    asked = prompts(compiled, 2)
    return asked, [outputs(decode(compiled.target, [Request(p, Options(max_new_tokens=20))]), 1)[0] for p in asked]


@pytest.mark.parametrize("kind", DRAFTERS)
def test_compiled_speculative_tokens_are_the_autoregressive_ones_in_any_batch(compiled, plain, kind):
    asked, expected = plain
    found, accepted = speculate(compiled, asked, kind, Options(max_new_tokens=20), slots=3)
    assert found == expected and accepted > 5


def test_it_knows_a_capital(compiled):
    ids = compiled.tokenizer.chat([{"role": "user", "content": "What is the capital of France?"}])
    how = Options(max_new_tokens=24, eos=compiled.tokenizer.eos_ids)
    answer = outputs(decode(compiled.target, [Request(tuple(ids), how)]), 1)[0]
    assert "Paris" in compiled.tokenizer.decode(answer.tokens)


@pytest.fixture(scope="module")
def exact(double):
    """One prompt of each domain, and what the model says to them in float64 without a drafter."""
    asked = prompts(double, 1)
    return asked, outputs(decode(double.target, [Request(p, SHORT) for p in asked]), len(asked))


@pytest.mark.parametrize("kind", DRAFTERS)
def test_float64_speculative_tokens_are_the_autoregressive_ones(double, exact, kind):
    asked, expected = exact
    assert speculate(double, asked, kind, SHORT, slots=3)[0] == expected


def test_float32_says_what_float64_says(compiled, exact):
    asked, expected = exact
    assert outputs(decode(compiled.target, [Request(p, SHORT) for p in asked]), len(asked)) == expected


def logits_of(opened_target, tokens) -> np.ndarray:
    """Logits after every token of a text, `[n, V]` float64, in one pass."""
    state = opened_target.new_state(1, len(tokens))
    shape = forest([chain(len(tokens))])
    return np.asarray(host(opened_target.verify(state, np.array([0]), np.array(tokens), shape).logits), np.float64)


@pytest.fixture(scope="module")
def reference(compiled):
    """Questions as they stand, and their logits in float64 by a decoder written a second time.

    Without the template: all positions look back at the first token, so texts that begin alike err alike.
    """
    truth = Reference(compiled.checkpoint)
    asked = [sorted((p.messages[-1]["content"] for p in load_prompts(domain)), key=len)[:6] for domain in DOMAINS]
    texts = [tuple(compiled.tokenizer.encode(text)) for some in asked for text in some]
    return [(text, truth.logits(text)) for text in texts]


def test_in_float64_we_compute_the_same_model(reference, double):
    for text, expected in reference:
        np.testing.assert_allclose(logits_of(double.target, text), expected, rtol=0, atol=1e-9)


@pytest.fixture(scope="module")
def their_errors(reference):
    """Absolute errors of transformers in float32 at the same weights."""
    model = AutoModelForCausalLM.from_pretrained(load(NAME).folder, dtype=torch.float32).eval()
    with torch.inference_mode():
        return [np.abs(model(torch.tensor([text])).logits[0].numpy() - expected) for text, expected in reference]


@pytest.mark.parametrize("engine", ["torch", "numba"])
def test_in_float32_we_err_at_most_twice_as_much_as_transformers(reference, their_errors, compiled, engine):
    target = compiled.target if engine == "numba" else compiled.target.placed(Placement("torch"))
    errors = [np.abs(logits_of(target, text) - expected) for text, expected in reference]
    for norm in (np.max, lambda values: np.sqrt(np.mean(np.square(values)))):
        assert 0 < norm(np.concatenate(errors)) <= 2 * norm(np.concatenate(their_errors))


def test_the_model_the_compiled_engine_and_a_generation_fit_into_memory():
    code = f"""if True:
        from specdec_core.__main__ import main
        from specdec_core.measure.clock import peak_memory
        main(["generate", "--model", {NAME!r}, "--prompt", "Count to ten.", "--drafter", "layer-skip",
              "--max-new-tokens", "16", "--threads", "1"])
        print(peak_memory())"""
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert 0.5 * 2**30 < int(printed.splitlines()[-1]) <= 2.5 * 2**30
