"""Where a llama.cpp pass spends its time, by groups of operations, while the whole model runs.

ggml's scheduler asks a callback at every node whether it wants that node's result; it then computes everything up to
there in one go, and reports (ggml/src/ggml-backend.cpp, ggml_backend_sched_compute_splits). So the time from a "yes" to
the report is that of a range of nodes, and only as many ranges run apart as are asked for: six or seven a layer, at the
ends of the groups. This was chosen over files cut to one layer: their weights stay in the cache, and they cannot tell
attention from matrices; here every weight comes from where it comes from in a real pass. What Python does between
ranges is not timed. What is timed besides the work is the start of a range; it is estimated in the same pass, since
every other layer runs one of its ranges in two parts, and taken off.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from time import perf_counter
from typing import Any

import numpy as np

from specdec_core.measure.clock import interleaved
from specdec_core.measure.curves import verification_arm
from specdec_core.models.errors import UnsupportedModel
from specdec_core.models.llama_library import library
from specdec_core.targets.llamacpp import LlamaCppTarget
from specdec_core.targets.llamacpp_context import LlamaContext

PROJECTIONS, ATTENTION, FEED_FORWARD, HEAD, REST = "projections", "attention", "feed-forward", "head", "rest"
OUTSIDE = "outside the graph"
GROUPS = (PROJECTIONS, ATTENTION, FEED_FORWARD, HEAD, REST, OUTSIDE)
"""q, k, v and o with the rotary between; scores, softmax and values with the cache; gate, up and down with the
activation; the head; norms, residuals, embedding; and what a pass does before and after its graph (its batch, its
memory, copying the logits out). Together they are the pass."""
MODEL, OBSERVED, STARTS = "model", "observed", "starts"
"""The uninstrumented pass, the instrumented one by the wall clock, and what starting its ranges cost."""

_PRODUCTS = {
    "Qcur": PROJECTIONS, "Kcur": PROJECTIONS, "Vcur": PROJECTIONS, "attn_out": PROJECTIONS, "kq": ATTENTION,
    "kqv": ATTENTION, "ffn_gate": FEED_FORWARD, "ffn_up": FEED_FORWARD, "ffn_out": FEED_FORWARD,
    "ffn_down": FEED_FORWARD, "result_output": HEAD,
}  # fmt: skip
"""Group of a product by the name that llama.cpp's graph of a Llama model gives it (src/models/llama.cpp)."""
_OTHERS = {
    "SET_ROWS": ATTENTION, "CPY": ATTENTION, "SOFT_MAX": ATTENTION, "CONT": ATTENTION, "FLASH_ATTN_EXT": ATTENTION,
    "SWIGLU": FEED_FORWARD, "ROPE": PROJECTIONS, "ADD": REST, "RMS_NORM": REST, "MUL": REST, "GET_ROWS": REST,
}  # fmt: skip
_NOTHING = frozenset(("RESHAPE", "VIEW", "PERMUTE", "TRANSPOSE"))
"""Operations that compute nothing; they go with the node before."""


@dataclass(frozen=True)
class Node:
    """A node of ggml's graph: its operation (`SWIGLU`), its name without the layer (`ffn_swiglu`), its layer or −1."""

    operation: str
    name: str
    layer: int

    @classmethod
    def of(cls, operation: str, name: str) -> Node:
        stem, dash, layer = name.partition(" ")[0].rpartition("-")
        return cls(operation, stem, int(layer)) if dash and layer.isdigit() else cls(operation, name, -1)


@dataclass(frozen=True)
class Range:
    """Nodes that run together, up to and including node `end`.

    joint  the layer if this is the range that other layers have in two parts; −1 otherwise. `parts` likewise.
    """

    group: str
    end: int
    joint: int = -1
    parts: int = -1


