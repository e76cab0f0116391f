"""What a forward kernel must do besides its mods, on the GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexc
from flexc import build, masks
from tests.gpu.inputs import random_qkv
from tests.oracle import golden


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
    with torch.no_grad():
        result: tuple[torch.Tensor, torch.Tensor] = flexc.attention(q, k, v, return_lse=True, **arguments)
        golden(q, k, v, **arguments).check(*result)
    return result[0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [1, 8, 31, 72, 80, 96, 128, 160, 256, 512])
def test_head_dims(dim: int, dtype: torch.dtype) -> None:
    _check(*random_qkv(200, 333, dim=dim, dtype=dtype), mask_mod=masks.causal)
    _check(*random_qkv(200, 333, dim=dim, dtype=dtype))


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("mask", [None, masks.causal], ids=["none", "causal"])
@pytest.mark.parametrize("sizes", [(1.0, 1.0, 1.0), (6.0, 3.0, 1.0), (1e10, 1e-10, 1e6)], ids=str)
def test_single_precision_of_any_size(dim: int, mask: Any, sizes: tuple[float, ...]) -> None:
    q, k, v = random_qkv(1111, 1500, dim=dim, dtype=torch.float32)
    _check(q * sizes[0], k * sizes[1], v * sizes[2], mask_mod=mask)
    _check(q * sizes[0], k * sizes[1] + sizes[1], v * sizes[2] + 3 * sizes[2], mask_mod=mask)


def test_inf_and_nan_are_where_plain_products_have_them() -> None:
    q, k, v = random_qkv(300, 333, dtype=torch.float32)
    v[0, 0, 5, 3], v[0, 0, 7, 4], v[0, 0, 9, 5] = float("inf"), -float("inf"), float("nan")
    q[..., 2] = q[..., 2].abs() + 0.1
    k[0, 0, 11, 2] = -float("inf")
    _check(q, k, v)


@pytest.mark.parametrize(("dim", "dim_v"), [(64, 128), (192, 128), (128, 64), (576 - 64, 500)])
def test_values_of_another_head_dim(dim: int, dim_v: int) -> None:
    _check(*random_qkv(300, 333, dim=dim, dim_v=dim_v), mask_mod=masks.causal)


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 2), (7, 1), (28, 4), (3, 3)])
def test_groups_of_any_size(heads: int, kv_heads: int) -> None:
    _check(*random_qkv(1, 1000, heads=heads, kv_heads=kv_heads))
    _check(*random_qkv(130, 1000, heads=heads, kv_heads=kv_heads), mask_mod=masks.prefix_lm(900))


@pytest.mark.parametrize(
    ("q_len", "kv_len"), [(1, 1), (1, 1000), (1000, 1), (129, 63), (127, 65), (0, 5), (5, 0), (10000, 10000)]
)
def test_any_lengths(q_len: int, kv_len: int) -> None:
    _check(*random_qkv(q_len, kv_len, heads=2, kv_heads=1), mask_mod=masks.sliding_window(77))
    _check(*random_qkv(q_len, kv_len, heads=2, kv_heads=1))


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale(scale: float) -> None:
    _check(*random_qkv(140, 140), mask_mod=masks.causal, scale=scale)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_sinks(dtype: torch.dtype) -> None:
    sinks = torch.tensor([0.5, -1.0, float("-inf"), 30.0], device="cuda", dtype=dtype)
    _check(*random_qkv(140, 140), mask_mod=masks.causal, sinks=sinks)
    _check(*random_qkv(140, 140), sinks=sinks)
    _check(*random_qkv(140, 140), sinks=sinks.repeat_interleave(2)[::2])


def test_rows_and_tiles_without_keys() -> None:
    def late(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= 200) & (kv_idx >= 20) & (q_idx % 3 != 1)

    out = _check(*random_qkv(333, 250), mask_mod=late)
    assert (out[:, :, :200] == 0).all()
    _check(*random_qkv(333, 250), mask_mod=late, sinks=torch.randn(4, device="cuda"))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_keys_and_values_that_no_row_sees_have_no_effect(poison: float) -> None:
    q, k, v = random_qkv(300, 333)

    def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx % 2 == 0) & (q_idx >= kv_idx)

    expected = golden(q, k, v, mask_mod=even)
    k[:, :, 1::2] = poison
    v[:, :, 1::2] = poison
    expected.check(flexc.attention(q, k, v, mask_mod=even))


def test_strides_are_read_in_place() -> None:
    whole = torch.randn(2, 300, 3, 4, 64, device="cuda", dtype=torch.bfloat16)
    q, k, v = (whole[:, :, i].transpose(1, 2) for i in range(3))
    _check(q, k, v, mask_mod=masks.causal)
    _check(q, k[:, :, :-128], v[:, :, :-128])
    _check(q[..., 1:33], k[..., 3:35], v[..., 5:37])  # addresses that are no multiples of 16 bytes
    _check(q.transpose(2, 3).contiguous().transpose(2, 3), k, v)  # the last dimension is not contiguous


def test_a_repeated_call_follows_other_strides_and_alignments() -> None:
    base = torch.randn(2, 4, 200, 72, device="cuda", dtype=torch.bfloat16)
    for start in (0, 8, 1, 3, 0):
        q = base[..., start : start + 64]
        _check(q, q, q, mask_mod=masks.causal)
        _check(q, q, q, mask_mod=masks.causal)


def test_more_than_2_to_the_31_elements() -> None:
    heads, dim = 16, 128
    length = 2**31 // (heads * dim) + 1000
    k = torch.empty(1, length, heads, dim, device="cuda", dtype=torch.bfloat16).normal_().transpose(1, 2)
    q = torch.randn(1, heads, 70, dim, device="cuda", dtype=torch.bfloat16)

    def last(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return kv_idx >= length - 500 + q_idx

    tail = k[:, :, -500:]
    expected = golden(q, tail, tail, mask_mod=lambda b, h, q_idx, kv_idx: kv_idx >= q_idx)
    expected.check(flexc.attention(q, k, k, mask_mod=last))


def test_masked_lanes_do_not_read_out_of_range() -> None:
    bias = torch.randn(64, 64, 256, 9, device="cuda")
    q = torch.randn(64, 64, 256, 16, device="cuda", dtype=torch.bfloat16)

    def relative(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score + bias[b, h, q_idx, q_idx - kv_idx]

    out = flexc.attention(q, q, q, score_mod=relative, mask_mod=masks.sliding_window(9))
    torch.cuda.synchronize()
    assert out.isfinite().all()
    few = (slice(0, 2), slice(0, 2))
    bias = bias[few]
    _check(q[few], q[few], q[few], score_mod=relative, mask_mod=masks.sliding_window(9))


def test_several_0_dim_tensors_on_the_cpu() -> None:
    low, high, bias = torch.tensor(3), torch.tensor(90), torch.tensor(0.5)

    def band(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx - kv_idx >= low) & (q_idx - kv_idx < high)

    def shifted(score: Any, b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return score * bias

    for _ in range(2):
        _check(*random_qkv(140, 140), mask_mod=band, score_mod=shifted)


def test_autocast_computes_in_its_dtype() -> None:
    q, k, v = random_qkv(100, 100)
    with torch.autocast("cuda", torch.bfloat16):
        out = flexc.attention(q.float(), k, v)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, flexc.attention(q, k, v))


def test_lower_precision_keys_and_values() -> None:
    q, k, v = random_qkv(140, 140, dtype=torch.float32)
    out = flexc.attention(q, k.bfloat16(), v.bfloat16())
    golden(q, k.bfloat16().float(), v.bfloat16().float()).check(out)


def test_block_masks_of_any_size_of_pytorch_too() -> None:
    from torch.nn.attention.flex_attention import create_block_mask

    def causal(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx >= kv_idx

    q, k, v = random_qkv(500, 500)
    plain = golden(q, k, v, mask_mod=causal)
    for block in (16, 48, 64, 128, 256):
        theirs = create_block_mask(causal, None, None, 500, 500, device="cuda", BLOCK_SIZE=block)
        ours = flexc.create_block_mask(causal, None, None, 500, 500, device="cuda", BLOCK_SIZE=block)
        for block_mask in (theirs, ours):
            plain.check(flexc.attention(q, k, v, block_mask=block_mask))


def test_what_changes_only_data_or_lengths_compiles_nothing() -> None:
    def windows(width: int, offsets: torch.Tensor) -> Any:
        def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
            return (q_idx >= kv_idx) & (q_idx - kv_idx < width + offsets[b])

        return mask

    before = None
    for step in range(1, 40):
        batch = 2 if step % 5 else 1
        q, k, v = (x[:batch] for x in random_qkv(1 + step % 3, 128 + step))
        offsets = torch.randint(0, 9, (batch,), device="cuda")
        _check(q, k, v, mask_mod=windows(step, offsets))
        before = build.compilations if before is None else before
    assert build.compilations == before


def test_values_written_in_place_are_seen() -> None:
    documents = torch.zeros(300, dtype=torch.int32, device="cuda")

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return documents[q_idx] == documents[kv_idx]

    q, k, v = random_qkv(300, 300)
    for cut in (100, 150, 299):
        _check(q, k, v, mask_mod=mask)
        _check(q, k, v, mask_mod=mask)
        documents[cut:] += 1
    with torch.inference_mode():
        documents = torch.zeros(300, dtype=torch.int32, device="cuda")
        for cut in (100, 200):
            _check(q, k, v, mask_mod=mask)
            documents[cut:] += 1
