"""The ignored cache folder: where it is, writing to it atomically, and one writer at a time.

Whatever is written here can be made again, so a file is either whole or absent. A writer works on a temporary
neighbour (same folder, hence same file system) and renames it into place; a killed writer leaves only that neighbour,
which the next holder of the path's lock removes.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from filelock import FileLock, Timeout

VARIABLE = "SPECDEC_CACHE"
_logger = logging.getLogger(__name__)


class CacheError(OSError):
    """A file or folder could not be written; the message names it, and nothing of it was left behind."""


def cache_root() -> Path:
    """`$SPECDEC_CACHE` if set, else `.cache` in the checkout the package runs from, else `~/.cache/specdec`."""
    chosen = os.environ.get(VARIABLE)
    if chosen:
        return Path(chosen).expanduser().absolute()
    above = Path(__file__).resolve().parent.parent
    if (above / "pyproject.toml").is_file():
        return above / ".cache"
    return Path.home() / ".cache" / "specdec"


def cache_dir(name: str) -> Path:
    """The folder `name` (for instance `models` or `kernels/avx2`) below `cache_root()`, created if absent.

    Raises ValueError for a name that would leave the cache, CacheError if the folder cannot be created.
    """
    folder = _inside(name)
    with _naming(folder):
        folder.mkdir(parents=True, exist_ok=True)
    return folder


@contextlib.contextmanager
def exclusive(name: str) -> Iterator[Path]:
    """Hold the lock of the cache path `name`, across threads and processes, and yield that path.

    A second caller waits; once inside it should look first whether the work is done. Leftovers that a killed writer
    of this very path left are removed on entry. The path itself is not created, only the folder above it. The lock
    belongs to the open file, so a killed process releases it. Not reentrant.
    """
    path = _inside(name)
    locks = cache_dir("locks")
    lock = FileLock(locks / (name.replace("/", "__") + ".lock"), thread_local=False)
    try:
        lock.acquire(timeout=2.0)
    except Timeout:
        _logger.warning("waiting for another run that is working on %s", path)
        lock.acquire()
    try:
        with _naming(path):
            path.parent.mkdir(parents=True, exist_ok=True)
        remove_leftovers(path)
        yield path
    finally:
        lock.release()


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[Path]:
    """Yield a temporary path to write; on leaving, it is synced to disk and replaces `path` in one step.

        with atomic_write(folder / "record.jsonl") as temporary:
            temporary.write_text(text)

    If the body raises, the temporary file is removed and `path` stays what it was. Disk full and the like raise
    CacheError naming `path`; any other exception passes through unchanged.
    """
    path = Path(path)
    with _naming(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    with _temporary(path) as temporary:
        yield temporary
        if not temporary.is_file():
            raise FileNotFoundError(f"nothing was written to {temporary}, so {path} was left as it was")
        _sync(temporary)
        os.replace(temporary, path)
        _sync_folder(path.parent)


@contextlib.contextmanager
def atomic_folder(path: str | Path) -> Iterator[Path]:
    """Yield an empty temporary folder to fill; on leaving, its files are synced and it becomes `path`.

    An existing folder at `path` is replaced whole: a moment passes between its removal and the rename, during which
    a reader finds no folder but never a mixture. Writers must hold the path's lock (`exclusive`). Errors as in
    `atomic_write`.
    """
    path = Path(path)
    with _temporary(path) as temporary:
        temporary.mkdir(parents=True)
        yield temporary
        for file in sorted(temporary.rglob("*")):
            if file.is_file():
                _sync(file)
        _sync_folder(temporary)
        if path.exists():
            # A full folder cannot be renamed over, so the old one steps aside under a name that counts as a leftover.
            aside = _temporary_name(path)
            os.replace(path, aside)
            os.replace(temporary, path)
            shutil.rmtree(aside, ignore_errors=True)
        else:
            os.replace(temporary, path)
        _sync_folder(path.parent)


def leftovers(path: str | Path) -> list[Path]:
    """Temporary files and folders that killed writers of `path` left beside it, sorted."""
    path = Path(path)
    pattern = re.compile(re.escape(f".{path.name}.") + r"[0-9a-f]{16}\.tmp")
    if not path.parent.is_dir():
        return []
    return sorted(entry for entry in path.parent.iterdir() if pattern.fullmatch(entry.name))


def remove_leftovers(path: str | Path) -> None:
    """Remove what `leftovers` lists. Only for the holder of the path's lock: an active writer's file looks the same."""
    for entry in leftovers(path):
        _logger.info("removing %s, left by a run that was killed", entry)
        _remove(entry)


def _inside(name: str) -> Path:
    parts = name.split("/")
    if not all(parts) or any(part in {".", ".."} for part in parts) or os.path.isabs(name):
        raise ValueError(f"a cache name is a relative path without '.' or '..', such as 'models/tiny'; got {name!r}")
    return cache_root().joinpath(*parts)


def _temporary_name(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


@contextlib.contextmanager
def _temporary(path: Path) -> Iterator[Path]:
    temporary = _temporary_name(path)
    try:
        with _naming(path, temporary):
            yield temporary
    finally:
        _remove(temporary)


@contextlib.contextmanager
def _naming(path: Path, temporary: Path | None = None) -> Iterator[None]:
    """Turn an OSError about `path` or its temporary neighbour into one that says what failed and what to do."""
    try:
        yield
    except CacheError:
        raise
    except OSError as error:
        # A write that fails names no file; one that names another file (a source that is missing) is not ours.
        if error.filename is not None and not _concerns(str(error.filename), path, temporary):
            raise
        if error.errno is None:
            raise
        full = error.errno in {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
        advice = "free some space there" if full else "make its folder one that can be written"
        if path.is_relative_to(cache_root()):
            advice += f", or set {VARIABLE} to another folder"
        raise CacheError(
            error.errno, f"cannot write {path}: {error.strerror}. Nothing of it was left behind; {advice}"
        ) from error


def _concerns(filename: str, path: Path, temporary: Path | None) -> bool:
    named = Path(filename)
    ours = [path, *path.parents] if temporary is None else [path, path.parent, temporary]
    return named in ours or (temporary is not None and temporary in named.parents)


def _sync(file: Path) -> None:
    descriptor = os.open(file, os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    # Best effort: it makes the rename itself survive a power cut, and some systems cannot open or sync a folder.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _remove(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry, ignore_errors=True)
    else:
        entry.unlink(missing_ok=True)