def group_of(node: Node) -> str | None:
    """The group that a node's time belongs to; None for one that computes nothing.

    Raises UnsupportedModel for an operation that a Llama graph does not have.
    """
    if node.operation in _NOTHING:
        return None
    group = _PRODUCTS.get(node.name) if node.operation == "MUL_MAT" else _OTHERS.get(node.operation)
    if group is None:
        raise UnsupportedModel(
            f"llama.cpp's graph has a node {node.name!r} ({node.operation}) that no group is known for; only Llama "
            "models are taken apart, as llama.cpp builds them since 2025"
        )
    return group


def ranges_of(nodes: Sequence[Node]) -> list[Range]:
    """Maximal runs of one group. In even layers the run of residual and norm after attention is cut after the residual.

    The last layer's run also gathers the scored rows, so it is compared with no other.
    """
    layers = max((node.layer for node in nodes), default=-1)
    found: list[Range] = []
    current: str | None = None
    joint = parts = -1
    for index, node in enumerate(nodes):
        group = group_of(node) or current or REST
        if current is not None and group != current:
            found.append(Range(current, index - 1, joint, parts))
            joint = parts = -1
        current = group
        if node.operation == "ADD" and node.name == "ffn_inp" and 0 <= node.layer < layers:
            if node.layer % 2:
                joint = node.layer
            else:
                found.append(Range(current, index, -1, node.layer))
                parts = node.layer
    if current is not None:
        found.append(Range(current, len(nodes) - 1, joint, parts))
    return found


def start_seconds(ranges: Sequence[Range], seconds: Sequence[float]) -> float:
    """What starting a range costs: the median of what is in two parts minus that of the same in one; at least 0.

    0 for a model of one or two layers, where there is nothing to compare.
    """
    joint = [each for part, each in zip(ranges, seconds, strict=True) if part.joint >= 0]
    parts: dict[int, float] = {}
    for part, each in zip(ranges, seconds, strict=True):
        if part.parts >= 0:
            parts[part.parts] = parts.get(part.parts, 0.0) + each
    if not joint or not parts:
        return 0.0
    return max(0.0, float(np.median(list(parts.values())) - np.median(joint)))


