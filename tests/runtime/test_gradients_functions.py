"""Functions of PyTorch inside a score_mod have PyTorch's derivatives, at their kinks too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn import functional

import flexc

FUNCTIONS: dict[str, Callable[[Any], Any]] = {
    "relu": torch.relu,
    "leaky_relu": lambda x: functional.leaky_relu(x, 0.3),
    "softplus": functional.softplus,
    "mish": functional.mish,
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_tanh": lambda x: functional.gelu(x, approximate="tanh"),
    "elu": functional.elu,
    "logsigmoid": functional.logsigmoid,
    "log1p": torch.log1p,
    "expm1": torch.expm1,
    "sinh": torch.sinh,
    "clamp": lambda x: x.clamp(min=0),
    "clamp_between": lambda x: torch.clamp(x, -0.3, 9.0),
    "maximum": lambda x: torch.maximum(x, -x),
    "logaddexp": lambda x: torch.logaddexp(x, -x),
    "root": lambda x: x.abs().sqrt(),
    "remainder": lambda x: x % 0.7,
    "fmod": lambda x: torch.fmod(x, 0.7),
    "floor": torch.floor,
    "powers": lambda x: x**3 + 2**x + x.abs() ** 1.5,
    "where": lambda x: torch.where(x > 0, x.log(), x.exp()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivative(name: str) -> None:
    """One key a row makes the lse the modified score itself."""
    function = FUNCTIONS[name]
    points = torch.tensor([0.0, 1e-6, -1e-6, 0.3, -0.3, 0.95, 1.75, 9.0, 25.0, -0.999, 60.0]).double()
    bias = points.clone().requires_grad_()
    q = k = torch.zeros(1, 1, len(points), 1).double()
    _, lse = flexc.attention(
        q,
        k,
        torch.ones_like(k),
        mask_mod=lambda b, h, q_idx, kv_idx: q_idx == kv_idx,
        score_mod=lambda s, b, h, q_idx, kv_idx: s + function(bias[q_idx]),
        return_lse=True,
        backend="cpu",
    )
    (actual,) = torch.autograd.grad(lse.sum(), bias)
    leaf = points.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(leaf).sum(), leaf)
    defined = expected.isfinite()
    torch.testing.assert_close(actual[defined], expected[defined], rtol=1e-6, atol=1e-9)
