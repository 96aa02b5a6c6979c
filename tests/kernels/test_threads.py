import os
import subprocess
import sys
import threading

import numpy as np
import pytest

from specdec_core.kernels.compiled import helper
from specdec_core.kernels.threads import COUNTER, Team, barrier, claim, team

WORKERS = [1, 2, 3, 5]


@helper
def take_turns(worker, workers, control, rounds, log):
    """In every round another worker appends; without the barriers the order would be lost."""
    for turn in range(rounds):
        if turn % workers == worker:
            log[turn] = log[turn - 1] + turn if turn else 0
        if not barrier(control, workers):
            return


@helper
def take_units(worker, workers, control, counters, units, taken):
    for phase in range(counters.size // COUNTER):
        unit = claim(counters, phase)
        while unit < units:
            taken[phase, unit] += 1
            unit = claim(counters, phase)
        if not barrier(control, workers):
            return


@pytest.mark.parametrize("workers", WORKERS)
def test_a_barrier_lets_nobody_pass_before_all_have_come(workers):
    log = np.zeros(3000, np.int64)
    team(workers).run(take_turns, len(log), log)
    np.testing.assert_array_equal(log, np.cumsum(np.arange(3000)))


@pytest.mark.parametrize("workers", WORKERS)
def test_every_unit_of_work_is_given_out_once(workers):
    taken, counters = np.zeros((40, 300), np.int64), np.zeros(40 * COUNTER, np.int64)
    team(workers).run(take_units, counters, 300, taken)
    assert (taken == 1).all()


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_worker_that_raises_ends_the_run_and_the_team_lives_on(failing):
    def step(worker, workers, control, log):
        if worker == failing:
            raise ZeroDivisionError(f"worker {worker}")
        take_turns(worker, workers, control, len(log), log)

    log = np.zeros(50, np.int64)
    with pytest.raises(ZeroDivisionError, match=f"worker {failing}"):
        team(3).run(step, log)
    team(3).run(take_turns, len(log), log)
    np.testing.assert_array_equal(log, np.cumsum(np.arange(50)))


def test_an_interrupted_caller_waits_for_the_others():
    def step(worker, workers, control, log):
        if worker == 0:
            raise KeyboardInterrupt
        take_turns(worker, workers, control, len(log), log)

    log = np.zeros(50, np.int64)
    with pytest.raises(KeyboardInterrupt):
        team(2).run(step, log)
    team(2).run(take_turns, len(log), log)
    assert log[-1] == np.arange(50).sum()


def test_callers_on_several_threads_wait_for_each_other():
    logs = [np.zeros(200, np.int64) for _ in range(4)]

    def call(log):
        for _ in range(20):
            team(2).run(take_turns, len(log), log)

    callers = [threading.Thread(target=call, args=(log,)) for log in logs]
    for each in callers:
        each.start()
    for each in callers:
        each.join(60)
    assert all((log == np.cumsum(np.arange(200))).all() for log in logs)


def test_a_team_is_made_once_and_needs_a_worker():
    assert team(2) is team(2)
    with pytest.raises(ValueError, match="0 workers: expected at least 1"):
        Team(0)


FORKED = """
import os
import numpy as np
from specdec_core.kernels.threads import team
def count(worker, workers, control, seen):
    seen[worker] += 1
seen = np.zeros(3, np.int64)
team(3).run(count, seen)
child = os.fork()
if child == 0:
    team(3).run(count, seen)
    os._exit(int(not (seen == 2).all()))
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork here")
def test_a_forked_child_makes_a_team_of_its_own():
    subprocess.run([sys.executable, "-c", FORKED], check=True, timeout=120)
