"""Pieces of work on threads: all done, thread numbers untouched, errors raised, forks survived."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from flexc.workers import run_each


@pytest.fixture(params=[1, 3])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """The number of PyTorch's threads in the test."""
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield request.param
    torch.set_num_threads(before)


def test_every_item_once_on_one_thread_each(threads: int) -> None:
    done: list[int] = []
    used: set[int] = set()

    def work(item: int) -> None:
        done.append(item)
        used.add(torch.get_num_threads())

    run_each(work, iter(range(100)))
    assert sorted(done) == list(range(100))
    assert used == {1}
    assert torch.get_num_threads() == threads


def test_a_single_item_runs_here(threads: int) -> None:
    names: list[str] = []
    run_each(lambda item: names.append(threading.current_thread().name), [0])
    assert names == [threading.current_thread().name]


def test_an_error_ends_the_work_and_is_raised(threads: int) -> None:
    taken: list[int] = []

    def work(item: int) -> None:
        taken.append(item)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_each(work, iter(range(100)))
    assert len(taken) <= threads


def test_workers_share_the_inference_mode_and_record_no_gradients(threads: int) -> None:
    seen: list[tuple[bool, bool]] = []

    def work(item: int) -> None:
        seen.append((torch.is_inference_mode_enabled(), torch.is_grad_enabled()))

    with torch.inference_mode():
        run_each(work, range(4))
    with torch.no_grad():
        run_each(work, range(4))
    assert seen == [(True, False)] * 4 + [(False, False)] * 4
