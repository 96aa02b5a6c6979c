"""Which sources a measurement depends on: records carry their hash, and a replayed verdict fails if it changed.

File by file, not folder by folder: a drafter or a kernel that is added changes nothing that was measured without it.
"""

from __future__ import annotations

KERNELS = tuple(
    f"specdec_core/kernels/{name}.py"
    for name in (
        "attention/numba",
        "compiled",
        "cpu",
        "llama_step/__init__",
        "llama_step/numba",
        "llama_step/numba_step",
        "llama_step/torch",
        "pinning",
        "plan",
        "rotary",
        "simd",
        "skinny_linear/__init__",
        "skinny_linear/numba",
        "skinny_linear/panel",
        "skinny_linear/torch",
        "threads",
    )
)

PASS = (
    "specdec_core/topology.py",
    *KERNELS,
    "specdec_core/state/ragged_kv.py",
    "specdec_core/state/slots.py",
    "specdec_core/targets/transformer.py",
)
"""One target pass."""

TIMING = (
    "specdec_core/measure/ceilings.py",
    "specdec_core/measure/clock.py",
    "specdec_core/measure/cost_model.py",
    "specdec_core/measure/curves.py",
    "specdec_core/measure/sweep.py",
    "specdec_core/bench/machine.py",
)
"""How passes and decoders are timed; what is only counted does not depend on it."""

INT8_PASS = tuple(
    f"specdec_core/kernels/{name}.py"
    for name in (
        "llama_step/int8",
        "llama_step/int8_step",
        "skinny_linear/int8",
        "skinny_linear/int8_panel",
        "skinny_linear/int8_products",
    )
)
"""What a pass needs beside PASS where weights are int8."""

LOOP = (
    "specdec_core/topology.py",
    "specdec_core/randomness.py",
    "specdec_core/sampling.py",
    "specdec_core/protocol.py",
    "specdec_core/rejection.py",
    "specdec_core/rows.py",
    "specdec_core/decode.py",
    "specdec_core/drafters/model.py",
    "specdec_core/drafters/ngram.py",
    "specdec_core/lengths/fixed.py",
)
"""The decode loop with drafters that any target may have."""

EAGLE = (
    "specdec_core/drafters/eagle.py",
    "specdec_core/drafters/eagle_engine.py",
    "specdec_core/drafters/eagle_memory.py",
    "specdec_core/drafters/eagle_tree.py",
    "specdec_core/kernels/eagle_step/__init__.py",
    "specdec_core/kernels/eagle_step/int8.py",
    "specdec_core/kernels/eagle_step/int8_step.py",
    "specdec_core/kernels/eagle_step/numba.py",
    "specdec_core/kernels/eagle_step/numba_step.py",
    "specdec_core/models/eagle_checkpoint.py",
    "specdec_core/measure/drafting.py",
)
"""A trained drafter on the compiled engine, and how it is timed."""

DECODING = tuple(dict.fromkeys((*PASS, *LOOP, "specdec_core/drafters/layer_skip.py")))
"""A whole decoder of this package."""

GATED_DELTA = (
    "specdec_core/topology.py",
    *(
        f"specdec_core/kernels/{name}.py"
        for name in (
            "compiled",
            "cpu",
            "gated_delta/__init__",
            "gated_delta/ancestry",
            "gated_delta/checks",
            "gated_delta/numba",
            "gated_delta/numba_commit",
            "gated_delta/numba_layout",
            "gated_delta/numba_step",
            "gated_delta/paths",
            "gated_delta/reference",
            "gated_delta/schemes",
            "gated_delta/schemes_eager",
            "gated_delta/schemes_plan",
            "gated_delta/schemes_step",
            "gated_delta/torch",
            "gated_delta/traffic",
            "pinning",
            "simd",
            "skinny_linear/panel",
            "threads",
        )
    ),
)
"""The gated delta rule in its forms, and the schemes that it competes with."""
