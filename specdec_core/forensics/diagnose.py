"""A diagnosis of any batched greedy decoder: is it right, and if not, how is it wrong?

Every step is an experiment on the decoder: the batch, each row alone, batches without padding, other orders, other
neighbours, other caps. Their tokens are compared with those of autoregressive decoding, each prompt alone, on a target
that is trusted; the pattern of what is right and what is wrong then names the fault (diagnosis.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

from specdec_core.decode import decode
from specdec_core.forensics.diagnosis import Diagnosis
from specdec_core.forensics.diagnosis_experiments import (
    ALONE,
    CAP,
    LONGER,
    MARKED,
    PLAIN,
    RESTARTED,
    SHORTER,
    BatchDecoder,
    Caller,
    Experiment,
    Prompt,
    Run,
    experiments,
)
from specdec_core.forensics.diagnosis_judge import WRONG, Judge, Observation
from specdec_core.protocol import Drafter, LengthPolicy, Round, Target
from specdec_core.rows import Request
from specdec_core.sampling import Options


def diagnose(
    decoder: BatchDecoder,
    target: Target,
    prompts: Sequence[Sequence[int]],
    options: Options | None = None,
    reference: Target | None = None,
    *,
    special: Sequence[int] = (),
) -> Diagnosis:
    """Try `decoder` on variations of the batch `prompts` (at least two; of different lengths, or nothing is padded).

    target     trusted, with the decoder's weights, in its dtype: what is expected, and how large rounding is.
    options    max_new_tokens and eos that the decoder was made with; greedy, without penalties and min_new_tokens.
    reference  the target in float64 (Transformer.float64_reference()), which tells near-ties from errors. None excuses
               nothing: right if both sides are in float64. Near-ties of decode()'s own rounds are certified by
               replaying the batch (batch_ties.py), others by restarting the decoder before them; what neither repeats
               is reported as within rounding only.
    special    token ids that masks may be made from, besides the end tokens: the pad token.

    A decoder that raises fails that experiment only. Raises ValueError for options or prompts that cannot be diagnosed,
    RequestError for prompts that the target cannot decode.
    """
    options = options or Options()
    batch = [tuple(map(int, prompt)) for prompt in prompts]
    _require_fitting(batch, options)
    caller, cap = Caller(decoder), options.max_new_tokens
    marks = tuple(dict.fromkeys((*special, *options.eos)))

    def restart(again: Sequence[Prompt]) -> Run:
        return caller.first(again, cap)

    judge = Judge(target, options, reference, restart, marks)
    planned = experiments(batch, cap, target.context, marks)
    for prompt in batch:
        judge.right(prompt)  # first: what the target cannot decode is told before anything long runs
    found: list[Observation] = []
    for each in planned:
        if each.name != CAP or caller.takes_cap:
            found += judge.observe(each, caller.run(each.prompts, each.cap))
    for each in _restarts(batch, found, judge):
        found += judge.observe(each, restart(each.prompts))
    return Diagnosis(tuple(found), tuple(_skipped(planned, caller)), reference is not None)


def our_decoder(
    target: Target,
    options: Options,
    drafter: Drafter | None = None,
    policy: LengthPolicy | None = None,
    slots: int | None = None,
) -> Callable[..., Iterator[Round]]:
    """Our own loop over `slots` slots as a decoder that tells its rounds; no drafter and no policy: autoregressive."""

    def decoder(prompts: Sequence[Prompt], max_new_tokens: int = options.max_new_tokens) -> Iterator[Round]:
        capped = replace(options, max_new_tokens=max_new_tokens)
        requests = [Request(prompt, capped, policy, key) for key, prompt in enumerate(prompts)]
        return decode(target, requests, drafter, slots=slots)

    return decoder


def _restarts(batch: Sequence[Prompt], found: Sequence[Observation], judge: Judge) -> Iterator[Experiment]:
    """Rows that went wrong alone, started once more from the last place where they were right."""
    for each in found:
        if each.experiment == ALONE and each.outcome == WRONG and each.index > 0:
            yield Experiment(RESTARTED, ((*batch[each.row], *each.tokens[: each.index]),), (each.row,), 1)


def _skipped(planned: Sequence[Experiment], caller: Caller) -> Iterator[str]:
    names = {each.name for each in planned}
    if LONGER not in names:
        yield f"{LONGER} (the context has no room for one)"
    if SHORTER not in names:
        yield f"{SHORTER} (no prompt has more than one token)"
    if CAP in names and not caller.takes_cap:
        yield f"{CAP} (the decoder takes no max_new_tokens)"
    if CAP not in names:
        yield f"{CAP} (there is none below 1)"
    if not names & {PLAIN, MARKED}:
        yield f"{PLAIN}, {MARKED} (no end token and no special ones are named)"


def _require_fitting(batch: Sequence[Prompt], options: Options) -> None:
    if len(batch) < 2:
        raise ValueError(f"{len(batch)} prompts: expected at least two, since a batch is what is diagnosed")
    if not options.greedy or options.penalised or options.min_new_tokens or options.stop:
        raise ValueError(
            f"options {options}: expected plain greedy ones (temperature 0, no penalties, min_new_tokens or stop "
            "strings); audit() examines samplers"
        )
