"""Which kernel ggml would choose for every weight matrix at n tokens, by its rules: a *prediction*, nothing is run.

The rules were read on 30 November 2026 in llama.cpp 0c1e57098 (ggml 0.25.3), the revision that llama-cpp-python 0.3.36
is built from:

- Metal, ggml/src/ggml-metal/ggml-metal-ops.cpp (ggml_metal_op_mul_mat), ggml-metal-common.cpp
  (ggml_metal_op_mul_mat_use_mm), ggml-metal-device.cpp (tile sizes). `mul_mv_ext`, made for few columns, serves
  n = 2…8 (K-quants: 4…8) where a row's length is a multiple of 128 and its format is among those it knows; `mul_mm`
  serves n ≥ 9 where rows have at least 64 weights and the device multiplies matrices in SIMD groups (Apple7: M1 and
  later); all else is `mul_mv`, one column a threadgroup, which reads the weights once a column.
- x86, ggml/src/ggml-cpu/repack.cpp (ggml_repack_get_optimal_repack_type, forward_mul_mat_one_chunk),
  arch/x86/repack.cpp, llamafile/sgemm.cpp (llamafile_sgemm), ggml-cpu.c (ggml_compute_forward_mul_mat). Repacked
  formats take columns by fours, what is left over one by one; tinyBLAS takes n ≥ 2 of the formats it knows; all else
  is `vec_dot`, one dot product a row and column: its weights stay in the cache between columns, so not reading but
  *computing* (unpacking them again) is serialized.

Other revisions have other rules: 000cfab8, for one, hands Q4_0 over to `mul_mm` after n = 4.

A kernel's *passes* are how often it goes over a weight for n columns; a matrix is served serially where they are n.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specdec_core.models import gguf

BASIS = "prediction by the rules of ggml 0.25.3 (llama.cpp 0c1e57098)"
WIDTHS = tuple(range(1, 17))

PARTS = {
    "attn_q": "q", "attn_k": "k", "attn_v": "v", "attn_output": "o",
    "ffn_gate": "gate", "ffn_up": "up", "ffn_down": "down", "output": "head",
}  # fmt: skip

_EXT_FROM_2 = frozenset(
    ("F32", "F16", "BF16", "Q1_0", "Q2_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "MXFP4", "IQ4_NL")
)
_EXT_FROM_4 = frozenset(("Q2_K", "Q3_K", "Q4_K", "Q5_K", "Q6_K"))
_EXT_COLUMNS = {2: 2, 3: 3, 4: 4, 5: 5, 6: 3, 7: 4, 8: 4}
"""Columns that mul_mv_ext takes at once, by n."""
_TINY_BLOCKS = frozenset(("Q8_0", "Q4_0", "Q5_0", "IQ4_NL"))


@dataclass(frozen=True)
class WeightMatrix:
    """A matrix that every pass multiplies with: `count` of them in the model, `rows` of `length` weights each.

    part  q, k, v, o, gate, up, down or head; kind is ggml's name of the format; bytes are those of one matrix.
    """

    part: str
    rows: int
    length: int
    kind: str
    bytes: int
    count: int = 1


@dataclass(frozen=True)
class Kernel:
    """The kernel of one product with n columns, and how often it goes over the weights."""

    name: str
    passes: int


Rule = Callable[[WeightMatrix, int], Kernel]


@dataclass(frozen=True)
class CpuBuild:
    """What a build of llama.cpp for x86 was compiled with."""

    avx2: bool = True
    avx512: bool = False
    llamafile: bool = True
    repack: bool = True

    @classmethod
    def parse(cls, build: str) -> CpuBuild | None:
        """From models.llama_library.build(); None for a build that is not x86, whose rules are not written here."""
        features = {name for name, value in re.findall(r"(\w+) = (\d+)", build) if value != "0"}
        if not features & {"SSE3", "AVX", "AVX2"}:
            return None
        return cls("AVX2" in features, "AVX512" in features, "LLAMAFILE" in features, "REPACK" in features)

    @property
    def name(self) -> str:
        return "CPU, AVX-512" if self.avx512 else "CPU, AVX2" if self.avx2 else "CPU"


def weight_matrices(file: str | Path) -> list[WeightMatrix]:
    """The matrices of a GGUF file of a Llama model; equal ones of several layers are one entry with their count.

    A tied embedding is the head. Errors as of models.gguf.
    """
    tensors = {tensor.name: tensor for tensor in gguf.open_gguf(Path(file)).tensors}
    if "output.weight" not in tensors and "token_embd.weight" in tensors:
        tensors["output.weight"] = tensors["token_embd.weight"]
    counts: dict[WeightMatrix, int] = {}
    for name, tensor in tensors.items():
        part = PARTS.get(name.removesuffix(".weight").split(".")[-1])
        if part is None or len(tensor.shape) != 2:
            continue
        length, rows = (int(size) for size in tensor.shape)
        matrix = WeightMatrix(part, rows, length, tensor.tensor_type.name, int(tensor.n_bytes))
        counts[matrix] = counts.get(matrix, 0) + 1
    order = list(PARTS.values())
    found = [WeightMatrix(m.part, m.rows, m.length, m.kind, m.bytes, count) for m, count in counts.items()]
    return sorted(found, key=lambda matrix: (order.index(matrix.part), matrix.kind))


def metal(simdgroup_mm: bool = True) -> Rule:
    """Rules of the Metal backend; `simdgroup_mm`: the device multiplies matrices in SIMD groups."""

    def rule(matrix: WeightMatrix, n: int) -> Kernel:
        least = 2 if matrix.kind in _EXT_FROM_2 else 4 if matrix.kind in _EXT_FROM_4 else 9
        if matrix.length % 128 == 0 and least <= n <= 8:
            return Kernel("mul_mv_ext", _over(n, _EXT_COLUMNS[n]))
        if simdgroup_mm and matrix.length >= 64 and n > 8:
            return Kernel("mul_mm", _over(n, 32))
        return Kernel("mul_mv", n)

    return rule


def x86(build: CpuBuild, repack: bool = True) -> Rule:
    """Rules of the CPU backend on x86; `repack`: whether weights were rearranged on loading (use_extra_bufts).

    The rule raises ValueError for BF16, whose kernel depends on more of the build than is known here.
    """

    def rule(matrix: WeightMatrix, n: int) -> Kernel:
        if repack and build.repack and _is_repacked(matrix, build):
            sixteens, fours, ones = n // 16, n % 16 // 4, n % 4  # columns go in this order; the last ones one by one
            name = "repacked gemm + gemv" if n > 3 and ones else "repacked gemm" if n > 3 else "repacked gemv"
            return Kernel(name, sixteens + fours + ones)
        columns = _tinyblas_columns(matrix, build) if build.llamafile and n > 1 else 0
        return Kernel("tinyBLAS", _over(n, columns)) if columns else Kernel("vec_dot", n)

    return rule


def _is_repacked(matrix: WeightMatrix, build: CpuBuild) -> bool:
    known = {"Q4_0", "Q4_K", "IQ4_NL", "MXFP4"} if build.avx2 else set()
    if build.avx512:
        known = known | {"Q2_K"}
    return matrix.kind in known and matrix.rows % 8 == 0


def _tinyblas_columns(matrix: WeightMatrix, build: CpuBuild) -> int:
    """Most columns that tinyBLAS takes at once, 0 if it does not take this matrix."""
    if matrix.kind == "BF16":
        raise ValueError(f"matrix {matrix.part} is in BF16, for which no rule is written: use F16 or a block format")
    if matrix.kind in ("F32", "F16"):
        fits = matrix.length % (16 if build.avx512 else 8) == 0 and matrix.rows % 4 == 0
        return (6 if build.avx512 else 3) if fits else 0
    if matrix.kind in _TINY_BLOCKS:
        return 4 if build.avx512 else 2
    return 0


def _over(n: int, columns: int) -> int:
    return -(-n // columns)


def dispatch_rows(
    backend: str, variant: str, matrices: Sequence[WeightMatrix], rule: Rule, widths: Iterable[int] = WIDTHS
) -> list[dict[str, Any]]:
    """Records of DISPATCH: one a width and matrix. `variant` is the file's format, `backend` whose rules these are."""
    return [
        {
            "backend": backend,
            "variant": variant,
            "basis": BASIS,
            "n": n,
            "part": matrix.part,
            "count": matrix.count,
            "rows": matrix.rows,
            "length": matrix.length,
            "format": matrix.kind,
            "bytes": matrix.count * matrix.bytes,
            "kernel": kernel.name,
            "passes": kernel.passes,
            "serial": is_serial(kernel, n),
        }
        for n in widths
        for matrix in matrices
        for kernel in [rule(matrix, n)]
    ]


def is_serial(kernel: Kernel, n: int) -> bool:
    """Whether every one of n > 1 columns has a pass over the weights of its own."""
    return n > 1 and kernel.passes == n


def share_rows(
    backend: str, variant: str, matrices: Sequence[WeightMatrix], rule: Rule, widths: Iterable[int] = WIDTHS
) -> list[dict[str, Any]]:
    """Records of DISPATCH_SHARE: of all weight bytes, the share served serially at each n > 1, and the passes.

    `passes` is their mean over the bytes, `predicted_index` (passes − 1)/(n − 1): what the serialization index would
    be if time were passes.
    """
    total = sum(matrix.count * matrix.bytes for matrix in matrices)
    rows = []
    for n in (n for n in widths if n > 1):
        kernels = [(matrix.count * matrix.bytes / total, rule(matrix, n)) for matrix in matrices]
        passes = sum(share * kernel.passes for share, kernel in kernels)
        rows.append(
            {
                "backend": backend,
                "variant": variant,
                "basis": BASIS,
                "n": n,
                "serial_share": min(1.0, sum(share for share, kernel in kernels if is_serial(kernel, n))),
                "passes": passes,
                "predicted_index": (passes - 1) / (n - 1),
            }
        )
    return rows
