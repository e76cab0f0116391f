"""A block map seen from afar: how many tiles of each kind lie in each cell of a coarser grid."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from flexc.ir.arrays import Array
from flexc.ir.blockmap import BlockMap
from flexc.ir.runs import TileKind


@dataclass(frozen=True, slots=True, eq=False)
class Overview:
    """Cells of `row_step` x `column_step` tiles, fewer at the lower and right edges; int64 [rows, columns].

    `tiles` counts all tiles of a cell, `partial` and `full` those of the kind.
    """

    row_step: int
    column_step: int
    tiles: Array
    partial: Array
    full: Array


def overview(block_map: BlockMap, rows: int, columns: int, *, b: int = 0, h: int = 0) -> Overview:
    """One batch and head of a map in at most `rows` x `columns` cells; a number below 1: a cell a tile.

    Costs by the number of runs and cells, never by that of tiles.
    """
    one = block_map.select([b], [h])
    row, first, end, kind = (np.asarray(column) for column in one.segments())
    row_step, column_step = _step(one.q_blocks, rows), _step(one.kv_blocks, columns)
    heights, widths = _extents(one.q_blocks, row_step), _extents(one.kv_blocks, column_step)
    counts = {}
    for which in (TileKind.PARTIAL, TileKind.FULL):
        of_kind = kind == which
        counts[which] = _covered(
            row[of_kind] // row_step, first[of_kind], end[of_kind], (len(heights), len(widths)), column_step
        )
    return Overview(
        row_step,
        column_step,
        heights[:, None] * widths[None, :],
        counts[TileKind.PARTIAL],
        counts[TileKind.FULL],
    )


def _step(blocks: int, cells: int) -> int:
    return max(1, -(-blocks // cells)) if cells > 0 else 1


def _extents(blocks: int, step: int) -> Array:
    """How many blocks each cell has."""
    edges = np.minimum(np.arange(-(-blocks // step) + 1) * step, blocks)
    return np.diff(edges)


def _covered(row: Array, first: Array, end: Array, shape: tuple[int, int], step: int) -> Array:
    """How many tiles of the segments `[first, end)` of cell rows `row` lie in each cell."""
    height, width = shape
    low, high = first // step, (end - 1) // step
    slope = np.zeros((height, width + 1), np.int64)  # whole cells, as steps up and down
    np.add.at(slope, (row, low), step)
    np.add.at(slope, (row, high + 1), -step)
    covered = np.cumsum(slope, 1)[:, :width]
    np.subtract.at(covered, (row, low), first - low * step)
    np.subtract.at(covered, (row, high), (high + 1) * step - end)
    return covered
