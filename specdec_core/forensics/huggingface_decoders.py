"""transformers' own sampling, plain and assisted by a draft model, as decoders that an audit can call (audit.py)."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel

from specdec_core.forensics.audit import Decoder
from specdec_core.models.checkpoints import Checkpoint, save_checkpoint
from specdec_core.sampling import Options
from specdec_core.targets.huggingface import load_causal_lm


def open_model(checkpoint: Checkpoint, dtype: str = "float32") -> PreTrainedModel:
    """transformers' model with a checkpoint's weights, in eval mode on the CPU.

    Whatever a model folder says of generation is dropped: an audit names all options itself.
    """
    with tempfile.TemporaryDirectory() as folder:
        model = load_causal_lm(save_checkpoint(checkpoint, folder), getattr(torch, dtype), "sdpa")
    model.generation_config = GenerationConfig()
    return model.eval()


def plain(model: PreTrainedModel, options: Options) -> Decoder:
    """`generate` without an assistant: what any audit of assisted sampling is to be compared with."""
    settings = generation_settings(options)

    def decoder(prompt: tuple[int, ...], seed: int) -> list[int]:
        return _generate(model, prompt, seed, settings)

    return decoder


def assisted(model: PreTrainedModel, assistant: PreTrainedModel, options: Options, k: int) -> Decoder:
    """`generate(assistant_model=…)`, k draft tokens in every round; tells its rounds.

    What transformers adapts on the way (the number of draft tokens; where a draft that looks doubtful ends) is off.
    """
    settings = generation_settings(options)
    own = assistant.generation_config
    own.num_assistant_tokens, own.num_assistant_tokens_schedule, own.assistant_confidence_threshold = k, "constant", 0.0

    def decoder(prompt: tuple[int, ...], seed: int) -> list[list[int]]:
        heard = _Rounds()
        tokens = _generate(model, prompt, seed, settings | {"assistant_model": assistant, "streamer": heard})
        sizes = heard.sizes
        if sum(sizes) != len(tokens):
            raise RuntimeError(f"transformers streamed {sum(sizes)} new tokens and returned {len(tokens)}")
        return [part.tolist() for part in np.split(np.array(tokens), np.cumsum(sizes)[:-1])]

    return decoder


def single_position(checkpoint: Checkpoint, options: Options, k: int, dtype: str = "float32") -> Decoder:
    """`generate` with the generator that transformers uses for the assistants of Gemma 4, on any Llama's weights.

    It drafts k argmax tokens and hands their raw logits to the rule for sampled ones (transformers issues 32867 and
    47932). It is chosen by the names of the models' classes, so a model is given such a name; the assistant is the same
    model without its context. Draft and rule are transformers' own; no weights of Gemma are needed.
    """
    model, assistant = open_model(checkpoint, dtype), open_model(checkpoint, dtype)
    model.__class__, assistant.__class__ = _Gemma4Target, _Gemma4Assistant
    return assisted(model, assistant, options, k)


class _Gemma4Target(LlamaForCausalLM):
    def forward(self, *arguments: Any, return_shared_kv_states: bool = False, **how: Any) -> Any:
        found = super().forward(*arguments, **how)
        found["shared_kv_states"] = {}  # for assistants that read the target's cache, which ours does not
        return found


_Gemma4Target.__name__ = "Gemma4ForTheAudit"


class _Gemma4Assistant(LlamaForCausalLM):
    def forward(self, inputs_embeds: torch.Tensor, **context: Any) -> Any:
        """`inputs_embeds` `[1, 1, 2H]`: of the newest token, and the hidden state before it, which is not looked at."""
        newest = inputs_embeds[..., : inputs_embeds.shape[-1] // 2]
        found = super().forward(inputs_embeds=newest, use_cache=False, output_hidden_states=True)
        return SimpleNamespace(logits=found.logits, last_hidden_state=found.hidden_states[-1])


_Gemma4Assistant.__name__ = "Gemma4AssistantForTheAudit"


class _Rounds:
    """A streamer, which is handed the prompt and then the tokens of each round."""

    def __init__(self) -> None:
        self._sizes: list[int] = []

    @property
    def sizes(self) -> Sequence[int]:
        return self._sizes[1:]

    def put(self, tokens: torch.Tensor) -> None:
        self._sizes.append(tokens.numel())

    def end(self) -> None:
        """Nothing to flush."""


@torch.no_grad()
def _generate(model: PreTrainedModel, prompt: tuple[int, ...], seed: int, settings: dict[str, Any]) -> list[int]:
    ids = torch.tensor([prompt])
    with torch.random.fork_rng(devices=[]):  # generate draws from the global stream, which is the caller's
        torch.manual_seed(seed)
        found: Any = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)  # type: ignore[operator]
    return found[0, len(prompt) :].tolist()


def generation_settings(options: Options) -> dict[str, Any]:
    """Arguments of `generate` that mean the same. ValueError for what transformers does not have."""
    if options.presence_penalty or options.stop:
        raise ValueError(
            f"presence_penalty {options.presence_penalty}, stop {options.stop}: transformers' generate has no such "
            "option (stop strings need its tokenizer); leave them at 0 and ()"
        )
    settings: dict[str, Any] = {
        "do_sample": not options.greedy,
        "repetition_penalty": options.repetition_penalty,
        "max_new_tokens": options.max_new_tokens,
        "min_new_tokens": options.min_new_tokens or None,
        "eos_token_id": list(options.eos) or None,
        # Asked for with end tokens, and used in batches only. Any other id would be taken for padding in the prompt.
        "pad_token_id": options.eos[0] if options.eos else None,
    }
    if not options.greedy:
        # Named even where they do nothing: transformers' own default is top_k=50.
        settings |= {"temperature": options.temperature, "top_k": options.top_k, "top_p": options.top_p}
        settings |= {"min_p": options.min_p or None}
    return settings
