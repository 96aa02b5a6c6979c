"""A record is refused by the name of what is wrong with it."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdec_core.evidence.schemas import RecordError, Schema

SCHEMA = Schema(
    "trial", 3, {"name": str, "n": int, "seconds": float, "ok": bool, "counts": list[int], "extra": float | None}
)
GOOD = {"name": "a", "n": 1, "seconds": 0.5, "ok": True, "counts": [1, 2], "extra": None}


def test_a_good_record_comes_back_as_plain_values():
    record = GOOD | {
        "n": np.int64(1), "seconds": np.float32(0.5), "ok": np.bool_(True), "counts": np.array([1, 2]),
    }  # fmt: skip
    plain = SCHEMA.validated(record)
    assert plain == GOOD
    assert [type(value) for value in plain.values()] == [str, int, float, bool, list, type(None)]
    assert SCHEMA.validated(GOOD | {"seconds": 1})["seconds"] == 1  # an int passes for a float


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("name", 1), ("n", 1.0), ("n", True), ("n", "1"), ("seconds", "1"), ("seconds", None), ("ok", 1),
        ("counts", [1, 2.5]), ("counts", 3), ("extra", "none"),
    ],
)  # fmt: skip
def test_a_wrong_type_is_named(field, value):
    with pytest.raises(RecordError, match=f"field '{field}' of a 'trial' record is .*expected"):
        SCHEMA.validated(GOOD | {field: value})


@given(st.sampled_from(["seconds", "extra"]), st.sampled_from([math.nan, math.inf, -math.inf]))
def test_what_is_not_finite_is_named(field, value):
    with pytest.raises(RecordError, match=f"field '{field}' .* not finite"):
        SCHEMA.validated(GOOD | {field: value})


def test_what_is_not_finite_is_found_inside():
    nested = Schema("nested", 1, {"values": list[list[float]], "more": dict})
    good = {"values": [[1.0]], "more": {"a": [1.0]}}
    assert nested.validated(good) == good
    with pytest.raises(RecordError, match="'values'"):
        nested.validated(good | {"values": [[1.0, math.nan]]})
    with pytest.raises(RecordError, match="'more'"):
        nested.validated(good | {"more": {"a": [np.inf]}})


def test_missing_and_unknown_fields_are_listed():
    with pytest.raises(RecordError, match=r"lacks \['ok'\] and has unknown fields \['okay'\]"):
        SCHEMA.validated({("okay" if name == "ok" else name): value for name, value in GOOD.items()})
    with pytest.raises(RecordError, match="got list"):
        SCHEMA.validated([1])


def test_a_dataclass_is_a_schema_and_its_instances_records():
    @dataclass(frozen=True)
    class Trial:
        n: int
        seconds: float

    schema = Schema("trial", 1, {"n": int, "seconds": float})
    assert Schema.of(Trial).fields == schema.fields
    assert schema.validated(Trial(1, 2.0)) == {"n": 1, "seconds": 2.0}
    assert Schema.of(Trial).describe() == {"n": "int", "seconds": "float"}
    assert SCHEMA.describe()["counts"] == "list[int]"


def test_what_must_hold_between_fields_is_checked():
    def positive(record):
        if record["n"] <= 0:
            raise RecordError("n must be positive")

    schema = Schema("counted", 1, {"n": int}, positive)
    assert schema.validated({"n": 1}) == {"n": 1}
    with pytest.raises(RecordError, match="positive"):
        schema.validated({"n": 0})
