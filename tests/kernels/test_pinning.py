import os
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest

from specdec_core.kernels import pinning
from specdec_core.kernels.pinning import Pinning
from specdec_core.kernels.threads import Team

CALLER = 0


class System:
    """Cores that threads may use, by id; the caller is 0. `refusing`: a thread that is gone."""

    def __init__(self, cores: set[int]):
        self.cores = {CALLER: cores}
        self.calls: list[int] = []
        self.refusing: int | None = None

    def sched_getaffinity(self, thread):
        return self.cores[thread]

    def sched_setaffinity(self, thread, cores):
        if thread == self.refusing:
            raise ProcessLookupError(thread)
        self.calls.append(thread)
        self.cores[thread] = set(cores)


def threads(count: int) -> list[SimpleNamespace]:
    return [SimpleNamespace(native_id=100 + number) for number in range(1, count + 1)]


@pytest.fixture
def system(monkeypatch) -> System:
    found = System({9, 4, 7})
    monkeypatch.setattr(pinning, "os", found)
    return found


def test_every_worker_has_a_core_of_its_own_and_the_caller_is_given_back_all(system):
    pinned = Pinning(threads(2))
    for _ in range(2):
        with pinned.own_cores():
            assert system.cores == {CALLER: {4}, 101: {7}, 102: {9}}
        assert system.cores == {CALLER: {4, 7, 9}, 101: {7}, 102: {9}}
    assert system.calls == [101, 102, *[CALLER] * 4]  # workers, once placed, stay


@pytest.mark.parametrize(("workers", "cores"), [(1, {9, 4, 7}), (3, {9, 4, 7}), (0, {4}), (0, {4, 7})])
def test_a_team_of_fewer_or_more_than_there_are_cores_goes_where_the_system_likes(system, workers, cores):
    system.cores[CALLER] = cores
    with Pinning(threads(workers)).own_cores():
        assert system.calls == []


def test_workers_are_freed_where_the_caller_is_left_other_cores(system):
    pinned = Pinning(threads(2))
    with pinned.own_cores():
        pass
    system.cores[CALLER] = {4, 7}
    with pinned.own_cores():
        assert system.cores == {thread: {4, 7} for thread in (CALLER, 101, 102)}
    system.cores[CALLER] = {1, 2, 3}
    with pinned.own_cores():
        assert system.cores == {CALLER: {1}, 101: {2}, 102: {3}}


def test_the_caller_is_given_back_all_cores_when_the_work_fails(system):
    with pytest.raises(KeyboardInterrupt), Pinning(threads(2)).own_cores():
        raise KeyboardInterrupt
    assert system.cores[CALLER] == {4, 7, 9}


def test_a_thread_that_the_system_refuses_or_does_not_know_is_left_alone(system):
    system.refusing, unknown = 101, threads(2)
    with Pinning(unknown).own_cores():
        assert system.cores == {CALLER: {4}, 102: {9}}
    unknown[1].native_id = None
    with Pinning(unknown).own_cores():
        assert system.calls == [102, CALLER, CALLER, CALLER]


def test_a_system_that_cannot_do_it_is_asked_for_nothing(monkeypatch):
    monkeypatch.setattr(pinning, "os", SimpleNamespace())
    with Pinning(threads(1)).own_cores():
        pass


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="no cores to choose here")
@pytest.mark.parametrize("failing", [False, True])
def test_a_team_of_all_cores_works_on_one_each(failing):
    def note(worker, workers, control, seen):
        seen[worker] = os.sched_getaffinity(0)
        if failing:
            raise ZeroDivisionError

    allowed = os.sched_getaffinity(0)
    seen = np.empty(len(allowed), object)
    with pytest.raises(ZeroDivisionError) if failing else nullcontext():
        Team(len(allowed)).run(note, seen)
    assert seen.tolist() == [{core} for core in sorted(allowed)] and os.sched_getaffinity(0) == allowed
    more = np.empty(len(allowed) + 1, object)
    Team(len(more)).run(lambda worker, workers, control: more.__setitem__(worker, os.sched_getaffinity(0)))
    assert more.tolist() == [allowed] * len(more)
