"""The size of the last-level cache, as Linux and macOS tell it."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace

import pytest

from specdec_core.measure import caches
from specdec_core.measure.caches import last_level_cache


@pytest.fixture
def linux(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(caches, "CACHES", tmp_path)
    return tmp_path


def write(folder, *sizes):
    for number, size in enumerate(sizes):
        (folder / f"index{number}").mkdir()
        (folder / f"index{number}" / "size").write_text(f"{size}\n")


@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        (("32K", "32K", "1024K", "32768K"), 32 << 20),
        (("48K", "2M"), 2 << 20),
        (("1G", "64K"), 1 << 30),
        (("4096",), 4096),
        (("0K",), None),
        (("unknown",), None),
        ((), None),
    ],
)
def test_linux_tells_each_level(linux, sizes, expected):
    write(linux, *sizes)
    assert last_level_cache() == expected


def test_macos_tells_it_by_name(monkeypatch):
    told = {"hw.l3cachesize": "", "hw.perflevel0.l2cachesize": "16777216", "hw.l2cachesize": "4194304"}
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", lambda command, **_: SimpleNamespace(stdout=told[command[-1]] + "\n"))
    assert last_level_cache() == 16 << 20


def test_macos_without_the_command_tells_nothing(monkeypatch):
    def missing(*_, **__):
        raise FileNotFoundError("sysctl")

    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(subprocess, "run", missing)
    assert last_level_cache() is None


def test_this_machine_has_one_or_says_that_it_does_not_know():
    assert last_level_cache() is None or last_level_cache() >= 1 << 14
