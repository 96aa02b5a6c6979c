"""Ours against what a user would pick instead: each engine's own loop, on the same weights, threads and prompts.

Every peer is tuned on tuning prompts and measured on others. As in the sweep of our own decoders, autoregressive
decoding of every backend runs before and after the speculative arms of a prompt, which come in random order.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from specdec_core.bench.backend_sweep import cases_of, quiet_progress
from specdec_core.bench.peer_decoders import PLAIN, Difference, Peer, PeerRun, Setting, difference, seeded
from specdec_core.bench.peer_llamacpp import FORMATS, llamacpp_peers
from specdec_core.bench.peer_own import DRAFTERS, FLOAT32, INT8, own_peers
from specdec_core.bench.peer_transformers import BACKEND as TRANSFORMERS
from specdec_core.bench.peer_transformers import transformers_peers
from specdec_core.bench.serial_backends import CODE as BACKEND_CODE
from specdec_core.bench.serial_backends import NOT_HERE, BackendFactory
from specdec_core.bench.sources import DECODING, EAGLE, TIMING
from specdec_core.bench.sweep_configurations import trained_drafters
from specdec_core.evidence.layout import Layout, known_profile
from specdec_core.evidence.peer_records import PEER, PEER_TUNING
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter, left_over
from specdec_core.evidence.serial_records import ABSENT
from specdec_core.measure.clock import once
from specdec_core.measure.sweep import Case, is_repetitive
from specdec_core.models.eagle_checkpoint import EagleCheckpoint
from specdec_core.prompts import load_prompts
from specdec_core.protocol import Drafter
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer

CODE = (
    *dict.fromkeys((*BACKEND_CODE, *DECODING, *TIMING)),
    *EAGLE,
    "specdec_core/forensics/huggingface_decoders.py",
    "specdec_core/forensics/near_ties.py",
    *(f"specdec_core/bench/{name}.py" for name in ("backend_sweep", "peers", "peer_decoders", "sweep_configurations")),
    *(f"specdec_core/bench/peer_{engine}.py" for engine in ("transformers", "llamacpp", "own")),
)
"""What the records depend on."""


@dataclass(frozen=True)
class PeerPlan:
    """How much to measure.

    drafts          draft lengths to choose from; ngrams: suffix lengths, where a method looks something up.
    formats         of llama.cpp's files; ours: backends of our own engine that run beside the peers.
    tuning, report  prompts of each domain.
    """

    drafts: tuple[int, ...]
    ngrams: tuple[int, ...]
    formats: tuple[str, ...]
    tuning: int
    report: int
    max_new_tokens: int
    temperatures: tuple[float, ...] = (0.0,)
    ours: tuple[str, ...] = (FLOAT32, INT8)


PLANS = {
    "quick": PeerPlan((3,), (2,), ("Q8_0", "Q4_1"), tuning=1, report=1, max_new_tokens=16),
    "full": PeerPlan((1, 2, 3, 4, 5, 6, 7, 8), (1, 2, 3), FORMATS, tuning=2, report=5, max_new_tokens=48,
                     temperatures=(0.0, 1.0)),
}  # fmt: skip


@dataclass(frozen=True)
class PeerRows:
    """Records of PEER_TUNING, PEER and ABSENT."""

    tuning: list[dict[str, Any]]
    runs: list[dict[str, Any]]
    absent: list[dict[str, Any]]


def open_peers(
    plan: PeerPlan, factory: BackendFactory, drafter: EagleCheckpoint | None = None
) -> tuple[list[Peer], list[dict[str, Any]]]:
    """All peers of the plan that are here, our own first, and records of ABSENT of the others."""
    drafters = dict(DRAFTERS)
    if drafter is not None:
        made = trained_drafters(factory.opened, drafter)
        drafters |= {method: partial(_whatever_target, each) for method, each in made.items()}
    openers: dict[str, Callable[[], list[Peer]]] = {
        backend: partial(own_peers, factory, backend, plan.drafts, drafters) for backend in plan.ours
    }
    openers[TRANSFORMERS] = partial(transformers_peers, factory, plan.drafts, plan.ngrams)
    for kind in plan.formats:
        openers[f"llama.cpp {kind}"] = partial(llamacpp_peers, factory, kind, plan.drafts, plan.ngrams)
    found: list[Peer] = []
    absent: list[dict[str, Any]] = []
    for backend, opener in openers.items():
        try:
            found += opener()
        except NOT_HERE as error:
            absent.append({"backend": backend, "reason": str(error)})
    return found, absent


def _whatever_target(drafter: Drafter, target: Transformer) -> Drafter:
    return drafter


def run_peers(
    plan: PeerPlan,
    factory: BackendFactory,
    profile: str,
    *,
    drafter: EagleCheckpoint | None = None,
    name: str = "02",
    layout: Layout | None = None,
) -> PeerRows:
    """Open, tune and measure all peers of the plan, and our own engine, also with a trained `drafter` whose feature
    layers the target was opened with; recorded as NAME_peer_tuning, NAME_peers and NAME_peer_absent.

    Settings that a killed run had chosen for a peer with all its tries are kept; runs to report start afresh, since
    their ratios pair within one run.
    """
    layout = layout or Layout()
    provenance = fingerprint(known_profile(profile), threads=factory.threads)
    tokenizer = factory.opened.tokenizer
    cases = cases_of(load_prompts(), tokenizer, plan.tuning, plan.report)
    tuned_on, reported_on = ([case for case in cases if case.split == split] for split in ("tuning", "report"))
    peers, absent = open_peers(plan, factory, drafter)
    rows = PeerRows([], [], absent)

    def writer(what: str, schema) -> RecordWriter:
        return RecordWriter(layout.records(profile), f"{name}_{what}", schema, provenance, code=CODE, layout=layout)

    earlier = left_over(
        layout.records(profile), f"{name}_peer_tuning", PEER_TUNING, provenance, code=CODE, layout=layout
    )
    with writer("peer_absent", ABSENT) as file:
        for row in absent:
            file.append(row)
    with writer("peer_tuning", PEER_TUNING) as tuning, writer("peers", PEER) as runs:
        for temperature in plan.temperatures:
            options = Options(temperature, max_new_tokens=plan.max_new_tokens, eos=tokenizer.eos_ids)
            settings = {}
            for peer in peers:
                peer.run(tuned_on[0].tokens, options, peer.settings[0])  # compiles and reads what a first run has to
            for peer in (peer for peer in peers if peer.speculates):
                found = tuned_before(peer, earlier, len(tuned_on), temperature) or tune(peer, tuned_on, options)
                settings[peer.name] = found.best
                for row in found.rows:
                    tuning.append(row)
                    rows.tuning.append(row)
            for row in measure_peers(peers, reported_on, options, settings, progress=quiet_progress):
                runs.append(row)
                rows.runs.append(row)
    return rows


@dataclass(frozen=True)
class Tuned:
    """The fastest setting of a peer, and records of PEER_TUNING of all that were tried."""

    best: Setting
    rows: list[dict[str, Any]]


def tune(peer: Peer, cases: Sequence[Case], options: Options, *, seed: int = 0) -> Tuned:
    """Run every setting on every case, in random order within a case; the one with most tokens a second is best.

    ValueError for cases that are not for tuning, and if no case gave a setting any time to be judged by.
    """
    if not peer.speculates:
        return Tuned(PLAIN, [])
    judged_on = [case.prompt_id for case in cases if case.split != "tuning"]
    if judged_on or not cases:
        raise ValueError(f"cases {judged_on or 'none'}: settings are chosen on prompts of the split 'tuning' only")
    order = np.random.default_rng(seed)
    counted, seconds = dict.fromkeys(peer.settings, 0), dict.fromkeys(peer.settings, 0.0)
    for index, case in enumerate(cases):
        for chosen in order.permutation(len(peer.settings)):
            setting = peer.settings[chosen]
            run = _timed(peer, case, seeded(options, index), setting)
            counted[setting] += run.counted
            seconds[setting] += run.seconds
    timed = [setting for setting in peer.settings if counted[setting]]
    if not timed:
        raise ValueError(f"{peer.name}: no prompt's text went on after its first pass; give it other prompts")
    best = max(timed, key=lambda setting: counted[setting] / seconds[setting])
    rows = [
        {
            "peer": peer.name,
            **_fields(setting),
            "temperature": float(options.temperature),
            "prompts": len(cases),
            "counted": counted[setting],
            "seconds": seconds[setting],
            "chosen": setting == best,
        }
        for setting in timed
    ]
    return Tuned(best, rows)


def tuned_before(peer: Peer, earlier: Sequence[dict[str, Any]], prompts: int, temperature: float) -> Tuned | None:
    """What an earlier run's records of PEER_TUNING say of this peer; None unless it tried every setting."""
    rows = {
        Setting(row["draft"], row["ngram"], row["schedule"]): row
        for row in earlier
        if (row["peer"], row["prompts"], row["temperature"]) == (peer.name, prompts, float(temperature))
    }
    if rows.keys() != set(peer.settings):
        return None
    return Tuned(next(setting for setting, row in rows.items() if row["chosen"]), list(rows.values()))


