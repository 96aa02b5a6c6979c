"""The compiled step of a drafter with int8 weights, against a float64 step with quantized factors; its memory.

What it has in common with the float32 form is in test_forms.py.
"""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import torch

from specdec_core.kernels.simd import padded
from specdec_core.kernels.skinny_linear.int8 import dequantize, quantize
from specdec_core.topology import chain, tree
from tests.kernels.eagle_step.test_forms import BOTH, EVEN, INT8, WIDE, Cached, assert_same, inputs
from tests.kernels.eagle_step.test_torch import ByHand, joined, made

pytestmark = pytest.mark.usefixtures("one_thread")

SHAPES = {
    **BOTH,
    "wide": WIDE,
    # The input of o is the widest.
    "heads": made(4, (0,), 16, heads=2, kv_heads=2, head_dim=128, hidden_size=33, rope_theta=100.0, norm_eps=1e-2),
    "many groups": made(5, (0, 1, 2), 37, hidden_size=70, intermediate_size=1100, heads=5, kv_heads=5, head_dim=26),
}
CERTAIN = 2e-5
"""Error, of the largest number, where no rounding to a step was in doubt: float32's."""
IN_DOUBT = 1e-4
"""Where float32's error may turn a rounding the other way: so near, in steps of a group, to the middle of two."""


class QuantizedMatrix:
    """A weight `[out, in]` and what it is multiplied with, both quantized, in `parts` of so many inputs each."""

    def __init__(self, hand: QuantizedByHand, weight: np.ndarray, parts: int = 1, room: int | None = None):
        self.hand, self.parts, self.room = hand, parts, room or weight.shape[1] // parts
        self.weights = [dequantize(*quantize(part.astype(np.float32))) for part in self.apart(weight)]

    def apart(self, values: np.ndarray) -> list[np.ndarray]:
        parts = np.split(np.atleast_2d(values), self.parts, axis=1)
        return [np.pad(part, ((0, 0), (0, self.room - part.shape[1]))) for part in parts]

    def __matmul__(self, x: np.ndarray) -> np.ndarray:
        pairs = zip(self.weights, self.apart(x), strict=True)
        return sum(weight.astype(np.float64) @ self.hand.quantized(part[0]) for weight, part in pairs)


class Joined(QuantizedMatrix):
    """The same where the parts, padded, lie side by side in one row."""

    def apart(self, values: np.ndarray) -> list[np.ndarray]:
        return [np.concatenate(super().apart(values), axis=1)]


class QuantizedByHand(ByHand):
    """The equations with dequantized weights, and with the input of every product quantized and dequantized."""

    def __init__(self, config, weights):
        super().__init__(config, weights)
        self.distance = np.inf
        for name, weight in list(self.w.items()):
            if name == "fc":
                self.w[name] = Joined(self, weight, config.features, padded(config.hidden_size))
            elif weight.ndim == 2:
                self.w[name] = QuantizedMatrix(self, weight, 2 if name[-6:] in ("q_proj", "k_proj", "v_proj") else 1)

    def certain(self) -> bool:
        """Whether no rounding was in doubt since this was last asked."""
        distance, self.distance = self.distance, np.inf
        return distance > IN_DOUBT

    def quantized(self, x: np.ndarray) -> np.ndarray:
        group, parts = 64 if len(x) % 64 == 0 else 32, []
        for first in range(0, len(x), group):
            part = x[first : first + group]
            step = np.abs(part).max() / 127
            steps = part / step
            self.distance = min(self.distance, np.abs(steps - np.floor(steps) - 0.5).min())
            parts.append(np.rint(steps) * step)
        return np.concatenate(parts)


def errors(found, exact) -> np.ndarray:
    """Of each row, relative to the largest number of all."""
    found, exact = np.asarray(found), np.asarray(exact)
    return np.abs(found - exact).reshape(len(exact), -1).max(1) / np.abs(exact).max()


def assert_quantized(found, exact, certain) -> None:
    """Within float32's rounding, unless a rounding to a step is in doubt: then within what some steps can do."""
    error = errors(found, exact)
    assert np.sum(certain) >= 10
    assert error[np.array(certain)].max() < CERTAIN
    assert error.max() < 0.05


