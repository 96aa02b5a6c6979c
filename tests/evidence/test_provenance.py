"""Fingerprints name the machine and the software, and neither host, user nor path."""

from __future__ import annotations

import getpass
import json
import platform
import socket
import subprocess

import pytest

from specdec_core.evidence import provenance
from specdec_core.evidence.provenance import code_hash, device_kinds, device_slug, fingerprint


def test_a_fingerprint_is_complete_and_plain_json():
    made = fingerprint("full", seed=7, threads=1, dtype="bfloat16").as_dict()
    assert json.loads(json.dumps(made)) == made
    assert set(made["hardware"]) == {"cpu", "vectors", "cores", "memory_gib", "accelerator", "gpu"}
    assert set(made["software"]) == {"os", "architecture", "python", "packages", "blas", "pins"}
    assert made["run"]["profile"] == "full" and made["run"]["seed"] == 7 and made["run"]["dtype"] == "bfloat16"
    assert made["software"]["packages"]["numpy"]
    assert made["device"] == device_slug()


def test_no_host_user_or_path_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(socket, "gethostname", lambda: "tell-tale-host")
    monkeypatch.setattr(platform, "node", lambda: "tell-tale-host")
    monkeypatch.setattr(getpass, "getuser", lambda: "tell-tale-user")
    monkeypatch.setenv("HOME", str(tmp_path / "tell-tale-home"))
    text = json.dumps(fingerprint().as_dict())
    assert "tell-tale" not in text
    assert str(provenance.Layout().root) not in text


def test_hashes_follow_what_they_cover_and_nothing_else(monkeypatch):
    before = fingerprint(seed=1)
    assert fingerprint(seed=2).hardware_hash == before.hardware_hash
    assert fingerprint(seed=2).software_hash == before.software_hash
    monkeypatch.setattr(provenance, "cpu_model", lambda: "Other CPU")
    assert fingerprint().hardware_hash != before.hardware_hash
    assert fingerprint().software_hash == before.software_hash
    monkeypatch.setattr(provenance, "installed_versions", lambda: {"numpy": "0"})
    assert fingerprint().software_hash != before.software_hash


@pytest.mark.parametrize(
    ("name", "slug"),
    [
        ("AMD EPYC", "amd-epyc-4c"),
        ("AMD EPYC 7763 64-Core Processor", "amd-epyc-7763-4c"),
        ("Intel(R) Xeon(R) CPU @ 2.20GHz", "intel-xeon-4c"),
        ("11th Gen Intel(R) Core(TM) i7-1185G7 @ 3.00GHz", "intel-core-i7-1185g7-4c"),
        ("AMD Ryzen 7 7840U w/ Radeon 780M Graphics", "amd-ryzen-7-7840u-4c"),
        ("Apple M2 Pro", "apple-m2-pro-4c"),
    ],
)
def test_device_slugs(monkeypatch, name, slug):
    monkeypatch.setattr(provenance, "vectors", lambda: "")
    monkeypatch.setattr(provenance, "cpu_model", lambda: name)
    monkeypatch.setattr(provenance, "available_cores", lambda: 4)
    assert device_slug() == slug
    assert device_slug("NVIDIA H200") == f"{slug}-nvidia-h200"


def test_processors_of_one_name_are_told_apart_by_their_vectors(monkeypatch):
    monkeypatch.setattr(provenance, "cpu_model", lambda: "AMD EPYC")
    monkeypatch.setattr(provenance, "available_cores", lambda: 2)
    slugs = {}
    for flags in ("fpu sse4_2 avx avx2 fma", "fpu avx2 avx512f avx512_vnni", "fpu sse4_2", None):
        text = "model name\t: AMD EPYC\n" + (f"flags\t\t: {flags}\n" if flags else "")
        monkeypatch.setattr(provenance.Path, "read_text", lambda self, errors, text=text: text)
        slugs[flags] = device_slug()
    assert list(slugs.values()) == ["amd-epyc-avx2-2c", "amd-epyc-avx512-2c", "amd-epyc-2c", "amd-epyc-2c"]


def test_the_accelerator_is_the_one_used():
    assert fingerprint().hardware["accelerator"] == "cpu"
    assert fingerprint(gpu="NVIDIA H200").hardware["accelerator"] == "cuda"
    assert fingerprint(gpu="Apple M2").hardware["accelerator"] == "mps"
    assert "cpu" in device_kinds()


