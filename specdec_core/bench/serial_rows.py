"""Rows of notebook 03's records from what was measured: curves, swaps, operations, dispatch, twins, speculation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from specdec_core.bench.serial_backends import NOT_HERE, SHIPPED, BackendFactory, require_backend, same_values
from specdec_core.decode import decode, outputs
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.forensics import dispatch, llama_ops, op_curves
from specdec_core.forensics.near_ties import Divergence, census
from specdec_core.forensics.serial_twin import SerialTwin
from specdec_core.lengths.fixed import FixedLength
from specdec_core.measure.curves import CurveSamples
from specdec_core.measure.sweep import Case, Configuration, Costs, measure_draft, measure_overhead, sweep
from specdec_core.models.checkpoints import Checkpoint
from specdec_core.models.errors import MissingPackage
from specdec_core.models.llama_library import build
from specdec_core.protocol import Round, RowRound, Target
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.llamacpp import LlamaCppTarget
from specdec_core.targets.transformer import Transformer

Samples = Mapping[tuple[str, str, int, int], np.ndarray]
DRAFTER = "n-gram"
PADDED = (7, 9)
"""A block of seven padded to nine, past the threshold of ggml's Metal kernels."""


def curve_rows(session: int, samples: Samples, factory: BackendFactory) -> Iterator[dict[str, Any]]:
    """Records of SERIAL_CURVE from seconds by (backend, arm, context, n)."""
    for (name, arm, context, n), seconds in samples.items():
        backend = require_backend(name)
        yield {
            "backend": name,
            "engine": backend.engine,
            "format": backend.format,
            "quantized": backend.quantized,
            "repack": backend.repack,
            "device": factory.device(name),
            "threads": factory.told_threads(name),
            "session": session,
            "arm": arm,
            "n": n,
            "context": context,
            "seconds": seconds,
        }


def swap_rows(session: int, samples: Samples, factory: BackendFactory) -> Iterator[dict[str, Any]]:
    """Records of SWAP for the pairs of arms that are there: same weights, another kernel."""
    timed = {(name, context, n) for name, arm, context, n in samples if arm == "verify"}
    names, n = {name for name, _, _ in timed}, PADDED[0]
    pairs = [
        ("Q4_0 repacking", "llama.cpp Q4_0, not repacked", "llama.cpp Q4_0", n, n),
        (f"{SHIPPED} → F32", f"llama.cpp {SHIPPED}", "llama.cpp F32", n, n),
        *((f"padding {PADDED[0]} → {PADDED[1]}", name, name, *PADDED) for name in sorted(names)),
    ]
    for swap, before, after, n_before, n_after in pairs:
        contexts = sorted({c for _, c, _ in timed if {(before, c, n_before), (after, c, n_after)} <= timed})
        if not contexts:
            continue
        same = before == after or same_values(*(factory.file(require_backend(b).format) for b in (before, after)))
        for context in contexts:
            yield {
                "swap": swap,
                "before": before,
                "after": after,
                "n_before": n_before,
                "n_after": n_after,
                "context": context,
                "session": session,
                "same_values": same,
            }


