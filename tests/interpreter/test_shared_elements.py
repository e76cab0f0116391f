"""Gradients of captured tensors whose few elements are those of many pairs: against fp64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexc import masks
from flexc.gpu import run
from flexc.gpu_backward import backward
from tests.gradients import check_gradients, differentiable_slots, problem

Mod = Callable[..., Any]
KINDS = torch.arange(70) // 12 % 3
OPTIONS = {
    f"{prefix}{name}": value
    for prefix in ("", "backward_")
    for name, value in (("block_q", 32), ("block_kv", 32), ("num_warps", 4), ("num_stages", 1))
}


def _rows(table: torch.Tensor) -> Mod:
    return lambda s, b, h, q_idx, kv_idx: s + table[h, (q_idx // 8) % 9]


def _columns(table: torch.Tensor) -> Mod:
    return lambda s, b, h, q_idx, kv_idx: s + table[h, (kv_idx // 8) % 9]


def _of_kinds(table: torch.Tensor) -> Mod:
    return lambda s, b, h, q_idx, kv_idx: s + table[h, 3 * KINDS[q_idx] + KINDS[kv_idx]]


def _scattered(table: torch.Tensor) -> Mod:
    return lambda s, b, h, q_idx, kv_idx: s + table[h, (q_idx * 3 + kv_idx * 7) % 9]


def _seldom_and_often(table: torch.Tensor) -> Mod:
    """Elements before the common one are met once or never in a tile; others are out of range."""

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        sum_of = q_idx + kv_idx
        return s + table[h, torch.where(sum_of % 50 < 3, sum_of % 50, 8)]

    return score


@pytest.mark.parametrize("make", [_rows, _columns, _of_kinds, _scattered, _seldom_and_often])
@pytest.mark.parametrize("deterministic", [False, True])
def test_elements_that_many_pairs_share(make: Callable[[torch.Tensor], Mod], deterministic: bool) -> None:
    q, k, v = torch.randn(3, 1, 2, 70, 16)
    given = problem(
        q,
        k,
        v,
        score_mod=make(torch.randn(2, 9)),
        mask_mod=masks.causal,
        deterministic=deterministic,
        options=OPTIONS,
    )
    out, lse = run(given.call)
    assert lse is not None
    names: tuple[str | int, ...] = ("q", "k", "v", *differentiable_slots(given.call))
    found = backward(given.call, out, lse, given.grad_out, given.grad_lse, frozenset(names))
    check_gradients(given, found, names)
