import math
from itertools import accumulate

import numpy as np
import pytest
import torch
from hypothesis import assume, currently_in_test_context, given, settings
from hypothesis import strategies as st
from transformers.generation.logits_process import (
    LogitsProcessorList,
    MinNewTokensLengthLogitsProcessor,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from specdec_core.sampling import (
    History,
    LogitsError,
    Options,
    OptionsError,
    greedy_tokens,
    has_processors,
    law,
    log_probability,
    processed,
)

NOTHING = History(np.empty(0, np.int64))


def history(prompt=(), output=()) -> History:
    return History(np.array(prompt, np.int64), np.array(output, np.int64))


def plain_law(logits, options: Options, prompt=(), output=()) -> list[float]:
    """The documented definition, written with dictionaries and loops; None of numpy."""
    scores = {token: float(score) for token, score in enumerate(logits)}
    for token in {*prompt, *output}:
        penalty = options.repetition_penalty
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    for token in set(output):
        scores[token] -= options.presence_penalty
    if len(output) < options.min_new_tokens:
        scores |= dict.fromkeys(options.eos, -math.inf)
    top = max(scores.values())
    if options.temperature == 0:
        first = min(token for token in scores if scores[token] == top)
        return [float(token == first) for token in scores]
    kept = {token: math.exp((score - top) / options.temperature) for token, score in scores.items()}
    if options.top_k:
        last = sorted(kept.values(), reverse=True)[: options.top_k][-1]
        kept = {token: weight for token, weight in kept.items() if weight >= last}
    kept = normalised(kept)
    if options.top_p < 1:
        ranked = sorted(kept, key=lambda token: (-kept[token], token))
        sums = list(accumulate(kept[token] for token in ranked))
        if currently_in_test_context():
            assume(all(abs(total - options.top_p) > 1e-9 for total in sums))  # on the edge, rounding decides
        kept = {
            token: kept[token] for token, before in zip(ranked, [0.0, *sums], strict=False) if before < options.top_p
        }
    most = max(kept.values())
    kept = normalised({token: p for token, p in kept.items() if p >= options.min_p * most})
    return [kept.get(token, 0.0) for token in scores]


def normalised(weights: dict[int, float]) -> dict[int, float]:
    return {token: weight / math.fsum(weights.values()) for token, weight in weights.items()}


# Halves make exact ties common.
scores = st.lists(st.one_of(st.integers(-8, 8).map(lambda i: i / 2), st.floats(-30, 30)), min_size=2, max_size=12)
options = st.builds(
    Options,
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.integers(0, 14),
    top_p=st.sampled_from([0.05, 0.3, 0.71, 0.95, 1.0]),
    min_p=st.sampled_from([0.0, 0.03, 0.4, 1.0]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-0.6, 0.0, 1.1]),
    min_new_tokens=st.integers(0, 3),
    eos=st.sampled_from([(), (0,), (1,)]),
)


@settings(max_examples=300)
@given(scores, options, st.data())
def test_law_is_its_definition(logits, given_options, data):
    tokens = st.lists(st.integers(0, len(logits) - 1), max_size=4)
    prompt, output = data.draw(tokens), data.draw(tokens)
    expected = plain_law(logits, given_options, prompt, output)
    found = law(np.array(logits), given_options, history(prompt, output))
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-12)


@given(scores, options)
def test_a_law_sums_to_one_in_float64(logits, given_options):
    found = law(np.array(logits, np.float32), given_options, NOTHING)
    assert found.dtype == np.float64 and (found >= 0).all() and abs(found.sum() - 1) < 1e-14


@given(scores, options)
def test_making_a_law_leaves_the_logits_alone(logits, given_options):
    values = np.array(logits)
    law(values, given_options, history([0], [1]))
    assert values.tolist() == logits


def kept(logits, **how) -> list[int]:
    return np.flatnonzero(law(np.array(logits, float), Options(temperature=1.0, **how), NOTHING)).tolist()


def test_top_k_keeps_all_that_tie_with_the_last():
    assert kept([1, 3, 2, 2, 0], top_k=2) == [1, 2, 3]


def test_top_k_beyond_the_vocabulary_keeps_all():
    assert kept([1, 2, 3], top_k=9) == kept([1, 2, 3], top_k=0) == [0, 1, 2]


def test_top_p_takes_the_lower_id_of_a_tie():
    assert kept([0, 1, 1, 1], top_p=0.5) == [1, 2]


def test_top_p_keeps_the_token_that_reaches_it():
    assert kept(np.log([0.5, 0.3, 0.2]), top_p=0.6) == [0, 1]
    assert kept(np.log([0.25, 0.25, 0.5]), top_p=0.5) == [2]


