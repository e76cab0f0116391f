"""Block masks of real masks against the dense mask: exact at any lengths and block sizes."""

from __future__ import annotations

import math
import re
from typing import Any

import numpy as np
import pytest
import torch

import flexc
from flexc import create_block_mask, create_mask, masks
from flexc.errors import MaskTooOpen
from flexc.ir.blockmap import BlockMap
from flexc.ir.ledger import DEFAULT_BUDGET
from tests.ir.test_blockmap import brute_kinds, check_form, kinds_of
from tests.mods import corpus

BLOCKS = [(16, 16), (20, 48), (64, 32), (128, 96)]
MASKS = [name for name, entry in corpus().items() if entry.kind != "score"]


def assert_exact(mask: Any, batch: int, heads: int, lengths: tuple[int, int], blocks: tuple[int, int]) -> Any:
    """The map has every tile's kind, and the transpose too; the map."""
    block_mask = create_block_mask(mask, batch, heads, *lengths, device="cpu", BLOCK_SIZE=blocks)
    block_map = block_mask.block_map
    assert isinstance(block_map, BlockMap)
    check_form(block_map)
    dense = create_mask(mask, batch, heads, *lengths, device="cpu").numpy()
    expected = brute_kinds(dense, *blocks)
    np.testing.assert_array_equal(kinds_of(block_map, batch, heads), expected)
    assert sum(block_map.decided.values()) == block_map.grid.tiles
    return block_map


@pytest.mark.parametrize("name", MASKS)
def test_corpus(name: str) -> None:
    entry = corpus()[name]
    settings = [None, (131, 75), (1, 90), (75, 200)] if entry.scales else [None]
    for seed, lengths in enumerate(settings):
        case = entry.make(seed=seed, lengths=lengths)
        for blocks in BLOCKS:
            assert_exact(case.mask, case.batch, case.heads, (case.q_len, case.kv_len), blocks)


def morton(bits: int) -> Any:
    """The row and column of a position in Morton order, by shifting bits together."""

    def every_other(x: Any) -> Any:
        return sum(((x >> (2 * i)) & 1) << i for i in range(bits))

    return lambda x: (every_other(x >> 1), every_other(x))


def morton_by_masks(x: Any) -> tuple[Any, Any]:
    def every_other(x: Any) -> Any:
        x = x & 0x55555555
        x = (x | (x >> 1)) & 0x33333333
        x = (x | (x >> 2)) & 0x0F0F0F0F
        x = (x | (x >> 4)) & 0x00FF00FF
        return (x | (x >> 8)) & 0xFFFF

    return every_other(x >> 1), every_other(x)


def tiled(width: int, tile: int) -> Any:
    """The row and column of a position when tiles of `tile` x `tile` lie one after another."""

    def place(x: Any) -> tuple[Any, Any]:
        which, inner = x // (tile * tile), x % (tile * tile)
        across = width // tile
        return which // across * tile + inner // tile, which % across * tile + inner % tile

    return place


def near(place: Any, reach: int) -> Any:
    """Positions whose rows and columns differ by at most `reach`."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        (q_row, q_column), (kv_row, kv_column) = place(q_idx), place(kv_idx)
        return ((q_row - kv_row).abs() <= reach) & ((q_column - kv_column).abs() <= reach)

    return mask


def permuted(mask: Any, order: torch.Tensor) -> Any:
    return lambda b, h, q_idx, kv_idx: mask(b, h, order[q_idx], order[kv_idx])


def radial(tokens: int) -> Any:
    """Video (Li et al., 2025): the window within a frame halves as the distance of frames doubles."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        frames = (q_idx // tokens - kv_idx // tokens).abs()
        window = torch.where(frames < 1, tokens, tokens >> frames.clamp(max=20))
        return (q_idx % tokens - kv_idx % tokens).abs() < window

    return mask


