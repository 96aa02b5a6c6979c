"""Where things lie, whoever asks from wherever."""

from __future__ import annotations

import pytest

from specdec_core.evidence.layout import Layout, known_profile, package_root


def test_the_root_is_the_checkout_wherever_the_caller_stands(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    assert (Layout().package / "evidence" / "layout.py").is_file()
    assert Layout().root == package_root() and Layout().root.is_absolute()


def test_notebooks_are_those_with_a_number_in_order(layout):
    for name in ("02_b.ipynb", "00_a.ipynb", "draft.ipynb", "03_c.txt"):
        (layout.notebooks / name).touch()
    (layout.notebooks / "training").mkdir()
    (layout.notebooks / "training" / "01_train.ipynb").touch()
    assert [path.name for path in layout.find_notebooks()] == ["00_a.ipynb", "02_b.ipynb"]


def test_an_unknown_profile_is_refused(layout):
    with pytest.raises(ValueError, match="unknown profile 'fast': expected one of quick, full"):
        layout.records("fast")
    assert known_profile("full") == "full"
    assert layout.relative(layout.executed("quick")) == "build/notebooks/quick"
