"""Verdicts of the last evaluation, so that `claims` answers at once however many records there are.

They are used only while nothing they depend on has changed: the records, the package, the notebooks, the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Sequence
from pathlib import Path

from specdec_core.cache import CacheError, atomic_write
from specdec_core.evidence.layout import PROFILES, Layout
from specdec_core.evidence.provenance import bytes_hash, device_kinds, device_slug
from specdec_core.evidence.verdicts import Outcome, Verdict
from specdec_core.statistics.intervals import Interval


def recall_verdicts(layout: Layout) -> list[Verdict] | None:
    """The last verdicts, or None if something has changed since (or there are none)."""
    try:
        content = json.loads(_path(layout).read_text(encoding="utf-8"))
        if content["key"] == _key(layout):
            return [_verdict(entry) for entry in content["verdicts"]]
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent or damaged: evaluated again
    return None


def remember_verdicts(verdicts: Sequence[Verdict], layout: Layout) -> None:
    """Keep the verdicts in build/; a folder that cannot be written costs only the next call's time."""
    content = {"key": _key(layout), "verdicts": [dataclasses.asdict(verdict) for verdict in verdicts]}
    with contextlib.suppress(CacheError), atomic_write(_path(layout)) as temporary:
        temporary.write_text(json.dumps(content), encoding="utf-8")


def _path(layout: Layout) -> Path:
    return layout.build / "verdicts.json"


def _key(layout: Layout) -> str:
    places = [*map(layout.records, PROFILES), layout.kept_records]
    files = sorted(
        {path for place in places for path in place.rglob("*.jsonl")} | set(layout.notebooks.glob("*.ipynb"))
    )
    states = [(path, path.stat()) for path in files]
    content = {
        "package": bytes_hash(layout.package),
        "files": [[layout.relative(path), state.st_size, state.st_mtime_ns] for path, state in states],
        "device": [device_slug(), *sorted(device_kinds())],
    }
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


def _verdict(entry: dict) -> Verdict:
    interval = Interval(**entry["interval"]) if entry["interval"] else None
    return Verdict(
        **entry | {"verdict": Outcome(entry["verdict"]), "interval": interval, "evidence": tuple(entry["evidence"])}
    )
