"""What a cheaper engine loses: KL and top-1 agreement with the same weights in float32, along the target's own answers.

Both engines are forced along the same texts, our float32 target's greedy answers, so that every position is seen with
the same tokens before it. Every engine is compared with the float32 form of the very values that it was made from:
llama.cpp's formats with its F32, MLX's with its float32, our int8 with our float32. Two floors (float32 with float64,
one engine's float32 with the other's) tell how much of it is rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from specdec_core.arrays import host
from specdec_core.bench.backend_sweep import cases_of
from specdec_core.bench.peer_own import FLOAT32, INT8
from specdec_core.bench.serial_backends import CODE as BACKEND_CODE
from specdec_core.bench.serial_backends import NOT_HERE, WIDEST, BackendFactory
from specdec_core.bench.sources import LOOP
from specdec_core.decode import generate
from specdec_core.evidence.layout import Layout, known_profile
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.quality_records import QUALITY, pooled_quality
from specdec_core.evidence.records import RecordWriter
from specdec_core.evidence.serial_records import ABSENT
from specdec_core.measure.sweep import Case
from specdec_core.prompts import load_prompts
from specdec_core.protocol import Target
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.mlx import MlxTarget
from specdec_core.topology import chain, forest

if TYPE_CHECKING:
    import pandas as pd

CODE = (
    *dict.fromkeys((*BACKEND_CODE, *LOOP)),
    *(f"specdec_core/bench/{name}.py" for name in ("backend_sweep", "peer_own", "peer_decoders", "quality")),
)
"""What the records depend on."""

FLOAT64, LLAMA, MLX = "torch float64", "llama.cpp F32", "MLX float32"


@dataclass(frozen=True)
class QualityPlan:
    """How much to look at: prompts of each domain, and tokens of an answer at most."""

    prompts: int
    max_new_tokens: int
    formats: tuple[str, ...] = ("Q8_0", "Q4_1", "Q4_0")
    bits: tuple[int, ...] = (8, 4)


PLANS = {
    "quick": QualityPlan(prompts=2, max_new_tokens=24, bits=()),
    "full": QualityPlan(prompts=16, max_new_tokens=64),
}
"""Quick leaves out MLX, which takes a fifth of a second a token on a CPU. Answers may end early: some 140 positions and
2,500."""


@dataclass(frozen=True)
class Comparison:
    """An engine and the one whose laws it is measured by."""

    engine: str
    reference: str
    open_engine: Callable[[], Target]
    open_reference: Callable[[], Target]


@dataclass(frozen=True)
class Answer:
    """A prompt and what the target says to it."""

    case: Case
    tokens: tuple[int, ...]


@dataclass(frozen=True)
class QualityRows:
    """Records of QUALITY and ABSENT."""

    quality: list[dict[str, Any]]
    absent: list[dict[str, Any]]


def measure_quality(
    plan: QualityPlan, factory: BackendFactory, profile: str, *, name: str = "03", layout: Layout | None = None
) -> QualityRows:
    """Compare every engine of the plan that is here; recorded as NAME_quality and NAME_quality_absent."""
    layout = layout or Layout()
    provenance = fingerprint(known_profile(profile), threads=factory.threads)
    tokenizer = factory.opened.tokenizer
    target = factory.open(FLOAT32)
    cases = cases_of(load_prompts(), tokenizer, 0, plan.prompts)
    answers = write_answers(target, cases, plan.max_new_tokens, tokenizer.eos_ids)
    rows = QualityRows([], [])

    def writer(what: str, schema) -> RecordWriter:
        return RecordWriter(layout.records(profile), f"{name}_{what}", schema, provenance, code=CODE, layout=layout)

    with writer("quality", QUALITY) as quality, writer("quality_absent", ABSENT) as absences:
        for comparison in comparisons(plan, factory):
            try:
                engine, reference = comparison.open_engine(), comparison.open_reference()
            except NOT_HERE as error:
                rows.absent.append({"backend": comparison.engine, "reason": str(error)})
                absences.append(rows.absent[-1])
                continue
            for row in compare(engine, reference, answers):
                named = {"engine": comparison.engine, "reference": comparison.reference, "answers": FLOAT32, **row}
                quality.append(named)
                rows.quality.append(named)
    return rows


def comparisons(plan: QualityPlan, factory: BackendFactory) -> list[Comparison]:
    """The floors first, then every engine of the plan."""
    checkpoint, ours = factory.opened.checkpoint, partial(factory.open, FLOAT32)
    llama, mlx = partial(factory.open, LLAMA), partial(MlxTarget, checkpoint)
    found = [
        Comparison(FLOAT32, FLOAT64, ours, factory.opened.target.float64_reference),
        Comparison(LLAMA, FLOAT32, llama, ours),
        Comparison(INT8, FLOAT32, partial(factory.open, INT8), ours),
    ]
    for kind in plan.formats:
        name = f"llama.cpp {kind}"
        found.append(Comparison(name, LLAMA, partial(factory.open, name), llama))
    for bits in plan.bits:
        name = f"MLX {bits}-bit"
        found.append(Comparison(name, MLX, partial(factory.open, name), mlx))
    return found


def write_answers(target: Target, cases: Sequence[Case], max_new_tokens: int, eos: tuple[int, ...]) -> list[Answer]:
    """The target's greedy answers."""
    options = Options(max_new_tokens=max_new_tokens, eos=eos)
    return [Answer(case, generate(target, [Request(case.tokens, options)])[0].tokens) for case in cases]


