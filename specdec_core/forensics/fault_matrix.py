"""Every fault against every detector: which of them fires, after how many rounds and tokens; on correct code, none.

A detector that a fault makes crash has not fired. Detectors are exact: what they find on correct code would be a false
alarm, so correct subjects are decoded from several seeds; and controls, which are unusual but right, must stay silent.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

from specdec_core.forensics.detectors import Crashed, Evidence, Suspect
from specdec_core.forensics.faults import Fault
from specdec_core.forensics.invariants import INVARIANTS
from specdec_core.forensics.metamorphic import CANARIES, CHUNK, METAMORPHIC, SEEDED, table_batch
from specdec_core.forensics.oracles import LAWS, ORACLES
from specdec_core.forensics.suspects import TABLE, Requests, Subject, new_batch, new_target

DETECTORS = (*INVARIANTS, *ORACLES, *METAMORPHIC, *CANARIES, *LAWS, *SEEDED)
"""Invariants first: the run that they watch is the one that others compare with."""

CLEAN = "none"


def examine(fault: Fault | None, subject: Subject, tokens: int = 24, first_seed: int = 0) -> Iterator[dict[str, Any]]:
    """Records of FAULT_CELL: every detector that can look at the subject, with the fault in place (None: correct code).

    tokens, first_seed  of the batch (suspects.new_batch); a table has batches of its own.
    """
    suspect = Suspect(subject, _requests(subject, tokens, first_seed), fault.inject if fault else nullcontext)
    for detector in DETECTORS:
        if not detector.sees(subject):
            continue
        found: Evidence | None = None
        crashed = False
        try:
            found = detector.look(suspect)
        except Crashed:
            crashed = True
        yield {
            "fault": fault.name if fault else CLEAN,
            "seam": fault.seam if fault else "",
            "subject": subject.name,
            "expected": fault.expected if fault else "",
            "sound": fault is None or fault.control(subject),
            "detector": detector.name,
            "family": detector.family,
            "fired": found is not None,
            "crashed": crashed,
            "round": found.round if found else -1,
            "tokens": found.tokens if found else -1,
            "where": found.where if found else "",
        }


def _requests(subject: Subject, tokens: int, first_seed: int) -> Requests:
    """Of the run. Targets are made here, as they try themselves out when they are: before anything is broken."""
    if subject.state == TABLE:
        return table_batch()
    new_target(subject, CHUNK)
    return new_batch(subject, tokens, first_seed)
