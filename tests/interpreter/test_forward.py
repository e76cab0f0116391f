"""What a forward kernel does besides its mods: shapes, strides, sinks, empty rows, unseen values."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import flexc
from flexc import masks
from flexc.errors import BackendUnavailable
from tests.oracle import golden

SMALL = {"block_q": 32, "block_kv": 16, "num_warps": 4, "num_stages": 1}


def _check(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **arguments: Any) -> torch.Tensor:
    options = arguments.pop("options", SMALL)
    with torch.no_grad():
        result: tuple[torch.Tensor, torch.Tensor] = flexc.attention(
            q, k, v, return_lse=True, backend="triton", options=options, **arguments
        )
        golden(q, k, v, **arguments).check(*result)
    return result[0]


def _qkv(
    q_len: int, kv_len: int, *, heads: int = 4, kv_heads: int = 2, dim: int = 16, dim_v: int | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(2, heads, q_len, dim),
        torch.randn(2, kv_heads, kv_len, dim),
        torch.randn(2, kv_heads, kv_len, dim if dim_v is None else dim_v),
    )


@pytest.mark.parametrize("dim", [1, 8, 31, 72, 80, 96])
def test_head_dims_are_padded(dim: int) -> None:
    _check(*_qkv(37, 45, dim=dim), mask_mod=masks.causal)


def test_values_of_another_head_dim() -> None:
    _check(*_qkv(40, 50, dim=24, dim_v=40))


@pytest.mark.parametrize(("heads", "kv_heads"), [(12, 2), (7, 1), (28, 4), (3, 3)])
def test_groups_of_any_size(heads: int, kv_heads: int) -> None:
    _check(*_qkv(1, 33, heads=heads, kv_heads=kv_heads))


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 100), (100, 1), (33, 16), (32, 17), (64, 64)])
def test_any_lengths(q_len: int, kv_len: int) -> None:
    _check(*_qkv(q_len, kv_len), mask_mod=masks.sliding_window(9))
    _check(*_qkv(q_len, kv_len))


@pytest.mark.parametrize(("q_len", "kv_len"), [(0, 5), (5, 0), (0, 0)])
def test_empty_lengths(q_len: int, kv_len: int) -> None:
    _check(*_qkv(q_len, kv_len), mask_mod=masks.causal)
    _check(*_qkv(q_len, kv_len))


def test_strides_are_read_in_place() -> None:
    whole = torch.randn(2, 60, 3, 4, 16)  # one projection: q, k and v side by side, sequence-major
    q, k, v = (whole[:, :, i].transpose(1, 2) for i in range(3))
    _check(q, k, v, mask_mod=masks.causal)
    _check(q, k[:, :, :-13], v[:, :, :-13])
    _check(q.expand(2, 4, 60, 16), k[:1].expand(2, 4, 60, 16), v)


@pytest.mark.parametrize("scale", [0.0, -0.3, 2.0])
def test_any_scale(scale: float) -> None:
    _check(*_qkv(40, 40), mask_mod=masks.causal, scale=scale)


def test_sinks() -> None:
    sinks = torch.tensor([0.5, -1.0, float("-inf"), 30.0])
    _check(*_qkv(40, 40), mask_mod=masks.causal, sinks=sinks)
    _check(*_qkv(40, 40), sinks=sinks)
    _check(*_qkv(40, 40), sinks=torch.randn(8)[::2])
    _check(*_qkv(40, 40), sinks=torch.randn(1).expand(4))


def test_rows_and_tiles_without_keys() -> None:
    def late(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (q_idx >= 40) & (kv_idx >= 20) & (q_idx % 3 != 1)

    out = _check(*_qkv(70, 50), mask_mod=late)
    assert (out[:, :, :40] == 0).all()
    _check(*_qkv(70, 50), mask_mod=late, sinks=torch.randn(4))


@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_keys_and_values_that_no_row_sees_have_no_effect(poison: float) -> None:
    q, k, v = _qkv(40, 48)

    def even(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return (kv_idx % 2 == 0) & (q_idx >= kv_idx)

    clean = flexc.attention(q, k, v, mask_mod=even, backend="triton", options=SMALL)
    k[:, :, 1::2] = poison
    v[:, :, 1::2] = poison
    poisoned = flexc.attention(q, k, v, mask_mod=even, backend="triton", options=SMALL)
    assert isinstance(clean, torch.Tensor)
    assert isinstance(poisoned, torch.Tensor)
    assert torch.equal(clean, poisoned)


def test_a_block_listed_as_partial_gives_the_bits_of_a_full_one() -> None:
    q, k, v = _qkv(64, 64)
    lists = {"kv_num_blocks": torch.full((1, 1, 2), 2, dtype=torch.int32)}
    indices = torch.tensor([[[[1, 0], [0, 1]]]], dtype=torch.int32)
    none = torch.zeros(1, 1, 2, dtype=torch.int32)

    def everything(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        return q_idx + kv_idx >= 0

    partial = flexc.BlockMask.from_kv_blocks(
        lists["kv_num_blocks"], indices, BLOCK_SIZE=32, mask_mod=everything, seq_lengths=(64, 64)
    )
    full = flexc.BlockMask.from_kv_blocks(
        none, indices, lists["kv_num_blocks"], indices.flip(-1), BLOCK_SIZE=32, seq_lengths=(64, 64)
    )
    outs = [
        flexc.attention(q, k, v, block_mask=bm, backend="triton", options=SMALL) for bm in (partial, full)
    ]
    assert torch.equal(outs[0], outs[1])


def test_lower_precision_keys_and_values() -> None:
    q, k, v = _qkv(40, 40)
    with torch.no_grad():
        out = flexc.attention(q, k.half(), v.half(), backend="triton", options=SMALL)
        golden(q, k.half().float(), v.half().float()).check(out)


def test_a_map_with_large_blocks_is_walked_in_tiles() -> None:
    q, k, v = _qkv(150, 170)
    block_mask = flexc.create_block_mask(masks.causal, 1, 1, 150, 170, device="cpu", BLOCK_SIZE=(64, 128))
    _check(q, k, v, block_mask=block_mask)


def test_out_is_written_in_place() -> None:
    q, k, v = _qkv(40, 40)
    out = torch.empty(2, 40, 4, 16).transpose(1, 2)
    result = flexc.attention(q, k, v, out=out, backend="triton", options=SMALL)
    assert result is out
    assert torch.equal(out, flexc.attention(q, k, v, backend="triton", options=SMALL))


def test_compiling_while_triton_interprets_is_an_error_that_says_so() -> None:
    with pytest.raises(BackendUnavailable, match="TRITON_INTERPRET is set"):
        flexc.compile(head_dim=40)
