"""Block masks of any block size from 16, also those that no tile of a kernel divides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex

import flexc
from flexc import BlockMask, masks, refit
from flexc.errors import BlockMaskMismatch
from tests.oracle import golden

TILES = {"block_q": 16, "block_kv": 16, "num_warps": 4, "num_stages": 1}

BACKWARD_TILES = {**TILES, **{f"backward_{name}": value for name, value in TILES.items()}}


def check(block_mask: Any, *, q_len: int = 70, kv_len: int = 90, **arguments: Any) -> None:
    q, k, v = torch.randn(2, 4, q_len, 16), torch.randn(2, 2, kv_len, 16), torch.randn(2, 2, kv_len, 16)
    arguments["block_mask"] = block_mask
    with torch.no_grad():
        result: Any = flexc.attention(q, k, v, return_lse=True, backend="triton", options=TILES, **arguments)
        golden(q, k, v, **arguments).check(*result)


@pytest.mark.parametrize("size", [20, (33, 17), (48, 64)], ids=str)
def test_sizes(size: int | tuple[int, int]) -> None:
    mask = masks.causal & masks.sliding_window(30)
    check(mask.block_mask(2, 4, 70, 90, device="cpu", BLOCK_SIZE=size))
    theirs = torch_flex.create_block_mask(mask, None, None, 70, 90, device="cpu", BLOCK_SIZE=size)
    check(theirs, score_mod=flexc.scores.softcap(5.0))


def lists(batch: int, heads: int, size: tuple[int, int], mask_mod: Any = None) -> BlockMask:
    """Some blocks of every row, that no mask_mod says."""
    rows, columns = -(-70 // size[0]), -(-90 // size[1])
    listed = torch.rand(batch, heads, rows, columns, generator=torch.Generator().manual_seed(0)) < 0.5
    counts = listed.sum(-1, dtype=torch.int32)
    indices = torch.argsort(listed.to(torch.uint8), dim=-1, descending=True, stable=True).to(torch.int32)
    return BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=(70, 90))


@pytest.mark.parametrize("shape", [(1, 1), (2, 4)])
def test_blocks_that_say_more_than_the_mask(shape: tuple[int, int]) -> None:
    check(lists(*shape, (20, 34)))
    check(lists(*shape, (20, 34), masks.causal), mask_mod=masks.sliding_window(50))
    check(lists(*shape, (32, 16), masks.causal))


@pytest.mark.parametrize("size", [(20, 34), (32, 16)], ids=str)
def test_gradients(size: tuple[int, int]) -> None:
    block_mask = lists(1, 4, size, masks.causal)
    scale = torch.tensor(0.5)
    inputs = [torch.randn(2, heads, n, 16) for heads, n in ((4, 70), (2, 90), (2, 90))] + [scale]
    grad = torch.randn(2, 4, 70, 16)
    found = {}
    for backend in ("triton", "reference"):
        q, k, v, factor = (x.clone().requires_grad_() for x in inputs)
        out = flexc.attention(
            q,
            k,
            v,
            block_mask=block_mask,
            score_mod=lambda score, b, h, q_idx, kv_idx, factor=factor: score * factor,
            backend=backend,
            options=BACKWARD_TILES if backend == "triton" else None,
        )
        out.backward(grad)
        found[backend] = (q.grad, k.grad, v.grad, factor.grad)
    for actual, expected in zip(found["triton"], found["reference"], strict=True):
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=2e-5)


def test_a_table_that_would_be_too_large_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refit, "_LARGEST_TABLE", 8)
    with pytest.raises(BlockMaskMismatch, match=r"12 blocks of \(20, 34\), which .*\n.*multiples of 16"):
        check(lists(1, 1, (20, 34)))
    check(masks.causal.block_mask(None, None, 70, 90, device="cpu", BLOCK_SIZE=20))
