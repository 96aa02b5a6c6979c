import pytest
import torch

from specdec_core.models.checkpoints import tiny_llama
from specdec_core.models.rounding import rounded

MODEL = tiny_llama(1)


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_each_group_takes_few_values_and_none_is_further_than_half_a_step(bits):
    found = rounded(MODEL, bits, group=16)
    for name, weight in found.weights.items():
        if weight.ndim == 2 and name.startswith("model.layers."):
            original = MODEL.weights[name].reshape(-1, 16)
            scale = original.abs().amax(dim=1, keepdim=True) / (2 ** (bits - 1) - 1)
            steps = weight.reshape(-1, 16) / scale
            assert torch.allclose(steps, steps.round(), atol=1e-4) and steps.abs().max() <= 2 ** (bits - 1) - 1 + 1e-4
            assert ((weight.reshape(-1, 16) - original).abs() <= 0.5001 * scale).all()
        else:
            assert torch.equal(weight, MODEL.weights[name])


def test_more_bits_are_nearer_and_it_is_another_model_of_the_same_shape():
    errors = []
    for bits in (3, 4, 6):
        found = rounded(MODEL, bits, group=16)
        name = "model.layers.0.self_attn.q_proj.weight"
        errors.append(float((found.weights[name] - MODEL.weights[name]).abs().mean()))
        assert found.config == MODEL.config and found.fingerprint != MODEL.fingerprint and f"{bits} bits" in found.name
    assert errors[0] > 2 * errors[1] > 4 * errors[2]


def test_a_group_of_zeros_stays_zero():
    weights = dict(MODEL.weights) | {"model.layers.0.self_attn.q_proj.weight": torch.zeros(48, 48)}
    changed = type(MODEL)("zeros", MODEL.config, weights, None, "f")
    assert rounded(changed, 4, group=16).weights["model.layers.0.self_attn.q_proj.weight"].abs().max() == 0


@pytest.mark.parametrize(
    ("bits", "group", "said"), [(1, 16, "expected 2…8"), (9, 16, "expected 2…8"), (4, 32, "48 inputs")]
)
def test_what_cannot_be_rounded(bits, group, said):
    with pytest.raises(ValueError, match=said):
        rounded(MODEL, bits, group)
