"""S6 on invented records whose truth is known, and from files of two notebooks."""

from __future__ import annotations

import numpy as np
import pytest

from specdec_core.evidence.claims import claim
from specdec_core.evidence.cure_claims import CURE, SERIAL, best_drafting, time_ratio
from specdec_core.evidence.evaluate import evaluate, judge
from specdec_core.evidence.peer_records import PEER, PEER_TUNING
from specdec_core.evidence.provenance import fingerprint
from specdec_core.evidence.records import RecordWriter
from specdec_core.evidence.serial_records import SERIAL_CURVE
from specdec_core.evidence.verdicts import Outcome

OURS, OTHER = f"{CURE} · EAGLE chain", f"{CURE} · n-gram"
REPEATS, PROMPTS = 20, 12


def curve(backend, n, seconds, context=64, noise=0.002):
    """The machine drifts: both backends' samples with it."""
    drift = 1 + np.linspace(0, 2, REPEATS) + noise * np.random.default_rng(n + len(backend)).normal(size=REPEATS)
    return {
        "backend": backend, "engine": "e", "format": "f", "quantized": True, "repack": None, "device": "cpu",
        "threads": 2, "session": 0, "arm": "verify", "n": n, "context": context, "seconds": list(seconds * drift),
    }  # fmt: skip


def curves(step=0.8, verify=0.4, **how):
    ours = [curve(CURE, 1, step, **how), curve(CURE, 6, 4 * verify, **how)]
    return [*ours, curve(SERIAL, 1, 1.0, **how), curve(SERIAL, 6, 4.0, **how), curve(CURE, 6, 9.0, context=512)]


def run(peer, number, speed, arm, noise=0.03, **changes):
    """40 tokens at about so many a second."""
    backend, method = peer.split(" · ")
    stretch = np.exp(noise * np.random.default_rng([number, len(peer), arm == "sd"]).normal())
    return {
        "peer": peer, "backend": backend, "engine": backend.split()[0], "format": "f", "file": None, "threads": 2,
        "method": method, "draft": 3 * (arm == "sd"), "ngram": None, "schedule": None, "temperature": 0.0,
        "prompt_id": f"p{number:02d}", "domain": "math", "split": "report", "repetitive": False, "arm": arm,
        "identical": True, "difference": -1, "near_tie": None, "gap": None, "epsilon": None, "tokens": 41,
        "counted": 40, "seconds": float(40 / speed * stretch), "passes": 20,
    } | changes  # fmt: skip


def peers(own=1.5, lead=1.3, prompts=PROMPTS, noise=0.03):
    """Speculation at 100 tokens a second, our AR and two other packages' in proportion."""
    speeds = {f"{CURE} · AR": 100 / own, "llama.cpp Q4_1 · AR": 100 / lead, "llama.cpp Q8_0 · AR": 50 / lead}
    rows = [run(name, number, v, "ar", noise) for name, v in speeds.items() for number in range(prompts)]
    rows += [run(OURS, number, 100, "sd", noise) for number in range(prompts)]
    rows += [run(OTHER, number, 900, "sd") for number in range(prompts)]  # not the fastest on tuning prompts
    loops = [run(OURS, 90, 10, "sd"), run(f"{CURE} · AR", 90, 900, "ar")]
    warm = [run(OURS, 91, 10, "sd"), run(f"{CURE} · AR", 91, 900, "ar")]
    return [
        *rows,
        *(row | {"repetitive": True} for row in loops),
        *(row | {"temperature": 1.0, "identical": None} for row in warm),
        *(row | {"split": "tuning", "prompt_id": "t"} for row in loops),
    ]


def tuned(peer, speed, **changes):
    return {
        "peer": peer, "draft": 3, "ngram": None, "schedule": None, "temperature": 0.0, "prompts": 3, "counted": 40,
        "seconds": 40 / speed, "chosen": True,
    } | changes  # fmt: skip


TUNING = [
    tuned(OTHER, 90),
    tuned(OTHER, 300, chosen=False),
    tuned(OTHER, 300, temperature=1.0),
    tuned("numba float32 · n-gram", 300),
    tuned(OURS, 100),
]


def test_rows_are_records():
    for schema, rows in ((SERIAL_CURVE, curves()), (PEER, peers()), (PEER_TUNING, TUNING)):
        assert all(schema.validated(row) for row in rows)


