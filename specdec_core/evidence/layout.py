"""Where things lie in a checkout: notebooks, figures, committed records, and everything a run makes (build/)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

QUICK, FULL = "quick", "full"
PROFILES = (QUICK, FULL)


def package_root() -> Path:
    """The checkout this package runs from: the folder above `specdec_core`, wherever the caller stands."""
    return Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Layout:
    """Folders of one checkout. All paths are absolute; nothing is created by naming it."""

    root: Path = field(default_factory=package_root)

    @property
    def package(self) -> Path:
        return self.root / "specdec_core"

    @property
    def notebooks(self) -> Path:
        return self.root / "notebooks"

    @property
    def figures(self) -> Path:
        return self.root / "figures"

    @property
    def data(self) -> Path:
        return self.root / "data"

    @property
    def kept_records(self) -> Path:
        """Committed records, one folder a device."""
        return self.data / "records"

    @property
    def build(self) -> Path:
        """Everything that a run makes and that can be made again; ignored by git."""
        return self.root / "build"

    def records(self, profile: str) -> Path:
        """Records that the notebooks of this profile wrote on this machine."""
        return self.build / "records" / known_profile(profile)

    def executed(self, profile: str) -> Path:
        """Executed copies of the notebooks."""
        return self.build / "notebooks" / known_profile(profile)

    def find_notebooks(self) -> list[Path]:
        """Notebooks that a reproduction runs, in order: `NN_name.ipynb` directly under notebooks/."""
        return sorted(path for path in self.notebooks.glob("*.ipynb") if re.match(r"\d\d_", path.name))

    def relative(self, path: Path) -> str:
        """`path` as written in records and reports: from the root, with forward slashes."""
        return path.resolve().relative_to(self.root.resolve()).as_posix()


def known_profile(profile: str) -> str:
    """The profile itself; ValueError naming the known ones for any other."""
    if profile not in PROFILES:
        raise ValueError(f"unknown profile {profile!r}: expected one of {', '.join(PROFILES)}")
    return profile
