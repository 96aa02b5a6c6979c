import pytest
import torch

from specdec_core.measure import ceilings
from specdec_core.measure.clock import once

CPU = torch.device("cpu")


@pytest.mark.parametrize("first_is_faster", [False, True])
def test_the_read_arm_is_the_faster_of_two_ways_and_either_reads_every_byte(monkeypatch, first_is_faster):
    monkeypatch.setattr(ceilings, "READ_BYTES", 1 << 16)
    seconds, ran = iter([1.0, 2.0] if first_is_faster else [2.0, 1.0]), []
    monkeypatch.setattr(ceilings, "TRIALS", 1)
    monkeypatch.setattr(ceilings, "once", lambda way: ran.append(way) or next(seconds))
    chosen = ceilings.read_arm(CPU)
    assert chosen is ran[0 if first_is_faster else 1] and chosen() == (1 << 16) / 4  # ones of four bytes, summed


def test_the_gemm_arm_multiplies_whole_matrices(monkeypatch):
    monkeypatch.setattr(ceilings, "GEMM_SIZE", 48)
    assert ceilings.gemm_arm(CPU)() == 48


def test_units_are_bytes_and_operations_a_second():
    assert ceilings.read_bandwidth(0.5) == 2 * ceilings.READ_BYTES
    assert ceilings.peak_arithmetic(0.25) == 8 * ceilings.GEMM_SIZE**3


def test_what_is_read_outgrows_the_caches():
    assert ceilings.READ_BYTES >= 1 << 28


@pytest.mark.parametrize(
    ("arm", "rate", "least"),
    [(ceilings.read_arm, ceilings.read_bandwidth, 1e8), (ceilings.gemm_arm, ceilings.peak_arithmetic, 1e8)],
    ids=["read", "gemm"],
)
def test_this_machine_is_neither_dead_nor_impossible(arm, rate, least):
    run = arm(CPU)
    run()
    assert least < rate(min(once(run) for _ in range(3))) < 1e15
