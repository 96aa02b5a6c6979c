import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.evidence.serial_records import DISPATCH, DISPATCH_SHARE
from specdec_core.forensics.dispatch import (
    BASIS,
    WIDTHS,
    CpuBuild,
    Kernel,
    WeightMatrix,
    dispatch_rows,
    is_serial,
    metal,
    share_rows,
    weight_matrices,
    x86,
)
from specdec_core.models.gguf import open_gguf
from tests.tiny_gguf import gguf_model, write_gguf

AVX2, AVX512 = CpuBuild(), CpuBuild(avx512=True)
BLOCK = {"F32": 4.0, "F16": 2.0, "Q8_0": 34 / 32, "Q4_0": 18 / 32, "Q4_1": 20 / 32, "Q5_0": 22 / 32, "Q4_K": 144 / 256}


def matrix(kind="Q4_1", length=576, rows=1536, part="gate", count=1):
    return WeightMatrix(part, rows, length, kind, int(BLOCK.get(kind, 1.0) * rows * length), count)


def smollm2(kind="Q4_1", head="Q8_0"):
    """The matrices of SmolLM2-135M in one format."""
    sizes = {"q": 576, "k": 192, "v": 192, "o": 576, "gate": 1536, "up": 1536}
    layers = [matrix(kind, 576, rows, part, 30) for part, rows in sizes.items()]
    return [*layers, matrix(kind, 1536, 576, "down", 30), matrix(head, 576, 49152, "head")]


class TestMetal:
    @pytest.mark.parametrize(
        ("kind", "length", "n", "expected"),
        [
            ("Q4_1", 1536, 1, Kernel("mul_mv", 1)),
            ("Q4_1", 1536, 2, Kernel("mul_mv_ext", 1)),
            ("Q4_1", 1536, 7, Kernel("mul_mv_ext", 2)),
            ("Q4_1", 1536, 8, Kernel("mul_mv_ext", 2)),
            ("Q4_1", 1536, 9, Kernel("mul_mm", 1)),
            ("Q4_1", 576, 2, Kernel("mul_mv", 2)),  # 576 is no multiple of 128
            ("F32", 576, 8, Kernel("mul_mv", 8)),
            ("F32", 576, 9, Kernel("mul_mm", 1)),
            ("F32", 576, 33, Kernel("mul_mm", 2)),
            ("Q4_K", 1536, 3, Kernel("mul_mv", 3)),  # K-quants from four on
            ("Q6_K", 1536, 4, Kernel("mul_mv_ext", 1)),
            ("IQ2_XXS", 1536, 8, Kernel("mul_mv", 8)),  # none of those that the kernel for few columns knows
            ("F32", 32, 12, Kernel("mul_mv", 12)),  # rows too short for mul_mm
        ],
    )
    def test_rules(self, kind, length, n, expected):
        assert metal()(matrix(kind, length), n) == expected

    def test_an_older_device_multiplies_no_matrices(self):
        assert metal(simdgroup_mm=False)(matrix(), 16) == Kernel("mul_mv", 16)
        assert metal(simdgroup_mm=False)(matrix(length=1536), 8) == Kernel("mul_mv_ext", 2)

    @pytest.mark.parametrize("kind", ["F32", "F16", "Q8_0", "Q4_0", "Q4_1"])
    def test_most_of_the_model_is_served_serially_up_to_eight_and_nothing_from_nine_on(self, kind):
        shares = share_rows("Metal", kind, smollm2(kind), metal())
        found = {row["n"]: row["serial_share"] for row in shares}
        assert all(0.75 < found[n] < 0.9 for n in range(2, 9)) and all(found[n] == 0 for n in range(9, 17))
        index = {row["n"]: row["predicted_index"] for row in shares}
        assert 0.7 < index[7] < 0.9 and index[9] == 0

    def test_the_down_matrices_alone_escape(self):
        shares = share_rows("Metal", "F32", smollm2("F32", "F32"), metal())
        total = sum(each.count * each.bytes for each in smollm2("F32", "F32"))
        assert shares[0]["serial_share"] == pytest.approx(1 - 30 * 1536 * 576 * 4 / total)