def test_top_p_keeps_at_least_the_most_probable():
    assert kept([0, 5, 1], top_p=1e-9) == [1]


def test_top_p_just_below_one_survives_a_sum_below_it():
    assert kept(np.zeros(7), top_p=np.nextafter(1.0, 0.0)) == list(range(7))


@pytest.mark.parametrize("size", [511, 512, 513, 3000])
def test_top_p_over_a_flat_vocabulary_looks_past_the_sorted_head(size):
    logits = np.random.default_rng(size).permutation(np.linspace(0, 0.5, size))
    expected = plain_law(logits, Options(temperature=1.0, top_p=0.9))
    np.testing.assert_allclose(law(logits, Options(temperature=1.0, top_p=0.9), NOTHING), expected, atol=1e-12)


def test_top_p_ties_across_the_sorted_head_go_to_the_lower_ids():
    assert kept(np.zeros(4000), top_p=0.05) == list(range(200))


def test_min_p_keeps_a_token_at_the_threshold():
    assert kept(np.log([0.5, 0.25, 0.125, 0.125]), min_p=0.5) == [0, 1]


def test_top_p_looks_at_the_law_after_top_k():
    # Of all tokens 0.4 + 0.3 do not reach 0.75; of the two that top-k leaves, 4/7 + 3/7 do.
    logits = np.log([0.4, 0.3, 0.2, 0.1])
    assert kept(logits, top_k=2, top_p=0.55) == [0]
    assert kept(logits, top_p=0.55) == [0, 1]


def test_top_p_looks_at_the_law_after_temperature():
    logits = np.log([0.6, 0.4])
    hot, cold = (law(logits, Options(temperature=t, top_p=0.65), NOTHING) for t in (1.0, 0.2))
    assert hot.tolist() == pytest.approx([0.6, 0.4]) and cold.tolist() == [1.0, 0.0]


def test_temperature_comes_after_the_penalties():
    found = law(np.array([2.0, 0.0]), Options(temperature=0.5, presence_penalty=1.0), history(output=[0]))
    assert found[0] == pytest.approx(1 / (1 + math.exp(-2)))


def test_repetition_penalty_reaches_prompt_and_output_and_both_signs():
    found = processed(np.array([4.0, -4.0, 4.0]), Options(repetition_penalty=2.0), history([0], [1]))
    assert found.tolist() == [2.0, -8.0, 4.0]


def test_presence_penalty_counts_a_token_of_the_output_once_and_the_prompt_not():
    found = processed(np.zeros(3), Options(presence_penalty=0.5), history([0], [1, 1]))
    assert found.tolist() == [0.0, -0.5, 0.0]


@pytest.mark.parametrize(("emitted", "banned"), [(0, True), (1, True), (2, False)])
def test_end_tokens_are_banned_before_the_fewest_new_tokens(emitted, banned):
    chosen = Options(min_new_tokens=2, eos=(0, 2))
    found = law(np.array([3.0, 1.0, 2.0]), chosen, history([0], [1] * emitted))
    assert found.argmax() == (1 if banned else 0)
    assert has_processors(chosen, emitted) == banned


def test_processors_see_the_drafted_tokens_and_forget_them():
    before = history([1], [2])
    after = before.extended(np.array([0]))
    with_draft, without = (processed(np.ones(4), Options(presence_penalty=1.0), h) for h in (after, before))
    assert with_draft.tolist() == [0, 1, 0, 1] and without.tolist() == [1, 1, 0, 1]


@given(scores, st.sampled_from([0.9, 1.2]), st.integers(0, 2))
def test_without_processors_the_raw_argmax_is_greedy(logits, penalty, fewest):
    chosen = Options(repetition_penalty=penalty, min_new_tokens=fewest)
    if not has_processors(chosen, 0):
        assert law(np.array(logits), chosen, history([0])).argmax() == np.argmax(logits)
    assert has_processors(chosen, 0)  # no end tokens, but a penalty


@pytest.mark.parametrize(
    "broken", [(np.nan, 0, 0), (0, np.nan, 1), (0, np.inf, 0), (-np.inf, -np.inf, -np.inf), (np.nan, np.inf, 0)]
)
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_logits_of_which_no_law_can_be_made_are_an_error(broken, temperature):
    with pytest.raises(LogitsError, match="expected a finite number"):
        law(np.array(broken, float), Options(temperature=temperature), NOTHING)
    with pytest.raises(LogitsError, match="node 1"):
        greedy_tokens(np.array([(1, 2, 3), broken], float))


