from __future__ import annotations

import pytest

from specdec_core import decode
from specdec_core.forensics import batch_laws
from specdec_core.forensics.batch_laws import cases, measure_batch_laws
from specdec_core.forensics.exact_grid import measure

pytestmark = pytest.mark.usefixtures("one_thread")


def test_every_batch_has_its_rows_product_law():
    rows = list(measure_batch_laws(thorough=False))
    assert max(row["total_variation"] for row in rows) < 1e-12
    assert {row["level"] for row in rows} == {"table", "transformer, numba float32"}
    assert {row["axis"] for row in rows} == {"ragged", "one slot", "queue", "penalties", "alike", "three"}
    assert sum(row["branches"] for row in rows) > 5_000


def test_rows_that_answer_for_one_another_are_seen(monkeypatch):
    right = decode._accept

    def crossed(rows, drafts, verification):
        outcomes = right(rows, drafts, verification)
        tokens = [outcome.token for outcome in outcomes]
        return [type(o)(o.path, token, o.ending) for o, token in zip(outcomes, tokens[::-1], strict=True)]

    monkeypatch.setattr(decode, "_accept", crossed)
    wrong = [measure(case)["total_variation"] for case in cases(thorough=False) if case.slots != 1]
    assert min(wrong) > 1e-3


def test_thorough_adds_the_branching_ones_and_the_batch_minimum():
    few, all_of_them = ({case.name for case in cases(thorough)} for thorough in (False, True))
    assert few < all_of_them
    assert {request.policy.largest if request.policy else 0 for request in batch_laws.QUEUED} == {0, 1, 2}
