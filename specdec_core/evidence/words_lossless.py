"""Captions and alternative texts of the figures of losslessness."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from specdec_core.statistics import battery

Rows = Sequence[Mapping[str, Any]]


def exact_caption(rows: Rows) -> str:
    branches = sum(row["branches"] for row in rows)
    return (
        f"Total variation between the output law of the production decoder, enumerated over all {branches:,} ways that "
        f"chance can go in {len(rows)} cases, and the law by definition. One point a case; zeros are drawn at 1e-17."
    )


def exact_alt(rows: Rows) -> str:
    worst = max(row["total_variation"] for row in rows)
    return f"Errors of {len(rows)} enumerated laws, all at rounding level; the largest is {worst:.1e}."


def null_caption(tests: Rows, curves: Rows) -> str:
    tokens = sorted({row["tokens"] for row in tests if row["test"] == battery.NOMINAL})
    return (
        "Two-sample χ² of token counts, speculative against autoregressive and autoregressive against autoregressive, "
        f"{'/'.join(f'{n:,}' for n in tokens)} tokens a method. Steps: law of the statistic when the labels of whole "
        "sequences are permuted within their prompt (1,999 relabellings); dotted: the nominal χ² law, which supposes "
        "independent tokens of one law; lines with markers: observed."
    )


def null_alt(tests: Rows, curves: Rows) -> str:
    parts = [
        f"{row['setting']}, {row['comparison']}: {row['statistic']:.0f} on {row['dof']} dof"
        for row in tests
        if row["test"] == battery.NOMINAL
    ]
    return f"Observed χ² among their nulls. {'; '.join(parts)}."


def pit_caption(curves: Rows) -> str:
    setting = next(row["setting"] for row in curves if row["kind"] == "pit")
    return (
        "Randomised probability integral transform of speculative tokens under the target's own law, by offset in the "
        f"round, vocabulary ordered by q/p (setting {setting}). Flat is right. Grey: where 95% of all bins of a panel "
        "stay in together."
    )


def pit_alt(curves: Rows) -> str:
    shown = [row for row in curves if row["kind"] == "pit"]
    far = max((abs(value - 1) for row in shown for value in row["y"]), default=0.0)
    return f"Histograms of PIT values by offset, flat; the furthest bin of all settings is {far:.0%} from 1."


def bias_caption(curves: Rows) -> str:
    return (
        "Mean of 1{x ∈ A} − p(A), A the tokens that the drafter likes better than the target: its expectation is a "
        "lower bound of the mean total variation along the direction in which a wrong decoder leans. Bands: 95% normal "
        f"intervals at each n. Grey: the pre-registered band of equivalence, ±{battery.DELTA:g}."
    )


def bias_alt(curves: Rows) -> str:
    parts = [
        f"{row['setting']} {row['series']}: {row['y'][-1]:+.4f} [{row['low'][-1]:+.4f}, {row['high'][-1]:+.4f}] "
        f"at n={row['x'][-1]:,.0f}"
        for row in curves
        if row["kind"] == "bias"
    ]
    return f"Directed bias shrinks to zero. {'; '.join(parts)}."


def kill_caption(rows: Rows) -> str:
    bugs = len({row["mutant"] for row in rows if row["effect"] != "nothing"})
    budget = max(row["budget"] for row in rows)
    return (
        f"{bugs} seeded bugs, clean code and controls against every test. Dots: seen by an exact test; numbers: tokens "
        f"until a sampled test saw it, all sampled tests together at α = 0.01 by Holm, {budget:,} tokens a decoder. "
        "Crosses: the decoder crashed, which is no kill; dashes: not made, since an exact test had seen it."
    )


def kill_alt(rows: Rows) -> str:
    seen = {row["mutant"] for row in rows if row["seen"] and row["effect"] != "nothing"}
    bugs = {row["mutant"] for row in rows if row["effect"] != "nothing"}
    return f"Heat map of mutants against tests: {len(seen)} of {len(bugs)} mutants are seen."


def size_caption(rows: Rows) -> str:
    return (
        "Share of replicates in which a test rejects at α = 0.05 although both sides are autoregressive; number of "
        "replicates in brackets. Intervals: Clopper–Pearson, simultaneous over all tests. The nominal χ² is outside "
        "the family: nothing makes its size α."
    )


def size_alt(rows: Rows) -> str:
    parts = [f"{row['test']} {row['rejections'] / row['replicates']:.1%}" for row in rows]
    return f"Rejections under the null. {'; '.join(parts)}."


def audit_caption(rows: Rows) -> str:
    tokens = sorted({row["tokens"] for row in rows})
    return (
        "Directed bias of samplers under the same pair of models, with its 95% interval: transformers' assisted and "
        f"plain sampling, and this decoder; {tokens[0]:,}–{tokens[-1]:,} tokens an audit. Grey: the pre-registered "
        f"band of equivalence, ±{battery.DELTA:g}. Hollow: an audit that rejected losslessness."
    )


def audit_alt(rows: Rows) -> str:
    audits = {(row["pair"], row["setting"], row["decoder"]): row["verdict"] for row in rows}
    wrong = [
        f"{decoder} at {setting}" for (_, setting, decoder), verdict in audits.items() if verdict == "not lossless"
    ]
    return f"Forest plot of {len(audits)} audits; not lossless: {', '.join(wrong) or 'none'}."
