"""The standalone cost of a drafter that continues features: a line through two depths, and what it refuses."""

from __future__ import annotations

from itertools import count

import numpy as np
import pytest

from specdec_core.measure import drafting
from specdec_core.measure.drafting import TAKEN, measure_drafting
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.protocol import Draft
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer
from specdec_core.topology import chain

pytestmark = pytest.mark.usefixtures("one_thread")

PROMPT = 5
CHECKPOINT = tiny_llama(1)
TEXT = tuple(np.random.default_rng(0).integers(0, 97, PROMPT + 44).tolist())


class Clock:
    """Time that only the drafter below makes pass."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Slow:
    """A drafter whose reading costs `round` and each of whose steps costs `step`; it notes what it is given."""

    def __init__(self, clock: Clock, round_: float, step: float, deepest: int = 99):
        self.clock, self.round, self.step, self.deepest = clock, round_, step, deepest
        self.read: list[tuple[int, ...]] = []
        self.features: list[np.ndarray] = []

    def most_nodes(self, depth):
        return depth

    def start(self, slots, capacity):
        self.capacity = capacity

    def admit(self, slots, prompts, features):
        [self.prompt], [self.prompt_features] = prompts, features

    def observe(self, slots, tokens, features):
        self.read.append(tuple(tokens[0]))
        self.features.append(features[0])
        self.clock.now += self.round

    def propose(self, views, state):
        [view] = views
        depth = min(view.limit, self.deepest)
        self.clock.now += self.step * depth
        self.committed, self.options = view.committed, view.options
        return [Draft(np.zeros(depth, np.int64), chain(depth + 1))]


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(drafting, "perf_counter", clock)
    return clock


@pytest.fixture(scope="module")
def target() -> Transformer:
    return Transformer(CHECKPOINT, Placement("torch"), (0, 2))


def test_a_round_and_a_step_are_told_apart(clock, target):
    cost = measure_drafting(Slow(clock, 0.5, 0.25), target, TEXT, PROMPT)
    assert cost.step == pytest.approx(0.25) and cost.round == pytest.approx(0.5)


def test_a_draft_that_ends_early_costs_what_it_reached(clock, target):
    cost = measure_drafting(Slow(clock, 0.5, 0.25, deepest=4), target, TEXT, PROMPT)
    assert cost.step == pytest.approx(0.25) and cost.round == pytest.approx(0.5)


def test_warming_up_is_not_counted(clock, target):
    slow = Slow(clock, 0.5, 0.25)
    waits = count()
    observe = slow.observe

    def cold(*given):
        observe(*given)
        clock.now += 100.0 if next(waits) < 2 else 0.0

    slow.observe = cold
    # One cold sample of each depth would be outvoted in the median: with means alone it would show.
    assert measure_drafting(slow, target, TEXT, PROMPT).round == pytest.approx(0.5)


def test_the_text_goes_on_with_the_features_before_each_token(clock, target):
    slow = Slow(clock, 0.5, 0.25)
    measure_drafting(slow, target, TEXT, PROMPT)
    assert tuple(slow.prompt) == TEXT[:PROMPT] and len(slow.prompt_features) == PROMPT - 1
    read = tuple(token for each in slow.read for token in each)
    assert read == TEXT[PROMPT : PROMPT + len(read)] and {len(each) for each in slow.read} == {TAKEN}
    state = target.new_state(1, len(TEXT))
    [features] = target.prefill(state, np.array([0]), [np.array(TEXT)])
    given = np.concatenate([slow.prompt_features, *slow.features])
    assert np.array_equal(given, features[: len(given)])
    assert tuple(slow.committed) == TEXT[: len(slow.committed)]
    assert slow.capacity >= len(TEXT) + 6


@pytest.mark.parametrize("options", [None, Options(temperature=0.7, top_k=3)])
def test_drafts_are_for_a_row_of_these_options(clock, target, options):
    slow = Slow(clock, 0.5, 0.25)
    measure_drafting(slow, target, TEXT, PROMPT, options=options)
    assert slow.options == (options or Options(temperature=0.0))


def test_a_text_that_is_too_short(clock, target):
    with pytest.raises(ValueError, match=r"19 tokens after the prompt: expected at least 20"):
        measure_drafting(Slow(clock, 1, 1), target, TEXT[: PROMPT + 19], PROMPT)


def test_drafts_of_one_depth_only(clock, target):
    with pytest.raises(ValueError, match=r"all reached 1\.0: expected two different depths"):
        measure_drafting(Slow(clock, 1, 1, deepest=1), target, TEXT, PROMPT)


def test_a_target_without_features(clock):
    with pytest.raises(ValueError, match="returns no features: open it with the feature layers"):
        measure_drafting(Slow(clock, 1, 1), Transformer(CHECKPOINT, Placement("torch")), TEXT, PROMPT)
