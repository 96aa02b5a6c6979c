import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.gated_delta import reference
from specdec_core.kernels.gated_delta.short_convolution import commit, convolve
from specdec_core.topology import chain, forest, tree
from tests.kernels.gated_delta.windows import error, paths_to, random_forest, random_state
from tests.strategies import topologies

pytestmark = pytest.mark.usefixtures("one_thread")

FORESTS = 60
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def made(rng, shapes, width, channels=3):
    """Cache, inputs, weights and bias."""
    return (
        random_state(rng, len(shapes.trees), channels, width - 1),
        random_state(rng, len(shapes.rows), channels),
        random_state(rng, channels, width),
        random_state(rng, channels),
    )


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("width", [1, 2, 4, 7])
def test_every_node_of_many_trees_equals_the_reference(width, dtype):
    for seed in range(FORESTS // 4):
        rng = np.random.default_rng(seed)
        shapes = random_forest(rng)
        arrays = made(rng, shapes, width)
        cache, x, weights, bias = (torch.from_numpy(each).to(dtype) for each in arrays)
        for offset in (None, bias):
            expected, windows = reference.convolve(*arrays[:3], shapes, None if offset is None else arrays[3])
            found, pending = convolve(cache, x, weights, shapes, offset)
            assert found.dtype == dtype and error(found, expected) <= TOLERANCE[dtype]
        for node in range(-1, int(shapes.counts.max())):
            paths = paths_to(shapes, [min(node, len(each) - 1) for each in shapes.trees])
            kept = commit(cache, pending, paths)
            np.testing.assert_array_equal(kept.double().numpy(), reference.commit(arrays[0], windows, paths))
            assert kept.is_contiguous() and (width == 1 or kept.data_ptr() != cache.data_ptr())
        np.testing.assert_array_equal(cache.double().numpy(), arrays[0])


def test_on_a_chain_it_is_the_convolution_that_models_use():
    rng = np.random.default_rng(1)
    shapes = forest([chain(9)])
    cache, x, weights, bias = (torch.from_numpy(each) for each in made(rng, shapes, 4))
    found, _ = convolve(cache, x, weights, shapes, bias)
    padded = torch.cat([cache, x.T[None]], dim=2)
    expected = F.silu(F.conv1d(padded, weights[:, None], bias, groups=3))[0].T
    assert error(found, expected.numpy()) <= 1e-14


@settings(max_examples=30)
@given(topologies(), st.integers(1, 6), st.integers(0, 10**6), st.data())
def test_a_forward_in_two_parts_is_the_whole_forward(shape, width, seed, data):
    """Two chains along one path, cut anywhere, and the tree that holds the path: the same outputs and cache."""
    cache, x, weights, bias = (
        torch.from_numpy(each) for each in made(np.random.default_rng(seed), forest([shape]), width)
    )
    whole, pending = convolve(cache, x, weights, forest([shape]), bias)
    path = shape.path(data.draw(st.integers(0, len(shape) - 1)))
    cut = data.draw(st.integers(0, len(path)))
    kept = cache
    for part in (path[:cut], path[cut:]):
        if len(part):
            found, more = convolve(kept, x[part], weights, forest([chain(len(part))]), bias)
            assert error(found, whole[part].numpy()) <= 1e-14
            kept = commit(kept, more, [np.arange(len(part))])
    assert torch.equal(kept, commit(cache, pending, [path]))


def test_rows_do_not_see_each_other():
    rng = np.random.default_rng(2)
    shapes = forest([tree((-1, 0, 0)), chain(1), chain(4)])
    cache, x, weights, bias = (torch.from_numpy(each) for each in made(rng, shapes, 4))
    sound, pending = convolve(cache, x, weights, shapes, bias)
    kept = commit(cache, pending, paths_to(shapes, [2, 0, 1]))
    cache[1], x[3] = torch.nan, torch.nan
    found, pending = convolve(cache, x, weights, shapes, bias)
    others = [0, 1, 2, 4, 5, 6, 7]
    assert torch.equal(found[others], sound[others]) and found[3].isnan().all()
    assert torch.equal(commit(cache, pending, paths_to(shapes, [2, 0, 1]))[[0, 2]], kept[[0, 2]])


def test_large_inputs_saturate():
    ones = torch.ones(1, 1)
    for x, expected in ((-1e4, 0.0), (1e4, 1e4)):
        for form in (convolve, reference.convolve):
            found, _ = form(torch.empty(1, 1, 0), x * ones, ones, forest([chain(1)]))
            np.testing.assert_array_equal(found, [[expected]])


def test_16_bit_inputs_are_summed_in_float32():
    rng = np.random.default_rng(3)
    shapes = forest([chain(5)])
    short = [torch.from_numpy(each).bfloat16() for each in made(rng, shapes, 4, 32)]
    cache, x, weights, bias = short
    found, _ = convolve(cache, x, weights, shapes, bias)
    expected, _ = convolve(*(each.float() for each in short[:3]), shapes, bias.float())
    assert found.dtype == torch.bfloat16 and torch.equal(found, expected.bfloat16())


GOOD = {"cache": (2, 3, 3), "inputs": (3, 3), "weights": (3, 4), "bias": (3,)}


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"cache": (1, 3, 3)}, r"cache has shape \(1, 3, 3\): expected \[B, C, W − 1\] with 2 rows"),
        ({"cache": (2, 9)}, r"cache has shape \(2, 9\)"),
        ({"cache": (2, 0, 3)}, r"cache has shape \(2, 0, 3\)"),
        ({"inputs": (0, 3)}, r"inputs has shape \(0, 3\): expected \[N, C\] = \[3, 3\]"),
        ({"inputs": (3, 1)}, r"inputs has shape \(3, 1\): expected \[N, C\] = \[3, 3\]"),
        ({"weights": (3, 3)}, r"weights have shape \(3, 3\): expected \[C, W\] = \[3, 4\], a width of one more than"),
        ({"weights": (1, 4)}, r"weights have shape \(1, 4\)"),
        ({"bias": (1,)}, r"bias has shape \(1,\): expected \[C\] = \[3\]"),
        ({"inputs": np.zeros((3, 3))}, "inputs is a ndarray"),
        ({"cache": np.zeros((2, 3, 3))}, "cache is a ndarray: expected a torch tensor"),
        ({"inputs": torch.zeros(3, 3)}, "inputs is float32: expected float64"),
        ({"weights": torch.zeros(3, 4)}, "weights is float32: expected float64"),
        ({"bias": torch.zeros(3)}, "bias is float32: expected float64"),
        ({"inputs": torch.zeros(3, 3, dtype=torch.float64, device="meta")}, "inputs is a Tensor on meta"),
    ],
    ids=str,
)
def test_what_does_not_go_together_is_refused(changed, message):
    arrays = {
        name: torch.zeros(shape, dtype=torch.float64) if isinstance(shape, tuple) else shape
        for name, shape in (GOOD | changed).items()
    }
    with pytest.raises(ValueError, match=message):
        convolve(**arrays, forest=forest([chain(1), chain(2)]))


def test_a_commit_to_another_cache_or_along_no_path_is_refused():
    shapes = forest([chain(1), chain(2)])
    cache, x, weights = torch.zeros(2, 3, 3), torch.zeros(3, 3), torch.zeros(3, 4)
    _, pending = convolve(cache, x, weights, shapes)
    paths = paths_to(shapes, [0, 1])
    with pytest.raises(ValueError, match="expected the indices of all nodes from the root"):
        commit(cache, pending, [np.array([0]), np.array([1])])
    with pytest.raises(ValueError, match=r"cache has shape \(3, 3, 3\)"):
        commit(torch.zeros(3, 3, 3), pending, paths)
    with pytest.raises(ValueError, match="pending inputs is float32: expected float64"):
        commit(cache.double(), pending, paths)
    with pytest.raises(ValueError, match=r"pending inputs has shape \(3, 3\): expected \[N, C\] = \[3, 4\]"):
        commit(torch.zeros(2, 4, 3), pending, paths)
