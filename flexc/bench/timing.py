"""Times several callables in turns, so that clocks and temperature favour none of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

_FEWEST_ROUNDS = 3
_IN_A_ROW = 20
"""Calls that tell what one costs the host."""
_CYCLES_PER_S = 2e9
"""Of a GPU's multiprocessors, about: see `_Pause`."""


@dataclass(frozen=True, slots=True)
class Timing:
    """The device's time for one call (median, 10th and 90th percentile), and the host's for one of many.

    On a CPU, which does all of it, the host has no time of its own.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    host_us: float | None


Calls = Sequence[Callable[[], object]]
"""One callable for each set of inputs."""


def alternate(
    calls: Mapping[str, Calls], *, rounds: int, device: torch.device, seconds: float | None = None
) -> dict[str, Timing]:
    """Runs each entry once a round, the input sets in turn, after one warm-up round of all input sets.

    With `seconds`, as many rounds as fit, but three at least and `rounds` at most.
    """
    on_gpu = device.type == "cuda"
    before = time.perf_counter()
    turns = 0
    for each in calls.values():
        for call in each:
            call()
        turns = max(turns, len(each))
    _wait(device)
    host = {name: _host_time(each[0], device) if on_gpu else 0.0 for name, each in calls.items()}
    if seconds is not None:
        spent = time.perf_counter() - before
        a_round = max(spent / max(1, turns + on_gpu * _IN_A_ROW), 1e-9)
        rounds = max(_FEWEST_ROUNDS, min(rounds, int((seconds - spent) / a_round)))
    pending: dict[str, list[Callable[[], float]]] = {name: [] for name in calls}
    for turn in range(rounds):
        for name, each in calls.items():
            call = each[turn % len(each)]
            pending[name].append(_time_on_gpu(call, host[name]) if on_gpu else _time_on_host(call))
    _wait(device)
    return {name: _summary(found, host[name]) for name, found in pending.items()}


def _host_time(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of the host for one of many calls in a row to a GPU."""
    found = []
    for _ in range(_IN_A_ROW):
        before = time.perf_counter()
        call()
        found.append(time.perf_counter() - before)
    _wait(device)
    return statistics.median(found)


def _time_on_gpu(call: Callable[[], object], host: float) -> Callable[[], float]:
    """Times one call by events. The GPU pauses before it until the host, which takes `host` s, has sent all.

    Otherwise a short call would be timed by its host's work.
    """
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event  # torch leaves its constructor untyped
    start, end = event(enable_timing=True), event(enable_timing=True)
    torch.cuda._sleep(int(min(2 * host, 2e-3) * _CYCLES_PER_S))  # type: ignore[no-untyped-call]
    start.record()
    call()
    end.record()
    return lambda: float(start.elapsed_time(end))


def _time_on_host(call: Callable[[], object]) -> Callable[[], float]:
    before = time.perf_counter()
    call()
    seconds = time.perf_counter() - before
    return lambda: seconds * 1e3


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(found: Sequence[Callable[[], float]], host: float) -> Timing:
    device_ms = sorted(read() for read in found)
    tenth = len(device_ms) // 10
    return Timing(
        median_ms=statistics.median(device_ms),
        low_ms=device_ms[tenth],
        high_ms=device_ms[-1 - tenth],
        host_us=host * 1e6 if host else None,
    )
