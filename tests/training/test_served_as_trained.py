"""What training's own pass says of a drafter is what the drafter does when it serves: same rounds, same numbers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pytest
import torch

from specdec_core.arrays import host
from specdec_core.decode import decode, generate
from specdec_core.drafters.eagle import EagleDrafter
from specdec_core.drafters.eagle_memory import Continued
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.models.eagle_checkpoint import EagleCheckpoint
from specdec_core.placement import Placement
from specdec_core.protocol import RowRound
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer
from specdec_core.training.corpus import IS_GREEDY, IS_HELD_OUT, Corpus
from specdec_core.training.distill import DistillPlan, Trained, distill
from specdec_core.training.eagle_batches import Batch, batch_of
from specdec_core.training.eagle_learner import EagleLearner
from specdec_core.training.held_out import judge, walk

pytestmark = pytest.mark.usefixtures("one_thread")

VOCABULARY, LAYERS, UNROLL = 7, (0, 1), 4
CHECKPOINT = tiny_llama(2, vocabulary=VOCABULARY, context=64, hidden_size=24, intermediate_size=48, heads=3, kv_heads=1)
ENGINES = {"numba": Placement("numba", threads=1), "torch": Placement(dtype="float64")}
PLAN = DistillPlan(
    LAYERS, VOCABULARY, UNROLL, rows=8, steps=40, learning_rate=5e-3, check_every=20, patience=9, held_out_rows=32,
    mixed=False,
)  # fmt: skip


@dataclass(frozen=True)
class Text:
    """What a target wrote, and its features `[tokens, F + 1, H]` float32."""

    corpus: Corpus
    features: np.ndarray


@lru_cache
def written(rows: int = 64, longest: int = 30) -> Text:
    """Rows of the tiny target, prompts of one to five tokens: every other one greedy, the last quarter held out."""
    target = Transformer(CHECKPOINT, ENGINES["numba"], (*LAYERS, 2))
    random = np.random.default_rng(0)
    prompts = [tuple(random.integers(0, VOCABULARY, 1 + row // 2 % 5).tolist()) for row in range(rows)]
    lengths = [longest - row % 7 for row in range(rows)]
    requests = [
        Request(prompt, Options(float(row % 2), max_new_tokens=length), key=row)
        for row, (prompt, length) in enumerate(zip(prompts, lengths, strict=True))
    ]
    texts = [[*prompt, *each.tokens] for prompt, each in zip(prompts, generate(target, requests), strict=True)]
    state = target.new_state(1, 64)
    features = [host(target.prefill(state, np.array([0]), [np.array([*text, 0])])[0]) for text in texts]
    flags = [IS_GREEDY * (row % 2 == 0) | IS_HELD_OUT * (row >= rows * 3 // 4) for row in range(rows)]
    corpus = Corpus(
        np.concatenate(texts).astype(np.uint16),
        np.cumsum([0, *map(len, texts)]),
        np.array([len(prompt) for prompt in prompts], np.int32),
        np.array(flags, np.uint8),
        np.arange(rows, dtype=np.int32),
        {"vocabulary": VOCABULARY, "target": CHECKPOINT.name},
    )
    return Text(corpus, np.concatenate(features).astype(np.float32))


@lru_cache
def learned(vocabulary: int = VOCABULARY) -> Trained:
    """A drafter that is often right, and how it became so."""
    plan = replace(PLAN, vocabulary=vocabulary)
    with TemporaryDirectory() as folder:
        return distill(plan, CHECKPOINT, written().corpus, written().features, Path(folder))


def trained(vocabulary: int = VOCABULARY) -> EagleCheckpoint:
    return learned(vocabulary).drafter


def learner_of(drafter: EagleCheckpoint) -> EagleLearner:
    learner = EagleLearner(drafter.config, CHECKPOINT, drafter.tokens, feature_scale=1.0, seed=0)
    learner.load(dict(drafter.weights))
    return learner


GREEDY = list(range(32, 64, 2))
"""Rows that are looked at: half of them were trained on, half held out."""


@dataclass(frozen=True)
class Served:
    """One row of real decoding: its rounds, and for each what the drafter said at each step: logits, hidden states."""

    rounds: list[RowRound]
    said: list[list[tuple[np.ndarray, np.ndarray]]]


@contextmanager
def noting(drafter: EagleDrafter) -> Iterator[list[list[tuple[np.ndarray, np.ndarray]]]]:
    """What the drafter's memory answers from now on, a list a round."""
    memory, rounds = drafter.memory, []

    def note(found: Continued) -> Continued:
        rounds[-1].append((np.array(host(found.logits)[-1]), np.array(host(found.hidden)[-1])))
        return found

    read, extend = memory.read, memory.extend

    def noting_read(slots):
        rounds.append([])
        return note(read(slots))

    memory.read, memory.extend = noting_read, lambda *given: note(extend(*given))
    yield rounds


