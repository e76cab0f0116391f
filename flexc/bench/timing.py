"""Times several callables in turns, so that clocks and temperature favour none of them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Timing:
    """The device's time (median, 10th and 90th percentile), and the host's, for one call."""

    median_ms: float
    low_ms: float
    high_ms: float
    host_us: float


Calls = Sequence[Callable[[], object]]
"""One callable for each set of inputs."""


def alternate(calls: Mapping[str, Calls], *, rounds: int, device: torch.device) -> dict[str, Timing]:
    """Runs each entry once a round, the input sets in turn, after one warm-up round of all input sets."""
    for each in calls.values():
        for call in each:
            call()
    time_once = _time_on_gpu if device.type == "cuda" else _time_on_host
    pending: dict[str, list[tuple[Callable[[], float], float]]] = {name: [] for name in calls}
    _wait(device)
    for turn in range(rounds):
        for name, each in calls.items():
            pending[name].append(time_once(each[turn % len(each)]))
    _wait(device)
    return {name: _summary(found) for name, found in pending.items()}


def _time_on_gpu(call: Callable[[], object]) -> tuple[Callable[[], float], float]:
    event: Callable[..., torch.cuda.Event] = torch.cuda.Event  # torch leaves its constructor untyped
    start, end = event(enable_timing=True), event(enable_timing=True)
    start.record()
    before = time.perf_counter()
    call()
    host = time.perf_counter() - before
    end.record()
    return lambda: float(start.elapsed_time(end)), host


def _time_on_host(call: Callable[[], object]) -> tuple[Callable[[], float], float]:
    before = time.perf_counter()
    call()
    host = time.perf_counter() - before
    return lambda: host * 1e3, host


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _summary(found: Sequence[tuple[Callable[[], float], float]]) -> Timing:
    device_ms = sorted(read() for read, _ in found)
    tenth = len(device_ms) // 10
    return Timing(
        median_ms=statistics.median(device_ms),
        low_ms=device_ms[tenth],
        high_ms=device_ms[-1 - tenth],
        host_us=statistics.median(host for _, host in found) * 1e6,
    )
