"""One list of pins: requirements.txt; environment.yml is the conda way to the same."""

import re
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parent.parent
PIN = re.compile(r"[A-Za-z0-9_.-]+(\[[a-z0-9]+\])?==[0-9][A-Za-z0-9.!+]*(; [a-z_]+ (==|in) [^;#]+)?")
FILES = ["requirements.txt", "requirements-weights.txt", "requirements-backends.txt"]


def pins(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


def requirements(name: str = "requirements.txt") -> list[str]:
    return pins((ROOT / name).read_text(encoding="utf-8"))


def environment() -> list:
    return yaml.safe_load((ROOT / "environment.yml").read_text(encoding="utf-8"))["dependencies"]


def test_conda_installs_the_same_pins():
    (by_pip,) = [entry["pip"] for entry in environment() if isinstance(entry, dict)]
    assert sorted(by_pip) == sorted(requirements())


@pytest.mark.parametrize("name", FILES)
def test_every_pin_is_exact(name):
    assert requirements(name) and all(PIN.fullmatch(pin) for pin in requirements(name))


@pytest.mark.parametrize(
    "loose",
    [
        "torch",
        "torch>=2",
        "torch==2.*",
        "torch~=2.13",
        "torch==2.13.0,<3",
        "git+https://x",
        "mlx[cpu]",
        "mlx[cpu]>=0.32",
        'triton; sys_platform == "linux"',
        "torch==2.13.0; ",
    ],
)
def test_a_loose_pin_is_seen(loose):
    assert not PIN.fullmatch(loose)


def test_no_package_is_pinned_twice():
    pinned = [pin for file in FILES for pin in requirements(file)]
    names = [re.sub(r"[-_.]+", "-", re.split(r"==|\[", pin)[0]).lower() for pin in pinned]
    assert len(set(names)) == len(names)


def test_conda_brings_only_python_and_pip():
    assert [entry for entry in environment() if isinstance(entry, str)] == ["python=3.12", "pip"]


@pytest.mark.parametrize("name", FILES[1:])
def test_what_is_installed_apart_is_not_among_the_pins_that_stop_the_set_up(name):
    assert not set(requirements(name)) & set(requirements())


def test_the_set_up_installs_every_list_and_again_when_one_changes():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    rules = re.findall(r"^\$\(\w+\):(.*)$", makefile, flags=re.MULTILINE)
    assert all(any(name in rule.split() for rule in rules) for name in FILES)
