"""llama.cpp's library through llama-cpp-python's low-level names: imported late, silenced, its last complaint kept."""

from __future__ import annotations

import ctypes
from collections import deque
from functools import cache
from types import ModuleType
from typing import Any

from specdec_core.models.errors import MissingPackage

_ERROR = 4  # ggml_log_level; 5 continues the line before
_CONTINUED = 5


@cache
def library() -> ModuleType:
    """The module `llama_cpp.llama_cpp`. Raises MissingPackage if it is not installed or does not load here."""
    try:
        from llama_cpp import llama_cpp
    except (ImportError, RuntimeError, FileNotFoundError, OSError) as error:
        raise MissingPackage(
            f"llama.cpp is not here ({type(error).__name__}: {error}): run `make setup` on a machine with a C++ "
            "compiler, which builds llama-cpp-python"
        ) from error
    _log.callback = llama_cpp.llama_log_callback(_log)
    llama_cpp.llama_log_set(_log.callback, ctypes.c_void_p(0))
    llama_cpp.llama_backend_init()
    return llama_cpp


def build() -> str:
    """What this build of llama.cpp was compiled for: its version, and the processor features that its kernels use."""
    llama = library()
    return f"{llama.llama_version().decode()} {llama.llama_print_system_info().decode().strip()}"


class _Log:
    """Takes what llama.cpp would print; remembers its errors."""

    def __init__(self) -> None:
        self.errors: deque[str] = deque(maxlen=8)
        self.callback: Any = None  # must outlive the library, which keeps a pointer to it
        self._level = 0

    def __call__(self, level: int, text: bytes, user_data: object) -> None:
        self._level = self._level if level == _CONTINUED else level
        line = text.decode("utf-8", "replace").strip()
        if self._level == _ERROR and line:
            self.errors.append(line)


_log = _Log()


def forget_complaints() -> None:
    """Before a call that may fail: what is complained of after it belongs to it."""
    _log.errors.clear()


def complaint() -> str:
    """What llama.cpp said of its last failure."""
    return "; ".join(_log.errors) or "it gives no reason"
