"""What this machine has, and what is missing: the first thing to look at when something does not run."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import psutil
import torch

from specdec_core.cache import cache_dir
from specdec_core.evidence.provenance import available_cores, cpu_model, installed_versions
from specdec_core.kernels.gated_delta import triton
from specdec_core.models import llama_library
from specdec_core.models.errors import MissingPackage, ModelError
from specdec_core.models.registry import load, names
from specdec_core.placement import PlacementError
from specdec_core.targets import mlx


def examine_machine() -> Iterator[str]:
    """One line a finding; a line that begins with 'missing' names the remedy."""
    yield f"CPU {cpu_model()}, {available_cores()} cores, {psutil.virtual_memory().total / 2**30:.0f} GiB memory"
    yield f"CUDA {torch.cuda.get_device_name() if torch.cuda.is_available() else 'absent'}"
    yield f"Metal {'present' if torch.backends.mps.is_available() else 'absent'}"
    yield ", ".join(f"{name} {version}" for name, version in installed_versions().items())
    for engine, library in (("llama.cpp", llama_library.library), ("MLX", mlx.library), ("Triton", triton.library)):
        try:
            library()
            yield f"{engine} present"
        except (MissingPackage, PlacementError) as error:
            yield f"missing: {' '.join(str(error).split())}"
    free = shutil.disk_usage(cache_dir("models")).free / 2**30
    yield f"{free:.0f} GiB free for the cache" if free > 2 else f"missing: disk space, {free:.1f} GiB free of 2"
    for name in names():
        try:
            yield f"model {name}: loads, fingerprint {load(name).fingerprint[:12]}"
        except ModelError as error:
            yield f"missing: model {name}: {error}"
