"""The runs of a block map as a kernel walks them: without a stop where only the kind of tiles changes."""

from __future__ import annotations

import numpy as np

from flexc.ir.arrays import Array
from flexc.ir.blockmap import BlockMap, TileKind
from flexc.ir.runs import TileGrid


def stretches(block_map: BlockMap) -> tuple[np.ndarray, np.ndarray]:
    """Offsets and stretches of a map, in compressed form by row as its runs are.

    A stretch is neighbouring tiles that are not empty, with the FULL ones in one piece:
    `(first, full_first, full_end, end)`, int32, in kv blocks. Those outside `[full_first, full_end)` are
    PARTIAL. Partial, full and partial runs side by side, as a sliding window has, are one stretch.
    """
    offsets = np.asarray(block_map.offsets, np.int64)
    runs = np.asarray(block_map.runs, np.int64).reshape(-1, 3)
    if len(runs) == 0:
        return offsets.astype(np.int32), np.zeros((0, 4), np.int32)
    first, end, kind = runs.T
    is_full = kind == TileKind.FULL
    row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
    linked = np.zeros(len(runs), bool)  # to the run before
    linked[1:] = (row[1:] == row[:-1]) & (first[1:] == end[:-1])
    position = np.arange(len(runs))
    position -= np.maximum.accumulate(np.where(linked, 0, position))
    # Linked runs alternate between the kinds: a third may end a stretch, a further full one begins anew.
    begins = ~linked | (is_full & (position >= 2))
    heads = np.flatnonzero(begins)
    tails = np.append(heads[1:], len(runs)) - 1
    full_first, full_end = end[tails].copy(), end[tails].copy()
    owner = np.cumsum(begins) - 1
    full_first[owner[is_full]] = first[is_full]
    full_end[owner[is_full]] = end[is_full]
    joined = np.stack([first[heads], full_first, full_end, end[tails]], axis=1)
    counts = np.bincount(row[heads], minlength=len(offsets) - 1)
    return np.concatenate([[0], np.cumsum(counts)]).astype(np.int32), joined.astype(np.int32)


def from_stretches(grid: TileGrid, offsets: Array, walk: Array) -> BlockMap:
    """The map whose stretches these are: the opposite of `stretches`."""
    row = np.repeat(np.arange(grid.rows), np.diff(offsets.astype(np.int64)))
    ends = walk.astype(np.int64).reshape(-1, 4)
    kinds = (TileKind.PARTIAL, TileKind.FULL, TileKind.PARTIAL)
    parts = [
        np.stack([row, ends[:, i], ends[:, i + 1], np.full(len(row), int(kind))], 1)
        for i, kind in enumerate(kinds)
    ]
    runs = np.concatenate(parts)
    runs = runs[runs[:, 1] < runs[:, 2]]
    runs = runs[np.lexsort((runs[:, 1], runs[:, 0]))]
    counts = np.bincount(runs[:, 0], minlength=grid.rows)
    return BlockMap.on(
        grid,
        np.concatenate([[0], np.cumsum(counts)]).astype(np.int32),
        runs[:, 1:].astype(np.int32),
    )
