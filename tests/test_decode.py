from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from specdec_core.arrays import host
from specdec_core.decode import Output, RequestError, decode, generate, outputs
from specdec_core.drafters.layer_skip import LayerSkipDrafter
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.protocol import Draft
from specdec_core.rows import Request
from specdec_core.sampling import LogitsError, Options
from specdec_core.targets.table import TableTarget, random_logits
from specdec_core.targets.transformer import Transformer
from specdec_core.topology import tree
from tests.llama_reference import Reference

pytestmark = pytest.mark.usefixtures("one_thread")

DOUBLE = Placement(dtype="float64")
CHECKPOINT = tiny_llama(1)
MODEL = Transformer(CHECKPOINT, DOUBLE)
NEAR = Transformer(tiny_llama(1, layers=2), DOUBLE)
TABLE = TableTarget(random_logits(5, seed=1), 5)


REFERENCE = Reference(CHECKPOINT)


class Bushy(NGramDrafter):
    """Drafts trees whose right tokens are on the second branch: 0 → 2 → 4 → 6 or less deep, the rest is wrong."""

    SHAPES = tuple(tree((-1, 0, 0, 0, 2, 2, 4, 4)[:nodes]) for nodes in (4, 6, 8))

    def most_nodes(self, depth):
        return 7

    def propose(self, views, state):
        drafts = []
        for view in views:
            text, tokens = view.committed.tolist(), []
            for _ in range(min(view.limit, 3)):
                right = int(REFERENCE.last(text).argmax())
                wrong = right - 1 if right else 1
                tokens += [right, wrong] if tokens else [wrong, right, wrong]
                text.append(right)
            drafts.append(Draft(np.array(tokens), self.SHAPES[min(view.limit, 3) - 1]))
        return drafts


DRAFTERS = {
    "model": lambda target: ModelDrafter(
        NEAR if target is MODEL else TableTarget(random_logits(5, 1, 2.0), 5), target.vocabulary
    ),
    "itself": lambda target: ModelDrafter(target, target.vocabulary),
    "ngram": lambda target: NGramDrafter(),
    "ngram tree": lambda target: NGramDrafter(candidates=3),
    "layer skip": lambda target: LayerSkipDrafter(target, 2),
    "bushy": lambda target: Bushy(),
}
SMALL = [name for name in DRAFTERS if name not in ("layer skip", "bushy")]

GREEDY = [
    Request((3, 1, 4, 1, 5), Options(max_new_tokens=30), FixedLength(4)),
    Request((2,), Options(max_new_tokens=20, repetition_penalty=1.3, presence_penalty=0.2), FixedLength(1)),
    Request(
        (7, 8, 7, 8, 7, 8, 7), Options(max_new_tokens=25, eos=tuple(range(10, 14)), min_new_tokens=8), FixedLength(6)
    ),
    Request((60,) * 12, Options(max_new_tokens=1), FixedLength(3)),
    Request((0, 96), Options(max_new_tokens=33, eos=tuple(range(20, 26)), logprobs=True), None),
]
SAMPLED = [
    Request((3, 1, 4), Options(temperature=1.0, max_new_tokens=20, seed=5), FixedLength(4)),
    Request((2,), Options(temperature=0.7, top_k=3, max_new_tokens=12, seed=5), FixedLength(2), key=1),
    Request((1, 2, 1, 2), Options(max_new_tokens=15), FixedLength(3), key=2),
    Request((4,), Options(temperature=1.3, top_p=0.8, max_new_tokens=9, seed=8, eos=(0,)), None, key=3),
    Request((0, 0, 0), Options(temperature=0.9, min_p=0.2, repetition_penalty=1.2, max_new_tokens=17), FixedLength(5)),
]


def plain(request: Request) -> Request:
    return replace(request, policy=None)


def text_of(tokens) -> str:
    return "".join(chr(ord("a") + token) for token in tokens)


# --- Greedy decoding is autoregressive decoding -------------------------------------------------------------------


