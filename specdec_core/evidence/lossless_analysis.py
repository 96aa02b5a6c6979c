"""From token records to the tests of claim L3, the curves behind them, and the sizes of claim L6.

The two-sample comparison is made twice with the same design: speculative against autoregressive, and autoregressive
against autoregressive drawn again, so that what the nominal χ² does without any speculation stands beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from specdec_core.statistics import battery
from specdec_core.statistics.battery import Sample
from specdec_core.statistics.results import TestResult
from specdec_core.statistics.teacher_forced import directed
from specdec_core.statistics.two_sample import Bins, choose_bins, counts, null_statistics, pad

Rows = Sequence[Mapping[str, Any]]

AR, AR_AGAIN, SD, LOOKUP = "AR", "AR again", "SD", "SD look-up tree"
BINS = 200
"""The abstract's: the most frequent tokens, and one bin for the rest; fewer where a bin would expect less than 5."""
ALPHA = 0.05
PERMUTATIONS = 199  # of a calibration replicate: enough for a test at ALPHA
_PIT_BINS = 20


def by_method(rows: Rows) -> dict[str, list[Mapping[str, Any]]]:
    """Rows of one setting, by method."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        found.setdefault(row["method"], []).append(row)
    return found


def pilot_bins(rows: Rows, tokens: int) -> Bins:
    """Bins chosen on the look-up arm, which takes part in no two-sample comparison; each expects 5 of `tokens`."""
    pilot = by_method(rows)[LOOKUP]
    bins = choose_bins(np.concatenate([row["tokens"] for row in pilot]), BINS)
    return battery.merged_bins(bins, Sample.of(pilot), tokens)


def law_tests(rows: Rows, live: bool) -> Iterator[dict[str, Any]]:
    """Records of LAW_TEST of one setting."""
    arms = {name: Sample.of(each) for name, each in by_method(rows).items()}
    setting = rows[0]["setting"]
    bins = pilot_bins(rows, min(arms[SD].tokens, arms[AR].tokens))
    found = battery.one_sample(arms[SD])
    found |= battery.two_sample(arms[SD], arms[AR], bins)
    held = battery.adjusted(found)
    for name, result in found.items():
        comparison = "SD against AR" if name in (*battery.TWO_SAMPLE, battery.NOMINAL) else SD
        yield _test(setting, comparison, result, arms[SD].tokens, held.get(name), live)
    yield _test(setting, SD, battery.equivalent(arms[SD]), arms[SD].tokens, None, live)
    yield from (
        _test(setting, LOOKUP, result, arms[LOOKUP].tokens, None, live)
        for result in battery.one_sample(arms[LOOKUP]).values()
    )
    again = battery.two_sample(arms[AR_AGAIN], arms[AR], bins)
    yield from (_test(setting, "AR against AR", result, arms[AR].tokens, None, live) for result in again.values())


def law_curves(rows: Rows) -> Iterator[dict[str, Any]]:
    """Records of LAW_CURVE of one setting."""
    setting = rows[0]["setting"]
    groups = by_method(rows)
    arms = {name: Sample.of(each) for name, each in groups.items()}
    bins = pilot_bins(rows, min(arms[SD].tokens, arms[AR].tokens))
    for name, one in (("SD against AR", arms[SD]), ("AR against AR", arms[AR_AGAIN])):
        table = counts(pad([*one.sequences, *arms[AR].sequences]), bins)
        labels = np.arange(len(table)) < len(one.sequences)
        null = null_statistics(table, labels, np.array([*one.strata, *arms[AR].strata]))
        levels = np.linspace(0.0025, 0.9975, 200)
        yield _curve("null", setting, name, levels, np.quantile(null, levels))
    for offset in np.unique(arms[SD].offsets):
        values = arms[SD].pit[arms[SD].offsets == offset]
        shares = np.histogram(values, _PIT_BINS, (0.0, 1.0))[0] / len(values) * _PIT_BINS
        yield _curve("pit", setting, f"offset {offset} ({len(values)})", np.arange(_PIT_BINS) / _PIT_BINS, shares)
    for name in (SD, AR):
        if arms[name].mass.size:
            yield _bias_curve(setting, name, arms[name])


def sizes(rows: Rows, live: bool, replicates: int = 500, seed: int = 0) -> Iterator[dict[str, Any]]:
    """Records of SIZE from the autoregressive sequences of one setting, where there is nothing to find.

    One-sample tests: every sequence is a replicate of its own, with the round offsets of a speculative one. Two-sample
    tests: each replicate draws two (MMD: four) autoregressive sequences of every prompt and calls half of them SD.
    """
    groups = by_method(rows)
    null = [*groups[AR], *groups[AR_AGAIN]]
    offsets = [row["offsets"] for row in groups[SD]]
    length = len(null[0]["tokens"])
    one = dict.fromkeys(battery.ONE_SAMPLE, 0)
    for number, row in enumerate(null):
        sample = Sample.of([{**row, "offsets": offsets[number % len(offsets)]}])
        for name, result in battery.one_sample(sample).items():
            one[name] += result.p <= ALPHA
    for name, rejections in one.items():
        yield _size(name, int(rejections), len(null), length, live)
    bins = pilot_bins(rows, length * len({row["prompt_id"] for row in null}))
    two = dict.fromkeys((battery.NOMINAL, *battery.TWO_SAMPLE), 0)
    random = np.random.default_rng(seed)
    for replicate in range(replicates):
        single, double = (_split(null, each, random) for each in (1, 2))
        found = battery.two_sample(*single, bins, PERMUTATIONS, replicate)
        found[battery.DISCREPANCY] = battery.discrepancy(*double, PERMUTATIONS, replicate)
        for name in two:
            two[name] += found[name].p <= ALPHA
    for name, rejections in two.items():
        yield _size(name, int(rejections), replicates, length * len({row["prompt_id"] for row in null}), live)


def _split(rows: Rows, each: int, random: np.random.Generator) -> tuple[Sample, Sample]:
    """Two samples of `each` sequences a prompt, drawn without replacement from the same rows."""
    prompts: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        prompts.setdefault(row["prompt_id"], []).append(row)
    halves: tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]] = ([], [])
    for members in prompts.values():
        chosen = random.permutation(len(members))[: 2 * each]
        halves[0].extend(members[index] for index in chosen[:each])
        halves[1].extend(members[index] for index in chosen[each:])
    one, other = (
        Sample([row["tokens"] for row in half], [row["prompt_id"] for row in half], *[np.empty(0)] * 5)
        for half in halves
    )
    return one, other


def _bias_curve(setting: str, name: str, sample: Sample) -> dict[str, Any]:
    looks = np.unique(np.geomspace(200, len(sample.mass), 40).astype(int))
    found = [directed(sample.in_set[:n], sample.mass[:n]) for n in looks]
    ends = [each.low for each in found], [each.high for each in found]
    return _curve("bias", setting, name, looks, np.array([each.bias for each in found]), *map(np.array, ends))


def _curve(
    kind: str,
    setting: str,
    series: str,
    x: np.ndarray,
    y: np.ndarray,
    low: np.ndarray | None = None,
    high: np.ndarray | None = None,
) -> dict[str, Any]:
    def plain(values: np.ndarray | None) -> list[float] | None:
        return None if values is None else [float(f"{value:.6g}") for value in values]

    return {
        "kind": kind,
        "setting": setting,
        "series": series,
        "x": plain(x),
        "y": plain(y),
        "low": plain(low),
        "high": plain(high),
    }


def _test(
    setting: str, comparison: str, result: TestResult, tokens: int, held: float | None, live: bool
) -> dict[str, Any]:
    return {
        "setting": setting,
        "comparison": comparison,
        "test": result.name,
        "tokens": tokens,
        "statistic": min(float(result.statistic), 1e300),
        "dof": battery.dof(result),
        "p": float(result.p),
        "adjusted": held,
        "note": result.note,
        "live": live,
    }


def _size(name: str, rejections: int, replicates: int, tokens: int, live: bool) -> dict[str, Any]:
    return {
        "test": name,
        "family": name != battery.NOMINAL,
        "rejections": rejections,
        "replicates": replicates,
        "tokens": tokens,
        "alpha": ALPHA,
        "live": live,
    }
