"""Training drafters: the target's own text and its features, and what learns from them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path


def _corpus(profile: str, model: str) -> list[Path]:
    from specdec_core.training.corpus_run import write_corpus

    return write_corpus(profile, model, progress=True)


def _eagle(profile: str, model: str) -> list[Path]:
    from specdec_core.training.eagle_run import train_eagle

    return [train_eagle(profile, model, progress=True).path]


def _serve(profile: str, model: str) -> list[Path]:
    from specdec_core.training.eagle_run import serve_eagle

    return [serve_eagle(profile, model, progress=True).path]


TRAININGS: dict[str, Callable[[str, str], list[Path]]] = {"corpus": _corpus, "eagle": _eagle, "serve": _serve}
"""Name → training(profile, model) → the files that it made; imported when one is run."""
