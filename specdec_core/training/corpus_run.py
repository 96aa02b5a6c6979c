"""`train corpus`: let the target answer questions, and join its answers into one file a source."""

from __future__ import annotations

from pathlib import Path

from specdec_core.cache import cache_dir
from specdec_core.evidence.layout import Layout, known_profile
from specdec_core.pairs import open_target
from specdec_core.training.corpus import Corpus, corpus_path
from specdec_core.training.corpus_generation import PLANS, generate_corpus, join_corpus, written


def write_corpus(profile: str, model: str, *, layout: Layout | None = None, progress: bool = False) -> list[Path]:
    """Write the profile's corpus, a file a source; an interrupted run goes on, and a file that is of its plan stays.

    The full one's files are those that are committed, the quick one's lie under build/.
    """
    opened, build = open_target(model), (layout or Layout()).build
    paths, earlier = list[Path](), list[Corpus]()
    for plan in PLANS[known_profile(profile)]:
        path = corpus_path(opened, plan.source)
        if profile != "full":
            path = build / f"corpus-{path.name}"
        if (corpus := written(plan, opened, path)) is None:
            folder = cache_dir(f"corpus/{profile}-{plan.source}")
            generate_corpus(plan, opened, folder, progress)
            path.parent.mkdir(parents=True, exist_ok=True)
            corpus = join_corpus(plan, opened, folder, path, earlier)
        earlier.append(corpus)
        paths.append(path)
    return paths
