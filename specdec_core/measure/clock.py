"""Timing that compares: arms are interleaved in random order within one run, after a warm-up, on a quiet process."""

from __future__ import annotations

import gc
import re
import resource
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from time import perf_counter, sleep

import numpy as np

Arm = Callable[[], object]

SETTLE = 0.02
"""Seconds of rest before an arm: threads of the arm before (OpenMP's) go on spinning for a while after their work."""


def interleaved(arms: Mapping[str, Arm], repeats: int, *, warmup: int = 1, seed: int = 0) -> dict[str, np.ndarray]:
    """Seconds of each arm, `[repeats]`: every repeat runs all arms once, in a fresh random order.

    Drift of the machine then falls on all arms alike, and ratios can be paired by repeat. Arms synchronise their own
    device. The garbage collector rests while the clock runs.
    """
    if repeats < 1 or not arms:
        raise ValueError(f"{repeats} repeats of {len(arms)} arms: expected at least one of each")
    for _ in range(warmup):
        for arm in arms.values():
            arm()
    names = list(arms)
    seconds = {name: np.empty(repeats) for name in names}
    order = np.random.default_rng(seed)
    for repeat in range(repeats):
        for index in order.permutation(len(names)):
            name = names[index]
            seconds[name][repeat] = once(arms[name])
    return seconds


def once(arm: Arm) -> float:
    """Seconds of one call, without the garbage collector."""
    collecting = gc.isenabled()
    gc.disable()
    sleep(SETTLE)
    try:
        start = perf_counter()
        arm()
        return perf_counter() - start
    finally:
        if collecting:
            gc.enable()


def peak_memory() -> int:
    """Largest resident size of this process so far, in bytes."""
    # Linux hands ru_maxrss on to a started process: it would be the parent's where that was larger.
    status = Path("/proc/self/status")
    found = re.search(r"VmHWM:\s+(\d+) kB", status.read_text()) if status.is_file() else None
    if found:
        return 1024 * int(found[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak
