"""Decide the tiles of a mask: big ones by intervals, undecided ones by smaller ones, the rest by evaluation.

The dense mask never exists. The work follows the number of undecided tiles at each scale, and memory is
bounded: tiles are worked on in chunks, depth first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from flexc.ir.arrays import Array, Arrays, convert
from flexc.ir.evaluate import Env, evaluate
from flexc.ir.expr import Expr
from flexc.ir.interval import IntervalEnv, bounds, live_nodes
from flexc.ir.interval_types import Bounds
from flexc.ir.ops import Input
from flexc.ir.range_tables import RangeTables
from flexc.ir.runs import Segments, TileGrid, TileKind, joined

_FACTOR = 4  # a tile is cut into 4 x 4
_COARSEST = 2**16  # about as many tiles as are decided in a millisecond
_LARGEST_CHUNK = 2**18
_PAIRS_IN_CACHE = 2**18
_BYTES_A_PAIR = 32  # a few live 4-byte and 1-byte arrays


class _Tiles(NamedTuple):
    """Tiles of `scale` x `scale` blocks: which batch and head, place in units of the scale; broadcastable."""

    grid: Array
    q: Array
    kv: Array


@dataclass(frozen=True, slots=True)
class Decisions:
    """Tiles that are not empty, as segments, and how many tiles each step decided."""

    segments: Segments
    decided: dict[str, int]


def classify(mask: Expr, values: Sequence[Array], grid: TileGrid, arrays: Arrays, budget: int) -> Decisions:
    """Every tile of `grid` for a bound bool expression; `budget` is bytes of temporary memory."""
    work = _Work(mask, values, grid, arrays, budget, RangeTables(values, arrays.xp))
    found: list[Segments] = []
    counts = {"interval": 0, "sample": 0, "exact": 0}
    pending = list(work.coarse_tiles()) if grid.tiles else []
    while pending:
        scale, tiles = pending.pop()
        full, unknown = work.by_interval(scale, tiles)
        found.append(work.segments(scale, full, TileKind.FULL))
        if scale > 1:
            pending.extend(work.cut(scale, unknown))
            continue
        partial, unknown = work.by_samples(unknown)
        counts["sample"] += len(partial.q)
        counts["exact"] += len(unknown.q)
        found.append(work.segments(1, partial, TileKind.PARTIAL))
        for tiles, kind in work.by_evaluation(unknown):
            found.append(work.segments(1, tiles, kind))
    counts["interval"] = grid.tiles - counts["sample"] - counts["exact"]
    return Decisions(joined(arrays, found), counts)


@dataclass(frozen=True, slots=True, eq=False)
class _Work:
    mask: Expr
    values: Sequence[Array]
    grid: TileGrid
    arrays: Arrays
    budget: int
    load_bounds: RangeTables

    def _chunk(self) -> int:
        """Tiles to bound at once."""
        return max(_FACTOR**4, min(self.budget // (16 * live_nodes(self.mask)), _LARGEST_CHUNK))

    def coarse_tiles(self) -> Iterator[tuple[int, _Tiles]]:
        """The whole grid at a scale that gives few tiles, as broadcasting coordinates."""
        grid, arrays = self.grid, self.arrays
        grids, scale = grid.batch * grid.heads, 1
        while True:
            height, width = -(-grid.q_blocks // scale), -(-grid.kv_blocks // scale)
            if grids * height * width <= _COARSEST or height * width == 1:
                break
            scale *= _FACTOR
        q, kv = arrays.arange(height)[None, :, None], arrays.arange(width)[None, None, :]
        step = max(1, self._chunk() // (height * width))
        for start in range(0, grids, step):
            which = arrays.arange(min(step, grids - start)) + start
            yield scale, _Tiles(which[:, None, None], q, kv)

    def by_interval(self, scale: int, tiles: _Tiles) -> tuple[_Tiles, _Tiles]:
        """The tiles that are surely full, and those that are neither that nor surely empty."""
        xp, grid = self.arrays.xp, self.grid
        q = tiles.q * (scale * grid.block_q)
        kv = tiles.kv * (scale * grid.block_kv)
        b, h = self._batch_and_head(tiles)
        inputs = {
            Input.B: Bounds(b, b),
            Input.H: Bounds(h, h),
            Input.Q_IDX: Bounds(q, (q + (scale * grid.block_q - 1)).clip(None, grid.q_len - 1)),
            Input.KV_IDX: Bounds(kv, (kv + (scale * grid.block_kv - 1)).clip(None, grid.kv_len - 1)),
        }
        surely, possibly = bounds(self.mask, IntervalEnv(inputs, self.values, self.load_bounds, xp))
        shape = (tiles.grid + tiles.q + tiles.kv).shape
        full = self.arrays.positions(xp.broadcast_to(surely, shape))
        unknown = self.arrays.positions(xp.broadcast_to(possibly & ~surely, shape))
        listed = _Tiles(*(xp.broadcast_to(x, shape).reshape(-1) for x in tiles))
        return _take(listed, full), _take(listed, unknown)

    def _batch_and_head(self, tiles: _Tiles) -> tuple[Array, Array]:
        return tiles.grid // self.grid.heads, tiles.grid % self.grid.heads

    def cut(self, scale: int, tiles: _Tiles) -> Iterator[tuple[int, _Tiles]]:
        """The tiles cut into smaller ones, in chunks; those outside the grid left out."""
        smaller = scale // _FACTOR
        height, width = -(-self.grid.q_blocks // smaller), -(-self.grid.kv_blocks // smaller)
        inner = self.arrays.arange(_FACTOR * _FACTOR)
        for part in _parts(tiles, self._chunk() // _FACTOR**2):
            q = (part.q[:, None] * _FACTOR + inner[None, :] // _FACTOR).reshape(-1)
            kv = (part.kv[:, None] * _FACTOR + inner[None, :] % _FACTOR).reshape(-1)
            grid = self.arrays.repeat(part.grid, _FACTOR * _FACTOR)
            yield smaller, _take(_Tiles(grid, q, kv), self.arrays.positions((q < height) & (kv < width)))

    def segments(self, scale: int, tiles: _Tiles, kind: TileKind) -> Segments:
        """The tiles as one segment for each block of queries that they span."""
        grid = self.grid
        inner = self.arrays.arange(scale)[None, :]
        block = (tiles.q[:, None] * scale + inner).reshape(-1)
        row = (tiles.grid[:, None] * grid.q_blocks + inner * 0).reshape(-1) + block
        first = (tiles.kv[:, None] * scale + inner * 0).reshape(-1)
        end = (first + scale).clip(None, grid.kv_blocks)
        segments = Segments(row, first, end, first * 0 + int(kind))
        return segments if scale == 1 else segments.take(self.arrays.positions(block < grid.q_blocks))

    def by_samples(self, tiles: _Tiles) -> tuple[_Tiles, _Tiles]:
        """The tiles in which the mask is seen true and false, and the others: corners first, then more."""
        partial = []
        for rows, columns in zip(_samples(self.grid.block_q), _samples(self.grid.block_kv), strict=True):
            seen, everywhere = self._evaluated(tiles, rows, columns)
            mixed = seen & ~everywhere
            partial.append(_take(tiles, self.arrays.positions(mixed)))
            tiles = _take(tiles, self.arrays.positions(~mixed))
        return _Tiles(*(self.arrays.concat([p[i] for p in partial]) for i in range(3))), tiles

    def by_evaluation(self, tiles: _Tiles) -> list[tuple[_Tiles, TileKind]]:
        """The tiles that are not empty, decided by every pair."""
        rows, columns = range(self.grid.block_q), range(self.grid.block_kv)
        seen, everywhere = self._evaluated(tiles, rows, columns)
        return [
            (_take(tiles, self.arrays.positions(everywhere)), TileKind.FULL),
            (_take(tiles, self.arrays.positions(seen & ~everywhere)), TileKind.PARTIAL),
        ]

    def _evaluated(self, tiles: _Tiles, rows: Sequence[int], columns: Sequence[int]) -> tuple[Array, Array]:
        """Whether the mask is true for some, and for all, of the given rows and columns of each tile.

        Places past a length stand for the last one, which is in the same tile, so that they change neither
        answer.
        """
        pairs = min(self.budget // _BYTES_A_PAIR, _PAIRS_IN_CACHE)
        inner_q, inner_kv = self.arrays.asarray(rows), self.arrays.asarray(columns)
        some, every = [], []
        for part in _parts(tiles, pairs // (len(rows) * len(columns))):
            value = self._mask_values(part, inner_q, inner_kv)
            some.append(value.any(1))
            every.append(value.all(1))
        if not some:
            none = tiles.q != tiles.q
            return none, none
        return self.arrays.concat(some), self.arrays.concat(every)

    def _mask_values(self, tiles: _Tiles, rows: Array, columns: Array) -> Array:
        """The mask [tiles, rows * columns] (1 where it reads neither)."""
        xp, grid = self.arrays.xp, self.grid
        q = (tiles.q[:, None] * grid.block_q + rows[None, :]).clip(None, grid.q_len - 1)
        kv = (tiles.kv[:, None] * grid.block_kv + columns[None, :]).clip(None, grid.kv_len - 1)
        b, h = self._batch_and_head(tiles)
        inputs = {
            Input.B: convert(xp, b, xp.int32)[:, None, None],
            Input.H: convert(xp, h, xp.int32)[:, None, None],
            Input.Q_IDX: convert(xp, q, xp.int32)[:, :, None],
            Input.KV_IDX: convert(xp, kv, xp.int32)[:, None, :],
        }
        value = evaluate(self.mask, Env(inputs, self.values, xp, xp.float32))
        count = len(tiles.q)
        if value.ndim == 0:
            return xp.broadcast_to(value, (count, 1))
        return xp.broadcast_to(value, (count, *value.shape[1:])).reshape(count, -1)


def _samples(block: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Places within a block to look at: the ends, then neighbours and odd fractions."""
    inner = {0, 1, block // 3, block // 2 + 1, 3 * block // 4, block - 2, block - 1}
    return (0, block - 1), tuple(sorted(place for place in inner if 0 <= place < block))


def _take(tiles: _Tiles, index: Array) -> _Tiles:
    return _Tiles(*(column[index] for column in tiles))


def _parts(tiles: _Tiles, size: int) -> Iterator[_Tiles]:
    """The tiles in lists of at most `size` (at least one)."""
    size = max(1, size)
    for start in range(0, len(tiles.q), size):
        yield _Tiles(*(column[start : start + size] for column in tiles))
