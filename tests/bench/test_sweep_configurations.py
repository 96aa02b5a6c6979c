"""Which configurations a sweep has, on a tiny model and invented backends."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from specdec_core.bench.prompt_cache import PromptCache
from specdec_core.bench.sweep_configurations import (
    BACKENDS,
    TREES,
    build_configurations,
    open_backends,
    sampled_configurations,
)
from specdec_core.decode import generate
from specdec_core.kernels.eagle_step.int8 import Int8Eagle
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.eagle_checkpoint import tiny_eagle
from specdec_core.models.errors import MissingPackage
from specdec_core.pairs import open_target
from specdec_core.placement import Placement
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.table import TableTarget, random_logits

pytestmark = pytest.mark.usefixtures("one_thread")

FLOAT, SMALL, LLAMA = "numba float32", "numba int8", "llama.cpp Q4_1"
KS = (1, 2, 4, 6, 8)
TRAINED = ["EAGLE chain", *(f"EAGLE tree {nodes}" for nodes in TREES)]
OTHER = TableTarget(random_logits(5, 1), 5)


@pytest.fixture(scope="module")
def opened(tiny_folder):
    return open_target(str(tiny_folder), Placement("numba", threads=1), (0, 1))


@pytest.fixture(scope="module")
def drafter(opened):
    return tiny_eagle(1, opened.checkpoint, (0, 1), vocabulary=100)


def factory(**here):
    """Opens what it is given; of anything else it says that the package is not here."""

    def find(name):
        if name not in here:
            raise MissingPackage(f"no {name} here")
        return here[name]

    return SimpleNamespace(open=find)


@pytest.fixture(scope="module")
def targets(opened):
    names = ("torch float32", LLAMA, "MLX 4-bit", "llama.cpp Q8_0")
    return open_backends(BACKENDS, opened, factory(**{name: OTHER for name in names})).targets


class TestBackends:
    def test_the_opened_target_is_one_and_its_int8_weights_another(self, opened):
        found = open_backends(("MLX 4-bit", SMALL, FLOAT), opened, factory())
        assert list(found.targets) == [FLOAT, SMALL] and found.targets[FLOAT] is opened.target
        small = found.targets[SMALL]
        assert small.placement == Placement("numba", dtype="int8", threads=1)
        assert small.feature_layers == opened.target.feature_layers

    def test_a_target_of_another_kind_is_placed_anew(self, tiny_folder):
        plain = open_target(str(tiny_folder), Placement("torch", "cpu", "float32", threads=1))
        found = open_backends((FLOAT,), plain, factory()).targets[FLOAT]
        assert found.placement == Placement("numba", threads=1)

    def test_what_is_not_here_is_left_out_and_says_why(self, opened):
        found = open_backends(("torch float32", LLAMA, "MLX 4-bit"), opened, factory(**{LLAMA: OTHER}))
        assert dict(found.targets) == {LLAMA: OTHER}
        assert found.absent == {name: f"no {name} here" for name in ("torch float32", "MLX 4-bit")}

    def test_a_name_that_is_none(self, opened):
        with pytest.raises(ValueError, match=r"unknown backends \['numba'\]: expected some of numba float32, numba i"):
            open_backends((FLOAT, "numba"), opened, factory())


class TestConfigurations:
    def test_every_backend_has_its_drafters_and_lengths(self, targets, opened, drafter):
        found = build_configurations(targets, opened, KS, drafter)
        assert [(c.backend, c.drafter_name, c.ks) for c in found] == [
            (FLOAT, "n-gram", KS),
            (FLOAT, "n-gram tree", KS),
            *((FLOAT, name, KS) for name in TRAINED),
            (SMALL, "n-gram", KS),
            *((SMALL, name, KS) for name in TRAINED),
            (FLOAT, "first 1 layers", (1, 4)),
            (FLOAT, "itself", (1, 2, 4, 8)),
            (FLOAT, "itself in int8", KS),
            ("torch float32", "n-gram", (1, 4)),
            (LLAMA, "n-gram", (1, 2, 4, 8)),
            ("MLX 4-bit", "n-gram", (1, 4)),
        ]
        assert [c.name for c in found] == [f"{c.backend} · {c.drafter_name}" for c in found]
        assert {c.target_name for c in found} == {opened.checkpoint.name}

    def test_one_target_a_backend_and_ours_prefill_once(self, targets, opened, drafter):
        shared = {}
        for each in build_configurations(targets, opened, KS, drafter):
            assert shared.setdefault(each.backend, each.target) is each.target
            ours = each.backend in (FLOAT, SMALL)
            assert isinstance(each.target, PromptCache) if ours else each.target is OTHER

    def test_models_step_and_others_do_not(self, targets, opened, drafter):
        steps = {
            c.name: c.step_model for c in build_configurations(targets, opened, KS, drafter) if c.step_model is not None
        }
        assert list(steps) == [f"{FLOAT} · {name}" for name in ("first 1 layers", "itself", "itself in int8")]
        assert steps.pop(f"{FLOAT} · first 1 layers").layers == 1
        assert list(steps.values()) == [targets[FLOAT], targets[SMALL]]

    def test_what_is_absent_is_in_none(self, targets, opened):
        def names(*backends):
            return [c.name for c in build_configurations({b: targets[b] for b in backends}, opened, KS)]

        assert names(SMALL, "llama.cpp Q8_0") == [f"{SMALL} · n-gram"]
        assert f"{FLOAT} · itself in int8" not in names(FLOAT) and f"{FLOAT} · itself" in names(FLOAT)

    def test_some_are_sampled_too(self, targets, opened, drafter):
        found = sampled_configurations(build_configurations(targets, opened, KS, drafter), [2, 6])
        assert [c.name for c in found] == [f"{b} · {d}" for b in (FLOAT, SMALL) for d in ("n-gram", *TRAINED)]
        assert {c.ks for c in found} == {(2, 6)}

    def test_a_trained_drafter_has_int8_weights_and_serves_both_targets_in_turn(self, targets, opened, drafter):
        found = [c for c in build_configurations(targets, opened, KS, drafter) if c.drafter_name in TRAINED]
        prompt, how = (1, 50, 60, 50, 60, 50), Options(max_new_tokens=12)
        texts = {c.backend: generate(targets[c.backend], [Request(prompt, how)]) for c in found}
        for each in found:
            assert isinstance(each.drafter.memory.steps.drafted, Int8Eagle)
            speculating = [Request(prompt, how, FixedLength(3))]
            assert generate(each.target, speculating, each.drafter) == texts[each.backend]