class TestX86:
    @pytest.mark.parametrize(
        ("build", "kind", "n", "expected"),
        [
            (AVX512, "Q4_1", 7, Kernel("vec_dot", 7)),  # neither repacked nor known to tinyBLAS
            (AVX512, "Q4_1", 1, Kernel("vec_dot", 1)),
            (AVX512, "Q4_0", 1, Kernel("repacked gemv", 1)),
            (AVX512, "Q4_0", 3, Kernel("repacked gemv", 3)),
            (AVX512, "Q4_0", 4, Kernel("repacked gemm", 1)),
            (AVX512, "Q4_0", 7, Kernel("repacked gemm + gemv", 4)),
            (AVX2, "Q4_0", 16, Kernel("repacked gemm", 1)),
            (AVX2, "Q4_0", 23, Kernel("repacked gemm + gemv", 5)),
            (AVX2, "Q4_K", 4, Kernel("repacked gemm", 1)),
            (AVX2, "Q2_K", 4, Kernel("vec_dot", 4)),
            (AVX512, "Q2_K", 4, Kernel("repacked gemm", 1)),
            (AVX512, "Q8_0", 1, Kernel("vec_dot", 1)),
            (AVX512, "Q8_0", 7, Kernel("tinyBLAS", 2)),
            (AVX2, "Q8_0", 7, Kernel("tinyBLAS", 4)),
            (AVX512, "F32", 7, Kernel("tinyBLAS", 2)),
            (AVX2, "F16", 7, Kernel("tinyBLAS", 3)),
            (AVX2, "Q6_K", 7, Kernel("vec_dot", 7)),
        ],
    )
    def test_rules(self, build, kind, n, expected):
        assert x86(build)(matrix(kind), n) == expected

    def test_without_repacking_another_kernel_serves_the_same_file(self):
        assert x86(AVX512, repack=False)(matrix("Q4_0"), 7) == Kernel("tinyBLAS", 2)
        assert x86(CpuBuild(repack=False))(matrix("Q4_0"), 2) == Kernel("tinyBLAS", 1)
        assert x86(CpuBuild(llamafile=False))(matrix("Q8_0"), 7) == Kernel("vec_dot", 7)

    def test_rows_that_do_not_fit(self):
        assert x86(AVX512)(matrix("Q4_0", rows=12), 4) == Kernel("tinyBLAS", 1)  # no multiple of eight
        assert x86(AVX512)(matrix("F32", length=24), 4) == Kernel("vec_dot", 4)  # no multiple of sixteen
        assert x86(AVX2)(matrix("F32", length=24), 4) == Kernel("tinyBLAS", 2)
        assert x86(AVX2)(matrix("F32", rows=6), 4) == Kernel("vec_dot", 4)

    def test_a_format_without_a_rule(self):
        with pytest.raises(ValueError, match="matrix gate is in BF16, for which no rule is written"):
            x86(AVX512)(matrix("BF16"), 2)

    def test_the_shipped_file_is_served_serially_but_for_its_head(self):
        shares = share_rows("CPU", "Q4_1", smollm2(), x86(AVX512))
        assert all(0.65 < row["serial_share"] < 0.75 for row in shares)
        batched = share_rows("CPU", "Q8_0", smollm2("Q8_0"), x86(AVX512))
        assert not any(row["serial_share"] for row in batched)


class TestBuild:
    LINE = "CPU : SSE3 = 1 | AVX2 = 1 | AVX512 = {} | LLAMAFILE = 1 | OPENMP = 1 | REPACK = {} |"

    def test_features_are_read_from_what_llama_cpp_says(self):
        assert CpuBuild.parse(self.LINE.format(1, 1)) == CpuBuild(True, True, True, True)
        assert CpuBuild.parse(self.LINE.format(0, 0)) == CpuBuild(True, False, True, False)
        assert (AVX512.name, AVX2.name) == ("CPU, AVX-512", "CPU, AVX2")

    def test_another_processor_has_other_rules(self):
        assert CpuBuild.parse("CPU : NEON = 1 | ARM_FMA = 1 | LLAMAFILE = 1 | REPACK = 1 |") is None


