"""The exponentials of the CPU path: exact where they count, zero where they would be subnormal."""

from __future__ import annotations

import math

import pytest
import torch

import flexc
from flexc import cpu, masks
from flexc.exponential import exp_


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_subnormal_results_are_zero_and_others_exact(dtype: torch.dtype) -> None:
    tiny = torch.finfo(dtype).tiny
    lowest = math.log(tiny)
    x = torch.linspace(1.1 * lowest, 5.0, 4001, dtype=dtype)
    exact, result = x.exp(), exp_(x.clone())
    assert ((exact > 0) & (exact < tiny)).any()
    assert not ((result > 0) & (result < tiny)).any()
    large = x > lowest + 1.0
    assert torch.equal(result[large], exact[large])
    assert (result[x < lowest] == 0).all()


@pytest.mark.parametrize("count", [1, 7, 64])
def test_what_is_not_finite(count: int) -> None:
    x = torch.tensor([math.nan, -math.inf, math.inf, 0.0]).repeat(count)
    result = exp_(x)
    expected = torch.tensor([math.nan, 0.0, math.inf, 1.0]).repeat(count)
    assert torch.equal(result.nan_to_num(nan=-1.0), expected.nan_to_num(nan=-1.0))


def test_products_of_attention_read_no_subnormal_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steep linear biases give far keys such weights."""
    seen: list[torch.Tensor] = []

    def recorded(x: torch.Tensor) -> torch.Tensor:
        seen.append(exp_(x))
        return seen[-1].clone()

    monkeypatch.setattr(cpu, "exp_", recorded)
    q, k, v = (torch.randn(1, 2, 256, 16) for _ in range(3))
    flexc.attention(
        q, k, v, mask_mod=masks.causal, score_mod=flexc.scores.alibi(torch.ones(2)), backend="cpu"
    )
    assert seen
    tiny = torch.finfo(torch.float32).tiny
    assert not any(((x > 0) & (x < tiny)).any() for x in seen)
