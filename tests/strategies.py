"""What hypothesis draws from in more than one test file."""

from __future__ import annotations

from hypothesis import strategies as st

from specdec_core.topology import Topology, chain, tree


@st.composite
def parents(draw: st.DrawFn, most: int = 9) -> tuple[int, ...]:
    """The parents of any rooted tree of up to `most` nodes in topological order."""
    nodes = draw(st.integers(1, most))
    return (-1, *(draw(st.integers(0, node - 1)) for node in range(1, nodes)))


def topologies(most: int = 9) -> st.SearchStrategy[Topology]:
    """Any tree, chains among them."""
    return st.one_of(parents(most).map(tree), st.integers(1, most).map(chain))