@pytest.mark.parametrize("temperature", [0.0, 1.0, 1e-300])
def test_a_token_at_minus_infinity_is_impossible(temperature):
    found = law(np.array([-np.inf, 1.0, 2.0]), Options(temperature=temperature), NOTHING)
    assert found[0] == 0 and abs(found.sum() - 1) < 1e-12


def test_a_ban_on_everything_is_an_error():
    with pytest.raises(LogitsError):
        law(np.zeros(2), Options(min_new_tokens=1, eos=(0, 1)), NOTHING)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_greedy_takes_the_first_of_equal_logits(dtype):
    logits = torch.tensor([[0, 2, 2, 1], [5, 5, 5, 5]], dtype=dtype)
    assert greedy_tokens(logits).tolist() == [1, 0]


@given(scores, st.data())
def test_log_probability_is_the_logarithm_of_the_softmax(logits, data):
    token = data.draw(st.integers(0, len(logits) - 1))
    total = math.fsum(math.exp(score) for score in logits)
    assert log_probability(np.array(logits), token) == pytest.approx(logits[token] - math.log(total), abs=1e-11)


def test_log_probability_survives_large_logits():
    assert log_probability(np.array([1000.0, 1000.0]), 0) == pytest.approx(math.log(0.5))


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        ("temperature", -0.1, "≥ 0"),
        ("temperature", math.nan, "≥ 0"),
        ("temperature", math.inf, "≥ 0"),
        ("top_k", -1, "≥ 0"),
        ("top_p", 0.0, r"\(0, 1\]"),
        ("top_p", 1.01, r"\(0, 1\]"),
        ("top_p", math.nan, r"\(0, 1\]"),
        ("min_p", -0.01, r"\[0, 1\]"),
        ("min_p", 1.5, r"\[0, 1\]"),
        ("repetition_penalty", 0.0, "> 0"),
        ("repetition_penalty", math.inf, "> 0"),
        ("presence_penalty", math.nan, "finite"),
        ("max_new_tokens", 0, "≥ 1"),
        ("min_new_tokens", -1, "0…max_new_tokens"),
        ("min_new_tokens", 129, "0…max_new_tokens"),
        ("seed", -1, "≥ 0"),
        ("stop", ("a", ""), "a tuple of non-empty strings"),
        ("stop", "END", "a tuple of non-empty strings"),
    ],
)
def test_an_option_out_of_range_names_itself_its_value_and_the_range(name, value, expected):
    with pytest.raises(OptionsError, match=expected) as caught:
        Options(**{name: value})
    assert str(caught.value).startswith(f"{name} {value!r}: expected")


WARPERS = {
    "temperature": (Options(temperature=0.7), [TemperatureLogitsWarper(0.7)]),
    "top_k": (Options(temperature=1.0, top_k=7), [TopKLogitsWarper(7)]),
    "top_p": (Options(temperature=1.0, top_p=0.8), [TopPLogitsWarper(0.8)]),
    "min_p": (Options(temperature=1.0, min_p=0.1), [MinPLogitsWarper(0.1)]),
    "repetition_penalty": (Options(temperature=1.0, repetition_penalty=1.4), [RepetitionPenaltyLogitsProcessor(1.4)]),
    "min_new_tokens": (
        Options(temperature=1.0, min_new_tokens=9, eos=(3, 5)),
        [MinNewTokensLengthLogitsProcessor(6, 9, [3, 5])],
    ),
    "all": (
        Options(temperature=1.6, top_k=12, top_p=0.9, min_p=0.05, repetition_penalty=0.8, min_new_tokens=9, eos=(3,)),
        [
            RepetitionPenaltyLogitsProcessor(0.8),
            MinNewTokensLengthLogitsProcessor(6, 9, [3]),
            TemperatureLogitsWarper(1.6),
            TopKLogitsWarper(12),
            TopPLogitsWarper(0.9),
            MinPLogitsWarper(0.05),
        ],
    ),
}


@pytest.mark.parametrize("name", WARPERS)
def test_law_agrees_with_transformers(name):
    chosen, processors = WARPERS[name]
    rng = np.random.default_rng(7)
    for _ in range(20):
        logits, tokens = 3 * rng.standard_normal(40), rng.integers(0, 40, 10)
        scores = LogitsProcessorList(processors)(torch.tensor(tokens[None]), torch.tensor(logits[None]))
        expected = torch.softmax(scores[0], -1).numpy()
        np.testing.assert_allclose(law(logits, chosen, history(tokens[:6], tokens[6:])), expected, atol=1e-12)
