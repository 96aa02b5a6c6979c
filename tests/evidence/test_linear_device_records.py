import pytest

from specdec_core.evidence.linear_device_records import (
    GDN_DEVICE_CHECK,
    GDN_DEVICE_SKIPPED,
    GDN_DEVICE_STEP,
    GDN_DEVICE_TIME,
)
from specdec_core.evidence.schemas import RecordError

CHECK = {
    "form": "triton ieee", "dtype": "float32", "rows": 3, "most_nodes": 16, "heads": 2, "keys": 128, "values": 128,
    "seed": 1, "commits": 9, "output_error": 2e-7, "state_error": 1e-7, "output_tolerance": 1e-5,
    "state_tolerance": 1e-5, "passed": True,
}  # fmt: skip
TIME = {
    "way": "triton ieee", "phase": "round", "clock": "graph", "shape": "tree", "batch": 4, "heads": 8, "keys": 256,
    "values": 256, "n": 16, "path": 4, "copies": 2, "seconds": [1e-4, 2e-4],
}  # fmt: skip
STEP = {
    "model": "a decoder, random weights", "kernel": "closed form", "dtype": "bfloat16", "layers": 24, "clock": "stream",
    "shape": "chain", "batch": 1, "n": 1, "path": 1, "seconds": [0.01],
}  # fmt: skip
ROWS = [(GDN_DEVICE_CHECK, CHECK), (GDN_DEVICE_TIME, TIME), (GDN_DEVICE_STEP, STEP)]


@pytest.mark.parametrize(
    ("schema", "row"), [*ROWS, (GDN_DEVICE_SKIPPED, {"what": "a cell", "reason": "no time"})], ids=lambda each: ""
)
def test_a_good_row_is_taken_as_it_is(schema, row):
    assert schema.validated(row) == row


def test_an_error_that_is_not_finite_is_none_and_fails():
    row = {**CHECK, "output_error": None, "passed": False}
    assert GDN_DEVICE_CHECK.validated(row) == row


@pytest.mark.parametrize(
    ("schema", "row", "change", "message"),
    [
        (GDN_DEVICE_CHECK, CHECK, {"passed": False}, "passed False with errors"),
        (GDN_DEVICE_CHECK, CHECK, {"output_error": 2e-5}, "passed True with errors"),
        (GDN_DEVICE_CHECK, CHECK, {"state_error": 2e-5}, "expected to have passed if, and only if, both are within"),
        (GDN_DEVICE_CHECK, CHECK, {"state_error": None}, "passed True"),
        (GDN_DEVICE_CHECK, CHECK, {"output_error": -1.0}, "passed True"),
        (GDN_DEVICE_CHECK, CHECK, {"commits": 0}, "commits 0: expected at least 1 of each"),
        (GDN_DEVICE_TIME, TIME, {"seconds": []}, "expected at least one sample"),
        (GDN_DEVICE_TIME, TIME, {"seconds": [0.0]}, "all above 0"),
        (GDN_DEVICE_TIME, TIME, {"clock": "sundial"}, "clock 'sundial', shape 'tree': expected one of stream, graph"),
        (GDN_DEVICE_TIME, TIME, {"shape": "ring"}, "shape 'ring': expected .* and of chain, tree"),
        (GDN_DEVICE_TIME, TIME, {"phase": "draft"}, "phase 'draft': expected one of verify, commit, round"),
        (GDN_DEVICE_TIME, TIME, {"path": 17}, "path of 17 of 16 nodes"),
        (GDN_DEVICE_TIME, TIME, {"path": 0}, "a path of 1…n"),
        (GDN_DEVICE_TIME, TIME, {"copies": 0}, "copies 0: expected at least 1"),
        (GDN_DEVICE_STEP, STEP, {"batch": 0}, "batch 0"),
        (GDN_DEVICE_STEP, STEP, {"path": 2}, "path of 2 of 1 nodes"),
        (GDN_DEVICE_STEP, STEP, {"seconds": [-1.0]}, "all above 0"),
    ],
    ids=lambda each: str(each) if isinstance(each, dict) and len(each) == 1 else "",
)
def test_a_row_that_contradicts_itself_is_refused(schema, row, change, message):
    with pytest.raises(RecordError, match=message):
        schema.validated({**row, **change})
