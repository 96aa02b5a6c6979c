import numpy as np
import pytest

from specdec_core.measure import clock
from specdec_core.models.errors import UnsupportedModel
from specdec_core.topology import chain, forest
from tests.tiny_gguf import gguf_model, write_gguf

pytest.importorskip("llama_cpp", reason="llama.cpp is not installed: make setup builds it where there is a compiler")

from specdec_core.forensics.llama_ops import (
    ATTENTION,
    FEED_FORWARD,
    GROUPS,
    HEAD,
    MODEL,
    OBSERVED,
    OUTSIDE,
    PROJECTIONS,
    REST,
    STARTS,
    GraphClock,
    Node,
    ObservedTarget,
    Range,
    group_of,
    llama_op_samples,
    ranges_of,
    start_seconds,
)
from specdec_core.targets.llamacpp import LlamaCppOptions, LlamaCppTarget

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS = 4
SLOT = np.array([0])


def layer(index, last=False):
    """The nodes of one layer, as llama.cpp's graph has them: operation and name, layer numbers left out."""
    nodes = [
        ("RMS_NORM", "norm-"), ("MUL", "attn_norm-"), ("MUL_MAT", "Qcur-"), ("RESHAPE", "Qcur-"), ("ROPE", "Qcur-"),
        ("MUL_MAT", "Vcur-"), ("MUL_MAT", "Kcur-"), ("ROPE", "Kcur-"), ("VIEW", "Kcur- (view)"),
        ("SET_ROWS", "cache_k_l (view)"), ("PERMUTE", "Qcur- (view)"), ("MUL_MAT", "kq-"), ("SOFT_MAX", "kq_soft_max-"),
        ("MUL_MAT", "kqv-"), ("CONT", "kqv_out-"), ("MUL_MAT", "attn_out-"),
        *([("GET_ROWS", "node_1"), ("GET_ROWS", "node_2")] if last else []),
        ("ADD", "ffn_inp-"), ("RMS_NORM", "norm-"), ("MUL", "ffn_norm-"), ("MUL_MAT", "ffn_gate-"),
        ("MUL_MAT", "ffn_up-"), ("SWIGLU", "ffn_swiglu-"), ("MUL_MAT", "ffn_out-"), ("ADD", "l_out-"),
    ]  # fmt: skip
    return [Node.of(operation, name.replace("-", f"-{index}")) for operation, name in nodes]


GRAPH = [
    Node.of("GET_ROWS", "embd"),
    *(node for index in range(LAYERS) for node in layer(index, index == LAYERS - 1)),
    *(Node.of(*node) for node in (("RMS_NORM", "norm"), ("MUL", "result_norm"), ("MUL_MAT", "result_output"))),
]


@pytest.mark.parametrize(
    ("operation", "name", "expected"),
    [
        ("MUL_MAT", "Qcur-12", Node("MUL_MAT", "Qcur", 12)),
        ("VIEW", "Kcur-0 (view)", Node("VIEW", "Kcur", 0)),
        ("GET_ROWS", "embd", Node("GET_ROWS", "embd", -1)),
        ("ADD", "some-name", Node("ADD", "some-name", -1)),
    ],
)
def test_a_node_knows_its_layer(operation, name, expected):
    assert Node.of(operation, name) == expected


@pytest.mark.parametrize(
    ("operation", "name", "group"),
    [
        ("MUL_MAT", "Vcur-3", PROJECTIONS), ("MUL_MAT", "attn_out-3", PROJECTIONS), ("MUL_MAT", "kqv-3", ATTENTION),
        ("SOFT_MAX", "kq_soft_max-3", ATTENTION), ("MUL_MAT", "ffn_up-3", FEED_FORWARD), ("SWIGLU", "x", FEED_FORWARD),
        ("MUL_MAT", "result_output", HEAD), ("RMS_NORM", "norm-3", REST), ("PERMUTE", "x", None),
    ],
)  # fmt: skip
def test_a_node_belongs_to_a_group(operation, name, group):
    assert group_of(Node.of(operation, name)) == group


@pytest.mark.parametrize("node", [("MUL_MAT", "ffn_moe_gate-1"), ("SSM_SCAN", "scan-1")])
def test_a_node_of_another_kind_of_model(node):
    with pytest.raises(UnsupportedModel, match=rf"a node '\S+' \({node[0]}\) that no group is known for"):
        group_of(Node.of(*node))


