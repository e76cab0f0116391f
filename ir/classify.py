"""Decide the tiles of a mask: big ones by intervals, undecided ones by smaller ones, the rest by looking.

The dense mask never exists. The work follows the number of undecided tiles at each scale, and memory is
bounded: tiles are worked on in chunks, depth first.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from flexc.ir.arrays import Array, Arrays
from flexc.ir.boxes import BoxedMask, Tiles, parts, taken
from flexc.ir.expr import Expr
from flexc.ir.interval_types import Bounds
from flexc.ir.ledger import Ledger
from flexc.ir.open_tiles import decide
from flexc.ir.range_tables import RangeTables
from flexc.ir.runs import Segments, TileGrid, TileKind, joined, merged
from flexc.ir.tabulate import tabulate

_FACTOR = 4  # a tile is cut into 4 x 4
_COARSEST = 2**16  # about as many tiles as are decided in a millisecond
_OPEN_AT_ONCE = 2**14


@dataclass(frozen=True, slots=True)
class Decisions:
    """Tiles that are not empty, as segments, and how many tiles each step decided."""

    segments: Segments
    decided: dict[str, int]


def classify(
    mask: Expr, values: Sequence[Array], grid: TileGrid, arrays: Arrays, *, budget: float, workspace: int
) -> Decisions:
    """Every tile of `grid` for a bound bool expression.

    `budget` is how many pairs may be evaluated, `workspace` how many bytes of temporary memory are held.

    Raises:
        MaskTooOpen: the budget does not suffice.
    """
    if grid.tiles == 0:
        return Decisions(joined(arrays, []), {})
    known = tabulate(mask, values, grid, arrays)
    tables = RangeTables(known.values, arrays.xp)
    work = _Work(BoxedMask(known.mask, known.values, grid, arrays, workspace, tables), Ledger(budget))
    for scale, tiles in work.coarse_tiles():
        work.run(scale, tiles)
    return Decisions(joined(arrays, work.found), work.counts())


@dataclass(slots=True, eq=False)
class _Work:
    mask: BoxedMask
    ledger: Ledger
    found: list[Segments] = field(default_factory=list)
    sample: int = 0
    exact: int = 0

    def counts(self) -> dict[str, int]:
        """How many tiles each step decided."""
        interval = self.mask.grid.tiles - self.sample - self.exact
        return {"interval": interval, "sample": self.sample, "exact": self.exact}

    def coarse_tiles(self) -> Iterator[tuple[int, Tiles]]:
        """The whole grid at a scale that gives few tiles, as broadcasting coordinates."""
        grid, arrays = self.mask.grid, self.mask.arrays
        planes, scale = grid.batch * grid.heads, 1
        while True:
            height, width = -(-grid.q_blocks // scale), -(-grid.kv_blocks // scale)
            if planes * height * width <= _COARSEST or height * width == 1:
                break
            scale *= _FACTOR
        q, kv = arrays.arange(height)[None, :, None], arrays.arange(width)[None, None, :]
        step = max(1, self.mask.boxes_at_once // (height * width))
        for start in range(0, planes, step):
            which = arrays.arange(min(step, planes - start)) + start
            yield scale, Tiles(which[:, None, None], q, kv)

    def run(self, scale: int, tiles: Tiles) -> None:
        """Decides the tiles, and all smaller ones inside those that are open, depth first."""
        pending = self._step(scale, tiles)
        while pending:
            scale, tiles = pending.pop()
            waiting = sum(len(later.q) * size**2 for size, later in pending)
            pending += self._step(scale // _FACTOR, self._cut(scale, tiles), waiting)

    def _step(self, scale: int, tiles: Tiles, waiting: int = 0) -> list[tuple[int, Tiles]]:
        """The tiles that are still open and can be cut, in lists; `waiting` single tiles come after them."""
        full, unknown = self._by_interval(scale, tiles)
        self._keep(scale, full, TileKind.FULL)
        if scale > 1:
            return [(scale, part) for part in parts(unknown, self.mask.boxes_at_once // _FACTOR**2)]
        waiting += len(unknown.q)
        for part in parts(unknown, _OPEN_AT_ONCE):
            decided = decide(self.mask, part, self.ledger)
            self.sample += decided.sample
            self.exact += decided.exact
            self._keep(1, decided.full, TileKind.FULL)
            self._keep(1, decided.partial, TileKind.PARTIAL)
            self.ledger.tiles += len(part.q)
            waiting -= len(part.q)
            self.ledger.check(waiting, self.mask.grid.block_q * self.mask.grid.block_kv)
        return []

    def _by_interval(self, scale: int, tiles: Tiles) -> tuple[Tiles, Tiles]:
        """The tiles that are surely full, and those that are neither that nor surely empty."""
        xp, grid, arrays = self.mask.arrays.xp, self.mask.grid, self.mask.arrays
        q = tiles.q * (scale * grid.block_q)
        kv = tiles.kv * (scale * grid.block_kv)
        surely, possibly = self.mask.bounds(
            tiles.plane,
            Bounds(q, (q + (scale * grid.block_q - 1)).clip(None, grid.q_len - 1)),
            Bounds(kv, (kv + (scale * grid.block_kv - 1)).clip(None, grid.kv_len - 1)),
        )
        shape = (tiles.plane + tiles.q + tiles.kv).shape
        full = arrays.positions(xp.broadcast_to(surely, shape))
        unknown = arrays.positions(xp.broadcast_to(possibly & ~surely, shape))
        listed = Tiles(*(xp.broadcast_to(x, shape).reshape(-1) for x in tiles))
        return taken(listed, full), taken(listed, unknown)

    def _cut(self, scale: int, tiles: Tiles) -> Tiles:
        """The tiles cut into smaller ones; those outside the grid left out."""
        grid, arrays = self.mask.grid, self.mask.arrays
        smaller = scale // _FACTOR
        height, width = -(-grid.q_blocks // smaller), -(-grid.kv_blocks // smaller)
        inner = arrays.arange(_FACTOR * _FACTOR)
        q = (tiles.q[:, None] * _FACTOR + inner[None, :] // _FACTOR).reshape(-1)
        kv = (tiles.kv[:, None] * _FACTOR + inner[None, :] % _FACTOR).reshape(-1)
        plane = arrays.repeat(tiles.plane, _FACTOR * _FACTOR)
        return taken(Tiles(plane, q, kv), arrays.positions((q < height) & (kv < width)))

    def _keep(self, scale: int, tiles: Tiles, kind: TileKind) -> None:
        """Notes the tiles as one segment for each block of queries that they span."""
        if not len(tiles.q):
            return
        grid, arrays = self.mask.grid, self.mask.arrays
        inner = arrays.arange(scale)[None, :]
        block = (tiles.q[:, None] * scale + inner).reshape(-1)
        row = (tiles.plane[:, None] * grid.q_blocks + inner * 0).reshape(-1) + block
        first = (tiles.kv[:, None] * scale + inner * 0).reshape(-1)
        end = (first + scale).clip(None, grid.kv_blocks)
        segments = Segments(row, first, end, first * 0 + int(kind))
        if scale > 1:
            segments = segments.take(arrays.positions(block < grid.q_blocks))
        segments = merged(grid, arrays, segments)
        self.found.append(segments)
        self.ledger.runs += len(segments.row)
