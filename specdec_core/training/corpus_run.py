"""`train corpus`: let the target answer prompts of our templates, and join its answers into one file."""

from __future__ import annotations

from pathlib import Path

from specdec_core.cache import cache_dir
from specdec_core.evidence.layout import Layout, known_profile
from specdec_core.pairs import open_target
from specdec_core.training.corpus import PLANS, corpus_path, generate_corpus, join_corpus


def write_corpus(profile: str, model: str, *, layout: Layout | None = None, progress: bool = False) -> Path:
    """Write the profile's corpus; an interrupted run goes on. The full one is the file that is committed, the quick one
    lies under build/."""
    plan, opened = PLANS[known_profile(profile)], open_target(model)
    folder = cache_dir(f"corpus/{profile}")
    generate_corpus(plan, opened, folder, progress)
    build = (layout or Layout()).build
    path = corpus_path(opened) if profile == "full" else build / f"corpus-{corpus_path(opened).name}"
    path.parent.mkdir(parents=True, exist_ok=True)
    join_corpus(plan, opened, folder, path)
    return path
