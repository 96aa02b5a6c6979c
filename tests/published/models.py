"""Tiny models of transformers in float64, where no rounding excuses a difference: rotary and learned positions."""

from __future__ import annotations

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

NO_IDS = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


def rotary() -> PreTrainedModel:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=61, max_position_embeddings=128, **NO_IDS,
                         initializer_range=0.2, attn_implementation="sdpa")  # fmt: skip
    return LlamaForCausalLM(config).double().eval()


def learned() -> PreTrainedModel:
    torch.manual_seed(1)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 61, "n_positions": 128}
    config = GPT2Config(**sizes, **NO_IDS, initializer_range=0.3, attn_implementation="sdpa")
    return GPT2LMHeadModel(config).double().eval()


MODELS = {"rotary": rotary, "learned": learned}
