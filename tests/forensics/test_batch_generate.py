import pytest
import torch
from transformers import GenerationConfig, GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

from specdec_core.forensics.batch_generate import (
    left_padded,
    left_padded_mask_from_ids,
    left_padded_without_mask,
    right_padded,
)
from specdec_core.forensics.diagnose import diagnose
from specdec_core.forensics.huggingface_decoders import open_model
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.sampling import Options
from specdec_core.targets.huggingface import HuggingFaceTarget
from specdec_core.targets.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread", "quiet")

V, PAD, END = 61, 0, 1
OPTIONS = Options(max_new_tokens=12, eos=(END,))
PROMPTS = [(5, 17, 3, 8, 9), (22, 7), (6, 50, 51, 52, 53, 54, 55)]
CHATS = [(5, 17, END, 8, 9), (22, 7, END, 4), (6, 50, 51, END, 53, 54, 55)]


@pytest.fixture(scope="module")
def quiet():
    """Padding on the right, and masks that are absent, are warned of: they are what is tested here."""
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    yield
    logging.set_verbosity(before)


def rotary():
    sizes = {"hidden_size": 32, "intermediate_size": 64, "heads": 4, "kv_heads": 2, "context": 128}
    checkpoint = tiny_llama(5, dtype=torch.float64, layers=2, vocabulary=V, **sizes)
    return open_model(checkpoint, "float64"), Transformer(checkpoint, Placement(dtype="float64"))


def learned():
    torch.manual_seed(1)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": V, "n_positions": 128}
    ends = {"bos_token_id": END, "eos_token_id": END}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **ends, initializer_range=0.3, attn_implementation="sdpa"))
    model = model.double().eval()
    model.generation_config = GenerationConfig()
    return model, HuggingFaceTarget(model)


@pytest.fixture(scope="module", params=[rotary, learned], ids=["rotary", "learned positions"])
def pair(request):
    return request.param()


@pytest.mark.parametrize(
    ("make", "pad", "prompts", "verdict"),
    [
        (left_padded, PAD, PROMPTS, "clean"),
        (left_padded, END, CHATS, "clean"),
        (left_padded_without_mask, PAD, PROMPTS, "mask made from ids"),  # transformers makes it of the pad tokens
        (left_padded_without_mask, END, PROMPTS, "padding at prefill"),  # and gives up where they are end tokens
        (left_padded_mask_from_ids, END, CHATS, "mask made from ids"),
        (left_padded_mask_from_ids, PAD, PROMPTS, "mask made from ids"),
        (right_padded, PAD, PROMPTS, "padding at prefill"),
        (right_padded, END, CHATS, "padding at prefill"),
    ],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_every_way_of_padding_and_its_signature(pair, make, pad, prompts, verdict):
    model, target = pair
    report = diagnose(make(model, OPTIONS, pad), target, prompts, OPTIONS, special=(pad,))
    assert report.verdict == verdict, str(report)


def test_a_pad_token_that_no_prompt_holds_can_be_masked_by_id(pair):
    model, target = pair
    report = diagnose(left_padded_mask_from_ids(model, OPTIONS, PAD), target, PROMPTS, OPTIONS)
    assert report.verdict == "clean"  # nobody said that 0 is special, so no prompt with it was tried


def test_rows_are_as_long_as_the_longest_and_the_cap_is_taken(pair):
    decoder = left_padded(pair[0], OPTIONS, PAD)
    assert {len(row) for row in decoder(PROMPTS)} == {12} and {len(row) for row in decoder(PROMPTS, 5)} == {5}
    ends = tuple(sorted({row[2] for row in decoder(PROMPTS)}))  # the third tokens, as end tokens
    ended = left_padded(pair[0], Options(max_new_tokens=12, eos=ends), PAD)(PROMPTS)
    assert len({len(row) for row in ended}) == 1 and len(ended[0]) <= 3


def test_sampling_is_refused(pair):
    with pytest.raises(ValueError, match=r"temperature 0\.7: expected 0"):
        left_padded(pair[0], Options(temperature=0.7), PAD)
