"""Block masks of any block size, of flexc and of PyTorch, in kernels."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as torch_flex
from torch.utils import _pytree as pytree

import flexc
from flexc import BlockMask, masks
from flexc.errors import BlockMaskMismatch
from tests.oracle import golden

LENGTHS = (1000, 1300)


def check(block_mask: Any, **arguments: Any) -> None:
    q = torch.randn(2, 4, LENGTHS[0], 64, device="cuda", dtype=torch.bfloat16)
    k, v = (torch.randn(2, 2, LENGTHS[1], 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    with torch.no_grad():
        result: Any = flexc.attention(q, k, v, return_lse=True, block_mask=block_mask, **arguments)
        golden(q, k, v, block_mask=block_mask, **arguments).check(*result)


@pytest.mark.parametrize("size", [16, 20, (33, 17), (48, 96), 100, 128], ids=str)
def test_sizes(size: int | tuple[int, int]) -> None:
    mask = masks.sliding_window(300)
    check(mask.block_mask(None, None, *LENGTHS, device="cuda", BLOCK_SIZE=size))
    check(torch_flex.create_block_mask(mask, None, None, *LENGTHS, device="cuda", BLOCK_SIZE=size))


@pytest.mark.parametrize("size", [(20, 34), (32, 16), (128, 64)], ids=str)
@pytest.mark.parametrize("shape", [(1, 1), (2, 4)], ids=str)
def test_blocks_that_say_more_than_the_mask(shape: tuple[int, int], size: tuple[int, int]) -> None:
    rows, columns = -(-LENGTHS[0] // size[0]), -(-LENGTHS[1] // size[1])
    listed = torch.rand(*shape, rows, columns, device="cuda") < 0.5
    counts = listed.sum(-1, dtype=torch.int32)
    indices = torch.argsort(listed.to(torch.uint8), dim=-1, descending=True, stable=True).to(torch.int32)
    for mask_mod in (None, masks.causal):
        check(
            BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=size, mask_mod=mask_mod, seq_lengths=LENGTHS)
        )


@pytest.mark.parametrize("backend", ["triton", "auto"])
@pytest.mark.parametrize("dim", [64, 128])
def test_partial_or_full_and_the_order_of_the_lists_do_not_change_a_bit(backend: str, dim: int) -> None:
    q, k, v = torch.randn(3, 1, 2, 1024, dim, device="cuda", dtype=torch.bfloat16)
    far = torch.full((2,), 2000, dtype=torch.int32, device="cuda")
    results = []
    for order, full in (
        ([0, 1, 2, 4, 6, 7], 0),
        ([7, 0, 4, 2, 6, 1], 0),
        ([0, 1, 2, 4, 6, 7], 6),
        ([4, 7, 0, 6, 1, 2], 3),
    ):
        split = len(order) - full
        lists = [torch.zeros(1, 1, 8, 8, dtype=torch.int32, device="cuda") for _ in range(2)]
        for target, blocks in zip(lists, (order[:split], order[split:]), strict=True):
            target[..., : len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        counts = [torch.full((1, 1, 8), n, dtype=torch.int32, device="cuda") for n in (split, full)]
        block_mask = BlockMask.from_kv_blocks(
            counts[0], lists[0], counts[1], lists[1], BLOCK_SIZE=128,
            mask_mod=lambda b, h, q_idx, kv_idx: kv_idx < far[h], seq_lengths=(1024, 1024),
        )  # fmt: skip
        results.append(flexc.attention(q, k, v, block_mask=block_mask, return_lse=True, backend=backend))
    for found in results[1:]:
        assert all(map(torch.equal, found, results[0]))


def window(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
    return (q_idx >= kv_idx) & (q_idx - kv_idx < 300)


def test_a_mask_on_the_device_is_printed_copied_and_scheduled() -> None:
    mask = flexc.create_block_mask(window, None, None, *LENGTHS, device="cuda")
    host = flexc.create_block_mask(window, None, None, *LENGTHS, device="cpu")
    assert str(mask) == str(host)
    assert mask.schedule().order.tolist() == host.schedule().order.tolist()
    copies = (
        copy.deepcopy(mask),
        pickle.loads(pickle.dumps(mask)),
        pytree.tree_map_only(torch.Tensor, torch.clone, mask),
    )
    for other in copies:
        assert other.device.type == "cuda"
        assert torch.equal(other.kv_num_blocks, mask.kv_num_blocks)
        assert torch.equal(other.kv_indices, mask.kv_indices)


def test_a_compiled_kernel_refuses_blocks_that_its_tiles_do_not_divide() -> None:
    q = torch.randn(1, 2, 512, 64, device="cuda", dtype=torch.bfloat16)
    options = {"blocks": "map", "block_q": 128, "block_kv": 64}
    kernel = flexc.compile(
        mask_mod=masks.causal, head_dim=64, dtype=torch.bfloat16, backward=False, options=options
    )
    made = [masks.causal.block_mask(None, None, 512, 512, device="cuda", BLOCK_SIZE=n) for n in (64, 128)]
    with pytest.raises(BlockMaskMismatch, match=r"blocks of \(64, 64\), .* tiles of \(128, 64\)"):
        kernel(q, q, q, block_mask=made[0])
    out, _ = kernel(q, q, q, block_mask=made[1])
    golden(q, q, q, mask_mod=masks.causal).check(out)
