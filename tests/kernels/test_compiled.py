import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from specdec_core.kernels.compiled import KERNELS, code_folder, source_key

USE = """
import sys, time, warnings
import numpy as np
start = time.perf_counter()
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    from specdec_core.kernels.skinny_linear.numba import PackedLinear, _linear, _pack
weight = np.arange(12, dtype=np.float32).reshape(3, 4)
assert (PackedLinear(weight, threads=1)(np.ones((1, 4), np.float32)) == weight.sum(1)).all()
hits = sum(sum(each.stats.cache_hits.values()) for each in (_linear, _pack))
print(hits, sum("cannot be kept on disk" in str(each.message) for each in caught))
"""


def use(cache: Path) -> list[int]:
    """Functions loaded from disk and warnings about the cache, of a fresh process."""
    environment = {**os.environ, "SPECDEC_CACHE": str(cache)}
    done = subprocess.run([sys.executable, "-c", USE], env=environment, check=True, capture_output=True, timeout=300)
    return [int(number) for number in done.stdout.split()]


def test_a_second_process_loads_what_the_first_compiled(tmp_path):
    assert use(tmp_path) == [0, 0]
    assert use(tmp_path) == [2, 0]
    assert [folder.name for folder in (tmp_path / "numba").iterdir()] == [source_key(KERNELS)]


def test_a_cache_that_cannot_be_written_costs_one_warning(tmp_path):
    (tmp_path / "file").write_text("no folder can be made below a file")
    assert use(tmp_path / "file") == [0, 1]


def test_a_read_only_cache_costs_one_warning(monkeypatch):
    def refuse(**how):
        raise PermissionError(13, "Permission denied")

    # Root may write where the mode bits forbid it, so the refusal is played.
    monkeypatch.setattr("tempfile.TemporaryFile", refuse)
    with pytest.warns(RuntimeWarning, match="compiled kernels cannot be kept on disk.*Permission denied"):
        assert code_folder.__wrapped__() is None


def test_the_key_follows_every_source(tmp_path):
    copy = tmp_path / "kernels"
    shutil.copytree(KERNELS, copy, ignore=shutil.ignore_patterns("__pycache__"))
    before = source_key(copy)
    assert before == source_key(KERNELS)
    panel = copy / "skinny_linear" / "panel.py"
    panel.write_bytes(panel.read_bytes().replace(b"multiply_add", b"multiply_sub"))
    edited = source_key(copy)
    (copy / "simd.py").rename(copy / "lanes.py")
    assert len({before, edited, source_key(copy)}) == 3


def test_the_key_follows_the_compilers(monkeypatch):
    before = source_key(KERNELS)
    monkeypatch.setattr("numba.__version__", "0.0.0")
    assert source_key(KERNELS) != before


def test_the_key_ignores_forms_that_are_not_compiled(tmp_path):
    (tmp_path / "torch.py").write_text("one")
    before = source_key(tmp_path)
    (tmp_path / "torch.py").write_text("two")
    assert source_key(tmp_path) == before
