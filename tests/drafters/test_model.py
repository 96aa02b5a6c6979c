from dataclasses import replace

import numpy as np
import pytest

from specdec_core.decode import decode, generate, outputs
from specdec_core.drafters.model import ModelDrafter, _Chain
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.protocol import RowView
from specdec_core.randomness import DRAFT, streams
from specdec_core.rows import Request
from specdec_core.sampling import History, LogitsError, Options, law
from specdec_core.targets.table import TableTarget, random_logits
from specdec_core.targets.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")

DOUBLE = Placement(dtype="float64")
TARGET = Transformer(tiny_llama(1), DOUBLE)
OTHER = Transformer(tiny_llama(1, layers=2), DOUBLE)
TABLE = TableTarget(random_logits(5, seed=1), 5)
SAMPLED = Options(temperature=0.8, top_p=0.95, max_new_tokens=24, seed=3)

MIXED = [
    Request((3, 1, 4), Options(max_new_tokens=40), FixedLength(5)),
    Request((2,), Options(temperature=1.0, max_new_tokens=17, seed=1), FixedLength(1)),
    Request((1, 2, 3, 4, 1, 2), Options(temperature=0.7, top_k=4, max_new_tokens=30, seed=2), FixedLength(7)),
    Request((4, 4), Options(max_new_tokens=9, repetition_penalty=1.3, presence_penalty=0.4), FixedLength(3)),
    Request((0, 3), Options(temperature=1.4, min_p=0.1, max_new_tokens=25, seed=9), FixedLength(4)),
    Request((1,), Options(max_new_tokens=21, min_new_tokens=12, eos=(0, 2)), FixedLength(4)),
]


def everything_accepted(rounds) -> bool:
    return all(row.ending == "bonus" or len(row.emitted) == row.accepted for each in rounds for row in each.rows)


@pytest.mark.parametrize("slots", [1, 2, 6])
@pytest.mark.parametrize("target", [TABLE, TARGET], ids=["table", "transformer"])
def test_a_drafter_that_is_the_target_is_accepted_always(target, slots):
    rounds = list(decode(target, MIXED, ModelDrafter(target, target.vocabulary), slots=slots))
    assert sum(sum(row.drafted) for each in rounds for row in each.rows) > 80
    assert everything_accepted(rounds)


@pytest.mark.parametrize(
    "drafter", [TableTarget(random_logits(5, seed=1, spread=2.5), 5), TABLE], ids=["near", "equal"]
)
@pytest.mark.parametrize("slots", [1, 2, 6])
def test_the_drafters_cache_holds_committed_tokens_only(drafter, slots):
    model = ModelDrafter(drafter, 5)
    committed = {number: list(request.prompt) for number, request in enumerate(MIXED)}
    accepted = 0
    for each in decode(TABLE, MIXED, model, slots=slots):
        for row in each.rows:
            committed[row.key] += row.emitted
            accepted += row.accepted
            held = model._state.entries[row.slot]
            if row.finished:
                assert held == []
            else:
                # One behind, or two after a whole draft was accepted: the last token drafted was never fed.
                assert held == committed[row.key][: len(held)]
                assert 1 <= len(committed[row.key]) - len(held) <= 2
    assert accepted > 20


def test_a_drafter_that_skips_its_last_token_costs_acceptance_and_never_output(monkeypatch):
    feed = _Chain.after
    monkeypatch.setattr(_Chain, "after", lambda chain, cached: feed(chain, cached)[-1:])
    rounds = list(decode(TARGET, MIXED, ModelDrafter(TARGET, TARGET.vocabulary)))
    assert not everything_accepted(rounds)
    greedy = [number for number, request in enumerate(MIXED) if request.options.greedy]
    found, expected = outputs(rounds, len(MIXED)), generate(TARGET, MIXED, ModelDrafter(OTHER, 97))
    assert [found[number] for number in greedy] == [expected[number] for number in greedy]


class Counting(TableTarget):
    """Counts its passes."""

    passes = 0

    def verify(self, *arguments):
        self.passes += 1
        return super().verify(*arguments)


class Stopping(FixedLength):
    """Goes on while the drafter's confidence stays above a half."""

    uses_confidence = True

    def proceed(self, confidences):
        return confidences[-1] > 0.5


def view(options=SAMPLED, limit=4, policy=None, committed=(3, 1, 4), slot=0) -> RowView:
    return RowView(
        slot, np.array(committed), 2, limit, policy or FixedLength(limit), options, streams(options.seed, 0, DRAFT)
    )


def drafting(model, vocabulary=5) -> ModelDrafter:
    drafter = ModelDrafter(model, vocabulary)
    drafter.start(3, 40)
    drafter.admit(np.arange(3), [np.array([3, 1, 4])] * 3, [None] * 3)
    return drafter


def test_the_law_reported_is_the_law_the_token_was_drawn_from():
    draft = drafting(TABLE).propose([view()], None)[0]
    for depth in range(4):
        before = [4, *draft.tokens[:depth]]
        expected = law(TABLE._logits((3, 1, *before)), SAMPLED, History(np.array([3, 1]), np.array(before)))
        np.testing.assert_allclose(draft.law[depth], expected, atol=1e-15)
        assert draft.law[depth, draft.tokens[depth]] > 0


