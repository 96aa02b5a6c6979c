"""The tokenizer: as transformers has it, and streams that never break a character."""

from __future__ import annotations

import json
import random

import pytest
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, decoders, models, processors
from tokenizers import Tokenizer as Core

from specdec_core.models.errors import CorruptFile, ModelError, TokenizerMismatch
from specdec_core.models.gguf_tokenizer import build_tokenizer, write_tokenizer
from specdec_core.models.tokenizer import Tokenizer, require_same_tokenizer

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "In 2025 there were 1,234,567.89 of them; 007",
    "def f(x):\n    if x:\n\treturn  [x]   # two  spaces\n\n\n",
    "😀 👩‍👩‍👧‍👦 🇫🇷 e\u0301 é ﷽",
    "漢字とかな, Ελλάδα, مرحبا, привет",
    "a\u2028b\u00a0c\r\nd\ufeff",
    "it's we'll I'D they've",
    "        eight spaces, then a tab\t.",
    "�",
]
QUESTION = [{"role": "user", "content": "What is 2 + 2?"}]


@pytest.fixture(scope="module")
def theirs(smollm):
    return transformers.AutoTokenizer.from_pretrained(smollm.folder)


@pytest.fixture
def tiny(tiny_metadata, tmp_path):
    write_tokenizer(tiny_metadata() | {"llama.context_length": 256}, tmp_path, tmp_path)
    return Tokenizer.from_folder(tmp_path)


def byte_fallback() -> Tokenizer:
    """A vocabulary in SentencePiece's style: ▁ for spaces, unknown characters as bytes."""
    tokens = ["<unk>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁a", "b"]
    core = Core(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=[], byte_fallback=True))
    core.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    core.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return Tokenizer(core)


class TestRealTokenizer:
    @pytest.mark.parametrize("text", TEXTS)
    def test_ids_are_those_of_transformers(self, smollm_tokenizer, theirs, text):
        assert smollm_tokenizer.encode(text) == theirs(text).input_ids

    @pytest.mark.parametrize("text", TEXTS)
    def test_round_trip(self, smollm_tokenizer, text):
        assert smollm_tokenizer.decode(smollm_tokenizer.encode(text)) == text

    @given(st.text(st.characters(exclude_categories=["Cs", "Cc", "Co", "Cn"])))
    @settings(max_examples=100, deadline=None)
    def test_any_printable_text(self, smollm_tokenizer, text):
        assert smollm_tokenizer.decode(smollm_tokenizer.encode(text)) == text

    def test_every_digit_is_a_token(self, smollm_tokenizer):
        assert [smollm_tokenizer.token(index) for index in smollm_tokenizer.encode("x 2048")] == [
            "x", "Ġ", "2", "0", "4", "8",
        ]  # fmt: skip

    def test_chat_is_that_of_transformers(self, smollm_tokenizer, theirs):
        talks = [
            QUESTION,
            [{"role": "system", "content": "Be brief."}, *QUESTION],
            [*QUESTION, {"role": "assistant", "content": "4"}, {"role": "user", "content": "And 3 + 3?"}],
        ]
        for talk in talks:
            expected = theirs.apply_chat_template(talk, add_generation_prompt=True, return_dict=False)
            assert smollm_tokenizer.chat(talk) == expected

    def test_end_tokens(self, smollm, smollm_tokenizer, theirs):
        assert smollm_tokenizer.eos_ids == smollm.config.eos_ids == (2, 0)
        assert [smollm_tokenizer.token(index) for index in smollm_tokenizer.eos_ids] == ["<|im_end|>", "<|endoftext|>"]
        assert theirs.eos_token_id == 2
        assert (theirs.bos_token_id, theirs.pad_token_id, theirs.unk_token_id) == (1, 2, 0)

    def test_size(self, smollm, smollm_tokenizer):
        assert smollm_tokenizer.vocabulary_size == smollm.config.vocabulary == 49152

    def test_special_tokens_are_read_but_not_shown(self, smollm_tokenizer):
        assert smollm_tokenizer.encode("<|im_start|>a<|im_end|>")[::2] == [1, 2]
        assert smollm_tokenizer.decode(smollm_tokenizer.encode("<|im_start|>a<|im_end|>")) == "a"
        assert smollm_tokenizer.token(2) == "<|im_end|>"


