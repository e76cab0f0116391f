"""Every mod of the corpus on the CPU, against the fp64 golden; and its blocks against its dense mask."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import flexc
from flexc.ir.blockmap import BlockMap
from tests.mods import Case, Entry, corpus
from tests.oracle import golden

ENTRIES = [pytest.param(entry, id=name) for name, entry in corpus().items()]
WITH_MASKS = [pytest.param(entry, id=name) for name, entry in corpus().items() if entry.kind != "score"]


def _qkv(case: Case, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return (
        torch.randn(case.batch, case.heads, case.q_len, 16).to(dtype),
        torch.randn(case.batch, case.kv_heads, case.kv_len, 16).to(dtype),
        torch.randn(case.batch, case.kv_heads, case.kv_len, 24).to(dtype),
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("entry", ENTRIES)
def test_as_near_to_the_golden_as_plain_pytorch(entry: Entry, dtype: torch.dtype) -> None:
    case = entry.make()
    q, k, v = _qkv(case, dtype)
    with torch.no_grad():
        result = flexc.attention(
            q, k, v, mask_mod=case.mask, score_mod=case.score, return_lse=True, backend="cpu"
        )
        golden(q, k, v, mask_mod=case.mask, score_mod=case.score).check(*result)


@pytest.mark.parametrize("entry", WITH_MASKS)
def test_blocks_are_those_of_the_dense_mask(entry: Entry) -> None:
    case = entry.make()
    assert case.mask is not None
    shape = (case.batch, case.heads, case.q_len, case.kv_len)
    block_map = flexc.create_block_mask(case.mask, *shape, device="cpu", BLOCK_SIZE=(32, 16)).block_map
    assert isinstance(block_map, BlockMap)
    dense = flexc.create_mask(case.mask, *shape, device="cpu").numpy()
    for b in range(case.batch):
        for h in range(case.heads):
            assert np.array_equal(block_map.kinds(b, h), _kinds(dense[b, h], 32, 16)), (b, h)


def _kinds(mask: np.ndarray, block_q: int, block_kv: int) -> np.ndarray:
    rows = range(0, mask.shape[0], block_q)
    columns = range(0, mask.shape[1], block_kv)
    kinds = np.zeros((len(rows), len(columns)), np.uint8)
    for i, r in enumerate(rows):
        for j, c in enumerate(columns):
            tile = mask[r : r + block_q, c : c + block_kv]
            kinds[i, j] = int(tile.any()) + int(tile.all() and tile.shape[1] == block_kv)
    return kinds
