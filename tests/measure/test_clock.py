import gc
import subprocess
import sys
from time import sleep

import numpy as np
import pytest

from specdec_core.measure import clock
from specdec_core.measure.clock import interleaved, once, peak_memory


def arms_that_log(names, log):
    return {name: lambda name=name: log.append(name) for name in names}


def test_every_repeat_runs_every_arm_once():
    log = []
    interleaved(arms_that_log("abc", log), 5, warmup=2)
    assert log[:6] == list("abcabc")
    assert [sorted(log[6 + 3 * repeat :][:3]) for repeat in range(5)] == [list("abc")] * 5


def test_the_order_is_fresh_in_every_repeat_and_the_seeds():
    orders = []
    for seed in (0, 0, 1):
        log = []
        interleaved(arms_that_log("abcd", log), 8, warmup=0, seed=seed)
        orders.append(["".join(log[start : start + 4]) for start in range(0, 32, 4)])
    assert orders[0] == orders[1] != orders[2] and len(set(orders[0])) > 3


def test_seconds_belong_to_their_arm():
    seconds = interleaved({"slow": lambda: sleep(0.02), "fast": lambda: None}, 3)
    assert [each.shape for each in seconds.values()] == [(3,), (3,)]
    assert (seconds["slow"] >= 0.02).all() and (seconds["fast"] >= 0).all()
    assert np.median(seconds["fast"]) < np.median(seconds["slow"])


@pytest.mark.parametrize(("repeats", "arms"), [(0, {"a": int}), (1, {})])
def test_nothing_to_time_is_an_error(repeats, arms):
    with pytest.raises(ValueError, match=f"{repeats} repeats of {len(arms)} arms: expected at least one of each"):
        interleaved(arms, repeats)


def test_the_machine_settles_before_the_clock_runs(monkeypatch):
    log = []
    monkeypatch.setattr(clock, "sleep", lambda seconds: log.append(seconds))
    monkeypatch.setattr(clock, "perf_counter", lambda: log.append("clock") or 0.0)
    once(lambda: log.append("arm"))
    assert log == [clock.SETTLE, "clock", "arm", "clock"]


def test_the_garbage_collector_rests_and_comes_back():
    during = []
    once(lambda: during.append(gc.isenabled()))
    assert during == [False] and gc.isenabled()


def test_the_garbage_collector_comes_back_after_an_error():
    with pytest.raises(ZeroDivisionError):
        once(lambda: 1 / 0)
    assert gc.isenabled()


def test_a_collector_that_was_off_stays_off():
    gc.disable()
    try:
        once(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_peak_memory_is_this_process_own_and_keeps_what_is_freed_again():
    parent = b"1" * 2**29  # a started process must not report its parent's
    code = """if True:
        from specdec_core.measure.clock import peak_memory
        before, block = peak_memory(), b"1" * 2**27
        del block
        print(before, peak_memory())"""
    before, after = map(int, subprocess.check_output([sys.executable, "-c", code], text=True).split())
    assert 2**26 < after - before < 2**28 and after < len(parent) < peak_memory()
