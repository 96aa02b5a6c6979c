"""Invented sweeps with known truth: no model runs in these tests."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specdec_core.evidence.layout import Layout


@dataclass(frozen=True)
class Pair:
    """An invented draft/target pair: conditional acceptance by position, cost terms in target steps."""

    name: str
    backend: str = "skinny f32"
    alpha: Sequence[float] = (0.7, 0.6, 0.5, 0.45, 0.4, 0.4, 0.4, 0.4)
    c: float = 0.02
    s: float = 0.03
    o: float = 0.02
    bias: float = 1.0  # measured over predicted time of the speculative arm
    drafter: str = ""  # default: the pair's name


STEP = 0.03  # seconds of one target pass


def sweep(
    pairs: Sequence[Pair], lengths: Sequence[int] = (1, 2, 4, 6), prompts: int = 32, noise: float = 0.03, seed: int = 0
) -> list[dict[str, Any]]:
    """Sweep rows: half of the prompts tuning, half report; one in eight of either is repetitive and accepts all."""
    generator = np.random.default_rng(seed)
    rows = []
    for pair in pairs:
        for number in range(prompts):
            common = {
                "configuration": pair.name,
                "backend": pair.backend,
                "target": "tiny",
                "drafter": pair.drafter or pair.name,
                "temperature": 0.0,
                "prompt_id": f"p{number:03d}",
                "domain": ("math", "code", "chat")[number % 3],
                "split": ("tuning", "report")[number % 2],
                "repetitive": number % 16 in (0, 1),
                "identical": True,
            }
            jitter = float(np.exp(generator.normal(0, noise)))
            rows.append(common | _arm(pair, 0, 120, generator, jitter, common["repetitive"]))
            for K in lengths:
                jitter = float(np.exp(generator.normal(0, noise)))
                rows.append(common | _arm(pair, K, 120, generator, jitter, common["repetitive"]))
    return rows


def _arm(
    pair: Pair, K: int, tokens: int, generator: np.random.Generator, jitter: float, repetitive: bool
) -> dict[str, Any]:
    tested, accepted = np.zeros(K, int), np.zeros(K, int)
    emitted = passes = 0
    while emitted < tokens:
        passes += 1
        emitted += 1
        for i in range(K):
            tested[i] += 1
            if not repetitive and generator.random() > pair.alpha[i]:
                break
            accepted[i] += 1
            emitted += 1
    draft, verify = passes * K * pair.c * STEP, passes * (1 + K * pair.s) * STEP
    overhead = passes * pair.o * STEP if K else 0.0
    predicted = draft + verify + overhead
    stretch = jitter * (pair.bias if K else 1.0)
    return {
        "K": K,
        "arm": "sd" if K else "ar",
        "tokens": emitted,
        "target_passes": passes,
        "drafted": passes * K,
        "accepted": int(accepted.sum()),
        "drafted_by_position": [passes] * K,
        "tested_by_position": tested.tolist(),
        "accepted_by_position": accepted.tolist(),
        "seconds": predicted * stretch,
        "draft_seconds": draft * stretch,
        "verify_seconds": verify * stretch,
        "overhead_seconds": overhead * stretch,
        "predicted_seconds": predicted,
    }


@pytest.fixture
def layout(tmp_path) -> Layout:
    """An empty checkout with one source file to hash."""
    source = tmp_path / "specdec_core" / "measured.py"
    source.parent.mkdir()
    source.write_text("ANSWER = 1\n")
    (tmp_path / "notebooks").mkdir()
    return Layout(tmp_path)


@pytest.fixture
def write_notebook(layout) -> Callable[..., Path]:
    """Write notebooks/NAME.ipynb from sources: the first is the parameters cell."""
    return partial(notebook, layout.notebooks)


def notebook(folder: Path, name: str, *sources: str) -> Path:
    cells = [
        {
            "cell_type": "code",
            "execution_count": None,
            "id": f"cell-{number}",
            "metadata": {} if number else {"tags": ["parameters"]},
            "outputs": [],
            "source": source,
        }
        for number, source in enumerate(sources)
    ]
    kernel = {"display_name": "Some Python", "language": "python", "name": "python3"}
    content = {"cells": cells, "metadata": {"kernelspec": kernel}, "nbformat": 4, "nbformat_minor": 5}
    path = folder / f"{name}.ipynb"
    path.write_text(json.dumps(content))
    return path


@pytest.fixture
def make_pair() -> type[Pair]:
    return Pair


@pytest.fixture
def make_sweep() -> Callable[..., list[dict[str, Any]]]:
    return sweep


@pytest.fixture(scope="session")
def five_pairs() -> list[dict[str, Any]]:
    """Five configurations over two backends: two win, one verifies serially, one drafts slowly, one accepts nothing."""
    return sweep(
        [
            Pair("skinny f32 + n-gram", alpha=(0.55, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6, 0.6), c=0.001, s=0.04),
            Pair("skinny f32 + block diffusion", alpha=(0.75, 0.65, 0.6, 0.5, 0.5, 0.5, 0.5, 0.5), c=0.03, s=0.04),
            Pair("llama.cpp Q4_1 + n-gram", backend="llama.cpp", c=0.001, s=0.68),
            Pair("skinny f32 + layer skip", alpha=(0.6,) * 8, c=0.6, s=0.04),
            Pair("llama.cpp Q4_1 + layer skip", backend="llama.cpp", alpha=(0.05,) * 8, c=0.5, s=0.6, o=0.1),
        ],
        lengths=range(1, 9),
        prompts=64,
        seed=3,
    )


@pytest.fixture(scope="session")
def many_pairs() -> list[dict[str, Any]]:
    """As many configurations, backends and long names as a full sweep has, some at T = 1 too."""
    drafters = ("n-gram", "EAGLE chain", "EAGLE tree 5", "EAGLE tree 11", "EAGLE tree 15")
    backends = ("numba float32", "numba int8", "torch float32", "llama.cpp Q4_1", "llama.cpp Q4_0", "MLX 4-bit")
    own = {"numba float32": ("n-gram tree", *drafters, "first 10 layers", "itself", "itself in int8")}
    pairs = [
        Pair(f"{backend} · {drafter}", backend, (0.7 - 0.1 * number,) * 8, 0.05 * number, 0.1 * other, drafter=drafter)
        for other, backend in enumerate(backends)
        for number, drafter in enumerate(own.get(backend, drafters if other == 1 else drafters[:1]))
    ]
    cold, warm = (sweep(some, (1, 2, 4, 8), prompts=8, seed=len(some)) for some in (pairs, pairs[:4]))
    return [*cold, *(row | {"temperature": 1.0} for row in warm)]
