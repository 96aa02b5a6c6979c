"""Verdicts and figures of serialized verification, from rows made by hand."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_core.evidence import serial_claims as serial
from specdec_core.evidence.evaluate import judge
from specdec_core.evidence.gallery import GALLERY
from specdec_core.evidence.serial_claims import OURS, SHIPPED, calibrated, parts_over_model, serialization
from specdec_core.evidence.serial_records import DISPATCH, DISPATCH_SHARE, OP_CURVE, SERIAL_CURVE, SWAP, TWIN
from specdec_core.evidence.verdicts import Outcome
from specdec_core.forensics import dispatch

REPEATS = 20
PLAIN_Q4, PACKED_Q4, F32 = "llama.cpp Q4_0, not repacked", "llama.cpp Q4_0", "llama.cpp F32"


def curves(indices, contexts=(64, 512), repeats=REPEATS, noise=0.01, device="cpu"):
    """Backends with a given serialization index: t(n) = t(1)·(1 + (n − 1)·s), drifting from repeat to repeat."""
    random, rows = np.random.default_rng(0), []
    drift = 1 + 0.3 * random.random(repeats)
    for name, s in indices.items():
        for context in contexts:
            for arm, n in [("verify", n) for n in (1, 2, 7, 9)] + [("loop", 7)]:
                factor = n if arm == "loop" else 1 + (n - 1) * s
                seconds = 0.01 * (1 + context / 1000) * factor * drift * (1 + noise * random.standard_normal(repeats))
                row = {
                    "backend": name, "engine": "e", "format": "Q4_1" if "Q4_1" in name else "f", "quantized": False,
                    "repack": None, "device": device, "threads": 2, "session": 0, "arm": arm, "n": n,
                    "context": context, "seconds": seconds.tolist(),
                }  # fmt: skip
                rows.append(row)
    return rows


RIGHT = curves({OURS: 0.04, SHIPPED: 0.8})


def test_rows_are_records():
    assert all(SERIAL_CURVE.validated(row) for row in RIGHT)


def test_the_index_is_that_of_the_shortest_context_unless_named_and_drift_cancels():
    index = serialization(RIGHT, SHIPPED)
    assert index.estimate == pytest.approx(0.8, abs=0.01) and index.high - index.low < 0.03 and index.n == REPEATS
    assert serialization(RIGHT, SHIPPED, n=2).estimate == pytest.approx(0.8, abs=0.05)
    assert serialization(RIGHT, SHIPPED, context=512).estimate != index.estimate
    assert serialization(RIGHT, "absent") is None and serialization(RIGHT, SHIPPED, n=5) is None


def test_the_calibrated_index_is_relative_to_the_twin():
    assert calibrated(RIGHT, SHIPPED).estimate == pytest.approx(0.8, abs=0.01)
    assert calibrated([row for row in RIGHT if row["arm"] == "verify"], SHIPPED) is None


@pytest.mark.parametrize(
    ("indices", "outcome"),
    [
        ({OURS: 0.04, SHIPPED: 0.8}, Outcome.SUPPORTED),
        ({OURS: 0.2, SHIPPED: 0.8}, Outcome.REFUTED),
        ({OURS: 0.04, SHIPPED: 0.4}, Outcome.REFUTED),
        ({OURS: 0.1, SHIPPED: 0.8}, Outcome.INCONCLUSIVE),
        ({OURS: 0.04}, Outcome.NOT_TESTABLE),
    ],
)
def test_serial_or_batched(indices, outcome):
    found = judge("S1", curves(indices))
    assert found.verdict is outcome and SHIPPED in found.note


def test_few_repeats_decide_nothing():
    assert judge("S1", curves({OURS: 0.04, SHIPPED: 0.8}, repeats=9)).verdict is Outcome.INCONCLUSIVE


def twin(backend=OURS, exact=True, identical=True, same_rounds=True, certified=True, divergences=0):
    return {
        "backend": backend, "exact": exact, "drafter": "n-gram", "K": 6, "prompt_id": "p", "tokens": 9, "index": -1,
        "identical": identical, "same_rounds": same_rounds, "certified": certified, "divergences": divergences,
        "gap": 0.0, "epsilon": 0.0,
    }  # fmt: skip


def test_twins():
    tie = twin(SHIPPED, False, identical=False, divergences=2)
    assert TWIN.validated(tie) and judge("S2", [twin(), tie]).verdict is Outcome.SUPPORTED
    assert "2 certified near-ties" in judge("S2", [twin(), tie]).note
    bug = twin(SHIPPED, False, identical=False, certified=False, divergences=1)
    for wrong in (bug, twin(identical=False, divergences=1), twin(same_rounds=False)):
        assert judge("S2", [twin(), wrong]).verdict is Outcome.REFUTED
    assert judge("S2", [tie]).verdict is Outcome.INCONCLUSIVE


def swap(before=PLAIN_Q4, after=PACKED_Q4, same=True, n_after=7, context=64):
    return {
        "swap": f"{before} → {after}", "before": before, "after": after, "n_before": 7, "n_after": n_after,
        "context": context, "session": 0, "same_values": same,
    }  # fmt: skip


def test_swaps():
    rows = curves({PLAIN_Q4: 0.7, PACKED_Q4: 0.4, SHIPPED: 0.7, F32: 0.7})
    assert SWAP.validated(swap())
    found = judge("S3", rows, [swap(), swap(SHIPPED, F32)])
    assert found.verdict is Outcome.SUPPORTED and found.value == pytest.approx(-0.3, abs=0.02)
    assert judge("S3", rows, [swap(SHIPPED, F32)]).verdict is Outcome.REFUTED
    assert judge("S3", rows, [swap(same=False), swap(SHIPPED, SHIPPED, n_after=9)]).verdict is Outcome.NOT_TESTABLE
    few = curves({PLAIN_Q4: 0.7, PACKED_Q4: 0.4}, repeats=9)
    assert judge("S3", few, [swap()]).verdict is Outcome.INCONCLUSIVE


def test_padding_counts_the_tokens_that_were_asked_for():
    rows = curves({SHIPPED: 0.5}, noise=0)
    found = serial.swap_difference(rows, swap(SHIPPED, SHIPPED, n_after=9))
    assert found.estimate == pytest.approx((8 * 0.5 - 6 * 0.5) / 6)


def operations(share, backend=OURS, n=7, repeats=REPEATS):
    random = np.random.default_rng(1)
    model = 0.02 * (1 + 0.2 * random.random(repeats)) * n**0.3
    parts = {"q, k, v": 0.5 * share, "head": 0.5 * share}
    rows = [(name, True, model * part) for name, part in parts.items()]
    rows += [("model", False, model), ("instrumented", False, 3 * model)]
    return [
        {"backend": backend, "operation": name, "part": part, "count": 30, "n": n, "context": 64, "seconds": s.tolist()}
        for name, part, s in rows
    ]


def test_parts_add_up():
    fine = operations(1.02) + operations(0.95, n=1)
    assert all(OP_CURVE.validated(row) for row in fine)
    assert parts_over_model(fine, OURS, 7).estimate == pytest.approx(1.02)
    assert judge("S4", fine).verdict is Outcome.SUPPORTED
    found = judge("S4", fine + operations(1.3, SHIPPED))
    assert found.verdict is Outcome.REFUTED and found.value == pytest.approx(1.3) and SHIPPED in found.note
    assert judge("S4", operations(1.0, repeats=9)).verdict is Outcome.INCONCLUSIVE
    assert judge("S4", []).verdict is Outcome.NOT_TESTABLE


def test_metal_is_judged_where_it_is():
    assert judge("S5", RIGHT).verdict is Outcome.NOT_TESTABLE
    name = "llama.cpp Q4_1, GPU"
    assert judge("S5", curves({name: 0.8}, device="metal")).verdict is Outcome.SUPPORTED
    assert judge("S5", curves({name: 0.2}, device="metal")).verdict is Outcome.REFUTED
    assert judge("S5", curves({name: 0.8}, device="metal", repeats=9)).verdict is Outcome.INCONCLUSIVE


# --- Figures ------------------------------------------------------------------------------------------------------

MATRICES = [dispatch.WeightMatrix("q", 576, 576, "Q4_1", 1000, 30), dispatch.WeightMatrix("head", 99, 1024, "Q8_0", 99)]
TABLES = [
    row
    for backend, rule in (("Metal", dispatch.metal()), ("CPU, AVX2", dispatch.x86(dispatch.CpuBuild())))
    for row in dispatch.dispatch_rows(backend, "Q4_1", MATRICES, rule)
]
SHARES = [
    row
    for backend, rule in (("Metal", dispatch.metal()), ("CPU, AVX2", dispatch.x86(dispatch.CpuBuild())))
    for row in dispatch.share_rows(backend, "Q4_1", MATRICES, rule)
]
OPERATIONS = [row for n in (1, 7) for name in (OURS, SHIPPED) for row in operations(1.0, name, n)]
DATA = {
    "03_curves": (RIGHT,), "03_serialization_index": (RIGHT,), "03_context": (RIGHT,), "03_extra_time": (OPERATIONS,),
    "03_dispatch": (TABLES, SHARES),
}  # fmt: skip


@pytest.mark.parametrize("name", DATA)
def test_figures_are_drawn_with_caption_and_alternative_text(name, tmp_path):
    drawing = GALLERY[name]
    figure = drawing.draw(*DATA[name])
    figure.savefig(tmp_path / "f.png")
    assert (tmp_path / "f.png").stat().st_size > 5_000
    assert len(drawing.caption(*DATA[name])) > 80 and len(drawing.alt(*DATA[name])) > 30


def test_every_figure_of_notebook_03_is_tested():
    assert set(DATA) == {name for name in GALLERY if name.startswith("03_")} - {"03_predicted_against_measured"}


def test_dispatch_rows_are_records():
    assert all(DISPATCH.validated(row) for row in TABLES) and all(DISPATCH_SHARE.validated(row) for row in SHARES)


def test_curves_start_at_one_and_labels_are_told_once():
    relative, absolute = GALLERY["03_curves"].draw(RIGHT).axes
    lines = {line.get_label(): line.get_ydata() for line in relative.lines}
    assert lines[SHIPPED][0] == 1 and lines[SHIPPED][2] == pytest.approx(5.8, abs=0.1)
    assert max(absolute.lines[1].get_ydata()) > 50
    (axes,) = GALLERY["03_serialization_index"].draw(RIGHT).axes
    labels = axes.get_legend_handles_labels()[1]
    assert sorted(labels) == ["against the serial twin", "context 512", "context 64"]


def test_a_single_context_is_drawn_as_points():
    one = [row for row in RIGHT if row["context"] == 64]
    panels = GALLERY["03_context"].draw(one).axes
    drawn = [line for line in panels[0].lines if line.get_marker() not in ("None", "", None)]
    assert len([line for line in drawn if len(line.get_xdata()) == 1 and line.get_xdata()[0] == 64]) >= 2
    lines = GALLERY["03_context"].draw(RIGHT).axes[0].lines
    assert any(list(line.get_xdata()) == [64, 512] for line in lines)


def test_bars_end_where_the_model_does():
    (axes,) = GALLERY["03_extra_time"].draw(OPERATIONS).axes
    ends = sorted(patch.get_x() + patch.get_width() for patch in axes.patches)[-2:]
    diamonds = [line.get_xdata()[0] for line in axes.lines]
    assert ends == pytest.approx(sorted(diamonds), rel=1e-6)
