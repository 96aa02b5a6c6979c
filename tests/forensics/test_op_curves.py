import pytest
import torch

from specdec_core.bench.machine import matrix_parameters
from specdec_core.forensics import op_curves
from specdec_core.forensics.op_curves import HEAD, MODEL, OPERATIONS, PRODUCTS, SKELETON, counts, op_samples, operations
from specdec_core.kernels.skinny_linear.numba import PackedLinear
from specdec_core.measure import clock
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement, PlacementError
from specdec_core.targets.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")

MODEL_OF = {tied: tiny_llama(3, context=64, tied_head=tied, layers=3) for tied in (False, True)}
ENGINES = {"numba": Placement("numba", threads=1), "torch": Placement("torch")}


@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("tied", [False, True])
class TestOperations:
    def test_they_go_over_every_weight_that_a_pass_goes_over(self, engine, tied):
        checkpoint = MODEL_OF[tied]
        found = operations(checkpoint, ENGINES[engine])
        assert sum(each.weights for each in found) == matrix_parameters(Transformer(checkpoint))
        assert {each.name: each.count for each in found} == {**dict.fromkeys(PRODUCTS, 3), HEAD: 1}

    def test_names_are_those_that_are_summed(self, engine, tied):
        names = [each.name for each in operations(MODEL_OF[tied], ENGINES[engine])]
        assert [*names, SKELETON] == list(OPERATIONS) and MODEL not in OPERATIONS


def test_int8_products_are_not_taken_for_float_ones():
    with pytest.raises(PlacementError, match=r"dtype int8: .* expected float32"):
        operations(tiny_llama(0), Placement("numba", dtype="int8"))


@pytest.mark.parametrize("n", [1, 5])
def test_the_compiled_product_runs_n_rows_over_all_layers_in_one_call(monkeypatch, n):
    seen, call = [], PackedLinear.__call__
    monkeypatch.setattr(PackedLinear, "__call__", lambda self, x: seen.append((call(self, x).shape, x.shape)))
    c = MODEL_OF[True].config
    down = next(each for each in operations(MODEL_OF[True], ENGINES["numba"]) if each.name == "down")
    down.arm(n)()
    assert seen == [((n, 3 * c.hidden_size), (n, c.intermediate_size))]


def test_torch_products_run_one_call_a_layer(monkeypatch):
    shapes, linear = [], torch.nn.functional.linear
    monkeypatch.setattr(torch.nn.functional, "linear", lambda x, w: shapes.append((x.shape, w.shape)) or linear(x, w))
    c = MODEL_OF[True].config
    both = next(each for each in operations(MODEL_OF[True], ENGINES["torch"]) if each.name == "gate, up")
    both.arm(4)()
    assert shapes == 3 * [((4, c.hidden_size), (2 * c.intermediate_size, c.hidden_size))]


def test_the_skeleton_has_the_models_cache_and_next_to_no_weights():
    real = tiny_llama(1, layers=5, heads=6, kv_heads=2, head_dim=64, hidden_size=384, intermediate_size=512)
    bare = op_curves.skeleton(real)
    for name in ("layers", "heads", "kv_heads", "head_dim", "context", "rope_theta"):
        assert getattr(bare.config, name) == getattr(real.config, name)
    weights = [sum(tensor.numel() for tensor in each.weights.values()) for each in (real, bare)]
    assert weights[1] < 0.05 * weights[0]


@pytest.mark.parametrize("engine", ENGINES)
def test_samples_of_everything_at_every_width_beside_the_model(monkeypatch, engine):
    monkeypatch.setattr(clock, "SETTLE", 0.0)
    target = Transformer(MODEL_OF[False], ENGINES[engine])
    samples = op_samples(MODEL_OF[False], target, (1, 4), 8, 3)
    assert set(samples) == {(name, n) for name in (*OPERATIONS, MODEL) for n in (1, 4)}
    assert all(seconds.shape == (3,) and (seconds > 0).all() for seconds in samples.values())
    assert set(counts(MODEL_OF[False])) == {name for name, _ in samples}
    # The model does what its operations do: none of them can take much longer than it.
    for n in (1, 4):
        assert all(samples[name, n].min() < 3 * samples[MODEL, n].min() for name in OPERATIONS)
