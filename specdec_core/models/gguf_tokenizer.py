"""A GGUF file's tokenizer as Hugging Face files: tokenizer.json, and tokenizer_config.json with the chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specdec_core.models.errors import CorruptFile, UnsupportedModel

END_NAMES = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<end_of_turn>", "</s>")
"""Special tokens that end an answer by convention, beside the one that the metadata name."""

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def build_tokenizer(metadata: dict[str, Any], source: Path) -> Tokenizer:
    """Byte-level BPE from the metadata's tokens and merges; control tokens are special.

    SmolLM2's vocabulary lacks a few bytes (control characters, and those that start code points from U+40000 on);
    text that needs them loses them, as with its published tokenizer. Raises UnsupportedModel for another kind of
    tokenizer or way of splitting text.
    """
    kind = metadata.get("tokenizer.ggml.model")
    splitter = metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2" or splitter != "smollm":
        raise UnsupportedModel(
            f"{source} has a tokenizer of kind {kind!r} that splits text like {splitter!r}; implemented: 'gpt2' "
            "(byte-level BPE) with 'smollm'. Give a Hugging Face folder, whose tokenizer.json says how, instead"
        )
    tokens = _tokens(metadata, source)
    merges = [_pair(merge, source) for merge in metadata["tokenizer.ggml.merges"]]
    try:
        model = models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=merges)
    except Exception as error:  # the library raises plain Exception
        raise CorruptFile(f"{source}: its merges do not fit its tokens ({error}); install it again") from error
    tokenizer = Tokenizer(model)
    # Every digit is a word of its own; the rest is split as GPT-2 does, and a space belongs to the word after it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = metadata["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    defined = [token for token, kind in zip(tokens, types, strict=True) if kind == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=False) for token in defined])
    return tokenizer


def write_tokenizer(metadata: dict[str, Any], folder: Path, source: Path) -> None:
    """Write tokenizer.json and tokenizer_config.json, as `Tokenizer.from_folder` and AutoTokenizer read them."""
    tokenizer = build_tokenizer(metadata, source)
    # Written as text, because the library's own save reports a full disk as a bare Exception.
    (folder / "tokenizer.json").write_text(tokenizer.to_str(pretty=True), encoding="utf-8")
    values: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",  # takes tokenizer.json as it is
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata["llama.context_length"],
        "add_prefix_space": False,
    }
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    for role, key in roles.items():
        index = metadata.get(f"tokenizer.ggml.{key}_token_id")
        if index is not None:
            values[role] = metadata["tokenizer.ggml.tokens"][index]
    if "tokenizer.chat_template" in metadata:
        values["chat_template"] = metadata["tokenizer.chat_template"]
    text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
    (folder / "tokenizer_config.json").write_text(text, encoding="utf-8")


def end_tokens(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end an answer: the metadata's own first, then every control token with a name in END_NAMES."""
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    ends = [metadata["tokenizer.ggml.eos_token_id"]] if "tokenizer.ggml.eos_token_id" in metadata else []
    control = {token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == _CONTROL}
    return tuple(dict.fromkeys(ends + [control[name] for name in END_NAMES if name in control]))


def _tokens(metadata: dict[str, Any], source: Path) -> list[str]:
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    if len(set(tokens)) != len(tokens):
        raise CorruptFile(f"{source} gives the same token twice; install it again")
    if len(metadata["tokenizer.ggml.token_type"]) != len(tokens):
        raise CorruptFile(f"{source} does not give every token a type; install it again")
    return tokens


def _pair(merge: str, source: Path) -> tuple[str, str]:
    left, space, right = merge.partition(" ")
    if not (left and space and right) or " " in right:
        raise CorruptFile(f"{source}: the merge {merge!r} is not two tokens; install it again")
    return left, right
