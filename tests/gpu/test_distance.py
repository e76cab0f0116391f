"""Gradients of learned biases on a GPU: by distance, by row, and of few elements; deterministic ones too."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

from flexc import backends, masks
from tests.gradients import check_gradients, differentiable_slots, problem

pytestmark = pytest.mark.gpu

Mod = Callable[..., Any]
SHAPES = [(300, 300, 4, 2), (130, 517, 4, 4), (640, 200, 6, 2)]
"""Queries, keys, query heads and key heads: tiles that hang over on either side."""


def _by_distance(table: torch.Tensor) -> Mod:
    last = table.shape[1] // 2
    return lambda s, b, h, q_idx, kv_idx: s + table[h, (q_idx - kv_idx).clamp(-last, last) + last]


def _by_batch(table: torch.Tensor) -> Mod:
    last = table.shape[1] // 2
    return lambda s, b, h, q_idx, kv_idx: s + table[b, (q_idx - kv_idx).clamp(-last, last) + last]


def _by_bucket(table: torch.Tensor) -> Mod:
    """T5's."""

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        distance = (q_idx - kv_idx).abs()
        far = 8 + (torch.log((distance.float() / 8).clamp(min=1.0)) / math.log(16) * 8).long()
        return s + table[h, torch.where(distance < 8, distance, far.clamp(max=15))]

    return score


def _by_row(table: torch.Tensor) -> Mod:
    return lambda s, b, h, q_idx, kv_idx: s + table[h, (q_idx // 64) % 7]


def _by_pair(table: torch.Tensor) -> Mod:
    return lambda s, b, h, q_idx, kv_idx: s + table[h, (q_idx // 50) % 3 * 3 + (kv_idx // 50) % 3]


@pytest.mark.parametrize(
    ("make", "length"),
    [
        (_by_distance, 2047),
        (_by_distance, 17),
        (_by_batch, 17),
        (_by_bucket, 16),
        (_by_row, 7),
        (_by_pair, 9),
    ],
)
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("dim", [64, 128])
def test_biases(make: Callable[[torch.Tensor], Mod], length: int, deterministic: bool, dim: int) -> None:
    for mask in (None, masks.causal):
        for q_len, kv_len, heads, kv_heads in SHAPES:
            q = torch.randn(2, heads, q_len, dim, device="cuda", dtype=torch.bfloat16)
            k, v = torch.randn(2, 2, kv_heads, kv_len, dim, device="cuda", dtype=torch.bfloat16)
            bias = make(torch.randn(heads, length, device="cuda"))
            given = problem(q, k, v, score_mod=bias, mask_mod=mask, deterministic=deterministic)
            out, lse = backends.forward(given.call, "triton")
            assert lse is not None
            slots = differentiable_slots(given.call)
            names: tuple[str | int, ...] = ("q", "k", "v", *slots)
            wanted = frozenset(names)
            found = backends.backward(given.call, "triton", out, lse, given.grad_out, None, wanted)
            check_gradients(given, found, names)
            if deterministic:
                again = backends.backward(given.call, "triton", out, lse, given.grad_out, None, wanted)
                for slot in slots:
                    assert torch.equal(found.values[slot], again.values[slot])  # type: ignore[arg-type]
