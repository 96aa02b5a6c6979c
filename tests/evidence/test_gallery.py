"""Figures by name: from records on disk to files with captions, the same from a notebook and from a replay."""

from __future__ import annotations

import pytest

from specdec_core.evidence.figures import read_captions
from specdec_core.evidence.gallery import GALLERY, draw, redraw_all
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter
from specdec_core.evidence.sweep_records import CEILING, COST_CURVE, SWEEP

TRAINED = {"02_drafter_training", "02_drafter_acceptance"}
"""Drawn from records of training, not of the sweep."""


def write(layout, name, schema, rows):
    made_on = fingerprint(layout=layout).as_dict() | {"device": "there-8c"}
    with RecordWriter(layout.records("quick"), name, schema, made_on, code=[], layout=layout) as writer:
        for row in rows:
            writer.append(row)


CURVE = [
    {"configuration": "a", "backend": "a", "n": n, "context": 128, "samples": 5, "seconds_median": 0.01 * n,
     "seconds_low": 0.009 * n, "seconds_high": 0.011 * n}
    for n in (1, 2, 4)
]  # fmt: skip


def test_a_figure_drawn_from_rows_has_number_and_device_in_its_caption(layout, five_pairs):
    figure, alt = draw("02_speedup_by_k", five_pairs, device="here-2c", layout=layout)
    entry = read_captions(layout)["02_speedup_by_k"]
    assert entry["alt"] == alt and "skinny f32 + n-gram: best " in alt
    assert "28 report prompts" in entry["caption"] and entry["caption"].endswith("Device: here-2c.")
    assert figure.axes


def test_a_replay_draws_what_its_records_allow(layout, five_pairs):
    assert redraw_all(layout) == []
    write(layout, "02_sweep", SWEEP, five_pairs)
    write(layout, "00_cost_curve", COST_CURVE, CURVE)
    drawn = {path.stem for path in redraw_all(layout)}
    of_sweep = {name for name in GALLERY if name.startswith("02")} - {"02_cost_curve", *TRAINED}
    assert drawn == of_sweep | {"00_cost_curve"}
    captions = read_captions(layout)
    assert set(captions) == drawn
    assert all("Device: there-8c." in entry["caption"] for entry in captions.values())
    assert "Dotted" not in captions["00_cost_curve"]["caption"]
    ceiling = {"configuration": "a", "weight_bytes": 1e8, "flops_per_token": 1e8, "bytes_per_second": 1e10,
               "flops_per_second": 1e11}  # fmt: skip
    write(layout, "00_ceiling", CEILING, [ceiling])
    redraw_all(layout)
    assert "Dotted" in read_captions(layout)["00_cost_curve"]["caption"]
    assert "a: 10.0 ms at n=1, 40.0 ms at n=4" in read_captions(layout)["00_cost_curve"]["alt"]


def test_unknown_figures_and_missing_rows_are_refused(layout, five_pairs):
    with pytest.raises(ValueError, match="unknown figure '09_x': expected one of 00_cost_curve"):
        draw("09_x", five_pairs, layout=layout)
    with pytest.raises(ValueError, match="drawn from sweep records: got none"):
        draw("02_speedup_by_k", [], layout=layout)