def spatial_and_temporal(tokens: int) -> Any:
    """Video (Xi et al., 2025): even heads see neighbouring frames, odd ones the same places."""

    def mask(b: Any, h: Any, q_idx: Any, kv_idx: Any) -> Any:
        spatial = (q_idx // tokens - kv_idx // tokens).abs() <= 1
        temporal = (q_idx % tokens // 16 - kv_idx % tokens // 16).abs() <= 1
        return torch.where(h % 2 == 0, spatial, temporal) | (kv_idx < tokens)

    return mask


def by_a_permutation() -> Any:
    rows, columns = torch.arange(32 * 32) // 32, torch.arange(32 * 32) % 32
    order = torch.argsort((rows // 8 * 4 + columns // 8) * 64 + rows % 8 * 8 + columns % 8).to(torch.int32)
    return permuted(near(lambda x: (x // 32, x % 32), 5), order)


STRUCTURES: dict[str, tuple[Any, int]] = {
    "morton": (near(morton(5), 4), 1024),
    "morton by masks": (near(morton_by_masks, 4), 1024),
    "tiled": (near(tiled(32, 8), 4), 1024),
    "permutation": (by_a_permutation(), 1024),
    "shuffled causal": (permuted(masks.causal, torch.randperm(600)), 600),
    "radial": (radial(77), 770),
    "video heads": (spatial_and_temporal(77), 770),
    "natten2d": (masks.natten2d(24, 32, (7, 5)), 768),
    "natten3d": (masks.natten3d(6, 10, 12, 3), 720),
    "sliding tile 2d": (masks.sliding_tile_2d(24, 32, (8, 8), (3, 3)), 768),
    "sliding tile 3d": (masks.sliding_tile_3d(6, 8, 16, (2, 4, 4), (1, 1, 3)), 768),
}


@pytest.mark.parametrize("blocks", [(64, 64), (48, 80), (128, 16)], ids=str)
@pytest.mark.parametrize("name", STRUCTURES)
def test_structures_of_two_and_three_dimensions(name: str, blocks: tuple[int, int]) -> None:
    mask, length = STRUCTURES[name]
    assert_exact(mask, 1, 2, (length, length), blocks)


@pytest.mark.parametrize("name", ["morton", "morton by masks", "tiled", "permutation", "sliding tile 2d"])
def test_orders_of_positions_leave_few_tiles_open(name: str) -> None:
    """What reads one index is tabulated, so that analysis decides all but the tiles on an edge."""
    mask, length = STRUCTURES[name]
    block_map = assert_exact(mask, 1, 1, (length, length), (64, 64))
    assert block_map.decided["sample"] + block_map.decided["exact"] <= block_map.counts()[1]


def scattered(length: int) -> Any:
    """Equal ids at random places: nothing but looking finds them."""
    ids = torch.randint(0, length * 8, (length,), generator=torch.Generator().manual_seed(0))
    return lambda b, h, q_idx, kv_idx: ids[q_idx] == ids[kv_idx]


def test_a_mask_that_is_too_open_says_what_it_would_cost() -> None:
    mask = flexc.mask_mod(scattered(4096))
    with pytest.raises(
        MaskTooOpen, match=r"e\+0\d evaluations .* s and .* MB: .* budget is 1e\+05 pairs"
    ) as e:
        mask.block_mask(None, None, 4096, 4096, device="cpu", budget=1e5)
    assert "budget=" in str(e.value.hint)
    assert isinstance(e.value, ValueError)
    block_map = mask.block_mask(None, None, 4096, 4096, device="cpu", budget=math.inf).block_map
    assert isinstance(block_map, BlockMap)
    assert block_map.decided["exact"] > 500
    wanted = int(re.findall(r"budget=(\d+)", str(e.value))[0])
    again = create_block_mask(scattered(4096), None, None, 4096, 4096, device="cpu", budget=wanted)
    np.testing.assert_array_equal(again.block_map.kinds(), block_map.kinds())  # type: ignore[union-attr]


def test_the_budget_is_for_what_analysis_leaves_open() -> None:
    mask = masks.causal & masks.sliding_window(5000)
    mask.block_mask(None, None, 100_000, 100_000, device="cpu", budget=200_000)
    assert DEFAULT_BUDGET >= 2**35