def recomputed(request: Request) -> list[int]:
    """Greedy text without a cache, a batch or a loop of ours; options as in `GREEDY`."""
    options, output = request.options, list[int]()
    while len(output) < options.max_new_tokens:
        logits = REFERENCE.last([*request.prompt, *output]).copy()
        for token in {*request.prompt, *output}:
            logits[token] *= options.repetition_penalty ** (-1 if logits[token] > 0 else 1)
        logits[list(set(output))] -= options.presence_penalty
        if len(output) < options.min_new_tokens:
            logits[list(options.eos)] = -np.inf
        output.append(int(logits.argmax()))
        if output[-1] in options.eos:
            break
    return output


def test_autoregressive_decoding_is_recomputing():
    found = generate(MODEL, [plain(request) for request in GREEDY])
    assert [list(output.tokens) for output in found] == [recomputed(request) for request in GREEDY]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("batch", range(1, 6))
def test_greedy_tokens_are_the_targets_in_any_batch(name, batch):
    found = generate(MODEL, GREEDY[:batch], DRAFTERS[name](MODEL))
    expected = [generate(MODEL, [plain(request)])[0] for request in GREEDY[:batch]]
    assert [(o.tokens, o.finished) for o in found] == [(o.tokens, o.finished) for o in expected]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_greedy_tokens_are_the_targets_with_fewer_slots_than_requests(name, slots):
    found = generate(MODEL, GREEDY, DRAFTERS[name](MODEL), slots=slots)
    expected = generate(MODEL, [plain(request) for request in GREEDY])
    assert [(o.tokens, o.finished) for o in found] == [(o.tokens, o.finished) for o in expected]


def test_a_deep_second_branch_of_a_tree_is_accepted_and_kept():
    rounds = list(decode(MODEL, GREEDY[:1], Bushy()))
    assert [row.accepted for each in rounds for row in each.rows] == [3] * 7 + [1]
    assert outputs(rounds, 1)[0].tokens == generate(MODEL, [plain(GREEDY[0])])[0].tokens


mixed_options = st.builds(
    Options,
    max_new_tokens=st.integers(5, 20),
    min_new_tokens=st.integers(0, 5),
    eos=st.sampled_from([(), (4,), (2, 3)]),
    stop=st.sampled_from([(), ("ab",), ("c", "dd")]),
    repetition_penalty=st.sampled_from([0.7, 1.0, 1.3]),
    presence_penalty=st.sampled_from([-0.5, 0.0, 0.5]),
    logprobs=st.booleans(),
)
mixed_requests = st.builds(
    Request,
    st.lists(st.integers(0, 4), min_size=1, max_size=17).map(tuple),
    mixed_options,
    st.one_of(st.none(), st.integers(1, 6).map(FixedLength)),
)


@settings(max_examples=60)
@given(st.lists(mixed_requests, min_size=1, max_size=5), st.sampled_from(SMALL), st.integers(1, 5))
def test_any_mix_of_requests_is_decoded_as_if_alone_and_undrafted(requests, name, slots):
    target = TableTarget(TABLE._logits, 5, context=24)
    found = generate(target, requests, DRAFTERS[name](target), slots=slots, detokenize=text_of)
    assert found == [generate(target, [plain(request)], detokenize=text_of)[0] for request in requests]


# --- Rows are alone -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SMALL)
@settings(max_examples=12)
@given(order=st.permutations(range(5)), count=st.integers(1, 5), slots=st.integers(1, 5))
def test_a_seeded_row_does_not_feel_neighbours_slots_or_order(name, order, count, slots):
    alone = [generate(TABLE, [request], DRAFTERS[name](TABLE))[0] for request in SAMPLED]
    chosen = order[:count]
    found = generate(TABLE, [SAMPLED[number] for number in chosen], DRAFTERS[name](TABLE), slots=slots)
    assert found == [alone[number] for number in chosen]


@pytest.mark.parametrize("name", ["model", "layer skip"])
def test_a_seeded_row_of_a_model_does_not_feel_neighbours(name):
    alone = [generate(MODEL, [request], DRAFTERS[name](MODEL))[0] for request in SAMPLED]
    assert generate(MODEL, SAMPLED, DRAFTERS[name](MODEL), slots=3) == alone


