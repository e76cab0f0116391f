"""Segments of tiles of one kind: packing into runs, transposing, intersecting, all by sorting their ends."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import NamedTuple

from flexc.ir.arrays import Array, Arrays, convert


class TileKind(IntEnum):
    """What a mask allows in a tile: no pair, some pairs, all pairs."""

    EMPTY = 0
    PARTIAL = 1
    FULL = 2


@dataclass(frozen=True, slots=True)
class TileGrid:
    """The tiles of a mask: lengths, block sizes, and how many batches and heads differ."""

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    batch: int
    heads: int

    @property
    def q_blocks(self) -> int:
        """Blocks of queries of one batch and head."""
        return -(-self.q_len // self.block_q)

    @property
    def kv_blocks(self) -> int:
        """Blocks of keys."""
        return -(-self.kv_len // self.block_kv)

    @property
    def rows(self) -> int:
        """Blocks of queries of all batches and heads."""
        return self.batch * self.heads * self.q_blocks

    @property
    def tiles(self) -> int:
        """Tiles of all batches and heads."""
        return self.rows * self.kv_blocks

    def transposed(self) -> TileGrid:
        """Keys as rows."""
        return TileGrid(self.kv_len, self.q_len, self.block_kv, self.block_q, self.batch, self.heads)


class Segments(NamedTuple):
    """Kv blocks `[first, end)` of a row that are of one kind, not EMPTY; 64-bit, disjoint within a row."""

    row: Array
    first: Array
    end: Array
    kind: Array

    def take(self, index: Array) -> Segments:
        """The segments at `index`."""
        return Segments(*(column[index] for column in self))


class Packed(NamedTuple):
    """Runs in compressed form: int32 `offsets` [rows + 1] and `runs` [n, 3], see `BlockMap`."""

    offsets: Array
    runs: Array


def joined(arrays: Arrays, parts: list[Segments]) -> Segments:
    """All segments of the parts."""
    return Segments(*(arrays.concat([part[i] for part in parts]) for i in range(4)))


def pack(grid: TileGrid, arrays: Arrays, segments: Segments) -> Packed:
    """The runs of segments in any order: sorted by row and place, neighbours of one kind joined.

    The tile that hangs over the end of the keys is cut off FULL segments and becomes PARTIAL.
    """
    return _compressed(grid, arrays, merged(grid, arrays, _demote_overhang(grid, arrays, segments)))


def merged(grid: TileGrid, arrays: Arrays, segments: Segments) -> Segments:
    """The segments sorted by row and place, with neighbours of one kind joined."""
    segments = segments.take(arrays.order(segments.row * (grid.kv_blocks + 1) + segments.first))
    row, first, end, kind = segments
    touches = (row[1:] == row[:-1]) & (first[1:] == end[:-1]) & (kind[1:] == kind[:-1])
    edge = arrays.zeros((min(1, len(row)),), touches.dtype)
    starts = arrays.positions(~arrays.concat([edge, touches]))
    stops = arrays.positions(~arrays.concat([touches, edge]))
    return Segments(row[starts], first[starts], end[stops], kind[starts])


def _compressed(grid: TileGrid, arrays: Arrays, runs: Segments) -> Packed:
    """Sorted and joined segments as runs."""
    xp = arrays.xp
    ends = arrays.running_sum(arrays.counts(runs.row, grid.rows))
    offsets = arrays.concat([arrays.asarray([0]), ends])
    columns = xp.stack((runs.first, runs.end, runs.kind), 1)
    return Packed(convert(xp, offsets, xp.int32), convert(xp, columns, xp.int32))


def unpack(grid: TileGrid, arrays: Arrays, packed: Packed) -> Segments:
    """The runs as segments, row by row."""
    xp = arrays.xp
    row = arrays.repeat(arrays.arange(grid.rows), packed.offsets[1:] - packed.offsets[:-1])
    return Segments(row, *(convert(xp, packed.runs[:, i], xp.int64) for i in range(3)))


def _demote_overhang(grid: TileGrid, arrays: Arrays, segments: Segments) -> Segments:
    whole = grid.kv_len // grid.block_kv
    full = segments.kind == TileKind.FULL
    hanging = arrays.positions(full & (segments.end > whole))
    if not len(hanging):
        return segments
    row, first, end, kind = segments
    cut = Segments(row, first, arrays.xp.where(full, end.clip(None, whole), end), kind)
    cut = cut.take(arrays.positions(cut.first < cut.end))
    last = first[hanging] * 0 + whole
    return joined(arrays, [cut, Segments(row[hanging], last, last + 1, last * 0 + int(TileKind.PARTIAL))])


class _Overlay(NamedTuple):
    """Common segments of two sets of segments, with the kind in each set."""

    row: Array
    first: Array
    end: Array
    one: Array
    two: Array


def _overlay(arrays: Arrays, width: int, one: Segments, two: Segments) -> _Overlay:
    """Two sets of segments within `[0, width]` cut at each other's ends.

    Sorts all ends by row and place; the running sums of what starts and stops are the kinds from there on.
    """
    stride = width + 1
    place = arrays.concat([s.row * stride + at for s in (one, two) for at in (s.first, s.end)])
    changes = (
        arrays.concat([one.kind, -one.kind, two.kind * 0, two.kind * 0]),
        arrays.concat([one.kind * 0, one.kind * 0, two.kind, -two.kind]),
    )
    order = arrays.order(place)
    place = place[order]
    kinds = [arrays.running_sum(change[order])[:-1] for change in changes]
    keep = arrays.positions((place[1:] > place[:-1]) & ((kinds[0] != 0) | (kinds[1] != 0)))
    start, stop = place[keep], place[keep + 1]
    first = start % stride
    return _Overlay(start // stride, first, first + stop - start, kinds[0][keep], kinds[1][keep])


def intersection(grid: TileGrid, arrays: Arrays, one: Segments, two: Segments) -> Packed:
    """The runs of the lesser kind of each tile."""
    both = _overlay(arrays, grid.kv_blocks, one, two)
    lesser = Segments(both.row, both.first, both.end, arrays.xp.minimum(both.one, both.two))
    return pack(grid, arrays, lesser.take(arrays.positions(lesser.kind > 0)))


def transposition(grid: TileGrid, arrays: Arrays, segments: Segments) -> Packed:
    """The runs over query blocks of each block of keys, of the grid `grid.transposed()`.

    A run of a column starts or stops where a row differs from the one before it, so the work is that of the
    result, not of the tiles. Tiles over the end of the keys are the last row here; they stay as they are.
    """
    height = grid.q_blocks + 1  # row r of the overlay compares query block r - 1 with query block r
    row = segments.row + segments.row // max(1, grid.q_blocks)
    here, before = segments._replace(row=row), segments._replace(row=row + 1)
    change = _overlay(arrays, grid.kv_blocks, before, here)
    change = _Overlay(*(column[arrays.positions(change.one != change.two)] for column in change))
    lengths = change.end - change.first
    stops = arrays.running_sum(lengths)
    total = int(stops[-1]) if len(stops) else 0
    column = arrays.repeat(change.first - stops + lengths, lengths) + arrays.arange(total)
    q_block, kind = arrays.repeat(change.row % height, lengths), arrays.repeat(change.two, lengths)
    new_row = arrays.repeat(change.row // height, lengths) * grid.kv_blocks + column
    order = arrays.order(new_row * height + q_block)
    new_row, q_block, kind = new_row[order], q_block[order], kind[order]
    opens = arrays.positions(
        kind > 0
    )  # lasts to the next change of the column, of which the last is to EMPTY
    runs = Segments(new_row[opens], q_block[opens], q_block[opens + 1], kind[opens])
    return _compressed(grid.transposed(), arrays, runs)
