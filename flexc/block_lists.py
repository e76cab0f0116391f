"""Between run-length block maps and PyTorch's lists of blocks, and selections of a map's rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
import torch

from flexc.errors import InvalidBlockMask
from flexc.ir.blockmap import BlockMap, TileKind, from_segments
from flexc.ir.runs import Segments, TileGrid

LEAST_BLOCK_SIZE = 16
Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True, slots=True)
class BlockLists:
    """PyTorch's form: how many blocks a row has (..., rows) and which (..., rows, blocks), both int32.

    Positions after the number of blocks in a row hold the blocks that are not listed, ascending.
    """

    counts: torch.Tensor
    indices: torch.Tensor


def block_sizes(block_size: int | tuple[int, int]) -> tuple[int, int]:
    """Block sizes of queries and keys from one number or two.

    Raises:
        InvalidBlockMask: one is below 16.
    """
    block_q, block_kv = (block_size, block_size) if isinstance(block_size, int) else block_size
    if min(block_q, block_kv) < LEAST_BLOCK_SIZE:
        raise InvalidBlockMask(
            f"BLOCK_SIZE is {block_size}", hint=f"blocks have at least {LEAST_BLOCK_SIZE} queries and keys"
        )
    return block_q, block_kv


def dense_kinds(block_map: BlockMap) -> Array:
    """The kind of every tile: uint8 (batch of the map, heads of the map, q blocks, kv blocks)."""
    kinds = np.zeros((block_map.grid.rows, block_map.kv_blocks), np.uint8)
    row, first, end, kind = block_map.segments()
    of_tile, column = _spread(first, end)
    kinds[row[of_tile], column] = kind[of_tile]
    return kinds.reshape(block_map.batch, block_map.heads, block_map.q_blocks, block_map.kv_blocks)


def visited_blocks(block_map: BlockMap) -> int:
    """How many tiles are not empty, over all batches and heads of the map."""
    return int((block_map.runs[:, 1].astype(np.int64) - block_map.runs[:, 0]).sum())


def to_lists(listed: Array) -> BlockLists:
    """The tiles that are True in a bool array (..., rows, columns), as lists."""
    tiles = torch.from_numpy(listed)
    counts = tiles.sum(-1, dtype=torch.int32)
    indices = torch.argsort(tiles.to(torch.uint8), dim=-1, descending=True, stable=True)
    return BlockLists(counts, indices.to(torch.int32))


def from_lists(partial: BlockLists, full: BlockLists | None, extent: TileGrid) -> BlockMap:
    """The map of tiles listed in any order, for the lengths of `extent`. A tile in both lists is full.

    Raises:
        InvalidBlockMask: shapes that do not fit each other or the lengths, or blocks out of range.
    """
    _check_lists(partial, "kv", extent)
    parts = [_entries(partial, TileKind.PARTIAL, "kv_indices", extent)]
    if full is not None:
        _check_lists(full, "full_kv", extent)
        if full.counts.shape != partial.counts.shape:
            raise InvalidBlockMask(
                f"kv_num_blocks is {tuple(partial.counts.shape)} and full_kv_num_blocks "
                f"{tuple(full.counts.shape)}",
                hint="both list blocks of the same batches, heads and query blocks",
            )
        parts.append(_entries(full, TileKind.FULL, "full_kv_indices", extent))
    row, column, kind = (np.concatenate(part) for part in zip(*parts, strict=True))
    order = np.lexsort((-kind, column, row))  # full before partial, so that it is the one that stays
    row, column, kind = row[order], column[order], kind[order]
    fresh = np.ones(len(row), bool)
    fresh[1:] = (row[1:] != row[:-1]) | (column[1:] != column[:-1])
    row, column, kind = row[fresh], column[fresh], kind[fresh]
    batch, heads = partial.counts.shape[:2]
    grid = replace(extent, batch=batch, heads=heads)
    return from_segments(grid, Segments(row, column, column + 1, kind))


def select_rows(block_map: BlockMap, rows: Array, extent: TileGrid) -> BlockMap:
    """The map whose row (b, h, block) is row `rows[b, h, block]` of `block_map`, cropped to `extent`.

    `extent` has `rows.shape[2]` query blocks and at most as many kv blocks as the map; its batch and heads
    are those of `rows`.
    """
    flat = rows.reshape(-1).astype(np.int64)
    starts = block_map.offsets[flat].astype(np.int64)
    counts = block_map.offsets[flat + 1] - starts
    of_row, position = _spread(starts, starts + counts)
    first, end, kind = block_map.runs[position].T.astype(np.int64)
    end = np.minimum(end, extent.kv_blocks)
    kept = first < end
    grid = replace(extent, batch=rows.shape[0], heads=rows.shape[1])
    return from_segments(grid, Segments(of_row[kept], first[kept], end[kept], kind[kept]))


def rank_tiles(listed: Array, descending: bool) -> Array:
    """The rank of each listed tile among those of its row (PyTorch's dQ write order), int32, same shape."""
    before = np.cumsum(listed, -1, dtype=np.int32) - listed
    if descending:
        before = listed.sum(-1, keepdims=True, dtype=np.int32) - 1 - before
    return before.astype(np.int32)


def _check_lists(lists: BlockLists, name: str, extent: TileGrid) -> None:
    counts, indices = lists.counts, lists.indices
    if indices.dim() != 4 or counts.shape != indices.shape[:3]:
        raise InvalidBlockMask(
            f"{name}_num_blocks is {tuple(counts.shape)} and {name}_indices {tuple(indices.shape)}",
            hint="pass shapes (B, H, q blocks) and (B, H, q blocks, kv blocks)",
        )
    if counts.shape[2] != extent.q_blocks:
        raise InvalidBlockMask(
            f"{name}_num_blocks has {counts.shape[2]} query blocks; a q length of {extent.q_len} in blocks "
            f"of {extent.block_q} has {extent.q_blocks}",
            hint="pass seq_lengths and BLOCK_SIZE that agree with the lists",
        )


def _entries(lists: BlockLists, kind: TileKind, name: str, extent: TileGrid) -> tuple[Array, Array, Array]:
    """Row, column and kind of every listed tile."""
    indices = lists.indices.detach().cpu().numpy().reshape(-1, lists.indices.shape[-1]).astype(np.int64)
    counts = lists.counts.detach().cpu().numpy().reshape(-1, 1)
    row, position = np.nonzero(np.arange(indices.shape[1]) < counts)
    column = indices[row, position]
    if int(counts.max(initial=0)) > indices.shape[1]:
        raise InvalidBlockMask(f"a row lists {counts.max()} blocks, {name} has room for {indices.shape[1]}")
    if column.size and not 0 <= int(column.min()) <= int(column.max()) < extent.kv_blocks:
        raise InvalidBlockMask(
            f"{name} lists blocks {column.min()} to {column.max()}; a kv length of {extent.kv_len} in blocks "
            f"of {extent.block_kv} has blocks 0 to {extent.kv_blocks - 1}",
            hint="pass seq_lengths and BLOCK_SIZE that agree with the lists",
        )
    return row, column, np.full(len(row), int(kind), np.int64)


def _spread(starts: Array, stops: Array) -> tuple[Array, Array]:
    """For ranges [start, stop): the number of its range, and its position, of every element."""
    counts = stops - starts
    owner = np.repeat(np.arange(len(counts)), counts)
    begins = np.cumsum(counts) - counts
    return owner, np.arange(len(owner)) - begins[owner] + starts[owner]
