"""The decoders that faults are put into: right, small, in float64 so that there are no near-ties; and awkward batches.

A subject is a way of keeping ragged rows (masked scatter, or a realigned rectangle) on a model whose positions are
rotary or learned. Classes and states are the target's own, so that what is broken there leaves the drafter alone.
"""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
)

from specdec_core.decode import decode
from specdec_core.drafters.model import ModelDrafter
from specdec_core.lengths.fixed import FixedLength
from specdec_core.protocol import Draft, RowRound, RowView, State, Target
from specdec_core.published.rectangle import RealigningTarget
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.huggingface import HuggingFaceTarget
from specdec_core.targets.huggingface_cache import HoledCache
from specdec_core.targets.padded import PaddedBatch
from specdec_core.topology import Forest, tree

V, CONTEXT, WINDOW, SLOTS = 61, 256, 8, 4
END = 51
"""The token that ends a row, that some prompts contain, and that a careless mask takes for padding: one that these
models emit now and then."""

ROTARY, LEARNED = "rotary", "learned"
SCATTER, RECTANGLE, TABLE = "scatter", "rectangle", "table"


@dataclass(frozen=True)
class Subject:
    """A correct decoder.

    state      how the target keeps ragged rows; TABLE: no model but a table of laws, for exact laws of sampled rows.
    positions  of the model.
    trees      drafts are trees, whose accepted paths have to be moved; else chains.
    window     entries that a token sees, itself included; 0: all.
    """

    state: str
    positions: str = ""
    trees: bool = False
    window: int = 0

    @property
    def name(self) -> str:
        further = ["trees"] * self.trees + [f"window {self.window}"] * bool(self.window)
        return ", ".join([self.state, *[self.positions] * bool(self.positions), *further])


SUBJECTS = (
    Subject(SCATTER, LEARNED),
    Subject(SCATTER, ROTARY),
    Subject(RECTANGLE, LEARNED),
    Subject(RECTANGLE, ROTARY),
    Subject(SCATTER, LEARNED, trees=True),
    Subject(SCATTER, ROTARY, trees=True),
    Subject(SCATTER, ROTARY, window=WINDOW),
    Subject(TABLE),
)


# --- Targets ------------------------------------------------------------------------------------------------------


class ScatterState(HoledCache):
    """Masked scatter. Roomy, because a fault that keeps too much should give wrong tokens here, and no error."""

    ROOM = 8


class Scatter(HuggingFaceTarget):
    def new_state(self, slots: int, capacity: int) -> HoledCache:
        return ScatterState(slots, ScatterState.ROOM * capacity)


class Realigned(RealigningTarget):
    """Realigned after every round."""


class Windowed(HuggingFaceTarget):
    """A token sees the WINDOW newest positions, its own included. Chains only: an entry's column is its position."""

    def _padded(self, state: HoledCache, slots: np.ndarray, tokens: np.ndarray, forest: Forest) -> PaddedBatch:
        batch = super()._padded(state, slots, tokens, forest)
        seen = np.arange(batch.reach) >= self._first(state, slots, batch)[:, :, None]
        return replace(batch, visible=batch.visible & seen)

    def _first(self, state: HoledCache, slots: np.ndarray, batch: PaddedBatch) -> np.ndarray:
        """Oldest position that is not evicted, for each node: `[B, n]`."""
        return batch.positions - WINDOW + 1


class WindowedScatter(Windowed):
    """The target among the two."""


CLASSES: dict[str, Callable[..., HuggingFaceTarget]] = {
    SCATTER: Scatter,
    RECTANGLE: Realigned,
    "window": WindowedScatter,
}
"""Of the targets, by state; looked up whenever a run begins, so that a fault may name another."""


def new_target(subject: Subject, chunk: int = 512) -> HuggingFaceTarget:
    """The subject's target; `chunk`: most tokens of one prefill pass."""
    return _built(CLASSES["window" if subject.window else subject.state], subject.positions, chunk)


@lru_cache(maxsize=32)
def _built(kind: Callable[..., HuggingFaceTarget], positions: str, chunk: int) -> HuggingFaceTarget:
    return kind(make_model(positions), chunk=chunk)


@lru_cache(maxsize=2)
def make_model(positions: str) -> PreTrainedModel:
    """The target's model: two layers, random weights that make it sure of itself. One object, for hooks."""
    # Elsewhere's randomness is not ours to seed.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if positions == LEARNED:
            sizes: dict[str, Any] = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": CONTEXT}
            return GPT2LMHeadModel(GPT2Config(**sizes, **SHARED)).double().eval()
        return LlamaForCausalLM(LlamaConfig(**SIZES, **SHARED)).double().eval()


SHARED: dict[str, Any] = {"vocab_size": V, "initializer_range": 0.3, "bos_token_id": None, "eos_token_id": None}
SHARED |= {"attn_implementation": "sdpa"}
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SIZES |= {"num_key_value_heads": 2, "max_position_embeddings": CONTEXT}


# --- Drafters -----------------------------------------------------------------------------------------------------

NOISE = {ROTARY: 0.02, LEARNED: 0.03}
"""Of the drafter's weights, in standard deviations of each matrix: six to eight of ten draft tokens are accepted."""


