"""Dropout on the CPU and in the reference: the same pairs, gradients too, and what the mean is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexc
from flexc.philox import kept
from tests.oracle import golden_gradients


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def _run(seed: int, backend: str, p: float, *leaves: torch.Tensor, **arguments: Any) -> Any:
    torch.manual_seed(seed)
    return flexc.attention(*leaves, dropout_p=p, return_lse=True, backend=backend, **arguments)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("p", [0.1, 0.6])
def test_backends_drop_the_same_pairs(p: float, dtype: torch.dtype) -> None:
    q = torch.randn(2, 4, 130, 16).to(dtype).requires_grad_()
    k, v = (torch.randn(2, 2, 150, 16).to(dtype).requires_grad_() for _ in range(2))
    strength = torch.tensor(0.7, requires_grad=True)
    grad, grad_lse = torch.randn(2, 4, 130, 16).to(dtype), torch.randn(2, 4, 130)
    arguments: dict[str, Any] = {
        "mask_mod": causal,
        "score_mod": lambda s, b, h, q_idx, kv_idx: s * strength,
    }
    out, lse = _run(3, "cpu", p, q, k, v, **arguments)
    expected, expected_lse = _run(3, "reference", p, q, k, v, **arguments)
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(lse, expected_lse)
    torch.manual_seed(3)
    seed = int(torch.randint(2**63 - 1, ()))
    actual = torch.autograd.grad([out, lse], [q, k, v, strength], [grad, grad_lse.to(lse.dtype)])
    golden_gradients(
        q, k, v, grad, grad_lse, captured=[strength], dropout_p=p, dropout_seed=seed, **arguments
    ).check(actual)


def test_which_weights_are_dropped() -> None:
    """With one-hot values the output is the weights themselves."""
    q, k = torch.randn(2, 4, 40, 8), torch.randn(2, 2, 50, 8)
    v = torch.eye(50).expand(2, 2, 50, 50)
    plain, lse = _run(0, "cpu", 0.0, q, k, v)
    out, same_lse = _run(5, "cpu", 0.25, q, k, v)
    torch.manual_seed(5)
    seed = int(torch.randint(2**63 - 1, ()))
    stream = torch.arange(8).view(2, 4, 1, 1)
    keep = kept(seed, 0.25, stream, torch.arange(40).view(40, 1), torch.arange(50))
    torch.testing.assert_close(out, torch.where(keep, plain / 0.75, 0.0))
    torch.testing.assert_close(same_lse, lse)
    again, _ = _run(5, "cpu", 0.25, q, k, v)
    other, _ = _run(6, "cpu", 0.25, q, k, v)
    assert torch.equal(again, out)
    assert not torch.equal(other, out)


def test_everything_dropped_and_values_that_nobody_keeps() -> None:
    q, k, v = (torch.randn(1, 1, 30, 8, requires_grad=True) for _ in range(3))
    for backend in ("cpu", "reference"):
        out, lse = _run(0, backend, 1.0, q, k, v)
        assert (out == 0).all()
        assert lse.isfinite().all()
        grads = torch.autograd.grad(out.sum(), [q, k, v])
        assert all((grad == 0).all() for grad in grads)
    spoiled = v.detach().clone()
    spoiled[:, :, 7] = torch.nan
    out, _ = _run(1, "cpu", 0.5, q.detach(), k.detach(), spoiled)
    torch.manual_seed(1)
    seed = int(torch.randint(2**63 - 1, ()))
    keep = kept(seed, 0.5, torch.zeros(1), torch.arange(30), torch.tensor(7))
    assert torch.equal(out[0, 0].isnan().all(-1), keep)
    assert torch.equal(out[0, 0].isnan().any(-1), keep)
