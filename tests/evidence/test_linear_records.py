"""A record of notebook 06 that contradicts itself is refused before it is written."""

from __future__ import annotations

import pytest

from specdec_core.evidence.linear_records import LINEAR_ERROR, LINEAR_SPEED, LINEAR_TRAFFIC, LINEAR_WINDOW
from specdec_core.evidence.schemas import RecordError
from tests.evidence.linear_rows import ERRORS, WINDOW, error_row, not_timed, speed_row, speeds, traffic, traffic_row

ERROR, TRAFFIC, SPEED = error_row(), traffic_row("snapshots"), speed_row("snapshots")


@pytest.mark.parametrize(
    ("schema", "rows"),
    [(LINEAR_ERROR, ERRORS), (LINEAR_WINDOW, [WINDOW]), (LINEAR_TRAFFIC, traffic()), (LINEAR_SPEED, speeds())],
    ids=lambda each: getattr(each, "name", ""),
)
def test_good_rows_are_taken_as_they_are(schema, rows):
    assert [schema.validated(row) for row in rows] == rows


def test_what_was_left_out_has_a_reason_and_no_time():
    assert LINEAR_SPEED.validated(not_timed(SPEED))["seconds"] == []


@pytest.mark.parametrize(
    ("schema", "row", "change", "message"),
    [
        (LINEAR_ERROR, ERROR, {"trees": 0}, "expected at least one of each"),
        (LINEAR_ERROR, ERROR, {"commits": 0}, "expected at least one of each"),
        (LINEAR_ERROR, ERROR, {"worst_output": -1e-9}, "no error < 0"),
        (LINEAR_ERROR, ERROR, {"worst_state": -1e-9}, "no error < 0"),
        (LINEAR_ERROR, ERROR, {"resets": 301}, "no more than there are"),
        (LINEAR_ERROR, ERROR, {"negative": 301}, "no more than there are"),
        (LINEAR_ERROR, ERROR, {"changed": 41}, "no more than there are"),
        (LINEAR_ERROR, ERROR, {"worst_state": float("nan")}, "not finite"),
        (LINEAR_WINDOW, WINDOW, {"beta": [0.5] * 5}, "a gate and a rate a node"),
        (LINEAR_WINDOW, WINDOW, {"log_decay": [0.0] * 7}, "a gate and a rate a node"),
        (LINEAR_WINDOW, WINDOW, {"weights": [1.0]}, "a weight a node of the path"),
        (LINEAR_WINDOW, WINDOW, {"path": [0, 2, 4]}, "expected nodes from the root"),
        (LINEAR_WINDOW, WINDOW, {"path": [1, 4], "weights": [0.9, 1.0]}, "expected nodes from the root"),
        (LINEAR_WINDOW, WINDOW, {"path": [], "weights": []}, "expected nodes from the root"),
        (LINEAR_TRAFFIC, TRAFFIC, {"shape": "star"}, "one of chain, tree"),
        (LINEAR_TRAFFIC, TRAFFIC, {"n": 0}, "expected at least one of each"),
        (LINEAR_TRAFFIC, TRAFFIC, {"accepted": 17}, "expected 0 to all of them"),
        (LINEAR_TRAFFIC, TRAFFIC, {"state_bytes": 1}, "4 × batch × heads"),
        (LINEAR_TRAFFIC, TRAFFIC, {"written_bytes": -1}, "none below 0"),
        (LINEAR_TRAFFIC, TRAFFIC, {"working_bytes": -1}, "none below 0"),
        (LINEAR_TRAFFIC, TRAFFIC, {"launches": 0}, "at least one launch"),
        (LINEAR_SPEED, SPEED, {"batch": 64}, "4 × batch × heads"),
        (LINEAR_SPEED, SPEED, {"seconds": []}, "either times above 0 or a reason"),
        (LINEAR_SPEED, SPEED, {"left_out": "too large"}, "either times above 0 or a reason"),
        (LINEAR_SPEED, SPEED, {"seconds": [0.1, 0.0]}, "either times above 0 or a reason"),
        (LINEAR_SPEED, SPEED, {"operations": 0.0}, "ceilings and work above 0"),
        (LINEAR_SPEED, SPEED, {"flops_per_second": 0.0}, "ceilings and work above 0"),
        (LINEAR_SPEED, SPEED, {"bytes_per_second": -1.0}, "ceilings and work above 0"),
    ],
)
def test_a_row_that_contradicts_itself(schema, row, change, message):
    with pytest.raises(RecordError, match=message):
        schema.validated(row | change)