def test_a_greedy_draft_is_the_argmax_and_its_law_one_hot():
    draft = drafting(TABLE).propose([view(Options())], None)[0]
    assert draft.law is None
    assert draft.tokens.tolist() == [
        int(TABLE._logits((3, 1, 4, *draft.tokens[:depth])).argmax()) for depth in range(4)
    ]


def test_rows_of_different_limits_draft_together_one_pass_a_step():
    model = Counting(random_logits(5, seed=1), 5)
    drafter = drafting(model)
    drafts = drafter.propose([view(limit=limit, slot=slot) for slot, limit in enumerate((3, 1, 5))], None)
    assert [len(draft.tokens) for draft in drafts] == [3, 1, 5] and model.passes == 5


def test_a_policy_that_stops_saves_the_steps_after_it():
    model = Counting(random_logits(5, seed=1), 5)
    draft = drafting(model).propose([view(Options(), limit=30, policy=Stopping(30))], None)[0]
    assert len(draft.tokens) == model.passes < 30
    assert (draft.confidence[:-1] > 0.5).all() and draft.confidence[-1] <= 0.5


@pytest.mark.parametrize("options", [Options(), SAMPLED], ids=["greedy", "sampled"])
def test_confidence_is_the_largest_probability_and_only_for_policies_that_use_it(options):
    with_it = drafting(TABLE).propose([view(options, policy=Stopping(4))], None)[0]
    without = drafting(TABLE).propose([view(options)], None)[0]
    one = law(
        TABLE._logits((3, 1, 4)),
        options if options.temperature else Options(temperature=1.0),
        History(np.array([3, 1]), np.array([4])),
    )
    assert with_it.confidence[0] == pytest.approx(one.max()) and without.confidence is None


def test_tokens_that_only_the_drafter_has_are_never_drafted():
    wider = TableTarget(lambda prefix: np.arange(8.0), 8)
    requests = [Request((1,), Options(max_new_tokens=12, temperature=t), FixedLength(3)) for t in (0.0, 1.0)]
    outputs = generate(TABLE, requests, ModelDrafter(wider, 5))
    assert all(token < 5 for output in outputs for token in output.tokens)


@pytest.mark.parametrize("penalty", [1.0, 1.2])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_tokens_that_only_the_target_has_do_not_stop_the_drafter(temperature, penalty):
    narrow = Transformer(tiny_llama(1, vocabulary=60), DOUBLE)
    how = Options(temperature=temperature, repetition_penalty=penalty, max_new_tokens=30, min_new_tokens=3, eos=(96,))
    request = Request((90, 3), how, FixedLength(3))
    (found,) = generate(TARGET, [request], ModelDrafter(narrow, TARGET.vocabulary))
    assert max(found.tokens) >= 60
    if not temperature:
        assert [found] == generate(TARGET, [Request((90, 3), how)])


def test_nothing_is_drafted_without_a_limit():
    drafts = drafting(TABLE).propose([view(limit=0, policy=FixedLength(3)), view(limit=2, slot=1)], None)
    assert [len(draft.tokens) for draft in drafts] == [0, 2]


@pytest.mark.parametrize("prompt", [1, 10, 12, 13, 14, 30])
def test_a_row_beyond_the_drafters_context_goes_on_without_drafts(prompt):
    short = Transformer(tiny_llama(1, layers=2, context=13), DOUBLE)
    request = Request((3, 1, 4) * 10, Options(max_new_tokens=20), FixedLength(4))
    request = replace(request, prompt=request.prompt[:prompt])
    rounds = list(decode(TARGET, [request], ModelDrafter(short, 97)))
    assert outputs(rounds, 1) == generate(TARGET, [replace(request, policy=None)])
    drafted = [(row.context, len(row.drafted)) for each in rounds for row in each.rows]
    assert all(length == max(0, min(4, 14 - context, 19 + prompt - context)) for context, length in drafted)


@pytest.mark.parametrize("kept", range(5))
def test_after_a_round_the_cache_is_behind_by_the_newest_token(kept):
    drafter = drafting(TABLE)
    drafted = drafter.propose([view()], None)[0].tokens.tolist()
    # The newest token may be the very one that was rejected: it is not cached all the same.
    newest = drafted[kept] if kept < 4 else 0
    drafter.observe(np.array([0]), [np.array([*drafted[:kept], newest])], [None])
    assert drafter._state.entries[0] == [3, 1, 4, *drafted[: min(kept, 3)]]


def test_logits_of_which_no_law_can_be_made_are_an_error():
    with pytest.raises(LogitsError):
        drafting(TableTarget(lambda prefix: np.full(5, np.nan), 5)).propose([view(Options())], None)


def test_room_for_a_chain_is_its_depth():
    assert ModelDrafter(TABLE, 5).most_nodes(7) == 7
