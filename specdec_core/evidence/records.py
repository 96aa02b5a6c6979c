"""Records: one JSONL file a run, a header line and then one line a measurement. Nothing measured is lost by a crash.

A run writes to `NAME.partial.jsonl` and its file becomes `NAME.jsonl` when it is closed, so a complete file is only
ever replaced by another complete one. A killed run leaves its partial file, readable up to the last whole line; the
next run of the same name sets it aside as `NAME.interrupted-N.jsonl`, having taken from `left_over` what it can use.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import time
import warnings
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from specdec_core.evidence.layout import PROFILES, Layout
from specdec_core.evidence.provenance import Provenance, code_hash
from specdec_core.evidence.schemas import RecordError, Schema

try:
    import fcntl
except ImportError:  # Windows has none; there two runs at once are told apart by the runner's lock alone
    fcntl = None  # type: ignore[assignment]

_SYNC_EVERY = 3.0  # seconds of measurements that a power cut may cost
_UNFINISHED = (".partial.jsonl", ".interrupted-")


@dataclass(frozen=True)
class RecordFile:
    """A file of records as found on disk. `kept`: a committed one, under data/records/<device>/."""

    path: Path
    header: dict[str, Any]
    kept: bool

    @property
    def device(self) -> str:
        return str(self.header["provenance"].get("device", "unknown"))

    @property
    def accelerator(self) -> str:
        return str(self.header["provenance"].get("hardware", {}).get("accelerator", "cpu"))

    @property
    def profile(self) -> str:
        return str(self.header["provenance"].get("run", {}).get("profile", "unknown"))

    def is_stale(self, layout: Layout) -> bool:
        """Whether the code that made these records is no longer the code in this checkout."""
        code = self.header["code"]
        try:
            return bool(code_hash(code["paths"], layout) != code["hash"])
        except FileNotFoundError:
            return True


class RecordWriter:
    """Appends records to one file; every append is one atomic line, validated before it is written.

        with RecordWriter(layout.records(profile), "02_sweep", SWEEP, fingerprint(profile), code=PATHS) as writer:
            writer.append({...})

    code  files and folders (relative to the root) that made the records: their hash goes into the header, and a
          verdict from these records fails once it changes. Name what could change a number, and no more.

    Raises RecordError for a bad record (the file stays valid and open), for a file that another run is writing, and,
    as OSError's own kind, for a full disk (the half line is taken back first).
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        schema: Schema,
        provenance: Provenance | dict[str, Any],
        *,
        code: Sequence[str],
        layout: Layout | None = None,
    ) -> None:
        if not name or "/" in name or any(mark in f"{name}.jsonl" for mark in _UNFINISHED):
            raise RecordError(f"{name!r} cannot name a file of records: expected a plain name such as '02_sweep'")
        self.schema = schema
        self.path = Path(folder) / f"{name}.jsonl"
        self.partial = Path(folder) / f"{name}.partial.jsonl"
        self.count = 0
        header = {
            "schema": schema.name,
            "version": schema.version,
            "fields": schema.describe(),
            "created": datetime.now(UTC).isoformat(timespec="milliseconds"),
            "provenance": provenance.as_dict() if isinstance(provenance, Provenance) else provenance,
            "code": {"paths": sorted(code), "hash": code_hash(code, layout)},
        }
        self.partial.parent.mkdir(parents=True, exist_ok=True)
        self._descriptor = self._open_fresh()
        self._synced = time.monotonic()
        self._write_line(header)

    def append(self, record: Any) -> None:
        """Write one record (mapping or dataclass instance)."""
        if self._descriptor is None:
            raise RecordError(f"{self.path.name} is closed: open a new RecordWriter to measure again")
        self._write_line(self.schema.validated(record))
        self.count += 1
        if time.monotonic() - self._synced > _SYNC_EVERY:
            os.fsync(self._descriptor)
            self._synced = time.monotonic()

    def close(self, complete: bool = True) -> Path:
        """Sync and close; a complete run's file takes its final name. Returns where the records are."""
        if self._descriptor is None:
            return self.path
        os.fsync(self._descriptor)
        if complete:
            os.replace(self.partial, self.path)
        os.close(self._descriptor)
        self._descriptor = None
        return self.path if complete else self.partial

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(complete=kind is None)

    def _open_fresh(self) -> int | None:
        flags = os.O_CREAT | os.O_RDWR | os.O_APPEND
        descriptor = os.open(self.partial, flags, 0o644)
        try:
            self._claim(descriptor)
            if os.fstat(descriptor).st_size:
                os.replace(self.partial, self._set_aside())
                os.close(descriptor)
                descriptor = os.open(self.partial, flags, 0o644)
                self._claim(descriptor)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _claim(self, descriptor: int) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            mine = os.fstat(descriptor).st_ino == self.partial.stat().st_ino  # not renamed away since it was opened
        except OSError:
            mine = False
        if not mine:
            raise RecordError(
                f"{self.partial.name} is being written by another run: wait for it to end, or use another name"
            )

    def _set_aside(self) -> Path:
        stem = self.path.name.removesuffix(".jsonl")
        number = 1
        while (aside := self.path.with_name(f"{stem}.interrupted-{number}.jsonl")).exists():
            number += 1
        return aside

    def _write_line(self, content: dict[str, Any]) -> None:
        assert self._descriptor is not None
        line = json.dumps(content, allow_nan=False, separators=(",", ":")).encode() + b"\n"
        before = os.fstat(self._descriptor).st_size
        try:
            while line:  # one write, unless the disk fills up: then the next one tells why
                line = line[os.write(self._descriptor, line) :]
        except OSError as error:
            with contextlib.suppress(OSError):
                os.ftruncate(self._descriptor, before)
            raise OSError(
                error.errno,
                f"cannot append to {self.partial.name}: {error.strerror}. The {self.count} records before are safe",
            ) from error


