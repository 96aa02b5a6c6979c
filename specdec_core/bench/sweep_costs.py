"""Standalone costs of all configurations of a sweep, measured before its first speculative run.

t(n) of every backend, what the machine allows, draft steps and look-ups are arms of one interleaved run: drift of the
machine falls on all of them alike. A trained drafter reads what its target writes, so its cost is measured along a
text; the overhead of a round is read off autoregressive rounds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from specdec_core.bench.sweep_configurations import is_trained
from specdec_core.decode import generate
from specdec_core.drafters.eagle_tree import EagleTreeDrafter
from specdec_core.measure.ceilings import gemm_arm, read_arm
from specdec_core.measure.clock import Arm, interleaved
from specdec_core.measure.cost_model import DraftCost
from specdec_core.measure.curves import CurveSamples, curve_arms
from specdec_core.measure.drafting import measure_drafting
from specdec_core.measure.sweep import Case, Configuration, Costs, draft_arm, draft_cost, measure_overhead
from specdec_core.placement import Placement
from specdec_core.protocol import Target
from specdec_core.rows import Request
from specdec_core.sampling import Options

DEPTHS = (1, 6)
"""Draft depths that a trained drafter's cost is a line through: the first is always reached."""
TEXT = 64
"""Tokens of the text that it is measured along."""


@dataclass(frozen=True)
class Standalone:
    """What one interleaved run found.

    curves    t(n) by backend. ceilings: seconds of 'read' and 'gemm'.
    drafts    by configuration, without those of trained drafters.
    """

    curves: Mapping[str, CurveSamples]
    ceilings: Mapping[str, np.ndarray]
    drafts: Mapping[str, DraftCost]


def widths_of(configurations: Sequence[Configuration], ks: Sequence[int]) -> tuple[int, ...]:
    """Tokens of the passes that these configurations of one backend ask for, 1 among them: a chain's K + 1 at every K,
    and a tree's at its greatest. A backend without a configuration has the chains of `ks`."""
    widths = {1} | ({k + 1 for k in ks} if not configurations else set())
    for each in configurations:
        own = each.ks or tuple(ks)
        widths |= {k + 1 for k in own} | {most_nodes(each, max(own)) + 1}
    return tuple(sorted(widths))


def most_nodes(configuration: Configuration, k: int) -> int:
    """Most draft tokens of a verification at this K."""
    drafter = configuration.drafter
    # A tree that grows makes room for what it reads, too, and that is not verified.
    return drafter.nodes if isinstance(drafter, EagleTreeDrafter) else drafter.most_nodes(k)


def measure_standalone(
    targets: Mapping[str, Target],
    configurations: Sequence[Configuration],
    ks: Sequence[int],
    contexts: Sequence[int],
    repeats: int,
    seed: int = 0,
) -> Standalone:
    """t(n) of every target at the widths of its configurations, ceilings of the CPU, draft steps and look-ups."""
    cpu = Placement().torch_device
    arms: dict[tuple[str, ...], Arm] = {("read",): read_arm(cpu), ("gemm",): gemm_arm(cpu)}
    passes: dict[str, list[tuple[int, int]]] = {}
    for name, target in targets.items():
        widths = widths_of([each for each in configurations if each.backend == name], ks)
        of_target = curve_arms(target, widths, contexts, seed=seed)
        passes[name] = list(of_target)
        arms |= {("pass", name, str(context), str(n)): arm for (context, n), arm in of_target.items()}
    stepping = [each for each in configurations if not is_trained(each.drafter)]
    arms |= {("draft", each.name): draft_arm(each, contexts[0]) for each in stepping}
    named = interleaved({"/".join(key): arm for key, arm in arms.items()}, repeats, warmup=2, seed=seed)
    seconds = {key: named["/".join(key)] for key in arms}
    return Standalone(
        {
            name: CurveSamples({(c, n): seconds["pass", name, str(c), str(n)] for c, n in points})
            for name, points in passes.items()
        },
        {name: seconds[name,] for name in ("read", "gemm")},
        {each.name: draft_cost(each, seconds["draft", each.name]) for each in stepping},
    )


def costs_of(
    configurations: Sequence[Configuration],
    standalone: Standalone,
    targets: Mapping[str, Target],
    case: Case,
    temperature: float = 0.0,
) -> dict[str, Costs]:
    """Costs by configuration. At T > 0 a round works out the law after every token that it emits, and a trained
    drafter draws from laws of its own: both are measured at that temperature, on this case's prompt."""
    overheads: dict[str, tuple[float, float]] = {}
    found = {}
    for one in configurations:
        target = targets[one.backend]
        if one.backend not in overheads:
            overheads[one.backend] = _overhead(target, case, temperature)
        drafting = standalone.drafts.get(one.name) or _along_a_text(one, target, case, temperature)
        found[one.name] = Costs(standalone.curves[one.backend].curve(), drafting, *overheads[one.backend])
    return found


def _overhead(target: Target, case: Case, temperature: float) -> tuple[float, float]:
    """Seconds of a round that emits one token, and of every further one: a law at T > 0, next to nothing else."""
    greedy = measure_overhead(target, case)
    if not temperature:
        return greedy, 0.0
    sampled = measure_overhead(target, case, temperature=temperature)
    return sampled, max(0.0, sampled - greedy)


def _along_a_text(configuration: Configuration, target: Target, case: Case, temperature: float) -> DraftCost:
    whole = Options(max_new_tokens=TEXT, min_new_tokens=TEXT)
    [written] = generate(target, [Request(case.tokens, whole)])
    text, options = (*case.tokens, *written.tokens), Options(temperature=temperature)
    return measure_drafting(configuration.drafter, target, text, len(case.tokens), DEPTHS, options)
