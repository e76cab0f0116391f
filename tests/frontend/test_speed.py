"""Tracing is cheap, and a kept trace is nearly free. Limits are many times what an idle machine takes."""

from __future__ import annotations

import timeit
from typing import Any

import torch

from flexc import masks
from flexc.frontend.trace import trace
from flexc.ir.expr import _interned
from flexc.mods import as_mask_mod, mask_mod, score_mod

SLOPES = torch.rand(8)


def best(function: Any, number: int) -> float:
    """Seconds a call, the best of five runs."""
    return min(timeit.repeat(function, number=number, repeat=5)) / number


def test_a_kept_trace_costs_microseconds() -> None:
    window = 128

    @mask_mod
    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= kv_idx) & (q_idx - kv_idx < window)

    @score_mod
    def alibi(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + SLOPES[h] * (kv_idx - q_idx)

    for mod in (masks.causal, mask, alibi):
        mod.trace()
        assert best(mod.trace, 1000) < 25e-6


def test_a_fresh_trace_costs_less_than_a_millisecond() -> None:
    function, kind = masks.causal.function, masks.causal.kind
    trace(function, kind)
    assert best(lambda: trace(function, kind), 50) < 1e-3


def test_closures_at_every_step_leave_no_nodes() -> None:
    def step(size: int) -> None:
        table = torch.arange(size)
        as_mask_mod(lambda b, h, q_idx, kv_idx: (q_idx - kv_idx < size) & (table[kv_idx] > 0)).trace()

    step(3)
    before = len(_interned)
    for size in range(3, 40):
        step(size)
    import gc

    gc.collect()
    assert len(_interned) <= before + 2
