"""Token records of the real model: sequences drawn by every method under every setting, with their target's scores.

They take long to draw and never depend on a clock, so they are drawn once and committed; all sampled tests of
losslessness (L3, L6) and their figures are computed from them.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from tqdm import tqdm

from specdec_core.bench.sources import DECODING
from specdec_core.decode import decode
from specdec_core.drafters.model import ModelDrafter
from specdec_core.drafters.ngram import NGramDrafter
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter, is_current
from specdec_core.evidence.token_records import TOKENS
from specdec_core.forensics.scoring import Scorer
from specdec_core.lengths.fixed import FixedLength
from specdec_core.models.rounding import rounded
from specdec_core.pairs import Opened
from specdec_core.prompts import DOMAINS, held_out, load_prompts
from specdec_core.protocol import Drafter, RowRound
from specdec_core.rows import Request
from specdec_core.sampling import Options
from specdec_core.targets.transformer import Transformer

CODE = (
    *DECODING,
    "specdec_core/models/rounding.py",
    "specdec_core/forensics/scoring.py",
    "specdec_core/bench/token_records.py",
)
"""What the records depend on."""

PROMPTS, LENGTH, K, BITS = 46, 200, 3, 4
"""The abstract's design: 46 prompts × 200 tokens = 9,200 tokens a method and repeat. End tokens are banned until then,
so that every sequence is as long. The drafter is the target rounded to BITS bits (it accepts about 70% a position)."""

AR, AR_AGAIN, SD, LOOKUP = "AR", "AR again", "SD", "SD look-up tree"
METHODS = (AR, AR_AGAIN, SD, LOOKUP)


@dataclass(frozen=True)
class Setting:
    """One way of sampling. `name` ends its file's name; `repeats`: sequences a prompt and method."""

    name: str
    temperature: float
    top_p: float
    repeats: int

    def options(self, eos: tuple[int, ...], length: int = LENGTH) -> Options:
        return Options(
            temperature=self.temperature, top_p=self.top_p, eos=eos, max_new_tokens=length, min_new_tokens=length
        )


SETTINGS = (
    Setting("t1", 1.0, 1.0, repeats=6),
    Setting("t1_nucleus", 1.0, 0.9, repeats=1),
    Setting("t07", 0.7, 1.0, repeats=1),
    Setting("t07_nucleus", 0.7, 0.9, repeats=1),
)
MAIN = SETTINGS[0]
"""Drawn live in a quick run; its AR tokens are scored too, for calibration."""


class TokenSource:
    """Draws and scores sequences of the pair (target, the same model in few bits)."""

    def __init__(self, opened: Opened):
        self._target = opened.target
        self._eos = opened.tokenizer.eos_ids
        alternative = Transformer(rounded(opened.checkpoint, BITS), opened.target.placement)
        self._drafters: dict[str, Drafter] = {
            SD: ModelDrafter(alternative, opened.target.vocabulary),
            LOOKUP: NGramDrafter(candidates=2),
        }
        self._scorer = Scorer(opened.target, alternative)
        prompts = [p for domain in DOMAINS for p in held_out(load_prompts(domain))[: -(-PROMPTS // len(DOMAINS))]]
        self._prompts = {p.id: tuple(opened.tokenizer.chat(p.messages)) for p in prompts[:PROMPTS]}

    def draw(self, setting: Setting, method: str, repeat: int, scored: bool) -> Iterator[dict[str, Any]]:
        """Records of TOKENS: one sequence a prompt."""
        drafter = self._drafters.get(method)
        policy = FixedLength(K) if drafter is not None else None
        # Methods draw from streams of their own: equal seeds would make AR and SD accept and draw alike.
        seed = zlib.crc32(f"{method} {repeat}".encode())
        options = replace(setting.options(self._eos), seed=seed)
        requests = [Request(p, options, policy, key) for key, p in enumerate(self._prompts.values())]
        rows: dict[int, list[RowRound]] = {key: [] for key in range(len(requests))}
        for each in decode(self._target, requests, drafter):
            for row in each.rows:
                rows[row.key].append(row)
        for key, (prompt_id, prompt) in enumerate(self._prompts.items()):
            tokens = [token for row in rows[key] for token in row.emitted]
            yield {
                "setting": setting.name,
                "temperature": setting.temperature,
                "top_p": setting.top_p,
                "method": method,
                "prompt_id": prompt_id,
                "repeat": repeat,
                "tokens": tokens,
                "offsets": "".join(str(offset) for row in rows[key] for offset in range(len(row.emitted))),
                "endings": "".join(map(_endings, rows[key])),
                **self._scores(prompt, tokens, options, f"{setting.name} {method} {repeat} {key}", scored),
            }

    def _scores(
        self, prompt: Sequence[int], tokens: Sequence[int], options: Options, name: str, scored: bool
    ) -> dict[str, Any]:
        if not scored:
            return {"pit": None, "in_set": None, "mass": None, "ratio": None}
        found = self._scorer.score(prompt, tokens, options, zlib.crc32(name.encode()))
        return {
            "pit": [round(value, 6) for value in found.pit.tolist()],
            "in_set": "".join("01"[value] for value in found.in_set.tolist()),
            "mass": [round(value, 5) for value in found.mass.tolist()],
            "ratio": [float(f"{value:.4g}") for value in found.ratio.tolist()],
        }


def record_tokens(opened: Opened, profile: str, layout: Layout | None = None, progress: bool = True) -> None:
    """Draw every setting and method, `repeats` times 9,200 tokens each (look-up: once), one file a setting.

    Files that are there and made by this code are left: a run that was interrupted goes on at the next setting.
    """
    layout = layout or Layout()
    source = TokenSource(opened)
    for setting in SETTINGS:
        folder, name = layout.records(profile), file_name(setting)
        if is_current(folder / f"{name}.jsonl", TOKENS, layout):
            continue
        jobs = [(method, repeat) for method in METHODS for repeat in range(1 if method == LOOKUP else setting.repeats)]
        with RecordWriter(folder, name, TOKENS, fingerprint(profile), code=CODE, layout=layout) as file:
            for method, repeat in tqdm(jobs, f"tokens, {setting.name}", disable=not progress):
                scored = method in (SD, LOOKUP) or setting == MAIN
                for row in source.draw(setting, method, repeat, scored):
                    file.append(row)


def file_name(setting: Setting) -> str:
    return f"01_tokens_{setting.name}"


def _endings(row: RowRound) -> str:
    """One letter a token: a accepted, r recovered, b bonus."""
    last = {"recovered": "r", "bonus": "b", "cut": ""}[row.ending]
    return "a" * row.accepted + last