def test_seed_and_key_name_a_rows_chance():
    one, other = SAMPLED[0], replace(SAMPLED[0], key=7)
    first, again, different = generate(TABLE, [one, one, other], DRAFTERS["model"](TABLE))
    assert first == again and first.tokens != different.tokens


def test_two_decodings_may_be_interleaved():
    both = [decode(TABLE, SAMPLED, DRAFTERS["model"](TABLE)) for _ in range(2)]
    rounds = list(zip(*both, strict=True))
    for side in (0, 1):
        assert outputs([pair[side] for pair in rounds], 5) == generate(TABLE, SAMPLED, DRAFTERS["model"](TABLE))


# --- How rows end -------------------------------------------------------------------------------------------------


def rising(prefix) -> np.ndarray:
    """Each token is followed by the next one, of 20."""
    return np.where(np.arange(20) == (prefix[-1] + 1) % 20, 5.0, 0.0)


RISING = TableTarget(rising, 20, context=30)


def block(k: int = 6, prompt=(0,), detokenize=None, **options):
    """The only row's rounds and output, when the target itself drafts K tokens: everything is accepted."""
    request = Request(prompt, Options(**{"max_new_tokens": 15, **options}), FixedLength(k))
    rounds = list(decode(RISING, [request], ModelDrafter(RISING, 20), detokenize=detokenize))
    return [each.rows[0] for each in rounds], outputs(rounds, 1)[0]


@pytest.mark.parametrize(("end", "accepted", "ending"), [(1, 1, "cut"), (4, 4, "cut"), (6, 6, "cut"), (7, 6, "bonus")])
def test_an_end_token_inside_a_block_ends_the_row_there(end, accepted, ending):
    (row,), output = block(eos=(end, 15))
    assert output == Output(tuple(range(1, end + 1)), "eos")
    assert (row.accepted, row.ending, row.finished, row.drafted) == (accepted, ending, "eos", (1,) * 6)


@pytest.mark.parametrize(("stop", "length"), [(("c",), 2), (("ef",), 5), (("zz", "fgh"), 7), (("h", "d"), 3)])
def test_a_stop_string_inside_a_block_ends_the_row_there(stop, length):
    (row,), output = block(stop=stop, detokenize=text_of)
    assert output == Output(tuple(range(1, length + 1)), "stop") and row.accepted == min(length, 6)


@pytest.mark.parametrize("cap", range(1, 16))
@pytest.mark.parametrize("k", [1, 3, 6])
def test_the_cap_is_exact_and_nothing_is_drafted_past_it(cap, k):
    rows, output = block(k, max_new_tokens=cap)
    assert len(output.tokens) == cap and output.finished == "length"
    assert all(row.ending == "bonus" for row in rows)


@pytest.mark.parametrize("prompt", [1, 20, 22, 23])
def test_the_context_ends_a_row(prompt):
    rows, output = block(prompt=(0,) * prompt, max_new_tokens=10**9)
    assert len(output.tokens) == 30 - prompt and output.finished == "context"
    assert all(row.context + sum(row.drafted) < 30 for row in rows)


def test_the_state_is_no_larger_than_the_context_and_a_draft(monkeypatch):
    asked = []
    make = RISING.new_state
    monkeypatch.setattr(RISING, "new_state", lambda slots, capacity: asked.append(capacity) or make(slots, capacity))
    block(max_new_tokens=10**9)
    assert max(asked) == 30 + 6


def test_end_tokens_before_the_fewest_new_tokens_are_banned():
    _, output = block(eos=(2,), min_new_tokens=5)
    assert 2 not in output.tokens[:5] and len(output.tokens) > 5


@pytest.mark.parametrize("prompt", [(3,), (3, 3, 0), (0, 3)])
def test_end_tokens_of_the_prompt_are_not_looked_at(prompt):
    _, output = block(prompt=prompt, eos=(3,), max_new_tokens=2)
    assert len(output.tokens) == 2 and output.finished == "length"


def test_rows_end_alone_and_their_slots_are_used_at_once():
    caps = (1, 1, 2, 3, 1, 4)
    requests = [Request((0,), Options(max_new_tokens=cap)) for cap in caps]
    rounds = list(decode(RISING, requests, slots=2))
    assert [{row.key for row in each.rows} for each in rounds] == [{0, 1}, {2, 3}, {2, 3}, {4, 3}, {5}, {5}, {5}, {5}]
    assert [len(output.tokens) for output in outputs(rounds, 6)] == list(caps)


