"""The zoo of seeded bugs: wrong decoders, each the production code with one seam replaced.

A battery that is worth its name sees every one of them, and none of the controls, which are unusual but right. Most are
bugs that were found in published decoders. None copies the decoder: `inject()` replaces one name while it is entered.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from unittest.mock import patch

import numpy as np

from specdec_core import decode, randomness, rejection, rows
from specdec_core.drafters import model
from specdec_core.drafters.model import ModelDrafter
from specdec_core.forensics import mutations_parts as part
from specdec_core.forensics import mutations_rule as rule
from specdec_core.sampling import History
from specdec_core.targets.table import TableTarget

LAW, ACCEPTANCE, ISOLATION, NOTHING = "law", "acceptance", "isolation", "nothing"
"""What changes: the law of the output; only how much is accepted; only whether rows depend on one another; nothing (a
control: unusual, but right)."""


@dataclass(frozen=True)
class Mutant:
    """One seeded bug. `effect` is what it changes; `inject()` gives a context in which it is in place."""

    name: str
    effect: str
    inject: Callable[[], AbstractContextManager[Any]]


def _put(name: str, effect: str, owner: Any, attribute: str, make: Callable[[Any], Any]) -> Mutant:
    """`make(right)` stands in for `owner.attribute`; a builtin that the module uses may be covered up."""

    def inject() -> AbstractContextManager[Any]:
        return patch.object(owner, attribute, make(getattr(owner, attribute, None)), create=True)

    return Mutant(name, effect, inject)


def _rule(name: str, change: Callable[[float], float]) -> Mutant:
    """The rule accepts with min(1, p/q): a `min` that gets another ratio."""
    return _put(name, LAW, rejection, "min", lambda _: lambda one, ratio: min(one, change(ratio)))


MUTANTS = (
    _rule("accepts with q/p", lambda ratio: 1 / ratio if ratio > 0 else 1.0),
    _rule("accepts with √(p/q)", lambda ratio: ratio**0.5),
    _rule("accepts everything", lambda ratio: 1.0),
    _put("tests a rejected token twice", LAW, decode, "walk",
         lambda walk: lambda draft, law_at, decisions: walk(draft, law_at, rule.SecondChance(decisions))),
    _put("accepts the argmax only", LAW, decode, "walk", rule.greedy_acceptance),
    _put("residual p", LAW, rejection, "residual", lambda _: lambda p, q: p),
    _put("residual q", LAW, rejection, "residual", lambda _: lambda p, q: q),
    _put("residual not normalised", LAW, rejection, "residual", lambda _: rule.leaking_residual),
    _put("residual |p − q|", LAW, rejection, "residual", lambda _: rule.absolute_residual),
    _put("residual of misaligned ids", LAW, rejection, "residual",
         lambda residual: lambda p, q: residual(p, np.roll(q, 1))),
    _put("sibling not removed", LAW, rejection, "_without", lambda _: lambda p, token: p),
    _put("recovers behind the rejected token", LAW, decode, "walk", rule.recovered_after_the_rejected),
    _put("bonus from q", LAW, decode, "walk", rule.bonus_from_q),
    _put("bonus without warps", LAW, decode, "_Laws", lambda _: rule.RawBonus),
    _put("rows of p off by one", LAW, decode, "_Laws", lambda _: rule.ParentsLaw),
    _put("history without the draft", LAW, History, "extended", lambda _: lambda self, tokens: self),
    _put("history with the whole draft", LAW, decode, "_Laws", lambda _: rule.WholeDraftInHistory),
    _put("argmax tested against soft q", LAW, rows.Row, "view", part.drafting_argmax),
    _put("rows of q off by one", LAW, model, "_Chain", lambda _: part.ShiftedLaws),
    _put("q raw, draft warped", LAW, model, "_Chain", lambda _: part.RawLaws),
    _put("q at another temperature", LAW, model, "_Chain", lambda _: part.CoolerLaws),
    _put("q in half precision", LAW, model, "_Chain", lambda _: part.RoundedLaws),
    _put("drops a token for its own low q", LAW, model, "_Chain", lambda _: part.WithoutDoubtful),
    _put("uniform used twice", LAW, randomness, "StreamDecisions", lambda _: rule.ReusedUniform),
    _put("seeded again each round", LAW, decode, "walk", rule.reseeded_each_round),
    _put("draft and verification share noise", LAW, rows, "VERIFY", lambda _: rows.DRAFT),
    _put("end token inside a block ignored", LAW, rows.Row, "append", part.ending_at_the_last_token_only),
    _put("end token of the prompt counted", LAW, rows.Row, "_ending", part.ending_in_the_prompt),
    _put("one token over the cap", LAW, rows.Row, "__init__", part.one_token_over),
    _put("target cache one short", LAW, TableTarget, "commit", part.losing_the_last),
    _put("target cache one long", LAW, TableTarget, "commit", part.keeping_a_rejected_one),
    _put("target cache of another branch", LAW, TableTarget, "commit", part.ignoring_the_path),
    _put("one generator for all rows", ISOLATION, randomness, "StreamDecisions", lambda _: rule.one_for_all()),
    _put("draft cache: last entry garbled", ACCEPTANCE, ModelDrafter, "observe", part.garbling_the_last),
    _put("draft cache: slides by one", ACCEPTANCE, ModelDrafter, "observe", part.forgetting_the_first),
    _put("no bonus token", ACCEPTANCE, decode, "walk", rule.without_bonus),
    _put("control: drafts warmer, says so", NOTHING, rows.Row, "view", part.drafting_warmer),
    _put("control: sampled draft taken as one-hot", NOTHING, model, "_Chain", lambda _: part.ClaimedDeterministic),
    _put("control: draws from p and matches", NOTHING, decode, "walk", rule.sample_and_match),
)  # fmt: skip
"""Bugs first, then controls."""
