from dataclasses import replace

import pytest
import torch

from specdec_core.drafters.model import ModelDrafter
from specdec_core.forensics.audit import audit, ours
from specdec_core.forensics.huggingface_decoders import assisted, open_model, plain, single_position
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")

SIZES = {"vocabulary": 24, "hidden_size": 32, "intermediate_size": 64, "heads": 4, "kv_heads": 2, "context": 64}
DOUBLE = Placement(dtype="float64")
CHECKPOINT = tiny_llama(5, dtype=torch.float64, layers=2, **SIZES)
DRAFTING = tiny_llama(5, dtype=torch.float64, layers=1, **SIZES)
TARGET, DRAFT = Transformer(CHECKPOINT, DOUBLE), Transformer(DRAFTING, DOUBLE)
PROMPTS = [(number, 5, 2) for number in range(12)]
OPTIONS = Options(temperature=0.8, top_p=0.9, max_new_tokens=24, min_new_tokens=24, eos=(3,))
GREEDY = replace(OPTIONS, temperature=0.0)


@pytest.fixture(scope="module")
def models():
    return open_model(CHECKPOINT, "float64"), open_model(DRAFTING, "float64")


def test_plain_sampling_passes(models):
    report = audit(plain(models[0], OPTIONS), TARGET, PROMPTS, OPTIONS, alternative=DRAFT, repeats=6, delta=0.05)
    assert report.lossless is True and report.tokens == 6 * 12 * 24 and report.rounds is None


@pytest.mark.parametrize("change", [{"top_k": 2}, {"min_p": 0.4}, {"repetition_penalty": 3.0}], ids=str)
def test_every_option_reaches_transformers(models, change):
    options = Options(temperature=1.0, max_new_tokens=24, **change)
    for decoder in (plain(models[0], options), assisted(*models, options, 2)):
        report = audit(decoder, TARGET, PROMPTS[:4], options)
        assert not report.rejected
    assert audit(plain(models[0], options), TARGET, PROMPTS, Options(temperature=1.0, max_new_tokens=24)).rejected


@pytest.mark.parametrize(
    "claimed",
    [replace(OPTIONS, temperature=0.5), replace(OPTIONS, top_p=0.5), replace(OPTIONS, top_k=3, top_p=1.0)],
    ids=["temperature", "top-p", "top-k"],
)
def test_plain_sampling_under_other_options_does_not(models, claimed):
    report = audit(plain(models[0], OPTIONS), TARGET, PROMPTS, claimed, repeats=2)
    assert report.lossless is False


def test_assisted_sampling_tells_its_rounds_and_is_what_is_returned(models):
    decoder = assisted(*models, OPTIONS, 3)
    rounds = decoder(PROMPTS[1], 7)
    assert sum(map(len, rounds)) == 24 and {len(each) for each in rounds} <= {1, 2, 3, 4} and len(rounds) < 24
    assert decoder(PROMPTS[1], 7) == rounds != decoder(PROMPTS[1], 8)


@pytest.mark.parametrize("eos", [(), (3,)])
@pytest.mark.parametrize("k", [1, 4])
def test_a_model_that_assists_itself_is_accepted_always(models, k, eos):
    # No warps, which transformers applies twice to a draft; prompts that hold token 0 and the end token.
    plainly = Options(temperature=1.0, max_new_tokens=21, min_new_tokens=21, eos=eos)
    for prompt in (PROMPTS[0], PROMPTS[3]):
        rounds = assisted(models[0], models[0], plainly, k)(prompt, 1)
        assert [len(each) for each in rounds[: 20 // (k + 1)]] == [k + 1] * (20 // (k + 1))


def test_an_argmax_draft_that_is_tested_as_if_it_were_drawn_is_seen():
    """True of transformers 5.24. If this fails with a newer one, the fault is mended there."""
    options = Options(temperature=1.0, max_new_tokens=24)
    report = audit(single_position(CHECKPOINT, options, 3, "float64"), TARGET, PROMPTS, options, repeats=2)
    assert report.lossless is False and not report.violations
    assert report.rounds < 0.9 * report.tokens  # it does draft, so this is not plain sampling


def test_the_callers_random_stream_is_left_alone(models):
    torch.manual_seed(11)
    expected = torch.rand(1)
    torch.manual_seed(11)
    plain(models[0], OPTIONS)(PROMPTS[0], 3)
    assert torch.rand(1) == expected


def test_greedy_decoding_agrees_with_ours(models):
    for decoder in (plain(models[0], GREEDY), assisted(*models, GREEDY, 3)):
        report = audit(decoder, TARGET, PROMPTS[:4], GREEDY)
        assert report.lossless is True and report.tokens == 4 * 24


def test_end_tokens_and_penalties_mean_the_same(models):
    options = Options(temperature=1.0, repetition_penalty=1.3, max_new_tokens=24, min_new_tokens=3, eos=(3, 7))
    for decoder in (plain(models[0], options), ours(TARGET, ModelDrafter(DRAFT, 24), FixedLength(2), options)):
        report = audit(decoder, TARGET, PROMPTS, options, repeats=2)
        assert not report.rejected and not report.violations and report.tokens < 2 * 12 * 24


def test_what_a_folder_says_of_generation_is_dropped():
    model = open_model(tiny_llama(5, layers=1, **SIZES, eos_ids=tuple(range(24))), "float32")
    assert model.generation_config.top_k is None and model.generation_config.eos_token_id is None
    assert len(plain(model, Options(temperature=1.0, max_new_tokens=24))(PROMPTS[0], 1)) == 24
    assert model.dtype == torch.float32 and not model.training


@pytest.mark.parametrize("change", [{"presence_penalty": 0.5}, {"stop": ("a",)}])
def test_options_that_transformers_lacks_are_refused(models, change):
    with pytest.raises(ValueError, match="no such option"):
        plain(models[0], replace(OPTIONS, **change))