@pytest.mark.parametrize(
    ("of_curves", "of_peers", "outcome"),
    [
        ({}, {}, Outcome.SUPPORTED),
        ({"verify": 0.5, "noise": 0.0}, {}, Outcome.SUPPORTED),  # half of it will do
        ({"step": 1.0, "noise": 0.0}, {}, Outcome.REFUTED),  # as slow will not
        ({"step": 1.1}, {}, Outcome.REFUTED),
        ({"verify": 0.6}, {}, Outcome.REFUTED),
        ({}, {"own": 0.8}, Outcome.REFUTED),
        ({}, {"lead": 0.8}, Outcome.REFUTED),
        ({"step": 1.0}, {}, Outcome.INCONCLUSIVE),
        ({"verify": 0.5}, {}, Outcome.INCONCLUSIVE),
        ({}, {"own": 1.01, "noise": 0.1}, Outcome.INCONCLUSIVE),
        ({}, {"lead": 1.01, "noise": 0.1}, Outcome.INCONCLUSIVE),
        ({}, {"prompts": 9}, Outcome.INCONCLUSIVE),
        ({"verify": 0.6}, {"prompts": 9}, Outcome.INCONCLUSIVE),
    ],
)
def test_all_four_parts_decide(of_curves, of_peers, outcome):
    assert judge("S6", curves(**of_curves), TUNING, peers(**of_peers)).verdict is outcome


def test_the_value_is_the_lead_over_the_fastest_peer():
    found = judge("S6", curves(), TUNING, peers())
    assert found.value == pytest.approx(1.3, rel=0.03) and found.interval.n == PROMPTS
    assert found.note.startswith("t(1) 0.8 [") and f"{OURS}: 1.5" in found.note and "llama.cpp Q4_1 · AR" in found.note
    assert found.interval.level == pytest.approx(0.95 ** (1 / 4))


@pytest.mark.parametrize(("without", "arm"), [(CURE, 1), (SERIAL, 6)])
def test_what_was_not_measured_cannot_be_tested(without, arm):
    rows = [row for row in curves() if (row["backend"], row["n"]) != (without, arm)]
    found = judge("S6", rows, TUNING, peers())
    assert found.verdict is Outcome.NOT_TESTABLE and found.note == f"{CURE} and {SERIAL} were not both measured here"
    found = judge("S6", curves(), TUNING[2:4], peers())
    assert found.verdict is Outcome.NOT_TESTABLE and found.note == f"no speculation on {CURE} was tuned here"


def test_ratios_pair_by_repeat_at_the_shortest_context():
    found = time_ratio(curves(), 6)
    assert found.estimate == pytest.approx(0.4, abs=0.002) and found.high - found.low < 0.01 and found.n == REPEATS
    assert found.method.endswith("paired by repeat") and time_ratio(curves(), 7) is None


def test_the_best_drafter_is_the_fastest_chosen_greedily_on_our_int8_engine():
    assert best_drafting(TUNING) == OURS and best_drafting(TUNING[1:4]) is None


def test_records_of_two_notebooks_are_read(layout):
    def write(name, schema, rows):
        made_on = fingerprint(layout=layout)
        with RecordWriter(layout.records("quick"), name, schema, made_on, code=["specdec_core"], layout=layout) as file:
            for row in rows:
                file.append(row)

    (layout.notebooks / "03_serialized_verification.ipynb").touch()
    write("03_curves", SERIAL_CURVE, curves())
    write("03_peers", PEER, peers(lead=0.5))  # another notebook's: passed over
    assert "no records: run python -m specdec_core reproduce --only 02" in evaluate(claim("S6"), layout).note
    write("02_peer_tuning", PEER_TUNING, TUNING)
    write("02_peers", PEER, peers())
    found = evaluate(claim("S6"), layout)
    assert found.verdict is Outcome.SUPPORTED and found.value == judge("S6", curves(), TUNING, peers()).value
    source = layout.package / "measured.py"
    source.write_text("ANSWER = 2\n")
    write("03_curves", SERIAL_CURVE, curves())
    stale = evaluate(claim("S6"), layout)
    assert stale.verdict is Outcome.STALE and stale.note.endswith("other code than this: run notebook 02 again")