@dataclass
class GraphClock:
    """Times the ranges of every pass of one context; give `callback` to it, and call `begin(n)` before a pass.

    The first pass of each n only looks at the graph. `groups`: seconds by group of the last pass, and STARTS.
    """

    groups: dict[str, float] = field(default_factory=dict)
    _plans: dict[int, list[Range]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.callback = library().ggml_backend_sched_eval_callback(self._called)
        self._names = _names()
        self._nodes: list[Node] = []
        self._ends: set[int] = set()
        self._times: list[float] = []
        self._node, self._started, self._broken = 0, 0.0, ""
        self._begun = self._entered = self._left = 0.0

    def begin(self, n: int) -> None:
        self._ends = {part.end for part in self._plans.get(n, ())}
        self._nodes, self._times, self._node, self._broken = [], [], 0, ""
        self._begun = perf_counter()

    def end(self, n: int) -> None:
        """Work out `groups`, or after the first pass of this n the ranges of the next ones."""
        ended = perf_counter()
        if self._broken:
            raise UnsupportedModel(self._broken)
        if n not in self._plans:
            self._plans[n] = ranges_of(self._nodes)
            return
        ranges = self._plans[n]
        if len(self._times) != len(ranges):
            raise UnsupportedModel(
                f"llama.cpp ran {len(self._times)} of the {len(ranges)} ranges of nodes that it was asked for at n = "
                f"{n}: its graph changes from pass to pass; expected one graph an n, in one decode"
            )
        start = start_seconds(ranges, self._times)
        self.groups = dict.fromkeys(GROUPS, 0.0) | {STARTS: start * len(ranges)}
        self.groups[OUTSIDE] = (self._entered - self._begun) + (ended - self._left)
        for part, seconds in zip(ranges, self._times, strict=True):
            self.groups[part.group] += seconds - start

    def _called(self, tensor: int, asking: bool, data: object) -> bool:
        if not asking:
            self._left = perf_counter()
            self._times.append(self._left - self._started)
            return True
        index, self._node = self._node, self._node + 1
        if index == 0:
            self._entered = perf_counter()
        if not self._ends:
            try:
                self._nodes.append(Node.of(*self._names(tensor)))
            except Exception as error:  # an exception may not cross C: it is raised when the pass is over
                self._broken = f"a node of llama.cpp's graph cannot be read ({error})"
        wanted = index in self._ends
        if wanted:
            self._started = perf_counter()
        return wanted


class ObservedTarget(LlamaCppTarget):
    """A `LlamaCppTarget` whose passes are timed range by range: one state at a time, a pass in one decode."""

    clock: GraphClock

    @classmethod
    def of(cls, target: LlamaCppTarget) -> ObservedTarget:
        """Over the same loaded model."""
        observed = object.__new__(cls)
        observed.__dict__.update(target.__dict__)
        observed.clock = GraphClock()
        library_with_callback: Any = _WithCallback(target._llama, observed.clock.callback)
        observed._llama = library_with_callback
        return observed


class _WithCallback:
    """The library, but that new contexts are made with this callback."""

    def __init__(self, llama: Any, callback: Any):
        self._llama, self._callback = llama, callback

    def __getattr__(self, name: str) -> Any:
        return getattr(self._llama, name)

    def llama_context_default_params(self) -> Any:
        params = self._llama.llama_context_default_params()
        params.cb_eval = self._callback
        return params


def llama_op_samples(
    target: LlamaCppTarget, widths: Sequence[int], context: int, repeats: int, seed: int = 0
) -> dict[tuple[str, int], np.ndarray]:
    """Seconds of each group, of MODEL, OBSERVED and STARTS, at each width: `[repeats]`, interleaved in one run.

    Groups are totals of a pass, its range starts taken off. Raises UnsupportedModel for a graph that is not a Llama's,
    ValueError if a pass would not fit one decode.
    """
    if max(widths) > target.options.chunk:
        raise ValueError(
            f"widths up to {max(widths)} and decodes of at most {target.options.chunk} tokens: expected one decode a "
            "pass; make the target with a larger chunk"
        )
    observed = ObservedTarget.of(target)
    tokens = np.random.default_rng(seed).integers(0, target.vocabulary, (1, context + max(widths)))
    arms, found = {}, {}
    states: list[LlamaContext] = []
    for each in (target, observed):
        state = each.new_state(1, context + max(widths))
        each.prefill(state, np.array([0]), [tokens[0, : context + 1]])
        states.append(state)
    for n in widths:
        nodes = tokens[:, context : context + n]
        plain, watched = verification_arm(target, states[0], nodes), verification_arm(observed, states[1], nodes)
        series: list[dict[str, float]] = []

        def timed(n=n, watched=watched, series=series) -> None:
            observed.clock.begin(n)
            watched()
            observed.clock.end(n)
            series.append(observed.clock.groups)

        arms[f"{MODEL}/{n}"], arms[f"{OBSERVED}/{n}"] = plain, timed
        found[n] = series
    seconds = interleaved(arms, repeats, warmup=2, seed=seed)
    samples = {(name, n): seconds[f"{name}/{n}"] for n in widths for name in (MODEL, OBSERVED)}
    for n, series in found.items():
        for group in (*GROUPS, STARTS):
            samples[group, n] = np.array([each[group] for each in series[-repeats:]])
    for state in states:
        state.close()
    return samples


@cache
def _names() -> Any:
    """tensor address → (operation, name), by ggml's own functions."""
    from llama_cpp._ggml import libggml

    describe, name = libggml.ggml_op_desc, libggml.ggml_get_name
    for function in (describe, name):
        function.restype, function.argtypes = ctypes.c_char_p, [ctypes.c_void_p]
    return lambda tensor: (describe(tensor).decode(), name(tensor).decode("utf-8", "replace"))
