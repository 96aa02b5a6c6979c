"""A team of workers that runs one compiled function as a single parallel region, with barriers inside.

A decoder step has some 240 phases. Forking and joining threads at each costs more than many phases take, so every
worker runs the whole step: `function(worker, workers, control, …)`, without the GIL, and meets the others at
`barrier(control, workers)`. Work is taken with `claim`, so that a worker that the system has put aside for a moment
delays only what it holds. Nothing that is computed may depend on who computes it; then results do not depend on the
number of workers.

The barrier spins for a while and then lets other threads run, so more workers than cores make progress too. If any
worker raises, `control` says so and the others leave at their next barrier.
"""

from __future__ import annotations

import os
import platform
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from specdec_core.kernels.compiled import helper
from specdec_core.kernels.cpu import is_arm
from specdec_core.kernels.pinning import Pinning
from specdec_core.placement import physical_threads

# Words of `control`, each on a cache line of its own: how many have arrived, how often all have, whether to give up,
# and how often to look before letting other threads run.
ARRIVED, MEETINGS, ABORTED, PATIENCE = 0, 16, 32, 48
WORDS = 64
COUNTER = 16
"""Words from one `claim` counter to the next."""

SPINS = 4000
"""Looks (some 25 ns each) before a worker that has a core of its own lets others run."""


@intrinsic
def atomic_add(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    """Add to an int64 and return what it was before; all workers see one order of these."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.atomic_rmw("add", _word(context, builder, sig, args), args[2], "seq_cst")

    return types.int64(array, types.intp, types.int64), codegen


@intrinsic
def atomic_load(typingctx: Any, array: Any, index: Any) -> Any:
    """An int64, and everything its writer wrote before `atomic_store`."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        return builder.load_atomic(_word(context, builder, sig, args), "acquire", 8)

    return types.int64(array, types.intp), codegen


@intrinsic
def atomic_store(typingctx: Any, array: Any, index: Any, value: Any) -> Any:
    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        builder.store_atomic(args[2], _word(context, builder, sig, args), "release", 8)
        return context.get_dummy_value()

    return types.void(array, types.intp, types.int64), codegen


@intrinsic
def _pause(typingctx: Any) -> Any:
    """Tell the core that this is a spinning loop."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        if is_arm():
            _call_external(builder, "llvm.aarch64.hint", ir.VoidType(), [ir.Constant(ir.IntType(32), 1)])
        elif platform.machine().lower() in ("x86_64", "amd64"):
            _call_external(builder, "llvm.x86.sse2.pause", ir.VoidType(), [])
        return context.get_dummy_value()

    return types.void(), codegen


@intrinsic
def _let_others_run(typingctx: Any) -> Any:
    """Give the core to another thread."""

    def codegen(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
        name = "SwitchToThread" if sys.platform == "win32" else "sched_yield"
        _call_external(builder, name, ir.IntType(32), [])
        return context.get_dummy_value()

    return types.void(), codegen


def _word(context: Any, builder: ir.IRBuilder, sig: Any, args: Any) -> ir.Value:
    data = context.make_array(sig.args[0])(context, builder, args[0]).data
    return builder.gep(data, [args[1]])


def _call_external(builder: ir.IRBuilder, name: str, returns: ir.Type, args: list[ir.Value]) -> None:
    kind = ir.FunctionType(returns, [each.type for each in args])
    builder.call(builder.module.globals.get(name) or ir.Function(builder.module, kind, name), args)


@helper
def barrier(control, workers):
    """Wait for all workers. False if one has failed: return at once."""
    if workers == 1:
        return True
    meeting = atomic_load(control, MEETINGS)
    if atomic_add(control, ARRIVED, 1) == workers - 1:
        atomic_store(control, ARRIVED, 0)
        atomic_store(control, MEETINGS, meeting + 1)
        return True
    spins = control[PATIENCE]
    while atomic_load(control, MEETINGS) == meeting:
        if atomic_load(control, ABORTED) != 0:
            return False
        if spins > 0:
            spins -= 1
            _pause()
        else:
            _let_others_run()
    return True


@helper
def claim(counters, phase):
    """The next unit of work of a phase, 0, 1, 2, …: each is given out once. `counters` starts as zeros."""
    return atomic_add(counters, phase * COUNTER, 1)


class Team:
    """So many workers: the caller and `workers − 1` persistent threads. One run at a time; a second caller waits.

    A team of as many workers as there are cores keeps each on one of its own (see pinning.py).
    """

    def __init__(self, workers: int):
        if workers < 1:
            raise ValueError(f"a team of {workers} workers: expected at least 1")
        self.workers = workers
        self._control = np.zeros(WORDS, np.int64)
        self._running = threading.Lock()
        self._failures: list[BaseException] = []
        self._job: tuple[Callable[..., Any], tuple[Any, ...]] | None = None
        # A lock that one thread releases and another acquires is the cheapest signal there is in Python.
        self._start = [_closed_gate() for _ in range(workers - 1)]
        self._finished = [_closed_gate() for _ in range(workers - 1)]
        threads = [
            threading.Thread(
                target=self._work, args=(worker,), name=f"specdec worker {worker} of {workers}", daemon=True
            )
            for worker in range(1, workers)
        ]
        for thread in threads:
            thread.start()
        self._pinning = Pinning(threads)

    def run(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Call `function(worker, workers, control, *arguments)` in every worker; raise what the first to fail did."""
        with self._running:
            self._control[:] = 0
            # Without a core for each, whoever is waited for may itself be waiting for this one's core.
            self._control[PATIENCE] = SPINS if self.workers <= physical_threads() else 0
            self._failures.clear()
            self._job = (function, arguments)
            with self._pinning.own_cores():
                self._run_in_all(function, arguments)
            if self._failures:
                raise self._failures[0]

    def _run_in_all(self, function: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        started = 0
        try:
            for start in self._start:
                start.release()
                started += 1
            function(0, self.workers, self._control, *arguments)
        except BaseException:
            self._control[ABORTED] = 1
            raise
        finally:
            self._wait(started)
            self._job = None

    def _wait(self, started: int) -> None:
        """Wait for the workers, all of them even if interrupted: the arrays they write to belong to the caller."""
        interruption: BaseException | None = None
        finished = 0
        while finished < started:
            try:
                self._finished[finished].acquire()
                finished += 1
            except BaseException as error:
                self._control[ABORTED] = 1
                interruption = error
        if interruption is not None:
            raise interruption

    def _work(self, worker: int) -> None:
        while True:
            self._start[worker - 1].acquire()
            try:
                self._run_job(worker)
            except BaseException as error:
                self._failures.append(error)
                self._control[ABORTED] = 1
            finally:
                self._finished[worker - 1].release()

    def _run_job(self, worker: int) -> None:
        assert self._job is not None
        function, arguments = self._job
        function(worker, self.workers, self._control, *arguments)


def _closed_gate() -> threading.Lock:
    gate = threading.Lock()
    gate.acquire()
    return gate


_teams: dict[int, Team] = {}
_making = threading.Lock()


def team(workers: int) -> Team:
    """The team of so many workers of this process, shared by all engines."""
    with _making:
        if workers not in _teams:
            _teams[workers] = Team(workers)
        return _teams[workers]


if hasattr(os, "register_at_fork"):
    # Threads do not survive a fork: the child makes teams of its own.
    os.register_at_fork(after_in_child=_teams.clear)
