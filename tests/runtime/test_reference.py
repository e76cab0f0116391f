"""The dense reference against the definition written out, and PyTorch's own attention."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch.nn.functional import scaled_dot_product_attention

import flexc


def _qkv(
    batch: int, heads: int, kv_heads: int, q_len: int, kv_len: int, dim: int, dim_v: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(batch, heads, q_len, dim, dtype=torch.float64),
        torch.randn(batch, kv_heads, kv_len, dim, dtype=torch.float64),
        torch.randn(batch, kv_heads, kv_len, dim if dim_v is None else dim_v, dtype=torch.float64),
    )


def _attention(*args: Any, **options: Any) -> Any:
    return flexc.attention(*args, backend="reference", **options)


def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return q_idx >= kv_idx


def nothing_for_odd_rows(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx % 2 == 0) & (kv_idx <= q_idx)


def test_plain_and_causal_equal_pytorch() -> None:
    q, k, v = _qkv(2, 4, 2, 37, 37, 16, 24)
    for mask in (None, causal):
        out = _attention(q, k, v, mask_mod=mask)
        expected = scaled_dot_product_attention(q, k, v, is_causal=mask is causal, enable_gqa=True)
        torch.testing.assert_close(out, expected)


def test_score_mod_then_mask_then_sinks() -> None:
    q, k, v = _qkv(1, 2, 2, 9, 11, 8)
    sinks = torch.randn(2, dtype=torch.float64)

    def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return 3 * (score / 3).tanh() + (h + 1) * (kv_idx - q_idx) * 0.25

    out, lse = _attention(q, k, v, mask_mod=causal, score_mod=score, sinks=sinks, scale=0.3, return_lse=True)
    h, i, j = torch.arange(2).view(2, 1, 1), torch.arange(9).view(9, 1), torch.arange(11)
    scores = 3 * (q @ k.transpose(-1, -2) * 0.3 / 3).tanh() + (h + 1) * (j - i) * 0.25
    scores = scores.masked_fill(i < j, -math.inf)
    with_sink = torch.cat([scores, sinks.view(1, 2, 1, 1).expand(1, 2, 9, 1)], -1)
    torch.testing.assert_close(out, with_sink.softmax(-1)[..., :-1] @ v)
    torch.testing.assert_close(lse, with_sink.logsumexp(-1))


def test_rows_without_keys_are_zero_and_their_lse_is_minus_infinity_or_the_sink() -> None:
    q, k, v = _qkv(1, 2, 1, 8, 8, 4)
    out, lse = _attention(q, k, v, mask_mod=nothing_for_odd_rows, return_lse=True)
    assert (out[:, :, 1::2] == 0).all()
    assert (lse[:, :, 1::2] == -math.inf).all()
    assert out.isfinite().all()
    sinks = torch.tensor([0.5, -2.0])
    out, lse = _attention(q, k, v, mask_mod=nothing_for_odd_rows, sinks=sinks, return_lse=True)
    assert (out[:, :, 1::2] == 0).all()
    assert (lse[:, :, 1::2] == sinks.double().view(1, 2, 1)).all()


def test_rows_without_keys_have_zero_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in _qkv(1, 2, 1, 8, 8, 4))
    out, lse = _attention(q, k, v, mask_mod=nothing_for_odd_rows, return_lse=True)
    (out.sum() + lse[:, :, ::2].sum()).backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()
    assert q.grad is not None
    assert (q.grad[:, :, 1::2] == 0).all()
    assert (q.grad[:, :, ::2] != 0).any()


def test_gradients_equal_finite_differences() -> None:
    q, k, v = (x.requires_grad_() for x in _qkv(1, 2, 1, 5, 6, 4, 3))
    sinks = torch.randn(2, dtype=torch.float64, requires_grad=True)
    slopes = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def run(q: Any, k: Any, v: Any, sinks: Any, slopes: Any) -> Any:
        def score(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return score + slopes[h] * (kv_idx - q_idx)

        return _attention(q, k, v, mask_mod=causal, score_mod=score, sinks=sinks, return_lse=True)

    assert torch.autograd.gradcheck(run, (q, k, v, sinks, slopes))


@pytest.mark.parametrize("poison", [math.nan, math.inf])
def test_keys_and_values_that_no_row_sees_have_no_effect(poison: float) -> None:
    q, k, v = _qkv(1, 2, 2, 6, 10, 4)

    def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx <= q_idx

    expected = _attention(q, k, v, mask_mod=window)
    k[:, :, 6:] = poison
    v[:, :, 6:] = poison
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    out = _attention(q, k, v, mask_mod=window)
    torch.testing.assert_close(out, expected)
    out.sum().backward()
    for x in (q, k, v):
        assert x.grad is not None
        assert x.grad.isfinite().all()


def test_a_value_that_some_rows_see_spoils_only_these() -> None:
    q, k, v = _qkv(1, 1, 1, 6, 6, 4)
    expected = _attention(q, k, v, mask_mod=causal)
    v[:, :, 4, 2] = math.nan
    out = _attention(q, k, v, mask_mod=causal)
    torch.testing.assert_close(out[:, :, :4], expected[:, :, :4])
    assert out[:, :, 4:, 2].isnan().all()
    torch.testing.assert_close(out[:, :, 4:, [0, 1, 3]], expected[:, :, 4:, [0, 1, 3]])


def test_empty_lengths() -> None:
    q, k, v = _qkv(2, 2, 1, 3, 0, 4, 5)
    out, lse = _attention(q, k, v, return_lse=True)
    assert out.shape == (2, 2, 3, 5)
    assert (out == 0).all()
    assert (lse == -math.inf).all()
    q, k, v = _qkv(2, 2, 1, 0, 3, 4, 5)
    out, lse = _attention(q, k, v, return_lse=True)
    assert out.shape == (2, 2, 0, 5)
    assert lse.shape == (2, 2, 0)


def test_low_precision_is_computed_in_fp32_and_out_is_written_in_place() -> None:
    q, k, v = (x.bfloat16() for x in _qkv(1, 2, 2, 20, 20, 16))
    out = torch.empty(1, 2, 20, 16, dtype=torch.bfloat16)
    result, lse = _attention(q, k, v, mask_mod=causal, out=out, return_lse=True)
    assert result.data_ptr() == out.data_ptr()
    assert lse.dtype is torch.float32
    wide = _attention(q.float(), k.float(), v.float(), mask_mod=causal)
    torch.testing.assert_close(out, wide.bfloat16(), rtol=0, atol=0)
