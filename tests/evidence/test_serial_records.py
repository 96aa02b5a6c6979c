import pytest

from specdec_core.evidence.schemas import RecordError
from specdec_core.evidence.serial_records import DISPATCH, DISPATCH_SHARE, OP_CURVE, SERIAL_CURVE, TWIN

CURVE = {
    "backend": "llama.cpp Q4_1", "engine": "llama.cpp", "format": "Q4_1", "quantized": True, "repack": True,
    "device": "cpu", "threads": 2, "session": 0, "arm": "verify", "n": 7, "context": 64, "seconds": [0.01, 0.02],
}  # fmt: skip
OPERATION = {
    "backend": "b", "operation": "head", "part": True, "count": 1, "n": 7, "context": 64, "seconds": [0.0, 0.1],
}  # fmt: skip
DISPATCHED = {
    "backend": "Metal", "variant": "Q4_1", "basis": "prediction", "n": 7, "part": "q", "count": 30, "rows": 576,
    "length": 576, "format": "Q4_1", "bytes": 100, "kernel": "mul_mv", "passes": 7, "serial": True,
}  # fmt: skip
SHARE = {
    "backend": "Metal", "variant": "Q4_1", "basis": "prediction", "n": 7, "serial_share": 0.8, "passes": 5.8,
    "predicted_index": 0.8,
}  # fmt: skip
TWINS = {
    "backend": "b", "exact": False, "drafter": "n-gram", "K": 6, "prompt_id": "math-01", "tokens": 12,
    "identical": False, "same_rounds": False, "certified": True, "divergences": 1, "index": 3, "gap": 0.1,
    "epsilon": 0.2,
}  # fmt: skip


@pytest.mark.parametrize(
    ("schema", "row"),
    [(SERIAL_CURVE, CURVE), (OP_CURVE, OPERATION), (DISPATCH, DISPATCHED), (DISPATCH_SHARE, SHARE), (TWIN, TWINS)],
    ids=lambda each: getattr(each, "name", ""),
)
def test_a_good_row_is_taken_as_it_is(schema, row):
    assert schema.validated(row) == row


@pytest.mark.parametrize(
    ("schema", "row", "change", "message"),
    [
        (SERIAL_CURVE, CURVE, {"seconds": []}, "expected at least one"),
        (SERIAL_CURVE, CURVE, {"seconds": [0.1, -0.1]}, "none < 0"),
        (SERIAL_CURVE, CURVE, {"arm": "loops"}, "expected 'verify'"),
        (SERIAL_CURVE, CURVE, {"n": 0}, "expected n ≥ 1"),
        (SERIAL_CURVE, CURVE, {"seconds": 0.1}, "field 'seconds'"),
        (OP_CURVE, OPERATION, {"seconds": [-1e-9]}, "none < 0"),
        (DISPATCH, DISPATCHED, {"passes": 8}, "expected 1…n"),
        (DISPATCH, DISPATCHED, {"passes": 0, "serial": False}, "expected 1…n"),
        (DISPATCH, DISPATCHED, {"serial": False}, "serial where they are n > 1"),
        (DISPATCH, DISPATCHED, {"n": 1, "passes": 1}, "serial where they are n > 1"),
        (DISPATCH_SHARE, SHARE, {"serial_share": 1.1}, "expected a share in 0…1"),
        (DISPATCH_SHARE, SHARE, {"n": 1}, "n ≥ 2"),
        (TWIN, TWINS, {"identical": True}, "an identical output has none"),
        (TWIN, TWINS, {"identical": True, "divergences": 0, "certified": False}, "counts as certified"),
        (TWIN, TWINS, {"divergences": 0}, "an identical output has none"),
    ],
)  # fmt: skip
def test_a_row_that_contradicts_itself(schema, row, change, message):
    with pytest.raises(RecordError, match=message):
        schema.validated(row | change)
