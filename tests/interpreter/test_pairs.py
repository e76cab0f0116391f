"""Results and gradients in fp32 by pairs of fp16 numbers: as exact as plain PyTorch's, at any size."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from flexc import mask_mod, masks, scores
from flexc.gpu import run
from flexc.gpu_backward import backward
from tests.gradients import check_gradients, problem
from tests.oracle import golden

FORWARD = {"precision": "fp16x3", "block_q": 32, "block_kv": 32, "num_warps": 4}
OPTIONS = {f"backward_{n}": v for n, v in (("block_q", 32), ("block_kv", 32), ("num_warps", 4))}
Inputs = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _scaled(rows: torch.Tensor, decades: float) -> torch.Tensor:
    """Each row by another power of ten."""
    return rows * 10 ** (torch.randn(*rows.shape[:-1], 1) * decades)


SIZES: dict[str, Callable[[Inputs], Inputs]] = {
    "large scores": lambda x: (x[0] * 6, x[1] * 3, x[2], x[3]),
    "means far from zero": lambda x: (x[0] + 3, x[1] + 3, x[2] + 5, x[3]),
    "gradients below fp16's least number": lambda x: (x[0], x[1], x[2], x[3] * 1e-8),
    "beyond the largest fp16 number": lambda x: (x[0] * 1e10, x[1] * 1e-10, x[2] * 1e6, x[3]),
    "tiny gradients": lambda x: (x[0], x[1], x[2], x[3] * 1e-25),
    "rows of many sizes": lambda x: (x[0], x[1], _scaled(x[2], 1), _scaled(x[3], 3)),
    "one large dimension": lambda x: (x[0] + 300 * (torch.arange(32) == 3), x[1], x[2], x[3]),
    "a row of zeros": lambda x: (x[0], x[1], x[2], x[3] * (torch.arange(70)[:, None] != 9)),
}


@pytest.mark.parametrize("name", list(SIZES))
@pytest.mark.parametrize("mask", [None, masks.causal], ids=["none", "causal"])
def test_results_of_any_sizes(name: str, mask: Any) -> None:
    q, k, v, _ = SIZES[name](_random())
    _check_result(q, k, v, mask_mod=mask)
    _check_result(q, k, v, mask_mod=mask, score_mod=scores.softcap(20.0))


def test_results_of_padded_heads_sinks_and_dropout() -> None:
    q, k, v = torch.randn(1, 2, 40, 24), torch.randn(1, 1, 50, 24), torch.randn(1, 1, 50, 40)
    _check_result(q, k, v, sinks=torch.tensor([0.5, -1.0]))
    _check_result(q, k, v, mask_mod=masks.sliding_window(7), dropout_p=0.3, dropout_seed=3)
    _check_result(q, k, v, mask_mod=masks.document((torch.arange(50) // 20).int()))


@pytest.mark.parametrize(
    "mask", [None, mask_mod(lambda b, h, q_idx, kv_idx: kv_idx < 30)], ids=["none", "part"]
)
def test_inf_and_nan_are_where_plain_products_have_them(mask: Any) -> None:
    q, k, v = (torch.randn(1, 1, 40, 16) for _ in range(3))
    v[0, 0, 5, 3], v[0, 0, 7, 4], v[0, 0, 9, 5] = float("inf"), -float("inf"), float("nan")
    q[..., 2] = q[..., 2].abs() + 0.1
    k[0, 0, 11, 2] = -float("inf")
    _check_result(q, k, v, mask_mod=mask)


@pytest.mark.parametrize("name", list(SIZES))
def test_any_sizes(name: str) -> None:
    q, k, v, grad_out = SIZES[name](_random())
    fused = list(SIZES).index(name) % 2 == 0  # one kernel and two take turns
    _check(q, k, v, grad_out, mask_mod=masks.causal, options={**OPTIONS, "backward_fused": fused})


@pytest.mark.parametrize("fused", [False, True])
def test_huge_values_that_no_row_sees_cost_no_digits(fused: bool) -> None:
    q, k, v, grad_out = (torch.randn(1, 1, 64, 16) for _ in range(4))
    k[:, :, 40:] *= 1e30
    v[:, :, 40:] *= 1e30
    window = mask_mod(lambda b, h, q_idx, kv_idx: kv_idx < 40)
    _check(q, k, v, grad_out, mask_mod=window, options={**OPTIONS, "backward_fused": fused})


_FLAGS = torch.rand(4, 4, generator=torch.Generator().manual_seed(3)) < 0.6
WALKS: dict[str, Any] = {
    "masked, then whole tiles": masks.causal,
    "whole tiles between masked ones": masks.sliding_window(70),
    "two stretches": masks.sliding_window(40) | masks.prefix_lm(50),
    "documents": masks.causal & masks.document((torch.arange(110) // 60).int()),
    "a map": mask_mod(lambda b, h, q, k: _FLAGS[q // 40, k // 40] | (k == 3)),
    "first rows see most": mask_mod(lambda b, h, q_idx, kv_idx: q_idx <= kv_idx),
}


@pytest.mark.parametrize("name", list(WALKS))
def test_steps_with_and_without_the_mask(name: str) -> None:
    # Each kind of steps has a loop of its own, and tiles are in order over two batches of two heads.
    q, k = (2, 2, 110, 16), (2, 1, 110, 16)
    _check(
        torch.randn(q), torch.randn(k), torch.randn(k), torch.randn(q), mask_mod=WALKS[name], options=OPTIONS
    )
    _check_result(torch.randn(q), torch.randn(k), torch.randn(k), mask_mod=WALKS[name])


def test_keys_in_16_bits() -> None:
    q, k, v, grad_out = (torch.randn(1, 1, 50, 16) for _ in range(4))
    given = problem(q, k.bfloat16(), v.bfloat16(), options=OPTIONS)
    out, lse = run(given.call)
    assert lse is not None
    found = backward(given.call, out, lse, grad_out, None, frozenset(("q", "k", "v")))
    wide = problem(q, k.bfloat16().float(), v.bfloat16().float(), options=OPTIONS)
    same = backward(wide.call, out, lse, grad_out, None, frozenset(("q", "k", "v")))
    for one, other in ((found.q, same.q), (found.k, same.k), (found.v, same.v)):
        assert one is not None
        torch.testing.assert_close(one.float(), other, rtol=1e-2, atol=1e-6)


def _random() -> Inputs:
    q, k = (1, 2, 70, 32), (1, 1, 90, 32)
    return torch.randn(q), torch.randn(k), torch.randn(k), torch.randn(q)


def _check_result(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> None:
    out, lse = run(problem(q, k, v, options=FORWARD, **arguments).call)
    golden(q, k, v, **arguments).check(out, lse)


def _check(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, grad_out: torch.Tensor, **arguments: Any
) -> None:
    given = problem(q, k, v, **arguments)
    given = replace(given, grad_out=grad_out)
    out, lse = run(given.call)
    assert lse is not None
    names: tuple[str | int, ...] = ("q", "k", "v")
    found = backward(given.call, out, lse, grad_out, None, frozenset(names))
    check_gradients(given, found, names)
