import re

import pytest

from specdec_core.decode import decode, generate
from specdec_core.lengths.fixed import FixedLength
from specdec_core.measure.cost_model import count
from specdec_core.models.eagle_checkpoint import save_eagle, tiny_eagle
from specdec_core.models.tokenizer import Tokenizer
from specdec_core.pairs import open_drafter, open_target
from specdec_core.placement import Placement
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.talk import talk
from tests.tiny import save_tiny

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = "to be or not to be or"


@pytest.fixture(scope="module")
def opened(tmp_path_factory):
    return open_target(str(save_tiny(tmp_path_factory.mktemp("tiny"))), Placement(dtype="float64"))


def answer(opened, ids, options) -> str:
    """Text that should be printed, decoded without a drafter and all at once."""
    how = Options(**{**vars(options), "eos": opened.tokenizer.eos_ids})
    return opened.tokenizer.decode(
        generate(opened.target, [Request(tuple(ids), how)], detokenize=opened.tokenizer.decode)[0].tokens
    )


@pytest.mark.parametrize("kind", ["none", "ngram", "ngram-tree", "layer-skip:1"])
def test_the_answer_is_the_autoregressive_text(opened, capsys, kind):
    options = Options(max_new_tokens=20)
    talk(opened, PROMPT, kind, 3, options)
    ids = opened.tokenizer.chat([{"role": "user", "content": PROMPT}])
    assert capsys.readouterr().out.startswith(answer(opened, ids, options) + "\n\n20 tokens, ")


def test_raw_means_no_template(opened, capsys):
    options = Options(max_new_tokens=12)
    talk(opened, PROMPT, "none", 3, options, raw=True)
    assert capsys.readouterr().out.startswith(answer(opened, opened.tokenizer.encode(PROMPT), options) + "\n")


def test_speculation_ends_with_its_figures_and_those_of_decoding_without_it(opened, capsys):
    talk(opened, PROMPT, "ngram", 3, Options(max_new_tokens=20))
    first, second = capsys.readouterr().out.splitlines()[-2:]
    assert re.fullmatch(
        r"20 tokens, [\d.]+ tokens/s, ended by length; τ [\d.]+ tokens per target pass, a_K [\d.]+% at K = 3", first
    )
    assert re.fullmatch(r"autoregressive: [\d.]+ tokens/s, the same tokens; speedup [\d.]+", second)


def test_without_a_drafter_there_is_nothing_to_compare(opened, capsys):
    talk(opened, PROMPT, "none", 3, Options(max_new_tokens=5))
    assert re.fullmatch(r"5 tokens, [\d.]+ tokens/s, ended by length", capsys.readouterr().out.splitlines()[-1])


def test_the_end_token_ends_the_answer_and_is_not_printed(opened, capsys, monkeypatch):
    plain = generate(opened.target, [Request(tuple(opened.tokenizer.encode(PROMPT)), Options(max_new_tokens=9))])[0]
    monkeypatch.setattr(Tokenizer, "eos_ids", plain.tokens[4:5])
    talk(opened, PROMPT, "ngram", 3, Options(max_new_tokens=9), raw=True)
    assert "5 tokens, " in (printed := capsys.readouterr().out) and "ended by eos" in printed


def test_a_stop_string_ends_the_answer(opened, capsys):
    text = answer(opened, opened.tokenizer.encode(PROMPT), Options(max_new_tokens=30))
    stop = next(char for char in text[3:] if char.isascii() and char not in text[:3])
    talk(opened, PROMPT, "ngram", 3, Options(max_new_tokens=30, stop=(stop,)), raw=True)
    assert "ended by stop" in capsys.readouterr().out


def test_a_seed_repeats_a_sampled_answer(opened, capsys):
    answers = []
    for seed in (1, 1, 2):
        talk(opened, PROMPT, "ngram", 3, Options(max_new_tokens=16, temperature=1.0, seed=seed))
        answers.append(capsys.readouterr().out.split("\n\n16 tokens")[0])
    assert answers[0] == answers[1] != answers[2]


def test_what_is_streamed_piece_by_piece_is_the_text(opened, monkeypatch):
    monkeypatch.setattr("sys.stdout", stream := Recorder())
    talk(opened, PROMPT, "ngram", 3, Options(max_new_tokens=24))
    ids = opened.tokenizer.chat([{"role": "user", "content": PROMPT}])
    assert "".join(stream.written).startswith(answer(opened, ids, Options(max_new_tokens=24)))
    assert len(stream.written) > 10  # it came in pieces


class Recorder:
    """Standard output that remembers every write."""

    def __init__(self):
        self.written = []

    def write(self, text):
        self.written.append(text)

    def flush(self):
        pass


def test_decoding_without_drafter_accepts_minimum_lengths(opened, capsys):
    talk(opened, PROMPT, "ngram", 3, Options(max_new_tokens=8, min_new_tokens=8))
    assert "8 tokens, " in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["eagle", "eagle-tree"])
def test_a_trained_drafter_answers_with_the_same_text(opened, capsys, tmp_path, kind):
    file = save_eagle(tiny_eagle(1, opened.checkpoint, (1, 2)), tmp_path / "drafter.safetensors")
    reading = open_target(opened.name, Placement(dtype="float64"), (1, 2))
    talk(reading, PROMPT, f"{kind}:{file}", 3, Options(max_new_tokens=20), raw=True)
    printed = capsys.readouterr().out
    expected = answer(opened, opened.tokenizer.encode(PROMPT), Options(max_new_tokens=20))
    assert printed.startswith(expected + "\n\n20 tokens, ") and "at K = 3" in printed and "the same tokens" in printed


@pytest.mark.parametrize("raw", [True, False])
def test_an_empty_prompt_is_refused(opened, raw):
    with pytest.raises(ValueError, match="empty prompt"):
        talk(opened, "", "ngram", 3, Options(), raw=raw)


def test_k_of_zero_is_refused(opened):
    with pytest.raises(ValueError, match="K = 0: expected at least 1"):
        talk(opened, PROMPT, "ngram", 0, Options())


def test_figures_are_those_of_the_k_asked_for(opened, capsys):
    drafter, _ = open_drafter("layer-skip:2", opened)
    ids = tuple(opened.tokenizer.encode(PROMPT))
    counts = count(decode(opened.target, [Request(ids, Options(max_new_tokens=30), FixedLength(5))], drafter))
    talk(opened, PROMPT, "layer-skip:2", 5, Options(max_new_tokens=30), raw=True)
    assert f"τ {counts.tau:.2f} tokens per target pass, a_K {counts.a_k:.1%} at K = 5" in capsys.readouterr().out
    assert counts.tau > 1