def test_a_finished_row_leaves_nothing_behind(monkeypatch):
    states = []
    make = TABLE.new_state
    monkeypatch.setattr(TABLE, "new_state", lambda *sizes: states.append(make(*sizes)) or states[-1])
    for each in decode(TABLE, SAMPLED, DRAFTERS["itself"](TABLE), slots=2):
        for row in each.rows:
            # Of the target's and of the drafter's; a row of one token has none in them either.
            if row.finished:
                assert [state.lengths[row.slot] for state in states] == [0, 0]
    assert len(states) == 2


# --- Bookkeeping --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("slots", [1, 2, 5])
@pytest.mark.parametrize("name", [None, *SMALL])
def test_rounds_account_for_every_token(name, slots):
    drafter = name and DRAFTERS[name](TABLE)
    requests = SAMPLED if name else [plain(request) for request in SAMPLED]
    rounds = list(decode(TABLE, requests, drafter, slots=slots))
    committed = {key: len(request.prompt) for key, request in enumerate(requests)}
    finished: dict[int, str] = {}
    for index, each in enumerate(rounds):
        assert each.index == index and 1 <= len(each.rows) <= slots
        assert each.nodes == sum(1 + sum(row.drafted) for row in each.rows)
        assert each.seconds.total > 0
        assert len({row.slot for row in each.rows}) == len({row.key for row in each.rows}) == len(each.rows)
        for row in each.rows:
            policy = requests[row.key].policy
            assert row.key not in finished and row.context == committed[row.key]
            assert len(row.drafted) <= (policy.k if policy else 0) and all(row.drafted)
            assert row.accepted <= len(row.drafted)
            assert len(row.emitted) == row.accepted + (row.ending != "cut") >= 1
            assert row.ending != "bonus" or row.accepted or not row.drafted
            assert row.ending != "recovered" or row.drafted
            assert row.ending != "cut" or row.finished
            committed[row.key] += len(row.emitted)
            if row.finished:
                finished[row.key] = row.finished
    for key, output in enumerate(outputs(rounds, 5)):
        assert committed[key] == len(requests[key].prompt) + len(output.tokens)
        assert output.finished == finished[key]


def test_drafted_counts_the_nodes_of_each_depth():
    request = Request((0,), Options(max_new_tokens=4), FixedLength(3))
    rounds = list(decode(MODEL, [request], Bushy()))
    assert rounds[0].rows[0].drafted == (3, 2, 2) and rounds[0].nodes == 8