@pytest.mark.parametrize("name", SHAPES)
def test_it_is_the_step_with_quantized_factors(name):
    """After prompts of different lengths, trees in two parts; then a node after a commit."""
    config, weights = SHAPES[name]
    hand, cached = QuantizedByHand(config, weights), Cached(INT8.build(SHAPES[name], 2), slots=8, capacity=16)
    shape, certain, exact, found = tree((-1, 0, 0, 1, 2, 4)), [], [], []
    drafted = [inputs(slot + 40, 6, config) for slot in range(8)]
    before = [inputs(slot, slot % 3, config) for slot in range(8)]
    for slot in range(8):
        if len(before[slot][0]):
            cached.feed(slot, before[slot])
    parts = [cached.run([(slot, drafted[slot], shape, *part) for slot in range(8)]) for part in ((0, 2), (2, 6))]
    for slot in range(8):
        for node in range(6):
            part, at = (0, 2 * slot + node) if node < 2 else (1, 4 * slot + node - 2)
            found.append([*(each[at] for each in parts[part]), *cached.entry(slot, slot % 3 + node)])
            exact.append(hand.last(*joined(before[slot], drafted[slot], shape.path(node))))
            certain.append(hand.certain())
    for each in zip(zip(*found, strict=True), zip(*exact, strict=True), strict=True):
        assert_quantized(*each, certain)


@pytest.mark.parametrize("name", SHAPES)
def test_features_are_projected_with_quantized_factors(name):
    config, weights = SHAPES[name]
    features = np.random.default_rng(0).normal(size=(30, config.features, config.hidden_size)).astype(np.float32)
    features *= np.geomspace(0.01, 100, config.features, dtype=np.float32)[:, None]
    hand, exact, certain = QuantizedByHand(config, weights), [], []
    for each in features:
        exact.append(hand.project(each))
        certain.append(hand.certain())
    assert_quantized(INT8.build(SHAPES[name], 2).project(features), exact, certain)


def test_it_is_near_the_step_with_the_weights_as_they_were():
    """Quantization moves the logits of a wide random drafter by hundredths of their size; they are not the same."""
    config, weights = SHAPES["wide"]
    given, hand = inputs(5, 12, config), ByHand(config, weights)
    exact = np.array([hand.last(*(each[: node + 1] for each in given))[0] for node in range(12)])
    found, _ = Cached(INT8.build(SHAPES["wide"])).feed(0, given)
    error = np.linalg.norm(found - exact, axis=1) / np.linalg.norm(exact, axis=1)
    assert 0.002 < np.median(error) < 0.15


@pytest.mark.parametrize("name", ["even", "heads", "wide"])
def test_there_is_room_for_every_pass(name):
    """Compiled code checks no bounds: a node may be scored more often than there are nodes, and any input be widest."""
    cached, config = Cached(INT8.build(SHAPES[name])), SHAPES[name][0]
    widths = cached.step._matrices
    for slot, (nodes, scored) in enumerate(((1, 0), (1, 40), (40, 1))):
        given = inputs(1, nodes, config)
        logits, _ = cached.feed(slot, given, scored=np.zeros(scored, np.int64))
        rows = cached.step._rows
        assert rows.active.size >= nodes * widths.inner.step
        for width in (widths.joined, widths.hidden, widths.queries):
            assert rows.inputs.size >= nodes * width.step
            assert width.step >= width.groups * (width.group + 8)
        assert rows.inputs.size >= scored * widths.hidden.step
        expected = Cached(INT8.build(SHAPES[name])).feed(0, tuple(each[:1] for each in given))[0]
        np.testing.assert_array_equal(logits, np.repeat(expected, scored, axis=0))


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("which", [0, 1])
def test_a_row_that_is_not_finite_harms_no_other(name, which):
    """Nor a later pass, which works in the memory that this one leaves."""
    rows = [(slot, inputs(slot, 3, BOTH[name][0]), chain(3), 0, 3) for slot in range(4)]
    step = INT8.build(SHAPES[name], 2)
    expected = Cached(step).run(rows)
    sound = rows[2][1][which].copy()
    rows[2][1][which][1, 5] = np.nan
    for each, without in zip(Cached(step).run(rows), expected, strict=True):
        assert np.isnan(each[7:9]).all()
        np.testing.assert_array_equal(np.delete(each, [7, 8], 0), np.delete(without, [7, 8], 0))
    rows[2][1][which][:] = sound
    assert_same(Cached(step).run(rows), expected)