def measure_peers(
    peers: Sequence[Peer],
    cases: Sequence[Case],
    options: Options,
    settings: Mapping[str, Setting],
    *,
    seed: int = 0,
    progress: Callable[[Sequence[Case]], Any] = iter,
) -> Iterator[dict[str, Any]]:
    """Run every peer on every case at its setting (by peer's name); yields records of PEER.

    `options`: temperature, max_new_tokens, eos and seed. ValueError if a backend has no autoregressive peer or two, and
    for a speculating peer without a setting.
    """
    alone = _autoregressive(peers)
    speculating = [peer for peer in peers if peer.speculates]
    missing = [peer.name for peer in speculating if peer.name not in settings]
    if missing:
        raise ValueError(f"no setting for {', '.join(missing)}: choose one with tune")
    order = np.random.default_rng(seed)
    for index, case in enumerate(progress(cases)):
        own = seeded(options, index)
        before = {backend: _timed(peer, case, own, PLAIN) for backend, peer in alone.items()}
        runs = {}
        for peer in (speculating[i] for i in order.permutation(len(speculating))):
            runs[peer.name] = _timed(peer, case, own, settings[peer.name])
        after = {backend: _timed(peer, case, own, PLAIN) for backend, peer in alone.items()}
        for backend, peer in alone.items():
            for run in (before[backend], after[backend]):
                yield _record(peer, case, own, PLAIN, run, before[backend].tokens)
        for peer in speculating:
            yield _record(peer, case, own, settings[peer.name], runs[peer.name], before[peer.backend].tokens)


