"""A team's workers kept on cores of their own while it works, where the system can do that.

After a rest the system may wake a worker on its caller's own core, and takes 15 ms and more to move one of them:
nothing to a whole answer, ten times what a short operation takes.

Only a team of as many workers as its caller may use cores is kept so: who asks for fewer shares the machine, perhaps
with processes that would choose the same cores. The caller is given back all its cores when the work is done, because
threads that it starts, of other engines for instance, inherit them.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager, suppress


class Pinning:
    """Where the workers of a team are kept: `threads`, and whoever calls them."""

    def __init__(self, threads: Sequence[threading.Thread]):
        self._threads = threads
        self._held: list[int] = []

    @contextmanager
    def own_cores(self) -> Iterator[None]:
        """Keep each worker, and this thread, on a core of its own, if there are as many cores as workers."""
        allowed = _allowed()
        own = allowed if len(allowed) == len(self._threads) + 1 > 1 else []
        try:
            if own != self._held:
                places = [[core] for core in own[1:]] or [allowed] * len(self._threads)
                for thread, cores in zip(self._threads, places, strict=True):
                    _keep(thread.native_id, cores)
                self._held = own
            if own:
                _keep(0, own[:1])
            yield
        finally:
            if own:
                _keep(0, allowed)


def _allowed() -> list[int]:
    """Cores that this thread may use; none where the system does not say."""
    return sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_setaffinity") else []


def _keep(thread: int | None, cores: Collection[int]) -> None:
    """Let a thread (0: this one) use these cores only. One that the system refuses stays as it is: only slower."""
    if thread is not None:
        with suppress(OSError):
            os.sched_setaffinity(thread, cores)
