from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.kernels.attention.numba import Heads, Visible, attend, nodes_of_unit, workspace
from specdec_core.kernels.compiled import compiled
from specdec_core.kernels.llama_step.numba_step import find_units, find_visible
from specdec_core.topology import Topology, chain, tree
from tests.strategies import topologies

attend_kept = compiled(attend.py_func)  # the same function, but kept on disk between test runs


@dataclass
class Row:
    """One KV head of one row: keys and values of `committed` entries and of the nodes of a draft, and their queries."""

    shape: Topology
    committed: int
    group: int
    size: int
    seed: int

    def __post_init__(self):
        draw, n = np.random.default_rng(self.seed).standard_normal, len(self.shape)
        self.keys = draw((self.committed + n + 3, self.size), np.float32)
        self.values = draw((self.committed + n + 3, self.size), np.float32)
        self.queries = draw((n, self.group, self.size), np.float32) / np.float32(np.sqrt(self.size))

    def entries(self, node: int) -> np.ndarray:
        """What a node sees, by rank."""
        return np.concatenate([np.arange(self.committed), self.committed + self.shape.path(node)])

    def exact(self, node: int) -> np.ndarray:
        """Attention of a node in float64, `[group, size]`."""
        keys, values = (each[self.entries(node)].astype(np.float64) for each in (self.keys, self.values))
        scores = self.queries[node].astype(np.float64) @ keys.T
        weights = np.exp(scores - scores.max(1, keepdims=True))
        return weights / weights.sum(1, keepdims=True) @ values

    def alone(self, node: int) -> np.ndarray:
        """Attention of a node as a single step over its entries, put in order."""
        step = Row(chain(1), len(self.entries(node)) - 1, self.group, self.size, 0)
        step.keys, step.values = self.keys[self.entries(node)], self.values[self.entries(node)]
        step.queries = self.queries[node][None]
        return step.compiled()[0]

    def compiled(self, most: int | None = None) -> np.ndarray:
        """Attention of all nodes, in units of at most `most` nodes, `[n, group, size]`."""
        n, paths = len(self.shape), self.shape.paths.reshape(-1)
        committed = np.full(n, self.committed)
        depths, straight, units = self.shape.depths, np.zeros(n, np.int64), np.zeros((n, 2), np.int64)
        find_visible(committed, depths, np.arange(n), paths, self.shape.paths.shape[1], straight)
        visible = Visible(committed, committed + depths + 1, straight, paths, self.shape.paths.shape[1])
        heads = Heads(self.keys.reshape(-1), self.values.reshape(-1), 0, self.group, self.size)
        scratch = np.full(workspace(self.group, self.size, int(visible.lengths.max())), np.nan, np.float32)
        output, step = np.full((n, self.group, self.size), np.nan, np.float32), self.group * self.size
        for first, last in units[: find_units(np.array([0, n]), most or nodes_of_unit(self.group), units)]:
            attend_kept(first, last, visible, heads, self.queries.reshape(-1), first * step, output.reshape(-1),
                        first * step, step, scratch)  # fmt: skip
        return output


rows = st.builds(
    Row,
    shape=st.one_of(topologies(24), st.integers(40, 70).map(chain)),
    committed=st.integers(0, 150),
    group=st.sampled_from([1, 2, 3, 5, 32]),
    size=st.sampled_from([2, 8, 16, 34, 64, 128]),
    seed=st.integers(0, 10**6),
)


@settings(max_examples=40)
@given(rows)
def test_it_is_attention_over_what_a_node_sees(row):
    found = row.compiled()
    for node in range(len(row.shape)):
        np.testing.assert_allclose(found[node], row.exact(node), rtol=0, atol=1e-5)


@settings(max_examples=40)
@given(rows, st.data())
def test_a_node_has_the_bits_of_a_single_step(row, data):
    most = data.draw(st.integers(1, nodes_of_unit(row.group)))
    found = row.compiled(most)
    for node in range(len(row.shape)):
        np.testing.assert_array_equal(found[node], row.alone(node))


@settings(max_examples=20)
@given(rows)
def test_an_entry_that_a_node_does_not_see_does_nothing_to_it(row):
    node = len(row.shape) - 1
    before = row.compiled()[node]
    unseen = np.setdiff1d(np.arange(len(row.keys)), row.entries(node))
    row.keys[unseen] = row.values[unseen] = np.nan
    np.testing.assert_array_equal(row.compiled()[node], before)


@pytest.mark.parametrize("committed", [2000, 4095])
def test_long_contexts(committed):
    row = Row(tree((-1, 0, 0, 1, 1, 2)), committed, 3, 64, 1)
    found = row.compiled()
    for node in range(len(row.shape)):
        np.testing.assert_allclose(found[node], row.exact(node), rtol=0, atol=1e-5)
        np.testing.assert_array_equal(found[node], row.alone(node))


def test_scores_of_any_size_are_no_overflow():
    row = Row(chain(5), 20, 2, 16, 3)
    row.queries *= 100
    assert np.isfinite(row.compiled()).all()
    np.testing.assert_allclose(row.compiled()[4], row.exact(4), rtol=0, atol=1e-3)
