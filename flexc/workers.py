"""Independent pieces of work on the CPU's cores, each piece on one core.

PyTorch spreads every single operation over the cores and waits for the slowest of them, so on a busy machine
a chain of small operations waits at each link. Whole pieces on one core each wait once.
"""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from typing import TypeVar

import torch

T = TypeVar("T")

_lock = threading.Lock()
_pools: dict[int, ThreadPoolExecutor] = {}


def run_each(work: Callable[[T], None], items: Iterable[T]) -> None:
    """`work(item)` for each item, in any order, on as many threads as PyTorch uses.

    Items are taken one at a time, so a generator holds nothing in advance. A single item runs here, with
    PyTorch's threads. Workers are in the caller's inference mode, record no gradients, and see no autocast.
    What `work` raises stops the others and is raised here.
    """
    iterator = iter(items)
    first = list(itertools.islice(iterator, 2))
    threads = torch.get_num_threads()
    if len(first) < 2 or threads == 1:
        for item in itertools.chain(first, iterator):
            work(item)
        return
    source = _Source(itertools.chain(first, iterator))
    inference = torch.is_inference_mode_enabled()

    def drain() -> None:
        with torch.inference_mode(inference), torch.no_grad(), source:
            for item in source:
                work(item)

    pool = _pool(threads)
    with source:
        futures = [pool.submit(drain) for _ in range(threads)]
        wait(futures)
    for future in futures:
        future.result()


class _Source(Iterator[T]):
    """An iterator that several threads share; leaving it as a context by an exception ends it for all."""

    def __init__(self, items: Iterator[T]) -> None:
        self._items = items
        self._lock = threading.Lock()
        self._ended = False

    def __next__(self) -> T:
        with self._lock:
            if self._ended:
                raise StopIteration
            return next(self._items)

    def __enter__(self) -> _Source[T]:
        return self

    def __exit__(self, kind: type[BaseException] | None, *rest: object) -> None:
        self._ended = self._ended or kind is not None


def _pool(threads: int) -> ThreadPoolExecutor:
    """The pool of this many threads, in each of which PyTorch uses one thread."""
    with _lock:
        pool = _pools.get(threads)
        if pool is None:
            pool = _pools[threads] = ThreadPoolExecutor(threads, thread_name_prefix="flexc")
            together = threading.Barrier(threads)  # so that each thread takes one of these tasks
            for future in [pool.submit(_use_one_thread, together) for _ in range(threads)]:
                future.result()
            torch.set_num_threads(threads)  # each thread has its own, and a new one gets what was set last
        return pool


def _use_one_thread(together: threading.Barrier) -> None:
    torch.get_num_threads()  # lets PyTorch set up the thread first; it would undo the next line later
    torch.set_num_threads(1)
    together.wait()


def _forget_pools() -> None:
    """In the child of a fork the pools' threads do not exist."""
    global _lock
    _lock = threading.Lock()
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pools)
