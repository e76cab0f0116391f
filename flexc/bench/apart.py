"""Work in other processes, each of which may fail, hang or end without taking the others with it."""

from __future__ import annotations

import multiprocessing
import queue
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any, Generic, TypeVar

J = TypeVar("J")

_SPAWN = multiprocessing.get_context("spawn")  # neither CUDA nor torch's threads survive a fork


def run_apart(
    jobs: Sequence[J],
    work: Callable[[J], str | None],
    *,
    workers: int,
    seconds: float,
    done: Callable[[J], None] = lambda job: None,
) -> dict[J, str]:
    """`work(job)` for each job in `workers` processes, in the order of the jobs, for `seconds` at most.

    `work` is a function of a module, and returns why the job came to nothing, or None. A process in which it
    raises ends, for what a fault on a GPU leaves behind is of no use, and another takes its place. `done` is
    called after each job, from any thread.

    Returns:
        Why, for each job that came to nothing.
    """
    waiting: queue.SimpleQueue[J] = queue.SimpleQueue()
    for job in jobs:
        waiting.put(job)
    failed: dict[J, str] = {}
    deadline = time.monotonic() + seconds

    def drain() -> None:
        process = _Process(work)
        try:
            while True:
                job = waiting.get_nowait()
                reason = process.run(job, deadline)
                if reason is not None:
                    failed[job] = reason
                done(job)
        except queue.Empty:
            pass
        finally:
            process.end()

    threads = [threading.Thread(target=drain, daemon=True) for _ in range(max(1, min(workers, len(jobs))))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return failed


class _Process(Generic[J]):
    """One process at a time, made when there is something to do."""

    def __init__(self, work: Callable[[J], str | None]) -> None:
        self._work = work
        self._process: Any = None
        self._pipe: Any = None

    def run(self, job: J, deadline: float) -> str | None:
        """Why the job came to nothing, or None."""
        if time.monotonic() >= deadline:
            return "not reached in the time allowed"
        if self._process is None:
            self._pipe, theirs = _SPAWN.Pipe()
            self._process = _SPAWN.Process(target=_serve, args=(theirs, self._work), daemon=True)
            self._process.start()
            theirs.close()
        self._pipe.send(job)
        if not self._pipe.poll(max(0.0, deadline - time.monotonic())):
            self.end()
            return "not done in the time allowed"
        try:
            fine, reason = self._pipe.recv()
        except EOFError:
            self._process.join()
            code = self._process.exitcode
            self.end()
            return f"its process ended with exit code {code}"
        if not fine:
            self.end()
        return None if reason is None else str(reason)

    def end(self) -> None:
        """Ends the process, if there is one."""
        if self._process is not None:
            self._process.kill()
            self._process.join()
            self._pipe.close()
            self._process = None


def _serve(pipe: Connection, work: Callable[[Any], str | None]) -> None:
    with suppress(EOFError):
        while True:
            job = pipe.recv()
            try:
                pipe.send((True, work(job)))
            except Exception as error:
                text = str(error).splitlines() or [""]
                pipe.send((False, f"{type(error).__name__}: {text[0][:100]}"))
                return
