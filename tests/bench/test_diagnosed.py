"""What notebook 04 shows of `diagnose`: right decoders are clean, and each wrong one is named for what it is."""

from __future__ import annotations

import pytest

from specdec_core.bench.diagnosed import SHOWN, diagnose_decoders
from specdec_core.forensics.faults import FAULTS

pytestmark = pytest.mark.usefixtures("one_thread")


def test_decoders_are_told_apart():
    found = {row["decoder"]: row for row in diagnose_decoders(thorough=False, tokens=12)}
    assert {name for name, row in found.items() if row["diagnosis"] == "clean"} == {
        "transformers, padded left, mask given",
        "ours, masked scatter",
    }
    assert found["ours, masked scatter"]["right in"] == "all"
    assert found["transformers, padded right"]["diagnosis"] == "padding at prefill"
    assert "alone" in found["transformers, padded right"]["right in"]
    assert found["transformers, padded left, mask from ids"]["diagnosis"] == "mask made from ids"
    by_fault = {name.removeprefix("ours, with a fault: "): row["diagnosis"] for name, row in found.items()}
    assert set(SHOWN) <= set(by_fault)
    assert by_fault["one row's end ends the batch"] == "too short"
    assert by_fault["end token inside a block ignored"] == "too long"
    assert by_fault["rejected entries left visible"] == "drift after rejections"
    assert by_fault["neighbour's entry overwritten"].startswith("neighbours' content")
    assert by_fault["logits read by the widest row"].startswith("neighbours' content")


def test_what_is_shown_is_in_the_zoo():
    assert set(SHOWN) <= {fault.name for fault in FAULTS}