class DecoyTrees(ModelDrafter):
    """The chain that a model drafts, each token behind a sibling that is tried first and is wrong: paths have gaps."""

    def most_nodes(self, depth: int) -> int:
        return 2 * depth

    def propose(self, views: list[RowView], state: State) -> list[Draft]:  # type: ignore[override]
        return [_with_decoys(chain) for chain in super().propose(views, state)]


def _with_decoys(chain: Draft) -> Draft:
    parents, tokens = [-1], list[int]()
    for depth, token in enumerate(chain.tokens.tolist()):
        parents += [2 * depth, 2 * depth]
        tokens += [(token + 1) % V, token]
    return Draft(np.array(tokens, np.int64), tree(tuple(parents)))


def drafted_chain(draft: Draft) -> np.ndarray:
    """What the model drafted, `[K]`: without the decoys."""
    return draft.tokens if draft.topology.is_chain else draft.tokens[1::2]


def new_drafter(subject: Subject, model: Target | None = None) -> ModelDrafter:
    """A fresh drafter with this drafting model, or the one of `drafting_target`."""
    model = model or drafting_target(subject)
    return DecoyTrees(model, V) if subject.trees else ModelDrafter(model, V)


@lru_cache(maxsize=16)
def drafting_target(subject: Subject, times: float = 1.0) -> HuggingFaceTarget:
    """What drafts: the target's model with so many times NOISE in its weights (0: itself); of no target's class."""
    kind = Windowed if subject.window else HuggingFaceTarget
    return kind(make_draft_model(subject.positions, times))


@lru_cache(maxsize=8)
def make_draft_model(positions: str, times: float = 1.0) -> PreTrainedModel:
    """A copy of the target's model with so many times NOISE in its weights."""
    model = deepcopy(make_model(positions))
    random = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim > 1:
                noise = torch.randn(weight.shape, generator=random, dtype=weight.dtype)
                weight.add_(times * NOISE[positions] * weight.std() * noise)
    return model


# --- Batches ------------------------------------------------------------------------------------------------------

ROWS = ((1, 2, 1.0), (20, 4, 1.0), (7, 1, 0.55), (7, 3, 1.0), (12, 4, 1.0), (3, 2, 1.0))
"""Prompt length, K and share of the longest output that the row may have: equal and unequal ones, one token at least.
Two more than slots, so that freed slots are taken again. Rows 1 and 3 have END inside their prompts."""
LARGEST = max(k for _, k, _ in ROWS)
SEEDS = 200
"""Tried from each first seed on."""


Requests = tuple[Request, ...]


def new_batch(subject: Subject, tokens: int = 24, first_seed: int = 0) -> Requests:
    """Requests of at most `tokens` new tokens each, from the first seed that makes them awkward for this model.

    ValueError if there is none, for rows that are too short.
    """
    return _new_batch(Subject(SCATTER, subject.positions, window=subject.window), tokens, first_seed)


@lru_cache(maxsize=32)
def _new_batch(subject: Subject, tokens: int, first_seed: int) -> Requests:
    target, drafter = new_target(subject), new_drafter(subject)
    for seed in range(SEEDS * first_seed, SEEDS * (first_seed + 1)):
        requests = _requests(tokens, seed)
        # With more room, so that blocks go on where a cap would have shortened them.
        roomy = [_with_cap(each, each.options.max_new_tokens + LARGEST) for each in requests]
        reports = [row for each in decode(target, roomy, drafter, slots=SLOTS) for row in each.rows]
        if _is_awkward(reports, requests):
            return requests
    raise ValueError(
        f"no batch of {tokens} new tokens a row is awkward enough for {subject.name}: expected about 6 tokens or more, "
        "so that a row can end inside a block"
    )


def _with_cap(request: Request, cap: int) -> Request:
    return replace(request, options=replace(request.options, max_new_tokens=cap))


def _requests(tokens: int, seed: int) -> Requests:
    random = np.random.default_rng(seed)
    requests = []
    for key, (length, k, share) in enumerate(ROWS):
        prompt = random.choice(np.delete(np.arange(V), END), length)
        if key in (1, 3):
            prompt[length // 2] = END
        options = Options(max_new_tokens=max(2, round(share * tokens)), eos=(END,))
        requests.append(Request(tuple(prompt.tolist()), options, FixedLength(k), key))
    return tuple(requests)


def _is_awkward(reports: list[RowRound], requests: Requests) -> bool:
    """A row ends at END inside a block, neither at once nor late, and another meets its cap inside one; at most half of
    all end at END; some drafts are accepted whole, some in part."""
    at_end, at_cap = list[bool](), list[bool]()
    endings = set[str]()
    for row in reports:
        request = requests[row.key]
        before, cap = row.context - len(request.prompt), request.options.max_new_tokens
        after = before + len(row.emitted)
        if before >= cap:
            continue  # in the room behind the cap
        if row.finished == "eos" and after < cap:
            if after < 3:
                return False
            at_end.append(row.ending == "cut" and after <= cap - 2)
        at_cap.append(after > cap)
        endings.add(row.ending)
    awkward = any(at_end) and any(at_cap) and endings >= {"bonus", "recovered"}
    return awkward and len(at_end) <= len(requests) // 2
