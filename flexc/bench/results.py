"""What a benchmark finds: a cell for each case at one size, with an entry for each peer."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from flexc.bench.environment import environment
from flexc.bench.facts import KernelFacts
from flexc.bench.timing import Timing


@dataclass(frozen=True, slots=True)
class Entry:
    """One peer in one cell. `timing` is None, and `note` says why, when it has no speed.

    `error` is the largest absolute one of its results; `of_peak` is the share of the GPU's matrix rate
    that `tflops` is; `kernels` are those of flexc's own.
    """

    peer: str
    error: float | None = None
    timing: Timing | None = None
    tflops: float | None = None
    of_peak: float | None = None
    kernels: tuple[KernelFacts, ...] = ()
    first_call_s: float | None = None
    note: str | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One case at one size. `share` is the fraction of pairs that may attend; only their FLOPs count."""

    case: str
    batch: int
    heads: int
    length: int
    head_dim: int
    dtype: str
    backward: bool
    share: float
    plain_error: float
    entries: tuple[Entry, ...]

    def entry(self, peer: str) -> Entry | None:
        """What a peer did in this cell; None when it was not asked."""
        return next((entry for entry in self.entries if entry.peer == peer), None)

    def ratio(self, peer: str) -> float | None:
        """How many times as fast as `peer` flexc is; None when either has no speed."""
        own, other = self.entry("flexc"), self.entry(peer)
        if own is None or other is None or own.timing is None or other.timing is None:
            return None
        return other.timing.median_ms / own.timing.median_ms


def to_json(cells: Sequence[Cell], settings: dict[str, Any]) -> dict[str, Any]:
    """A report as plain data: `{"environment", "settings", "cells"}`."""
    return {
        "environment": environment(),
        "settings": settings,
        "cells": [dataclasses.asdict(cell) for cell in cells],
    }
