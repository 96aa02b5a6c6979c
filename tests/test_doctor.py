import shutil
from collections import namedtuple

import pytest

from specdec_core import doctor
from specdec_core.evidence.provenance import available_cores, cpu_model
from specdec_core.models.errors import MissingPackage
from specdec_core.models.registry import load, names
from specdec_core.placement import PlacementError

Usage = namedtuple("Usage", "total used free")


def test_it_names_machine_devices_packages_room_and_models():
    lines = list(doctor.examine_machine())
    assert lines[0].startswith(f"CPU {cpu_model()}, {available_cores()} cores, ") and lines[0].endswith(" GiB memory")
    assert lines[1].startswith("CUDA ") and lines[2] in ("Metal present", "Metal absent")
    assert "torch 2." in lines[3] and "numpy 2." in lines[3]
    for name in names():
        assert f"model {name}: loads, fingerprint {load(name).fingerprint[:12]}" in lines


def test_an_engine_that_is_not_installed_comes_with_its_remedy(monkeypatch):
    def fail():
        raise MissingPackage("llama.cpp is not here\n(gone): run `make setup`")

    monkeypatch.setattr(doctor.llama_library, "library", fail)
    assert "missing: llama.cpp is not here (gone): run `make setup`" in list(doctor.examine_machine())


def test_triton_is_told_of_though_only_a_gpu_needs_it(monkeypatch):
    def fail():
        raise PlacementError("Triton is not here: use the torch form")

    monkeypatch.setattr(doctor.triton, "library", lambda: None)
    assert "Triton present" in list(doctor.examine_machine())
    monkeypatch.setattr(doctor.triton, "library", fail)
    assert "missing: Triton is not here: use the torch form" in list(doctor.examine_machine())


def test_findings_are_one_line_each():
    assert all("\n" not in line and line for line in doctor.examine_machine())


def test_a_model_that_cannot_be_loaded_comes_with_its_remedy(monkeypatch):
    def fail(name):
        raise MissingPackage("it comes in a package that is not installed: pip install it")

    monkeypatch.setattr(doctor, "load", fail)
    lines = list(doctor.examine_machine())
    assert f"missing: model {names()[0]}: it comes in a package that is not installed: pip install it" in lines


@pytest.mark.parametrize(
    ("free", "line"), [(1.5, "missing: disk space, 1.5 GiB free of 2"), (7.0, "7 GiB free for the cache")]
)
def test_room_for_the_cache(monkeypatch, free, line):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, int(free * 2**30)))
    assert line in list(doctor.examine_machine())
