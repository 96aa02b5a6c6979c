"""The prompts that everything is measured on, and their split into those for tuning and those held out."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar, cast

FOLDER = Path(__file__).resolve().parent.parent / "data" / "prompts"
DOMAINS = ("math", "code", "chat")
Item = TypeVar("Item")
_ENTRIES = {"id", "text", "length", "system"}


@dataclass(frozen=True)
class Prompt:
    """One user message.

    length  'short' or 'long': the answer that it asks for, not the prompt.
    system  a system message to go before it, or None for the chat template's own.
    split   'tuning' (settings are chosen on these) or 'report' (and confirmed on these).
    """

    id: str
    domain: str
    text: str
    length: Literal["short", "long"]
    system: str | None = None
    split: Literal["tuning", "report"] = "report"

    @property
    def messages(self) -> list[dict[str, str]]:
        """The prompt as chat messages, for `Tokenizer.chat`."""
        system = [{"role": "system", "content": self.system}] if self.system is not None else []
        return [*system, {"role": "user", "content": self.text}]


def load_prompts(domain: str | None = None) -> tuple[Prompt, ...]:
    """The prompts of one domain ('math', 'code', 'chat') or of all, in the files' order.

    Every fourth prompt of a domain's file (the 4th, 8th, …) is for tuning, the rest for reporting. The place in the
    file decides, so prompts are only ever appended. Raises ValueError for an unknown domain or a malformed file.
    """
    if domain is not None and domain not in DOMAINS:
        raise ValueError(f"no prompts for {domain!r}; the domains are {', '.join(DOMAINS)}")
    prompts = tuple(prompt for name in DOMAINS if domain in {None, name} for prompt in _read(name))
    seen: set[str] = set()
    for prompt in prompts:
        if prompt.id in seen:
            raise ValueError(f"the prompt id {prompt.id!r} appears twice in {FOLDER}; give each its own")
        seen.add(prompt.id)
    return prompts


def tuning(prompts: Iterable[Prompt]) -> tuple[Prompt, ...]:
    """Those among `prompts` that settings may be chosen on."""
    return tuple(prompt for prompt in prompts if prompt.split == "tuning")


def held_out(prompts: Iterable[Prompt]) -> tuple[Prompt, ...]:
    """Those among `prompts` that settings must not have been chosen on: what is reported."""
    return tuple(prompt for prompt in prompts if prompt.split == "report")


def spread(items: Sequence[Item], count: int) -> list[Item]:
    """At most `count` of the items, evenly from all of them: of prompts, some of every domain."""
    return list(items[:: max(1, len(items) // max(1, count))][:count])


def _read(domain: str) -> list[Prompt]:
    file = FOLDER / f"{domain}.jsonl"
    if not file.is_file():
        raise FileNotFoundError(f"{file} is absent; the prompts lie beside the package, so run it from a checkout")
    lines = [line for line in file.read_text(encoding="utf-8").split("\n") if line.strip()]
    return [_parse(line, domain, index, f"{file}, prompt {index + 1}") for index, line in enumerate(lines)]


def _parse(line: str, domain: str, index: int, where: str) -> Prompt:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{where} is not valid JSON: {error}") from None
    if not isinstance(entry, dict) or not {"id", "text", "length"} <= entry.keys() <= _ENTRIES:
        raise ValueError(f"{where} needs the entries id, text and length, and may have system; got {line[:80]!r}")
    if not all(isinstance(value, str) and value.strip() for value in entry.values()):
        raise ValueError(f"{where} has an entry that is empty or not text; got {line[:80]!r}")
    if entry["length"] not in {"short", "long"}:
        raise ValueError(f"{where}: length is {entry['length']!r}; expected 'short' or 'long'")
    split = cast(Literal["tuning", "report"], "tuning" if index % 4 == 3 else "report")
    return Prompt(domain=domain, split=split, **entry)
