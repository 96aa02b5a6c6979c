"""A drafter while it learns, as it will serve: real decoding of held-out prompts of the corpus."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from specdec_core.decode import decode
from specdec_core.drafters.eagle import EagleDrafter
from specdec_core.lengths.fixed import FixedLength
from specdec_core.measure.cost_model import count
from specdec_core.models.eagle_checkpoint import EagleCheckpoint
from specdec_core.pairs import Opened, open_target
from specdec_core.prompts import spread
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.training.corpus import IS_GREEDY, Corpus, only_rows
from specdec_core.training.eagle_batches import batch_of
from specdec_core.training.eagle_learner import EagleLearner
from specdec_core.training.feature_cache import corpus_features
from specdec_core.training.held_out import draftable


def held_out_prompts(corpus: Corpus, count: int) -> list[tuple[int, ...]]:
    """The prompts of so many held-out rows that the target answered greedily, spread over the corpus."""
    rows = [row for row in corpus.held_out if corpus.flagged(IS_GREEDY)[row]]
    return [tuple(corpus.row(row)[0].tolist()) for row in spread(rows, count)]


def served_tau(
    drafter: EagleCheckpoint, opened: Opened, prompts: Sequence[tuple[int, ...]], k: int, max_new_tokens: int
) -> float:
    """Tokens a target pass, greedy, chains of K, all prompts in one batch."""
    options = Options(max_new_tokens=max_new_tokens, eos=opened.tokenizer.eos_ids)
    requests = [Request(prompt, options, FixedLength(k)) for prompt in prompts]
    served = EagleDrafter(drafter, opened.checkpoint, opened.target.placement)
    return count(decode(opened.target, requests, served)).tau


def served_as_trained(
    drafter: EagleCheckpoint, opened: Opened, corpus: Corpus, features: np.ndarray, rows: Sequence[int], k: int
) -> tuple[int, int]:
    """(rounds in which as many draft tokens were accepted as training's own pass says, rounds), over greedy rows.

    Serving gives as much as training promises only if both see the same: positions, features and prefix. Rounds near a
    row's end, where room limits the draft, are left out. Prompts have two tokens or more.
    """
    learner = EagleLearner(drafter.config, opened.checkpoint, drafter.tokens, 1.0, 0)
    learner.load(dict(drafter.weights))
    served = EagleDrafter(drafter, opened.checkpoint, opened.target.placement)
    alike = total = 0
    for row in rows:
        prompt, written = corpus.row(row)
        batch = batch_of(corpus, features, np.array([row]), k)
        judged = learner.judge(batch, k, mixed=False).agree & draftable(batch, drafter.tokens, k)
        agree, emitted = judged[:, 0].numpy(), 0
        options = Options(max_new_tokens=len(written))
        for each in decode(opened.target, [Request(tuple(prompt.tolist()), options, FixedLength(k))], served):
            if emitted + k + 1 >= len(written):
                break
            # The round that starts here, whatever the rounds before it accepted.
            promised = int(np.argmin([*agree[:, emitted], False]))
            alike, total = alike + (each.rows[0].accepted == promised), total + 1
            emitted += len(each.rows[0].emitted)
    return alike, total


def compare_on_held_out(
    drafter: EagleCheckpoint, opened: Opened, corpus: Corpus, answers: int, k: int = 5
) -> tuple[int, int]:
    """`served_as_trained` on the first so many held-out greedy answers of a corpus, whose features are worked out here.

    opened  the target with the features that the drafter reads.
    """
    chosen = [row for row in corpus.held_out if corpus.flagged(IS_GREEDY)[row]][:answers]
    part = only_rows(corpus, chosen)
    last = opened.target.config.layers - 1
    features = corpus_features(part, open_target(opened.name, opened.target.placement, (*drafter.feature_layers, last)))
    return served_as_trained(drafter, opened, part, features, range(len(part)), k)
