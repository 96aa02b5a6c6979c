"""Records of notebook 03: t(n) and its serial twin, kernel swaps, op-level curves, dispatch by rule, twins' tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from specdec_core.evidence.schemas import RecordError, Schema


def _check_seconds(row: Mapping[str, Any]) -> None:
    if not row["seconds"] or min(row["seconds"]) < 0:
        raise RecordError(f"seconds {row['seconds'][:3]}… of a {row['n']}-token pass: expected at least one, none < 0")


def _check_curve(row: Mapping[str, Any]) -> None:
    _check_seconds(row)
    if row["arm"] not in ("verify", "loop"):
        raise RecordError(f"arm {row['arm']!r}: expected 'verify' (one pass) or 'loop' (the serial twin)")
    if row["n"] < 1 or row["context"] < 0:
        raise RecordError(f"n = {row['n']} at context {row['context']}: expected n ≥ 1 and a context ≥ 0")


def _check_dispatch(row: Mapping[str, Any]) -> None:
    if not 1 <= row["passes"] <= row["n"] or row["serial"] != (row["n"] > 1 and row["passes"] == row["n"]):
        raise RecordError(
            f"{row['passes']} passes over the weights for n = {row['n']}, serial {row['serial']}: expected 1…n, and "
            "serial where they are n > 1"
        )


def _check_share(row: Mapping[str, Any]) -> None:
    if not 0 <= row["serial_share"] <= 1 or row["n"] < 2:
        raise RecordError(f"share {row['serial_share']} at n = {row['n']}: expected a share in 0…1 and n ≥ 2")


def _check_twin(row: Mapping[str, Any]) -> None:
    if row["identical"] != (row["divergences"] == 0) or (row["identical"] and not row["certified"]):
        raise RecordError(
            f"identical {row['identical']} with {row['divergences']} divergences, certified {row['certified']}: an "
            "identical output has none and counts as certified"
        )


SERIAL_CURVE = Schema(
    "serial_curve",
    1,
    {
        "backend": str,  # 'llama.cpp Q4_1'
        "engine": str,  # numba, torch, transformers, mlx, llama.cpp
        "format": str,  # of the weights: float32, '4-bit', 'Q4_1', …
        "quantized": bool,
        "repack": bool | None,  # llama.cpp: weights rearranged on loading; None elsewhere
        "device": str,  # cpu, metal, cuda
        "threads": int | None,  # that the engine was told to use; None where it decides itself
        "session": int,  # backends of one session were interleaved: their samples pair by repeat
        "arm": str,  # 'verify': one pass over n tokens; 'loop': the serial twin, n passes over one
        "n": int,
        "context": int,  # tokens cached before
        "seconds": list[float],  # a sample a repeat, in the order of the repeats
    },
    _check_curve,
)
"""One line a (backend, context, arm, n)."""

SWAP = Schema(
    "swap",
    1,
    {
        "swap": str,
        "before": str,  # backends of SERIAL_CURVE
        "after": str,
        "n_before": int,
        "n_after": int,
        "context": int,
        "session": int,
        "same_values": bool,  # the two files' weights stand for the very same numbers (compared, not assumed)
    },
)
"""One line a pair of arms in SERIAL_CURVE between which only the kernel differs: another form, or padding."""

OP_CURVE = Schema(
    "op_curve",
    1,
    {
        "backend": str,
        "operation": str,  # 'model': the whole pass, not instrumented
        "part": bool,  # one of those that add up to the model; others tell how they were measured
        "count": int,  # times in a pass
        "n": int,
        "context": int,
        "seconds": list[float],  # of all `count` together, a sample a repeat, interleaved with the model's
    },
    _check_seconds,
)
"""One line a (backend, operation, n)."""

DISPATCH = Schema(
    "dispatch",
    1,
    {
        "backend": str,  # whose rules: 'Metal', 'CPU, AVX2', …
        "variant": str,  # format of the file
        "basis": str,  # that it is a prediction, and by the rules of which version
        "n": int,
        "part": str,  # q, k, v, o, gate, up, down, head
        "count": int,  # such matrices in the model
        "rows": int,
        "length": int,  # of a row
        "format": str,  # ggml's name of this matrix's type
        "bytes": int,  # of all `count` together
        "kernel": str,
        "passes": int,  # over the weights
        "serial": bool,  # n > 1 and as many passes
    },
    _check_dispatch,
)
"""One line a (backend, file, n, kind of matrix)."""

DISPATCH_SHARE = Schema(
    "dispatch_share",
    1,
    {
        "backend": str,
        "variant": str,
        "basis": str,
        "n": int,
        "serial_share": float,  # of the weight bytes
        "passes": float,  # mean over the bytes
        "predicted_index": float,  # (passes − 1)/(n − 1)
    },
    _check_share,
)
"""One line a (backend, file, n > 1): the sum of DISPATCH."""

TWIN = Schema(
    "twin",
    1,
    {
        "backend": str,
        "exact": bool,  # whether its bits do not depend on n, so that the tokens must be equal
        "drafter": str,
        "K": int,
        "prompt_id": str,
        "tokens": int,
        "identical": bool,  # greedy SD on the target and on its serial twin emit the same tokens
        "same_rounds": bool,  # and the same ones in every round
        "certified": bool,  # identical, or every divergence a certified near-tie
        "divergences": int,
        "index": int,  # of the first, −1 if none
        "gap": float,  # of reference logits there, 0 if none
        "epsilon": float,  # rounding error measured there
    },
    _check_twin,
)
"""One line a (backend, prompt)."""

ABSENT = Schema("absent", 1, {"backend": str, "reason": str})
"""One line a backend of the plan that could not be opened here: whatever needs it is not testable."""
