"""Exact laws of tiny transformers with every drafter, on both engines."""

from __future__ import annotations

import pytest

from specdec_core.evidence.lossless_records import EXACT_LAW
from specdec_core.forensics import exact_models
from specdec_core.forensics.exact_models import PLACEMENTS, REQUESTS, drafters, measure_models, tiny
from specdec_core.targets.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_drafter_request_and_engine_to_1e_10():
    rows = list(measure_models())
    assert len(rows) == len(PLACEMENTS) * len(REQUESTS) * 5
    assert max(row["total_variation"] for row in rows) < 1e-10
    assert all(EXACT_LAW.validated(row) for row in rows)
    compiled = [row["error"] for row in rows if "numba" in row["level"]]
    assert max(compiled) < 1e-15  # no rounding between a token's own logits and those of a verified draft


def test_a_cache_that_keeps_the_wrong_entries_is_seen(monkeypatch):
    from specdec_core.state.ragged_kv import RaggedKV

    commit = RaggedKV.commit

    def one_short(self, slots, paths, epoch):
        commit(self, slots, [path[:-1] if len(path) > 1 else path for path in paths], epoch)

    monkeypatch.setattr(RaggedKV, "commit", one_short)
    monkeypatch.setattr(exact_models, "PLACEMENTS", {"torch": PLACEMENTS["transformer, torch float64"]})
    monkeypatch.setattr(exact_models, "REQUESTS", {"one": REQUESTS["T=1, K=2"]})
    # Prefill commits chunks of more than one token with it: short prompts lose entries there too, AR and SD alike.
    assert max(row["error"] for row in measure_models()) > 1e-3


def test_the_drafters_are_those_of_the_project():
    target = Transformer(tiny(1), PLACEMENTS["transformer, torch float64"])
    assert set(drafters(target)) == {"another model", "itself", "first layer", "look-up chain", "look-up tree"}