def read_records(path: Path, schema: Schema | None = None) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(header, records) of a file. A truncated last line is left out with a warning.

    schema  if given, the file must be of this name and version.

    Raises RecordError for a file without a header, of another schema, or broken before its last line.
    """
    *lines, rest = Path(path).read_bytes().split(b"\n")
    if rest:
        warnings.warn(f"{Path(path).name}: the last line is cut off (a run was killed) and left out", stacklevel=2)
    if not lines:
        raise RecordError(f"{Path(path).name} has no header line: the run was killed at once; measure again")
    header, *records = [_parse(path, number, line) for number, line in enumerate(lines, start=1)]
    _check_header(path, header, schema)
    return header, records


def left_over(
    folder: Path,
    name: str,
    schema: Schema,
    provenance: Provenance,
    *,
    code: Sequence[str],
    layout: Layout | None = None,
) -> list[dict[str, Any]]:
    """Whole lines that a killed run of this name left, if this code measured them for this profile on this machine.

    To be asked for before the RecordWriter of the name is opened, which sets that file aside. A file that cannot be
    read, or of another schema, holds none.
    """
    path = Path(folder) / f"{name}.partial.jsonl"
    try:
        header, records = read_records(path, schema)
    except (FileNotFoundError, RecordError):
        return []
    made, mine = header["provenance"], provenance.as_dict()
    file = RecordFile(path, header, kept=False)
    same_machine = all(made.get(key) == mine[key] for key in ("device", "hardware_hash", "software_hash"))
    same_code = sorted(code) == header["code"]["paths"] and not file.is_stale(layout or Layout())
    return records if same_machine and same_code and file.profile == mine["run"]["profile"] else []


def is_current(path: Path, schema: Schema, layout: Layout) -> bool:
    """Whether a complete file of these records is there that this code made."""
    return path.is_file() and not RecordFile(path, read_records(path, schema)[0], kept=False).is_stale(layout)


def find_records(
    schema: Schema | str | None = None,
    *,
    device: str | None = None,
    number: str = "",
    folder: Path | None = None,
    layout: Layout | None = None,
) -> list[RecordFile]:
    """Complete files of records, newest first; those this machine made (build/) before kept ones.

    schema  only records of this schema, or schema name.
    device  only records of this device.
    number  only records of the notebook of this number, '02': files are named NN_name.jsonl.
    folder  look only there (and below), instead of in build/records/ and data/records/.

    Files that cannot be read are left out with a warning.
    """
    layout = layout or Layout()
    name = schema.name if isinstance(schema, Schema) else schema
    places = [folder] if folder is not None else [*map(layout.records, PROFILES), layout.kept_records]
    found = []
    for path in sorted({path for place in places for path in place.rglob(f"{number}*.jsonl")}):
        if any(mark in path.name for mark in _UNFINISHED):
            continue
        header = _header_of(path)
        if header is None or name not in (None, header["schema"]):
            continue
        found.append(RecordFile(path, header, kept=path.is_relative_to(layout.kept_records)))
    if device is not None:
        found = [file for file in found if file.device == device]
    return sorted(found, key=lambda file: (not file.kept, file.header["created"]), reverse=True)


def keep_records(profile: str, layout: Layout | None = None, names: Iterable[str] = ("*",)) -> list[Path]:
    """Copy complete records of this profile from build/ to data/records/<device>/, to be committed."""
    layout = layout or Layout()
    kept = []
    for path in sorted({path for name in names for path in layout.records(profile).glob(f"{name}.jsonl")}):
        header = None if any(mark in path.name for mark in _UNFINISHED) else _header_of(path)
        if header is None:
            continue
        target = layout.kept_records / RecordFile(path, header, kept=True).device / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        kept.append(Path(shutil.copyfile(path, target)))
    return kept


def _header_of(path: Path) -> dict[str, Any] | None:
    try:
        with path.open("rb") as file:
            header = _parse(path, 1, file.readline().rstrip(b"\n"))
        _check_header(path, header, None)
    except (OSError, RecordError) as error:
        warnings.warn(f"left out: {error}", stacklevel=3)
        return None
    return header


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        content = json.loads(line)
    except ValueError:
        content = None
    if not isinstance(content, dict):
        raise RecordError(f"{Path(path).name}, line {number}: expected a JSON object; the file was damaged")
    return content


def _check_header(path: Path, header: dict[str, Any], schema: Schema | None) -> None:
    missing = {"schema", "version", "created", "provenance", "code"} - set(header)
    if missing:
        raise RecordError(f"{Path(path).name}: its first line is no header of records (it lacks {sorted(missing)})")
    if schema is not None and (header["schema"], header["version"]) != (schema.name, schema.version):
        raise RecordError(
            f"{Path(path).name} holds {header['schema']!r} records of version {header['version']}: expected "
            f"{schema.name!r}, version {schema.version}. Measure again with the present code"
        )