class TestStreamDecoder:
    @pytest.mark.parametrize("text", TEXTS)
    def test_the_parts_make_the_whole(self, smollm_tokenizer, text):
        ids = smollm_tokenizer.encode(text)
        stream = smollm_tokenizer.stream()
        assert "".join([stream.push(index) for index in ids]) + stream.flush() == text

    def test_no_half_characters(self, smollm_tokenizer):
        text = "".join(text for text in TEXTS if "�" not in text)
        stream = smollm_tokenizer.stream()
        parts = [stream.push(index) for index in smollm_tokenizer.encode(text)]
        assert not any("�" in part for part in parts)
        assert stream.flush() == ""
        assert "" in parts  # something was held back, so the test tested something

    def test_a_character_cut_off_comes_out_at_the_end(self, smollm_tokenizer):
        ids = smollm_tokenizer.encode("a🇫")[:-1]
        stream = smollm_tokenizer.stream()
        shown = "".join(stream.push(index) for index in ids)
        assert shown == "a"
        assert stream.flush() == "�"
        assert stream.flush() == ""

    @pytest.mark.parametrize("seed", range(20))
    def test_random_tokens(self, smollm_tokenizer, seed):
        # Short tokens hold the loose bytes, so that broken and resumed characters are frequent.
        pick = random.Random(seed)
        ids = [pick.randrange(300) if pick.random() < 0.7 else pick.randrange(49152) for _ in range(200)]
        stream = smollm_tokenizer.stream()
        assert "".join(stream.push(index) for index in ids) + stream.flush() == smollm_tokenizer.decode(ids)

    def test_spaces_of_sentencepiece_are_kept(self):
        tokenizer = byte_fallback()
        ids = [tokenizer.vocabulary()[token] for token in ("▁a", "</s>", "▁a", "b", "▁", "▁a")]
        stream = tokenizer.stream()
        assert "".join(stream.push(index) for index in ids) + stream.flush() == tokenizer.decode(ids) == "a ab  a"

    def test_characters_of_bytes(self):
        tokenizer = byte_fallback()
        ids = [tokenizer.vocabulary()[f"<0x{byte:02X}>"] for byte in "é漢😀".encode()]
        stream = tokenizer.stream()
        assert [stream.push(index) for index in ids] == ["", "é", "", "", "漢", "", "", "", "😀"]


class TestChat:
    def test_a_conversation(self, tiny):
        text = "".join(tiny.token(index) for index in tiny.chat([{"role": "user", "content": "hi"}]))
        assert text == "<|im_start|>userĊhi<|im_end|>Ċ<|im_start|>assistantĊ"

    def test_a_first_token_is_added_to_text_but_not_to_a_chat(self, tiny, tmp_path):
        core = Core.from_file(str(tmp_path / "tokenizer.json"))
        core.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", 1)]
        )
        core.save(str(tmp_path / "tokenizer.json"))
        tokenizer = Tokenizer.from_folder(tmp_path)
        assert tokenizer.encode("in the") == [1, *tiny.encode("in the")]
        assert tokenizer.chat(QUESTION) == tiny.chat(QUESTION)

    def test_a_template_in_a_file_of_its_own(self, tiny, tmp_path):
        (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}{{ messages[0].content }}")
        assert Tokenizer.from_folder(tmp_path).chat([{"role": "user", "content": "in"}])[0] == 1

    def test_a_template_among_several(self, tmp_path, tiny):
        settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
        settings["chat_template"] = [
            {"name": "tools", "template": "no"},
            {"name": "default", "template": "{{ messages[0].content }}"},
        ]
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
        found = Tokenizer.from_folder(tmp_path).chat([{"role": "user", "content": "in the"}])
        assert found == tiny.encode("in the")

    def test_no_template(self, tiny_metadata, tmp_path):
        tokenizer = Tokenizer(build_tokenizer(tiny_metadata(), tmp_path))
        with pytest.raises(ModelError, match="no chat template"):
            tokenizer.chat(QUESTION)

    @pytest.mark.parametrize(
        ("messages", "message"),
        [([], "no messages"), ([{"role": "user"}], "lacks a text"), ([{"role": "user", "content": 3}], "lacks a text")],
    )
    def test_malformed_messages(self, tiny, messages, message):
        with pytest.raises(ModelError, match=message):
            tiny.chat(messages)

    def test_a_template_that_refuses(self, tiny, tmp_path):
        (tmp_path / "chat_template.jinja").write_text("{{ raise_exception('roles must alternate') }}")
        with pytest.raises(ModelError, match="refuses these messages: roles must alternate"):
            Tokenizer.from_folder(tmp_path).chat(QUESTION)

    def test_a_template_runs_in_a_sandbox(self, tiny, tmp_path):
        (tmp_path / "chat_template.jinja").write_text("{{ messages.__class__.__mro__ }}")
        with pytest.raises(ModelError, match="unsafe"):
            Tokenizer.from_folder(tmp_path).chat(QUESTION)