def op_rows(
    name: str, target: Target, checkpoint: Checkpoint, widths: Sequence[int], context: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Records of OP_CURVE: our own engines operation by operation, llama.cpp by groups of its graph's nodes.

    ValueError for another engine: its operations cannot be told apart from outside.
    """
    parts: tuple[str, ...]
    if isinstance(target, LlamaCppTarget):
        samples = llama_ops.llama_op_samples(target, widths, context, repeats)
        parts, counts = llama_ops.GROUPS, dict.fromkeys((name for name, _ in samples), 1)
    elif isinstance(target, Transformer):
        samples = op_curves.op_samples(checkpoint, target, widths, context, repeats)
        parts, counts = op_curves.OPERATIONS, op_curves.counts(checkpoint)
    else:
        raise ValueError(f"operations of {name}: expected one of our own engines or llama.cpp")
    for (operation, n), seconds in samples.items():
        yield {
            "backend": name,
            "operation": operation,
            "part": operation in parts,
            "count": counts[operation],
            "n": n,
            "context": context,
            # A group of almost no time may come out below zero when what its ranges took to start is taken off.
            "seconds": np.maximum(seconds, 0.0),
        }


@dataclass(frozen=True)
class DispatchTables:
    """Records of DISPATCH and DISPATCH_SHARE."""

    dispatch: list[dict[str, Any]]
    shares: list[dict[str, Any]]


def dispatch_tables(factory: BackendFactory, variants: Sequence[str]) -> DispatchTables:
    """Of every file format: by Metal's rules, and by the CPU backend's for this build of llama.cpp, if it is x86.

    Files that cannot be made here (llama.cpp's quantizer makes them) are left out; the shipped one never is, if it is
    of the format that it should be.
    """
    tables = DispatchTables([], [])
    for kind in variants:
        try:
            matrices = factory.matrices(kind)
        except NOT_HERE:
            continue
        rules = {"Metal": dispatch.metal()}
        if cpu := _cpu_build():
            rules[cpu.name] = dispatch.x86(cpu)
            if kind == "Q4_0":
                rules[f"{cpu.name}, not repacked"] = dispatch.x86(cpu, repack=False)
        for backend, rule in rules.items():
            tables.dispatch.extend(dispatch.dispatch_rows(backend, kind, matrices, rule))
            tables.shares.extend(dispatch.share_rows(backend, kind, matrices, rule))
    return tables


def _cpu_build() -> dispatch.CpuBuild | None:
    try:
        return dispatch.CpuBuild.parse(build())
    except MissingPackage:
        return None


def sweep_rows(
    targets: Mapping[str, Target],
    samples: Samples,
    cases: Sequence[Case],
    k: int,
    max_new_tokens: int,
    eos: tuple[int, ...],
) -> Iterator[dict[str, Any]]:
    """Records of SWEEP: n-gram look-up against autoregressive decoding, predicted from the curves in `samples`."""
    configurations, costs = [], {}
    for name, target in targets.items():
        one = Configuration(f"{name} · {DRAFTER}", name, name, DRAFTER, target, NGramDrafter())
        own = {(c, n): seconds for (who, arm, c, n), seconds in samples.items() if (who, arm) == (name, "verify")}
        curve = CurveSamples(own).curve()
        costs[one.name] = Costs(curve, measure_draft(one, curve.contexts[0]), measure_overhead(target, cases[0]))
        configurations.append(one)
    options = Options(max_new_tokens=max_new_tokens, eos=eos)
    yield from sweep(configurations, costs, cases, (k,), options)


def twin_rows(
    name: str,
    target: Target,
    factory: BackendFactory,
    cases: Sequence[Case],
    k: int,
    max_new_tokens: int,
    eos: tuple[int, ...],
) -> Iterator[dict[str, Any]]:
    """Records of TWIN: greedy look-up decoding on a target and on its serial twin, every divergence examined."""
    twin, options = SerialTwin(target), Options(max_new_tokens=max_new_tokens, eos=eos)
    for case in cases:
        request = Request(case.tokens, options, FixedLength(k))
        ours, twins = (list(decode(each, [request], NGramDrafter())) for each in (target, twin))
        emitted, expected = (outputs(rounds, 1)[0].tokens for rounds in (ours, twins))
        found: list[Divergence] = []
        if emitted != expected:
            reference = factory.reference(name, target)  # made only if it is needed: it is another copy of the model
            found = census(
                target, reference, case.tokens, expected, emitted, _rows(ours), _continued(target, case, options)
            )
        first = found[0] if found else None
        yield {
            "backend": name,
            "exact": require_backend(name).exact,
            "drafter": DRAFTER,
            "K": k,
            "prompt_id": case.prompt_id,
            "tokens": len(emitted),
            "identical": not found,
            "same_rounds": [row.emitted for row in _rows(ours)] == [row.emitted for row in _rows(twins)],
            "certified": all(divergence.certified for divergence in found),
            "divergences": len(found),
            "index": -1 if first is None else first.index,
            "gap": 0.0 if first is None else min(first.gap, 1e300),
            "epsilon": 0.0 if first is None else first.epsilon,
        }


def _rows(rounds: Sequence[Round]) -> list[RowRound]:
    return [row for each in rounds for row in each.rows]


def _continued(target: Target, case: Case, options: Options):
    """What autoregressive decoding, which is the twin's, adds to a text so far."""

    def continued(shared: tuple[int, ...]) -> tuple[int, ...]:
        if shared[-1] in options.eos or len(shared) == options.max_new_tokens:
            return ()
        left = replace(options, max_new_tokens=options.max_new_tokens - len(shared))
        return outputs(decode(target, [Request((*case.tokens, *shared), left)]), 1)[0].tokens

    return continued
