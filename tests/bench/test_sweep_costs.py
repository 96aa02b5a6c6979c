"""Standalone costs go to the configuration that they are of: arms and stopwatches are invented here."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_core.bench import sweep_costs
from specdec_core.bench.sweep_costs import TEXT, Standalone, costs_of, measure_standalone, widths_of
from specdec_core.decode import generate
from specdec_core.drafters.eagle import EagleDrafter
from specdec_core.drafters.eagle_tree import EagleTreeDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.measure.cost_model import DraftCost
from specdec_core.measure.curves import CurveSamples
from specdec_core.measure.sweep import Case, Configuration
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.models.eagle_checkpoint import tiny_eagle
from specdec_core.placement import Placement
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.table import TableTarget, random_logits
from specdec_core.targets.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKPOINT, PLACE = tiny_llama(1), Placement("torch", threads=1)
EAGLE = tiny_eagle(1, CHECKPOINT, (0, 1)), CHECKPOINT, PLACE
TARGET = Transformer(CHECKPOINT, PLACE, (0, 1))
OTHER = TableTarget(random_logits(7, 1), 7)
TARGETS = {"a": TARGET, "b/c": OTHER, "d": TableTarget(random_logits(7, 2), 7)}
CASE = Case("p", "math", "tuning", (1, 5, 6))


def configuration(name, drafter, backend="a", step_model=None, ks=()):
    return Configuration(name, backend, "tiny", name, TARGETS[backend], drafter, step_model, ks)


LOOK_UP, PAIRED = configuration("look-up", NGramDrafter()), configuration("pairs", NGramDrafter(candidates=2))
STEPPING = configuration("stepping", NGramDrafter(), "b/c", step_model=OTHER, ks=(4,))
TRAINED = [configuration("chain", EagleDrafter(*EAGLE)), configuration("tree", EagleTreeDrafter(*EAGLE, nodes=7))]


@pytest.mark.parametrize(
    ("configurations", "widths"),
    [
        ([], (1, 2, 4)),  # only timed: chains of the sweep
        ([LOOK_UP], (1, 2, 4)),
        ([PAIRED], (1, 2, 4, 7)),
        ([STEPPING], (1, 5)),
        ([TRAINED[0]], (1, 2, 4)),
        ([LOOK_UP, TRAINED[1], STEPPING], (1, 2, 4, 5, 8)),
    ],
)
def test_passes_are_as_wide_as_what_is_verified(configurations, widths):
    assert widths_of(configurations, (1, 3)) == widths


def test_every_sample_goes_to_what_it_was_taken_of(monkeypatch):
    arms = []

    def interleaved(given, repeats, *, warmup, seed):
        arms.extend(given.values())
        return {name: np.arange(repeats) + 10.0 * number for number, name in enumerate(given)}

    fakes = {
        "read_arm": lambda device: "read",
        "gemm_arm": lambda device: "gemm",
        "curve_arms": lambda target, widths, contexts, seed: {(c, n): (target, c, n) for c in contexts for n in widths},
        "draft_arm": lambda one, context: (one.name, context),
        "interleaved": interleaved,
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(sweep_costs, name, fake)
    found = measure_standalone(TARGETS, [LOOK_UP, PAIRED, STEPPING, *TRAINED], (1, 3), (8, 24), 3)

    def seconds(arm):
        (number,) = [number for number, each in enumerate(arms) if each == arm]
        return [10.0 * number, 10.0 * number + 1, 10.0 * number + 2]

    widths = {"a": (1, 2, 4, 7, 8), "b/c": (1, 5)}
    for name, own in widths.items():
        expected = {(c, n): seconds((TARGETS[name], c, n)) for c in (8, 24) for n in own}
        assert {point: each.tolist() for point, each in found.curves[name].seconds.items()} == expected
    assert set(found.curves["d"].seconds) == {(c, n) for c in (8, 24) for n in (1, 2, 4)}
    assert {name: each.tolist() for name, each in found.ceilings.items()} == {n: seconds(n) for n in ("read", "gemm")}
    assert found.drafts == {
        "look-up": DraftCost(round=seconds(("look-up", 8))[1]),
        "pairs": DraftCost(round=seconds(("pairs", 8))[1]),
        "stepping": DraftCost(step=seconds(("stepping", 8))[1]),
    }


STANDALONE = Standalone(
    {name: CurveSamples({(8, 1): np.array([number])}) for number, name in enumerate(TARGETS, 1)},
    {},
    {each.name: DraftCost(round=number) for number, each in enumerate((LOOK_UP, PAIRED, STEPPING), 5)},
)


@pytest.mark.parametrize(
    ("temperature", "sampled", "expected"), [(0.0, 9.0, (2.0, 0.0)), (1.0, 2.5, (2.5, 0.5)), (1.0, 1.5, (1.5, 0.0))]
)
def test_a_sampled_rounds_law_is_paid_for_every_token(monkeypatch, temperature, sampled, expected):
    asked = []

    def overhead(target, case, temperature=0.0):
        asked.append((target, temperature))
        return sampled if temperature else 2.0

    monkeypatch.setattr(sweep_costs, "measure_overhead", overhead)
    found = costs_of([LOOK_UP, STEPPING, PAIRED], STANDALONE, TARGETS, CASE, temperature)
    assert {(each.overhead, each.token) for each in found.values()} == {expected}
    assert asked == [(t, each) for t in (TARGET, OTHER) for each in dict.fromkeys((0.0, temperature))]
    assert {name: (each.curve.at(1, 8), each.draft.round) for name, each in found.items()} == {
        "look-up": (1, 5), "stepping": (2, 7), "pairs": (1, 6)
    }  # fmt: skip


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_trained_drafter_is_timed_along_its_targets_own_text(monkeypatch, temperature):
    asked = []
    monkeypatch.setattr(sweep_costs, "measure_overhead", lambda *given, **how: 1.0)
    monkeypatch.setattr(
        sweep_costs, "measure_drafting", lambda *given: asked.append(given) or DraftCost(step=3.0, round=4.0)
    )
    found = costs_of(TRAINED, STANDALONE, TARGETS, CASE, temperature)
    assert {each.draft for each in found.values()} == {DraftCost(step=3.0, round=4.0)}
    (written,) = generate(TARGET, [Request(CASE.tokens, Options(max_new_tokens=TEXT))])
    assert len(written.tokens) == TEXT
    for one, (drafter, target, text, prompt, (near, far), options) in zip(TRAINED, asked, strict=True):
        assert drafter is one.drafter and target is TARGET and near == 1 < far
        assert (text, prompt) == ((*CASE.tokens, *written.tokens), 3) and options == Options(temperature=temperature)


def test_a_real_one_costs_time():
    found = costs_of(TRAINED, STANDALONE, TARGETS, CASE)
    assert all(each.draft.step + each.draft.round > 0 and each.overhead > 0 for each in found.values())
