"""The Triton form against the sequential reference, interpreted where there is no GPU; and compiled for one anyway."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.gated_delta import DeltaInputs, GatedDelta, reference
from specdec_core.kernels.gated_delta import triton as form_module
from specdec_core.kernels.gated_delta.triton import MOST_NODES, PROGRAMS, TritonGatedDelta, interpreted, library
from specdec_core.placement import PlacementError
from specdec_core.topology import chain, forest, tree
from tests.interpreted import DEVICE
from tests.kernels.gated_delta.windows import (
    GATES,
    MILD,
    error,
    mapped,
    parts,
    paths_to,
    random_inputs,
    random_state,
    random_tree,
    tensors,
)
from tests.strategies import topologies

pytest.importorskip("triton", reason="Triton is not installed: pip install -r requirements.txt (Linux)")

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = 1e-5
FORM = TritonGatedDelta()
SHAPES = forest([tree((-1, 0, 0)), chain(2)])


def single(inputs, state):
    """Inputs and state in float32, where the form runs."""
    return mapped(tensors(inputs, torch.float32), lambda each: each.to(DEVICE)), torch.from_numpy(state).float().to(
        DEVICE
    )


def made(seed, shapes, heads=1, keys=8, values=8, gates=GATES):
    """Inputs and state, float32 numbers in float64."""
    rng = np.random.default_rng(seed)
    inputs = random_inputs(rng, len(shapes.rows), heads, keys, values, gates=gates)
    return inputs, random_state(rng, len(shapes.trees), heads, keys, values)


def deviation(shapes, inputs, state, nodes=None):
    """Largest error of all outputs and of the state after each of these nodes (None: every one), and after none."""
    expected, snapshots = reference.verify(state, inputs, shapes)
    given_inputs, start = single(inputs, state)
    found, factors = FORM.verify(start, given_inputs, shapes)
    worst = error(found.cpu(), expected)
    for node in range(int(shapes.counts.max())) if nodes is None else nodes:
        paths = paths_to(shapes, [min(node, len(each) - 1) for each in shapes.trees])
        kept = FORM.commit(start, factors, paths)
        worst = max(worst, error(kept.cpu(), reference.commit(state, snapshots, paths)))
    none = FORM.commit(start, factors, paths_to(shapes, [-1] * len(shapes.trees)))
    assert torch.equal(none, start) and none.data_ptr() != start.data_ptr() and none.is_contiguous()
    np.testing.assert_array_equal(start.cpu().numpy(), state)
    return worst


@settings(max_examples=6)
@given(
    st.lists(topologies(9), min_size=1, max_size=2), st.integers(0, 10**6), st.sampled_from([8, 16, 24]),
    st.sampled_from([1, 8, 16, 24]),
)  # fmt: skip
def test_every_node_of_any_tree_equals_the_reference(trees, seed, keys, values):
    shapes = forest(trees)
    assert deviation(shapes, *made(seed, shapes, 1, keys, values)) <= TOLERANCE


@pytest.mark.parametrize("nodes", [1, 3, 16, 17, 33])
def test_widths_at_and_beside_a_power_of_two(nodes):
    shapes = forest([random_tree(np.random.default_rng(nodes), nodes), chain(nodes)])
    inputs, state = made(nodes, shapes)
    assert deviation(shapes, inputs, state, {0, nodes // 2, nodes - 1}) <= TOLERANCE


@pytest.mark.parametrize(("keys", "values"), [(1, 1), (5, 70), (16, 64), (64, 24), (70, 5)])
def test_head_sizes_that_fill_no_tile_and_several(keys, values):
    shapes = forest([tree((-1, 0, 0, 1)), chain(2)])
    assert deviation(shapes, *made(keys, shapes, 2, keys, values, MILD), nodes=[3]) <= TOLERANCE


@pytest.mark.parametrize("gate", [*GATES, -np.finfo(np.float32).max])
def test_one_gate_for_all_from_none_to_a_full_reset(gate):
    shapes = forest([tree((-1, 0, 1, 0, 2, 2, 3)), chain(4)])
    inputs, state = made(3, shapes)
    inputs.log_decay[:] = np.float32(gate)
    assert deviation(shapes, inputs, state, [1, 6]) <= TOLERANCE


def test_a_reset_forgets_whatever_was_before():
    shapes = forest([chain(3)])
    inputs, state = made(4, shapes, gates=MILD)
    inputs.log_decay[1] = -np.inf
    given_inputs, start = single(inputs, state)
    found, factors = FORM.verify(start, given_inputs, shapes)
    anew, _ = FORM.verify(torch.zeros_like(start), given_inputs, shapes)
    assert torch.equal(found[1:], anew[1:]) and not torch.equal(found[0], anew[0])
    kept = FORM.commit(start, factors, [np.arange(3)])
    assert torch.equal(kept, FORM.commit(torch.zeros_like(start), factors, [np.arange(3)]))


@pytest.mark.parametrize("huge", [-90.0, -1e4, -1e30])
def test_one_huge_gate_costs_those_after_it_no_precision(huge):
    """Differences of sums from the root would: float32 has 1e-3 left beside 1e4, and nothing beside 1e30."""
    shapes = forest([chain(12)])
    inputs, state = made(5, shapes, keys=16, gates=MILD)
    inputs.log_decay[0], inputs.log_decay[1:] = huge, -0.3
    assert deviation(shapes, mapped(inputs, np.float32), state.astype(np.float32), [11]) <= 1e-6


def test_equal_keys_at_the_largest_rate_stay_accurate_over_the_longest_window():
    """The system whose powers grow without bound: I + L with L = 2 everywhere below the diagonal. Its last node is
    also the one whose own bit is the sign of an integer."""
    shapes = forest([chain(MOST_NODES)])
    inputs, state = made(6, shapes)
    inputs.k[:] = inputs.k[0]
    inputs.beta[:], inputs.log_decay[:] = 2, 0
    assert deviation(shapes, inputs, state, [MOST_NODES - 1]) <= TOLERANCE


@settings(max_examples=6)
@given(st.lists(topologies(6), min_size=1, max_size=3), st.integers(0, 10**6), st.data())
def test_the_delayed_commit_is_commit_then_verify_bit_for_bit(trees, seed, data):
    form: GatedDelta = FORM
    shapes = forest(trees)
    inputs, state = made(seed, shapes, values=24)
    given_inputs, start = single(inputs, state)
    _, factors = form.verify(start, given_inputs, shapes)
    paths = paths_to(shapes, [data.draw(st.integers(-1, len(each) - 1)) for each in trees])
    then = forest([data.draw(topologies(6)) for _ in trees])
    more, _ = single(made(seed + 1, then, values=24)[0], state)
    kept, outputs, pending = form.commit_then_verify(start, factors, paths, more, then)
    expected = form.commit(start, factors, paths)
    again, last = form.verify(expected, more, then)
    assert torch.equal(kept, expected) and torch.equal(outputs, again) and pending.forest is then
    assert torch.equal(pending.values, last.values)
    np.testing.assert_array_equal(start.cpu().numpy(), state)


@pytest.mark.parametrize("seed", range(2))
def test_rounds_leave_what_one_run_over_the_committed_nodes_leaves(seed):
    """Chains, trees and no drafts by turns, each commit delayed into the next verify; a row may accept nothing."""
    rng = np.random.default_rng(seed)
    rows, size = 2, (1, 8, 16)
    state = random_state(rng, rows, *size)
    start, waiting, windows = torch.from_numpy(state).float().to(DEVICE), None, [[] for _ in range(rows)]
    for _ in range(3):
        shapes = forest([random_tree(rng, 6) for _ in range(rows)])
        inputs = random_inputs(rng, len(shapes.rows), *size)
        given_inputs, _ = single(inputs, state)
        if waiting is None:
            _, pending = FORM.verify(start, given_inputs, shapes)
        else:
            start, _, pending = FORM.commit_then_verify(start, *waiting, given_inputs, shapes)
        waiting = (pending, paths_to(shapes, [int(rng.integers(-1, len(each))) for each in shapes.trees]))
        for row, path in enumerate(waiting[1]):
            windows[row] += [parts(inputs, shapes.offsets[row] + path[at : at + 1]) for at in range(len(path))]
    start = FORM.commit(start, *waiting)
    for row, committed in enumerate(windows):
        expected = state[row : row + 1]
        for node in committed:
            _, snapshots = reference.verify(expected, node, forest([chain(1)]))
            expected = reference.commit(expected, snapshots, [np.array([0])])
        assert error(start[row : row + 1].cpu(), expected) <= TOLERANCE


def test_a_row_that_accepts_nothing_keeps_its_bits_beside_one_that_does():
    given_inputs, start = single(*made(7, SHAPES))
    start[1, 0, 0, 0], start[1, 0, 0, 1], start[1, 0, 1, 0] = -0.0, torch.inf, torch.nan
    _, factors = FORM.verify(start, given_inputs, SHAPES)
    kept = FORM.commit(start, factors, paths_to(SHAPES, [2, -1]))
    assert torch.equal(kept[1].view(torch.int32), start[1].view(torch.int32))
    assert not torch.equal(kept[0], start[0])


def test_a_broken_row_breaks_no_other():
    given_inputs, start = single(*made(8, SHAPES, gates=MILD))
    sound, factors = FORM.verify(start, given_inputs, SHAPES)
    paths = paths_to(SHAPES, [2, 0])
    kept = FORM.commit(start, factors, paths)
    for name in ("q", "k", "v", "beta"):
        broken = mapped(given_inputs, torch.clone)
        getattr(broken, name)[3:] = torch.nan
        found, bad = FORM.verify(start, broken, SHAPES)
        assert torch.equal(found[:3], sound[:3]) and found[3:].isnan().all()
        assert torch.equal(FORM.commit(start, bad, paths)[0], kept[0])


def test_a_refused_node_is_not_read():
    """Factors of what was drafted beside and after the accepted node may hold anything."""
    given_inputs, start = single(*made(9, SHAPES))
    _, factors = FORM.verify(start, given_inputs, SHAPES)
    paths = paths_to(SHAPES, [2, 0])
    kept = FORM.commit(start, factors, paths)
    for refused in (1, 4):
        factors.keys[refused], factors.values[refused], factors.log_decay[refused] = torch.nan, torch.inf, torch.nan
    assert torch.equal(FORM.commit(start, factors, paths), kept)


def test_a_commit_goes_to_a_node_not_by_a_count():
    shapes = forest([tree((-1, 0, 0))])
    given_inputs, start = single(*made(10, shapes, gates=MILD))
    given_inputs.beta[:] = 1
    _, factors = FORM.verify(start, given_inputs, shapes)
    one, other = (FORM.commit(start, factors, [shapes.trees[0].path(node)]) for node in (1, 2))
    assert (one - other).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_inputs_are_summed_in_float32(dtype):
    full, start = single(*made(11, SHAPES))
    short = DeltaInputs(full.q.to(dtype), full.k.to(dtype), full.v.to(dtype), full.log_decay, full.beta)
    found, factors = FORM.verify(start, short, SHAPES)
    rounded = DeltaInputs(short.q.float(), short.k.float(), short.v.float(), full.log_decay, full.beta)
    expected, pending = FORM.verify(start, rounded, SHAPES)
    assert found.dtype == dtype
    if dtype == torch.bfloat16 and interpreted():
        torch.testing.assert_close(found.float(), expected, rtol=2**-7, atol=1e-30)  # it cuts where a GPU rounds
    else:
        assert torch.equal(found, expected.to(dtype))
    assert factors.keys.dtype == dtype and factors.values.dtype == torch.float32
    paths = paths_to(SHAPES, [2, 1])
    assert torch.equal(FORM.commit(start, factors, paths), FORM.commit(start, pending, paths))


def test_inputs_that_lie_anyhow_in_memory():
    inputs, start = single(*made(12, SHAPES, heads=2))
    turned = mapped(inputs, lambda each: each.transpose(0, 1).contiguous().transpose(0, 1))
    assert not turned.q.is_contiguous() and not turned.log_decay.is_contiguous()
    found, factors = FORM.verify(start, turned, SHAPES)
    expected, pending = FORM.verify(start, inputs, SHAPES)
    assert torch.equal(found, expected)
    paths = paths_to(SHAPES, [1, 1])
    assert torch.equal(FORM.commit(start, factors, paths), FORM.commit(start, pending, paths))


def test_what_is_kept_of_a_window_is_compact():
    given_inputs, start = single(*made(13, SHAPES, 2, 16, 24))
    _, factors = FORM.verify(start, given_inputs, SHAPES)
    assert factors.keys.shape == (5, 2, 1, 16) and factors.values.shape == (5, 2, 1, 24)
    assert sum(each.numel() for each in (factors.keys, factors.values, factors.log_decay)) == 5 * 2 * (16 + 24 + 1)


def test_another_forest_of_as_many_nodes_has_tables_of_its_own():
    """Tables of the last forest are kept for the next layer."""
    given_inputs, start = single(*made(14, SHAPES, gates=MILD))
    other = forest([tree((-1, 0, 1)), chain(2)])
    FORM.verify(start, given_inputs, SHAPES)
    found, _ = FORM.verify(start, given_inputs, other)
    expected, _ = TritonGatedDelta().verify(start, given_inputs, other)
    assert torch.equal(found, expected) and not torch.equal(found, FORM.verify(start, given_inputs, SHAPES)[0])


class TestRefusals:
    @pytest.mark.parametrize(
        ("state", "message"),
        [
            (
                torch.zeros(2, 1, 8, 8, dtype=torch.float64),
                "state is torch.float64 on .*the Triton form expects float32",
            ),
            (torch.zeros(2, 1, 8, 8, device="meta"), "state is torch.float32 on meta: the Triton form expects"),
            (np.zeros((2, 1, 8, 8), np.float32), "state is a ndarray: expected a torch tensor"),
            (torch.zeros(3, 1, 8, 8, device=DEVICE), "state of 3 rows for a forest of 2 trees"),
            (torch.zeros(2, 1, 8, 8, device=DEVICE).mT, "not contiguous"),
        ],
        ids=["float64", "device", "numpy", "rows", "strides"],
    )
    def test_a_state_that_it_cannot_take(self, state, message):
        given_inputs, start = single(*made(0, SHAPES))
        _, factors = FORM.verify(start, given_inputs, SHAPES)
        paths = paths_to(SHAPES, [0, 0])
        for call in (
            lambda: FORM.verify(state, given_inputs, SHAPES),
            lambda: FORM.commit(state, factors, paths),
            lambda: FORM.commit_then_verify(state, factors, paths, given_inputs, SHAPES),
        ):
            with pytest.raises(ValueError, match=message):
                call()

    def test_inputs_and_gates_are_looked_at_as_in_every_form(self):
        given_inputs, start = single(*made(0, SHAPES))
        _, factors = FORM.verify(start, given_inputs, SHAPES)
        short = mapped(given_inputs, lambda each: each[:-1])
        growing = mapped(given_inputs, torch.clone)
        growing.log_decay[1, 0] = 0.5
        for inputs, message in ((short, "q has shape"), (growing, r"log_decay at \(1, 0\) is 0.5: expected −inf…0")):
            with pytest.raises(ValueError, match=message):
                FORM.verify(start, inputs, SHAPES)
            with pytest.raises(ValueError, match=message):
                FORM.commit_then_verify(start, factors, paths_to(SHAPES, [0, 0]), inputs, SHAPES)

    def test_a_gate_a_key_channel(self):
        given_inputs, start = single(*made(0, SHAPES))
        vector = DeltaInputs(**vars(given_inputs) | {"log_decay": -torch.ones_like(given_inputs.k)})
        with pytest.raises(ValueError, match="a gate a key channel: the Triton form expects one a head"):
            FORM.verify(start, vector, SHAPES)

    @pytest.mark.parametrize("name", ["state", "q", "beta"])
    def test_gradients_that_it_does_not_give(self, name):
        given_inputs, start = single(*made(0, SHAPES))
        (start if name == "state" else getattr(given_inputs, name)).requires_grad_()
        with pytest.raises(ValueError, match="require gradients, which the Triton form does not give"):
            FORM.verify(start, given_inputs, SHAPES)
        with torch.no_grad():
            assert not FORM.verify(start, given_inputs, SHAPES)[0].requires_grad

    def test_more_nodes_than_an_integer_has_bits(self):
        shapes = forest([chain(1), chain(MOST_NODES + 1)])
        given_inputs, start = single(*made(0, shapes, gates=MILD))
        with pytest.raises(
            ValueError, match=r"a tree of 65 nodes: the Triton form expects at most 64 in a row.*chunks"
        ):
            FORM.verify(start, given_inputs, shapes)

    def test_a_path_longer_than_that(self):
        shapes = forest([chain(MOST_NODES + 1)])
        given_inputs, start = single(*made(0, shapes, gates=MILD))
        factors = form_module.Factors(
            given_inputs.k[:, :, None], given_inputs.v[:, :, None], given_inputs.log_decay, shapes
        )
        with pytest.raises(ValueError, match="a path of 65 nodes"):
            FORM.commit(start, factors, [np.arange(MOST_NODES + 1)])

    def test_factors_of_another_state(self):
        given_inputs, start = single(*made(0, SHAPES))
        _, factors = FORM.verify(start, given_inputs, SHAPES)
        paths = paths_to(SHAPES, [0, 0])
        with pytest.raises(ValueError, match=r"pending keys has shape \(5, 1, 1, 8\): expected .* = \[5, 1, 1, 9\]"):
            FORM.commit(torch.zeros(2, 1, 9, 8, device=DEVICE), factors, paths)
        with pytest.raises(ValueError, match="pending values has shape"):
            FORM.commit(torch.zeros(2, 1, 8, 9, device=DEVICE), factors, paths)
        wide = form_module.Factors(factors.keys, factors.values.double(), factors.log_decay, SHAPES)
        with pytest.raises(ValueError, match=r"pending values are torch.float64, the state torch.float32"):
            FORM.commit(start, wide, paths)
        with pytest.raises(ValueError, match=r"row 1: path \[1\]"):
            FORM.commit(start, factors, [np.array([0]), np.array([1])])

    def test_a_precision_that_it_does_not_have(self):
        with pytest.raises(ValueError, match="precision 'tf32': expected one of ieee, tf32x3"):
            TritonGatedDelta("tf32")


def test_the_other_precision_is_the_same_within_rounding():
    given_inputs, start = single(*made(15, SHAPES, keys=64))
    found, _ = TritonGatedDelta("tf32x3").verify(start, given_inputs, SHAPES)
    assert error(found.cpu(), FORM.verify(start, given_inputs, SHAPES)[0].double().cpu().numpy()) <= 1e-4


@pytest.mark.parametrize(
    ("values", "heads", "block"),
    [
        (128, 8, 16),
        (128, 32, 16),
        (128, 64, 32),
        (128, 128, 64),
        (256, 64, 64),
        (256, 8, 16),
        (24, 10**6, 32),
        (5, 1, 16),
    ],
)
def test_tiles_are_as_large_as_leave_enough_of_them(monkeypatch, values, heads, block):
    monkeypatch.setattr(form_module, "interpreted", lambda: False)
    found = form_module._value_block(values, heads)
    assert found == block and (found == 16 or heads * -(-values // found) >= PROGRAMS)


def in_process(code: str, **environment: str | None) -> dict:
    """What the code prints last, as JSON, in a fresh interpreter with other environment variables (None: without)."""
    given_variables = {**os.environ, **environment}
    kept = {name: value for name, value in given_variables.items() if value is not None}
    done = subprocess.run([sys.executable, "-c", code], env=kept, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


WITHOUT_INTERPRETER = """
import json
import numpy as np
import torch
from specdec_core.kernels.gated_delta import DeltaInputs
from specdec_core.kernels.gated_delta.triton import TritonGatedDelta, interpreted
from specdec_core.topology import chain, forest
one = torch.zeros(1, 1, 8)
try:
    TritonGatedDelta().verify(torch.zeros(1, 1, 8, 8), DeltaInputs(one, one, one, one[..., 0], one[..., 0]),
                              forest([chain(1)]))
    said = ""
