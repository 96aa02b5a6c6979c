"""Which sources a measurement depends on: records carry their hash, and a replayed verdict fails if it changed."""

from __future__ import annotations

PASS = (
    "specdec_core/topology.py",
    "specdec_core/kernels",
    "specdec_core/state",
    "specdec_core/targets/transformer.py",
    "specdec_core/measure",
    "specdec_core/bench/machine.py",
)
"""One target pass, and how it is timed."""

DECODING = (
    *PASS,
    "specdec_core/randomness.py",
    "specdec_core/sampling.py",
    "specdec_core/protocol.py",
    "specdec_core/rejection.py",
    "specdec_core/rows.py",
    "specdec_core/decode.py",
    "specdec_core/drafters",
    "specdec_core/lengths",
)
"""A whole decoder, and how it is timed."""