def serve(drafter: EagleCheckpoint, engine: str, row: int) -> Served:
    """Decode that row's prompt by chains of UNROLL, so far that its last anchor still has a whole draft.

    A round that starts at an anchor has as many drafted tokens as the walk has steps, if two more tokens may be written
    than the row has: the last anchor drafts one, and the target adds one to that.
    """
    prompt, answer = written().corpus.row(row)
    target = Transformer(CHECKPOINT, ENGINES[engine], LAYERS)
    serving = EagleDrafter(drafter, CHECKPOINT, ENGINES[engine])
    request = Request(tuple(prompt.tolist()), Options(max_new_tokens=len(answer) + 2), FixedLength(UNROLL))
    with noting(serving) as said:
        rounds = [each.rows[0] for each in decode(target, [request], serving)]
    emitted = [token for each in rounds for token in each.emitted]
    assert emitted[: len(answer)] == answer.tolist()
    drafted = [each for each in rounds if each.drafted]
    # A prompt of one token has no features yet, and the last token has no room for a draft before it.
    plain = {each.context for each in rounds if not each.drafted}
    assert plain <= {1, len(prompt) + len(answer) + 1} and len(drafted) == len(said)
    return Served(drafted, said)


@pytest.fixture(scope="module", params=ENGINES)
def served(request) -> dict[int, Served]:
    return {row: serve(trained(), request.param, row) for row in GREEDY}


@pytest.fixture(scope="module")
def batch() -> Batch:
    """The same rows, padded."""
    return batch_of(written().corpus, written().features, np.array(GREEDY), UNROLL)


def test_the_walk_gives_the_rounds_of_decoding(served, batch):
    agree = learner_of(trained()).judge(batch, UNROLL, mixed=False).agree.numpy()
    runs = []
    for place, row in enumerate(GREEDY):
        ours = walk(agree[:, place], batch, place)
        assert ours == [(each.accepted, len(each.drafted)) for each in served[row].rounds], row
        runs += ours
    accepted = np.bincount([run for run, _ in runs], minlength=UNROLL + 1)
    assert (accepted > 0).all() and accepted[1:].sum() > accepted[0]  # drafts of every kind, most of use


def test_the_tau_of_a_check_is_that_of_decoding(served):
    found = judge(learner_of(trained()), written().corpus, written().features, np.array(GREEDY), PLAN)
    rounds = [each for row in GREEDY for each in served[row].rounds]
    assert found.greedy_tau == pytest.approx(np.mean([1 + each.accepted for each in rounds]), rel=1e-12)
    tested = [sum(len(each.drafted) > step and each.accepted >= step for each in rounds) for step in range(UNROLL)]
    accepted = [sum(each.accepted > step for each in rounds) for step in range(UNROLL)]
    assert found.greedy_alpha == pytest.approx(np.divide(accepted, tested), rel=1e-12)


def test_every_step_says_what_the_drafter_says_when_it_serves(served, batch):
    learner = learner_of(trained())
    with torch.no_grad():
        hidden = torch.stack(learner._unrolled(batch, UNROLL)).numpy()
        logits = (learner._said(batch, UNROLL, mixed=False) @ learner.head.T).numpy()
    compared = np.zeros(UNROLL, int)
    for place, row in enumerate(GREEDY):
        for each, said in zip(served[row].rounds, served[row].said, strict=True):
            anchor = each.context - 2 - int(batch.anchors[place, 0])
            for step, (their_logits, their_hidden) in enumerate(said):
                if step > each.accepted:
                    break  # the drafter goes on from a token of its own, the learner from the text's
                for ours, theirs in ((hidden, their_hidden), (logits, their_logits)):
                    scale = np.abs(theirs).max()
                    assert np.abs(ours[step, place, anchor] - theirs).max() < 1e-4 * scale, (row, anchor, step)
                compared[step] += 1
    assert compared.min() > 20


@pytest.mark.parametrize("engine", ENGINES)
def test_rows_served_together_do_the_same(engine, batch):
    agree = learner_of(trained()).judge(batch, UNROLL, mixed=False).agree.numpy()
    rows = [written().corpus.row(row) for row in GREEDY]
    requests = [
        Request(tuple(prompt.tolist()), Options(max_new_tokens=len(answer) + 2), FixedLength(UNROLL))
        for prompt, answer in rows
    ]
    target = Transformer(CHECKPOINT, ENGINES[engine], LAYERS)
    drafter = EagleDrafter(trained(), CHECKPOINT, ENGINES[engine])
    rounds = list(decode(target, requests, drafter, slots=5))
    for place in range(len(GREEDY)):
        theirs = [row for each in rounds for row in each.rows if row.key == place and row.drafted]
        assert walk(agree[:, place], batch, place) == [(each.accepted, len(each.drafted)) for each in theirs]


def test_of_a_smaller_draft_vocabulary_too_where_the_text_can_be_drafted(batch):
    drafter = trained(5)
    agree = learner_of(drafter).judge(batch, UNROLL, mixed=False).agree.numpy()
    missed = 0
    for place, row in enumerate(GREEDY):
        # Behind the row's end the text goes on as the target goes on: see `serve`.
        [output] = generate(
            Transformer(CHECKPOINT, ENGINES["numba"]),
            [Request(tuple(written().corpus.row(row)[0].tolist()), Options(max_new_tokens=40))],
        )
        text = np.array([*written().corpus.row(row)[0], *output.tokens])
        next_tokens = batch.anchors[place].numpy()[None] + 2 + np.arange(UNROLL)[:, None]
        drawable = np.isin(text[np.minimum(next_tokens, len(text) - 1)], drafter.tokens.numpy())
        missed += int((~drawable).sum())
        theirs = [(each.accepted, len(each.drafted)) for each in serve(drafter, "numba", row).rounds]
        assert walk(agree[:, place] & drawable, batch, place) == theirs
    assert missed > 10