class TestRanges:
    def test_they_cover_the_graph_and_are_few(self):
        ends = [each.end for each in ranges_of(GRAPH)]
        assert ends == sorted(set(ends)) and ends[-1] == len(GRAPH) - 1
        assert len(ends) <= 7 * LAYERS + 3

    def test_every_node_that_computes_is_in_a_range_of_its_group(self):
        start = 0
        for each in ranges_of(GRAPH):
            assert {group_of(node) for node in GRAPH[start : each.end + 1]} - {None} == {each.group}
            start = each.end + 1

    def test_every_other_layer_has_one_range_in_two_parts(self):
        found = ranges_of(GRAPH)
        assert [each.joint for each in found if each.joint >= 0] == [1]  # the last layer's gathers rows too
        assert [each.parts for each in found if each.parts >= 0] == [0, 0, 2, 2]

    def test_what_a_start_costs_is_what_two_parts_take_longer(self):
        found = [Range(REST, 0, parts=0), Range(REST, 1, parts=0), Range(REST, 2, joint=1), Range(HEAD, 3)]
        assert start_seconds(found, [3.0, 4.0, 5.0, 100.0]) == pytest.approx(2.0)
        assert start_seconds(found, [1.0, 1.0, 5.0, 100.0]) == 0.0
        assert start_seconds(found[3:], [100.0]) == 0.0


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    path = write_gguf(gguf_model(context=128, layers=LAYERS), tmp_path_factory.mktemp("ops") / "tiny.gguf")
    return LlamaCppTarget(path, LlamaCppOptions(threads=1, cache_type="float32", branches=0, chunk=16))


def held(target):
    state = target.new_state(1, 64)
    target.prefill(state, SLOT, [np.arange(9)])
    return state


def test_what_starts_cost_is_taken_off_every_range():
    clock_of_graph = GraphClock()
    clock_of_graph._plans[3] = [
        Range(REST, 0, parts=0),
        Range(REST, 1, parts=0),
        Range(REST, 2, joint=1),
        Range(HEAD, 3),
    ]
    clock_of_graph.begin(3)
    clock_of_graph._times = [3.0, 4.0, 5.0, 100.0]  # two parts take 7, one takes 5: a start costs 2
    clock_of_graph.end(3)
    groups = clock_of_graph.groups
    assert (groups[REST], groups[HEAD], groups[STARTS]) == (6.0, 98.0, 8.0)
    assert groups[ATTENTION] == groups[PROJECTIONS] == groups[FEED_FORWARD] == 0


class TestOnLlamaCpp:
    def test_the_graph_is_the_one_that_is_known(self, target):
        observed = ObservedTarget.of(target)
        state, ranges = held(observed), ranges_of(GRAPH)
        observed.clock.begin(5)
        observed.verify(state, SLOT, np.arange(5), forest([chain(5)]))
        observed.clock.end(5)
        found = observed.clock._plans[5]
        assert [(each.group, each.joint, each.parts) for each in found] == [
            (each.group, each.joint, each.parts) for each in ranges
        ]

    def test_watching_changes_no_bit(self, target):
        observed = ObservedTarget.of(target)
        states = held(target), held(observed)
        for _ in range(3):
            observed.clock.begin(4)
            one, other = (
                each.verify(state, SLOT, np.arange(4), forest([chain(4)])).logits
                for each, state in zip((target, observed), states, strict=True)
            )
            observed.clock.end(4)
            np.testing.assert_array_equal(one, other)
        assert target._llama is not observed._llama

    def test_groups_add_up_to_the_pass(self, target, monkeypatch):
        monkeypatch.setattr(clock, "SETTLE", 0.0)
        samples = llama_op_samples(target, (1, 6), 8, 4)
        assert set(samples) == {(name, n) for name in (*GROUPS, MODEL, OBSERVED, STARTS) for n in (1, 6)}
        for n in (1, 6):
            assert all(samples[name, n].shape == (4,) for name in (*GROUPS, MODEL, OBSERVED, STARTS))
            parts = sum(samples[name, n] for name in (*GROUPS, STARTS))
            # The rest is Python's, between the ranges.
            assert (parts <= samples[OBSERVED, n]).all() and (parts > 0.1 * samples[OBSERVED, n]).all()
            assert (samples[OUTSIDE, n] > 0).all() and (samples[FEED_FORWARD, n] > 0).any()

    def test_a_pass_in_two_decodes(self, target):
        with pytest.raises(ValueError, match="widths up to 17 and decodes of at most 16 tokens"):
            llama_op_samples(target, (1, 17), 8, 1)

    def test_a_graph_that_changes_is_not_summed(self, target):
        observed = ObservedTarget.of(target)
        state = held(observed)
        for n in (4, 4):
            observed.clock.begin(n)
            observed.verify(state, SLOT, np.arange(n), forest([chain(n)]))
            if len(observed.clock._times):
                observed.clock._times.pop()
                with pytest.raises(UnsupportedModel, match=r"ran \d+ of the \d+ ranges of nodes"):
                    observed.clock.end(n)
            else:
                observed.clock.end(n)

    def test_a_graph_that_is_not_known_is_told_after_the_pass(self, target, monkeypatch):
        observed = ObservedTarget.of(target)
        state = held(observed)
        monkeypatch.setattr(observed.clock, "_names", lambda tensor: ("SSM_SCAN", "scan-0"))
        observed.clock.begin(2)
        observed.verify(state, SLOT, np.arange(2), forest([chain(2)]))
        with pytest.raises(UnsupportedModel, match="no group is known for"):
            observed.clock.end(2)
