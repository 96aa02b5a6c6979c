"""Everything that notebook 03 shows of serialized verification, measured and recorded.

Backends of one session are open together and interleaved; only within a session are they compared. Everything that is
predicted (dispatch by rule, speedups from curves) is worked out from what was recorded before.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from specdec_core.bench.backend_sweep import cases_of
from specdec_core.bench.serial_backends import CODE as BACKEND_CODE
from specdec_core.bench.serial_backends import NOT_HERE, BackendFactory, TorchThreads, require_backend
from specdec_core.bench.serial_rows import curve_rows, dispatch_tables, op_rows, swap_rows, sweep_rows, twin_rows
from specdec_core.bench.sources import DECODING
from specdec_core.evidence.layout import Layout, known_profile
from specdec_core.evidence.provenance import cpu_model, fingerprint
from specdec_core.evidence.records import RecordWriter
from specdec_core.evidence.schemas import Schema
from specdec_core.evidence.serial_records import ABSENT, DISPATCH, DISPATCH_SHARE, OP_CURVE, SERIAL_CURVE, SWAP, TWIN
from specdec_core.evidence.sweep_records import SWEEP
from specdec_core.forensics.serial_twin import SerialTwin
from specdec_core.measure.clock import Arm, interleaved, once
from specdec_core.measure.curves import verification_arm
from specdec_core.measure.sweep import Case
from specdec_core.pairs import Opened
from specdec_core.prompts import load_prompts
from specdec_core.protocol import Target

CURVE_CODE = (*BACKEND_CODE, "specdec_core/forensics/serial_twin.py", "specdec_core/bench/serial_verification.py",
              "specdec_core/bench/serial_rows.py")  # fmt: skip
OP_CODE = (*CURVE_CODE, "specdec_core/forensics/op_curves.py", "specdec_core/forensics/llama_ops.py")
DECODING_CODE = (*DECODING, *CURVE_CODE)
TWIN_CODE = (*DECODING_CODE, "specdec_core/forensics/near_ties.py")
DISPATCH_CODE = ("specdec_core/models/gguf.py", "specdec_core/models/quantize.py", "specdec_core/forensics/dispatch.py",
                 "specdec_core/bench/serial_backends.py", "specdec_core/bench/serial_rows.py")  # fmt: skip
"""What each kind of record depends on."""

Curves = dict[tuple[str, str, int, int], np.ndarray]
"""Seconds `[repeats]` by (backend, arm, context, n); arm 'verify' or 'loop'."""


@dataclass(frozen=True)
class Session:
    """Backends that are open together and interleaved.

    repeats  of every arm; fewer, but at least LEAST, where all of them together would take longer than `seconds`.
    swept    those of the backends that decode with n-gram look-up.
    twins    those that have a serial twin beside them: its tokens are compared, and it is timed at the widths `loops`
             at the first context.
    """

    backends: tuple[str, ...]
    widths: tuple[int, ...]
    contexts: tuple[int, ...]
    repeats: int
    seconds: float
    loops: tuple[int, ...] = ()
    swept: tuple[str, ...] = ()
    twins: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name in (*self.backends, *self.swept, *self.twins):
            require_backend(name)
        outside = {*self.swept, *self.twins} - {*self.backends}
        if outside:
            raise ValueError(f"{sorted(outside)} are swept or twinned and not among the backends {self.backends}")
        if 1 not in self.widths:
            raise ValueError(f"widths {self.widths}: expected 1 among them, which every index is relative to")


@dataclass(frozen=True)
class SerialPlan:
    """How much to measure.

    ops        backends whose operations are timed, at `op_widths`, behind the first session's first context.
    prompts    of each domain for decoding; each twin decodes the first `twin_prompts` of them.
    k          speculation length.
    variants   file formats of the dispatch table.
    """

    sessions: tuple[Session, ...]
    ops: tuple[str, ...]
    op_widths: tuple[int, ...]
    op_repeats: int
    prompts: int
    twin_prompts: int
    max_new_tokens: int
    k: int = 6
    variants: tuple[str, ...] = ("F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q4_K_M")


OURS, PLAIN, HUGGING, SHIPPED = "numba float32", "torch float32", "transformers float32", "llama.cpp Q4_1"
_SWAPPED = (OURS, SHIPPED, "llama.cpp Q4_0", "llama.cpp Q4_0, not repacked", "llama.cpp F32")
_FORMATS = ("numba int8", "llama.cpp F16", "llama.cpp Q8_0", "llama.cpp Q4_K_M")
_GPU = ("llama.cpp F16, GPU", "llama.cpp Q4_1, GPU", "llama.cpp Q4_0, GPU")
_SOME, _ALL, _FEW = (1, 2, 4, 7, 8, 9, 16), (*range(1, 17), 24, 32), (1, 2, 7, 16)
_NEAR, _FAR = (64,), (512, 2048)
_LOOPS = (2, 4, 7, 8, 16)

PLANS = {
    "quick": SerialPlan(
        sessions=(
            Session(_SWAPPED, _SOME, (64,), 10, 40, (7,), (OURS, SHIPPED, "llama.cpp F32"), (OURS, SHIPPED)),
            Session(("numba int8", "llama.cpp Q8_0"), (1, 6, 7), (64,), 10, 6),
            Session(("MLX 4-bit",), (1, 2, 7), (64,), 10, 6),
            Session(_GPU, _SOME, (64,), 10, 20, (7,), _GPU[1:2], _GPU[1:2]),
        ),
        ops=(OURS, SHIPPED), op_widths=(1, 7), op_repeats=10, prompts=1, twin_prompts=1, max_new_tokens=12,
        variants=("Q4_1", "Q4_0", "F32"),
    ),
    "full": SerialPlan(
        sessions=(
            Session(_SWAPPED, _ALL, _NEAR, 20, 150, _LOOPS, _SWAPPED, _SWAPPED),
            Session(_SWAPPED, _FEW, _FAR, 15, 70),
            Session((PLAIN, HUGGING), _ALL, _NEAR, 15, 110, _LOOPS, (PLAIN, HUGGING), (PLAIN, HUGGING)),
            Session((PLAIN, HUGGING), _FEW, _FAR, 12, 60),
            Session(_FORMATS, _ALL, _NEAR, 20, 100, _LOOPS, _FORMATS, _FORMATS),
            Session(_FORMATS, _FEW, _FAR, 15, 50),
            Session(("MLX 4-bit", "MLX 8-bit"), (1, 2, 7, 9), _NEAR, 12, 90, (7,), ("MLX 4-bit",), ("MLX 4-bit",)),
            Session(_GPU, _ALL, _NEAR, 30, 200, _LOOPS, _GPU, _GPU),
            Session(_GPU, _FEW, _FAR, 15, 100),
        ),
        ops=(OURS, PLAIN, SHIPPED, "llama.cpp Q4_0", "llama.cpp F32"), op_widths=(1, 2, 4, 7, 9, 16),
        op_repeats=15, prompts=2, twin_prompts=2, max_new_tokens=32,
    ),
}  # fmt: skip

LEAST = 3
"""Repeats that even a slow backend gets; a claim asks for more before it decides."""


@dataclass(frozen=True)
class SerialRows:
    """Records of one run, by the schemas of evidence.serial_records and, `sweep`, evidence.sweep_records."""

    curves: list[dict[str, Any]] = field(default_factory=list)
    swaps: list[dict[str, Any]] = field(default_factory=list)
    ops: list[dict[str, Any]] = field(default_factory=list)
    dispatch: list[dict[str, Any]] = field(default_factory=list)
    shares: list[dict[str, Any]] = field(default_factory=list)
    twins: list[dict[str, Any]] = field(default_factory=list)
    sweep: list[dict[str, Any]] = field(default_factory=list)
    absent: list[dict[str, Any]] = field(default_factory=list)


FILES: dict[str, tuple[str, Schema, tuple[str, ...]]] = {
    "curves": ("03_serial_curves", SERIAL_CURVE, CURVE_CODE),
    "swaps": ("03_swaps", SWAP, CURVE_CODE),
    "ops": ("03_op_curves", OP_CURVE, OP_CODE),
    "dispatch": ("03_dispatch", DISPATCH, DISPATCH_CODE),
    "shares": ("03_dispatch_shares", DISPATCH_SHARE, DISPATCH_CODE),
    "twins": ("03_twins", TWIN, TWIN_CODE),
    "sweep": ("03_sweep", SWEEP, DECODING_CODE),
    "absent": ("03_absent", ABSENT, CURVE_CODE),
}
"""Field of SerialRows → file, schema, and the sources that its records depend on."""


def measure_serial(
    plan: SerialPlan,
    opened: Opened,
    profile: str,
    *,
    factory: BackendFactory | None = None,
    layout: Layout | None = None,
    say: Callable[[str], object] = lambda text: None,
) -> SerialRows:
    """Measure what the plan names and record it. Backends that are not here are left out, and said to be.

    `say` is told what comes next. `factory` opens backends (default: over the opened model's own GGUF file).
    """
    layout, factory = layout or Layout(), factory or BackendFactory(opened)
    known_profile(profile)
    sources = _Sources(factory)
    cases = cases_of(load_prompts(), opened.tokenizer, 0, plan.prompts)
    rows = SerialRows()
    gpu = cpu_model() if factory.computes_on_gpu() else None
    provenance = fingerprint(profile, threads=factory.threads, gpu=gpu)
    with ExitStack() as stack:
        stack.enter_context(TorchThreads(factory.threads))
        files = {
            name: stack.enter_context(
                RecordWriter(layout.records(profile), file, schema, provenance, code=code, layout=layout)
            )
            for name, (file, schema, code) in FILES.items()
        }

        def keep(name: str, found: Iterator[dict[str, Any]] | Sequence[dict[str, Any]]) -> None:
            for row in found:
                files[name].append(row)
                getattr(rows, name).append(row)

        say("which kernels ggml would choose")
        tables = dispatch_tables(factory, plan.variants)
        keep("dispatch", tables.dispatch)
        keep("shares", tables.shares)
        for number, session in enumerate(plan.sessions):
            targets = sources.open(session.backends)
            if targets:
                say(f"t(n) of {', '.join(targets)}")
                _measure_session(number, session, plan, targets, factory, cases, opened, keep, say)
            del targets
            gc.collect()
        for name in plan.ops:
            for target in sources.open([name]).values():
                say(f"operations of {name}")
                context = plan.sessions[0].contexts[0]
                keep("ops", op_rows(name, target, opened.checkpoint, plan.op_widths, context, plan.op_repeats))
            gc.collect()
        keep("absent", [{"backend": name, "reason": reason} for name, reason in sources.absent.items()])
    return rows


def measure_arms(targets: Mapping[str, Target], session: Session, seed: int = 0) -> Curves:
    """Every width and context of every target, and its twin's loops, interleaved in random order."""
    arms: dict[tuple[str, str, int, int], Arm] = {}
    for name, target in targets.items():
        for context in session.contexts:
            widest = max((*session.widths, *session.loops))
            tokens = np.random.default_rng(seed).integers(0, target.vocabulary, (1, context + widest))
            timed: list[tuple[str, Target, tuple[int, ...]]] = [("verify", target, session.widths)]
            if session.loops and name in session.twins and context == session.contexts[0]:
                timed.append(("loop", SerialTwin(target), session.loops))
            for arm, each, widths in timed:
                state = each.new_state(1, context + widest)
                each.prefill(state, np.array([0]), [tokens[0, : context + 1]])
                for n in widths:
                    nodes = tokens[:, context : context + n]
                    arms[name, arm, context, n] = verification_arm(each, state, nodes)
    named = {"/".join(map(str, key)): arm for key, arm in arms.items()}
    seconds = interleaved(named, _repeats(named, session), warmup=0, seed=seed)
    return {key: seconds["/".join(map(str, key))] for key in arms}


def _repeats(arms: Mapping[str, Arm], session: Session) -> int:
    """As many as fit the session's seconds, by one call of each arm, which also warms it up."""
    whole = sum(map(once, arms.values()))
    return max(min(LEAST, session.repeats), min(session.repeats, int(session.seconds / whole)))


def _measure_session(
    number: int,
    session: Session,
    plan: SerialPlan,
    targets: Mapping[str, Target],
    factory: BackendFactory,
    cases: Sequence[Case],
    opened: Opened,
    keep: Callable[..., None],
    say: Callable[[str], object],
) -> None:
    samples = measure_arms(targets, session)
    keep("curves", curve_rows(number, samples, factory))
    keep("swaps", swap_rows(number, samples, factory))
    eos = opened.tokenizer.eos_ids
    swept = {name: targets[name] for name in session.swept if name in targets}
    if swept:
        say(f"look-up decoding on {', '.join(swept)}")
        keep("sweep", sweep_rows(swept, samples, cases, plan.k, plan.max_new_tokens, eos))
    for name in session.twins:
        if name in targets:
            say(f"tokens of {name} and its serial twin")
            some = cases[: plan.twin_prompts]
            keep("twins", twin_rows(name, targets[name], factory, some, plan.k, plan.max_new_tokens, eos))


class _Sources:
    """Opens backends, and remembers why some could not be."""

    def __init__(self, factory: BackendFactory):
        self._factory = factory
        self.absent: dict[str, str] = {}

    def open(self, names: Sequence[str]) -> dict[str, Target]:
        found = {}
        for name in names:
            if name in self.absent:
                continue
            try:
                found[name] = self._factory.open(name)
            except NOT_HERE as error:
                self.absent[name] = str(error)
        return found
