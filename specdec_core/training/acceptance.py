"""How much of a draft is accepted when the drafter serves: real decoding of the prompts that nothing trained on."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_core.decode import decode, outputs
from specdec_core.lengths.fixed import FixedLength
from specdec_core.measure.cost_model import count
from specdec_core.measure.sweep import is_repetitive
from specdec_core.pairs import Opened
from specdec_core.prompts import Prompt
from specdec_core.protocol import Drafter, Round, RowRound
from specdec_core.rows import Request
from specdec_core.sampling import Options


@dataclass(frozen=True)
class Arm:
    """A way to use a drafter: its name, the drafter, K (a tree's depth) and the temperature."""

    name: str
    drafter: Drafter
    k: int
    temperature: float = 0.0


def acceptance_rows(
    opened: Opened, arms: Sequence[Arm], prompts: Sequence[Prompt], max_new_tokens: int, slots: int = 8
) -> Iterator[dict[str, Any]]:
    """Decode all prompts with every arm; one row (evidence.training_records.ACCEPTANCE) a prompt and arm.

    `repetitive` is told of the prompt's greedy continuation (measure.sweep.is_repetitive), whatever the temperature.
    """
    tokenizer = opened.tokenizer
    ids = [tuple(tokenizer.chat(prompt.messages)) for prompt in prompts]

    def run(drafter: Drafter | None, k: int, temperature: float) -> list[Round]:
        options = Options(temperature, max_new_tokens=max_new_tokens, eos=tokenizer.eos_ids)
        policy = FixedLength(k) if drafter else None
        requests = [Request(tokens, options, policy, key=key) for key, tokens in enumerate(ids)]
        return list(decode(opened.target, requests, drafter, slots=min(slots, len(ids))))

    plain = outputs(run(None, 0, 0.0), len(ids))
    for arm in arms:
        rounds = run(arm.drafter, arm.k, arm.temperature)
        emitted = outputs(rounds, len(ids))
        own: list[list[RowRound]] = [[] for _ in ids]
        for row in (row for each in rounds for row in each.rows):
            own[row.key].append(row)
        for key, prompt in enumerate(prompts):
            counts = count([Round(0, tuple(own[key]), 0)])
            yield {
                "arm": arm.name,
                "K": arm.k,
                "temperature": arm.temperature,
                "prompt_id": prompt.id,
                "domain": prompt.domain,
                "split": prompt.split,
                "repetitive": is_repetitive(plain[key].tokens),
                "identical": emitted[key].tokens == plain[key].tokens,
                "tokens": counts.tokens,
                "target_passes": counts.rounds,
                "nodes": sum(sum(row.drafted) for row in own[key]),
                "tested_by_position": counts.tested.tolist(),
                "accepted_by_position": counts.accepted.tolist(),
            }


def tau(rows: Iterable[Mapping[str, Any]]) -> float:
    """τ of rows together: tokens emitted per target pass."""
    chosen = list(rows)
    return sum(row["tokens"] for row in chosen) / sum(row["target_passes"] for row in chosen)