def test_only_one_python_thread_at_a_time_sees_to_the_memory_that_passes_reuse(monkeypatch):
    step, inside, most = INT8.build(SHAPES["even"]), [], []
    room = step._room

    def slow_room(*sizes):
        inside.append(sizes)
        most.append(len(inside))
        time.sleep(0.05)
        inside.pop()
        return room(*sizes)

    monkeypatch.setattr(step, "_room", slow_room)
    callers = [threading.Thread(target=Cached(step).feed, args=(0, inputs(3, 2))) for _ in range(3)]
    for each in callers:
        each.start()
    for each in callers:
        each.join()
    assert most == [1, 1, 1]


def test_the_best_tokens_are_those_of_its_logits():
    cached = INT8.cached()
    logits, _ = cached.feed(0, inputs(4, 5))
    tokens, found = cached.step.best_tokens(logits, 3)
    np.testing.assert_array_equal(tokens, np.argsort(-logits, axis=-1, kind="stable")[:, :3])
    exact = logits - np.log(np.exp(logits.astype(np.float64)).sum(-1, keepdims=True))
    np.testing.assert_allclose(found, np.take_along_axis(exact, tokens, -1), rtol=0, atol=1e-6)


# --- errors -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda c, e, h: c.feed(0, (e.astype(np.float64), h)), TypeError, "embedded has dtype float64"),
        (lambda c, e, h: c.step.best_tokens(np.zeros((1, 61), np.float32), 62), ValueError, r"62 most probable"),
    ],
)
def test_embedded_tokens_of_another_type_and_a_count_beyond_the_vocabulary_are_refused(change, error, message):
    """The checks are the float32 step's, which its own tests try one by one: here, that they are made."""
    with pytest.raises(error, match=message):
        change(INT8.cached(), *inputs(0, 4))


def test_logits_without_a_law_are_refused():
    with pytest.raises(FloatingPointError, match="row 1 of 2 hold NaN"):
        INT8.engines["even", 1].best_tokens(np.array([[0] * 61, [np.nan] * 61], np.float32), 2)


def spoilt(name: str, *at: int) -> dict[str, torch.Tensor]:
    """A weight with a number that is not finite."""
    weight = EVEN[1][name].clone()
    weight[at] = float("inf")
    return {name: weight}


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"norm.weight": None}, KeyError, r"no tensor 'norm\.weight'"),
        ({"fc.weight": None}, KeyError, r"no tensor 'fc\.weight'"),
        ({"head.weight": None}, KeyError, r"no tensor 'head\.weight'"),
        ({"mlp.up_proj.weight": torch.ones(95, 48)}, ValueError, r"has shape \(95, 48\): expected \(96, 48\)"),
        ({"self_attn.k_proj.weight": torch.ones(16, 48)}, ValueError, r"k_proj.weight has shape \(16, 48\): exp.* 96"),
        (spoilt("self_attn.k_proj.weight", 3, 47), ValueError, r"^self_attn.k_proj.weight, first half: weight\[3, 47"),
        (spoilt("self_attn.v_proj.weight", 0, 50), ValueError, r"^self_attn.v_proj.weight, second half: weight\[0, 2"),
        (spoilt("embedding_proj.weight", 1, 2), ValueError, r"^embedding_proj.weight: weight\[1, 2\] is inf: .*finite"),
        (spoilt("fc.weight", 4, 5), ValueError, r"^fc.weight: weight\[4, 5\] is inf: expected finite"),
    ],
)  # fmt: skip
def test_weights_it_cannot_take_are_named(changed, error, message):
    weights = {name: tensor for name, tensor in {**EVEN[1], **changed}.items() if tensor is not None}
    with pytest.raises(error, match=message):
        INT8.build((EVEN[0], weights))


def test_weights_of_another_dtype_are_what_they_are_in_float32():
    config, weights = EVEN
    halves = {name: tensor.bfloat16() for name, tensor in weights.items()}
    same = {name: tensor.float() for name, tensor in halves.items()}
    given = inputs(13, 6)
    found, expected = (Cached(INT8.build((config, each))).feed(0, given) for each in (halves, same))
    assert_same(found, expected)
