import numpy as np
import pytest
import torch

from specdec_core.kernels.gated_delta import DeltaInputs, GatedDelta, family, reference
from specdec_core.kernels.gated_delta.family import AdditiveInputs, LowRankInputs
from specdec_core.topology import chain, forest, tree
from tests.kernels.gated_delta.windows import (
    GATES,
    MEMBERS,
    error,
    paths_to,
    random_forest,
    random_inputs,
    random_state,
    tensors,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TREES = 40
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def sweep(member, trees):
    """Largest errors over so many random trees of one member, every node of each committed, none too."""
    seen, seed, worst = 0, 0, dict.fromkeys(TOLERANCE, 0.0)
    form: GatedDelta = family
    while seen < trees:
        rng = np.random.default_rng(seed)
        shapes = random_forest(rng)
        heads, keys, values = int(rng.integers(1, 4)), int(rng.integers(1, 7)), int(rng.integers(1, 7))
        inputs = random_inputs(rng, len(shapes.rows), heads, keys, values, member)
        state = random_state(rng, len(shapes.trees), heads, keys, values)
        expected, snapshots = family.verify_sequentially(state, inputs, shapes)
        for dtype in worst:
            start = torch.from_numpy(state).to(dtype)
            found, factors = form.verify(start, tensors(inputs, dtype), shapes)
            worst[dtype] = max(worst[dtype], error(found, expected))
            for node in range(-1, int(shapes.counts.max())):
                paths = paths_to(shapes, [min(node, len(each) - 1) for each in shapes.trees])
                kept = form.commit(start, factors, paths)
                worst[dtype] = max(worst[dtype], error(kept, reference.commit(state, snapshots, paths)))
                if node < 0:
                    assert torch.equal(kept, start)
        seen, seed = seen + len(shapes.trees), seed + 1
    return worst


@pytest.mark.parametrize("member", MEMBERS[1:])
def test_every_node_of_many_trees_equals_the_reference(member):
    for dtype, worst in sweep(member, TREES).items():
        assert worst <= TOLERANCE[dtype], dtype


@pytest.mark.parametrize("member", MEMBERS)
@pytest.mark.parametrize("gate", GATES)
def test_one_gate_for_all_from_none_to_a_full_reset(member, gate):
    rng = np.random.default_rng(1)
    shapes = forest([tree((-1, 0, 1, 0, 2, 2, 3)), chain(9)])
    inputs, state = random_inputs(rng, 16, 2, 4, 3, member), random_state(rng, 2, 2, 4, 3)
    inputs.log_decay[:] = gate
    expected, snapshots = family.verify_sequentially(state, inputs, shapes)
    found, factors = family.verify(torch.from_numpy(state), tensors(inputs), shapes)
    assert error(found, expected) <= 1e-12
    paths = paths_to(shapes, [6, 8])
    kept = family.commit(torch.from_numpy(state), factors, paths)
    assert error(kept, reference.commit(state, snapshots, paths)) <= 1e-12


def one(*values: float) -> np.ndarray:
    return np.array(values, np.float64)[None, None, :]


def test_the_references_by_hand():
    """State rows (2, 0) and (0, 4), all halved, or the second kept; then what each rule adds."""
    state = np.array([[[[2.0, 0.0], [0.0, 4.0]]]])
    shapes, path = forest([chain(1)]), [np.array([0])]
    q, k, v = one(1, 1), one(1, 0), one(10, 20)
    half, mixed = np.log(np.array([[0.5]])), np.log(one(0.5, 1))
    cases = [
        (AdditiveInputs(q, k, v, half), [[11, 20], [0, 2]]),
        (AdditiveInputs(q, k, v, mixed), [[11, 20], [0, 4]]),
        # S′ᵀk is the first row after the decay, (1, 0): u = ½ (9, 20).
        (DeltaInputs(q, k, v, mixed, np.array([[0.5]])), [[5.5, 10], [0, 4]]),
        # Sᵀa is the second row before the decay, (0, 4); b adds 3 times that to the first.
        (LowRankInputs(q, k, v, half, one(0, 1), one(3, 0)), [[11, 32], [0, 2]]),
    ]
    for inputs, expected in cases:
        found, pending = family.verify_sequentially(state, inputs, shapes)
        np.testing.assert_allclose(reference.commit(state, pending, path)[0, 0], expected)
        np.testing.assert_allclose(found[0, 0], np.sum(expected, axis=0))


@pytest.mark.parametrize("vector", [False, True])
def test_the_delta_rule_is_a_case_of_the_low_rank_rule(vector):
    """With a = e^g ⊙ k, b = −β k and β v for v: two closed forms that share no system."""
    rng = np.random.default_rng(2)
    shapes = forest([tree((-1, 0, 0, 1, 1, 4)), chain(4)])
    delta = random_inputs(rng, 10, 2, 4, 3, "kimi" if vector else "delta")
    gate, beta = np.exp(delta.log_decay), delta.beta[..., None]
    gate = gate if vector else gate[..., None]
    low_rank = LowRankInputs(delta.q, delta.k, beta * delta.v, delta.log_decay, gate * delta.k, -beta * delta.k)
    state = torch.from_numpy(random_state(rng, 2, 2, 4, 3))
    one_way, factors = family.verify(state, tensors(delta), shapes)
    other_way, more = family.verify(state, tensors(low_rank), shapes)
    assert error(one_way, other_way.numpy()) <= 1e-12
    paths = paths_to(shapes, [5, 2])
    assert error(family.commit(state, factors, paths), family.commit(state, more, paths).numpy()) <= 1e-12
    assert factors.keys.shape[2] == 1 and more.keys.shape[2] == 2


@pytest.mark.parametrize("pair", [("mamba", "gated linear"), ("delta", "kimi"), ("low rank", "rwkv")])
def test_equal_gates_of_all_channels_are_one_gate(pair):
    rng = np.random.default_rng(3)
    shapes = forest([tree((-1, 0, 0, 1)), chain(3)])
    inputs, state = random_inputs(rng, 7, 2, 4, 3, pair[0]), torch.from_numpy(random_state(rng, 2, 2, 4, 3))
    scalar = tensors(inputs)
    wide = type(scalar)(**vars(scalar) | {"log_decay": scalar.log_decay[..., None].expand(-1, -1, 4)})
    found, factors = family.verify(state, scalar, shapes)
    again, more = family.verify(state, wide, shapes)
    assert error(found, again.numpy()) <= 1e-12
    paths = paths_to(shapes, [3, 2])
    assert error(family.commit(state, factors, paths), family.commit(state, more, paths).numpy()) <= 1e-12


@pytest.mark.parametrize("member", MEMBERS)
def test_the_delayed_commit_is_commit_then_verify_bit_for_bit(member):
    rng = np.random.default_rng(4)
    shapes, then = forest([tree((-1, 0, 0)), chain(2)]), forest([chain(1), tree((-1, 0, 0, 2))])
    state = torch.from_numpy(random_state(rng, 2, 2, 4, 3)).float()
    inputs, more = (tensors(random_inputs(rng, 5, 2, 4, 3, member), torch.float32) for _ in range(2))
    _, factors = family.verify(state, inputs, shapes)
    paths = paths_to(shapes, [2, -1])
    kept, outputs, pending = family.commit_then_verify(state, factors, paths, more, then)
    expected = family.commit(state, factors, paths)
    again, last = family.verify(expected, more, then)
    assert torch.equal(kept, expected) and torch.equal(outputs, again) and torch.equal(pending.values, last.values)


@pytest.mark.parametrize("member", ["retention", "rwkv"])
def test_16_bit_inputs_are_summed_in_float32(member):
    rng = np.random.default_rng(5)
    shapes = forest([tree((-1, 0, 0, 1)), chain(6)])
    full = tensors(random_inputs(rng, 10, 2, 4, 3, member), torch.float32)
    short = type(full)(**{name: x if name == "log_decay" else x.bfloat16() for name, x in vars(full).items()})
    rounded = type(full)(**{name: x.float() for name, x in vars(short).items()})
    state = torch.from_numpy(random_state(rng, 2, 2, 4, 3)).float()
    found, factors = family.verify(state, short, shapes)
    expected, pending = family.verify(state, rounded, shapes)
    assert torch.equal(found, expected.bfloat16()) and factors.values.dtype == torch.float32
    paths = paths_to(shapes, [3, 5])
    assert torch.equal(family.commit(state, factors, paths), family.commit(state, pending, paths))


def test_inputs_of_no_member_are_refused():
    state = torch.zeros(1, 1, 2, 2)
    for form in (family.verify, family.verify_sequentially):
        with pytest.raises(ValueError, match="inputs are dict: expected DeltaInputs, AdditiveInputs or LowRankInputs"):
            form(state, {}, forest([chain(1)]))


@pytest.mark.parametrize("member", ["mamba", "rwkv"])
def test_inputs_are_checked(member):
    rng = np.random.default_rng(6)
    inputs, state = random_inputs(rng, 2, 1, 3, 2, member), random_state(rng, 1, 1, 3, 2)
    with pytest.raises(ValueError, match=r"q has shape \(2, 1, 3\): expected \[N, H, K\] = \[1, 1, 3\]"):
        family.verify(torch.from_numpy(state), tensors(inputs), forest([chain(1)]))
    with pytest.raises(ValueError, match="state is a ndarray: expected a torch tensor"):
        family.verify(state, inputs, forest([chain(2)]))