def compare(engine: Target, reference: Target, answers: Sequence[Answer]) -> Iterator[dict[str, Any]]:
    """What `engine` loses on each answer: the measured fields of QUALITY. ValueError for unequal vocabularies."""
    if engine.vocabulary != reference.vocabulary:
        raise ValueError(
            f"vocabularies of {engine.vocabulary} and {reference.vocabulary} tokens: laws are compared token by token; "
            "give two engines with the same model"
        )
    for answer in answers:
        parts = zip(
            *(forced_logits(each, answer.case.tokens, answer.tokens) for each in (reference, engine)), strict=True
        )
        losses, agreed = [], 0
        for truth, other in parts:
            losses.append(divergences(truth, other))
            agreed += int((truth.argmax(axis=1) == other.argmax(axis=1)).sum())
        kl = np.concatenate(losses)
        yield {
            "prompt_id": answer.case.prompt_id,
            "domain": answer.case.domain,
            "positions": len(kl),
            "kl": float(kl.sum()),
            "kl_largest": float(kl.max()),
            "agreed": agreed,
        }


def forced_logits(
    target: Target, prompt: Sequence[int], answer: Sequence[int], width: int = WIDEST
) -> Iterator[np.ndarray]:
    """Logits `[n, V]` (float64) before each token of `answer`, n ≤ `width` at a time: passes over the text itself."""
    fed = np.array([*prompt, *answer[:-1]], np.int64)
    state, slots = target.new_state(1, len(fed)), np.array([0])
    target.prefill(state, slots, [fed[: len(prompt)]])
    for start in range(len(prompt) - 1, len(fed), width):
        tokens = fed[start : start + width]
        found = target.verify(state, slots, tokens, forest([chain(len(tokens))]))
        yield np.array(host(found.logits), np.float64)
        target.commit(state, found, [np.arange(len(tokens))])


def divergences(truth: np.ndarray, other: np.ndarray) -> np.ndarray:
    """KL(p ‖ q) in nats of each row, `[n]`, p and q being the softmax of logits `truth` and `other` `[n, V]`.

    Never below zero, where rounding would put equal laws.
    """
    p, q = _log_softmax(truth), _log_softmax(other)
    return np.maximum((np.exp(p) * (p - q)).sum(axis=1), 0.0)


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    shifted = logits - logits.max(axis=1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(axis=1, keepdims=True))


def quality_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """A line an engine, from QUALITY rows: KL from its reference in thousandths of a nat a position, and how often both
    hold the same token for the most probable, in per cent; each with its interval."""
    import pandas as pd

    table = [
        {
            "engine": each.engine,
            "reference": each.reference,
            "positions": each.positions,
            "KL, mnat": 1e3 * each.kl.estimate if each.kl else 0.0,
            "KL interval": f"{1e3 * each.kl.low:.3g} to {1e3 * each.kl.high:.3g}" if each.kl else "all are 0",
            "largest KL": 1e3 * each.kl_largest,
            "same token, %": 100 * each.agreement.estimate,
            "same interval": f"{100 * each.agreement.low:.4g} to {100 * each.agreement.high:.4g}",
        }
        for each in pooled_quality(rows)
    ]
    return pd.DataFrame(table).set_index("engine")
