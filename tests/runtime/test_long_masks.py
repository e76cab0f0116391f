"""Masks of a million tokens: block maps, lists of rows and pictures of them at a bounded cost."""

from __future__ import annotations

import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flexc import create_block_mask, masks
from flexc.ir.blockmap import BlockMap

LENGTH = 1 << 20
MEGABYTE = 1 << 20


def documents(count: int, length: int) -> torch.Tensor:
    """Ascending document numbers, of uneven documents."""
    cuts = torch.randperm(length - 1, generator=torch.Generator().manual_seed(0))[: count - 1] + 1
    starts = torch.zeros(length, dtype=torch.int32)
    starts[cuts] = 1
    return starts.cumsum(0, dtype=torch.int32)


def packed() -> Any:
    ids = documents(1000, LENGTH)
    return lambda b, h, q_idx, kv_idx: (ids[q_idx] == ids[kv_idx]) & (q_idx >= kv_idx)


def prefix_in_documents_and_window() -> Any:
    same = masks.document(documents(1000, LENGTH))
    return masks.prefix_lm(2000) & same & masks.sliding_window(4096)


LONG: dict[str, tuple[Callable[[], Any], int, int]] = {
    "causal": (lambda: masks.causal, LENGTH, 100),
    "sliding window": (lambda: masks.sliding_window(4096), LENGTH, 100),
    "packed documents": (packed, LENGTH, 100),
    "prefix, documents and window": (prefix_in_documents_and_window, LENGTH, 100),
    "chunks": (lambda: masks.chunked(3000), LENGTH, 100),
    "neighbourhood": (lambda: masks.natten2d(512, 512, 13), 512 * 512, 500),
    "sliding tile": (lambda: masks.sliding_tile_2d(512, 512, (16, 16), (3, 3)), 512 * 512, 500),
}


def measured(mask: Any, length: int) -> tuple[BlockMap, float]:
    """The map, and the most megabytes that were held at once while it was found."""
    tracemalloc.start()
    try:
        block_map = create_block_mask(mask, None, None, length, length, device="cpu").block_map
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert isinstance(block_map, BlockMap)
    return block_map, peak / MEGABYTE


@pytest.mark.parametrize("name", LONG)
def test_maps_take_little_memory_and_few_evaluations(name: str) -> None:
    make, length, megabytes = LONG[name]
    block_map, peak = measured(make(), length)
    assert peak < megabytes
    assert block_map.decided["exact"] == 0
    assert block_map.decided["sample"] == block_map.counts()[1]
    assert block_map.runs.nbytes < 2 * MEGABYTE


def test_a_map_on_the_host_loads_no_heavy_packages() -> None:
    """The first map of a process is found in a fraction of the time that sympy takes to load."""
    code = (
        "import sys, flexc; flexc.masks.causal.block_mask(None, None, 1 << 20, 1 << 20, device='cpu'); "
        "assert not {'sympy', 'triton', 'jinja2', 'matplotlib'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parents[2])


def test_counts_of_long_masks() -> None:
    causal = create_block_mask(masks.causal, None, None, LENGTH, LENGTH, device="cpu").block_map
    assert isinstance(causal, BlockMap)
    blocks = LENGTH // 128
    assert causal.counts() == (blocks * (blocks - 1) // 2, blocks, blocks * (blocks - 1) // 2)
    ids = documents(1000, LENGTH)
    packed_map = create_block_mask(masks.document(ids), None, None, LENGTH, LENGTH, device="cpu").block_map
    assert isinstance(packed_map, BlockMap)
    first, last = ids[::128].long(), ids[127::128].long()  # of each block; ids ascend
    starts = torch.searchsorted(last, first)
    ends = torch.searchsorted(first, last, right=True)
    assert sum(packed_map.counts()[1:]) == int((ends - starts).sum())
    lone = ids[::128] == ids[127::128]
    sizes = torch.bincount(ids[::128][lone])
    assert packed_map.counts()[2] == int((sizes**2).sum())


def test_open_masks_take_memory_by_their_runs() -> None:
    """Nearly all tiles of a long dilated mask are partial and side by side: few runs, and little to hold."""
    block_map, peak = measured(masks.dilated(LENGTH, 3), LENGTH // 8)
    assert block_map.counts()[1] > 500_000
    assert len(block_map.runs) <= block_map.rows
    assert peak < 100


def test_documents_in_any_order_cost_by_their_open_tiles() -> None:
    ids = documents(300, LENGTH // 16).view(-1, 64)
    order = torch.randperm(len(ids), generator=torch.Generator().manual_seed(0))
    block_map, peak = measured(masks.document(ids[order].reshape(-1)), LENGTH // 16)
    assert peak < 100
    assert block_map.decided["exact"] < block_map.grid.tiles / 4
