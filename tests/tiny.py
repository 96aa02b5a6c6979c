"""A tiny random model in a folder, with a byte-level tokenizer and a chat template: what the command line opens."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from specdec_core.models.checkpoints import save_checkpoint, tiny_llama

SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'][0] }}{{ m['content'] }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>a{% endif %}"
)
VOCABULARY = 259
"""The special tokens, then one token a byte."""


def save_tiny(folder: Path, seed: int = 1, *, special: tuple[str, ...] = SPECIAL, **changes: Any) -> Path:
    """Save `tiny_llama(seed, vocabulary=VOCABULARY, **changes)` with its tokenizer; returns the folder."""
    save_checkpoint(tiny_llama(seed, **{"vocabulary": VOCABULARY} | changes), folder)
    alphabet = [*special, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in special])
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": special[-1], "chat_template": TEMPLATE}))
    return folder