def _autoregressive(peers: Sequence[Peer]) -> dict[str, Peer]:
    """Backend → its autoregressive peer."""
    found: dict[str, Peer] = {}
    for peer in peers:
        if not peer.speculates:
            if peer.backend in found:
                raise ValueError(f"{peer.backend} decodes autoregressively twice: expected one such peer a backend")
            found[peer.backend] = peer
    bare = sorted({peer.backend for peer in peers} - found.keys())
    if bare:
        raise ValueError(f"{', '.join(bare)}: no autoregressive peer, which its speculation is compared with; add it")
    return found


def _timed(peer: Peer, case: Case, options: Options, setting: Setting) -> PeerRun:
    """A run after a rest and without the garbage collector."""
    runs: list[PeerRun] = []
    once(lambda: runs.append(peer.run(case.tokens, options, setting)))
    return runs[0]


def _record(
    peer: Peer, case: Case, options: Options, setting: Setting, run: PeerRun, expected: tuple[int, ...]
) -> dict[str, Any]:
    differs = difference(peer, case.tokens, expected, run.tokens, setting.draft) if options.greedy else None
    where = differs or Difference(-1)
    return {
        "peer": peer.name,
        "backend": peer.backend,
        "engine": peer.engine,
        "format": peer.format,
        "file": peer.file,
        "threads": peer.threads,
        "method": peer.method,
        **_fields(setting),
        "temperature": float(options.temperature),
        "prompt_id": case.prompt_id,
        "domain": case.domain,
        "split": case.split,
        "repetitive": is_repetitive(expected),
        "arm": "sd" if peer.speculates else "ar",
        "identical": differs is None if options.greedy else None,
        "difference": where.index,
        "near_tie": where.near_tie,
        "gap": where.gap,
        "epsilon": where.epsilon,
        "tokens": len(run.tokens),
        "counted": run.counted,
        "seconds": run.seconds,
        "passes": run.passes,
    }


def _fields(setting: Setting) -> dict[str, Any]:
    return {"draft": setting.draft, "ngram": setting.ngram, "schedule": setting.schedule}
