"""The run-length map of a mask's tiles: which are empty, partly allowed, or wholly allowed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from flexc.errors import InternalError
from flexc.ir.arrays import Array, Arrays, Namespace, arrays_of, convert
from flexc.ir.bind import bind
from flexc.ir.classify import classify
from flexc.ir.expr import Expr, inputs_of
from flexc.ir.ledger import DEFAULT_BUDGET
from flexc.ir.ops import Input
from flexc.ir.runs import Packed, Segments, TileGrid, TileKind, intersection, pack, transposition, unpack

__all__ = ["BlockMap", "TileKind", "build_block_map", "from_kinds", "from_segments"]

_WORKSPACE = 64 * 2**20


@dataclass(frozen=True, slots=True, weakref_slot=True, eq=False)
class BlockMap:
    """Runs of tiles of one kind, row by row, in compressed form.

    A row is a block of queries of one batch and head: `(b * heads + h) * q_blocks + q_block`, where `batch`
    and `heads` are 1 if the mask does not read them. Row `r` has the runs `runs[offsets[r]:offsets[r + 1]]`,
    each `(first kv block, end kv block, kind)` with kind PARTIAL or FULL, by ascending first block.
    Neighbours of one kind are one run; what no run covers is EMPTY.

    A tile that hangs over `kv_len` is never FULL, so FULL tiles may be loaded without bounds checks. Queries
    past `q_len` count for nothing.

    `decided` counts the tiles that each step of building decided: "interval", "sample" (the mask was seen
    true and false), "exact" (every pair was evaluated). It is empty for maps from elsewhere.
    """

    q_len: int
    kv_len: int
    block_q: int
    block_kv: int
    batch: int
    heads: int
    offsets: Array  # int32 [batch * heads * q_blocks + 1]
    runs: Array  # int32 [n_runs, 3]
    decided: Mapping[str, int] = field(default_factory=dict)  # tiles by step

    @classmethod
    def on(
        cls, grid: TileGrid, offsets: Array, runs: Array, decided: Mapping[str, int] | None = None
    ) -> BlockMap:
        """The map of these runs over the tiles of `grid`."""
        sizes = (grid.q_len, grid.kv_len, grid.block_q, grid.block_kv, grid.batch, grid.heads)
        return cls(*sizes, offsets, runs, {} if decided is None else decided)

    @property
    def grid(self) -> TileGrid:
        """The lengths and block sizes."""
        return TileGrid(self.q_len, self.kv_len, self.block_q, self.block_kv, self.batch, self.heads)

    @property
    def q_blocks(self) -> int:
        """Blocks of queries of one batch and head."""
        return self.grid.q_blocks

    @property
    def kv_blocks(self) -> int:
        """Blocks of keys."""
        return self.grid.kv_blocks

    @property
    def rows(self) -> int:
        """Blocks of queries of all batches and heads."""
        return self.grid.rows

    def row_of_runs(self) -> Array:
        """The row of every run, 64-bit."""
        return self.segments().row

    def segments(self) -> Segments:
        """The runs as columns, with the row of each."""
        return unpack(self.grid, arrays_of(self.runs), Packed(self.offsets, self.runs))

    def counts(self) -> tuple[int, int, int]:
        """How many tiles are empty, partial and full."""
        lengths = self.runs[:, 1] - self.runs[:, 0]
        full = int(lengths[self.runs[:, 2] == int(TileKind.FULL)].sum())
        partial = int(lengths.sum()) - full
        return self.grid.tiles - partial - full, partial, full

    def sparsity(self) -> float:
        """The percentage of tiles that are empty; 0 of a map without tiles."""
        return 100.0 * self.counts()[0] / self.grid.tiles if self.grid.tiles else 0.0

    def kinds(self, b: int = 0, h: int = 0) -> Array:
        """The kinds of one batch and head as a dense uint8 array [q_blocks, kv_blocks]."""
        one, arrays = self.select([b], [h]), arrays_of(self.runs)
        row, first, end, kind = one.segments()
        change = arrays.zeros((self.q_blocks, self.kv_blocks + 1), arrays.xp.int64)
        change[row, first] += kind  # no two runs of a row start at one place, or end at one
        change[row, end] -= kind
        return convert(arrays.xp, arrays.xp.cumsum(change, 1)[:, :-1], arrays.xp.uint8)

    def select(self, batches: Sequence[int], heads: Sequence[int]) -> BlockMap:
        """The map of the given batches and heads, in that order; any number where the map has 1.

        Raises InternalError for a batch or head that the map does not have.
        """
        arrays = arrays_of(self.runs)
        picked = [
            _position(b, self.batch, "batch") * self.heads + _position(h, self.heads, "head")
            for b in batches
            for h in heads
        ]
        blocks = arrays.arange(self.q_blocks)
        rows = (arrays.asarray(picked)[:, None] * self.q_blocks + blocks[None, :]).reshape(-1)
        start = convert(arrays.xp, self.offsets, arrays.xp.int64)[rows]
        lengths = convert(arrays.xp, self.offsets, arrays.xp.int64)[rows + 1] - start
        ends = arrays.running_sum(lengths)
        total = int(ends[-1]) if len(rows) else 0
        source = arrays.repeat(start - ends + lengths, lengths) + arrays.arange(total)
        offsets = convert(arrays.xp, arrays.concat([arrays.asarray([0]), ends]), arrays.xp.int32)
        return replace(self, batch=len(batches), heads=len(heads), offsets=offsets, runs=self.runs[source])

    def expand(self, batch: int, heads: int) -> BlockMap:
        """The map with `batch` and `heads` written out, from 1 or the same number."""
        if (self.batch, self.heads) == (batch, heads):
            return self
        return self.select(range(batch), range(heads))

    def transpose(self) -> BlockMap:
        """The map with keys as rows: for each block of keys, the runs of query blocks that see it.

        Lengths and block sizes change places; the tiles that are not FULL for hanging over the keys are the
        last row here. For the backward. Costs by the number of runs of the result, not of tiles.
        """
        grid = self.grid.transposed()
        offsets, runs = transposition(self.grid, arrays_of(self.runs), self.segments())
        return BlockMap.on(grid, offsets, runs, self.decided)

    def intersect(self, other: BlockMap) -> BlockMap:
        """The lesser kind of each tile: what two masks together allow, as far as tiles tell.

        Raises InternalError unless lengths and block sizes agree, and batches and heads agree or are 1.
        """
        for name in ("q_len", "kv_len", "block_q", "block_kv"):
            if getattr(self, name) != getattr(other, name):
                raise InternalError(f"block maps of {name} {getattr(self, name)} and {getattr(other, name)}")
        batch = _common(self.batch, other.batch, "batches")
        heads = _common(self.heads, other.heads, "heads")
        one, two = self.expand(batch, heads), other.expand(batch, heads)
        packed = intersection(one.grid, arrays_of(self.runs), one.segments(), two.segments())
        return BlockMap.on(one.grid, *packed)


def _position(index: int, length: int, what: str) -> int:
    if length == 1:
        return 0
    if not -length <= index < length:
        raise InternalError(f"block map: {what} {index} of {length}")
    return index % length


def _common(one: int, two: int, what: str) -> int:
    if one != two and 1 not in (one, two):
        raise InternalError(f"block maps of {one} and {two} {what}")
    return two if one == 1 else one


def from_kinds(kinds: Array, *, q_len: int, kv_len: int, block_q: int, block_kv: int) -> BlockMap:
    """The map of dense kinds [batch, heads, q_blocks, kv_blocks], numpy or torch.

    A FULL tile that hangs over `kv_len` becomes PARTIAL. Raises InternalError when the shape does not fit.
    """
    batch, heads, *blocks = (int(n) for n in kinds.shape)
    grid = TileGrid(q_len, kv_len, block_q, block_kv, batch, heads)
    if blocks != [grid.q_blocks, grid.kv_blocks]:
        raise InternalError(f"block map: {blocks} tiles for {q_len} x {kv_len} pairs")
    arrays = arrays_of(kinds)
    place = arrays.positions(kinds != 0)
    kind = convert(arrays.xp, kinds.reshape(-1)[place], arrays.xp.int64)
    width = max(1, grid.kv_blocks)
    first = place % width
    return from_segments(grid, Segments(place // width, first, first + 1, kind))


def from_segments(grid: TileGrid, segments: Segments) -> BlockMap:
    """The map of disjoint non-empty segments in any order, int64 arrays of numpy or torch.

    Neighbours of one kind are joined; a FULL tile that hangs over `kv_len` becomes PARTIAL.
    """
    return BlockMap.on(grid, *pack(grid, arrays_of(segments.row), segments))


def build_block_map(
    mask: Expr,
    values: Sequence[Any],
    *,
    q_len: int,
    kv_len: int,
    batch: int,
    heads: int,
    block_q: int,
    block_kv: int,
    xp: Namespace = np,
    device: Any = None,
    budget: float = DEFAULT_BUDGET,
    workspace: int = _WORKSPACE,
) -> BlockMap:
    """The exact map of a bool expression, with `batch` and `heads` 1 where it does not read them.

    `values` are the captures by slot: numbers, and arrays of `xp` (on `device`, for torch). `budget` is how
    many pairs may be evaluated. `workspace` is about how many bytes of temporary memory may be held at once,
    beside captures and the result.

    Raises:
        MaskTooOpen: the budget does not suffice.
    """
    mask = bind(mask, values, q_len=q_len, kv_len=kv_len)
    reads = inputs_of(mask)
    grid = TileGrid(
        q_len, kv_len, block_q, block_kv, batch if Input.B in reads else 1, heads if Input.H in reads else 1
    )
    arrays = Arrays(xp, device)
    decisions = classify(mask, values, grid, arrays, budget=budget, workspace=workspace)
    return BlockMap.on(grid, *pack(grid, arrays, decisions.segments), decisions.decided)
