"""t(n) of targets against what the machine allows, all in one interleaved run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from specdec_core.measure.ceilings import gemm_arm, peak_arithmetic, read_arm, read_bandwidth
from specdec_core.measure.clock import interleaved
from specdec_core.measure.curves import CurveSamples, curve_arms
from specdec_core.placement import INT8, Placement
from specdec_core.statistics.intervals import median_interval
from specdec_core.targets.transformer import Transformer

WIDTHS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16)


def measure_targets(
    targets: Mapping[str, Transformer],
    widths: Sequence[int] = WIDTHS,
    contexts: Sequence[int] = (128,),
    repeats: int = 15,
    seed: int = 0,
) -> tuple[dict[str, CurveSamples], dict[str, np.ndarray]]:
    """Samples of t(n) of each target, and seconds of the two ceiling arms ('read', 'gemm') of the same run."""
    device = next(iter(targets.values())).placement.torch_device
    arms = {"read": read_arm(device), "gemm": gemm_arm(device)}
    for name, target in targets.items():
        of_target = curve_arms(target, widths, contexts, seed=seed)
        arms |= {f"{name}/{context}/{width}": arm for (context, width), arm in of_target.items()}
    seconds = interleaved(arms, repeats, warmup=2, seed=seed)
    samples = {
        name: CurveSamples({(c, w): seconds[f"{name}/{c}/{w}"] for c in contexts for w in widths}) for name in targets
    }
    return samples, {name: seconds[name] for name in ("read", "gemm")}


def curve_rows(name: str, backend: str, samples: CurveSamples) -> list[dict[str, Any]]:
    """Records 'cost_curve': median t(n) with its bootstrap interval at every width and context."""
    rows = []
    for (context, width), seconds in sorted(samples.seconds.items()):
        median = median_interval(seconds)
        rows.append(
            {
                "configuration": name,
                "backend": backend,
                "n": width,
                "context": context,
                "seconds_median": median.estimate,
                "seconds_low": median.low,
                "seconds_high": median.high,
                "samples": len(seconds),
            }
        )
    return rows


def ceiling_row(name: str, target: Transformer, ceilings: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Record 'ceiling': what one pass of this target must read and compute, and what the machine gives at best.

    The best of the repeats stands for the machine: a ceiling is what it can do, not what it did while disturbed.
    """
    parameters = matrix_parameters(target)
    return {
        "configuration": name,
        "weight_bytes": parameters * bytes_a_weight(target.placement),
        "flops_per_token": 2.0 * parameters,
        "bytes_per_second": read_bandwidth(float(ceilings["read"].min())),
        "flops_per_second": peak_arithmetic(float(ceilings["gemm"].min())),
    }


def bytes_a_weight(placement: Placement) -> float:
    """What one weight of a matrix takes: in int8 a byte, and its share of the scale of a group of 64."""
    return 1 + 4 / 64 if placement.dtype == INT8 else float(placement.torch_dtype.itemsize)


def matrix_parameters(target: Transformer) -> int:
    """Weights that every pass reads once: all matrices of the layers, and the head (an embedding is only looked up)."""
    c = target.config
    attention = c.hidden_size * c.head_dim * (2 * c.heads + 2 * c.kv_heads)
    return c.layers * (attention + 3 * c.hidden_size * c.intermediate_size) + c.vocabulary * c.hidden_size
