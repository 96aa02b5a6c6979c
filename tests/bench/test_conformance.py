from dataclasses import replace

import numpy as np
import pytest

from specdec_core.bench.conformance import SHAPES, TOLERANCE, ConformanceError, check_conformance
from specdec_core.models.checkpoints import tiny_llama
from specdec_core.placement import Placement
from specdec_core.targets.transformer import Transformer

pytestmark = pytest.mark.usefixtures("one_thread")

CHECKPOINT = tiny_llama(1)
TARGET = Transformer(CHECKPOINT, Placement())
REFERENCE = TARGET.float64_reference()


def broken(change_plan=None, change_logits=None, checkpoint=CHECKPOINT, placement=Placement()) -> Transformer:
    """The tiny model on an engine with a fault: in what it is asked to do, or in what it answers."""
    target = Transformer(checkpoint, placement)
    engine = target._step

    def step(plan, cache, **how):
        logits, features = engine(change_plan(plan) if change_plan else plan, cache, **how)
        return (change_logits(plan, logits) if change_logits and logits is not None else logits), features

    target._step = step
    return target


def is_tree(plan) -> bool:
    return not (plan.nodes == plan.depths).all()


def as_chain(plan):
    """Every node sees all nodes of its row before it."""
    if not is_tree(plan):
        return plan
    width = int(plan.nodes.max()) + 1
    paths = np.where(np.arange(width) <= plan.nodes[:, None], np.arange(width), -1).astype(np.int32)
    return replace(plan, paths=paths)


def with_nan(plan, logits):
    logits = logits.clone()
    logits[-1, 0] = float("nan")
    return logits


def add_last_row(plan, logits):
    """An error of the last node that is large only against rounding."""
    logits = logits.clone()
    logits[-1] += 1e-3
    return logits


FAULTS = {
    "positions one late": broken(lambda plan: replace(plan, depths=plan.depths + (plan.committed > 0))),
    "branches see one another": broken(as_chain),
    "the newest entry is not seen": broken(
        lambda plan: replace(plan, paths=np.where(plan.paths == plan.nodes[:, None], 0, plan.paths))
    ),
    "NaN in one logit": broken(change_logits=with_nan),
    "an error in the third digit": broken(change_logits=add_last_row),
    "scaled logits": broken(change_logits=lambda plan, logits: logits * 1.001),
    "scores of another node": broken(
        change_logits=lambda plan, logits: logits.roll(1, 0) if len(logits) > 1 else logits
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_broken_engine_is_caught_and_the_gate_says_what_is_off(fault):
    with pytest.raises(ConformanceError, match=r"logits of tiny-1 on Placement.*are off by.*expected at most 2e-05"):
        check_conformance(FAULTS[fault], REFERENCE)


@pytest.mark.parametrize("engine", ["torch", "numba"])
def test_both_engines_pass_in_every_shape(engine):
    found = check_conformance(TARGET.placed(Placement(engine, threads=1)), REFERENCE)
    assert found.passed and set(found.errors) == set(SHAPES)
    assert all(0 < error < 2e-5 for error in found.errors.values())


@pytest.mark.parametrize("dtype", ["float64", "bfloat16", "float16", "int8"])
def test_every_dtype_has_a_tolerance_that_its_engine_meets(dtype):
    # One layer: rounding grows with depth, and a random model amplifies it more than a trained one.
    shallow = Transformer(tiny_llama(1, layers=1), Placement("numba" if dtype == "int8" else "torch", dtype=dtype))
    found = check_conformance(shallow, shallow.float64_reference())
    assert found.passed and found.tolerance == TOLERANCE[dtype]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_tolerance_of_half_precision_is_no_blank_cheque(dtype):
    shallow = broken(as_chain, checkpoint=tiny_llama(1, layers=1), placement=Placement(dtype=dtype))
    with pytest.raises(ConformanceError):
        check_conformance(shallow, shallow.float64_reference())


def test_int8_weights_are_told_from_wrong_ones():
    checkpoint, other = (tiny_llama(seed, layers=1) for seed in (1, 2))
    reference = Transformer(other, Placement()).float64_reference()
    with pytest.raises(ConformanceError, match=r"expected at most 0\.15"):
        check_conformance(Transformer(checkpoint, Placement("numba", dtype="int8", threads=1)), reference)


def test_a_fault_of_trees_shows_in_trees_only():
    with pytest.raises(ConformanceError) as caught:
        check_conformance(FAULTS["branches see one another"], REFERENCE)
    errors = {name: float(value) for name, value in _numbers(str(caught.value)).items()}
    assert {name for name, error in errors.items() if error > 2e-5} == {"tree", "ragged batch"}


def _numbers(message: str) -> dict[str, str]:
    inside = message[message.index("{") + 1 : message.index("}")]
    return {part.split(":")[0].strip(" '"): part.split(":")[1] for part in inside.split(",")}


def test_the_reference_is_the_same_weights_in_float64():
    assert REFERENCE.placement == Placement("torch", "cpu", "float64") and REFERENCE.name == TARGET.name


def test_the_reference_is_asked_once_for_all_placements(monkeypatch):
    reference, passes = TARGET.float64_reference(), []
    verify = reference.verify
    monkeypatch.setattr(reference, "verify", lambda *arguments: passes.append(1) or verify(*arguments))
    for dtype in ("float32", "float64"):
        check_conformance(TARGET.placed(Placement(dtype=dtype)), reference)
    assert len(passes) == len(SHAPES)


def test_shapes_cover_one_token_a_chain_a_tree_and_rows_of_different_shapes():
    assert len(SHAPES["single"][0]) == 1 and SHAPES["chain"][0].is_chain and not SHAPES["tree"][0].is_chain
    assert len({len(shape) for shape in SHAPES["ragged batch"]}) == 3


def test_another_seed_is_other_input():
    found = [check_conformance(TARGET, REFERENCE, seed=seed).errors for seed in (0, 0, 1)]
    assert found[0] == found[1] != found[2]
