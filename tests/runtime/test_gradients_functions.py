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
    "hardtanh": lambda x: functional.hardtanh(x, -0.3, 9.0),
    "relu6": lambda x: functional.relu6(6 * x / 9),
    "hardsigmoid": lambda x: functional.hardsigmoid(x / 3),
    "selu": functional.selu,
    "celu": lambda x: functional.celu(x, 1.5),
    "hardswish": lambda x: functional.hardswish(x / 3),
    "hardshrink": lambda x: functional.hardshrink(x, 0.3),
    "softshrink": lambda x: functional.softshrink(x, 0.3),
    "threshold": lambda x: functional.threshold(x, 0.3, 2.0),
    "copysign": lambda x: torch.copysign(x, 1 - x.detach()),
    "atan": torch.atan,
    "atan2": lambda x: torch.atan2(x, x * x - 1) + torch.atan2(2 - x, -x),
    "asin": lambda x: torch.asin(x / 61),
    "acos": lambda x: torch.acos(x / 61),
    "asinh": torch.asinh,
    "acosh": lambda x: torch.acosh(1 + x.abs()),
    "atanh": lambda x: torch.atanh(x / 61),
    "clamp by tensors": lambda x: torch.clamp(x, -x, x * 0 + 9),
    "fmax": lambda x: torch.fmax(x, -x),
    "fmin": lambda x: torch.fmin(x, -x),
    "xlogy": lambda x: torch.xlogy(x, x * x + 2),
    "detach": lambda x: x.detach() * x + torch.tanh(x.detach()),
    "data": lambda x: x.data * x,
    "detached denominator": lambda x: x / (1 + x.abs()).detach(),
}


@pytest.mark.parametrize("backend", ["cpu", "reference"])
@pytest.mark.parametrize("name", FUNCTIONS)
def test_derivative(name: str, backend: str) -> None:
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
        backend=backend,
    )
    (actual,) = torch.autograd.grad(lse.sum(), bias)
    leaf = points.clone().requires_grad_()
    (expected,) = torch.autograd.grad(function(leaf).sum(), leaf)
    defined = expected.isfinite()
    torch.testing.assert_close(actual[defined], expected[defined], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("name", ["max", "min"])
@pytest.mark.parametrize("keepdim", [False, True])
def test_an_extreme_along_a_dimension_has_the_gradient_of_one_element(name: str, keepdim: bool) -> None:
    """The first among equals, as PyTorch chooses; and NaN is the extreme, as there."""
    nan = torch.nan
    rows = [[1.0, 2.0, 2.0], [3.0, 3.0, 3.0], [0.0, -1.0, 0.0], [1.0, nan, nan], [nan, 2.0, 1.0]]
    table = torch.tensor([*rows, [torch.inf, torch.inf, -torch.inf]], dtype=torch.float64, requires_grad=True)

    def extreme(row: Any) -> Any:
        found = getattr(row, name)(-1, keepdim=keepdim).values
        return found.squeeze(-1) if keepdim else found

    q = torch.zeros(1, 1, 6, 4, dtype=torch.float64)
    _, lse = flexc.attention(
        q,
        q,
        q,
        mask_mod=lambda b, h, q_idx, kv_idx: q_idx == kv_idx,
        score_mod=lambda s, b, h, q_idx, kv_idx: s + extreme(table[q_idx]),
        return_lse=True,
        backend="reference",
    )
    expected = extreme(table)
    torch.testing.assert_close(lse[0, 0, :3], expected[:3])
    assert lse[0, 0, 3:5].isnan().all()
    (actual,) = torch.autograd.grad(lse[0, 0, :3].sum(), table)
    (theirs,) = torch.autograd.grad(expected[:3].sum(), table)
    assert torch.equal(actual[:3], theirs[:3])
    finite = table.detach()[:3].clone().requires_grad_()

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return s + extreme(finite[q_idx]) * kv_idx

    q, k, v = (torch.randn(1, 1, 3, 4, dtype=torch.float64) for _ in range(3))
    out = flexc.attention(q, k, v, score_mod=score, backend="cpu")
    (actual,) = torch.autograd.grad(out.pow(2).sum(), finite)
    scores = q @ k.mT / 2 + extreme(finite)[:, None] * torch.arange(3)
    (theirs,) = torch.autograd.grad((scores.softmax(-1) @ v).pow(2).sum(), finite)
    torch.testing.assert_close(actual, theirs)


@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_no_gradient_goes_through_what_a_mod_detaches(backend: str) -> None:
    """Scores, whole captured tensors, their elements, and what is computed without gradients."""
    table = torch.randn(2, 3).double().requires_grad_()
    q, k, v = (torch.randn(1, 2, 9, 4).double().requires_grad_() for _ in range(3))

    def score(s: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        with torch.no_grad():
            factor = 2 * table[h, 0] + table.mT[1, h]
        return s + factor * torch.tanh(s.detach()) + table.detach()[h, 2] * table[h, 1] + factor

    grads = torch.randn(1, 2, 9, 4).double()
    out = flexc.attention(q, k, v, score_mod=score, backend=backend)
    actual = torch.autograd.grad(out, [q, k, v, table], grads)

    scores = q @ k.mT / 2
    fixed = table.detach()[None, :, :, None, None]
    factor = 2 * fixed[:, :, 0] + fixed[:, :, 1]
    added = fixed[:, :, 2] * table[None, :, 1, None, None]
    expected_out = (scores + factor * torch.tanh(scores.detach()) + added + factor).softmax(-1) @ v
    expected = torch.autograd.grad(expected_out, [q, k, v, table], grads)
    torch.testing.assert_close(out, expected_out)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(one, other, atol=1e-9, rtol=1e-6)


def test_a_trace_without_gradients_serves_calls_with_them() -> None:
    """`torch.no_grad()` around the call is no statement about the mod."""
    slopes = torch.randn(2).requires_grad_()
    mod = flexc.score_mod(lambda s, b, h, q_idx, kv_idx: s * slopes[h])
    q = torch.randn(1, 2, 9, 4)
    with torch.no_grad():
        flexc.attention(q, q, q, score_mod=mod)
    with torch.inference_mode():
        flexc.attention(q, q, q, score_mod=mod)
    flexc.attention(q, q, q, score_mod=mod).square().sum().backward()
    assert slopes.grad is not None
    assert slopes.grad.abs().min() > 0