@pytest.mark.parametrize("name", ["model", "bushy", "layer skip"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_log_probabilities_are_those_of_the_raw_law_at_the_emitted_tokens(name, temperature):
    options = Options(temperature=temperature, top_k=20, presence_penalty=0.5, max_new_tokens=14, logprobs=True)
    request = Request((3, 1, 4), options, FixedLength(3))
    silent = replace(request, options=replace(options, logprobs=False))
    found, other = generate(MODEL, [request, silent], DRAFTERS[name](MODEL))
    assert other.logprobs is None and len(found.logprobs) == len(found.tokens) == 14
    logits = REFERENCE.logits([*request.prompt, *found.tokens])
    logs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    expected = [logs[2 + place, token] for place, token in enumerate(found.tokens)]
    np.testing.assert_allclose(found.logprobs, expected, atol=1e-9)


def test_log_probabilities_stop_where_the_row_does():
    _, output = block(eos=(4,), logprobs=True)
    assert len(output.logprobs) == len(output.tokens) == 4


# --- What a drafter is told ---------------------------------------------------------------------------------------


class Spy(Bushy):
    """Keeps what it is shown."""

    def start(self, slots, capacity):
        self.seen: dict[int, list] = {}
        self.shown: list[set[int]] = []
        super().start(slots, capacity)

    def admit(self, slots, prompts, features):
        for slot, prompt, found in zip(slots, prompts, features, strict=True):
            self.seen[int(slot)] = [(prompt[1:].tolist(), found)]
        super().admit(slots, prompts, features)

    def observe(self, slots, tokens, features):
        for slot, new, found in zip(slots, tokens, features, strict=True):
            self.seen[int(slot)].append((new.tolist(), found))
        super().observe(slots, tokens, features)

    def propose(self, views, state):
        self.shown.append({view.slot for view in views})
        return super().propose(views, state)


def test_each_committed_token_comes_with_the_features_of_the_position_before_it():
    target, spy = Transformer(CHECKPOINT, DOUBLE, feature_layers=(0, 2)), Spy()
    requests = [Request(prompt, Options(max_new_tokens=12), FixedLength(3)) for prompt in ((3, 1, 4, 9), (5, 6))]
    found = generate(target, requests, spy)
    for slot, (request, output) in enumerate(zip(requests, found, strict=True)):
        tokens = [token for part, _ in spy.seen[slot] for token in part]
        features = np.concatenate([host(part) for _, part in spy.seen[slot]])
        text = [*request.prompt, *output.tokens]
        assert tokens == text[1 : len(tokens) + 1] and len(tokens) >= 9
        expected = REFERENCE.hidden(text)[[0, 2], : len(tokens)].swapaxes(0, 1)
        np.testing.assert_allclose(features, expected, atol=1e-10)


def test_rows_without_a_policy_or_room_are_not_shown_to_the_drafter():
    spy = Spy()
    requests = [
        Request((1,), Options(max_new_tokens=1), FixedLength(2)),
        Request((1,)),
        Request((1,), Options(), FixedLength(2)),
    ]
    generate(MODEL, requests, spy)
    assert set.union(*spy.shown) == {2}


# --- Bad input ----------------------------------------------------------------------------------------------------


GOOD = Request((1, 2))


@pytest.mark.parametrize(
    ("requests", "how", "message"),
    [
        ([], {}, "empty batch: expected at least one request"),
        ([GOOD], {"slots": 0}, "slots 0: expected at least 1"),
        ([GOOD, Request(())], {}, "request 1 has an empty prompt: expected at least one token"),
        ([Request((1, 20))], {}, r"request 0 has token ids \[20\]: expected 0…19; another tokenizer"),
        ([Request((-1,))], {}, r"request 0 has token ids \[-1\]"),
        ([GOOD, Request((1,) * 30)], {}, "request 1 has a prompt of 30 tokens, and the context holds 30"),
        ([replace(GOOD, policy=FixedLength(2))], {}, "request 0 has a length policy, but there is no drafter"),
        (
            [replace(GOOD, policy=FixedLength(28))],
            {"drafter": NGramDrafter()},
            "drafts up to K = 28 tokens, but only 28 fit into the context of 30",
        ),
        ([replace(GOOD, options=Options(eos=(20,)))], {}, r"request 0 ends at tokens \[20\]: expected ids in 0…19"),
        ([replace(GOOD, options=Options(stop=("a",)))], {}, "request 0 has stop strings: pass detokenize"),
        ([replace(GOOD, key=-1)], {}, "request 0 has key -1: expected an integer ≥ 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_bad_requests_are_refused_before_anything_runs(monkeypatch, requests, how, message):
    monkeypatch.setattr(RISING, "new_state", lambda *sizes: pytest.fail("ran"))
    with pytest.raises(RequestError, match=message):
        decode(RISING, requests, **how)


def test_the_longest_k_that_fits_is_taken():
    request = Request((1, 2), Options(max_new_tokens=40), FixedLength(27))
    (output,) = generate(RISING, [request], ModelDrafter(RISING, 20))
    assert len(output.tokens) == 28


def test_a_prompt_that_leaves_room_for_one_token_is_decoded():
    (output,) = generate(RISING, [Request((1,) * 29)])
    assert output == Output((2,), "context")


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_broken_logits_are_an_error_and_no_token(value, temperature):
    broken = TableTarget(lambda prefix: np.full(4, value if len(prefix) > 3 else 0.0), 4)
    rounds = decode(broken, [Request((1,), Options(temperature=temperature))])
    for _ in range(3):
        next(rounds)
    with pytest.raises(LogitsError, match="expected a finite number"):
        next(rounds)