class TestFolder:
    def test_end_tokens_come_from_every_file(self, tiny, tmp_path):
        (tmp_path / "config.json").write_text('{"eos_token_id": 7}')
        (tmp_path / "generation_config.json").write_text('{"eos_token_id": [8, 7]}')
        assert Tokenizer.from_folder(tmp_path).eos_ids == (7, 8, 2, 0)

    def test_truncation_and_padding_are_off(self, tiny, tmp_path):
        core = Core.from_file(str(tmp_path / "tokenizer.json"))
        core.enable_truncation(3)
        core.enable_padding(length=8)
        core.save(str(tmp_path / "tokenizer.json"))
        assert Tokenizer.from_folder(tmp_path).encode("abcdefghij") == tiny.encode("abcdefghij")
        assert Tokenizer.from_folder(tmp_path).encode("a") == tiny.encode("a")

    def test_no_tokenizer(self, tmp_path):
        with pytest.raises(ModelError, match=r"holds no tokenizer\.json"):
            Tokenizer.from_folder(tmp_path)
        with pytest.raises(ModelError, match="made in memory"):
            Tokenizer.from_folder(None)

    def test_a_damaged_file(self, tiny, tmp_path):
        (tmp_path / "tokenizer.json").write_text((tmp_path / "tokenizer.json").read_text()[:500])
        with pytest.raises(CorruptFile, match=r"tokenizer\.json is truncated or damaged"):
            Tokenizer.from_folder(tmp_path)


class TestSameTokenizer:
    def test_the_same(self, tiny, tmp_path):
        require_same_tokenizer(tiny, Tokenizer.from_folder(tmp_path))
        assert tiny.same_vocabulary(Tokenizer.from_folder(tmp_path))

    def test_exchanged_tokens(self, tiny, tiny_metadata, tmp_path):
        values = tiny_metadata()
        tokens = values["tokenizer.ggml.tokens"]
        tokens[10], tokens[11] = tokens[11], tokens[10]
        other = Tokenizer(build_tokenizer(values, tmp_path))
        assert not tiny.same_vocabulary(other)
        with pytest.raises(TokenizerMismatch, match=r"2 tokens differ of 264 and 264.*is 10 for the drafter and 11"):
            require_same_tokenizer(other, tiny)

    def test_one_more_token(self, tiny, tiny_metadata, tmp_path):
        values = tiny_metadata()
        values["tokenizer.ggml.tokens"].append("<extra>")
        values["tokenizer.ggml.token_type"].append(3)
        with pytest.raises(TokenizerMismatch, match=r"'<extra>', for one, is absent for the drafter and 264"):
            require_same_tokenizer(tiny, Tokenizer(build_tokenizer(values, tmp_path)))

    def test_two_families(self, tiny, smollm_tokenizer):
        with pytest.raises(TokenizerMismatch, match="different tokenizers"):
            require_same_tokenizer(tiny, smollm_tokenizer)
