"""The Hopper backward of heads above 128 on the GPU it is made for, against fp64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

from flexc import backends, masks, scores
from flexc.launcher import recording
from tests.gradients import check_gradients, problem
from tests.mods import corpus

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs an sm90 GPU"
)

ENTRIES = ("causal", "document_by_batch", "whole_rows_masked", "window_and_first_keys", "alibi_causal")
MAIN = "attention_backward"
NAMES = ("q", "k", "v")
VALUES = {192: 128, 256: 256}
"""Head dimensions of v beside those of q: those that kernels were made for."""


def _qkv(
    q_len: int,
    kv_len: int,
    *,
    batch: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 192,
    dim_v: int = 128,
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    shapes = ((heads, q_len, dim), (kv_heads, kv_len, dim), (kv_heads, kv_len, dim_v))
    q, k, v = (torch.randn(batch, *shape, device="cuda").to(dtype) for shape in shapes)
    return q, k, v


def _check(*qkv: torch.Tensor, **arguments: Any) -> None:
    given = problem(*qkv, **arguments)
    names: tuple[str | int, ...] = NAMES if given.call.sinks is None else (*NAMES, "sinks")
    out, lse = backends.forward(given.call, "auto")
    assert lse is not None
    with recording() as launched:
        found = backends.backward(
            given.call, "auto", out, lse, given.grad_out, given.grad_lse, frozenset(names)
        )
    assert MAIN in [kernel.entry for kernel in launched]
    check_gradients(given, found, names)


LENGTHS = ((64, 1), (100, 3000), (3000, 1), (129, 63), (127, 129), (2500, 2500))


@pytest.mark.parametrize("dim", [192, 256])
def test_lengths(dim: int) -> None:
    for (q_len, kv_len), mask in product(LENGTHS, (None, masks.sliding_window(77))):
        qkv = _qkv(q_len, kv_len, heads=3, kv_heads=1, dim=dim, dim_v=VALUES[dim])
        _check(*qkv, mask_mod=mask)


@pytest.mark.parametrize("dim", [192, 256])
@pytest.mark.parametrize("name", ENTRIES)
def test_mods(name: str, dim: int) -> None:
    case = corpus()[name].make("cuda")
    q, k, v = _qkv(
        case.q_len,
        case.kv_len,
        batch=case.batch,
        heads=case.heads,
        kv_heads=case.kv_heads,
        dim=dim,
        dim_v=VALUES[dim],
    )
    if case.q_len < 64:
        pytest.skip("few rows are left to the portable kernels")
    _check(q, k, v, mask_mod=case.mask, score_mod=case.score)


@pytest.mark.parametrize(
    ("dim", "dim_v", "dtype"),
    [
        (136, 80, torch.bfloat16),
        (160, 128, torch.float16),
        (192, 192, torch.bfloat16),
        (80, 200, torch.float16),
        (256, 256, torch.bfloat16),
    ],
    ids=str,
)
def test_head_dims(dim: int, dim_v: int, dtype: torch.dtype) -> None:
    qkv = _qkv(700, 777, dim=dim, dim_v=dim_v, dtype=dtype)
    _check(*qkv, mask_mod=masks.causal, score_mod=scores.softcap(3.0))


@pytest.mark.parametrize("dim", [192, 256])
def test_groups_sinks_and_gradients_of_the_lse(dim: int) -> None:
    qkv = _qkv(1111, 1111, heads=8, dim=dim, dim_v=VALUES[dim])
    slopes = torch.rand(8, device="cuda")
    _check(
        *qkv,
        mask_mod=masks.causal,
        score_mod=scores.alibi(slopes),
        sinks=torch.randn(8, device="cuda"),
        with_lse=True,
    )
    _check(*qkv, score_mod=lambda s, b, h, q_idx, kv_idx: s * slopes[h])


def test_deterministic() -> None:
    given = problem(*_qkv(700, 900), mask_mod=masks.causal, deterministic=True)
    out, lse = backends.forward(given.call, "auto")
    assert lse is not None
    found, again = (
        backends.backward(given.call, "auto", out, lse, given.grad_out, None, frozenset(NAMES))
        for _ in range(2)
    )
    check_gradients(given, found, NAMES)
    for name in NAMES:
        assert torch.equal(getattr(found, name), getattr(again, name)), name


@pytest.mark.parametrize("dim", [192, 256])
def test_what_is_hidden_may_be_nan(dim: int) -> None:
    q, k, v = _qkv(300, 333, dim=dim, dim_v=VALUES[dim])
    given = problem(q, k, v, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx != 7)
    k[:, :, 7], v[:, :, 7] = float("nan"), float("inf")
    out, lse = backends.forward(given.call, "auto")
    assert lse is not None
    found = backends.backward(given.call, "auto", out, lse, given.grad_out, None, frozenset(NAMES))
    k[:, :, 7], v[:, :, 7] = 0.0, 0.0
    check_gradients(given, found, NAMES)
