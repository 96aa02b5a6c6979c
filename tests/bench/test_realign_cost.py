"""Notebook 04's cost of keeping what was accepted, on a tiny model."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from specdec_core.bench import realign_cost
from specdec_core.bench.realign_cost import (
    BRANCHES,
    CHAIN,
    CODE,
    HUGGING,
    NODES,
    PLANS,
    REALIGN_WAY,
    SCATTER,
    SCATTER_TREE,
    RaggedRounds,
    RealignPlan,
    measure_realigning,
    sample_rounds,
)
from specdec_core.evidence.claims import claim
from specdec_core.evidence.layout import PROFILES
from specdec_core.evidence.ragged_claims import REALIGN as JUDGED_REALIGN
from specdec_core.evidence.ragged_claims import SCATTER as JUDGED_SCATTER
from specdec_core.evidence.ragged_claims import realign_share
from specdec_core.evidence.ragged_records import REALIGN
from specdec_core.evidence.records import find_records, read_records
from specdec_core.forensics.huggingface_decoders import open_model
from specdec_core.measure import clock
from specdec_core.published.rectangle import RealigningTarget
from specdec_core.targets.huggingface import HuggingFaceTarget

pytestmark = pytest.mark.usefixtures("one_thread")

PLAN = RealignPlan((1, 3), repeats=2, context=12, ragged=4)
OURS = "numba float32"


@pytest.fixture(autouse=True)
def no_rest(monkeypatch):
    monkeypatch.setattr(clock, "SETTLE", 0.0)


@pytest.fixture
def rounds(tiny_opened):
    """Each way over the same three rows."""
    model, lengths = open_model(tiny_opened.checkpoint), np.array([12, 9, 15])
    ways = {
        (SCATTER, HUGGING): (HuggingFaceTarget(model), CHAIN),
        (REALIGN_WAY, HUGGING): (RealigningTarget(model), CHAIN),
        (SCATTER, OURS): (tiny_opened.target, CHAIN),
        (SCATTER_TREE, OURS): (tiny_opened.target, BRANCHES),
    }
    return {name: RaggedRounds(*way, lengths) for name, way in ways.items()}


def test_every_way_and_batch_is_recorded(tiny_opened, layout):
    rows = measure_realigning(PLAN, tiny_opened, "quick", layout)
    assert read_records(layout.records("quick") / "04_realign.jsonl", REALIGN)[1] == rows
    (file,) = find_records(REALIGN, folder=layout.build)
    assert file.header["code"]["paths"] == sorted(CODE) and not file.is_stale(layout)
    ways = [(SCATTER, HUGGING), (REALIGN_WAY, HUGGING), (SCATTER, OURS), (SCATTER_TREE, OURS)]
    assert [(r["batch"], r["way"], r["engine"], r["phase"]) for r in rows] == [
        (batch, *way, phase) for batch in (1, 3) for way in ways for phase in ("commit", "round")
    ]
    for commit, whole in zip(rows[::2], rows[1::2], strict=True):
        assert len(commit["seconds"]) == len(whole["seconds"]) == PLAN.repeats and commit["n"] == NODES
        assert all(0 < part < all_ for part, all_ in zip(commit["seconds"], whole["seconds"], strict=True))
    assert (JUDGED_SCATTER, JUDGED_REALIGN) == (SCATTER, REALIGN_WAY)
    assert realign_share(claim("R4"), rows).note.endswith("2 repeats of 10")
    assert torch.get_num_threads() == 1


def test_a_round_is_both_and_all_engines_have_as_many_threads(tiny_opened, layout, monkeypatch):
    threads = []

    def sampled(rounds, repeats, seed):
        threads.append(torch.get_num_threads())
        return {name: [(3.0, 1.0), (5.0, 2.0)] for name in rounds}

    monkeypatch.setattr(realign_cost, "sample_rounds", sampled)
    torch.set_num_threads(2)
    try:
        commit, whole, *_ = measure_realigning(PLAN, tiny_opened, "quick", layout)
        assert threads == [1, 1] and torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(1)
    assert commit["seconds"] == [1.0, 2.0] and whole["seconds"] == [4.0, 7.0]


def test_all_ways_are_given_the_same_rows_and_do_the_same(rounds):
    """What a row is given, and which of it is kept, is the same: so are the logits, whichever way it is kept."""
    seen = {}
    for name, each in rounds.items():
        real = each.target.verify

        def verify(*given, real=real, name=name):
            found = real(*given)
            seen.setdefault(name, []).append((given[2].tolist(), np.asarray(found.logits)))
            return found

        each.target = Instead(each.target, verify=verify)
    samples = sample_rounds(rounds, repeats=3)
    assert {name: len(pairs) for name, pairs in samples.items()} == dict.fromkeys(rounds, 3)
    (first, *others) = (name for name in rounds if name != (SCATTER_TREE, OURS))
    for name in others:
        for (tokens, logits), (own, found) in zip(seen[first], seen[name], strict=True):
            assert own == tokens
            np.testing.assert_allclose(found, logits, atol=1e-4)
    assert [tokens for tokens, _ in seen[SCATTER_TREE, OURS]] == [tokens for tokens, _ in seen[first]]


def test_a_sample_is_taken_back(rounds):
    for each in rounds.values():
        before = each.state.lengths.copy()
        each.sample(np.ones((3, NODES), np.int64), np.array([1, 3, 5]))
        assert each.state.lengths.tolist() == before.tolist() == [12, 9, 15]


@pytest.mark.parametrize(
    ("way", "expected"),
    [((SCATTER, OURS), [[0], [0, 1, 2], [0, 1, 2, 3, 4]]), ((SCATTER_TREE, OURS), [[0], [0, 2, 3], [0, 2, 3, 4]])],
)
def test_paths_are_as_long_as_asked_for_or_as_the_tree_is_deep(rounds, way, expected):
    each, committed = rounds[way], []
    real = each.target.commit
    each.target = Instead(each.target, commit=lambda s, v, paths: committed.extend(paths) or real(s, v, paths))
    each.sample(np.ones((3, NODES), np.int64), np.array([1, 3, 5]))
    assert [path.tolist() for path in committed] == expected


def test_verifying_and_committing_are_timed_apart_and_rewinding_not_at_all(rounds, monkeypatch):
    each, now = rounds[SCATTER, OURS], [0.0]
    monkeypatch.setattr(realign_cost, "perf_counter", lambda: now[0])

    def taking(seconds, real):
        def method(*given):
            now[0] += seconds
            return real(*given)

        return method

    target, rewind = each.target, each.state.rewind
    each.target = Instead(target, verify=taking(3.0, target.verify), commit=taking(5.0, target.commit),
                          synchronise=taking(1.0, target.synchronise))  # fmt: skip
    each.state.rewind = taking(100.0, rewind)
    assert each.sample(np.ones((3, NODES), np.int64), np.array([1, 3, 5])) == (4.0, 6.0) and now[0] == 110.0


def test_lengths_are_kept_from_repeat_to_repeat_and_differ_within(rounds, monkeypatch):
    asked = {name: [] for name in rounds}
    for name, each in rounds.items():
        real = each.sample
        monkeypatch.setattr(
            each, "sample", lambda t, kept, real=real, name=name: asked[name].append(kept.tolist()) or real(t, kept)
        )
    sample_rounds(rounds, repeats=20)
    first, *others = asked.values()
    assert all(other == first for other in others)
    assert {k for kept in first for k in kept} == {1, 2, 3, 4, 5}


def test_rows_are_ragged():
    lengths = PLANS["full"].lengths(32)
    assert lengths.min() == 128 and lengths.max() == 143 and len(set(lengths)) == 16
    assert set(PLANS) == set(PROFILES) and PLANS["full"].repeats >= claim("R4").minimum_n


class Instead:
    """A target with other methods."""

    def __init__(self, target, **methods):
        self._target = target
        self.__dict__.update(methods)

    def __getattr__(self, name):
        return getattr(self._target, name)
