"""Threads as the warps of a GPU, and barriers as in its memory: counts, bytes and phases as it has."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

PATIENCE = 20.0
"""Seconds after which a wait is a deadlock."""


class Barrier:
    """Counts arrivals and bytes; a phase is over when both are complete."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.missing = self.bytes = self.phase = 0

    def init(self, count: int) -> None:
        """How many arrivals a phase takes."""
        self.count = self.missing = count

    def add(self, arrivals: int, more: int) -> None:
        """Arrive, and wait for `more` bytes, or less of them."""
        with self.changed:
            self.missing -= arrivals
            self.bytes += more
            assert self.missing >= 0, "more arrivals than the barrier counts"
            if self.missing == 0 and self.bytes == 0:
                self.phase += 1
                self.missing = self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        """Until the phase of this parity is over: as the hardware, that it is not the current one."""
        with self.changed:
            done = self.changed.wait_for(lambda: self.phase & 1 != parity, PATIENCE)
        assert done, "a wait for ever"


class Barriers:
    """The barriers of a kernel, in the place of the memory that they lie in."""

    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, at: Any) -> Barrier:
        """One of them."""
        return self.all[int(at)]


def arrive(barrier: Barrier, count: int = 1, pred: Any = True) -> None:
    """Arrive, if `pred`."""
    if pred:
        barrier.add(count, 0)


def wait(barrier: Barrier, phase: Any, pred: Any = True) -> None:
    """Wait for the end of a phase, if `pred`."""
    if pred:
        barrier.wait(int(phase))


def side_by_side(work: Callable[..., None], arguments: Iterable[tuple[Any, ...]]) -> None:
    """`work` of each arguments on a thread of its own; raises what the first that failed raised."""
    failures: list[BaseException] = []

    def run(*given: Any) -> None:
        try:
            work(*given)
        except BaseException as failure:  # raised again below
            failures.append(failure)

    threads = [threading.Thread(target=run, args=given, daemon=True) for given in arguments]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if failures:
        raise failures[0]