class TestMatrices:
    @pytest.mark.parametrize("tied", [False, True])
    def test_all_that_a_pass_multiplies_with(self, tmp_path, tied):
        model = gguf_model(layers=3, tied_head=tied)
        file = write_gguf(model, tmp_path / "tiny.gguf")
        found = weight_matrices(file)
        c = model.config
        assert [each.part for each in found] == ["q", "k", "v", "o", "gate", "up", "down", "head"]
        assert [each.count for each in found] == [3] * 7 + [1]
        assert {each.part: (each.rows, each.length) for each in found} == {
            "q": (c.heads * c.head_dim, c.hidden_size), "k": (c.kv_heads * c.head_dim, c.hidden_size),
            "v": (c.kv_heads * c.head_dim, c.hidden_size), "o": (c.hidden_size, c.heads * c.head_dim),
            "gate": (c.intermediate_size, c.hidden_size), "up": (c.intermediate_size, c.hidden_size),
            "down": (c.hidden_size, c.intermediate_size), "head": (c.vocabulary, c.hidden_size),
        }  # fmt: skip
        two_dimensional = [t for t in open_gguf(file).tensors if len(t.shape) == 2]
        embedding = 0 if tied else next(t.n_bytes for t in two_dimensional if t.name == "token_embd.weight")
        total = sum(int(t.n_bytes) for t in two_dimensional) - embedding
        assert sum(each.count * each.bytes for each in found) == total

    def test_layers_in_another_format_are_apart(self, tmp_path):
        model = gguf_model(layers=2)
        half = {"blk.1.ffn_up.weight": model.weights["model.layers.1.mlp.up_proj.weight"].numpy().astype(np.float16)}
        found = [
            each for each in weight_matrices(write_gguf(model, tmp_path / "a.gguf", None, half)) if each.part == "up"
        ]
        assert [(each.kind, each.count) for each in found] == [("F16", 1), ("F32", 1)]


class TestRows:
    def test_a_row_a_width_and_matrix_that_says_it_is_a_prediction(self):
        rows = dispatch_rows("Metal", "Q4_1", smollm2(), metal())
        assert len(rows) == len(WIDTHS) * len(smollm2())
        assert all(DISPATCH.validated(row) == row and row["basis"] == BASIS for row in rows)
        assert "prediction" in BASIS and "0c1e57098" in BASIS

    def test_shares_are_sums_over_the_rows(self):
        rows = dispatch_rows("CPU", "Q4_1", smollm2(), x86(AVX2))
        for share in share_rows("CPU", "Q4_1", smollm2(), x86(AVX2)):
            own = [row for row in rows if row["n"] == share["n"]]
            total = sum(row["bytes"] for row in own)
            assert share == DISPATCH_SHARE.validated(share)
            assert share["serial_share"] == pytest.approx(sum(r["bytes"] for r in own if r["serial"]) / total)
            assert share["passes"] == pytest.approx(sum(r["bytes"] * r["passes"] for r in own) / total)

    @given(st.sampled_from(["F32", "F16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q4_K", "Q6_K"]), st.integers(1, 64),
           st.sampled_from([32, 64, 576, 1536]), st.booleans())  # fmt: skip
    def test_no_kernel_goes_over_the_weights_more_often_than_there_are_columns(self, kind, n, length, repack):
        for rule in (metal(), metal(False), x86(AVX2, repack), x86(AVX512, repack)):
            kernel = rule(matrix(kind, length), n)
            assert 1 <= kernel.passes <= n
            assert is_serial(kernel, n) == (n > 1 and kernel.passes == n)
