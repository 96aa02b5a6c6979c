"""Notebook 01: the decoder proved lossless. Each part measures, records under 01_*, and returns its rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from specdec_core.bench import greedy, token_records
from specdec_core.bench.audit import NAME as AUDIT_NAME
from specdec_core.bench.audit import real_pair, record_audit, tiny_pair
from specdec_core.bench.greedy import greedy_agreement
from specdec_core.bench.token_records import AR, AR_AGAIN, LOOKUP, MAIN, SD, SETTINGS, Setting, TokenSource
from specdec_core.drafters.layer_skip import LayerSkipDrafter
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.evidence.audit_records import AUDIT
from specdec_core.evidence.evaluate import load_rows
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.lossless_analysis import law_curves, law_tests, sizes
from specdec_core.evidence.lossless_records import EXACT_LAW, GREEDY, KILL, LAW_CURVE, LAW_TEST, SIZE
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter, find_records, is_current
from specdec_core.evidence.schemas import RecordError, Schema
from specdec_core.evidence.token_records import TOKENS
from specdec_core.forensics.exact_grid import grid, measure
from specdec_core.forensics.exact_models import measure_models
from specdec_core.forensics.kill_matrix import examine
from specdec_core.forensics.mutants import MUTANTS
from specdec_core.measure.sweep import Case
from specdec_core.models.rounding import rounded
from specdec_core.pairs import Opened
from specdec_core.placement import Placement
from specdec_core.prompts import held_out, load_prompts
from specdec_core.protocol import Drafter
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer

if TYPE_CHECKING:
    import pandas as pd

Row = dict[str, Any]

EXACT_CODE = (
    *token_records.DECODING,
    "specdec_core/targets/table.py",
    "specdec_core/forensics/enumeration.py",
    "specdec_core/forensics/exact_drafters.py",
    "specdec_core/forensics/exact_grid.py",
    "specdec_core/forensics/exact_models.py",
)
LAW_CODE = (*token_records.CODE, "specdec_core/statistics", "specdec_core/evidence/lossless_analysis.py")
KILL_CODE = (
    *EXACT_CODE,
    "specdec_core/statistics",
    "specdec_core/forensics/scoring.py",
    "specdec_core/forensics/mutations_parts.py",
    "specdec_core/forensics/mutations_rule.py",
    "specdec_core/forensics/mutants.py",
    "specdec_core/forensics/kill_matrix.py",
    "specdec_core/forensics/kill_sampled.py",
    "specdec_core/forensics/kill_subject.py",
)


SKIPPED_TO = 10
"""Layers of the target that draft in its stead, of 30."""


@dataclass(frozen=True)
class LosslessPlan:
    """How much to do.

    live           draw the main setting now (9,200 tokens a method) and read the rest from committed token records; if
                   not, draw everything (token_records.SETTINGS) and read nothing.
    kill_tokens    for the sampled tests of each mutant; thorough: also of those that exact tests have seen.
    greedy_prompts and greedy_tokens each; torch_prompts: of them on plain torch.
    """

    live: bool
    kill_tokens: int
    thorough: bool
    greedy_prompts: int
    greedy_tokens: int
    torch_prompts: int


PLANS = {
    "quick": LosslessPlan(True, 1_000, False, greedy_prompts=8, greedy_tokens=20, torch_prompts=1),
    "full": LosslessPlan(False, 20_000, True, greedy_prompts=144, greedy_tokens=48, torch_prompts=36),
}


def prove_exactly(profile: str, layout: Layout | None = None) -> list[Row]:
    """EXACT_LAW rows of the grid and of tiny transformers."""
    rows = (row for rows in (map(measure, grid()), measure_models()) for row in rows)
    return _record("01_exact_law", EXACT_LAW, rows, EXACT_CODE, profile, layout)


@dataclass(frozen=True)
class LawRows:
    """What the sampled tests of the real model found."""

    tests: list[Row]
    curves: list[Row]
    sizes: list[Row]


def sample_law(plan: LosslessPlan, opened: Opened, profile: str, layout: Layout | None = None) -> LawRows:
    """LAW_TEST, LAW_CURVE and SIZE rows of every setting. RecordError if committed token records are wanted and absent,
    or were drawn by other code than this."""
    layout = layout or Layout()
    if not plan.live:
        token_records.record_tokens(opened, profile, layout)
    tokens = {setting: _tokens(setting, profile, plan.live, layout) for setting in SETTINGS}
    null = tokens[MAIN]
    if plan.live:
        tokens[MAIN] = _with_live(null, opened)
    live = {setting for setting in SETTINGS if setting == MAIN or not plan.live}
    tests = [row for setting, rows in tokens.items() for row in law_tests(rows, setting in live)]
    curves = [row for rows in tokens.values() for row in law_curves(rows)]
    return LawRows(
        _record("01_law_tests", LAW_TEST, tests, LAW_CODE, profile, layout),
        _record("01_law_curves", LAW_CURVE, curves, LAW_CODE, profile, layout),
        _record("01_sizes", SIZE, sizes(null, not plan.live), LAW_CODE, profile, layout),
    )


def _with_live(committed: Sequence[Row], opened: Opened) -> list[Row]:
    """The first repeat of the design, AR and SD drawn now, the other arms as committed."""
    source = TokenSource(opened)
    drawn = [row for method in (AR, SD) for row in source.draw(MAIN, method, 0, scored=method == SD)]
    return [*drawn, *(row for row in committed if row["method"] in (AR_AGAIN, LOOKUP) and row["repeat"] == 0)]


def _tokens(setting: Setting, profile: str, committed: bool, layout: Layout) -> list[Row]:
    folder = layout.kept_records if committed else layout.records(profile)
    return _committed(TOKENS, f"{token_records.file_name(setting)}.jsonl", folder, layout)


def _committed(schema: Schema, name: str, folder: Path, layout: Layout) -> list[Row]:
    """Rows of the newest file of this name. RecordError if there is none, or if other code than this made it."""
    files = [file for file in find_records(schema, folder=folder, layout=layout) if file.path.name == name]
    if not files:
        raise RecordError(f"no records {name}: run notebook 01 with the full profile once, and keep them")
    if files[0].is_stale(layout):
        raise RecordError(f"{name} was made by other code than this: run notebook 01 with the full profile again")
    return list(load_rows(files[0].path))


def kill_mutants(plan: LosslessPlan, profile: str, layout: Layout | None = None, progress: bool = False) -> list[Row]:
    """KILL rows of the clean decoder and every mutant."""
    zoo = tqdm((None, *MUTANTS), "mutants", disable=not progress)
    rows = (row for mutant in zoo for row in examine(mutant, plan.kill_tokens, plan.thorough))
    return _record("01_kills", KILL, rows, KILL_CODE, profile, layout)


def agree_greedily(plan: LosslessPlan, opened: Opened, profile: str, layout: Layout | None = None) -> list[Row]:
    """GREEDY rows: the compiled engine with every kind of drafter, all rows in one batch; plain torch row by row."""
    prompts = load_prompts() if plan.greedy_prompts > 108 else held_out(load_prompts())
    step = max(1, len(prompts) // plan.greedy_prompts)
    chosen = prompts[::step][: plan.greedy_prompts]
    cases = [Case(p.id, p.domain, p.split, tuple(opened.tokenizer.chat(p.messages))) for p in chosen]
    options = Options(max_new_tokens=plan.greedy_tokens, eos=opened.tokenizer.eos_ids)
    target = opened.target
    coarse = Transformer(rounded(opened.checkpoint, token_records.BITS), target.placement)
    drafters: dict[str, Drafter] = {
        "look-up": NGramDrafter(),
        "look-up tree": NGramDrafter(candidates=2),
        "4-bit copy": ModelDrafter(coarse, target.vocabulary),
        "first layers": LayerSkipDrafter(target, SKIPPED_TO),
    }
    compare = partial(greedy_agreement, reference=target.float64_reference(), options=options)
    peer = target.placed(Placement("torch", threads=target.placement.threads))

    def rows() -> Iterator[Row]:
        yield from compare("numba float32", target, drafters=drafters, cases=cases, slots=16)
        for case in cases[: plan.torch_prompts]:
            lookup: dict[str, Drafter] = {"look-up": NGramDrafter()}
            yield from compare("torch float32", peer, drafters=lookup, cases=[case])

    return _record("01_greedy", GREEDY, rows(), greedy.CODE, profile, layout)


def audit_samplers(plan: LosslessPlan, opened: Opened, profile: str, layout: Layout | None = None) -> list[Row]:
    """AUDIT rows: transformers' samplers and ours on a tiny and on the real pair; a live run reads committed ones.

    RecordError as `sample_law`.
    """
    layout = layout or Layout()
    if not plan.live:
        path = layout.records(profile) / f"{AUDIT_NAME}.jsonl"
        if not is_current(path, AUDIT, layout):
            record_audit(layout.records(profile), [tiny_pair(), real_pair(opened)], fingerprint(profile), layout)
        return list(load_rows(path))
    return list(_committed(AUDIT, f"{AUDIT_NAME}.jsonl", layout.kept_records, layout))


def audit_table(rows: Sequence[Row]) -> pd.DataFrame:
    """A line an audit: tokens, the test that came nearest to rejecting, the directed bias and the verdict."""
    import pandas as pd

    table = pd.DataFrame(rows)
    held = table.dropna(subset=["adjusted"]).sort_values("adjusted", kind="stable")
    keys = ["pair", "setting", "decoder"]
    nearest = held.groupby(keys, sort=False).first()[["test", "adjusted", "tokens", "bias", "low", "high", "tv_lower"]]
    order = table.drop_duplicates(keys).set_index(keys).index
    return (
        nearest.assign(verdict=table.groupby(keys)["verdict"].first())
        .loc[order]
        .rename(columns={"test": "nearest test", "adjusted": "its adjusted p", "tv_lower": "TV ≥"})
    )


def _record(
    name: str, schema: Schema, rows: Iterable[Row], code: Sequence[str], profile: str, layout: Layout | None
) -> list[Row]:
    layout = layout or Layout()
    kept = []
    with RecordWriter(layout.records(profile), name, schema, fingerprint(profile), code=code, layout=layout) as file:
        for row in rows:
            kept.append(schema.validated(row))
            file.append(row)
    return kept
