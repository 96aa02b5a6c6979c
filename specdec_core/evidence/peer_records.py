"""Records of the decoders that a user could pick instead of ours, and the ratios that are taken from them.

All are timed alike: from the first token that is emitted to the last, counting the tokens after the first pass's.
Ratios pair by prompt; a prompt of which one side counted nothing (its text ended at once) is in neither.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specdec_core.evidence.schemas import RecordError, Schema
from specdec_core.statistics.intervals import Interval, columns, ratio_interval

Row = Mapping[str, Any]
OUR_ENGINES = ("numba", "torch")
"""Engines of this package, which run beside its peers so that ratios pair within one run."""


def _check_peer(row: Row) -> None:
    if row["arm"] not in ("sd", "ar") or row["split"] not in ("tuning", "report"):
        raise RecordError(f"arm {row['arm']!r}, split {row['split']!r}: expected 'sd' or 'ar', 'tuning' or 'report'")
    if (row["arm"] == "sd") != (row["draft"] > 0):
        raise RecordError(
            f"draft {row['draft']} in an {row['arm']!r} row: expected ≥ 1 in 'sd' rows and 0 in 'ar' rows"
        )
    if not 0 <= row["counted"] < max(1, row["tokens"]) or row["tokens"] < 1:
        raise RecordError(
            f"{row['counted']} counted of {row['tokens']} tokens: expected at least one token, and all counted but the "
            "first pass's"
        )
    if row["seconds"] < 0 or (row["seconds"] > 0) != (row["counted"] > 0):
        raise RecordError(f"{row['counted']} tokens counted in {row['seconds']} s: expected a time > 0 if any, else 0")
    if row["passes"] is not None and not (row["counted"] > 0) <= row["passes"] <= row["counted"]:
        raise RecordError(f"{row['passes']} passes for {row['counted']} tokens: expected at least a token a pass")
    _check_identity(row)


def _check_identity(row: Row) -> None:
    if (row["identical"] is None) != (row["temperature"] > 0):
        raise RecordError(
            f"identical {row['identical']} at temperature {row['temperature']}: only greedy output has one right answer"
        )
    if (row["identical"] is False) != (row["difference"] >= 0):
        raise RecordError(
            f"identical {row['identical']} and first difference {row['difference']}: expected a place ≥ 0 if the "
            "output differs, else −1"
        )
    if row["identical"] is not False and any(row[name] is not None for name in ("near_tie", "gap", "epsilon")):
        raise RecordError(f"near_tie {row['near_tie']}, gap {row['gap']}: there is no difference to be judged")


PEER = Schema(
    "peer",
    1,
    {
        "peer": str,  # 'llama.cpp Q8_0 · prompt lookup'
        "backend": str,  # 'llama.cpp Q8_0': its autoregressive decoding is what its speculation is compared with
        "engine": str,
        "format": str,
        "file": str | None,  # name of the GGUF file
        "threads": int | None,
        "method": str,  # 'AR', 'prompt lookup', …
        "draft": int,  # the tuned setting: most draft tokens, 0 in the 'ar' arm
        "ngram": int | None,
        "schedule": str | None,
        "temperature": float,
        "prompt_id": str,
        "domain": str,  # math, code, chat
        "split": str,  # 'tuning' or 'report'
        "repetitive": bool,  # the backend's autoregressive text repeats itself
        "arm": str,  # 'ar' (before and after the others) or 'sd'
        "identical": bool | None,  # to the backend's first autoregressive run; None where tokens are sampled
        "difference": int,  # tokens in common before the first difference, −1 if there is none
        "near_tie": bool | None,  # gap ≤ 2 epsilon; None: no difference, or none that could be judged
        "gap": float | None,  # of the float64 logits there
        "epsilon": float | None,  # rounding error of the engine's
        "tokens": int,  # emitted
        "counted": int,  # … after the first pass's, within `seconds`
        "seconds": float,  # from the first pass's tokens to the last token
        "passes": int | None,  # target passes within `seconds`
    },
    _check_peer,
)
"""One line a (peer, temperature, prompt, run): 'ar' arms have two."""


def _check_tuning(row: Row) -> None:
    if row["draft"] < 1 or row["prompts"] < 1 or row["counted"] < 1 or not row["seconds"] > 0:
        raise RecordError(
            f"draft {row['draft']}, {row['counted']} tokens of {row['prompts']} prompts in {row['seconds']} s: "
            "expected ≥ 1, ≥ 1, ≥ 1, > 0"
        )


PEER_TUNING = Schema(
    "peer_tuning",
    1,
    {
        "peer": str,
        "draft": int,
        "ngram": int | None,
        "schedule": str | None,
        "temperature": float,
        "prompts": int,  # of the split 'tuning'
        "counted": int,
        "seconds": float,
        "chosen": bool,  # the fastest of this peer at this temperature
    },
    _check_tuning,
)
"""One line a (peer, temperature, setting)."""


@dataclass(frozen=True)
class Among:
    """Which rows are looked at; None leaves a field open."""

    split: str | None = "report"
    repetitive: bool | None = None
    temperature: float = 0.0

    def rows(self, rows: Iterable[Row], **wanted: Any) -> list[Row]:
        """Rows of these prompts with these values: `rows(all, peer='…', arm='ar')`."""
        wanted |= {"temperature": self.temperature}
        wanted |= {} if self.split is None else {"split": self.split}
        wanted |= {} if self.repetitive is None else {"repetitive": self.repetitive}
        return [row for row in rows if all(row[name] == value for name, value in wanted.items())]


ALL_REPORTED = Among()

Work = Mapping[str, tuple[float, float]]
"""Prompt → (tokens, seconds), summed over its runs."""


def work(rows: Iterable[Row], tokens: str = "counted") -> Work:
    """Rows of PEER (or of SWEEP, with tokens='tokens') by prompt; prompts that count no token are left out."""
    sums: dict[str, tuple[float, float]] = {}
    for row in rows:
        count, seconds = sums.get(row["prompt_id"], (0.0, 0.0))
        sums[row["prompt_id"]] = count + row[tokens], seconds + row["seconds"]
    return {prompt: each for prompt, each in sums.items() if each[0]}


def speed(done: Work, level: float = 0.95) -> Interval:
    """Tokens per second: Σtokens/Σseconds, by prompt."""
    if not done:
        raise RecordError("no prompt of which a token was timed: choose other rows, or measure more")
    tokens, seconds = zip(*done.values(), strict=True)
    return ratio_interval(tokens, seconds, level=level)


def over(one: Work, other: Work, level: float = 0.95) -> Interval:
    """How many times as fast the one is as the other, over the prompts that both decoded."""
    shared = sorted(one.keys() & other.keys())
    if not shared:
        raise RecordError(
            f"{len(one)} and {len(other)} prompts, none in common: a ratio pairs the same prompts of both"
        )
    first, second = ([done[prompt] for prompt in shared] for done in (one, other))
    (tokens, seconds), (tokens_other, seconds_other) = (zip(*each, strict=True) for each in (first, second))
    return ratio_interval(columns(tokens, seconds_other), columns(seconds, tokens_other), level=level)


def speedup(rows: Sequence[Row], peer: str, among: Among = ALL_REPORTED, level: float = 0.95) -> Interval:
    """A peer's speculation over its own backend's autoregressive decoding.

    RecordError if the peer has no speculative rows, or a prompt of them no autoregressive one.
    """
    sd = among.rows(rows, peer=peer, arm="sd")
    if not sd:
        raise RecordError(f"no speculative rows of {peer!r} ({among}): there are {', '.join(peers(rows)) or 'none'}")
    ar = among.rows(rows, backend=sd[0]["backend"], arm="ar")
    alone = {row["prompt_id"] for row in sd} - {row["prompt_id"] for row in ar}
    if alone:
        raise RecordError(f"{peer!r}: prompts {sorted(alone)} have no autoregressive row of {sd[0]['backend']!r}")
    return over(work(sd), work(ar), level)


def peers(rows: Iterable[Row], arm: str | None = None) -> list[str]:
    """Names of the peers in these rows, sorted; only those of an arm."""
    return sorted({row["peer"] for row in rows if arm is None or row["arm"] == arm})


@dataclass(frozen=True)
class Lead:
    """Ours over the peer that it is measured against."""

    peer: str
    ratio: Interval


def over_fastest(
    ours: Work, rows: Sequence[Row], among: Among = ALL_REPORTED, *, arm: str | None = "ar", level: float = 0.95
) -> Lead:
    """Ours over the fastest autoregressive decoding of any peer (`arm='sd'` the fastest speculation, None either).

    The fastest is chosen on the very prompts of the ratio, which favours the peers: of several equals the luckiest is
    taken. Every peer is looked at on the prompts that it shares with ours. Rows of our own engines are passed over.
    """
    wanted: dict[str, Any] = {} if arm is None else {"arm": arm}
    others = [row for row in rows if row["engine"] not in OUR_ENGINES]
    done = {peer: work(among.rows(others, peer=peer, **wanted)) for peer in peers(others, arm)}
    ratios = {peer: over(ours, each, level) for peer, each in done.items() if ours.keys() & each.keys()}
    if not ratios:
        raise RecordError(f"no peer decoded any of our {len(ours)} prompts ({among}, arm {arm!r}): nothing to compare")
    best = min(ratios, key=lambda peer: ratios[peer].estimate)
    return Lead(best, ratios[best])
