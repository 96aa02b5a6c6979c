"""Patterns of right and wrong rows (diagnose.py), and the faults that they are signatures of."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from specdec_core.forensics import diagnosis_experiments as names
from specdec_core.forensics.diagnosis_judge import FAILED, LONG, ROUNDED, SAME, SHORT, TIE, WRONG, Observation


@dataclass(frozen=True)
class Features:
    """What signatures are told by. A wrong row has a wrong token, which no near-tie excuses. False where unknown.

    failed, differs, rounded  the decoder raised; some row is not token for token the expected one; some near-tie has
                              no control.
    wrong, short, long        some row, in any experiment.
    repeatable                the same batch gave the same wrong tokens twice.
    alone, repeated           a prompt is wrong in a batch of one; in a batch of its copies.
    cut                       prompts cut to equal lengths are wrong together.
    padded_only, at_start     every wrong row is shorter than the longest of its batch; one is wrong from token 0.
    special_only              every wrong prompt holds a special token, and others are right.
    order, content            a row's tokens change with the order of the rows; with the content of its neighbours, at
                              the same lengths. Changes between right outputs (near-ties) do not count.
    leaks                     they change with the content before any row got another number of tokens than before.
    after_rejection           every wrong row had a draft token rejected before; after_whole: a draft accepted whole;
                              after_unequal: came after a round in which rows got unequally many tokens.
    kept                      every first wrong token is an accepted draft token.
    heals                     rows that are wrong alone go on right if restarted from their own text.
    """

    failed: bool
    differs: bool
    rounded: bool
    wrong: bool
    short: bool
    long: bool
    repeatable: bool
    alone: bool
    repeated: bool
    cut: bool
    padded_only: bool
    at_start: bool
    special_only: bool
    order: bool
    content: bool
    leaks: bool
    after_rejection: bool
    after_whole: bool
    after_unequal: bool
    kept: bool
    heals: bool


def features(observations: Sequence[Observation]) -> Features:
    """The features of what all experiments of one diagnosis showed."""
    wrong = [each for each in observations if each.outcome == WRONG and each.experiment != names.RESTARTED]
    right = [each for each in observations if each.outcome in (SAME, TIE, ROUNDED)]
    restarted = [each.outcome for each in observations if each.experiment == names.RESTARTED]
    outcomes = {each.outcome for each in observations}

    def is_wrong(name: str) -> bool:
        return any(each.experiment == name for each in wrong)

    def every(name: str) -> bool:
        return bool(wrong) and all(getattr(each, name) for each in wrong)

    content = list(_changes(observations, names.CONTENT))
    return Features(
        failed=FAILED in outcomes,
        differs=outcomes != {SAME},
        rounded=ROUNDED in outcomes,
        wrong=bool(wrong),
        short=SHORT in outcomes,
        long=LONG in outcomes,
        repeatable=not list(_changes(observations, names.AGAIN)),
        alone=is_wrong(names.ALONE),
        repeated=is_wrong(names.REPEATED),
        cut=is_wrong(names.CUT),
        padded_only=every("padding"),
        at_start=any(each.index == 0 for each in wrong),
        special_only=every("special") and any(not each.special for each in right),
        order=bool(list(_changes(observations, names.PERMUTED))),
        content=bool(content),
        leaks=any(_leaks(*pair) for pair in content),
        after_rejection=every("after_rejection"),
        after_whole=every("after_whole"),
        after_unequal=every("after_unequal"),
        kept=every("kept"),
        heals=bool(restarted) and set(restarted) <= {SAME, TIE, ROUNDED},
    )


def _changes(observations: Sequence[Observation], name: str) -> Iterator[tuple[Observation, Observation]]:
    """Rows whose tokens in this experiment are others than in the whole batch, and wrong in at least one of the two."""
    before = {each.row: each for each in observations if each.experiment == names.WHOLE}
    for after in observations:
        if after.experiment == name and after.row in before:
            one = before[after.row]
            if one.tokens != after.tokens and WRONG in (one.outcome, after.outcome):
                yield one, after


def _leaks(one: Observation, other: Observation) -> bool:
    """Whether tokens differ although all rows got as many tokens as before until then: lengths cannot be the reason."""
    if one.counts is None or other.counts is None:
        return False
    pairs = enumerate(zip(one.tokens, other.tokens, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), min(len(one.tokens), len(other.tokens)))
    rounds = [_round_of(each, index) for each in (one, other)]
    return one.counts[: rounds[0]] == other.counts[: rounds[1]]


def _round_of(each: Observation, index: int) -> int:
    done = 0
    for number, counts in enumerate(each.counts or ()):
        done += max(counts[each.place], 0)
        if index < done:
            return number
    return len(each.counts or ())


@dataclass(frozen=True)
class Signature:
    """A pattern of errors: its name, what is seen, what to look at, and the features that it is told by."""

    name: str
    seen: str
    look: str
    holds: Callable[[Features], bool]


def _excused(f: Features) -> bool:
    return f.differs and not (f.failed or f.wrong or f.short or f.long)


SIGNATURES = (
    Signature(
        "raises",
        "the decoder raises, or returns what cannot be read",
        "the message of the first failed row; whether only some batches fail (lengths, one row, cap)",
        lambda f: f.failed,
    ),
    Signature("clean", "every row is token for token the expected one", "nothing", lambda f: not f.differs),
    Signature(
        "certified near-ties only",
        "rows differ only where rounding decides, and a control without the decoder's history emits the same token",
        "nothing: both tokens are right",
        lambda f: _excused(f) and not f.rounded,
    ),
    Signature(
        "within rounding only",
        "rows differ only where rounding may decide, but no control repeats it",
        "nothing, as a rule; run the decoder in float64, where such differences must vanish",
        lambda f: _excused(f) and f.rounded,
    ),
    Signature(
        "not repeatable",
        "the same batch gives other tokens the second time, and wrong ones",
        "state that survives a call: caches, position counters, generators; memory read before it is written",
        lambda f: not f.repeatable,
    ),
    Signature(
        "too short",
        "perfect prefix, wrong length: rows end early",
        "whether one row's end token or cap ends the batch, and whether end tokens are looked for in the prompt",
        lambda f: f.short and not f.long and not f.wrong,
    ),
    Signature(
        "too long",
        "perfect prefix, wrong length: rows go on",
        "whether end token and cap are looked for at every token of a round, or only at its last",
        lambda f: f.long and not f.short and not f.wrong,
    ),
    Signature(
        "wrong length",
        "perfect prefix, wrong length: some rows end early, some go on",
        "how end token and cap are counted, row by row",
        lambda f: f.long and f.short and not f.wrong,
    ),
    Signature(
        "mask made from ids",
        "wrong only where a prompt holds an end or pad token",
        "a mask of the form ids != pad: keep the true lengths and build the mask from them",
        lambda f: f.special_only,
    ),
    Signature(
        "draft token kept",
        "wrong from the first mismatch: every first wrong token is a draft token that was accepted",
        "the comparison of draft and target tokens: an index off by one, or a bound that accepts too much",
        lambda f: f.kept and f.alone and not f.after_rejection,
    ),
    Signature(
        "spoiled by a whole acceptance",
        "right until a draft is accepted whole, wrong after",
        "the last draft token's cache entry, which no verification has written when the bonus token is emitted",
        lambda f: f.after_whole and f.alone and not f.after_rejection,
    ),
    Signature(
        "padding at prefill",
        "padded rows wrong from token 0; alone, and with equal lengths, right",
        "padding visible (the mask of the prefill), or positions not repaired (they must count from a row's own start)",
        lambda f: f.padded_only and f.at_start and not f.special_only,
    ),
    Signature(
        "padding in later steps",
        "padded rows right at token 0 and wrong later; alone, and with equal lengths, right",
        "mask and positions after the prefill: whether each step extends them by the row's own tokens",
        lambda f: f.padded_only and not f.at_start and not f.special_only,
    ),
    Signature(
        "neighbours' content",
        "rows depend on their neighbours' content, at equal lengths and numbers of tokens",
        "cross-row writes and shared state: indices of rows, slots and cache entries, one buffer for all rows",
        lambda f: f.leaks,
    ),
    Signature(
        "unequal acceptance",
        "right alone and among copies, wrong after rows of a batch got unequally many tokens",
        "realignment: KV entries, positions and masks must move by each row's own number of rejected tokens",
        lambda f: f.cut and f.after_unequal and not f.alone and not f.repeated,
    ),
    Signature(
        "drift after rejections",
        "right until the first rejection, wrong after",
        "rollback: stale KV entries left visible, or positions that count rejected tokens",
        lambda f: f.after_rejection and (f.heals or not f.alone),
    ),
    Signature(
        "spoiled by earlier rounds",
        "wrong alone too, but right when restarted from its own text",
        "what is carried from round to round: cache entries, positions, mask",
        lambda f: f.alone and f.heals,
    ),
    Signature(
        "wrong alone too",
        "the single-row decoder or the model differs from the trusted target",
        "weights, dtype, tokenizer, positions and options of both; then batch 1 before any batch",
        lambda f: f.alone and not f.heals,
    ),
    Signature(
        "neighbours' content or lengths",
        "rows depend on their neighbours' content; whether through numbers of accepted tokens cannot be told",
        "cross-row writes and shared state; if it drafts, realignment after unequal acceptance (tell its rounds)",
        lambda f: f.content and not f.leaks,
    ),
    Signature(
        "order of rows",
        "a row's tokens depend on its place in the batch",
        "whatever is indexed by the place in the batch: lengths, positions, random streams",
        lambda f: f.order,
    ),
    Signature(
        "any batch",
        "right alone, wrong in a batch even of copies",
        "broadcasts over the batch: masks, positions and indices made for one row",
        lambda f: f.repeated and not f.alone,
    ),
)
"""In the order in which they name a verdict: what is more particular comes first."""

UNKNOWN = Signature(
    "no known pattern", "errors that fit no signature", "the table, row by row", lambda f: f.wrong or f.short or f.long
)


def matching(found: Features) -> tuple[Signature, ...]:
    """Every signature that holds, the most particular first; UNKNOWN if none does."""
    return tuple(each for each in SIGNATURES if each.holds(found)) or (UNKNOWN,)
