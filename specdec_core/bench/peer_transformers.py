"""transformers' own `generate` as a peer: plain, with prompt lookup, and assisted by the model's own first layers."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import torch
from transformers import GenerationConfig, LlamaForCausalLM, PreTrainedModel

from specdec_core.bench.peer_decoders import AR, PLAIN, Decoder, Peer, PeerRun, Setting, Stopwatch, grid, with_default
from specdec_core.bench.serial_backends import BackendFactory, TorchThreads
from specdec_core.forensics.huggingface_decoders import open_model
from specdec_core.protocol import Target
from specdec_core.sampling import Options
from specdec_core.targets.huggingface import HuggingFaceTarget, load_causal_lm

BACKEND = "transformers float32"
LOOKUP, ASSISTED = "prompt lookup", "assisted by its first layers"

CONSTANT, HEURISTIC, DEFAULT = "constant", "heuristic", "default"
"""Schedules of assisted generation: so many tokens every time; two more after a draft that was right and one less after
another; and whatever the installed version does when nothing is said."""

HEURISTIC_START = 5
"""Draft tokens that the heuristic begins with, in every run: transformers would go on where the last one ended."""

LOOKUP_DEFAULT = Setting(10, 2)
"""`PromptLookupCandidateGenerator`'s."""


def transformers_peers(factory: BackendFactory, drafts: Sequence[int], ngrams: Sequence[int]) -> list[Peer]:
    """Peers over the opened checkpoint in float32. A ModelError of `load_causal_lm` if it cannot be opened."""
    checkpoint = factory.opened.checkpoint
    model = load_causal_lm(checkpoint.folder, torch.float32, "sdpa") if checkpoint.folder else open_model(checkpoint)
    return peers_of(model, factory, drafts, ngrams)


def peers_of(
    model: PreTrainedModel, factory: BackendFactory, drafts: Sequence[int], ngrams: Sequence[int]
) -> list[Peer]:
    """Peers over transformers' model, whose own generation settings are dropped."""
    model.generation_config = GenerationConfig()
    model.eval()
    assistant = first_layers(model, max(1, model.config.num_hidden_layers // 3))

    @cache
    def judged() -> tuple[Target, Target]:
        target = HuggingFaceTarget(model, BACKEND)
        return target, factory.reference(BACKEND, target)

    def peer(method: str, settings: Sequence[Setting], decoder: Decoder) -> Peer:
        return Peer(
            BACKEND, "transformers", "float32", method, tuple(settings), decoder, judged, threads=factory.threads
        )

    assisted = (*grid(drafts, schedule=CONSTANT), Setting(HEURISTIC_START, schedule=HEURISTIC))
    return [
        peer(AR, [PLAIN], _plain(model, factory.threads)),
        peer(LOOKUP, with_default(grid(drafts, ngrams), LOOKUP_DEFAULT), _lookup(model, factory.threads)),
        peer(ASSISTED, with_default(assisted, _default(model)), _assisted(model, assistant, factory.threads)),
    ]


def first_layers(model: Any, layers: int) -> PreTrainedModel:
    """A model of its own over the first `layers` layers, final norm and head of a Llama of transformers: the same
    tensors, not copies."""
    config = type(model.config).from_dict(model.config.to_dict() | {"num_hidden_layers": layers})
    config._attn_implementation = model.config._attn_implementation
    with torch.device("meta"):
        part: Any = LlamaForCausalLM(config)
    part.model.embed_tokens, part.model.norm, part.lm_head = model.model.embed_tokens, model.model.norm, model.lm_head
    part.model.rotary_emb, part.model.layers = model.model.rotary_emb, model.model.layers[:layers]
    part.generation_config = GenerationConfig()
    return part.eval()


def _plain(model: PreTrainedModel, threads: int) -> Decoder:
    def decoder(prompt: tuple[int, ...], options: Options, setting: Setting) -> PeerRun:
        return _generate(model, prompt, options, threads, {})

    return decoder


def _lookup(model: PreTrainedModel, threads: int) -> Decoder:
    def decoder(prompt: tuple[int, ...], options: Options, setting: Setting) -> PeerRun:
        how = {"prompt_lookup_num_tokens": setting.draft, "max_matching_ngram_size": setting.ngram}
        return _generate(model, prompt, options, threads, how)

    return decoder


def _assisted(model: PreTrainedModel, assistant: PreTrainedModel, threads: int) -> Decoder:
    def decoder(prompt: tuple[int, ...], options: Options, setting: Setting) -> PeerRun:
        # Made anew for every run: generate writes into it what it adapts on the way.
        assistant.generation_config = own = GenerationConfig()
        if setting.schedule != DEFAULT:
            own.num_assistant_tokens, own.num_assistant_tokens_schedule = setting.draft, setting.schedule
        if setting.schedule == CONSTANT:
            own.assistant_confidence_threshold = 0.0  # or a draft ends where it looks doubtful
        return _generate(model, prompt, options, threads, {"assistant_model": assistant})

    return decoder


class _Listener:
    """A streamer: it is handed the prompt, and then the tokens of every pass."""

    def __init__(self) -> None:
        self.watch, self._prompt_seen = Stopwatch(), False

    def put(self, tokens: torch.Tensor) -> None:
        if self._prompt_seen:
            self.watch.emit(tokens.reshape(-1).tolist())
        self._prompt_seen = True

    def end(self) -> None:
        """Nothing to flush."""


@torch.no_grad()
def _generate(model: Any, prompt: tuple[int, ...], options: Options, threads: int, how: dict[str, Any]) -> PeerRun:
    ids, heard = torch.tensor([prompt]), _Listener()
    # Named even where they do nothing: transformers' own default is top_k=50.
    sampling = {} if options.greedy else {"temperature": options.temperature, "top_k": 0, "top_p": 1.0}
    with TorchThreads(threads), torch.random.fork_rng(devices=[]):
        torch.manual_seed(options.seed)
        found = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=not options.greedy,
            max_new_tokens=options.max_new_tokens,
            eos_token_id=list(options.eos) or None,
            pad_token_id=options.eos[0] if options.eos else None,
            streamer=heard,
            **sampling,
            **how,
        )
    run = heard.watch.run(heard.watch.emissions - 1)
    if run.tokens != tuple(found[0, len(prompt) :].tolist()):
        raise RuntimeError(
            f"transformers streamed {len(run.tokens)} new tokens and returned {found.shape[1] - ids.shape[1]}"
        )
    return run


def _default(model: Any) -> Setting:
    """What the installed version drafts with when nothing is said."""
    defaults = model.generation_config._get_default_generation_params()
    return Setting(int(defaults["num_assistant_tokens"]), schedule=DEFAULT)