def test_code_hash_sees_code_and_not_blanks(layout):
    source = layout.package / "measured.py"
    before = code_hash(["specdec_core"], layout)
    source.write_bytes(b"ANSWER = 1   \r\n")
    assert code_hash(["specdec_core/measured.py"], layout) == before
    (layout.package / "__pycache__").mkdir()
    (layout.package / "__pycache__" / "stale.py").write_text("X = 1\n")
    assert code_hash(["specdec_core"], layout) == before
    source.write_text("ANSWER = 2\n")
    assert code_hash(["specdec_core"], layout) != before
    with pytest.raises(FileNotFoundError, match=r"'specdec_core/gone\.py'"):
        code_hash(["specdec_core/gone.py"], layout)


SOURCE = '''"""What it does."""

import os  # a reason


class Café:
    """Über
    lines."""

    LIMIT = 3  # most of them
    """Of what."""

    def f(self, text="# no remark"):
        """One line."""; x = """no docstring"""
        # alone
        return text, x
'''
BARE = '''
import os
class Café:

    LIMIT = 3

    def f(self, text="# no remark"):
        ; x = """no docstring"""
        return text, x
'''


def test_remarks_do_not_count(layout):
    source = layout.package / "measured.py"

    def hashed(text: str) -> str:
        source.write_text(text, encoding="utf-8")
        return code_hash(["specdec_core/measured.py"], layout)

    before = hashed(SOURCE)
    for old, new in (
        ("What it does", "What it did"), ("a reason", "another"), ("Über\n    lines", "Über"), ("# alone\n", "\n"),
        ("most of them", "ößt"), ("Of what", "Of\n what"), ("One line", "Ein ß"), ("\n\n\n", "\n"),
    ):  # fmt: skip
        assert SOURCE.count(old) == 1 and hashed(SOURCE.replace(old, new)) == before, old
    for old, new in (
        ("LIMIT = 3", "LIMIT = 4"), ("# no remark", "# a remark"), ("no docstring", "a docstring"), ("import os", ""),
        ("return text", "return  text"), ("Café", "Cafe"),
    ):  # fmt: skip
        assert SOURCE.count(old) == 1 and hashed(SOURCE.replace(old, new)) != before, old
    assert hashed(BARE) == before, "what remains cannot be parsed, and counts as it is"
    assert hashed("def (") != hashed("def ( # x")


def test_code_hash_depends_on_names_not_on_order(layout):
    other = layout.package / "other.py"
    other.write_text("B = 1\n")
    names = ["specdec_core/measured.py", "specdec_core/other.py"]
    both = code_hash(names, layout)
    assert code_hash(reversed(names), layout) == both == code_hash(["specdec_core", *names], layout)
    other.rename(layout.package / "renamed.py")
    assert code_hash(["specdec_core"], layout) != both


def test_of_a_notebook_only_the_code_counts(layout):
    path = layout.notebooks / "02_x.ipynb"

    def write(code: str, text: str, outputs: list) -> str:
        cells = [
            {"cell_type": "markdown", "source": [text]},
            {"cell_type": "code", "source": [code], "outputs": outputs},
        ]
        path.write_text(json.dumps({"cells": cells}))
        return code_hash(["notebooks/02_x.ipynb"], layout)

    before = write("x = 1", "words", [])
    assert write("x = 1", "other words", ["output"]) == before
    assert write("x = 2", "words", []) != before


def test_git_state_of_a_checkout(layout):
    assert fingerprint(layout=layout).source == {"commit": None, "dirty": None}

    def git(*arguments: str) -> None:
        subprocess.run(
            ["git", "-c", "user.name=n", "-c", "user.email=e", *arguments],
            cwd=layout.root, check=True, capture_output=True,
        )  # fmt: skip

    git("init")
    git("add", ".")
    git("commit", "-m", "first")
    clean = fingerprint(layout=layout).source
    assert len(clean["commit"]) == 40 and clean["dirty"] is False
    (layout.package / "measured.py").write_text("ANSWER = 3\n")
    assert fingerprint(layout=layout).source == {"commit": clean["commit"], "dirty": True}


def test_the_pin_list_is_covered(layout):
    without = fingerprint(layout=layout)
    (layout.root / "requirements.txt").write_text("numpy==1\n")
    assert fingerprint(layout=layout).software_hash != without.software_hash