except ValueError as error:
    said = str(error)
print(json.dumps({"said": said, "interpreted": interpreted()}))
"""


def test_the_cpu_is_refused_without_the_interpreter():
    found = in_process(WITHOUT_INTERPRETER, TRITON_INTERPRET=None)
    assert not found["interpreted"] and "the Triton form expects float32 on cuda; use the torch form" in found["said"]
    assert "set TRITON_INTERPRET=1 before Triton is imported" in found["said"]
    assert interpreted() == (DEVICE.type == "cpu")


COMPILED = """
import json
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import triton
from specdec_core.kernels.gated_delta import triton_step
KINDS = {"ancestors": "*i64", "offsets": "*i64", "path_nodes": "*i64", "path_starts": "*i64", "q": "*bf16",
         "k": "*bf16", "v": "*bf16", "path_keys": "*bf16", "outputs": "*bf16"}
def binary(kernel, **constants):
    names = kernel.arg_names
    signature = {name: "constexpr" if name in constants else KINDS.get(name, "*fp32") for name in names}
    places = {(names.index(name),): value for name, value in constants.items()}
    made = triton.compile(ASTSource(kernel, signature, constexprs=places), target=GPUTarget("cuda", 90, 32))
    return len(made.asm["cubin"])
sizes = {"HEADS": 2, "KEYS": 32, "KEY_BLOCK": 16, "PRECISION": "ieee"}
passed = {"VALUES": 32, "VALUE_BLOCK": 16}
print(json.dumps([
    binary(triton_step.relate_nodes, NODES=16, **sizes),
    binary(triton_step.pass_over_state, NODES=16, PATH=16, **passed, **sizes),
]))
"""


def test_the_kernels_compile_for_a_gpu_that_is_not_here(tmp_path):
    """The interpreter takes much that the compiler does not."""
    found = in_process(COMPILED, TRITON_INTERPRET=None, TRITON_CACHE_DIR=str(tmp_path))
    assert len(found) == 2 and min(found) > 1000


@pytest.fixture
def forgetful():
    library.cache_clear()
    form_module._kernels.cache_clear()
    yield
    library.cache_clear()
    form_module._kernels.cache_clear()


def test_a_missing_library_says_what_to_do(monkeypatch, forgetful):
    monkeypatch.setitem(sys.modules, "triton", None)
    with pytest.raises(PlacementError, match=r"Triton is not here \(.*\): it comes with torch's CUDA builds for Linux"):
        TritonGatedDelta()
