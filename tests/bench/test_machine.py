import numpy as np
import pytest

from specdec_core.bench.machine import bytes_a_weight, ceiling_row, curve_rows, matrix_parameters, measure_targets
from specdec_core.evidence.sweep_records import CEILING, COST_CURVE
from specdec_core.measure.ceilings import GEMM_SIZE, READ_BYTES
from specdec_core.measure.curves import CurveSamples
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.targets.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")

FLOAT, HALF = (Transformer(tiny_llama(1), Placement(dtype=dtype)) for dtype in ("float32", "bfloat16"))
BEST = {"read": np.array([0.5, 0.25, 1.0]), "gemm": np.array([2.0, 1.0])}


@pytest.mark.parametrize("changes", [{}, {"tied_head": True}, {"kv_heads": 6, "layers": 1}, {"vocabulary": 1000}])
def test_parameters_are_the_checkpoints_matrices_but_an_embedding_that_is_only_looked_up(changes):
    checkpoint = tiny_llama(1, **changes)
    matrices = {name: tensor.numel() for name, tensor in checkpoint.weights.items() if tensor.ndim == 2}
    if not checkpoint.config.tied_head:
        del matrices["model.embed_tokens.weight"]
    assert matrix_parameters(Transformer(checkpoint)) == sum(matrices.values())


def test_a_ceiling_is_what_the_machine_can_do_at_its_best():
    row = ceiling_row("tiny", FLOAT, BEST)
    assert CEILING.validated(row) == row
    assert row["bytes_per_second"] == READ_BYTES / 0.25 and row["flops_per_second"] == 2 * GEMM_SIZE**3 / 1.0


def test_bytes_follow_the_dtype_and_operations_do_not():
    full, half = (ceiling_row("tiny", target, BEST) for target in (FLOAT, HALF))
    assert full["weight_bytes"] == 2 * half["weight_bytes"] == 4 * matrix_parameters(FLOAT)
    assert full["flops_per_token"] == half["flops_per_token"] == 2 * matrix_parameters(FLOAT)


def test_an_int8_weight_is_a_byte_and_its_share_of_a_scale():
    assert bytes_a_weight(Placement("numba", dtype="int8", threads=1)) == 68 / 64


def test_curve_rows_are_medians_with_their_interval():
    samples = CurveSamples({(8, 2): np.array([1.0, 2.0, 9.0]), (4, 1): np.array([5.0, 5.0, 5.0])})
    first, second = rows = curve_rows("name", "backend", samples)
    assert [COST_CURVE.validated(row) for row in rows] == rows
    assert (first["context"], first["n"], second["context"], second["n"]) == (4, 1, 8, 2)
    assert (second["seconds_low"], second["seconds_median"], second["seconds_high"]) == (1.0, 2.0, 9.0)
    assert second["samples"] == 3


def test_all_targets_and_both_ceilings_are_measured_in_one_run(small_ceilings):
    samples, best = measure_targets({"a/b": FLOAT, "half": HALF}, (1, 3), (4, 9), repeats=2)
    assert set(samples) == {"a/b", "half"} and set(best) == {"read", "gemm"}
    for each in samples.values():
        assert {key: seconds.shape for key, seconds in each.seconds.items()} == {
            (context, width): (2,) for context in (4, 9) for width in (1, 3)
        }
