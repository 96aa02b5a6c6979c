"""The core property: rounds of any kind leave what one sequential run over the committed tokens leaves."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.gated_delta import family, reference, short_convolution
from specdec_core.topology import chain, forest
from tests.kernels.gated_delta.windows import (
    MEMBERS,
    error,
    joined,
    parts,
    paths_to,
    random_forest,
    random_inputs,
    random_state,
    random_tree,
    tensors,
)

pytestmark = pytest.mark.usefixtures("one_thread")

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
SEQUENCES = 60
HEADS, KEYS, VALUES, CHANNELS = 2, 5, 4, 3


@dataclass
class Row:
    """What a row began with and has committed since; and what was put out at those nodes."""

    state: np.ndarray
    cache: np.ndarray
    inputs: list
    conv_inputs: list
    outputs: list
    conv_outputs: list


def play(seed, member, dtype, rounds, delayed):
    """Rounds of chains, trees and no drafts over rows that change places; largest error against a fresh run."""
    rng = np.random.default_rng(seed)
    width = int(rng.integers(1, 6))
    count = len(random_forest(rng).trees)
    rows = [
        Row(random_state(rng, HEADS, KEYS, VALUES), random_state(rng, CHANNELS, width - 1), [], [], [], [])
        for _ in range(count)
    ]
    weights, bias = random_state(rng, CHANNELS, width), random_state(rng, CHANNELS)
    state = torch.from_numpy(np.stack([row.state for row in rows])).to(dtype)
    cache = torch.from_numpy(np.stack([row.cache for row in rows])).to(dtype)
    taps = [torch.from_numpy(each).to(dtype) for each in (weights, bias)]
    waiting = None
    for _ in range(rounds):
        if waiting is None:
            order = rng.permutation(count)
            rows, state, cache = [rows[i] for i in order], state[order].contiguous(), cache[order]
        shapes = forest([random_tree(rng, 9) for _ in rows])
        nodes = len(shapes.rows)
        inputs = random_inputs(rng, nodes, HEADS, KEYS, VALUES, member)
        x = random_state(rng, nodes, CHANNELS)
        if waiting is None:
            outputs, pending = family.verify(state, tensors(inputs, dtype), shapes)
        else:
            state, outputs, pending = family.commit_then_verify(state, *waiting, tensors(inputs, dtype), shapes)
        convolved, conv_pending = short_convolution.convolve(
            cache, torch.from_numpy(x).to(dtype), taps[0], shapes, taps[1]
        )
        paths = paths_to(shapes, [int(rng.integers(-1, len(each))) for each in shapes.trees])
        waiting = (pending, paths) if delayed else None
        if not delayed:
            state = family.commit(state, pending, paths)
        cache = short_convolution.commit(cache, conv_pending, paths)
        for row, path, first in zip(rows, paths, shapes.offsets[:-1], strict=True):
            row.inputs.append(parts(inputs, first + path))
            row.conv_inputs.append(x[first + path])
            row.outputs.append(outputs[first + path])
            row.conv_outputs.append(convolved[first + path])
    if waiting:
        state = family.commit(state, *waiting)
    return max(compare(row, state[i], cache[i], weights, bias) for i, row in enumerate(rows))


def compare(row, state, cache, weights, bias):
    """Errors of outputs, state and cache against one sequential chain of all that the row committed."""
    x = np.concatenate(row.conv_inputs)
    if not len(x):
        return max(error(state, row.state), error(cache, row.cache))
    shape = chain(len(x))
    outputs, snapshots = family.verify_sequentially(row.state[None], joined(row.inputs), forest([shape]))
    convolved, windows = reference.convolve(row.cache[None], x, weights, forest([shape]), bias)
    path = [shape.path(len(x) - 1)]
    return max(
        error(torch.cat(row.outputs), outputs),
        error(state[None], reference.commit(row.state[None], snapshots, path)),
        error(torch.cat(row.conv_outputs), convolved),
        error(cache[None], reference.commit(row.cache[None], windows, path)),
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_any_rounds_leave_what_a_fresh_run_leaves(dtype):
    worst = max(play(seed, "delta", dtype, 6, delayed=seed % 2 == 1) for seed in range(SEQUENCES))
    assert worst <= TOLERANCE[dtype]


@pytest.mark.parametrize("member", MEMBERS[1:])
def test_the_same_of_the_family(member):
    assert max(play(seed, member, torch.float64, 4, delayed=seed % 2 == 1) for seed in range(12)) <= 1e-12
    assert max(play(seed, member, torch.float32, 4, delayed=seed % 2 == 1) for seed in range(12)) <= 1e-5


@settings(max_examples=15)
@given(st.integers(0, 10**9), st.sampled_from(MEMBERS), st.integers(1, 8), st.booleans())
def test_rounds_of_any_length(seed, member, rounds, delayed):
    assert play(seed, member, torch.float64, rounds, delayed) <= 1e-12
