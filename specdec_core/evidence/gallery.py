"""Every figure by name: from which records, drawn how, with which caption. Notebooks and replay draw the same ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from specdec_core.evidence import words_linear as linear_words
from specdec_core.evidence import words_lossless as words
from specdec_core.evidence import words_ragged as ragged_words
from specdec_core.evidence import words_ragged_speed as speed_words
from specdec_core.evidence import words_serial as serial_words
from specdec_core.evidence import words_sweep as sweep_words
from specdec_core.evidence import words_training as training_words
from specdec_core.evidence.audit_records import AUDIT
from specdec_core.evidence.evaluate import choose_records, load_rows
from specdec_core.evidence.figures import save_figure
from specdec_core.evidence.layout import Layout
from specdec_core.evidence.linear_records import LINEAR_ERROR, LINEAR_SPEED, LINEAR_TRAFFIC, LINEAR_WINDOW
from specdec_core.evidence.lossless_records import EXACT_LAW, KILL, LAW_CURVE, LAW_TEST, SIZE
from specdec_core.evidence.peer_records import PEER
from specdec_core.evidence.plots_linear import errors_by_form, traffic_by_scheme, window_of_one_head
from specdec_core.evidence.plots_linear_speed import time_against_batch, time_against_n
from specdec_core.evidence.plots_lossless import (
    audited_samplers,
    bias_against_n,
    exact_law_errors,
    kill_matrix,
    null_and_observed,
    pit_by_offset,
    sizes_under_the_null,
)
from specdec_core.evidence.plots_pay_off import pay_off, round_time, speedup_forest
from specdec_core.evidence.plots_ragged import corruption_by_token, fault_matrix, matches_by_way, ragged_round
from specdec_core.evidence.plots_ragged_speed import (
    heterogeneity,
    latency_by_batch,
    realign_share,
    throughput_by_batch,
)
from specdec_core.evidence.plots_serial import (
    context_dependence,
    extra_time_by_operation,
    fan_of_curves,
    predicted_dispatch,
    serialization_indices,
)
from specdec_core.evidence.plots_sweep import (
    acceptance_profile,
    curve_t_of_n,
    curves_of_backends,
    predicted_against_measured,
    speedup_heat_map,
)
from specdec_core.evidence.plots_training import drafter_acceptance, drafter_training
from specdec_core.evidence.provenance import device_slug
from specdec_core.evidence.ragged_records import BATCH_RUN, FAULT_CELL, RAGGED_OUTPUT, RAGGED_ROUND, REALIGN
from specdec_core.evidence.schemas import Schema
from specdec_core.evidence.serial_records import DISPATCH, DISPATCH_SHARE, OP_CURVE, SERIAL_CURVE
from specdec_core.evidence.sweep_records import CEILING, COST_CURVE, SWEEP, Row
from specdec_core.evidence.training_records import ACCEPTANCE, TRAINING

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Rows = Sequence[Row]


@dataclass(frozen=True)
class Drawing:
    """A figure NN_name, drawn from the records of notebook NN.

    schemas  the rows that `draw`, `caption` and `alt` take, in this order; the first must be there, others may be empty
    caption  what is shown, n and how intervals were made; the device is added
    """

    schemas: tuple[Schema, ...]
    draw: Callable[..., Figure]
    caption: Callable[..., str]
    alt: Callable[..., str]


GALLERY: dict[str, Drawing] = {
    "00_cost_curve": Drawing((COST_CURVE, CEILING), curve_t_of_n, sweep_words.curve_caption, sweep_words.curve_alt),
    "01_exact_law": Drawing((EXACT_LAW,), exact_law_errors, words.exact_caption, words.exact_alt),
    "01_null": Drawing((LAW_TEST, LAW_CURVE), null_and_observed, words.null_caption, words.null_alt),
    "01_pit_by_offset": Drawing((LAW_CURVE,), pit_by_offset, words.pit_caption, words.pit_alt),
    "01_bias": Drawing((LAW_CURVE,), bias_against_n, words.bias_caption, words.bias_alt),
    "01_kill_matrix": Drawing((KILL,), kill_matrix, words.kill_caption, words.kill_alt),
    "01_sizes": Drawing((SIZE,), sizes_under_the_null, words.size_caption, words.size_alt),
    "01_audit": Drawing((AUDIT,), audited_samplers, words.audit_caption, words.audit_alt),
    "02_cost_curve": Drawing(
        (COST_CURVE, CEILING), curves_of_backends, sweep_words.shortest_curve_caption, sweep_words.shortest_curve_alt
    ),
    "02_acceptance_profile": Drawing(
        (SWEEP,), acceptance_profile, sweep_words.acceptance_caption, sweep_words.acceptance_alt
    ),
    "02_speedup_by_k": Drawing((SWEEP,), speedup_heat_map, sweep_words.heat_map_caption, sweep_words.heat_map_alt),
    "02_pay_off": Drawing((SWEEP,), pay_off, sweep_words.pay_off_caption, sweep_words.pay_off_alt),
    "02_round_time": Drawing((SWEEP,), round_time, sweep_words.round_caption, sweep_words.round_alt),
    "02_speedups": Drawing((SWEEP, PEER), speedup_forest, sweep_words.forest_caption, sweep_words.forest_alt),
    "02_drafter_training": Drawing(
        (TRAINING,), drafter_training, training_words.training_caption, training_words.training_alt
    ),
    "02_drafter_acceptance": Drawing(
        (ACCEPTANCE,), drafter_acceptance, training_words.acceptance_caption, training_words.acceptance_alt
    ),
    "03_curves": Drawing((SERIAL_CURVE,), fan_of_curves, serial_words.fan_caption, serial_words.index_alt),
    "03_serialization_index": Drawing(
        (SERIAL_CURVE,), serialization_indices, serial_words.index_caption, serial_words.index_alt
    ),
    "03_context": Drawing((SERIAL_CURVE,), context_dependence, serial_words.context_caption, serial_words.context_alt),
    "03_extra_time": Drawing((OP_CURVE,), extra_time_by_operation, serial_words.extra_caption, serial_words.extra_alt),
    "03_dispatch": Drawing(
        (DISPATCH, DISPATCH_SHARE), predicted_dispatch, serial_words.dispatch_caption, serial_words.dispatch_alt
    ),
    "03_predicted_against_measured": Drawing(
        (SWEEP,), predicted_against_measured, sweep_words.prediction_caption, sweep_words.prediction_alt
    ),
    "04_round": Drawing((RAGGED_ROUND,), ragged_round, ragged_words.round_caption, ragged_words.round_alt),
    "04_corruption": Drawing(
        (RAGGED_OUTPUT,), corruption_by_token, ragged_words.corruption_caption, ragged_words.corruption_alt
    ),
    "04_matches": Drawing((RAGGED_OUTPUT,), matches_by_way, ragged_words.matches_caption, ragged_words.matches_alt),
    "04_faults": Drawing((FAULT_CELL,), fault_matrix, ragged_words.matrix_caption, ragged_words.matrix_alt),
    "04_realigning": Drawing((REALIGN,), realign_share, speed_words.realign_caption, speed_words.realign_alt),
    "04_throughput": Drawing(
        (BATCH_RUN,), throughput_by_batch, speed_words.throughput_caption, speed_words.throughput_alt
    ),
    "04_latency": Drawing((BATCH_RUN,), latency_by_batch, speed_words.latency_caption, speed_words.latency_alt),
    "04_slowest_row": Drawing(
        (BATCH_RUN,), heterogeneity, speed_words.heterogeneity_caption, speed_words.heterogeneity_alt
    ),
    "06_window": Drawing((LINEAR_WINDOW,), window_of_one_head, linear_words.window_caption, linear_words.window_alt),
    "06_errors": Drawing((LINEAR_ERROR,), errors_by_form, linear_words.errors_caption, linear_words.errors_alt),
    "06_traffic": Drawing((LINEAR_TRAFFIC,), traffic_by_scheme, linear_words.traffic_caption, linear_words.traffic_alt),
    "06_speed_by_n": Drawing(
        (LINEAR_SPEED,), time_against_n, linear_words.speed_by_n_caption, linear_words.speed_by_n_alt
    ),
    "06_speed_by_batch": Drawing(
        (LINEAR_SPEED,), time_against_batch, linear_words.speed_by_batch_caption, linear_words.speed_by_batch_alt
    ),
}
"""Figure name → how it is made."""


def draw(name: str, *rows: Rows, device: str | None = None, layout: Layout | None = None) -> tuple[Figure, str]:
    """Draw and save figure `name` from rows (one list a schema); returns the figure and its alternative text.

    In a notebook: `show(*draw("02_speedup_by_k", rows))`. ValueError for an unknown figure or no rows.
    """
    if name not in GALLERY:
        raise ValueError(f"unknown figure {name!r}: expected one of {', '.join(GALLERY)}")
    drawing = GALLERY[name]
    if not rows or not rows[0]:
        raise ValueError(f"figure {name!r} is drawn from {drawing.schemas[0].name} records: got none")
    figure, alt = drawing.draw(*rows), drawing.alt(*rows)
    save_figure(figure, name, f"{drawing.caption(*rows)} Device: {device or device_slug()}.", alt, layout)
    return figure, alt


def redraw_all(layout: Layout | None = None) -> list[Path]:
    """Draw every figure whose records are there, from the newest ones; returns the PNGs."""
    layout = layout or Layout()
    drawn = []
    for name, drawing in GALLERY.items():
        files = [choose_records(schema, name[:2], layout)[:1] for schema in drawing.schemas]
        if not files[0]:
            continue
        rows = [load_rows(found[0].path) if found else [] for found in files]
        draw(name, *rows, device=files[0][0].device, layout=layout)
        drawn.append(layout.figures / f"{name}.png")
    return drawn
