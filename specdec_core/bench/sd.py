"""`bench sd`: conformance first, then t(n), autoregressive and speculative decoding, and a near-tie census.

Takes at most three minutes; needs nothing but the package and the weights; its records replay anywhere.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from tqdm import tqdm

from specdec_core.bench.backend_sweep import cases_of
from specdec_core.bench.conformance import check_conformance
from specdec_core.bench.engine import ENGINE, floor_rows, measure_engine
from specdec_core.bench.greedy import greedy_agreement
from specdec_core.bench.machine import ceiling_row, curve_rows, measure_targets
from specdec_core.bench.sources import DECODING, INT8_PASS, TIMING
from specdec_core.drafters.layer_skip import LayerSkipDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.evidence.lossless_records import GREEDY
from specdec_core.evidence.provenance import cpu_model, fingerprint
from specdec_core.evidence.records import RecordWriter
from specdec_core.evidence.sweep_records import CEILING, COST_CURVE, SWEEP
from specdec_core.measure.clock import peak_memory
from specdec_core.measure.sweep import Configuration, Costs, measure_draft, measure_overhead, sweep
from specdec_core.pairs import open_target
from specdec_core.placement import INT8, Placement
from specdec_core.prompts import load_prompts
from specdec_core.protocol import Drafter
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer

CODE = (*DECODING, *TIMING, "specdec_core/forensics/near_ties.py", "specdec_core/bench")
CONTEXTS, WIDTHS, KS = (128, 512), (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16), (2, 6)


def bench_sd(model: str, placement: Placement, out: Path) -> None:
    """Measure `model` under `placement` and write curves, ceilings, sweep and greedy records into `out`."""
    opened = open_target(model, placement)
    target, backend = opened.target, f"{placement.engine} {placement.dtype} {placement.device}"
    reference = target.float64_reference()
    found = check_conformance(target, reference)
    print(f"conformance, error relative to the largest logit: {found.errors} (tolerance {found.tolerance})")

    gpu = {"cuda": torch.cuda.get_device_name, "mps": cpu_model}.get(placement.torch_device.type, lambda: None)()
    provenance = fingerprint("quick", threads=placement.workers, dtype=placement.dtype, gpu=gpu)

    def writer(what: str, schema) -> RecordWriter:
        code = (*CODE, *INT8_PASS) if placement.dtype == INT8 else CODE
        return RecordWriter(out, f"bench_sd_{what}", schema, provenance, code=code)

    samples, best = measure_targets({backend: target}, WIDTHS, CONTEXTS, repeats=25)
    ceiling = ceiling_row(backend, target, best)
    with writer("curves", COST_CURVE) as curves, writer("ceilings", CEILING) as ceilings:
        ceilings.append(ceiling)
        for row in curve_rows(backend, backend, samples[backend]):
            curves.append(row)
    _print_curve(samples[backend], ceiling)
    if placement.engine == "numba":
        with writer("engine", ENGINE) as file:
            rows = floor_rows(samples[backend].seconds, best["read"], ceiling)
            rows += measure_engine(opened.checkpoint, target, target.placed(Placement("torch")), repeats=5)
            for row in rows:
                file.append(row)
                print("{what}: {ratio:.2f} [{low:.2f}, {high:.2f}], {bound} {threshold:g}".format(**row))

    cases = cases_of(load_prompts(), opened.tokenizer, 1, 1)
    options = Options(max_new_tokens=32, eos=opened.tokenizer.eos_ids)
    half = target.config.layers // 2
    drafters: dict[str, tuple[Drafter, Transformer | None]] = {
        "n-gram": (NGramDrafter(), None),
        "layer skip": (LayerSkipDrafter(target, half), target.early_exit(half)),
    }
    configurations = [Configuration(f"{backend} · {name}", backend, model, name, target, drafter, step)
                      for name, (drafter, step) in drafters.items()]  # fmt: skip
    overhead = measure_overhead(target, cases[0])
    costs = {c.name: Costs(samples[backend].curve(), measure_draft(c, CONTEXTS[0]), overhead) for c in configurations}
    with writer("sweep", SWEEP) as file:
        for row in sweep(configurations, costs, cases, KS, options, progress=lambda these: tqdm(these, "sweep")):
            file.append(row)
    print(f"overhead of a round: {overhead * 1e3:.2f} ms, {overhead / samples[backend].curve().at(1, 128):.3f} t(1)")

    with writer("greedy", GREEDY) as file:
        census = greedy_agreement(
            backend, target, reference, {name: drafter for name, (drafter, _) in drafters.items()}, cases,
            replace(options, max_new_tokens=24),
        )  # fmt: skip
        rows = []
        for row in tqdm(census, "near-tie census", total=len(cases) * len(drafters)):
            file.append(row)
            rows.append(row)
    differing = [row for row in rows if not row["identical"]]
    wrong = [row for row in differing if not row["certified"]]
    print(f"greedy SD against AR: {len(rows)} outputs, {len(differing)} differ, {len(wrong)} of them uncertified")
    print(f"peak memory {peak_memory() / 2**30:.2f} GiB; records in {out}")


def _print_curve(samples, ceiling) -> None:
    floor = ceiling["weight_bytes"] / ceiling["bytes_per_second"]
    print(
        f"floor {floor * 1e3:.1f} ms = {ceiling['weight_bytes'] / 1e6:.0f} MB at "
        f"{ceiling['bytes_per_second'] / 1e9:.1f} GB/s; {ceiling['flops_per_second'] / 1e9:.0f} GFLOP/s"
    )
    curve = samples.curve()
    for context in curve.contexts:
        line = "  ".join(f"t({n}) {curve.at(n, context) / floor:.2f}" for n in curve.widths)
        print(f"context {context}, in floors: {line}")
