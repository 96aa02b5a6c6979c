from dataclasses import replace

import numpy as np
import pytest
import torch

from specdec_core.decode import decode, generate
from specdec_core.drafters.layer_skip import LayerSkipDrafter
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.protocol import RowView
from specdec_core.randomness import DRAFT, streams
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer
from tests.llama_reference import Reference

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKPOINT = tiny_llama(1)
DOUBLE = Placement(dtype="float64")
TARGET = Transformer(CHECKPOINT, DOUBLE)
REQUESTS = [
    Request((3, 1, 4), Options(max_new_tokens=40), FixedLength(5)),
    Request((2,), Options(max_new_tokens=17, repetition_penalty=1.2), FixedLength(1)),
    Request((50, 60, 70, 80), Options(temperature=0.9, max_new_tokens=30, seed=2), FixedLength(7)),
    Request((9, 9), Options(max_new_tokens=12)),
]


def idle_after(layers: int) -> Transformer:
    """A target whose later layers add nothing, so that leaving them out changes nothing."""
    later = tuple(f"model.layers.{layer}." for layer in range(layers, CHECKPOINT.config.layers))
    weights = {
        name: torch.zeros_like(w) if name.startswith(later) and ("o_proj" in name or "down_proj" in name) else w
        for name, w in CHECKPOINT.weights.items()
    }
    return Transformer(replace(CHECKPOINT, weights=weights), DOUBLE)


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_layers_that_are_the_whole_model_are_accepted_always(layers, slots):
    target = idle_after(layers)
    rounds = list(decode(target, REQUESTS, LayerSkipDrafter(target, layers), slots=slots))
    rows = [row for each in rounds for row in each.rows]
    assert all(row.ending == "bonus" or row.accepted == len(row.emitted) for row in rows)
    assert sum(row.accepted for row in rows) > 60


@pytest.mark.parametrize("layers", [1, 2])
@pytest.mark.parametrize("slots", [1, 3, 4])
def test_greedy_output_is_the_targets(layers, slots):
    greedy = [request for request in REQUESTS if request.options.greedy]
    found = generate(TARGET, greedy, LayerSkipDrafter(TARGET, layers), slots=slots)
    assert found == generate(TARGET, [replace(request, policy=None) for request in greedy])


def proposed(state, committed, slot: int = 0, limit: int = 5):
    view = RowView(slot, committed, len(committed), limit, FixedLength(limit), Options(), streams(0, 0, DRAFT))
    return LayerSkipDrafter(TARGET, 2).propose([view], state)[0]


def test_drafting_leaves_the_committed_cache_as_it_was():
    prompts = [np.array([5, 6, 7, 8]), np.array([1, 2])]
    state = TARGET.new_state(2, 20)
    TARGET.prefill(state, np.arange(2), prompts)
    before, lengths, epoch = (state.keys.clone(), state.values.clone()), state.lengths.copy(), state.epoch
    proposed(state, prompts[0])
    assert (state.lengths == lengths).all() and state.epoch == epoch
    for store, kept in zip((state.keys, state.values), before, strict=True):
        assert torch.equal(store[:, 0, :, :3], kept[:, 0, :, :3])
        assert torch.equal(store[:, 1], kept[:, 1])


def test_a_draft_is_the_argmax_of_the_first_layers():
    prompt = np.array([5, 6, 7, 8])
    state = TARGET.new_state(1, 20)
    TARGET.prefill(state, np.array([0]), [prompt])
    draft, first = proposed(state, prompt), Reference(CHECKPOINT, layers=2)
    assert draft.law is None
    assert draft.tokens.tolist() == [first.last([*prompt, *draft.tokens[:depth]]).argmax() for depth in range(5)]


def test_drafting_twice_drafts_the_same():
    prompt = np.array([5, 6, 7, 8])
    state = TARGET.new_state(1, 20)
    TARGET.prefill(state, np.array([0]), [prompt])
    assert proposed(state, prompt).tokens.tolist() == proposed(state, prompt).tokens.tolist()


@pytest.mark.parametrize("layers", [0, 3])
def test_some_layers_run_and_some_are_left_out(layers):
    with pytest.raises(ValueError, match="expected 1…2"):
        LayerSkipDrafter(TARGET, layers)


def test_room_for_a_chain_is_its_depth():
    assert LayerSkipDrafter(TARGET, 1).most_nodes(7) == 7
