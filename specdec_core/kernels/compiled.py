"""Compiled functions and their disk cache, kept under a key that hashes every source they are made of.

numba's own cache looks at the file of the cached function only: an edited intrinsic or helper in another file would
run stale. So the code is kept in a folder named after the contents of all kernel sources and the compilers' versions.
"""

from __future__ import annotations

import hashlib
import tempfile
import warnings
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import llvmlite
import numba

KERNELS = Path(__file__).parent


def helper(function: Callable[..., Any]) -> Any:
    """Compile a function that only other compiled functions call: it lives in their cached code."""
    return numba.njit(nogil=True, boundscheck=False, error_model="numpy")(function)


def inlined(function: Callable[..., Any]) -> Any:
    """A helper that becomes part of its callers before they are compiled.

    For what calls the micro-kernels: numba compiles whatever a function calls anew for each function that calls it,
    and the micro-kernels are the bulk of the code.
    """
    return numba.njit(nogil=True, boundscheck=False, error_model="numpy", inline="always")(function)


def compiled(function: Callable[..., Any]) -> Any:
    """Compile a function that Python calls, without the GIL, and keep its code on disk for the next process.

    It must not raise and must not depend on globals that change. Where the cache folder cannot be written the function
    is compiled anew in every process (about half a minute for a whole decoder step), which one warning says.
    """
    folder = code_folder()
    if folder is None:
        return helper(function)
    # numba asks its configuration for the folder once, here, where the function is decorated.
    before = numba.config.CACHE_DIR
    numba.config.CACHE_DIR = str(folder)
    try:
        return numba.njit(nogil=True, boundscheck=False, error_model="numpy", cache=True)(function)
    finally:
        numba.config.CACHE_DIR = before


@lru_cache(maxsize=1)
def code_folder() -> Path | None:
    """The folder of compiled code for these sources, or None (after a warning) if it cannot be written."""
    from specdec_core.cache import cache_dir

    try:
        folder = cache_dir("numba") / source_key(KERNELS)
        folder.mkdir(exist_ok=True)
        # Root may create a file where the mode bits forbid it, and a full disk lets a folder but no file be made.
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(b"probe")
    except OSError as error:
        warnings.warn(
            f"compiled kernels cannot be kept on disk ({error}): they are compiled anew in every process, which takes "
            "about half a minute; set SPECDEC_CACHE to a folder that can be written",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
    return folder


def source_key(root: Path) -> str:
    """Hash of the Python sources below `root` (relative paths and contents) and of the compilers' versions.

    Forms in torch (`torch.py`) hold no compiled code: an edit to one leaves the others' code as it is.
    """
    digest = hashlib.sha256(f"numba {numba.__version__} llvmlite {llvmlite.__version__}".encode())
    for file in sorted(root.rglob("*.py")):
        if file.name == "torch.py":
            continue
        content = file.read_bytes()
        digest.update(f"\n{file.relative_to(root).as_posix()} {len(content)}\n".encode())
        digest.update(content)
    return digest.hexdigest()[:16]
